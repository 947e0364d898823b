"""The text of a window's units to tokenized documents, with the next units' bytes on their way meanwhile.

Memory: the tokens, and the arrays that ``UNITS_AHEAD`` and ``ARRAYS_AHEAD`` allow. Rows without text (null or empty)
are skipped and counted, and so are those that cannot be read where the source allows it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ingest.account import MAX_SKIPS, Account, Bad, Skip, SourceAccount
from ingest.errors import DataError
from ingest.metrics import Stopwatch
from ingest.readahead import ReadAhead
from ingest.slab import IntArray, TokenArray
from ingest.spec import UnitSpec, WindowSettings, WindowSpec
from ingest.tokenizer import DocumentError

UNITS_AHEAD = 4  # row groups fetched at once, the one being tokenized included
ARRAYS_AHEAD = 2  # of at most 256 documents, ready of each
ENCODE_BYTES = 1 << 20  # text tokenized at once: enough to hide the call, little enough to stay in cache

Encode = Callable[[list[str]], tuple[TokenArray, IntArray]]
Read = Callable[[UnitSpec, str], Iterator[pa.Array | Bad]]


@dataclass(frozen=True, eq=False)
class Documents:
    """The tokenized documents of a window's text units, in reading order.

    Args:
        tokens: uint16 or uint32, all documents end to end, each with its eos; empty once they are in rows.
        lengths_D: int64 [D], at least 1.
        unit_D: int64 [D], index into the window's units.
        row_D: int64 [D], row in its row group.
        skipped: rows without text.
        account: of the rows that were read.
    """

    tokens: TokenArray
    lengths_D: IntArray
    unit_D: IntArray
    row_D: IntArray
    skipped: int
    account: Account


class UnitTexts:
    """The texts of a window's text units, in order, with the next units' bytes on their way meanwhile."""

    def __init__(self, spec: WindowSpec, settings: WindowSettings, read: Read) -> None:
        self._read = read
        self._settings = settings
        self._left = deque((index, unit) for index, unit in enumerate(spec.units) if not unit.packed)
        self._begun: deque[tuple[int, ReadAhead[pa.Array | Bad]]] = deque()
        self._begin()

    def _begin(self) -> None:
        while self._left and len(self._begun) < UNITS_AHEAD:
            index, unit = self._left.popleft()
            arrays = self._read(unit, self._settings.columns[unit.source])
            self._begun.append((index, ReadAhead(arrays, ARRAYS_AHEAD, "ingest-read")))

    def __iter__(self) -> Iterator[tuple[int, ReadAhead[pa.Array | Bad]]]:
        while self._begun:
            yield self._begun[0]
            self._begun.popleft()
            self._begin()

    def close(self) -> None:
        """Ends the reading of units that were begun."""
        for _, arrays in self._begun:
            arrays.close()


def tokenize(
    spec: WindowSpec, settings: WindowSettings, encode: Encode, units_texts: UnitTexts, watch: Stopwatch
) -> Documents:
    """Tokenizes the usable documents of all text units; ``watch`` tells waiting for bytes from work.

    Raises:
        DataError: the tokenizer rejects a document; the message names file, row group and row.
    """
    tokens: list[npt.NDArray[Any]] = [np.zeros(0, settings.token_dtype)]
    lengths, units, rows = ([np.zeros(0, np.int64)] for _ in range(3))
    per_source = [SourceAccount() for _ in settings.columns]
    skips: list[Skip] = []
    for index, arrays in units_texts:
        unit, first_row = spec.units[index], 0
        for texts in arrays:
            watch.lap("read")
            if isinstance(texts, Bad):
                per_source[unit.source] += SourceAccount(read=texts.num_rows, bad=texts.num_rows)
                skips += [Skip.of(unit.source, unit.path, unit.row_group, texts)] * (len(skips) < MAX_SKIPS)
                first_row += texts.num_rows
                continue
            usable = np.flatnonzero(pc.fill_null(pc.greater(pc.binary_length(texts), 0), False))
            empty, made = len(texts) - len(usable), 0
            for some in _chunks(texts, usable):
                flat, counts = _encode(encode, texts.take(pa.array(some)).to_pylist(), unit, some + first_row)
                made += len(flat)
                tokens.append(flat)
                lengths.append(counts)
                units.append(np.full(len(some), index, np.int64))
                rows.append(some + first_row)
            per_source[unit.source] += SourceAccount(len(texts), len(usable), empty, 0, made)
            first_row += len(texts)
            watch.lap("tokenize")
    skipped = sum(source.empty for source in per_source)
    arrays_D = (np.concatenate(tokens), np.concatenate(lengths), np.concatenate(units), np.concatenate(rows))
    return Documents(*arrays_D, skipped, Account(tuple(per_source), tuple(skips)))


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
