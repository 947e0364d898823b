"""Rows in packing order, from documents or from packed files, and how they are dealt to the lanes.

Cost: under 1 µs a piece, one hash a row, and one copy of the rows; two copies above 64 MiB of tokens, where memory
stays at about one time the tokens instead of two.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ingest.documents import Documents
from ingest.packed import PackedRows
from ingest.packing import Packing
from ingest.plan import row_order
from ingest.slab import IntArray, Prefix, Rows, TokenArray, row_digests
from ingest.spec import WindowSettings, WindowSpec

STAGED_BYTES = 64 << 20  # tokens from which on they are moved in two strides
_STRIDES = 16


@dataclass(frozen=True, eq=False)
class Filled:
    """Rows in packing order, with what is counted of each.

    Args:
        write: called once with all rows of the window, uint16 or uint32 [*, T + 1], and int64 [R], the place of each of
            these among them.
        lengths_L: int32 [L], as ``Rows.lengths_L``.
        counts_R: int32 [R], as ``Rows.counts_B``.
        starts_L: int32 [L] or [0], as ``Rows.starts_L``.
        tokens_RK: int64 [R, K], input tokens of each source.
        documents_R: int64 [R], documents that begin in the row.
        cut_R: int64 [R], those of them that go on in another row: 1, the row's last, or 0.
        document_L: int64 [L], as ``Window.piece_document_L``, in the order of these rows.
    """

    write: Callable[[TokenArray, IntArray], None]
    lengths_L: npt.NDArray[np.int32]
    counts_R: npt.NDArray[np.int32]
    starts_L: npt.NDArray[np.int32]
    tokens_RK: IntArray
    documents_R: IntArray
    cut_R: IntArray
    document_L: IntArray


def fill(spec: WindowSpec, settings: WindowSettings, documents: Documents, order: IntArray, packing: Packing) -> Filled:
    """Rows of documents; ``write`` uses ``documents.tokens`` up."""
    counts_R = packing.counts_R
    document_L = order[packing.document_L]
    begins_D = np.cumsum(documents.lengths_D) - documents.lengths_D
    source_L, length_L, tokens = begins_D[document_L] + packing.start_L, packing.length_L, documents.tokens

    def write(tokens_RX: TokenArray, slot_R: IntArray) -> None:
        width, flat = tokens_RX.shape[1], tokens_RX.reshape(-1)
        before_L = np.cumsum(length_L) - length_L
        first_L = np.repeat(np.cumsum(counts_R) - counts_R, counts_R)
        target_L = np.repeat(slot_R * width, counts_R) + before_L - before_L[first_L]
        move(tokens, source_L, flat, target_L, length_L)
        filled_R = slot_R * width + _row_sums(length_L, counts_R)
        for begin, end in zip(filled_R.tolist(), ((slot_R + 1) * width).tolist(), strict=True):
            flat[begin:end] = settings.eos_id

    source_of_unit = np.array([unit.source for unit in spec.units], np.int64)
    is_source_LK = source_of_unit[documents.unit_D[document_L]][:, None] == np.arange(len(settings.columns))
    tokens_L = packing.length_L - packing.lookahead_L
    start_L = packing.start_L if settings.position_ids == "continue" else packing.start_L[:0]
    return Filled(
        write,
        packing.length_L.astype(np.int32),
        counts_R.astype(np.int32),
        start_L.astype(np.int32),
        _row_sums(tokens_L[:, None] * is_source_LK, counts_R),
        _row_sums(packing.start_L == 0, counts_R),
        _row_sums((packing.start_L == 0) & (packing.lookahead_L == 1), counts_R),
        document_L,
    )


def move(
    tokens: TokenArray,
    source_L: IntArray,
    target: TokenArray,
    target_L: IntArray,
    length_L: IntArray,
    staged_bytes: int = STAGED_BYTES,
) -> None:
    """Moves the pieces of documents to where they belong; of many tokens little more than one copy is in memory.

    Pieces lie in no order, so each stride of the source would touch all of the target. Many tokens are therefore first
    sorted by the stride of the target that they go to.

    Args:
        tokens: owns its memory, and is empty afterwards.
        source_L: int64 [L], where each piece begins in ``tokens``; two share one token at most.
        target: flat, where they go to.
        target_L: int64 [L], where each begins there.
        length_L: int64 [L], tokens of each.
        staged_bytes: of tokens, above which they are sorted first.
    """
    if tokens.nbytes > staged_bytes:
        stride_L = target_L // -(-len(target) // _STRIDES)
        order = np.lexsort((-source_L, stride_L))
        staged_L = np.empty_like(source_L)
        staged_L[order] = np.cumsum(length_L[order]) - length_L[order]
        staged = np.empty(int(length_L.sum()), tokens.dtype)
        _take(tokens, source_L, staged, staged_L, length_L)
        tokens, source_L = staged, staged_L
    _take(tokens, source_L, target, target_L, length_L)


def _take(tokens: TokenArray, source_L: IntArray, target: TokenArray, target_L: IntArray, length_L: IntArray) -> None:
    """Moves pieces, from the end of the source on, which gives its memory back stride by stride."""
    order = np.argsort(source_L)
    while len(order):
        order, some = np.split(order, [len(order) - max(1, -(-len(source_L) // _STRIDES))])
        places = (source_L[some].tolist(), target_L[some].tolist(), length_L[some].tolist())
        for source, goal, length in zip(*places, strict=True):
            target[goal : goal + length] = tokens[source : source + length]
        tokens.resize(int(source_L[order[-1]] + length_L[order[-1]]) if len(order) else 0, refcheck=False)


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

    def write(tokens_RX: TokenArray, slot_R: IntArray) -> None:
        tokens_RX[slot_R] = packed.rows.tokens_BX

    return Filled(
        write,
        packed.rows.lengths_L,
        packed.rows.counts_B,
        packed.rows.starts_L,
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
    filled = [*filled, _padding(-sum(len(part.counts_R) for part in filled) % lanes, num_sources, settings.eos_id)]
    ends = np.cumsum([len(part.counts_R) for part in filled])
    num_rows, lane_rows = int(ends[-1]), int(ends[-1]) // lanes

    shuffled = row_order(num_rows, settings.seed, window) if settings.shuffle else np.arange(num_rows)
    index_R = np.empty(num_rows, np.int64)
    index_R[shuffled] = np.arange(num_rows)  # packed row -> g
    slot_R = index_R % lanes * lane_rows + index_R // lanes  # packed row -> place when rows lie lane by lane
    tokens = np.empty((num_rows, width), settings.token_dtype)
    for part, slots in zip(filled, np.split(slot_R, ends[:-1]), strict=True):
        part.write(tokens, slots)

    def by_slot(values_R: list[npt.NDArray[Any]]) -> npt.NDArray[Any]:
        joined = np.concatenate(values_R)
        out = np.empty_like(joined)
        out[slot_R] = joined
        return out

    counts_R = np.concatenate([part.counts_R for part in filled])
    by_slot_L = np.argsort(np.repeat(slot_R, counts_R), kind="stable")
    lengths_L = np.concatenate([part.lengths_L for part in filled])[by_slot_L]
    starts_L = np.concatenate([part.starts_L for part in filled])
    document_L = np.concatenate([part.document_L for part in filled])[by_slot_L]
    rows = Rows(tokens, lengths_L, by_slot([counts_R]), starts_L[by_slot_L] if len(starts_L) else starts_L)
    tokens_RK = by_slot([part.tokens_RK for part in filled])
    documents_R, cut_R = by_slot([part.documents_R for part in filled]), by_slot([part.cut_R for part in filled])
    return rows, _prefix(settings, window, rows, tokens_RK, documents_R, cut_R, skipped), document_L


def _padding(missing: int, num_sources: int, eos_id: int) -> Filled:
    """Rows that hold no document."""

    def write(tokens_RX: TokenArray, slot_R: IntArray) -> None:
        tokens_RX[slot_R] = eos_id

    nothing, none_R = np.zeros(0, np.int32), np.zeros(missing, np.int64)
    none_RK = np.zeros((missing, num_sources), np.int64)
    counts_R = none_R.astype(np.int32)
    return Filled(write, nothing, counts_R, nothing, none_RK, none_R, none_R, nothing.astype(np.int64))


def _prefix(
    settings: WindowSettings,
    window: int,
    rows: Rows,
    tokens_RK: IntArray,
    documents_R: IntArray,
    cut_R: IntArray,
    skipped: int,
) -> Prefix:
    """Prefix sums by lane offset over rows that lie lane by lane."""
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
        tokens_O=sums(tokens_RK.sum(axis=1)),
        documents_O=sums(documents_R),
        documents_cut_O=sums(cut_R),
        source_tokens_OK=sums(tokens_RK),
        digest_O=sums(row_digests(rows, np.full(len(rows), window), index_R), np.uint64),
        skipped=skipped,
    )
