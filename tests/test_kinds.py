"""Every guarantee of the stream holds for every kind of source, under each packing strategy."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from ingest.config import IngestConfig
from ingest.errors import ConfigError, DataError, ResumeError
from ingest.lanes import Lanes, Step, step_digest, steps
from ingest.pack import pack, packing_run
from ingest.pieces import NO_LABEL_BIT
from ingest.position import Position
from ingest.run import Run
from tests.chats import CHATML, chat_tokenizer, turns, write, write_kinds
from tests.conftest import texts
from tests.test_lanes import rows_of

KINDS = ("text", "messages", "prompt", "tokens", "fim", "transform", "all")
TEXTS = [text for text in texts(40, seed=1, words=(2, 30)) if text.strip()][:30]

every_kind = pytest.mark.parametrize("kind", KINDS)
both = pytest.mark.parametrize("strategy", ["concat", "best_fit"])


def prepared(
    folder: Path, kind: str, strategy: str = "concat", documents: Sequence[str] = TEXTS, **settings: Any
) -> Run:
    """A run over one kind of source, or all of them."""
    sources = write_kinds(folder, documents)
    chosen = sources if kind == "all" else {kind: sources[kind]}
    config = {
        "sources": [{"name": name, **source} for name, source in chosen.items()],
        "tokenizer": {"path": "tokenizer.json", "backend": "tokenizers"},
        "packing": {"sequence_length": 32, "strategy": strategy},
        "shuffle": {"window_tokens": 300},
        "lanes": 4,
        "global_batch_rows": 4,
        "epochs": 2,
    }
    return Run.prepare(IngestConfig.from_dict(config | settings, base=folder))


WHOLE = {"sequence_length": 512, "strategy": "best_fit"}  # no document is cut


def made(run: Run, start: Position | None = None, rank: int = 0, world_size: int = 1) -> list[Step]:
    start = start or run.start()
    slabs = (list(run.maker(spec).slabs(world_size))[rank] for spec in run.specs(start.cursors))
    lanes = Lanes(run.config.lanes, run.config.global_batch_rows, rank, world_size)
    return list(steps(slabs, start, lanes, run.tokenizer.eos_id, None))


@every_kind
@both
def test_a_save_at_every_step_resumes_at_every_world_size_with_the_same_steps(tmp_path, kind, strategy) -> None:
    run = prepared(tmp_path, kind, strategy, TEXTS[: 3 if kind == "all" else 9], shuffle={"window_tokens": 150})
    whole = made(run)
    assert whole[-1].position.window >= 2
    for saved in [run.start(), *(step.position for step in whole)]:
        restored = Position.from_json(saved.to_json())
        run.require(restored)
        for world_size in (1, 2, 4):
            ranks = [made(run, restored, rank, world_size) for rank in range(world_size)]
            assert {len(steps) for steps in ranks} == {len(whole) - saved.step}
            for one, *several in zip(whole[saved.step :], *ranks, strict=True):
                assert sorted(row for step in several for row in rows_of(step)) == rows_of(one)
                assert all(step.position == one.position for step in several)


@every_kind
def test_a_run_prepared_again_elsewhere_gives_the_same_digests(tmp_path: Path, kind: str) -> None:
    first, second = (made(prepared(tmp_path / name, kind)) for name in ("a", "b"))
    assert [step.position.digest for step in first] == [step.position.digest for step in second]


@every_kind
def test_every_row_of_an_epoch_is_a_document_or_counted_as_skipped(tmp_path: Path, kind: str) -> None:
    last = made(prepared(tmp_path, kind, epochs=1))[-1].position.counts
    short = sum(len(text) <= 20 for text in TEXTS) * (kind in ("transform", "all"))
    num_sources = 6 if kind == "all" else 1
    assert (last.documents, last.skipped) == (len(TEXTS) * num_sources - short, 2 * num_sources + short)
    assert short > 0 or kind not in ("transform", "all")


@every_kind
def test_the_estimated_tokens_of_a_source_are_near_those_that_it_has(tmp_path: Path, kind: str) -> None:
    run = prepared(tmp_path, kind, epochs=1)
    counted = made(run)[-1].position.counts.source_tokens
    for source, tokens in zip(run.manifest.sources, counted, strict=True):
        if source.name != "text":  # which goes by bytes of text, and tiny files hold others beside them
            assert 0.8 < source.unit_tokens.sum() / tokens < 1.25


@pytest.mark.parametrize(("kind", "dtype"), [("text", "uint16"), ("tokens", "uint16"), ("prompt", "uint32")])
def test_only_sources_that_mask_make_tokens_wide(tmp_path: Path, kind: str, dtype: str) -> None:
    run = prepared(tmp_path, kind)
    assert str(run.token_dtype) == run.maker.settings.token_dtype == dtype
    assert {step.rows.tokens_BX.dtype for step in made(run)} == {np.dtype(dtype)}


def test_the_trained_tokens_of_an_epoch_are_the_answers(tmp_path: Path) -> None:
    run = prepared(tmp_path, "messages", epochs=1, packing=WHOLE)
    trained = np.concatenate([step.rows.tokens_BX.ravel() for step in made(run)])
    tokenizer, answers = chat_tokenizer(), [*reversed(TEXTS), *list(reversed(TEXTS))[1::2]]
    expected = sum(len(tokenizer.encode_plain([text])[0]) + 1 for text in answers)
    padding = len(trained) - made(run)[-1].position.tokens
    assert np.count_nonzero(trained < NO_LABEL_BIT) - padding == expected


def test_tokens_give_the_stream_of_the_text_that_they_came_from(tmp_path: Path) -> None:
    def rows(kind: str) -> list[list[int]]:
        run = prepared(tmp_path, kind, shuffle={"enabled": False, "window_tokens": 10**9})
        return [row for step in made(run) for row in step.rows.tokens_BX.tolist()]

    assert rows("tokens") == rows("text")


def test_text_is_turned_around_anew_in_each_epoch(tmp_path: Path) -> None:
    run = prepared(tmp_path, "fim", shuffle={"enabled": False, "window_tokens": 10**9})
    first, second = (run.maker(spec).rows.tokens_BX.tolist() for spec in run.specs(run.plan.start()))
    assert first != second


def test_the_windows_of_a_masked_source_survive_packing(tmp_path: Path) -> None:
    run = prepared(tmp_path, "messages", epochs=1, packing=WHOLE)
    packed = packing_run(run)
    figures = pack(made(packed), run.packed_format, run.storage, str(tmp_path / "out"), lanes=4)
    again = prepared(tmp_path, "text", sources=[{"name": "packed", "path": "out"}], epochs=1, packing=WHOLE)
    assert str(again.token_dtype) == "uint32"
    assert made(again)[-1].position.tokens == figures["tokens"]
    ids = [np.concatenate([step.rows.tokens_BX.ravel() for step in made(each)]) for each in (run, again)]
    masked = [np.sort(each[each >= NO_LABEL_BIT]).tolist() for each in ids]
    assert masked[0] == masked[1] != []


def test_rows_packed_in_16_bits_stand_beside_a_source_that_masks(tmp_path: Path) -> None:
    run = packing_run(prepared(tmp_path, "text", epochs=1))
    figures = pack(made(run), run.packed_format, run.storage, str(tmp_path / "out"), lanes=4)
    packed, masked = {"name": "packed", "path": "out"}, {"name": "messages", **write_kinds(tmp_path, TEXTS)["messages"]}
    both = prepared(tmp_path, "text", sources=[packed, masked], epochs=1)
    assert (run.packed_format.token_dtype, str(both.token_dtype)) == ("uint16", "uint32")
    alone = prepared(tmp_path, "text", sources=[masked], epochs=1)
    counts = made(both)[-1].position.counts
    assert counts.source_tokens == (figures["tokens"], made(alone)[-1].position.tokens)
    wide = [row.tolist() for step in made(both) for row in step.rows.tokens_BX if not (row >= NO_LABEL_BIT).any()]
    assert all(step.rows.tokens_BX[0].tolist() in wide for step in made(run))


def test_packed_files_with_settings_of_another_kind_are_refused(tmp_path: Path) -> None:
    run = packing_run(prepared(tmp_path, "messages", epochs=1))
    pack(made(run), run.packed_format, run.storage, str(tmp_path / "out"), lanes=4)
    sources = [{"name": "packed", "path": "out", "messages": "messages"}]
    with pytest.raises(ConfigError, match="source packed: packed files must be read as they are; got messages"):
        prepared(tmp_path, "text", sources=sources)


def test_rows_packed_without_the_bos_token_of_the_run_are_refused(tmp_path: Path) -> None:
    run = packing_run(prepared(tmp_path, "text", epochs=1))
    pack(made(run), run.packed_format, run.storage, str(tmp_path / "out"), lanes=4)
    tokenizer = {"path": "tokenizer.json", "bos_token": "<|bos|>"}
    with pytest.raises(ConfigError, match=r"tokenizer\.bos_token is None in the file and <\|bos\|> in the settings"):
        prepared(tmp_path, "text", sources=[{"name": "packed", "path": "out"}], tokenizer=tokenizer)


def test_another_template_column_rate_or_bos_is_refused_at_a_resume_by_name(tmp_path: Path) -> None:
    position = made(prepared(tmp_path, "all"))[3].position
    sources = [{"name": name, **source} for name, source in write_kinds(tmp_path, TEXTS).items()]
    by_name = {source["name"]: source for source in sources}
    by_name["fim"]["fim"] = {"rate": 0.6}
    with pytest.raises(ResumeError, match=r"sources\.fim\.fim\.rate"):
        prepared(tmp_path, "all", sources=sources).require(position)
    tokenizer = {"path": "tokenizer.json", "bos_token": "<|bos|>"}
    with pytest.raises(ResumeError, match=r"tokenizer\.bos_token"):
        prepared(tmp_path, "all", tokenizer=tokenizer).require(position)
    (tmp_path / "other.jinja").write_text(CHATML.replace("<|im_end|>\n", "<|im_end|>"))
    tokenizer = {"path": "tokenizer.json", "chat_template": "other.jinja"}
    with pytest.raises(ResumeError, match=r"sources\.messages\.chat_template"):
        prepared(tmp_path, "all", tokenizer=tokenizer).require(position)


@pytest.mark.parametrize(
    ("columns", "settings", "message"),
    [
        ({"m": pa.array([1, 2])}, {"messages": "m"}, r"one column m of list<struct<role.*got int64: set messages"),
        ({"m": pa.array([[1]])}, {"messages": "m"}, r"got list<.*int64>: set messages"),
        ({"m": pa.array([[{"from": "x", "value": "y"}]])}, {"messages": "m"}, "set messages"),
        ({"m": pa.array(["a"])}, {"messages": "n"}, "one column n of list<struct.*got 0 of m"),
        ({"m": pa.array([[1.5]])}, {"tokens": "m"}, "one column m of list of integers; got list<.*double>"),
        ({"m": pa.array(["a"]), "n": pa.array([1])}, {"prompt": "m", "response": "n"}, "column n of string; got int64"),
    ],
)
def test_columns_of_another_type_are_refused(tmp_path: Path, columns, settings, message: str) -> None:
    write(tmp_path / "odd/a.parquet", **columns)
    with pytest.raises(DataError, match=message):
        prepared(tmp_path, "text", sources=[{"name": "odd", "path": "odd", **settings}])


def broken(folder: Path) -> dict[str, Any]:
    """20 conversations, of which number 10 has a null role and number 11 is not UTF-8."""
    rows = [turns(f"question {row}", f"answer {row}") for row in range(20)]
    rows[10][0]["role"] = None
    kind = pa.list_(pa.struct([("role", pa.string()), ("content", pa.binary())]))
    raw = [[{"role": m["role"], "content": m["content"].encode()} for m in row] for row in rows]
    raw[11][1]["content"] = b"\xff"
    array = pa.array(raw, kind)
    values = array.values
    content = values.field("content")
    text = pa.Array.from_buffers(pa.string(), len(content), content.buffers())
    struct = pa.StructArray.from_arrays([values.field("role"), text], ["role", "content"])
    write(folder / "broken/a.parquet", row_group_size=6, messages=pa.ListArray.from_arrays(array.offsets, struct))
    return {"name": "broken", "path": "broken", "messages": "messages"}


def test_a_bad_conversation_is_refused_with_file_row_group_and_row(tmp_path: Path) -> None:
    run = prepared(tmp_path, "text", sources=[broken(tmp_path)])
    with pytest.raises(
        DataError, match=r"broken/a\.parquet: row group 1, row 5 must be UTF-8|row group 1 row 4: message 0"
    ):
        made(run)


def test_bad_conversations_are_left_out_and_counted_where_the_source_allows_it(tmp_path: Path) -> None:
    source = broken(tmp_path) | {"on_error": {"skip_rows": 2}}
    position = made(prepared(tmp_path, "text", sources=[source], epochs=1))[-1].position
    assert position.counts.account.sources[0].bad == 2
    assert position.counts.documents == 18
    reasons = sorted((skip.row_group, skip.row, skip.reason[:22]) for skip in position.counts.account.skips)
    assert reasons == [(1, 4, "message 0 must have a r"[:22]), (1, 5, "not UTF-8")]


def test_the_digest_of_every_step_is_that_of_its_rows(tmp_path: Path) -> None:
    run = prepared(tmp_path, "all")
    positions = [run.start(), *(step.position for step in made(run))]
    for step, (before, after) in zip(made(run), pairwise(positions), strict=True):
        assert step_digest(step) == (after.counts.digest - before.counts.digest) % 2**64


def test_a_source_of_two_kinds_is_refused() -> None:
    from ingest.config import SourceConfig

    for named in ({"messages": "m", "tokens": "t"}, {"prompt": "p"}, {"text_column": "x", "tokens": "t"}):
        with pytest.raises(ConfigError, match="documents must come from one of"):
            SourceConfig(name="a", path="p", **named)
    with pytest.raises(ConfigError, match="transform and fim must stand beside a text_column; got fim, tokens"):
        SourceConfig(name="a", path="p", tokens="t", fim={"rate": 1})


def test_a_chat_template_is_named_relative_to_the_settings(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(
        json.dumps(
            {
                "sources": [{"name": "a", "path": "a", "messages": "m"}],
                "tokenizer": {"path": "t/tokenizer.json", "chat_template": "c.jinja"},
            }
        )
    )
    assert IngestConfig.from_yaml(tmp_path / "run.yaml").tokenizer.chat_template == str(tmp_path / "c.jinja")
