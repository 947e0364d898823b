"""One window: read, tokenize, pack, shuffle, cut into slabs. A pure function of (spec, settings, tokenizer, files).

    text units   -> Documents: tokenized -> permuted, packed  ┐
    packed units -> as the file holds them                    ┴> Filled: rows in packing order -> dealt to the lanes

This is the unit of work, of shuffling, of retry and of resume: made twice, it gives the same slabs, bit for bit.
Documents are permuted before packing, so that neighbours in a row come from all over the window, and rows after it, so
that the pieces of a long document do not follow one another. A window may hold text and packed units; what the packed
ones lack to a multiple of the lanes are rows without a document.

Memory: the tokens of the window three times while they are dealt (as documents, as filled rows, by lanes), twice after
it, plus the text of one read batch; packed units once as Arrow read them, and by lanes. Cost beyond the tokenizer:
under 1 µs a piece, one hash a row, and one copy of the filled rows.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ingest.errors import DataError
from ingest.packed import PackedRows
from ingest.packing import Packing, concat
from ingest.plan import Cursors, document_order, row_order
from ingest.readahead import ReadAhead
from ingest.slab import IntArray, Prefix, Rows, Slab, TokenArray, row_digests
from ingest.tokenizer import DocumentError

UNITS_AHEAD = 4  # row groups fetched at once, the one being tokenized included
ARRAYS_AHEAD = 2  # of at most 256 documents, ready of each
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
    packed: bool = False


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
ReadPacked = Callable[[UnitSpec], PackedRows]


@dataclass(frozen=True, eq=False)
class Documents:
    """The tokenized documents of a window's text units, in reading order.

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
        packed_P: int64 [P, 2], for each row that was read packed: index into the window's units, row in its row group.
        piece_document_L: index into ``documents`` of each piece, in the order of ``rows``; that of a piece that was
            read packed is the number of documents plus the index into ``packed_P``.
    """

    spec: WindowSpec
    lanes: int
    rows: Rows
    prefix: Prefix
    documents: Documents
    packed_P: IntArray
    piece_document_L: IntArray

    def slabs(self, world_size: int) -> Iterator[Slab]:
        """One slab a rank, in their order; of 0 rows each if no document was usable.

        Args:
            world_size: a divisor of S; with 1 or S nothing is copied.
        """
        whole = Slab(self.spec.cursors, 0, 1, self.spec.last, self.rows, self.prefix)
        for rank in range(world_size):
            rows = [whole.lane_rows(lane, 0, self.prefix.rows) for lane in range(rank, self.lanes, world_size)]
            own = self.rows if world_size == 1 else Rows.concatenate(rows)
            yield Slab(self.spec.cursors, rank, world_size, self.spec.last, own, self.prefix)


@dataclass(frozen=True, eq=False)
class Filled:
    """Rows in packing order, with what is counted of each.

    Args:
        rows: R rows.
        tokens_RK: int64 [R, K], input tokens of each source.
        documents_R: int64 [R], documents that begin in the row.
        document_L: int64 [L], as ``Window.piece_document_L``, in the order of these rows.
    """

    rows: Rows
    tokens_RK: IntArray
    documents_R: IntArray
    document_L: IntArray


def make_window(
    spec: WindowSpec,
    settings: WindowSettings,
    encode: Encode,
    read: Read,
    read_packed: ReadPacked | None = None,
    turn: AbstractContextManager[Any] | None = None,
) -> Window:
    """Makes a window.

    Args:
        spec: which units.
        settings: how.
        encode: texts to flat tokens and lengths, eos included (``Tokenizer.encode``).
        read: yields the text of a unit as large_string arrays, in row order.
        read_packed: the rows of a unit that is packed; None where no unit is.
        turn: held from the first document to the last row. Reading begins before it, so that a window waiting for its
            turn already fetches its first units.

    Raises:
        DataError, StorageError: from ``read``, ``read_packed`` and ``encode``, with the file named.
    """
    texts = _ReadAhead(spec, settings, read)
    with contextlib.closing(texts), turn or contextlib.nullcontext():
        return _make(spec, settings, _tokenize(spec, settings, encode, texts), read_packed)


def _make(spec: WindowSpec, settings: WindowSettings, documents: Documents, read_packed: ReadPacked | None) -> Window:
    count = len(documents.lengths_D)
    window = spec.cursors.window
    order = document_order(count, settings.seed, window) if settings.shuffle else np.arange(count)
    packing = concat(documents.lengths_D[order], settings.sequence_length, settings.lanes)
    filled = [_fill(spec, settings, documents, order, packing)]
    places = [np.zeros((0, 2), np.int64)]
    for index, unit in enumerate(spec.units):
        if unit.packed:
            assert read_packed is not None, "a packed unit needs its reader"
            filled.append(_take(read_packed(unit), settings, unit.source, count + sum(map(len, places))))
            rows = np.arange(len(filled[-1].rows))
            places.append(np.stack((np.full_like(rows, index), rows), axis=1))
    return _deal(spec, settings, documents, np.concatenate(places), filled)


class _ReadAhead:
    """The texts of a window's text units, in order, with the next units' bytes on their way meanwhile."""

    def __init__(self, spec: WindowSpec, settings: WindowSettings, read: Read) -> None:
        self._read = read
        self._settings = settings
        self._left = deque((index, unit) for index, unit in enumerate(spec.units) if not unit.packed)
        self._begun: deque[tuple[int, ReadAhead[pa.Array]]] = deque()
        self._begin()

    def _begin(self) -> None:
        while self._left and len(self._begun) < UNITS_AHEAD:
            index, unit = self._left.popleft()
            arrays = self._read(unit, self._settings.columns[unit.source])
            self._begun.append((index, ReadAhead(arrays, ARRAYS_AHEAD, "ingest-read")))

    def __iter__(self) -> Iterator[tuple[int, ReadAhead[pa.Array]]]:
        while self._begun:
            yield self._begun[0]
            self._begun.popleft()
            self._begin()

    def close(self) -> None:
        for _, arrays in self._begun:
            arrays.close()


def _tokenize(spec: WindowSpec, settings: WindowSettings, encode: Encode, units_texts: _ReadAhead) -> Documents:
    tokens: list[npt.NDArray[Any]] = [np.zeros(0, settings.token_dtype)]
    lengths, units, rows = ([np.zeros(0, np.int64)] for _ in range(3))
    skipped = 0
    for index, arrays in units_texts:
        unit, first_row = spec.units[index], 0
        for texts in arrays:
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


def _fill(
    spec: WindowSpec, settings: WindowSettings, documents: Documents, order: IntArray, packing: Packing
) -> Filled:
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
    return Filled(
        Rows(tokens.reshape(num_rows, width), packing.length_L.astype(np.int32), counts_R.astype(np.int32)),
        _row_sums(tokens_L[:, None] * is_source_LK, counts_R),
        _row_sums(packing.start_L == 0, counts_R),
        document_L,
    )


def _row_sums(values_L: npt.NDArray[Any], counts_R: IntArray) -> IntArray:
    """Sums over the pieces of each row: [L, ...] -> int64 [R, ...]."""
    total = np.concatenate((np.zeros((1, *values_L.shape[1:]), np.int64), np.cumsum(values_L, axis=0, dtype=np.int64)))
    ends = np.cumsum(counts_R)
    sums: IntArray = total[ends] - total[ends - counts_R]
    return sums


def _take(packed: PackedRows, settings: WindowSettings, source: int, first_document: int) -> Filled:
    """Rows that were packed before, where they lie."""
    tokens_RK = np.zeros((len(packed.rows), len(settings.columns)), np.int64)
    tokens_RK[:, source] = packed.input_tokens_B
    document_R = first_document + np.arange(len(packed.rows))
    return Filled(
        packed.rows, tokens_RK, packed.documents_B.astype(np.int64), np.repeat(document_R, packed.rows.counts_B)
    )


def _deal(
    spec: WindowSpec, settings: WindowSettings, documents: Documents, packed_P: IntArray, filled: list[Filled]
) -> Window:
    """Fills up to a multiple of the lanes, permutes the rows, and lays them lane by lane."""
    lanes, width, num_sources = settings.lanes, settings.sequence_length + 1, len(settings.columns)
    missing = -sum(len(part.rows) for part in filled) % lanes
    nothing = np.zeros(0, np.int64)
    padding = Rows.padding(missing, width, settings.token_dtype, settings.eos_id)
    filled = [
        *filled,
        Filled(padding, np.zeros((missing, num_sources), np.int64), np.zeros(missing, np.int64), nothing),
    ]
    ends = np.cumsum([len(part.rows) for part in filled])
    num_rows, lane_rows = int(ends[-1]), int(ends[-1]) // lanes

    shuffled = row_order(num_rows, settings.seed, spec.cursors.window) if settings.shuffle else np.arange(num_rows)
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
    document_L = np.concatenate([part.document_L for part in filled])[by_slot_L]
    rows = Rows(tokens, lengths_L, by_slot([counts_R]))
    tokens_RK, documents_R = (
        by_slot([part.tokens_RK for part in filled]),
        by_slot([part.documents_R for part in filled]),
    )
    prefix = _prefix(spec, settings, rows, tokens_RK, documents_R, documents.skipped)
    return Window(spec, lanes, rows, prefix, documents, packed_P, document_L)


def _prefix(
    spec: WindowSpec,
    settings: WindowSettings,
    rows: Rows,
    tokens_RK: IntArray,
    documents_R: IntArray,
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
        source_tokens_OK=sums(tokens_RK),
        digest_O=sums(row_digests(rows, np.full(len(rows), spec.cursors.window), index_R), np.uint64),
        skipped=skipped,
    )


def document_address(window: Window, document: int) -> tuple[UnitSpec, int]:
    """The unit and the row in its row group that a document came from; of a row that was read packed, its own."""
    documents, packed = window.documents, document - len(window.documents.lengths_D)
    if packed >= 0:
        unit, row = window.packed_P[packed].tolist()
        return window.spec.units[unit], row
    return window.spec.units[int(documents.unit_D[document])], int(documents.row_D[document])
