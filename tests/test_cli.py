"""The ``ingest`` command without Ray: figures, and every refusal as one line with exit code 2."""

import json
import subprocess
import sys

import pytest
import yaml

from ingest.cli import main
from tests.conftest import ROOT, steps_without_ray, texts, write_config, write_corpus, write_tokenizer


@pytest.fixture
def config(tmp_path, tokenizer_file):
    write_corpus(tmp_path / "corpus", texts(60), files=[25, 0, 35])
    return write_config(tmp_path / "run.yaml", tokenizer={"path": str(tokenizer_file), "backend": "tokenizers"})


@pytest.fixture
def state(config, tmp_path):
    """A position after three steps of ``config``."""
    path = tmp_path / "state.json"
    path.write_text(steps_without_ray(config)[2].position.to_json())
    return path


def changed(config, **settings):
    """The config with other settings, as another file beside it."""
    path = config.with_name("changed.yaml")
    path.write_text(yaml.safe_dump({**yaml.safe_load(config.read_text()), **settings}))
    return path


@pytest.fixture
def refused(capsys):
    """Runs a command that must be refused and returns the one line that it says."""

    def run(*arguments):
        capsys.readouterr()
        code = main([*map(str, arguments), "--quiet"])
        said = capsys.readouterr()
        assert (code, said.out) == (2, "")
        assert said.err.endswith("\n")
        assert len(said.err.splitlines()) == 1, said.err
        assert "Traceback" not in said.err
        return said.err.rstrip()

    return run


@pytest.fixture
def printed(capsys):
    """Runs a command that must succeed and returns what it printed on standard output and on standard error."""

    def run(*arguments):
        capsys.readouterr()
        assert main([*map(str, arguments)]) == 0
        return capsys.readouterr()

    return run


def test_a_world_size_that_does_not_divide_the_lanes_is_refused(config, refused):
    assert refused("stream", config, "--world-size", 3) == (
        "ConfigError: world_size must divide lanes; got 3 and 4: "
        "train on 1 or 2 or 4 workers, or start a new run with lanes: 6 and global_batch_rows a multiple of it"
    )


@pytest.mark.parametrize("world_size", [0, -1, 8])
def test_a_world_size_out_of_range_is_refused(config, refused, world_size):
    line = refused("stream", config, "--world-size", world_size)
    assert line.startswith(f"ConfigError: world_size must divide lanes; got {world_size} and 4:")


def test_a_missing_column_is_refused_with_the_columns_that_are_there(config, refused):
    line = refused("stream", changed(config, sources=[{"name": "only", "path": "corpus", "text_column": "body"}]))
    assert line.startswith("DataError: ")
    assert "part-0.parquet must have a text column body; it is not there, columns are text: set text_column" in line


def test_a_path_that_is_not_there_is_refused_by_name(config, refused):
    line = refused("stream", changed(config, sources=[{"name": "only", "path": "elsewhere"}]))
    assert line.startswith("StorageError: ")
    assert f"{config.parent}/elsewhere" in line


def test_a_file_that_is_not_parquet_is_refused_by_name(config, refused):
    (config.parent / "corpus" / "part-9.parquet").write_bytes(b"not a Parquet file at all")
    line = refused("stream", config)
    assert line.startswith("DataError: ")
    assert "part-9.parquet must be a Parquet file" in line


def test_a_source_without_files_is_refused(config, refused):
    (config.parent / "nothing").mkdir()
    line = refused("stream", changed(config, sources=[{"name": "only", "path": "nothing"}]))
    assert line.startswith("StorageError: ")
    assert "nothing" in line


def test_a_source_whose_files_hold_no_rows_is_refused(config, refused):
    write_corpus(config.parent / "hollow", [], files=[0, 0])
    line = refused("stream", changed(config, sources=[{"name": "hollow", "path": "hollow"}]))
    assert line == "DataError: source hollow must hold rows; its 2 files hold none: check its path"


def test_a_tokenizer_without_the_named_eos_token_is_refused(config, refused, tokenizer_file):
    line = refused("stream", changed(config, tokenizer={"path": str(tokenizer_file), "eos_token": "</s>"}))
    assert line.startswith("ConfigError: ")
    assert "</s>" in line


def test_a_tokenizer_that_is_not_there_is_refused_by_name(config, refused):
    line = refused("stream", changed(config, tokenizer={"path": "lost.json"}))
    assert line.startswith("StorageError: ")
    assert "lost.json" in line


def test_an_unknown_key_is_refused_with_the_nearest_known_one(config, refused):
    line = refused("stream", changed(config, packing={"sequence_lenght": 16}))
    assert line.startswith("ConfigError: config ")
    assert line.endswith("packing.sequence_lenght is not a setting; got 16: did you mean sequence_length?")


@pytest.mark.parametrize("text", ["sources: [", "just words", "", "\x00"])
def test_a_config_that_is_no_mapping_of_settings_is_refused(config, refused, text):
    config.write_text(text)
    assert refused("plan", config).startswith(f"ConfigError: config {config}")


def test_a_config_that_is_not_there_is_refused(tmp_path, refused):
    assert refused("index", tmp_path / "lost.yaml").startswith(f"ConfigError: config {tmp_path}/lost.yaml cannot be")


def test_a_resume_on_a_changed_file_is_refused_and_names_the_file(config, state, refused):
    write_corpus(config.parent / "corpus", [*texts(59), "another last document"], files=[25, 0, 35])
    line = refused("stream", config, "--resume", state)
    assert line.startswith("ResumeError: position at step 3 belongs to another run; manifest: ")
    assert f"{config.parent}/corpus/part-2.parquet changed" in line
    assert "part-0.parquet" not in line


@pytest.mark.parametrize(
    ("settings", "difference"),
    [
        ({"packing": {"sequence_length": 32}}, "packing.sequence_length: 16 then, 32 now"),
        ({"shuffle": {"seed": 7, "window_tokens": 600}}, "shuffle.seed: 0 then, 7 now"),
        ({"shuffle": {"seed": 0, "window_tokens": 500}}, "shuffle.window_tokens: 600 then, 500 now"),
        ({"lanes": 8}, "lanes: 4 then, 8 now"),
        ({"global_batch_rows": 16}, "global_batch_rows: 8 then, 16 now"),
    ],
)
def test_a_resume_with_another_setting_is_refused_with_both_values(config, state, refused, settings, difference):
    line = refused("stream", changed(config, **settings), "--resume", state)
    assert line == (
        f"ResumeError: position at step 3 belongs to another run; {difference}: "
        "restore what changed, or start from step 0 under another name"
    )


def test_a_resume_with_another_tokenizer_is_refused_with_both_hashes(config, state, refused, tmp_path):
    other = write_tokenizer(tmp_path / "other.json", vocab_size=300)
    line = refused(
        "stream", changed(config, tokenizer={"path": str(other), "backend": "tokenizers"}), "--resume", state
    )
    assert line.startswith("ResumeError: position at step 3 belongs to another run; ")
    assert "tokenizer.sha256: " in line


@pytest.mark.parametrize(
    "garbage",
    [b"", b"not JSON", b"[]", b"null", b"{}", b'{"version": 99}', b"\xff\xfe", b"[" * 100_000, b"1" * 2_000_000],
)
def test_a_resume_of_garbage_is_refused(config, refused, tmp_path, garbage):
    (tmp_path / "garbage").write_bytes(garbage)
    path = tmp_path / "garbage"
    assert refused("stream", config, "--resume", path).startswith(f"ResumeError: position {path}")


def test_a_resume_of_a_position_with_a_wrong_value_is_refused(config, state, refused):
    state.write_text(json.dumps({**json.loads(state.read_text()), "step": -1}))
    assert refused("stream", config, "--resume", state).startswith(f"ResumeError: position {state}: ")


def test_a_resume_of_nothing_or_of_a_directory_without_a_position_is_refused(config, refused, tmp_path):
    for path in (tmp_path / "nothing", tmp_path):
        assert refused("stream", config, "--resume", path).startswith(f"ResumeError: position {path} cannot be read")


@pytest.mark.parametrize("option", ["--digests", "--state-out"])
def test_an_output_that_cannot_be_written_is_refused_before_the_run(config, refused, tmp_path, option):
    (tmp_path / "file").write_text("")
    line = refused("stream", config, option, tmp_path / "file" / "out")
    assert line.startswith("StorageError: ")
    assert f"{tmp_path}/file/out" in line


@pytest.mark.parametrize(
    "arguments", [("stream", "--steps", "-1"), ("stream", "--steps", "0"), ("plan", "--step-time", "0")]
)
def test_a_count_or_time_out_of_range_is_refused(config, refused, arguments):
    command, option, value = arguments
    line = refused(command, config, option, value)
    assert line.startswith("ConfigError: ")
    assert f"{option} must be" in line


def test_traceback_shows_where_an_error_came_from(config, capsys):
    assert main(["stream", str(config), "--world-size", "3", "--quiet", "--traceback"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("Traceback (most recent call last):")
    assert "require_world_size" in said.err
    assert said.err.splitlines()[-1].startswith("ConfigError: world_size must divide lanes")


def test_a_refusal_of_the_process_itself_is_one_line(config):
    command = [sys.executable, "-m", "ingest.cli", "stream", str(config), "--world-size", "3", "--quiet"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (2, "", 1), done.stderr
    assert done.stderr.startswith("ConfigError: world_size must divide lanes; got 3 and 4:")


def test_index_prints_one_object_with_the_figures(config, printed):
    said = printed("index", config, "--json")
    assert said.err == "indexed 3 of 3 files\n"
    figures = json.loads(said.out)
    sizes = {"files": 3, "row_groups": 7, "rows": 60}
    assert {key: figures[key] for key in sizes} == sizes
    assert {key: figures["sources"][0][key] for key in sizes} == sizes
    assert figures["sources"][0]["name"] == "only"
    assert figures["text_bytes"] > figures["estimated_tokens"] > 0
    assert figures["warnings"] == ["only: 1 of 3 files hold no rows"]
    assert len(figures["manifest"]) == 32


def test_index_prints_aligned_lines_for_people(config, printed):
    said = printed("index", config, "--quiet")
    assert said.err == ""
    assert said.out.splitlines()[:3] == ["files                3", "row_groups           7", "rows                 60"]


def test_plan_prints_one_object_with_the_figures(config, printed):
    found = steps_without_ray(config)
    said = printed("plan", config, "--json", "--quiet", "--step-time", "0.5")
    assert said.err == ""
    figures = json.loads(said.out)
    assert figures["windows"] == found[-1].position.window + 1
    assert len(found) / 2 < figures["steps"] < len(found) * 2  # an estimate, coarse where documents are tiny
    assert (figures["lanes"], figures["world_sizes"]) == (4, "1 2 4")
    assert figures["demanded_tokens_per_s"] == 8 * 16 / 0.5
    assert 0 < figures["padding_bound"] <= 1


def test_plan_prints_aligned_lines_for_people(config, printed):
    said = printed("plan", config, "--quiet")
    assert said.err == ""
    assert "world_sizes          1 2 4" in said.out.splitlines()


def test_sample_writes_a_corpus_that_index_takes(tmp_path, printed):
    said = printed("sample", tmp_path / "sample", "--json", "--quiet")
    assert said.err == ""
    figures = json.loads(said.out)
    assert figures["config"] == str(tmp_path / "sample" / "run.yaml")
    assert figures["next"] == f"ingest stream {figures['config']}"
    again = printed("sample", tmp_path / "sample")
    assert again.err == f"{tmp_path}/sample holds a sample already: left as it is\n"
    assert again.out.splitlines()[0] == f"config               {tmp_path}/sample/run.yaml"
    assert json.loads(printed("index", figures["config"], "--json").out)["files"] == 8


@pytest.mark.parametrize("command", ["sample", "index", "plan", "stream"])
def test_every_command_explains_itself(command, capsys):
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0
    assert "--json" in capsys.readouterr().out
