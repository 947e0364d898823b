"""Documents to rows without cutting one that fits: best-fit-decreasing, as arithmetic on lengths.

Guarantees: no document of at most T tokens is cut. A longer one is cut into full rows of their own and a rest that is
packed like a document; as in ``concat``, each piece but the last reaches into the look-ahead column, so a cut costs no
label. The packing is a pure function of the lengths:

- Pieces are placed longest first, those of one length in packing order.
- Each goes to the row with the least room that still holds it; among rows of equal room, to the one filled last. If
  none holds it, it opens a row.
- Where rows lack to a multiple of the lanes, as many rows are divided: every second document, from the second longest
  on, moves to a new row. Rows go first whose lighter part is heaviest. Only when every row is down to one piece are
  those of documents longer than T halved. So a row stays empty only where nothing can be divided any more.
- In a row, documents stand in packing order, and rows in the order of their first documents.

Unlike ``concat``, rows differ in fill; what one lacks is padding. Beyond the lanes' share it is a few tokens in ten
thousand where most documents are short, and much where most have more than half of T: there ``concat`` does better.

Cost: 1 to 3 µs a document, at 100,000 documents as at 1,000: the sorted list of rooms has at most T entries, so that
to insert one moves a few kB. Rejected: a segment tree over rooms, log T steps of Python where one bisection does; a
bit set of rooms, whose words grow with T.

Source: Ding et al., "Fewer Truncations Improve Language Modeling", arXiv 2404.10830, best-fit packing.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ingest.packing import IntArray, Packing


def best_fit(lengths_D: IntArray, sequence_length: int, lanes: int) -> Packing:
    """Lays whole documents into rows.

    Args:
        lengths_D: int64 [D], tokens of each document, all at least 1, in packing order.
        sequence_length: T, the most input tokens of a row.
        lanes: the number of rows is a multiple of this.

    Returns:
        A packing of R rows; 0 rows for no documents.

    Example: lengths [3, 9, 2, 1] with T = 4 and 1 lane make four rows: document 0 with the last token of document 1,
    tokens 0 to 3 of document 1, its tokens 4 to 7, and documents 2 and 3.
    """
    pieces = _pieces(lengths_D, sequence_length)
    missing = -pieces.num_rows % lanes
    while missing:
        divided = pieces.divide(missing) or pieces.halve(lengths_D > sequence_length, missing)
        if not divided:
            break
        missing -= divided
    return pieces.packing(lengths_D, pieces.num_rows + missing)


@dataclass(eq=False)
class _Pieces:
    """Pieces of documents, each in a row; no row without one. ``end_L`` is behind the last input in its document."""

    document_L: IntArray
    start_L: IntArray
    end_L: IntArray
    row_L: IntArray

    @property
    def num_rows(self) -> int:
        return int(self.row_L.max(initial=-1)) + 1

    def divide(self, most: int) -> int:
        """Moves every second piece of up to ``most`` rows to as many new ones; returns how many."""
        num_rows, inputs_L = self.num_rows, self.end_L - self.start_L
        by_row = np.lexsort((-inputs_L, self.row_L))
        counts_R = np.bincount(self.row_L)
        place = np.arange(len(by_row)) - np.repeat(np.cumsum(counts_R) - counts_R, counts_R)
        second = by_row[place % 2 == 1]
        lighter_R = np.bincount(self.row_L[second], inputs_L[second], num_rows)
        rows = np.argsort(-lighter_R, kind="stable")[:most]
        rows = rows[lighter_R[rows] > 0]
        moved_R = np.arange(num_rows)
        moved_R[rows] = num_rows + np.arange(len(rows))
        self.row_L[second] = moved_R[self.row_L[second]]
        return len(rows)

    def halve(self, long_D: npt.NDArray[np.bool_], most: int) -> int:
        """Moves the second half of up to ``most`` pieces of long documents to as many new rows; returns how many."""
        inputs_L = np.where(long_D[self.document_L], self.end_L - self.start_L, 0)
        halved = np.argsort(-inputs_L, kind="stable")[:most]
        halved = halved[inputs_L[halved] > 1]
        middle = (self.start_L[halved] + self.end_L[halved] + 1) // 2
        self.row_L = np.concatenate((self.row_L, self.num_rows + np.arange(len(halved))))
        self.document_L = np.concatenate((self.document_L, self.document_L[halved]))
        self.start_L = np.concatenate((self.start_L, middle))
        self.end_L = np.concatenate((self.end_L, self.end_L[halved]))
        self.end_L[halved] = middle
        return len(halved)

    def packing(self, lengths_D: IntArray, num_rows: int) -> Packing:
        """The pieces row by row, in packing order, rows by their first pieces, with empty ones behind."""
        order = np.lexsort((self.start_L, self.document_L))
        _, first_R = np.unique(self.row_L[order], return_index=True)
        rank_R = np.argsort(np.argsort(first_R))
        order = order[np.argsort(rank_R[self.row_L[order]], kind="stable")]
        document_L, start_L, end_L = self.document_L[order], self.start_L[order], self.end_L[order]
        lookahead_L = (end_L < lengths_D[document_L]).astype(np.int64)
        return Packing(
            document_L=document_L,
            start_L=start_L,
            length_L=end_L - start_L + lookahead_L,
            lookahead_L=lookahead_L,
            counts_R=np.bincount(rank_R[self.row_L], minlength=num_rows).astype(np.int64),
        )


def _pieces(lengths_D: IntArray, sequence_length: int) -> _Pieces:
    """Full rows of long documents first, then the rests and all other documents, placed by best fit."""
    full_D, rest_D = np.divmod(lengths_D, sequence_length)
    num_full = int(full_D.sum())
    number = np.arange(num_full) - np.repeat(np.cumsum(full_D) - full_D, full_D)  # full_D [2, 0, 3]: 0 1 0 1 2
    rests = np.flatnonzero(rest_D)
    document_L = np.concatenate((np.repeat(np.arange(len(lengths_D)), full_D), rests))
    start_L = np.concatenate((number, full_D[rests])) * sequence_length
    end_L = np.minimum(start_L + sequence_length, lengths_D[document_L])
    row_L = np.concatenate((np.arange(num_full), num_full + _best_rows(rest_D[rests], sequence_length)))
    return _Pieces(document_L, start_L, end_L, row_L)


def _best_rows(lengths: IntArray, room: int) -> IntArray:
    """The row of each piece, numbered in the order in which they are opened; ``room`` is that of a new row."""
    order = np.argsort(-lengths, kind="stable")
    rooms: list[int] = []  # of the rows that have any, each once, ascending
    rows: defaultdict[int, list[int]] = defaultdict(list)  # by room
    row_of, num_rows = [], 0
    for length in lengths[order].tolist():
        place = bisect_left(rooms, length)
        if place < len(rooms):
            left = rooms[place] - length
            row = rows[rooms[place]].pop()
            if not rows[rooms[place]]:
                del rooms[place]
        else:
            left, row, num_rows = room - length, num_rows, num_rows + 1
        if left:
            if not rows[left]:
                insort(rooms, left)
            rows[left].append(row)
        row_of.append(row)
    row_L = np.empty(len(order), np.int64)
    row_L[order] = row_of
    return row_L
