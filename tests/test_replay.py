"""From a step to its documents: every path to a step tells the same, and together the steps tell every document."""

from __future__ import annotations

import json
from collections import defaultdict

import pyarrow.parquet as pq
import pytest

from ingest.cli import main
from ingest.config import IngestConfig
from ingest.errors import ConfigError, ResumeError
from ingest.replay import replay_state, replay_step
from ingest.run import Run
from tests.conftest import steps_without_ray, texts, write_config, write_corpus


@pytest.fixture(scope="module")
def config(tmp_path_factory, tokenizer_file):
    folder = tmp_path_factory.mktemp("replay")
    write_corpus(folder / "corpus", ["", *texts(40, seed=8)], files=[25, 0, 16], row_group_size=7)
    settings = {"tokenizer": {"path": str(tokenizer_file), "backend": "tokenizers"}, "epochs": 2}
    return write_config(folder / "run.yaml", **settings)


@pytest.fixture(scope="module")
def run(config):
    return Run.prepare(IngestConfig.from_yaml(config))


@pytest.fixture(scope="module")
def expected(config):
    return steps_without_ray(config)


def test_every_step_is_told_alike_from_the_start_from_a_state_before_it_and_from_its_own_state(run, expected):
    for step in (1, 2, 7, len(expected) - 1, len(expected)):
        told = replay_step(run, step, run.start())
        assert replay_state(run, expected[step - 1].position) == told
        if step > 2:
            assert replay_step(run, step, expected[step - 3].position) == told
        rows = expected[step - 1]
        assert [(row.window, row.row) for row in told] == list(
            zip(rows.window_B.tolist(), rows.index_B.tolist(), strict=True)
        )
        assert [row.lane for row in told if row.pieces] == [row.row % 4 for row in told if row.pieces]


def test_the_text_of_all_steps_together_is_every_document_of_both_epochs(run, expected):
    found = defaultdict(list)
    for step in range(1, len(expected) + 1):
        for row in replay_state(run, expected[step - 1].position):
            for place, piece in enumerate(row.pieces):
                found[piece.epoch, piece.file, piece.row_group, piece.row].append((row.window, row.row, place, piece))
    tokens = sum(piece.tokens for pieces in found.values() for *_, piece in pieces)
    assert tokens == expected[-1].position.tokens
    assert len(found) == 2 * 40
    for (_, file, row_group, row), pieces in found.items():
        text = pq.ParquetFile(file).read_row_group(row_group)["text"][row].as_py() + "<|endoftext|>"
        parts = [piece.text for *_, piece in pieces]
        assert sorted(map(len, parts)) == sorted(len(part) for part in parts if part in text)
        assert sum(map(len, parts)) == len(text)


def test_a_row_of_padding_in_the_last_step_has_no_pieces(run, expected):
    told = replay_state(run, expected[-1].position)
    assert [row.window for row in told] == expected[-1].window_B.tolist()
    assert [bool(row.pieces) for row in told] == [window >= 0 for window in expected[-1].window_B.tolist()]


def test_a_step_that_is_not_there_is_refused(run, expected):
    count = len(expected)
    with pytest.raises(ConfigError, match=rf"got {count + 1}, it ends after step {count}: name an earlier one"):
        replay_step(run, count + 1, run.start())
    with pytest.raises(ConfigError, match="got 3 and 3: name an earlier state, or none"):
        replay_step(run, 3, expected[2].position)
    with pytest.raises(ConfigError, match="got one before the first: name --step 1"):
        replay_state(run, run.start())


def test_the_state_of_another_run_is_refused(expected, tmp_path, config):
    settings = IngestConfig.from_yaml(config).to_dict() | {"shuffle": {"seed": 5, "window_tokens": 600}}
    other = Run.prepare(IngestConfig.from_dict(settings))
    with pytest.raises(ResumeError, match="seed"):
        replay_state(other, expected[3].position)


def test_the_command_prints_files_rows_and_text(config, run, expected, tmp_path, capsys):
    state = tmp_path / "state.json"
    state.write_text(expected[6].position.to_json())
    assert main(["inspect", str(config), "--state", str(state), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["step"] == 7
    assert [row["row"] for row in found["rows"]] == [row.row for row in replay_step(run, 7, run.start())]
    assert main(["inspect", str(config), "--step", "7", "--quiet"]) == 0
    lines = capsys.readouterr().out.splitlines()
    first = found["rows"][0]
    assert lines[:2] == ["step 7", f"window {first['window']} row {first['row']} lane {first['lane']}"]
    piece = first["pieces"][0]
    assert lines[2] == (
        f"  {piece['file']} row group {piece['row_group']} row {piece['row']} (only, epoch {piece['epoch']}), "
        f"{piece['tokens']} tokens: {piece['text'][:60]!r}"
    )
    assert main(["inspect", str(config)]) == 2
    assert "got neither --step nor --state: name one" in capsys.readouterr().err
