"""Documents to rows: literal packings, nothing lost, nothing twice, even fill, no needless cut, linear time."""

from __future__ import annotations

import time
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ingest.best_fit import best_fit
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


def fitted(lengths: list[int], sequence_length: int, lanes: int) -> list[list[tuple[int, int, int, int]]]:
    return by_row(best_fit(np.array(lengths, np.int64), sequence_length, lanes))


@pytest.mark.parametrize(
    ("lengths", "sequence_length", "documents"),
    [
        ([1, 2, 3, 4], 5, [[0, 3], [1, 2]]),
        ([4, 3, 1, 2], 5, [[0, 2], [1, 3]]),
        ([2, 2, 2], 4, [[0, 1], [2]]),
        ([5, 6, 4, 3, 2], 10, [[0, 3, 4], [1, 2]]),
    ],
    ids=["least room first", "rows in packing order", "equal documents in packing order", "several a row"],
)
def test_documents_go_longest_first_where_the_least_room_is_left(lengths, sequence_length: int, documents) -> None:
    rows = fitted(lengths, sequence_length, 1)
    assert rows == [[(d, 0, lengths[d], 0) for d in row] for row in documents]


def test_among_rows_of_equal_room_the_one_filled_last_takes_the_document() -> None:
    assert fitted([3, 3, 1], 4, 1) == [[(0, 0, 3, 0)], [(1, 0, 3, 0), (2, 0, 1, 0)]]


def test_a_document_longer_than_a_row_fills_rows_and_packs_its_rest() -> None:
    assert fitted([3, 9, 2, 1], 4, 1) == [
        [(0, 0, 3, 0), (1, 8, 1, 0)],
        [(1, 0, 5, 1)],
        [(1, 4, 5, 1)],
        [(2, 0, 2, 0), (3, 0, 1, 0)],
    ]


def test_documents_that_fill_whole_rows_leave_no_rest_and_no_look_ahead_at_their_end() -> None:
    assert fitted([4, 8], 4, 1) == [[(0, 0, 4, 0)], [(1, 0, 5, 1)], [(1, 4, 4, 0)]]


def test_rows_that_lack_to_the_lanes_take_whole_documents_of_the_row_that_divides_best() -> None:
    assert fitted([3, 1, 2, 2], 4, 3) == [[(0, 0, 3, 0), (1, 0, 1, 0)], [(2, 0, 2, 0)], [(3, 0, 2, 0)]]
    assert fitted([1] * 8, 8, 4) == [[(d, 0, 1, 0) for d in row] for row in ([0, 4], [1, 5], [2, 6], [3, 7])]


def test_where_no_row_can_be_divided_pieces_of_long_documents_are_halved() -> None:
    assert fitted([5], 4, 4) == [[(0, 0, 2, 1)], [(0, 1, 2, 1)], [(0, 2, 3, 1)], [(0, 4, 1, 0)]]
    assert fitted([4, 3], 4, 4) == [[(0, 0, 4, 0)], [(1, 0, 3, 0)], [], []]


def test_best_fit_of_no_documents_makes_no_rows() -> None:
    assert fitted([], 8, 4) == []


@given(*inputs)
@settings(max_examples=100, deadline=None)
def test_best_fit_cuts_no_document_that_fits_and_lays_every_token_once(
    lengths: list[int], sequence_length: int, lanes: int
) -> None:
    packing = best_fit(np.array(lengths, np.int64), sequence_length, lanes)
    pieces = Counter(packing.document_L.tolist())
    assert all(pieces[document] == 1 for document, length in enumerate(lengths) if length <= sequence_length)
    seen: Counter[tuple[int, int]] = Counter()
    for row in by_row(packing):
        assert sum(length - lookahead for _, _, length, lookahead in row) <= sequence_length
        assert row == sorted(row)
        for number, (document, start, length, lookahead) in enumerate(row):
            seen.update((document, offset) for offset in range(start, start + length - lookahead))
            goes_on = start + length - lookahead < lengths[document]
            assert lookahead == goes_on
            assert not lookahead or number == len(row) - 1
            assert length > lookahead
    assert seen == Counter((document, offset) for document, length in enumerate(lengths) for offset in range(length))


@given(*inputs)
@settings(max_examples=100, deadline=None)
def test_best_fit_leaves_a_row_empty_only_where_nothing_can_be_divided(
    lengths: list[int], sequence_length: int, lanes: int
) -> None:
    packing = best_fit(np.array(lengths, np.int64), sequence_length, lanes)
    rows, alone = by_row(packing), by_row(best_fit(np.array(lengths, np.int64), sequence_length, 1))
    assert len(rows) == -(-len(alone) // lanes) * lanes
    assert all(alone)
    if not all(rows):
        assert max(map(len, rows)) == 1
        inputs = [(lengths[d], length - lookahead) for row in rows for d, _, length, lookahead in row]
        assert all(whole <= sequence_length or part == 1 for whole, part in inputs)


@given(*inputs)
@settings(max_examples=50, deadline=None)
def test_two_documents_of_rows_made_by_best_fit_never_fit_into_one(
    lengths: list[int], sequence_length: int, lanes: int
) -> None:
    fill = [sum(length - lookahead for _, _, length, lookahead in row) for row in fitted(lengths, sequence_length, 1)]
    assert sum(2 * tokens <= sequence_length for tokens in fill) <= 1


def timed_packing(count: int) -> float:
    """Least seconds of three to pack documents whose lengths are those of code, in rows of 2,048."""
    lengths = np.random.default_rng(0).lognormal(6.2, 1.3, count).astype(np.int64) + 1
    least = float("inf")
    for _ in range(3):
        began = time.process_time()
        best_fit(lengths, 2048, 8)
        least = min(least, time.process_time() - began)
    return least


@pytest.mark.slow
def test_best_fit_takes_ten_times_as_long_for_ten_times_the_documents() -> None:
    few, many = timed_packing(10_000), timed_packing(100_000)
    print(f"{few * 100:.2f} us a document of 10,000, {many * 10:.2f} of 100,000")
    assert many / few < 16
    assert many < 2.0
