"""Changes accepted at a resume: weights turn over at a window's end, all is recorded."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingest.changes import MAX_CHANGES, Change, name_of
from ingest.cli import main
from ingest.config import IngestConfig
from ingest.errors import ConfigError, ResumeError
from ingest.plan import Plan, PlanSource
from ingest.position import Position
from ingest.run import Run
from ingest.slab import cursors_from_json, cursors_to_json
from tests.conftest import lines_of, steps_without_ray, texts, write_config, write_corpus


def plan_of(sizes, weights, num_epochs=1, window_tokens=60):
    sources = [PlanSource(f"s{i}", np.array(each), weights[i]) for i, each in enumerate(sizes)]
    return Plan(sources, seed=0, shuffle=True, window_tokens=window_tokens, num_epochs=num_epochs)


def changed_over(then, now, number):
    """The windows of a run that stood in window ``number`` when the weights of ``now`` came to hold."""
    before = [window for window, _ in zip(then.windows(then.start()), range(number), strict=False)]
    rest = then.windows(then.start())
    begun = [window for window, _ in zip(rest, range(number + 1), strict=False)][-1]
    cursors = replace(begun.cursors, weights=tuple(source.weight for source in then.sources))
    stored = cursors_from_json(json.loads(json.dumps(cursors_to_json(cursors))))
    return before, begun, list(now.windows(stored))


def test_a_window_that_was_begun_ends_with_its_weights_and_the_next_ones_have_the_new_ones():
    sizes = [[10] * 300, [10] * 300]
    _, begun, after = changed_over(plan_of(sizes, (1, 1)), plan_of(sizes, (2, 1)), 5)
    assert after[0].units == begun.units
    assert [window.cursors.weights for window in after[:3]] == [(1, 1), None, None]
    assert [Counter(unit.source for unit in window.units) for window in after[:3]] == [
        {0: 3, 1: 3},
        {0: 4, 1: 2},
        {0: 4, 1: 2},
    ]


@given(
    st.lists(st.lists(st.integers(1, 50), min_size=1, max_size=12), min_size=2, max_size=3),
    st.lists(st.integers(1, 9), min_size=6, max_size=6),
    st.integers(0, 5),
    st.integers(1, 2),
)
def test_no_unit_comes_twice_or_is_lost_within_an_epoch_when_weights_change(sizes, weights, number, epochs):
    then, now = (plan_of(sizes, weights[first:], epochs) for first in (0, 3))
    before, begun, after = changed_over(then, now, number)
    seen = Counter(unit for window in before[:number] + after for unit in window.units)
    if begun.cursors.window < number:  # the run was over before that window
        seen = Counter(unit for window in before[:-1] + after for unit in window.units)
    assert set(seen.values()) == {1}
    assert len(seen) == epochs * sum(map(len, sizes))
    assert after[0].units == begun.units


def test_weights_on_another_scale_starve_no_source():
    sizes = [[10] * 900, [7] * 900]
    _, _, after = changed_over(plan_of(sizes, (1, 1)), plan_of(sizes, (700_001, 300_000)), 3)
    for window in after[1:20]:
        tokens = Counter({0: 0, 1: 0})
        for unit in window.units:
            tokens[unit.source] += sizes[unit.source][unit.number]
        assert 0.5 < tokens[0] / tokens.total() < 0.9


@pytest.fixture
def corpus(tmp_path, tokenizer_file):
    """Two sources of 120 documents in row groups of 5; a function of settings and weights."""
    for name in "ab":
        write_corpus(tmp_path / name, texts(120, seed=ord(name)), files=2, row_group_size=5)

    def write(weights=(1, 1), **settings):
        pairs = zip("ab", weights, strict=True)
        sources = [{"name": name, "path": name, "weight": weight} for name, weight in pairs]
        tokenizer = {"path": str(tokenizer_file), "backend": "tokenizers"}
        path = write_config(tmp_path / "run.yaml", **{"sources": sources, "tokenizer": tokenizer, **settings})
        return IngestConfig.from_yaml(path)

    return write


def inside(found):
    """The position of a step in the middle of a window, and of the last step in that window."""
    places = [step.position for step in found]
    at = next(n for n in range(4, len(places)) if places[n].window == places[n - 1].window == places[n + 1].window)
    return places[at], next(place for place in reversed(places) if place.window == places[at].window)


def test_weights_change_at_a_resume_and_every_row_is_trained_once(corpus):
    old = corpus()
    whole = steps_without_ray(old)
    start, last = inside(whole)
    config = corpus((2, 1), accept_changes=["weights"])
    begun = Run.prepare(config).require(Position.from_json(start.to_json()))
    rest = steps_without_ray(config, begun)
    steps_left = last.step - start.step  # of the window that was begun
    assert lines_of(rest, start)[:steps_left] == lines_of(whole)[start.step : last.step]
    assert lines_of(rest, start)[steps_left:] != lines_of(whole)[last.step :]
    end = rest[-1].position
    assert [source.documents for source in end.counts.account.sources] == [120, 120]
    assert tuple(source.tokens for source in end.counts.account.sources) == end.counts.source_tokens
    assert end.accepted == (Change(start.step, "sources.a.weight", "1.0", "2.0"),)
    for place in (begun, rest[0].position, rest[steps_left + 2].position):  # without the flag from now on
        again = Position.from_json(place.to_json())
        config = corpus((2, 1))
        assert Run.prepare(config).require(again) == again
        assert lines_of(steps_without_ray(config, again), again) == lines_of(rest, start)[place.step - start.step :]


def test_weights_that_change_twice_in_one_window_still_end_it_as_it_began(corpus):
    start, _ = inside(steps_without_ray(corpus()))
    accept = {"accept_changes": ["weights"]}
    once = Run.prepare(corpus((2, 1), **accept)).require(start)
    twice = Run.prepare(corpus((1, 3), **accept)).require(once)
    assert twice.cursors.weights == once.cursors.weights == (1_000_000, 1_000_000)
    assert [str(change) for change in twice.accepted] == [
        f"step {start.step}: sources.a.weight was 1.0, is 2.0",
        f"step {start.step}: sources.a.weight was 2.0, is 1.0",
        f"step {start.step}: sources.b.weight was 1.0, is 3.0",
    ]
    documents = [s.documents for s in steps_without_ray(corpus((1, 3)), twice)[-1].position.counts.account.sources]
    assert documents == [120, 120]


def rewritten(folder, change=lambda text: text):
    """Writes the files again: other bytes, as many row groups."""
    for path in folder.glob("*.parquet"):
        rows = [change(text) for text in pq.read_table(path)["text"].to_pylist()]
        pq.write_table(pa.table({"text": rows}), path, row_group_size=5, compression="zstd", write_page_checksum=True)


def test_files_that_were_only_compressed_again_resume_exactly_where_that_is_accepted(corpus, tmp_path):
    whole = steps_without_ray(corpus())
    start, _ = inside(whole)
    rewritten(tmp_path / "b")
    with pytest.raises(
        ResumeError, match=r"manifest: .*accept it knowingly with accept_changes: \[manifest\], or start"
    ):
        Run.prepare(corpus()).require(start)
    config = corpus(accept_changes=["manifest"])
    begun = Run.prepare(config).require(start)
    rest = steps_without_ray(config, begun)
    assert lines_of(rest, start) == lines_of(whole)[start.step :]
    assert {change.field for change in begun.accepted} == {"manifest", "sources.b.data"}
    assert begun.accepted[0].then == start.fingerprint["manifest"]


def test_other_text_that_is_accepted_starts_the_window_over(corpus, tmp_path):
    start, _ = inside(steps_without_ray(corpus()))
    rewritten(tmp_path / "b", lambda text: text.replace("the", "THE") or "x")
    config = corpus(accept_changes=["manifest"])
    rest = steps_without_ray(config, Run.prepare(config).require(start))
    first = rest[0].position
    assert (first.step, first.window, first.offset) == (start.step + 1, start.window, 2)
    assert first.base == start.counts
    again = Position.from_json(first.to_json())
    assert lines_of(steps_without_ray(corpus(), again), again) == lines_of(rest, start)[1:]
    rewritten(tmp_path / "a", lambda text: text.replace("of", "OF") or "x")  # accepted once is not accepted for ever
    with pytest.raises(ResumeError, match="must be made again as it was"):
        steps_without_ray(config, replace(again, fingerprint=Run.prepare(config).fingerprint))


def test_another_tokenizer_is_accepted_by_its_name(corpus, tmp_path, tokenizer_file):
    start, _ = inside(steps_without_ray(corpus()))
    other = tmp_path / "other.json"
    other.write_text(tokenizer_file.read_text() + "\n")
    tokenizer = {"path": str(other), "backend": "tokenizers"}
    with pytest.raises(ResumeError, match=r"tokenizer\.sha256: .*accept_changes: \[tokenizer\]"):
        Run.prepare(corpus(tokenizer=tokenizer, accept_changes=["manifest"])).require(start)
    begun = Run.prepare(corpus(tokenizer=tokenizer, accept_changes=["tokenizer"])).require(start)
    assert [change.field for change in begun.accepted] == ["tokenizer.sha256"]
    assert steps_without_ray(corpus(tokenizer=tokenizer), begun)[0].position.base == start.base  # it gives the same ids


def test_text_changed_without_an_accepted_change_is_refused_as_before(corpus):
    start, _ = inside(steps_without_ray(corpus()))
    config = corpus((2, 1), accept_changes=["weights"])
    begun = Run.prepare(config).require(start)
    forged = replace(begun, counts=replace(begun.counts, digest=begun.counts.digest ^ 1))
    with pytest.raises(ResumeError, match="must be made again as it was"):
        steps_without_ray(config, forged)


@pytest.mark.parametrize("weight", ["1", math.nan, 1e308, 0, -1, True, 10**30, 1e-300])
def test_a_weight_that_none_can_have_is_refused(corpus, weight):
    plain = Run.prepare(corpus()).start().to_dict()
    plain["fingerprint"]["sources"]["a"]["weight"] = weight
    run = Run.prepare(corpus((2, 1), accept_changes=["weights"]))
    with pytest.raises(ResumeError, match=r"position must hold weights between 0.000001 and 1000000; got \["):
        run.require(Position.from_dict(plain))


def test_a_window_size_that_auto_chose_is_to_be_kept_by_hand(corpus, tmp_path):
    small = {"lanes": 1, "global_batch_rows": 1, "packing": {"sequence_length": 2}}
    auto = {"shuffle": {"seed": 0, "window_tokens": "auto"}, **small}
    then = Run.prepare(corpus(**auto))
    rewritten(tmp_path / "b", lambda text: text[:3])
    with pytest.raises(
        ResumeError, match=r"shuffle.window_tokens: \d+ then, \d+ now, by auto .* set it to what it was"
    ):
        Run.prepare(corpus(accept_changes=["manifest"], **auto)).require(then.start())
    kept = {"shuffle": {"seed": 0, "window_tokens": then.window_tokens}, **small}
    run = Run.prepare(corpus(accept_changes=["manifest"], **kept))
    assert run.require(then.start()).accepted


@pytest.mark.parametrize(
    "change", [{"packing": {"sequence_length": 8}}, {"shuffle": {"seed": 1, "window_tokens": 600}}, {"lanes": 2}]
)
def test_what_fixes_shapes_or_order_is_never_accepted(corpus, change):
    start = Run.prepare(corpus()).start()
    every = ["manifest", "tokenizer", "weights", "filter"]
    with pytest.raises(ResumeError, match="restore what changed, or start from step 0") as caught:
        Run.prepare(corpus((2, 1), accept_changes=every, **change)).require(start)
    assert "weight" not in str(caught.value)


def test_a_name_that_nothing_has_is_refused(corpus):
    with pytest.raises(
        ConfigError, match=r"accept_changes must be names of manifest, tokenizer, .*; got lanes: nothing"
    ):
        corpus(accept_changes=["weights", "lanes"])


@pytest.mark.parametrize(
    ("field", "name"),
    [
        ("manifest", "manifest"),
        ("sources.a.b.data", "manifest"),
        ("sources.a.rows", "manifest"),
        ("tokenizer.bos_token", "tokenizer"),
        ("sources.a.weight", "weights"),
        ("sources.weight.index", None),
        ("sources.a.text_column", None),
        ("shuffle.seed", None),
        ("plan", None),
    ],
)
def test_each_field_is_accepted_by_one_name_or_never(field, name):
    assert name_of(field) == name


def test_the_record_is_bounded(corpus):
    run = Run.prepare(corpus((2, 1), accept_changes=["weights"]))
    many = tuple(Change(0, "manifest", "a" * 32, "b" * 32) for _ in range(MAX_CHANGES))
    place = run.require(replace(Run.prepare(corpus()).start(), accepted=many))
    assert len(place.accepted) == MAX_CHANGES
    assert place.accepted[-1] == Change(0, "sources.a.weight", "1.0", "2.0")
    assert len(Change.of(1, "x", "y" * 9999, "z").then) == 64


@pytest.mark.parametrize(
    "change",
    [
        {"accepted": [["x", "manifest", "a", "b"]]},
        {"accepted": [[1, "manifest", "a"]]},
        {"accepted": 3},
        {"cursors": {"weights": [1]}},
        {"cursors": {"weights": [0, 1]}},
        {"cursors": {"weights": [1, -1]}},
        {"cursors": {"weights": "11"}},
    ],
)
def test_a_damaged_record_is_refused(corpus, change):
    plain = Run.prepare(corpus()).start().to_dict()
    plain["cursors"] |= change.pop("cursors", {})
    with pytest.raises(ResumeError, match="position must"):
        Position.from_dict(plain | change)


def test_inspect_shows_what_was_accepted(corpus, tmp_path, capsys):
    start, _ = inside(steps_without_ray(corpus()))
    config = corpus((2, 1), accept_changes=["weights"])
    place = steps_without_ray(config, Run.prepare(config).require(start))[0].position
    (tmp_path / "state.json").write_text(place.to_json())
    assert main(["inspect", str(tmp_path / "run.yaml"), "--state", str(tmp_path / "state.json"), "--quiet"]) == 0
    assert f"accepted at step {start.step}: sources.a.weight was 1.0, is 2.0" in capsys.readouterr().out


def test_a_step_that_began_before_the_window_of_an_accepted_change_is_refused_with_a_way(corpus, tmp_path, capsys):
    places = [step.position for step in steps_without_ray(corpus())]
    across = next(place for place in places[3:] if place.offset == 1)
    (tmp_path / "state.json").write_text(
        Run.prepare(corpus((2, 1), accept_changes=["weights"])).require(across).to_json()
    )
    corpus((2, 1))
    assert main(["inspect", str(tmp_path / "run.yaml"), "--state", str(tmp_path / "state.json"), "--quiet"]) == 2
    assert f"name an earlier state and --step {across.step}" in capsys.readouterr().err
