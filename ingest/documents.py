"""The rows of a window's units to tokenized documents, with the next units' bytes on their way meanwhile.

Memory: the tokens, and the arrays that ``UNITS_AHEAD`` and ``ARRAYS_AHEAD`` allow. Rows without text (null or empty) or
without tokens, and those that an encoder drops, are skipped and counted, and so are those that cannot be read where the
source allows it. Rows that a filter leaves out are counted on their own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ingest.account import MAX_SKIPS, Account, Bad, Skip, SourceAccount
from ingest.columns import Columns, Filtered, Item, Picked, sizes
from ingest.errors import DataError
from ingest.metrics import Stopwatch
from ingest.pieces import DocumentError
from ingest.readahead import ReadAhead
from ingest.slab import IntArray, TokenArray
from ingest.spec import UnitSpec, WindowSettings, WindowSpec

UNITS_AHEAD = 4  # row groups fetched at once, the one being tokenized included
ARRAYS_AHEAD = 2  # of at most 256 documents, ready of each
_FIRST_TOKENS = 1 << 20
ENCODE_BYTES = 1 << 20  # text tokenized at once: enough to hide the call, little enough to stay in cache

T = TypeVar("T")

Encode = Callable[[pa.Array, UnitSpec, IntArray], tuple[TokenArray, IntArray]]
"""Rows that hold something, their unit and their numbers in it, to all tokens and those of each; 0 drops a row."""
Read = Callable[[UnitSpec, Columns], Iterator[Item]]


@dataclass(frozen=True, eq=False)
class Documents:
    """The tokenized documents of a window's text units, in reading order.

    Args:
        tokens: uint16 or uint32, all documents end to end, each with its eos; empty once they are in rows.
        lengths_D: int64 [D], at least 1.
        unit_D: int64 [D], index into the window's units.
        row_D: int64 [D], row in its row group.
        account: of the rows that were read.
    """

    tokens: TokenArray
    lengths_D: IntArray
    unit_D: IntArray
    row_D: IntArray
    account: Account

    @property
    def skipped(self) -> int:
        """Rows without text."""
        return sum(source.empty for source in self.account.sources)


class UnitsAhead(Generic[T]):
    """What some of a window's units hold, in order, with the next units' bytes on their way meanwhile.

    Args:
        units: each with its index in the window.
        read: called on a thread of each unit.
    """

    def __init__(self, units: Iterable[tuple[int, UnitSpec]], read: Callable[[UnitSpec], Iterator[T]]) -> None:
        self._read = read
        self._left = deque(units)
        self._begun: deque[tuple[int, ReadAhead[T]]] = deque()
        self._begin()

    def _begin(self) -> None:
        while self._left and len(self._begun) < UNITS_AHEAD:
            index, unit = self._left.popleft()
            self._begun.append((index, ReadAhead(self._read(unit), ARRAYS_AHEAD, "ingest-read")))

    def __iter__(self) -> Iterator[tuple[int, ReadAhead[T]]]:
        while self._begun:
            yield self._begun[0]
            self._begun.popleft()
            self._begin()

    def close(self) -> None:
        """Ends the reading of units that were begun."""
        for _, items in self._begun:
            items.close()


UnitTexts = UnitsAhead[pa.Array | Bad]


def unit_texts(spec: WindowSpec, settings: WindowSettings, read: Read) -> UnitTexts:
    """Begins to read a window's text units."""
    units = [(index, unit) for index, unit in enumerate(spec.units) if not unit.packed]
    return UnitsAhead(units, lambda unit: read(unit, settings.columns[unit.source]))


def tokenize(
    spec: WindowSpec, settings: WindowSettings, encode: Encode, units_texts: UnitTexts, watch: Stopwatch
) -> Documents:
    """Tokenizes the usable documents of all text units; ``watch`` tells waiting for bytes from work.

    Raises:
        DataError: the tokenizer rejects a document; the message names file, row group and row.
    """
    tokens = _Growing(settings.token_dtype)
    lengths, units, rows = ([np.zeros(0, np.int64)] for _ in range(3))
    per_source = [SourceAccount() for _ in settings.columns]
    skips: list[Skip] = []
    for index, arrays in units_texts:
        unit, first_row = spec.units[index], 0
        skip = settings.skips_rows(unit.source)
        for array in arrays:
            watch.lap("read")
            if isinstance(array, Filtered):
                per_source[unit.source] += SourceAccount(read=array.num_rows, filtered=array.num_rows)
                continue
            counted = SourceAccount()
            for part in (array,) if isinstance(array, Bad) else encode_rows(array, unit, first_row, encode, skip):
                if isinstance(part, Bad):
                    skips += [Skip.of(unit.source, unit.path, unit.row_group, part)] * (len(skips) < MAX_SKIPS)
                    counted += SourceAccount(read=part.num_rows, bad=part.num_rows)
                    continue
                flat, counts, numbers = part
                tokens.extend(flat)
                lengths.append(counts)
                units.append(np.full(len(counts), index, np.int64))
                rows.append(numbers)
                counted += SourceAccount(read=len(counts), documents=len(counts), tokens=len(flat))
            empty = 0 if isinstance(array, Bad) else len(array) - counted.read
            per_source[unit.source] += counted + SourceAccount(read=empty, empty=empty)
            first_row += counted.read + empty
            watch.lap("tokenize")
    arrays_D = (np.concatenate(lengths), np.concatenate(units), np.concatenate(rows))
    return Documents(tokens.array(), *arrays_D, Account(tuple(per_source), tuple(skips)))


class _Growing:
    """Tokens end to end in one array that grows in place: to join chunks would need their memory twice."""

    def __init__(self, dtype: npt.DTypeLike) -> None:
        self._array: npt.NDArray[Any] = np.empty(0, dtype)
        self._used = 0

    def extend(self, more: npt.NDArray[Any]) -> None:
        """Appends tokens."""
        end = self._used + len(more)
        if end > len(self._array):
            room = max(end, len(self._array) * 9 // 8, _FIRST_TOKENS)
            self._array.resize(room, refcheck=False)  # moves pages, not bytes
        self._array[self._used : end] = more
        self._used = end

    def array(self) -> npt.NDArray[Any]:
        """All of them; nothing can be appended any more."""
        self._array.resize(self._used, refcheck=False)
        return self._array


def encode_rows(
    array: pa.Array | Picked, unit: UnitSpec, first_row: int, encode: Encode, skip: bool = False
) -> Iterator[tuple[TokenArray, IntArray, IntArray] | Bad]:
    """Encodes the rows of an array that hold something, about ``ENCODE_BYTES`` of text at once.

    Args:
        array: rows of ``unit``.
        unit: where they come from.
        first_row: number of the first one in its row group, where the array does not tell all.
        encode: of the unit's source.
        skip: yields ``Bad`` in the place of a row whose content breaks a rule.

    Yields:
        Tokens, their number for each row, the rows' numbers; rows that were dropped are left out.

    Raises:
        DataError: a document is refused; the message names file, row group and row.
    """
    picked = array if isinstance(array, Picked) else Picked(array, np.arange(first_row, first_row + len(array)))
    left = deque(_chunks(sizes(picked.rows)))
    while left:
        some = left.popleft()
        numbers = picked.numbers[some]
        try:
            flat, counts = encode(picked.rows.take(pa.array(some)), unit, numbers)
        except DocumentError as error:
            row = int(numbers[error.index])
            if not (skip and error.skippable):
                raise DataError(f"{unit.path} row group {unit.row_group} row {row}: {error}") from None
            yield Bad(row, 1, str(error))
            left.extendleft([rest] if len(rest := np.delete(some, error.index)) else [])
            continue
        kept = counts > 0
        yield (flat, counts, numbers) if kept.all() else (flat, counts[kept], numbers[kept])


def _chunks(size_R: IntArray) -> Iterator[IntArray]:
    """Runs of usable rows of about ``ENCODE_BYTES`` of text."""
    usable = np.flatnonzero(size_R)
    if len(usable):
        some = size_R[usable]
        cuts = np.flatnonzero(np.diff((np.cumsum(some) - some) // ENCODE_BYTES)) + 1
        yield from np.split(usable, cuts)
