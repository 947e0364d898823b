"""Documents to rows, as arithmetic on lengths; no token is touched here.

A packing is a list of pieces. Each piece is a run of tokens of one document in one row. Every token is an input exactly
once. Where a document goes on in the next row, its piece reaches one token further, into the row's look-ahead column:
that token is only a label, so a cut costs no label. Without it each cut would lose one: 1/T of all labels where
documents are long (0.05 % at T = 2048). The look-ahead column costs 1/T of the bytes on the wire.

The number of rows is rounded up to a multiple of the lanes. The slack this leaves is spread: rows differ by at most one
token in fill, so no row is empty while another is full and no rank has a step without a loss. It stays below lanes /
rows.

Cost: about 40 ns a piece, vectorised.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
Strategy = Literal["concat", "best_fit"]  # this module's, and that of best_fit.py
PositionIds = Literal["restart", "continue"]  # where the pieces of one document begin to count


@dataclass(frozen=True, eq=False)
class Packing:
    """Which tokens of which document fill which row; see ``slab.py`` for the letters.

    Args:
        document_L: document of each piece, pieces in row order.
        start_L: offset of the piece's first token in its document.
        length_L: tokens of the piece, its look-ahead token included.
        lookahead_L: 1 where the piece ends in the look-ahead column, else 0; input tokens are length - lookahead.
        counts_R: pieces of each row.
    """

    document_L: IntArray
    start_L: IntArray
    length_L: IntArray
    lookahead_L: IntArray
    counts_R: IntArray


def concat(lengths_D: IntArray, sequence_length: int, lanes: int) -> Packing:
    """Lays documents end to end and cuts them into rows of equal fill.

    Args:
        lengths_D: int64 [D], tokens of each document, all at least 1, in packing order.
        sequence_length: T, the most input tokens of a row.
        lanes: the number of rows is a multiple of this.

    Returns:
        A packing of R rows, R the least multiple of ``lanes`` with R * T >= the sum of lengths; 0 rows for no
        documents.

    Example: lengths [5, 3] with T = 4 and 2 lanes make two rows of 4: document 0's first four tokens with its fifth as
    look-ahead, then its fifth token and document 1.
    """
    total = int(lengths_D.sum())
    num_rows = -(-total // (sequence_length * lanes)) * lanes
    row_begins = np.arange(num_rows + 1) * total // max(num_rows, 1)
    document_begins = np.concatenate(([0], np.cumsum(lengths_D)))
    begins = np.union1d(row_begins[:-1], document_begins[:-1])
    ends = np.append(begins[1:], total) if len(begins) else begins
    document = np.searchsorted(document_begins, begins, side="right") - 1
    row = np.searchsorted(row_begins, begins, side="right") - 1
    lookahead = (ends < document_begins[document + 1]).astype(np.int64)
    return Packing(
        document_L=document,
        start_L=begins - document_begins[document],
        length_L=ends - begins + lookahead,
        lookahead_L=lookahead,
        counts_R=np.bincount(row, minlength=num_rows).astype(np.int64),
    )
