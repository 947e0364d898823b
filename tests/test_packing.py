"""Documents to rows: literal packings, nothing lost, nothing twice, even fill."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ingest.packing import Packing, concat


def packed(lengths: list[int], sequence_length: int, lanes: int) -> Packing:
    return concat(np.array(lengths, np.int64), sequence_length, lanes)


def by_row(packing: Packing) -> list[list[tuple[int, int, int, int]]]:
    """(document, start, length, lookahead) of every piece, row by row."""
    arrays = (packing.document_L, packing.start_L, packing.length_L, packing.lookahead_L)
    pieces = list(zip(*(array.tolist() for array in arrays), strict=True))
    ends = np.cumsum(packing.counts_R).tolist()
    return [pieces[start:stop] for start, stop in zip([0, *ends], ends, strict=False)]


def test_a_cut_document_goes_on_in_the_next_row_with_its_next_token_as_look_ahead() -> None:
    assert by_row(packed([5, 3], 4, 2)) == [[(0, 0, 5, 1)], [(0, 4, 1, 0), (1, 0, 3, 0)]]


def test_a_document_that_ends_with_its_row_has_no_look_ahead() -> None:
    assert by_row(packed([4, 4], 4, 1)) == [[(0, 0, 4, 0)], [(1, 0, 4, 0)]]


def test_a_document_of_many_rows_looks_ahead_at_every_cut() -> None:
    assert by_row(packed([10], 4, 1)) == [[(0, 0, 4, 1)], [(0, 3, 4, 1)], [(0, 6, 4, 0)]]


def test_the_slack_is_spread_over_all_rows() -> None:
    rows = by_row(packed([3, 3, 3], 4, 4))
    assert [sum(length - lookahead for _, _, length, lookahead in row) for row in rows] == [2, 2, 2, 3]


def test_fewer_tokens_than_lanes_leave_rows_empty() -> None:
    assert by_row(packed([2], 8, 4)) == [[], [(0, 0, 2, 1)], [], [(0, 1, 1, 0)]]


def test_no_documents_make_no_rows() -> None:
    packing = packed([], 8, 4)
    assert len(packing.counts_R) == len(packing.document_L) == len(packing.length_L) == 0


@pytest.mark.parametrize(
    ("total", "sequence_length", "lanes", "rows"),
    [(1, 4, 1, 1), (4, 4, 1, 1), (5, 4, 1, 2), (16, 4, 4, 4), (17, 4, 4, 8)],
)
def test_the_number_of_rows_is_the_least_multiple_of_lanes_that_holds_the_tokens(
    total: int, sequence_length: int, lanes: int, rows: int
) -> None:
    assert len(packed([total], sequence_length, lanes).counts_R) == rows


inputs = (
    st.lists(st.integers(1, 40), max_size=30),
    st.integers(2, 16),
    st.integers(1, 8),
)


@given(*inputs)
@settings(max_examples=50, deadline=None)
def test_every_token_is_an_input_exactly_once_and_in_order(
    lengths: list[int], sequence_length: int, lanes: int
) -> None:
    inputs = [
        (document, offset)
        for row in by_row(packed(lengths, sequence_length, lanes))
        for document, start, length, lookahead in row
        for offset in range(start, start + length - lookahead)
    ]
    assert inputs == [(document, offset) for document, length in enumerate(lengths) for offset in range(length)]


@given(*inputs)
@settings(max_examples=50, deadline=None)
def test_a_piece_looks_ahead_exactly_where_its_document_goes_on(
    lengths: list[int], sequence_length: int, lanes: int
) -> None:
    for row in by_row(packed(lengths, sequence_length, lanes)):
        for number, (document, start, length, lookahead) in enumerate(row):
            goes_on = start + length - lookahead < lengths[document]
            assert lookahead == goes_on
            assert not lookahead or number == len(row) - 1
            assert length > lookahead


@given(*inputs)
@settings(max_examples=50, deadline=None)
def test_rows_differ_by_at_most_one_token_and_the_slack_is_under_one_row_a_lane(
    lengths: list[int], sequence_length: int, lanes: int
) -> None:
    packing = packed(lengths, sequence_length, lanes)
    fill = [sum(length - lookahead for _, _, length, lookahead in row) for row in by_row(packing)]
    num_rows = len(packing.counts_R)
    assert num_rows % lanes == 0
    assert num_rows * sequence_length - sum(lengths) < lanes * sequence_length
    assert max(fill, default=0) - min(fill, default=0) <= 1
    assert max(fill, default=0) <= sequence_length
