"""Rows in packing order, from documents or from packed files, and how they are dealt to the lanes.

Cost: under 1 µs a piece, one hash a row, and one copy of the rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ingest.documents import Documents
from ingest.packed import PackedRows
from ingest.packing import Packing
from ingest.plan import row_order
from ingest.slab import IntArray, Prefix, Rows, row_digests
from ingest.spec import WindowSettings, WindowSpec


@dataclass(frozen=True, eq=False)
class Filled:
    """Rows in packing order, with what is counted of each.

    Args:
        rows: R rows.
        tokens_RK: int64 [R, K], input tokens of each source.
        documents_R: int64 [R], documents that begin in the row.
        cut_R: int64 [R], those of them that go on in another row: 1, the row's last, or 0.
        document_L: int64 [L], as ``Window.piece_document_L``, in the order of these rows.
    """

    rows: Rows
    tokens_RK: IntArray
    documents_R: IntArray
    cut_R: IntArray
    document_L: IntArray


def fill(spec: WindowSpec, settings: WindowSettings, documents: Documents, order: IntArray, packing: Packing) -> Filled:
    """Gathers the tokens of each piece into its row."""
    counts_R, num_rows, width = packing.counts_R, len(packing.counts_R), settings.sequence_length + 1
    document_L = order[packing.document_L]
    begins_D = np.cumsum(documents.lengths_D) - documents.lengths_D
    source_L = begins_D[document_L] + packing.start_L
    before_L = np.cumsum(packing.length_L) - packing.length_L
    first_L = np.repeat(np.cumsum(counts_R) - counts_R, counts_R)
    target_L = np.repeat(np.arange(num_rows) * width, counts_R) + before_L - before_L[first_L]
    tokens = np.full(num_rows * width, settings.eos_id, settings.token_dtype)
    for target, source, length in zip(target_L.tolist(), source_L.tolist(), packing.length_L.tolist(), strict=True):
        tokens[target : target + length] = documents.tokens[source : source + length]

    source_of_unit = np.array([unit.source for unit in spec.units], np.int64)
    is_source_LK = source_of_unit[documents.unit_D[document_L]][:, None] == np.arange(len(settings.columns))
    tokens_L = packing.length_L - packing.lookahead_L
    start_L = packing.start_L if settings.position_ids == "continue" else packing.start_L[:0]
    pieces = (array.astype(np.int32) for array in (packing.length_L, counts_R, start_L))
    return Filled(
        Rows(tokens.reshape(num_rows, width), *pieces),
        _row_sums(tokens_L[:, None] * is_source_LK, counts_R),
        _row_sums(packing.start_L == 0, counts_R),
        _row_sums((packing.start_L == 0) & (packing.lookahead_L == 1), counts_R),
        document_L,
    )


def _row_sums(values_L: npt.NDArray[Any], counts_R: IntArray) -> IntArray:
    """Sums over the pieces of each row: [L, ...] -> int64 [R, ...]."""
    total = np.concatenate((np.zeros((1, *values_L.shape[1:]), np.int64), np.cumsum(values_L, axis=0, dtype=np.int64)))
    ends = np.cumsum(counts_R)
    sums: IntArray = total[ends] - total[ends - counts_R]
    return sums


def take(packed: PackedRows, settings: WindowSettings, source: int, first_document: int) -> Filled:
    """Rows that were packed before, where they lie.

    A row whose pieces hold more tokens than it has inputs looks ahead with its last piece. In such a row only the first
    piece can go on from another row, so if any document begins in it, the last one does.
    """
    tokens_RK = np.zeros((len(packed.rows), len(settings.columns)), np.int64)
    tokens_RK[:, source] = packed.input_tokens_B
    documents_R = packed.documents_B.astype(np.int64)
    counts_R = packed.rows.counts_B.astype(np.int64)
    looks_ahead_R = _row_sums(packed.rows.lengths_L, counts_R) > packed.input_tokens_B
    address_R = first_document + np.arange(len(packed.rows))
    return Filled(
        packed.rows,
        tokens_RK,
        documents_R,
        (looks_ahead_R & (documents_R > 0)).astype(np.int64),
        np.repeat(address_R, counts_R),
    )


def deal(filled: list[Filled], settings: WindowSettings, window: int, skipped: int) -> tuple[Rows, Prefix, IntArray]:
    """Fills up to a multiple of the lanes, permutes the rows, and lays them lane by lane.

    Args:
        filled: all rows of the window.
        settings: the lanes, and whether and how to shuffle.
        window: its ordinal.
        skipped: its documents without text.

    Returns:
        The rows lane by lane, their prefix sums, and ``document_L`` in their order.
    """
    lanes, width, num_sources = settings.lanes, settings.sequence_length + 1, len(settings.columns)
    missing = -sum(len(part.rows) for part in filled) % lanes
    nothing, none_R = np.zeros(0, np.int64), np.zeros(missing, np.int64)
    padding = Rows.padding(missing, width, settings.token_dtype, settings.eos_id)
    filled = [*filled, Filled(padding, np.zeros((missing, num_sources), np.int64), none_R, none_R, nothing)]
    ends = np.cumsum([len(part.rows) for part in filled])
    num_rows, lane_rows = int(ends[-1]), int(ends[-1]) // lanes

    shuffled = row_order(num_rows, settings.seed, window) if settings.shuffle else np.arange(num_rows)
    index_R = np.empty(num_rows, np.int64)
    index_R[shuffled] = np.arange(num_rows)  # packed row -> g
    slot_R = index_R % lanes * lane_rows + index_R // lanes  # packed row -> place when rows lie lane by lane
    tokens = np.empty((num_rows, width), settings.token_dtype)
    for part, slots in zip(filled, np.split(slot_R, ends[:-1]), strict=True):
        tokens[slots] = part.rows.tokens_BX

    def by_slot(values_R: list[npt.NDArray[Any]]) -> npt.NDArray[Any]:
        joined = np.concatenate(values_R)
        out = np.empty_like(joined)
        out[slot_R] = joined
        return out

    counts_R = np.concatenate([part.rows.counts_B for part in filled])
    by_slot_L = np.argsort(np.repeat(slot_R, counts_R), kind="stable")
    lengths_L = np.concatenate([part.rows.lengths_L for part in filled])[by_slot_L]
    starts_L = np.concatenate([part.rows.starts_L for part in filled])
    document_L = np.concatenate([part.document_L for part in filled])[by_slot_L]
    rows = Rows(tokens, lengths_L, by_slot([counts_R]), starts_L[by_slot_L] if len(starts_L) else starts_L)
    in_order = Filled(
        rows,
        by_slot([part.tokens_RK for part in filled]),
        by_slot([part.documents_R for part in filled]),
        by_slot([part.cut_R for part in filled]),
        document_L,
    )
    return rows, _prefix(settings, window, in_order, skipped), document_L


def _prefix(settings: WindowSettings, window: int, filled: Filled, skipped: int) -> Prefix:
    """Prefix sums by lane offset over rows that lie lane by lane."""
    rows = filled.rows
    lanes, lane_rows = settings.lanes, len(rows) // settings.lanes

    def sums(values_R: npt.NDArray[Any], dtype: npt.DTypeLike = np.int64) -> npt.NDArray[Any]:
        """[R, ...] -> [N + 1, ...]."""
        by_offset = values_R.reshape(lanes, lane_rows, *values_R.shape[1:]).sum(axis=0, dtype=dtype)
        return np.concatenate(
            (np.zeros_like(by_offset, shape=(1, *by_offset.shape[1:])), by_offset.cumsum(axis=0, dtype=dtype))
        )

    slot_R = np.arange(len(rows))
    index_R = slot_R % max(lane_rows, 1) * lanes + slot_R // max(lane_rows, 1)
    return Prefix(
        tokens_O=sums(filled.tokens_RK.sum(axis=1)),
        documents_O=sums(filled.documents_R),
        documents_cut_O=sums(filled.cut_R),
        source_tokens_OK=sums(filled.tokens_RK),
        digest_O=sums(row_digests(rows, np.full(len(rows), window), index_R), np.uint64),
        skipped=skipped,
    )
