"""What ``ingest plan`` says, against literal sizes and against what the run then does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ingest.config import IngestConfig
from ingest.forecast import actor_bytes, forecast
from ingest.run import Run
from tests.tiny import tokenizer_json, write_parquet


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> dict:
    folder: Path = tmp_path_factory.mktemp("forecast")
    (folder / "tokenizer.json").write_text(tokenizer_json())
    for number in range(4):
        write_parquet(folder / "data" / f"{number}.parquet", ["word " * (10 + number)] * 18, row_group_size=6)
    return {
        "sources": [{"name": "words", "path": str(folder / "data")}],
        "tokenizer": {"path": str(folder / "tokenizer.json"), "eos_token": "<|endoftext|>", "backend": "tokenizers"},
        "packing": {"sequence_length": 8},
        "lanes": 4,
        "global_batch_rows": 8,
    }


def figures(settings: dict, step_time_s: float = 1.0) -> dict:
    return forecast(Run.prepare(IngestConfig.from_dict(settings)), step_time_s)


def test_the_forecast_names_the_windows_that_the_plan_makes(settings: dict) -> None:
    run = Run.prepare(IngestConfig.from_dict(settings))
    told = forecast(run, 1.0)
    assert told["windows"] == len(list(run.plan.windows(run.plan.start())))
    assert told["world_sizes"] == "1 2 4"
    assert told["tokens"] == sum(int(source.unit_tokens.sum()) for source in run.manifest.sources)


def test_the_demand_grows_as_the_step_gets_shorter(settings: dict) -> None:
    slow, fast = figures(settings, 1.0), figures(settings, 0.001)
    assert (slow["demanded_tokens_per_s"], fast["demanded_tokens_per_s"]) == (64, 64_000)
    assert (slow["demanded_actors"], fast["demanded_actors"]) == (1, 1)
    assert figures(settings, 0.00001)["demanded_actors"] == 13


def test_what_will_hurt_is_said_before_it_does(settings: dict) -> None:
    tight = settings | {"shuffle": {"window_tokens": 64}, "resources": {"tokenize_actors": 1}}
    warnings = " ".join(figures(tight, 0.00001)["warnings"])
    assert "padding may reach" in warnings
    assert "1 actors tokenize about 500,000 tokens/s and the trainer takes 6,400,000" in warnings


def test_padding_that_the_bound_does_not_hold_is_named_with_best_fit_only(settings: dict) -> None:
    fitted = settings | {"packing": {"sequence_length": 8, "strategy": "best_fit"}}
    words = "with best_fit rows are padded where no document fits, beyond padding_bound"
    assert [words in " ".join(figures(each)["warnings"]) for each in (settings, fitted)] == [False, True]


def test_the_memory_of_an_actor_follows_the_window_and_the_row_groups_read_ahead(settings: dict) -> None:
    run = Run.prepare(IngestConfig.from_dict(settings))
    text = max(int(source.unit_text_bytes.max()) for source in run.manifest.sources)
    assert actor_bytes(run, 0) == (300 << 20) + 4 * text
    assert actor_bytes(run, 8_000_000) - actor_bytes(run, 0) == 40_000_000  # 2.5 times uint16
    (source,) = run.manifest.sources
    huge = replace(source, unit_text_bytes=source.unit_text_bytes + (1 << 30))
    assert actor_bytes(replace(run, manifest=replace(run.manifest, sources=(huge,))), 0) == (300 << 20) + 4 * (64 << 20)
