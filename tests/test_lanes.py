from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ingest.errors import ConfigError, DataError, OrderError, ResumeError
from ingest.lanes import Lanes, Step, step_digest, steps
from ingest.position import Position
from tests.tiny import EOS, Tiny, documents_of

UNEVEN = (
    (
        ("a", "bb", "ccc"),
        ("dddd", "", "eeeee", None),
        ("f" * 30, "g", "h", "i", "j"),
        (),
    ),
)


def rows_of(step: Step) -> list[tuple[int, int, tuple[int, ...]]]:
    rows = zip(step.window_B.tolist(), step.index_B.tolist(), step.rows.tokens_BX.tolist(), strict=True)
    return sorted((window, index, tuple(tokens)) for window, index, tokens in rows)


tinies = st.builds(
    Tiny,
    corpus=st.lists(
        st.lists(st.lists(st.one_of(st.none(), st.text("ab", max_size=30)), max_size=5), min_size=1, max_size=4),
        min_size=1,
        max_size=3,
    ),
    sequence_length=st.integers(2, 12),
    lanes=st.just(4),
    global_batch_rows=st.sampled_from([4, 8, 12]),
    seed=st.integers(0, 3),
    shuffle=st.booleans(),
    window_tokens=st.integers(1, 120),
    num_epochs=st.integers(1, 3),
)


@given(tinies)
@settings(max_examples=15, deadline=None)
def test_saving_at_every_step_and_restoring_continues_with_the_same_steps(tiny: Tiny) -> None:
    whole = list(tiny.steps())
    for saved in [tiny.start(), *(step.position for step in whole)]:
        restored = Position.from_json(saved.to_json())
        assert restored == saved
        rest = list(tiny.steps(restored))
        assert [rows_of(step) for step in rest] == [rows_of(step) for step in whole[saved.step :]]
        assert [step.position for step in rest] == [step.position for step in whole[saved.step :]]


@given(tinies, st.sampled_from([2, 4]))
@settings(max_examples=12, deadline=None)
def test_every_world_size_gives_the_same_global_batches_and_positions(tiny: Tiny, world_size: int) -> None:
    alone = list(tiny.steps())
    ranks = [list(tiny.steps(rank=rank, world_size=world_size)) for rank in range(world_size)]
    assert {len(steps) for steps in ranks} == {len(alone)}
    for number, one in enumerate(alone):
        several = [steps[number] for steps in ranks]
        assert sorted(row for step in several for row in rows_of(step)) == rows_of(one)
        assert {json.dumps(step.position.to_dict()) for step in several} == {json.dumps(one.position.to_dict())}


@given(tinies)
@settings(max_examples=12, deadline=None)
def test_every_document_is_trained_on_exactly_once_an_epoch(tiny: Tiny) -> None:
    seen = Counter(address for window in tiny.windows() for address in documents_of(window))
    expected = Counter(
        (source, epoch, unit, row)
        for source, units in enumerate(tiny.corpus)
        for epoch in range(tiny.num_epochs or 0)
        for unit, documents in enumerate(units)
        for row, document in enumerate(documents)
        if document
    )
    assert seen == expected
    every_step = list(tiny.steps())
    tokens = sum(len(d) + 1 for units in tiny.corpus for unit in units for d in unit if d) * (tiny.num_epochs or 0)
    assert (every_step[-1].position.tokens if every_step else 0) == tokens


@given(tinies)
@settings(max_examples=12, deadline=None)
def test_the_digest_recomputed_from_the_rows_is_the_difference_of_the_positions(tiny: Tiny) -> None:
    before = 0
    for step in tiny.steps():
        assert step_digest(step) == (step.position.counts.digest - before) % 2**64
        before = step.position.counts.digest


def test_every_batch_is_full_and_the_last_is_filled_with_padding_rows() -> None:
    every_step = list(Tiny(UNEVEN, lanes=4, global_batch_rows=8, sequence_length=5).steps())
    assert [len(step.rows) for step in every_step] == [8] * len(every_step)
    last = every_step[-1]
    padding = last.rows.tokens_BX[last.window_B == -1]
    assert len(padding) == 4
    assert (padding == EOS).all()
    assert last.position.rows * 5 == last.position.tokens + last.position.padding


def test_documents_and_skips_are_counted() -> None:
    last = list(Tiny(UNEVEN, num_epochs=2).steps())[-1].position
    assert last.counts.documents == 2 * 10
    assert last.counts.skipped == 2 * 2


def test_total_tokens_ends_the_stream_on_the_step_that_reaches_it() -> None:
    tiny = Tiny(UNEVEN, num_epochs=None, total_tokens=200)
    every_step = list(islice(tiny.steps(), 1000))
    assert every_step[-2].position.tokens < 200 <= every_step[-1].position.tokens
    assert next(tiny.steps(every_step[-1].position), None) is None


@pytest.mark.parametrize("damage", ["repeat", "lose", "swap", "end", "other rank", "other world size", "half"])
def test_a_splitter_that_misroutes_or_repeats_a_slab_is_caught(damage: str) -> None:
    tiny = Tiny(UNEVEN, window_tokens=8)
    mine, others = (list(tiny.slabs(tiny.plan.start(), rank, 2)) for rank in (0, 1))
    damaged = {
        "repeat": [mine[0], *mine],
        "lose": [mine[0], mine[2]],
        "swap": [mine[1], mine[0], mine[2]],
        "end": mine[:-1],
        "other rank": [mine[0], others[1], mine[2]],
        "other world size": list(tiny.slabs(tiny.plan.start())),
        "half": [replace(mine[0], rows=mine[0].rows.slice(0, 0)), *mine[1:]],
    }[damage]
    with pytest.raises(OrderError, match=r"rank 0 of 2 must get its slab of window \d+ next; got "):
        list(steps(iter(damaged), tiny.start(), Lanes(2, 2, 0, 2), EOS, None))


def test_a_resume_on_other_text_is_refused_before_the_first_step() -> None:
    tiny = Tiny(UNEVEN, window_tokens=20)
    saved = next(
        s.position
        for s in tiny.steps()
        if 0 in {u.row_group for u in next(tiny.windows(s.position.cursors)).spec.units}
    )
    other = Tiny(((("a", "bb", "ccX"), *UNEVEN[0][1:]),), window_tokens=20)
    with pytest.raises(
        ResumeError, match=f"must be made again as it was at step {saved.step}; digest {saved.digest} then"
    ):
        next(other.steps(saved))


@pytest.mark.parametrize(
    ("rank", "world_size", "words"),
    [
        (0, 3, "world_size must divide lanes; got 3 and 8"),
        (0, 0, "got 0"),
        (2, 2, "rank must be"),
        (-1, 2, "rank must be"),
    ],
)
def test_a_world_size_or_rank_that_does_not_fit_is_refused(rank: int, world_size: int, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Lanes(8, 8, rank, world_size)


def test_the_message_about_a_world_size_names_what_would_do() -> None:
    with pytest.raises(ConfigError) as caught:
        Lanes(16, 16, 0, 6)
    assert str(caught.value) == (
        "world_size must divide lanes; got 6 and 16: train on 1 or 2 or 4 or 8 or 16 workers, "
        "or start a new run with lanes: 18 and global_batch_rows a multiple of it"
    )


def test_a_state_of_ten_sources_is_small() -> None:
    tiny = Tiny([[["a" * 9]] * 3] * 10)
    text = list(tiny.steps())[-1].position.to_json()
    assert len(text) < 16_000


def test_rows_of_a_step_come_lane_by_lane() -> None:
    step = next(Tiny(UNEVEN, lanes=2, global_batch_rows=4).steps())
    assert step.index_B.tolist() == [0, 2, 1, 3]
    assert np.unique(step.window_B).tolist() == [0]


def test_an_endless_stream_of_no_text_is_an_error_and_not_a_hang() -> None:
    tiny = Tiny((((None, ""), (None,)),), num_epochs=None, total_tokens=10)
    with pytest.raises(DataError, match="the sources must hold text; got none in a whole pass"):
        next(tiny.steps())
