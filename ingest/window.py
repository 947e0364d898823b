"""One window: read, tokenize, pack, shuffle, cut into slabs. A pure function of (spec, settings, tokenizer, files).

This is the unit of work, of shuffling, of retry and of resume: made twice, it gives the same slabs, bit for bit.
Documents are permuted before packing, so that neighbours in a row come from all over the window, and rows after it, so
that the pieces of a long document do not follow one another.

Memory: the tokens of the window twice (as documents, as rows) plus the text of one read batch. Cost beyond the
tokenizer: under 1 µs a piece and one hash a row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ingest.errors import DataError
from ingest.packing import Packing, concat
from ingest.plan import Cursors, document_order, row_order
from ingest.slab import IntArray, Prefix, Rows, Slab, TokenArray, row_digests
from ingest.tokenizer import DocumentError

ENCODE_BYTES = (
    1 << 20
)  # text given to the tokenizer at once: long enough to hide the call, short enough to stay in cache


@dataclass(frozen=True)
class UnitSpec:
    """All that an actor needs to read one unit, so that actors hold no manifest."""

    source: int
    epoch: int
    path: str
    row_group: int
    size_bytes: int
    footer_hash: str


@dataclass(frozen=True)
class WindowSpec:
    """All that an actor needs to make one window."""

    cursors: Cursors
    units: tuple[UnitSpec, ...]
    last: bool


@dataclass(frozen=True)
class WindowSettings:
    """The part of the config that decides a window's content.

    Args:
        columns: the text column of each source.
        sequence_length, lanes, seed, shuffle: as in the config.
        eos_id: what padding holds.
        token_dtype: ``uint16`` or ``uint32``.
    """

    columns: tuple[str, ...]
    sequence_length: int
    lanes: int
    seed: int
    shuffle: bool
    eos_id: int
    token_dtype: str


Encode = Callable[[list[str]], tuple[TokenArray, IntArray]]
Read = Callable[[UnitSpec, str], Iterator[pa.Array]]


@dataclass(frozen=True, eq=False)
class Documents:
    """The tokenized documents of a window, in reading order.

    Args:
        tokens: uint16 or uint32, all documents end to end, each with its eos.
        lengths_D: int64 [D], at least 1.
        unit_D: int64 [D], index into the window's units.
        row_D: int64 [D], row in its row group.
        skipped: rows without text.
    """

    tokens: TokenArray
    lengths_D: IntArray
    unit_D: IntArray
    row_D: IntArray
    skipped: int


@dataclass(frozen=True, eq=False)
class Window:
    """A made window.

    Args:
        spec: what it was made from.
        lanes: S.
        rows: all R rows, lane by lane.
        prefix: see ``slab.Prefix``.
        documents: the documents, for provenance.
        piece_document_L: index into ``documents`` of each piece, in the order of ``rows``.
    """

    spec: WindowSpec
    lanes: int
    rows: Rows
    prefix: Prefix
    documents: Documents
    piece_document_L: IntArray

    def slabs(self) -> Iterator[Slab]:
        """The S slabs in lane order; of 0 rows each if no document was usable."""
        count = self.prefix.rows
        for lane in range(self.lanes):
            rows = self.rows.slice(lane * count, (lane + 1) * count)
            yield Slab(self.spec.cursors, lane, self.spec.last, rows, self.prefix)


def make_window(spec: WindowSpec, settings: WindowSettings, encode: Encode, read: Read) -> Window:
    """Makes a window.

    Args:
        spec: which units.
        settings: how.
        encode: texts to flat tokens and lengths, eos included (``Tokenizer.encode``).
        read: yields the text of a unit as large_string arrays, in row order.

    Raises:
        DataError, StorageError: from ``read`` and ``encode``, with the file named.
    """
    documents = _tokenize(spec, settings, encode, read)
    count = len(documents.lengths_D)
    window = spec.cursors.window
    order = document_order(count, settings.seed, window) if settings.shuffle else np.arange(count)
    packing = concat(documents.lengths_D[order], settings.sequence_length, settings.lanes)
    return _assemble(spec, settings, documents, order, packing)


def _tokenize(spec: WindowSpec, settings: WindowSettings, encode: Encode, read: Read) -> Documents:
    tokens: list[npt.NDArray[Any]] = [np.zeros(0, settings.token_dtype)]
    lengths, units, rows = ([np.zeros(0, np.int64)] for _ in range(3))
    skipped = 0
    for index, unit in enumerate(spec.units):
        first_row = 0
        for texts in read(unit, settings.columns[unit.source]):
            usable = np.flatnonzero(pc.fill_null(pc.greater(pc.binary_length(texts), 0), False))
            skipped += len(texts) - len(usable)
            for some in _chunks(texts, usable):
                flat, counts = _encode(encode, texts.take(pa.array(some)).to_pylist(), unit, some + first_row)
                tokens.append(flat)
                lengths.append(counts)
                units.append(np.full(len(some), index, np.int64))
                rows.append(some + first_row)
            first_row += len(texts)
    return Documents(
        np.concatenate(tokens), np.concatenate(lengths), np.concatenate(units), np.concatenate(rows), skipped
    )


def _encode(encode: Encode, texts: list[str], unit: UnitSpec, rows: IntArray) -> tuple[TokenArray, IntArray]:
    try:
        return encode(texts)
    except DocumentError as error:
        where = f"{unit.path} row group {unit.row_group} row {rows[error.index]}"
        raise DataError(f"{where}: {error}") from None


def _chunks(texts: pa.Array, usable: IntArray) -> Iterator[IntArray]:
    """Runs of usable rows of about ``ENCODE_BYTES`` of text."""
    if len(usable):
        sizes = np.asarray(pc.fill_null(pc.binary_length(texts), 0))[usable]
        cuts = np.flatnonzero(np.diff((np.cumsum(sizes) - sizes) // ENCODE_BYTES)) + 1
        yield from np.split(usable, cuts)


def _assemble(
    spec: WindowSpec, settings: WindowSettings, documents: Documents, order: IntArray, packing: Packing
) -> Window:
    """Gathers the tokens of each piece into its row, rows lane by lane, and sums up what the rows hold."""
    num_rows, lanes, width = len(packing.counts_R), settings.lanes, settings.sequence_length + 1
    lane_rows = num_rows // lanes
    shuffled = row_order(num_rows, settings.seed, spec.cursors.window) if settings.shuffle else np.arange(num_rows)
    index_R = np.empty(num_rows, np.int64)
    index_R[shuffled] = np.arange(num_rows)  # packed row -> g
    slot_R = index_R % lanes * lane_rows + index_R // lanes  # packed row -> place when rows lie lane by lane
    slot_L = np.repeat(slot_R, packing.counts_R)
    document_L = order[packing.document_L]

    begins_D = np.cumsum(documents.lengths_D) - documents.lengths_D
    source_L = begins_D[document_L] + packing.start_L
    before_L = np.cumsum(packing.length_L) - packing.length_L
    first_L = np.repeat(np.cumsum(packing.counts_R) - packing.counts_R, packing.counts_R)
    target_L = slot_L * width + before_L - before_L[first_L]
    tokens = np.full(num_rows * width, settings.eos_id, settings.token_dtype)
    for target, source, length in zip(target_L.tolist(), source_L.tolist(), packing.length_L.tolist(), strict=True):
        tokens[target : target + length] = documents.tokens[source : source + length]

    by_slot_L = np.argsort(slot_L, kind="stable")
    counts = np.empty(num_rows, np.int32)
    counts[slot_R] = packing.counts_R
    rows = Rows(tokens.reshape(num_rows, width), packing.length_L[by_slot_L].astype(np.int32), counts)
    prefix = _prefix(spec, settings, documents, packing, rows, slot_L, document_L)
    return Window(spec, lanes, rows, prefix, documents, document_L[by_slot_L])


def _prefix(
    spec: WindowSpec,
    settings: WindowSettings,
    documents: Documents,
    packing: Packing,
    rows: Rows,
    slot_L: IntArray,
    document_L: IntArray,
) -> Prefix:
    lanes, lane_rows, num_sources = settings.lanes, len(rows) // settings.lanes, len(settings.columns)

    def sums(values_R: npt.NDArray[Any], dtype: npt.DTypeLike = np.int64) -> npt.NDArray[Any]:
        """Per-row values, rows lane by lane, to prefix sums by lane offset: [R, ...] -> [N + 1, ...]."""
        by_offset = values_R.reshape(lanes, lane_rows, *values_R.shape[1:]).sum(axis=0, dtype=dtype)
        return np.concatenate(
            (np.zeros_like(by_offset, shape=(1, *by_offset.shape[1:])), by_offset.cumsum(axis=0, dtype=dtype))
        )

    def per_row(values_L: IntArray) -> IntArray:
        total = np.zeros(len(rows), np.int64)
        np.add.at(total, slot_L, values_L)
        return total

    source_of_unit = np.array([unit.source for unit in spec.units], np.int64)
    source_L = source_of_unit[documents.unit_D[document_L]]
    tokens_L = packing.length_L - packing.lookahead_L
    tokens_RK = np.stack([per_row(tokens_L * (source_L == source)) for source in range(num_sources)], axis=1)
    slot_R = np.arange(len(rows))
    index_R = slot_R % max(lane_rows, 1) * lanes + slot_R // max(lane_rows, 1)
    return Prefix(
        tokens_O=sums(tokens_RK.sum(axis=1)),
        documents_O=sums(per_row((packing.start_L == 0).astype(np.int64))),
        source_tokens_OK=sums(tokens_RK),
        digest_O=sums(row_digests(rows, np.full(len(rows), spec.cursors.window), index_R), np.uint64),
        skipped=documents.skipped,
    )


def document_address(window: Window, document: int) -> tuple[UnitSpec, int]:
    """The unit and the row in its row group that a document came from."""
    documents = window.documents
    return window.spec.units[int(documents.unit_D[document])], int(documents.row_D[document])
