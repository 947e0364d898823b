"""``ingest stream`` end to end: the same global batches at every world size, and after every kind of resume."""

import dataclasses
import json

import pytest

from ingest.cli import main
from ingest.config import IngestConfig
from ingest.run import Run
from tests.conftest import lines_of, read_lines, steps_without_ray, texts, write_config, write_corpus

pytestmark = [pytest.mark.ray, pytest.mark.timeout(400)]

KEYS = {"steps", "rows", "tokens", "tokens_per_s", "first_batch_s", "wait_share", "padding_share", "digest"}


@pytest.fixture(scope="module")
def config(tmp_path_factory, tokenizer_file):
    """Two weighted sources of uneven files, with documents and a file that are empty; the larger runs 2.5 epochs."""
    folder = tmp_path_factory.mktemp("stream")
    large = texts(90, seed=1)
    large[3] = large[40] = ""
    large[77] = None
    write_corpus(folder / "large", large, files=[3, 4, 0, 60, 23], row_group_size=7)
    write_corpus(folder / "small", ["", None, *texts(30, seed=2)], files=[5, 27], row_group_size=4)
    return write_config(
        folder / "run.yaml",
        sources=[{"name": "large", "path": "large", "weight": 0.7}, {"name": "small", "path": "small", "weight": 0.3}],
        tokenizer={"path": str(tokenizer_file), "backend": "tokenizers"},
        shuffle={"window_tokens": 1500},
        global_batch_rows=4,  # one row a lane, so that every window ends on a step
        total_tokens=9_000,
    )


@pytest.fixture(scope="module")
def expected(config):
    return steps_without_ray(config)


@pytest.fixture(scope="module")
def places(expected):
    """Where to stop, as numbers of steps from the start."""
    positions = [step.position for step in expected]
    epochs = [position.cursors.sources[0].epoch for position in positions]
    turns = [count for count in range(1, len(epochs)) if epochs[count] > epochs[count - 1]]
    window_ends = [count for count in range(1, len(positions)) if positions[count].base == positions[count - 1].counts]
    places = {
        "inside a window": next(count for count in range(3, len(positions)) if count not in window_ends),
        "at a window's end": next(count for count in window_ends if 5 < count < turns[0]),
        "at the epoch's end": next(count for count in turns if count in window_ends),
        "in epoch 2": next(count for count in range(turns[0] + 5, turns[1]) if count not in window_ends),
    }
    assert list(places.values()) == sorted(places.values())
    return places


def stream(config, folder, *arguments):
    """Runs the command in this process; returns its digest lines."""
    lines = folder / "digests.jsonl"
    assert main(["stream", str(config), "--quiet", "--digests", str(lines), *map(str, arguments)]) == 0
    return read_lines(lines)


@pytest.mark.parametrize(("world_size", "run"), [(1, "first"), (2, "first"), (4, "first"), (4, "second")])
def test_the_digests_are_those_of_the_core_at_every_world_size(
    config, expected, shared_ray, tmp_path, capsys, world_size, run
):
    assert stream(config, tmp_path, "--world-size", world_size, "--json") == lines_of(expected)
    said = capsys.readouterr()
    assert said.err == ""
    figures = json.loads(said.out)
    last = expected[-1].position
    assert figures.keys() >= KEYS
    assert (figures["steps"], figures["rows"], figures["tokens"]) == (last.step, last.rows, last.tokens)
    assert figures["digest"] == last.digest
    assert figures["padding_share"] == pytest.approx(last.padding / (last.rows * 16))
    assert figures["tokens_per_s"] > 0
    assert 0 < figures["first_batch_s"] < 60
    assert 0 <= figures["wait_share"] <= 1


def test_resumed_again_and_again_at_other_world_sizes_the_stream_is_the_uninterrupted_one(
    config, expected, places, shared_ray, tmp_path
):
    got, before, arguments = [], 0, []
    for (place, count), world_size in zip(places.items(), (1, 2, 4, 2), strict=True):
        state = tmp_path / f"{count}.json"
        steps = count - before
        got += stream(config, tmp_path, *arguments, "--world-size", world_size, "--steps", steps, "--state-out", state)
        assert state.read_text() == expected[count - 1].position.to_json(), place
        before, arguments = count, ["--resume", state]
    got += stream(config, tmp_path, *arguments, "--world-size", 1)
    assert got == lines_of(expected)


@pytest.mark.parametrize(("place", "world_size"), [("inside a window", 1), ("at the epoch's end", 2)])
def test_a_new_process_goes_on_with_the_rest(
    config, expected, places, shared_ray, started, tmp_path, place, world_size
):
    done, state, lines = places[place], tmp_path / "state.json", tmp_path / "rest.jsonl"
    start = expected[done - 1].position
    state.write_text(start.to_json())
    command = ["-m", "ingest.cli", "stream", config, "--resume", state, "--world-size", world_size]
    process = started(*command, "--digests", lines, "--json", "--quiet", RAY_ADDRESS=shared_ray)
    ended = process.wait(60)
    assert (ended.code, ended.err) == (0, "")
    assert read_lines(lines) == lines_of(expected[done:], start)
    figures = json.loads(ended.out)
    assert figures["steps"] == len(expected) - done
    assert figures["digest"] == expected[-1].position.digest


def test_files_that_moved_resume(config, expected, places, shared_ray, tmp_path):
    done = places["in epoch 2"]
    start = expected[done - 1].position
    (tmp_path / "state.json").write_text(start.to_json())
    settings = IngestConfig.from_yaml(config).to_dict()
    for source in settings["sources"]:
        moved = tmp_path / "moved" / source["name"]
        moved.mkdir(parents=True)
        for file in (config.parent / source["path"]).iterdir():
            (moved / file.name).write_bytes(file.read_bytes())
        source["path"] = str(moved)
    moved_config = write_config(tmp_path / "run.yaml", **settings)
    got = stream(moved_config, tmp_path, "--resume", tmp_path / "state.json", "--steps", 5)
    assert got == lines_of(expected[done : done + 5], start)


def test_a_resume_at_the_end_of_the_stream_ends_without_a_step(config, expected, shared_ray, tmp_path, capsys):
    (tmp_path / "state.json").write_text(expected[-1].position.to_json())
    assert stream(config, tmp_path, "--resume", tmp_path / "state.json", "--json") == []
    figures = json.loads(capsys.readouterr().out)
    assert (figures["steps"], figures["tokens"], figures["padding_share"]) == (0, 0, 0)
    assert figures["digest"] == expected[-1].position.digest


def test_epochs_end_on_a_full_step_at_every_world_size(tmp_path, tokenizer_file, shared_ray):
    write_corpus(tmp_path / "corpus", texts(12, seed=3), files=[3, 4, 5], row_group_size=2)
    config = write_config(
        tmp_path / "run.yaml", tokenizer={"path": str(tokenizer_file), "backend": "tokenizers"}, epochs=3
    )
    expected = steps_without_ray(config)
    assert {len(step.rows) for step in expected} == {8}
    assert expected[-1].position.counts.documents == 36
    assert stream(config, tmp_path, "--world-size", 2) == lines_of(expected)


def test_filtered_sources_go_on_with_other_weights_where_that_is_accepted(config, shared_ray, tmp_path, capsys):
    settings = IngestConfig.from_yaml(config).to_dict()
    for source in settings["sources"]:
        source["path"], source["filter"] = str(config.parent / source["path"]), 'text < "r" or text is None'
    before = write_config(tmp_path / "before.yaml", **settings)
    start = steps_without_ray(before, count=12)[-1].position
    (tmp_path / "state.json").write_text(start.to_json())
    settings["sources"][0]["weight"] = 0.2
    after = write_config(tmp_path / "after.yaml", **settings)
    resume = ["--resume", tmp_path / "state.json", "--world-size", 2]
    assert main(["stream", str(after), *map(str, resume)]) == 2
    assert "accept_changes: [weights]" in capsys.readouterr().err
    got = stream(after, tmp_path, *resume, "--accept", "weights", "--json")
    config = IngestConfig.from_yaml(after)
    begun = Run.prepare(dataclasses.replace(config, accept_changes=("weights",))).require(start)
    assert got == lines_of(steps_without_ray(after, begun), begun)
    figures = json.loads(capsys.readouterr().out)
    assert figures["accepted"] == [f"step {start.step}: sources.large.weight was 0.7, is 0.2"]
    assert all(source["filtered"] > 0 for source in figures["sources"])


def test_a_process_alone_starts_its_own_ray_and_says_nothing_but_the_figures(
    config, expected, no_ray, started, tmp_path
):
    command = ["-m", "ingest.cli", "stream", config, "--steps", 3, "--json", "--quiet", "--world-size", 2]
    ended = started(*command, RAY_ADDRESS="local").wait(90)
    assert (ended.code, ended.err) == (0, "")
    assert json.loads(ended.out)["digest"] == expected[2].position.digest
