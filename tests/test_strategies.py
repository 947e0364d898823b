"""Every guarantee of the stream, under each packing strategy: order, resume, world sizes, counts, packed data, fill."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ingest.config import IngestConfig
from ingest.lanes import Step, step_digest
from ingest.pack import pack, packing_run
from ingest.packing import Strategy
from ingest.position import Position
from ingest.run import Run
from ingest.sample import write_sample
from ingest.window import Window, document_address
from tests.conftest import steps_without_ray, texts, write_config, write_corpus
from tests.test_lanes import rows_of
from tests.test_window import CORPUS, joins, pieces, placed, same
from tests.tiny import Tiny, encode

TWO = (*CORPUS, (("k" * 7, "l" * 8, "m" * 15, "n" * 16), ("o" * 40, "p"), ()))

both = pytest.mark.parametrize("strategy", ["concat", "best_fit"])


def tiny(strategy: Strategy, **options) -> Tiny:
    """Two epochs of 16 documents in rows of 8 tokens: 5 have more, one has exactly 8."""
    return Tiny(TWO, **({"lanes": 4, "global_batch_rows": 4, "num_epochs": 2} | options), strategy=strategy)


def by_document(window: Window) -> dict[tuple[int, int, int], list[list[int]]]:
    """The pieces of every document, by source, unit and row."""
    whole: dict[tuple[int, int, int], list[list[int]]] = {}
    for document, tokens in zip(window.piece_document_L.tolist(), pieces(window.rows), strict=True):
        unit, row = document_address(window, document)
        whole.setdefault((unit.source, unit.row_group, row), []).append(tokens)
    return whole


def test_golden_order_of_best_fit() -> None:
    windows = list(Tiny(CORPUS, window_tokens=20, strategy="best_fit").windows())
    assert [entry for window in windows for entry in placed(window)] == [
        (0, 0, (0, 2)),
        (0, 0, (1, 0)),
        (0, 1, (0, 1)),
        (0, 1, (0, 0)),
        (0, 1, (1, 2)),
        (1, 0, (2, 3)),
        (1, 0, (2, 0)),
        (1, 1, (2, 0)),
        (1, 1, (2, 4)),
        (1, 1, (2, 1)),
        (1, 1, (2, 2)),
    ]


def test_golden_digests_of_best_fit() -> None:
    digests = [step.position.digest for step in Tiny(CORPUS, window_tokens=20, strategy="best_fit").steps()]
    assert digests == ["9af5798d2628925f", "5562f887b4d58e69", "c13a1d7c2fed0745", "b9f9dffd462f1d9c"]


@both
@pytest.mark.parametrize("shuffle", [True, False])
def test_a_save_at_every_step_resumes_at_every_world_size_with_the_same_steps(strategy, shuffle: bool) -> None:
    run = tiny(strategy, shuffle=shuffle, window_tokens=60)
    whole = list(run.steps())
    assert len({step.position.window for step in whole}) > 2
    for saved in [run.start(), *(step.position for step in whole)]:
        restored = Position.from_json(saved.to_json())
        for world_size in (1, 2, 4):
            ranks = [list(run.steps(restored, rank, world_size)) for rank in range(world_size)]
            assert {len(steps) for steps in ranks} == {len(whole) - saved.step}
            for one, *several in zip(whole[saved.step :], *ranks, strict=True):
                assert sorted(row for step in several for row in rows_of(step)) == rows_of(one)
                assert all(step.position == one.position for step in several)


@both
def test_the_digest_of_every_step_is_that_of_its_rows(strategy) -> None:
    positions = [tiny(strategy).start(), *(step.position for step in tiny(strategy).steps())]
    for step, (before, after) in zip(tiny(strategy).steps(), pairwise(positions), strict=True):
        assert step_digest(step) == (after.counts.digest - before.counts.digest) % 2**64


@both
def test_a_window_made_twice_is_the_same_bit_for_bit(strategy) -> None:
    first, second = (list(tiny(strategy).windows()) for _ in range(2))
    assert all(same(one, other) for one, other in zip(first, second, strict=True))


documents = st.one_of(st.none(), st.text("abé日\0", max_size=20))
corpora = st.lists(st.lists(st.lists(documents, max_size=9), min_size=1, max_size=3), min_size=1, max_size=2)


@both
@settings(max_examples=40)
@given(corpora, st.integers(2, 12), st.sampled_from([1, 2, 4]), st.booleans(), st.integers(1, 200))
def test_every_token_is_trained_once_and_cuts_are_counted(strategy, corpus, length, lanes, shuffle, size) -> None:
    run = Tiny(corpus, length, lanes, lanes, shuffle=shuffle, window_tokens=size, strategy=strategy)
    expected = {
        (source, unit, row): encode([text])[0].tolist()
        for source, units in enumerate(corpus)
        for unit, some in enumerate(units)
        for row, text in enumerate(some)
        if text
    }
    tokens = 0
    for window in run.windows():
        end = window.prefix.at(window.prefix.rows)
        tokens += end.tokens
        whole = by_document(window)
        for address, parts in whole.items():
            assert joins(parts, expected.pop(address))
        assert end.documents_cut == sum(len(parts) > 1 for parts in whole.values())
        assert len(window.rows) % lanes == 0
        if strategy == "best_fit":
            assert all(len(parts) == 1 for parts in whole.values() if sum(map(len, parts)) <= length)
            assert end.documents_cut == (window.documents.lengths_D > length).sum()
    assert not expected
    last = [step.position for step in run.steps()][-1:]
    assert [position.tokens for position in last] == [tokens][: len(last)]


@both
@settings(max_examples=40)
@given(corpora, st.integers(2, 12), st.sampled_from([1, 2, 4]), st.booleans(), st.integers(1, 200))
def test_where_positions_continue_each_piece_knows_where_in_its_document_it_begins(
    strategy, corpus, length, lanes, shuffle, size
) -> None:
    run = Tiny(corpus, length, lanes, lanes, shuffle=shuffle, window_tokens=size, strategy=strategy)
    on = replace(run, position_ids="continue")
    for window, restarted in zip(on.windows(), run.windows(), strict=True):
        assert len(restarted.rows.starts_L) == 0
        assert pieces(window.rows) == pieces(restarted.rows)
        where = zip(window.piece_document_L.tolist(), window.rows.starts_L.tolist(), pieces(window.rows), strict=True)
        for document, start, tokens in where:
            unit, row = document_address(window, document)
            whole = encode([corpus[unit.source][unit.row_group][row]])[0].tolist()
            assert whole[start : start + len(tokens)] == tokens


@both
def test_starts_survive_slabs_steps_and_a_resume_at_every_world_size(strategy) -> None:
    run = tiny(strategy, window_tokens=60, position_ids="continue")
    whole = list(run.steps())
    assert max(step.rows.starts_L.max(initial=0) for step in whole) >= 32
    for saved in (run.start(), whole[2].position):
        for world_size in (1, 2, 4):
            ranks = [list(run.steps(saved, rank, world_size)) for rank in range(world_size)]
            for one, *several in zip(whole[saved.step :], *ranks, strict=True):
                assert sorted(started for step in several for started in starts_of(step)) == starts_of(one)
                before = whole[one.position.step - 2].position if one.position.step > 1 else run.start()
                digest = (one.position.counts.digest - before.counts.digest) % 2**64
                assert sum(map(step_digest, several)) % 2**64 == digest


def starts_of(step: Step) -> list[tuple[int, int, list[int]]]:
    """Window, row and the starts of its pieces."""
    rows = [step.rows.slice(i, i + 1).starts_L.tolist() for i in range(len(step.rows))]
    return sorted(zip(step.window_B.tolist(), step.index_B.tolist(), rows, strict=True))


@both
def test_a_start_that_is_another_one_shows_in_the_digest(strategy) -> None:
    on, restarted = (list(tiny(strategy, position_ids=name).steps()) for name in ("continue", "restart"))
    assert {step.position.digest for step in on}.isdisjoint(step.position.digest for step in restarted)
    step = next(step for step in on if step.rows.starts_L.any())
    moved = replace(step.rows, starts_L=step.rows.starts_L + np.int32(1))
    assert step_digest(step._replace(rows=moved)) != step_digest(step)


def test_best_fit_cuts_only_what_is_too_long_where_concat_cuts_most() -> None:
    cuts = {name: list(tiny(name).steps())[-1].position.counts.documents_cut for name in ("concat", "best_fit")}
    assert cuts == {"concat": 18, "best_fit": 10}


@both
def test_packed_rows_hold_what_the_stream_hands_out_and_count_the_same(strategy, tmp_path, tokenizer_file) -> None:
    corpus = [*texts(60, seed=4), "", None, " of" * 90]
    write_corpus(tmp_path / "corpus", corpus, files=2, row_group_size=20)
    options = {"tokenizer": {"path": str(tokenizer_file), "backend": "tokenizers"}, "lanes": 1, "global_batch_rows": 1}
    options |= {"packing": {"sequence_length": 32, "strategy": strategy}, "shuffle": {"window_tokens": 3000}}
    config = IngestConfig.from_yaml(write_config(tmp_path / "run.yaml", **options))
    run = packing_run(Run.prepare(config))
    stream = steps_without_ray(run.config)
    figures = pack(iter(stream), run.packed_format, run.storage, str(tmp_path / "packed"), lanes=1)
    counts = stream[-1].position.counts
    said = [figures[name] for name in ("rows", "tokens", "documents", "documents_cut")]
    assert said == [len(stream), counts.tokens, 61, counts.documents_cut]
    too_long = int((run.tokenizer.encode([text for text in corpus if text])[1] > 32).sum())
    assert (counts.documents_cut == too_long) == (strategy == "best_fit")

    packed = [{"name": "packed", "path": "packed"}]
    again = steps_without_ray(write_config(tmp_path / "again.yaml", **options, sources=packed))
    rows = lambda steps: Counter(step.rows.tokens_BX.tobytes() for step in steps)  # noqa: E731
    assert rows(again) == rows(stream)
    assert again[-1].position.counts.documents == 61
    assert again[-1].position.counts.documents_cut == counts.documents_cut > 0
    assert json.loads((tmp_path / "packed/_packed.json").read_text())["strategy"] == strategy


@pytest.mark.slow
@pytest.mark.timeout(400)
@both
def test_rows_of_the_sample_are_filled_to_99_5_percent_with_default_windows(strategy, sample: Path) -> None:
    config = IngestConfig.from_yaml(sample)
    config = replace(config, packing=replace(config.packing, sequence_length=2048, strategy=strategy))
    found = steps_without_ray(config)
    rows = sum(int((step.window_B >= 0).sum()) for step in found)  # but for those that fill the last step
    counts = found[-1].position.counts
    efficiency = counts.tokens / (rows * 2048)
    print(f"{strategy}: efficiency {efficiency:.4f}, documents cut {counts.documents_cut / counts.documents:.3f}")
    assert efficiency >= 0.995


@pytest.fixture(scope="module")
def sample(tmp_path_factory) -> Path:
    """The config of a whole sample."""
    return write_sample(tmp_path_factory.mktemp("sample") / "sample").config
