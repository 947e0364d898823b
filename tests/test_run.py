"""A prepared run over real files: every document once, a fingerprint that names what changed, one-line errors."""

from __future__ import annotations

import copy
import os
import pickle
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ingest.config import IngestConfig
from ingest.documents import tokenize, unit_texts
from ingest.errors import ConfigError, DataError, IngestError, ResumeError, StorageError
from ingest.lanes import Lanes, steps
from ingest.metrics import Stopwatch
from ingest.position import Position
from ingest.run import Run
from ingest.window import document_address
from tests.tiny import tokenizer_json, write_parquet

FILES = {
    "a.parquet": ["the cat", "", "sat on"],
    "b.parquet": ["the mat", None, "x" * 90, "é日本"],
    "c.parquet": [],
    "d.parquet": ["1", "22", "the hat that the cat had", "333", "4444"],
}
MORE = [f"more {'words ' * (number % 5)}{number}" for number in range(20)]


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory, monkeypatch) -> None:
    monkeypatch.setenv("INGEST_CACHE", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A corpus of two sources and a tokenizer."""
    for name, texts in FILES.items():
        write_parquet(tmp_path / "code" / name, texts, row_group_size=2)
    write_parquet(tmp_path / "web/a.parquet", MORE, row_group_size=6)
    (tmp_path / "tokenizer.json").write_text(tokenizer_json())
    return tmp_path


def settings_of(folder: Path, **changes: Any) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "sources": [{"name": "code", "path": str(folder / "code")}, {"name": "web", "path": str(folder / "web")}],
        "tokenizer": {"path": str(folder / "tokenizer.json"), "backend": "tokenizers"},
        "packing": {"sequence_length": 8},
        "shuffle": {"seed": 0, "window_tokens": 60},
        "lanes": 2,
        "global_batch_rows": 4,
    }
    for path, value in changes.items():
        inside: Any = settings
        *folders, name = path.split("__")
        for key in folders:
            inside = inside[int(key)] if isinstance(inside, list) else inside.setdefault(key, {})
        inside[name] = value
    return settings


def run_of(folder: Path, **changes: Any) -> Run:
    return Run.prepare(IngestConfig.from_dict(settings_of(folder, **changes)))


def flat(value: Any, key: str = "") -> dict[str, Any]:
    if not isinstance(value, dict):
        return {key: value}
    return {k: v for name, item in value.items() for k, v in flat(item, f"{key}.{name}".strip(".")).items()}


def differences(one: Run, other: Run) -> list[str]:
    then, now = flat(one.fingerprint), flat(other.fingerprint)
    return sorted(field for field in {*then, *now} if then.get(field) != now.get(field))


def all_steps(run: Run, start: Position | None = None) -> list:
    start = start or run.start()
    slabs = (slab for spec in run.specs(start.cursors) for slab in run.maker(spec).slabs(1))
    lanes = Lanes(run.config.lanes, run.config.global_batch_rows)
    return list(steps(slabs, start, lanes, run.tokenizer.eos_id, run.config.total_tokens))


def reason(caught: pytest.ExceptionInfo[IngestError]) -> str:
    """The message of an error that a user may cause: one line, exit code 2."""
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("window_tokens", [1, 60, 100_000])
def test_the_union_of_the_windows_of_an_epoch_is_every_document_exactly_once(folder: Path, window_tokens: int) -> None:
    run = run_of(folder, shuffle__window_tokens=window_tokens)
    seen: Counter[tuple[str, str]] = Counter()
    skipped = 0
    for spec in run.specs(run.plan.start()):
        window = run.maker(spec)
        skipped += window.documents.skipped
        for document in dict.fromkeys(window.piece_document_L.tolist()):
            unit, row = document_address(window, document)
            text = pq.ParquetFile(unit.path).read_row_group(unit.row_group)["text"][row].as_py()
            assert window.documents.lengths_D[document] == len(run.tokenizer.encode([text])[0])
            seen[os.path.relpath(unit.path, folder), text] += 1
    files = {f"code/{name}": texts for name, texts in FILES.items()} | {"web/a.parquet": MORE}
    assert seen == Counter((name, text) for name, texts in files.items() for text in texts if text)
    assert skipped == 2


def test_documents_and_skips_of_all_files_are_counted(folder: Path) -> None:
    last = all_steps(run_of(folder, epochs=2))[-1].position
    assert (last.counts.documents, last.counts.skipped) == (2 * 30, 2 * 2)


@pytest.mark.slow
def test_a_run_resumes_from_every_step_with_the_same_positions(folder: Path) -> None:
    run = run_of(folder, epochs=2)
    whole = [step.position for step in all_steps(run)]
    for position in whole[::5]:
        again = Position.from_json(position.to_json())
        run_of(folder, epochs=2).require(again)
        assert [step.position for step in all_steps(run, again)] == whole[again.step :]


def test_the_maker_travels_to_the_actors_by_pickle(folder: Path) -> None:
    run = run_of(folder)
    spec = next(run.specs(run.plan.start()))
    made = pickle.loads(pickle.dumps(run.maker))(pickle.loads(pickle.dumps(spec)))
    again = run.maker(spec)
    assert [slab.to_table() for slab in made.slabs(2)] == [slab.to_table() for slab in again.slabs(2)]


def test_a_fingerprint_is_plain_values_that_a_position_takes(folder: Path) -> None:
    run = run_of(folder)
    assert Position.from_json(run.start().to_json()) == run.start()
    assert differences(run, run_of(folder)) == []


@pytest.mark.parametrize(
    ("change", "fields"),
    [
        ({"packing__sequence_length": 16}, ["packing.sequence_length"]),
        ({"packing__strategy": "best_fit"}, ["packing.strategy"]),
        ({"packing__position_ids": "continue"}, ["packing.position_ids"]),
        ({"packing__position_ids": "restart"}, []),
        ({"shuffle__seed": 1}, ["shuffle.seed"]),
        ({"shuffle__enabled": False}, ["shuffle.enabled"]),
        ({"shuffle__window_tokens": 61}, ["shuffle.window_tokens"]),
        ({"lanes": 4}, ["lanes"]),
        ({"global_batch_rows": 6}, ["global_batch_rows"]),
        ({"tokenizer__eos_token": "<|pad|>"}, ["tokenizer.eos_token"]),
        ({"epochs": 2}, ["epochs"]),
        ({"resources__prefetch_windows": 9}, []),
        ({"tokenizer__backend": "auto"}, []),
        ({"storage__max_attempts": 2}, []),
    ],
    ids=lambda value: next(iter(value), "") if isinstance(value, dict) else "",
)
def test_a_setting_that_decides_order_is_in_the_fingerprint_and_no_other(folder, change: dict, fields: list) -> None:
    run, other = run_of(folder), run_of(folder, **change)
    assert differences(run, other) == fields
    if fields:
        with pytest.raises(
            ResumeError, match=f"position at step 0 belongs to another run; {fields[0]}: .* then, .* now"
        ):
            other.require(run.start())
    else:
        other.require(run.start())


def test_the_epochs_of_a_single_source_may_be_raised_at_a_resume(folder: Path) -> None:
    source = [{"name": "web", "path": str(folder / "web")}]
    run_of(folder, sources=source, epochs=3).require(run_of(folder, sources=source).start())


def test_other_weights_are_named(folder: Path) -> None:
    weights = {"sources__0__weight": 0.7, "sources__1__weight": 0.3}
    run, other = run_of(folder, **weights), run_of(folder, **weights | {"sources__1__weight": 0.4})
    assert differences(run, other) == ["sources.web.weight"]
    with pytest.raises(ResumeError, match=r"sources.web.weight: 0.3 then, 0.4 now: restore"):
        other.require(run.start())


def test_another_text_column_is_named(folder: Path) -> None:
    table = pa.table({"text": ["the cat"] * 4, "body": ["the mat"] * 4})
    pq.write_table(table, folder / "web/a.parquet")
    run, other = run_of(folder), run_of(folder, sources__1__text_column="body")
    assert "sources.web.text_column" in differences(run, other)
    assert set(differences(run, other)) <= {"sources.web.text_column", "sources.web.data", "manifest"}


def test_another_tokenizer_is_named(folder: Path) -> None:
    run = run_of(folder)
    (folder / "tokenizer.json").write_text(tokenizer_json() + "\n")
    other = run_of(folder)
    assert differences(run, other) == ["tokenizer.sha256"]
    with pytest.raises(
        ResumeError, match=f"tokenizer.sha256: {run.tokenizer.sha256} then, {other.tokenizer.sha256} now"
    ):
        other.require(run.start())


def test_a_changed_file_is_refused_and_named(folder: Path) -> None:
    saved = all_steps(run_of(folder))[1].position
    write_parquet(folder / "code/b.parquet", [*FILES["b.parquet"], "one more"], row_group_size=2)
    with pytest.raises(ResumeError) as caught:
        run_of(folder).require(saved)
    assert f"(source code: {folder}/code/b.parquet changed (" in reason(caught)
    assert "sources.code.rows: 12 then, 13 now" in reason(caught)
    assert "sources.web" not in reason(caught)


def test_a_file_more_is_refused_and_named(folder: Path) -> None:
    saved = run_of(folder).start()
    write_parquet(folder / "code/e.parquet", ["new"])
    with pytest.raises(ResumeError) as caught:
        run_of(folder).require(saved)
    assert f"source code: {folder}/code/e.parquet is new" in reason(caught)
    assert "sources.code.files: 4 then, 5 now" in reason(caught)


def test_text_changed_behind_an_unchanged_footer_is_found_before_the_first_step(folder: Path) -> None:
    options = {"compression": "none", "use_dictionary": False, "write_statistics": False}
    path = write_parquet(folder / "web/a.parquet", MORE, **options)
    whole = all_steps(run_of(folder))
    saved = [step.position for step in whole if step.position.cursors.sources[1].epoch == 0][-1]
    content = path.read_bytes()
    path.write_bytes(content.replace(b"more words", b"mere words"))
    run = run_of(folder)
    run.require(saved)
    with pytest.raises(ResumeError, match=f"must be made again as it was at step {saved.step}; digest {saved.digest}"):
        all_steps(run, saved)


def test_moved_files_with_the_same_content_resume(folder: Path, tmp_path_factory) -> None:
    run = run_of(folder)
    whole = all_steps(run)
    saved = whole[2].position
    moved = tmp_path_factory.mktemp("moved") / "elsewhere"
    shutil.move(folder, moved)
    again = run_of(moved)
    again.require(saved)
    assert [step.position for step in all_steps(again, saved)] == [step.position for step in whole[3:]]


def test_a_file_that_changes_after_the_manifest_was_made_is_refused(folder: Path) -> None:
    run = run_of(folder)
    write_parquet(folder / "web/a.parquet", [*MORE[:-1], "another"], row_group_size=6)
    with pytest.raises(DataError, match=r"web/a.parquet changed since the manifest was made") as caught:
        all_steps(run)
    reason(caught)


def test_a_missing_column_is_a_data_error(folder: Path) -> None:
    with pytest.raises(DataError) as caught:
        run_of(folder, sources__0__text_column="body")
    assert "code/a.parquet must have a text column body; it is not there, columns are text" in reason(caught)


@pytest.mark.parametrize("path", ["nowhere", "nowhere/*.parquet", "code/none.parquet"])
def test_an_unreadable_path_is_a_storage_error(folder: Path, path: str) -> None:
    with pytest.raises(StorageError) as caught:
        run_of(folder, sources__0__path=str(folder / path))
    assert f"{folder}/{path}" in reason(caught)


def test_a_scheme_that_nothing_opens_is_a_config_error(folder: Path) -> None:
    with pytest.raises(ConfigError, match="path must have a scheme that Arrow opens") as caught:
        run_of(folder, sources__0__path="s3x://bucket/code")
    reason(caught)


def test_a_source_of_an_empty_folder_is_a_storage_error(folder: Path) -> None:
    (folder / "empty").mkdir()
    with pytest.raises(StorageError) as caught:
        run_of(folder, sources__0__path=str(folder / "empty"))
    assert f"{folder}/empty" in reason(caught)


def test_a_source_of_files_without_rows_is_a_data_error(folder: Path) -> None:
    with pytest.raises(DataError) as caught:
        run_of(folder, sources__0__path=str(folder / "code/c.parquet"))
    assert "source code must hold rows; its 1 files hold none" in reason(caught)


def test_a_tokenizer_without_the_eos_token_is_a_config_error(folder: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        run_of(folder, tokenizer__eos_token="</s>")
    assert "tokenizer.eos_token must be in the vocabulary" in reason(caught)
    assert "got '</s>'" in reason(caught)


def test_a_missing_tokenizer_is_a_storage_error(folder: Path) -> None:
    with pytest.raises(StorageError) as caught:
        run_of(folder, tokenizer__path=str(folder / "none.json"))
    assert "none.json" in reason(caught)


def test_a_position_beyond_the_data_is_refused(folder: Path) -> None:
    run = run_of(folder)
    start = run.start()
    sources = (replace(start.cursors.sources[0], unit=10**6), start.cursors.sources[1])
    with pytest.raises(ResumeError) as caught:
        run.require(replace(start, cursors=replace(start.cursors, sources=sources)))
    assert "got unit 1000000 of source code, which has 7: use another checkpoint" in reason(caught)


def test_auto_resolves_the_window_from_data_and_settings(folder: Path) -> None:
    run = run_of(folder, shuffle__window_tokens="auto")
    assert run.window_tokens == 200 * 8 * 2
    assert run.fingerprint["shuffle"]["window_tokens"] == 200 * 8 * 2


def test_each_source_is_read_by_its_own_text_column(folder: Path) -> None:
    pq.write_table(pa.table({"body": ["the mat"], "text": ["the cat"]}), folder / "web/a.parquet")
    run = run_of(folder, sources__1__text_column="body")
    text, settings = "", run.maker.settings
    for spec in run.specs(run.plan.start()):
        units = unit_texts(spec, settings, run.maker._read)
        text += run.tokenizer.decode(tokenize(spec, settings, run.maker._encode, units, Stopwatch()).tokens)
    assert text.count("the mat<|endoftext|>") == 2
    assert text.count("the cat<|endoftext|>") == 1


def test_weights_of_the_settings_become_exact_integers(folder: Path) -> None:
    run = run_of(folder, sources__0__weight=0.7, sources__1__weight=0.3)
    assert [source.weight for source in run.plan.sources] == [7, 3]


def test_preparing_leaves_the_config_as_it_was(folder: Path) -> None:
    config = IngestConfig.from_dict(settings_of(folder))
    before = copy.deepcopy(config)
    Run.prepare(config)
    assert config == before
