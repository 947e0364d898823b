"""One window: read, tokenize, pack, shuffle, cut into slabs. A pure function of (spec, settings, tokenizer, files).

    text units   -> Documents: tokenized -> permuted, packed  ┐
    packed units -> as the file holds them                    ┴> Filled: rows in packing order -> dealt to the lanes

This is the unit of work, of shuffling, of retry and of resume: made twice, it gives the same slabs, bit for bit.
Documents are permuted before packing, so that neighbours in a row come from all over the window, and rows after it, so
that the pieces of a long document do not follow one another. A window may hold text and packed units; what the packed
ones lack to a multiple of the lanes are rows without a document.

Memory: the tokens of the window once, and a part of them again while documents become rows, plus the text of what is
read ahead; packed units once as Arrow read them, and by lanes. Cost beyond the tokenizer:
under 1 µs a piece, one hash a row, and one copy of the filled rows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from ingest.account import Account, SourceAccount
from ingest.best_fit import best_fit
from ingest.documents import Documents, Encode, Read, UnitsAhead, UnitTexts, tokenize, unit_texts
from ingest.filled import deal, fill, take
from ingest.metrics import Stopwatch
from ingest.packed import PackedRows
from ingest.packing import Packing, Strategy, concat
from ingest.plan import document_order
from ingest.slab import IntArray, Prefix, Rows, Slab
from ingest.spec import UnitSpec, WindowSettings, WindowSpec

PACK: dict[Strategy, Callable[[IntArray, int, int], Packing]] = {"concat": concat, "best_fit": best_fit}
ReadPacked = Callable[[UnitSpec], PackedRows]
UnitsPacked = UnitsAhead[PackedRows]


@dataclass(frozen=True, eq=False)
class Window:
    """A made window.

    Args:
        spec: what it was made from.
        lanes: S.
        rows: all R rows, lane by lane.
        prefix: see ``slab.Prefix``.
        documents: the documents without their tokens, for provenance.
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


Turn = Callable[[Callable[[], Window]], Window]


def _no_reader(unit: UnitSpec) -> PackedRows:
    raise AssertionError(f"{unit.path} is packed and needs its reader")


def make_window(
    spec: WindowSpec,
    settings: WindowSettings,
    encode: Encode,
    read: Read,
    read_packed: ReadPacked = _no_reader,
    turn: Turn = lambda make: make(),
    watch: Stopwatch | None = None,
) -> Window:
    """Makes a window.

    Args:
        spec: which units.
        settings: how.
        encode: texts to flat tokens and lengths, eos included (``Tokenizer.encode``).
        read: yields the text of a unit as large_string arrays, in row order.
        read_packed: the rows of a unit that is packed; must be given where one is.
        turn: calls its argument when it is the turn of the window; the default is at once. Reading
            begins before it, so that a window waiting for its turn already fetches its first units.
        watch: takes note of the seconds spent from its turn on.

    Raises:
        DataError, StorageError: from ``read``, ``read_packed`` and ``encode``, with the file named.
    """
    texts = unit_texts(spec, settings, read)
    packed = UnitsAhead(
        [each for each in enumerate(spec.units) if each[1].packed], lambda unit: map(read_packed, [unit])
    )
    with contextlib.closing(texts), contextlib.closing(packed):
        return turn(lambda: _make(spec, settings, encode, texts, packed, watch or Stopwatch()))


def _make(
    spec: WindowSpec,
    settings: WindowSettings,
    encode: Encode,
    texts: UnitTexts,
    units_packed: UnitsPacked,
    watch: Stopwatch,
) -> Window:
    watch.start()
    documents = tokenize(spec, settings, encode, texts, watch)
    count = len(documents.lengths_D)
    window = spec.cursors.window
    order = document_order(count, settings.seed, window) if settings.shuffle else np.arange(count)
    packing = PACK[settings.strategy](documents.lengths_D[order], settings.sequence_length, settings.lanes)
    filled = [fill(spec, settings, documents, order, packing)]
    places = [np.zeros((0, 2), np.int64)]
    account = documents.account
    for index, items in units_packed:
        source = spec.units[index].source
        watch.lap("pack")
        [packed] = items
        watch.lap("read")
        account += _packed_account(packed, source, len(settings.columns))
        filled.append(take(packed, settings, source, count + sum(map(len, places))))
        row = np.arange(len(filled[-1].counts_R))
        places.append(np.stack((np.full_like(row, index), row), axis=1))
    rows, prefix, piece_document_L = deal(filled, settings, window, documents.skipped)
    prefix = replace(prefix, account=account)
    assert conserved(prefix), f"window {window} must hold what was read: {account}, {prefix.at(prefix.rows)}"
    watch.lap("pack")
    return Window(spec, settings.lanes, rows, prefix, documents, np.concatenate(places), piece_document_L)


def _packed_account(packed: PackedRows, source: int, num_sources: int) -> Account:
    """Packed rows hold documents that were read once and tokens that were made before."""
    documents, tokens = int(packed.documents_B.sum()), int(packed.input_tokens_B.sum())
    mine = SourceAccount(read=documents, documents=documents, tokens=tokens)
    return Account(tuple(mine if number == source else SourceAccount() for number in range(num_sources)))


def conserved(prefix: Prefix) -> bool:
    """Whether a window's rows hold every document and token that its account says were read."""
    end, sources = prefix.at(prefix.rows), prefix.account.sources
    documents, tokens = sum(source.documents for source in sources), tuple(source.tokens for source in sources)
    return prefix.account.balanced and (documents, tokens) == (end.documents, end.source_tokens)


def document_address(window: Window, document: int) -> tuple[UnitSpec, int]:
    """The unit and the row in its row group that a document came from; of a row that was read packed, its own."""
    documents, packed = window.documents, document - len(window.documents.lengths_D)
    if packed >= 0:
        unit, row = window.packed_P[packed].tolist()
        return window.spec.units[unit], row
    return window.spec.units[int(documents.unit_D[document])], int(documents.row_D[document])
