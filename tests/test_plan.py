"""The order of units: golden values, every unit once an epoch, weights, window ends, and resuming from any cursors."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ingest.plan import Plan, PlanSource, WindowPlan, auto_window_tokens, document_order, permutation, row_order
from ingest.slab import cursors_from_json, cursors_to_json


def plan_of(*sources, **options) -> Plan:
    """A plan over (name, tokens of each unit, weight)."""
    options = {"seed": 0, "shuffle": True, "window_tokens": 30, "num_epochs": 1} | options
    return Plan([PlanSource(name, np.array(tokens), weight) for name, tokens, weight in sources], **options)


def all_windows(plan: Plan) -> list[WindowPlan]:
    return list(plan.windows(plan.start()))


def shown(plan: Plan) -> list[tuple[int, list[tuple[int, int, int]]]]:
    """(window, [(source, epoch, unit)])."""
    return [(window.cursors.window, [tuple(unit) for unit in window.units]) for window in all_windows(plan)]


def numbers(plan: Plan, source: int = 0) -> list[int]:
    return [unit.number for window in all_windows(plan) for unit in window.units if unit.source == source]


sizes = st.lists(st.integers(1, 50), min_size=1, max_size=12)
plans = st.builds(
    lambda parts, **options: plan_of(
        *((f"s{i}", tokens, weight) for i, (tokens, weight) in enumerate(parts)), **options
    ),
    st.lists(st.tuples(sizes, st.integers(1, 1000)), min_size=1, max_size=4),
    seed=st.sampled_from([0, 1, 2**63 - 1]),
    shuffle=st.booleans(),
    window_tokens=st.integers(1, 200),
    num_epochs=st.integers(1, 3),
)


def test_golden_random_stream() -> None:
    assert permutation(10, 0, 1).tolist() == [7, 4, 5, 1, 9, 8, 6, 2, 0, 3]
    assert permutation(10, 0, 1, 7, 1).tolist() == [0, 6, 4, 2, 5, 7, 8, 9, 1, 3]
    assert permutation(5, 2**63 - 1, 1, 2**64 - 1, 0).tolist() == [4, 3, 2, 0, 1]
    assert permutation(0, 0, 1).tolist() == []


def test_golden_orders_of_documents_and_rows_differ() -> None:
    assert document_order(5, 3, 2).tolist() == [1, 2, 4, 0, 3]
    assert row_order(5, 3, 2).tolist() == [3, 0, 4, 1, 2]


def test_golden_order_of_one_source_over_two_epochs() -> None:
    assert shown(plan_of(("code", [10] * 7, 1), num_epochs=2)) == [
        (0, [(0, 0, 0), (0, 0, 3), (0, 0, 1)]),
        (1, [(0, 0, 2), (0, 0, 4), (0, 0, 6), (0, 0, 5)]),
        (2, [(0, 1, 2), (0, 1, 0), (0, 1, 4)]),
        (3, [(0, 1, 3), (0, 1, 6), (0, 1, 1), (0, 1, 5)]),
    ]


def test_golden_order_of_two_weighted_sources() -> None:
    assert shown(plan_of(("code", [10] * 6, 2), ("web", [10] * 3, 1))) == [
        (0, [(0, 0, 0), (1, 0, 2), (0, 0, 3)]),
        (1, [(0, 0, 1), (1, 0, 0), (0, 0, 2)]),
        (2, [(0, 0, 4), (1, 0, 1), (0, 0, 5)]),
    ]


@given(plans)
@settings(max_examples=30, deadline=None)
def test_every_unit_is_in_exactly_one_window_an_epoch(plan: Plan) -> None:
    seen = Counter(unit for window in all_windows(plan) for unit in window.units)
    expected = {
        (source, epoch, unit)
        for source, each in enumerate(plan.sources)
        for epoch in range(plan.num_epochs or 0)
        for unit in range(len(each.unit_tokens))
    }
    assert {tuple(unit) for unit in seen} == expected
    assert set(seen.values()) == {1}


@given(plans)
@settings(max_examples=30, deadline=None)
def test_windows_are_numbered_never_empty_and_count_their_tokens(plan: Plan) -> None:
    windows = all_windows(plan)
    assert [window.cursors.window for window in windows] == list(range(len(windows)))
    for window in windows:
        assert (
            window.tokens == sum(int(plan.sources[unit.source].unit_tokens[unit.number]) for unit in window.units) > 0
        )


@given(plans)
@settings(max_examples=30, deadline=None)
def test_only_the_final_window_is_marked_as_the_last(plan: Plan) -> None:
    assert [window.last for window in all_windows(plan)][::-1] == [True] + [False] * (len(all_windows(plan)) - 1)


@given(plans)
@settings(max_examples=15, deadline=None)
def test_resuming_from_the_cursors_of_any_window_gives_the_remaining_windows(plan: Plan) -> None:
    windows = all_windows(plan)
    for number, window in enumerate(windows):
        stored = cursors_from_json(json.loads(json.dumps(cursors_to_json(window.cursors))))
        fresh = Plan(
            plan.sources,
            seed=plan.seed,
            shuffle=plan.shuffle,
            window_tokens=plan.window_tokens,
            num_epochs=plan.num_epochs,
        )
        assert list(fresh.windows(stored)) == windows[number:]


@given(plans)
@settings(max_examples=30, deadline=None)
def test_a_window_ends_where_an_epoch_of_the_leading_source_ends(plan: Plan) -> None:
    passes = [(source.total_tokens / source.weight, source.total_tokens) for source in plan.sources]
    lead = passes.index(max(passes))
    for window in all_windows(plan):
        epochs = [unit.epoch for unit in window.units if unit.source == lead]
        assert len(set(epochs)) <= 1
        positions = sum(unit.source == lead for unit in window.units) + window.cursors.sources[lead].unit
        if positions == len(plan.sources[lead].unit_tokens) and epochs:
            assert window.units[-1].source == lead


def test_epochs_differ() -> None:
    order = numbers(plan_of(("code", [10] * 12, 1), num_epochs=3))
    first, second, third = order[:12], order[12:24], order[24:]
    assert sorted(first) == sorted(second) == sorted(third) == list(range(12))
    assert len({tuple(first), tuple(second), tuple(third)}) == 3


def test_seeds_differ() -> None:
    orders = {tuple(numbers(plan_of(("code", [10] * 12, 1), seed=seed))) for seed in (0, 1, 2, 2**63 - 1)}
    assert len(orders) == 4


def test_unshuffled_units_keep_their_order_every_epoch() -> None:
    plan = plan_of(("a", [10] * 6, 2), ("b", [10] * 3, 1), shuffle=False, num_epochs=2)
    assert numbers(plan, 0) == [0, 1, 2, 3, 4, 5] * 2
    assert numbers(plan, 1) == [0, 1, 2] * 2


def test_a_window_closes_at_its_target_size() -> None:
    assert [window.tokens for window in all_windows(plan_of(("a", [10] * 9, 1), window_tokens=25))] == [30, 30, 30]


def test_a_unit_larger_than_a_window_is_a_window_of_its_own() -> None:
    assert [len(w.units) for w in all_windows(plan_of(("a", [100, 100, 100], 1), window_tokens=25))] == [1, 1, 1]


def test_a_tail_under_half_a_window_joins_the_window_before_it() -> None:
    assert [window.tokens for window in all_windows(plan_of(("a", [10] * 7, 1), window_tokens=30))] == [30, 40]
    assert [window.tokens for window in all_windows(plan_of(("a", [10] * 7, 1), window_tokens=20))] == [20, 20, 20, 10]


def test_a_tail_counts_the_share_of_the_other_sources() -> None:
    plan = plan_of(("a", [10] * 7, 1), ("b", [10] * 7, 1), window_tokens=60)
    assert [window.tokens for window in all_windows(plan)] == [60, 70, 10]
    assert [unit.source for unit in all_windows(plan)[1].units][-1] == 0


def test_a_tail_that_the_other_sources_fill_to_half_a_window_is_a_window() -> None:
    plan = plan_of(("a", [10] * 8, 1), ("b", [10] * 8, 1), window_tokens=60)
    assert [window.tokens for window in all_windows(plan)] == [60, 60, 30, 10]


def test_an_epoch_of_the_leading_source_closes_a_window_under_its_target() -> None:
    windows = all_windows(plan_of(("a", [10] * 5, 1), window_tokens=1000, num_epochs=3))
    assert [(w.tokens, {unit.epoch for unit in w.units}) for w in windows] == [(50, {0}), (50, {1}), (50, {2})]


def test_a_tiny_source_that_repeats_does_not_cut_windows() -> None:
    plan = plan_of(("large", [10] * 200, 1), ("tiny", [10], 1), window_tokens=100, num_epochs=None)
    windows = list(islice(plan.windows(plan.start()), 39))
    assert {window.tokens for window in windows} == {100}
    assert windows[0].units[1::2] == tuple((1, epoch, 0) for epoch in range(5))


def test_the_largest_of_sources_whose_passes_take_equally_long_leads() -> None:
    plan = plan_of(("tiny", [10], 10), ("large", [10] * 20, 200), window_tokens=100)
    assert [window.tokens for window in all_windows(plan)] == [100, 110]


def test_weights_hold_over_an_endless_stream_of_uneven_units() -> None:
    rng = np.random.PCG64(5)
    sources = [(name, 1 + rng.random_raw(50) % 1000, weight) for name, weight in (("a", 7), ("b", 2), ("c", 1))]
    plan = plan_of(*sources, window_tokens=20_000, num_epochs=None)
    tokens = [0, 0, 0]
    for window in islice(plan.windows(plan.start()), 100):
        for unit in window.units:
            tokens[unit.source] += int(plan.sources[unit.source].unit_tokens[unit.number])
    shares = [count / sum(tokens) for count in tokens]
    assert shares == pytest.approx([0.7, 0.2, 0.1], abs=0.001)


def test_weights_hold_within_every_window_to_one_unit_a_source() -> None:
    plan = plan_of(("a", [10] * 40, 3), ("b", [10] * 40, 1), window_tokens=200, num_epochs=None)
    for window in islice(plan.windows(plan.start()), 20):
        count = sum(unit.source == 1 for unit in window.units)
        assert abs(count - len(window.units) / 4) <= 1


def test_only_the_ratio_of_weights_matters() -> None:
    sources = [("a", [10, 20, 30], 3), ("b", [5, 5], 1)]
    scaled = [(name, tokens, weight * 1_000_000) for name, tokens, weight in sources]
    assert shown(plan_of(*sources, num_epochs=4)) == shown(plan_of(*scaled, num_epochs=4))


def test_other_weights_at_a_resume_repeat_no_unit_within_a_source_epoch() -> None:
    parts = [("a", [10] * 20), ("b", [10] * 20)]
    even = plan_of(*((name, tokens, 1) for name, tokens in parts))
    before = list(islice(even.windows(even.start()), 3))
    uneven = plan_of(("a", [10] * 20, 2), ("b", [10] * 20, 1))
    resumed = next(islice(even.windows(even.start()), 3, None)).cursors
    units = [unit for window in [*before, *uneven.windows(resumed)] for unit in window.units]
    assert sorted(units) == [(source, 0, unit) for source in (0, 1) for unit in range(20)]


def test_adding_a_source_leaves_the_order_of_the_others_alone() -> None:
    alone = plan_of(("a", [10] * 12, 1), num_epochs=2)
    joined = plan_of(("new", [7] * 5, 1), ("a", [10] * 12, 1), num_epochs=2)
    assert numbers(alone) == numbers(joined, 1)


def test_sources_of_the_same_size_have_different_orders() -> None:
    plan = plan_of(("a", [10] * 12, 1), ("b", [10] * 12, 1))
    assert numbers(plan, 0) != numbers(plan, 1)


def test_cursors_stay_small_integers_over_a_long_endless_run() -> None:
    plan = plan_of(("a", [8_000_000] * 9, 1_000_000), ("b", [3_000_000] * 4, 333_333), num_epochs=None)
    window = next(islice(plan.windows(plan.start()), 2000, None))
    for cursor in window.cursors.sources:
        assert all(type(value) is int for value in dataclasses.astuple(cursor))
        assert 0 <= cursor.served <= (8_000_000 << 32) // 333_333
        assert cursor.unit < 9


def test_a_source_that_has_finished_leaves_the_mix() -> None:
    plan = plan_of(("a", [10] * 8, 1), ("b", [10] * 2, 1), num_epochs=1)
    assert [unit.source for window in all_windows(plan) for unit in window.units] == [0, 1, 0, 1, 0, 0, 0, 0, 0, 0]


@pytest.mark.parametrize(
    ("total_tokens", "sequence_length", "lanes", "window_tokens"),
    [
        (10**12, 2048, 8, 8_000_000),
        (10**12, 8192, 128, 200 * 8192 * 128),
        (10**8, 2048, 8, 6_250_000),
        (32_000_000, 512, 4, 2_000_000),
        (1_000_000, 2048, 8, 200 * 2048 * 8),
        (0, 2048, 8, 200 * 2048 * 8),
    ],
)
def test_auto_window_tokens(total_tokens: int, sequence_length: int, lanes: int, window_tokens: int) -> None:
    assert auto_window_tokens(total_tokens, sequence_length, lanes) == window_tokens
