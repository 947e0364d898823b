"""Packed data: written once, then streamed with the same order arithmetic, guarantees and refusals."""

from __future__ import annotations

import json
import shutil
import threading
from collections import Counter
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingest.cli import main
from ingest.config import IngestConfig, StorageConfig
from ingest.encoding import Text
from ingest.errors import ConfigError, DataError, StorageError
from ingest.footer import read_footer
from ingest.lanes import Lanes, Step, step_digest, steps
from ingest.manifest import Manifest
from ingest.pack import pack, packing_run
from ingest.packed import FORMAT_KEY, HASHES_KEY, PackedFormat, PackedRows, packed_format, read_packed
from ingest.plan import Cursors, SourceCursor
from ingest.run import Run
from ingest.slab import Rows
from ingest.spec import UnitSpec, WindowSettings, WindowSpec
from ingest.storage import Storage
from ingest.window import document_address, make_window
from tests.conftest import lines_of, read_lines, steps_without_ray, texts, write_config, write_corpus, write_tokenizer
from tests.tiny import EOS, Tiny, encode

CORPUS = ((("a", "bb", "ccc"), ("dddd", "", "eeeee", None), ("f" * 12, "g", "h", "i", "j")),)
FORM = PackedFormat(8, "uint16", "0" * 64, "<|endoftext|>", "concat")
LOCAL = Storage()


def write(out: Path, corpus=CORPUS, form: PackedFormat = FORM, storage: Storage = LOCAL, **options) -> dict:
    """Packs literal documents, in the order of the corpus unless ``shuffle`` says otherwise; one row group a file."""
    tiny = Tiny(corpus, lanes=1, global_batch_rows=1, **({"shuffle": False} | options))
    return pack(tiny.steps(), form, storage, str(out), lanes=2, group_tokens=32, file_tokens=32)


def content(out: Path) -> list[tuple[list[int], list[int], int, int]]:
    """Tokens, lengths, input tokens and documents of every row of all files."""
    rows = [row for path in sorted(out.glob("*.parquet")) for row in pq.read_table(path).to_pylist()]
    return [
        (np.frombuffer(r["tokens"], "<u2").tolist(), np.frombuffer(r["lengths"], "<i4").tolist(), *list(r.values())[2:])
        for r in rows
    ]


def test_golden_rows_of_a_file(tmp_path: Path) -> None:
    figures = write(tmp_path, ((("abc", "defgh", "i"),),), form=replace(FORM, sequence_length=6), sequence_length=6)
    a, d, i = ord("a"), ord("d"), ord("i")
    assert content(tmp_path) == [
        ([a, a + 1, a + 2, EOS, d, d + 1, d + 2], [4, 3], 6, 2),
        ([d + 2, d + 3, d + 4, EOS, i, EOS, EOS], [4, 2], 6, 1),
    ]
    assert {name: figures[name] for name in ("files", "rows", "tokens", "documents", "padding_share")} == {
        "files": 1, "rows": 2, "tokens": 12, "documents": 3, "padding_share": 0.0,
    }  # fmt: skip


documents = st.one_of(st.none(), st.text("abé日\0", max_size=20))
corpora = st.lists(st.lists(st.lists(documents, max_size=6), min_size=1, max_size=3), min_size=1, max_size=2)


@given(corpora, st.integers(2, 9), st.integers(1, 60))
def test_the_input_tokens_put_together_are_the_documents_in_order(
    tmp_path_factory, corpus, sequence_length: int, window_tokens: int
) -> None:
    out = tmp_path_factory.mktemp("packed")
    form = replace(FORM, sequence_length=sequence_length)
    expected = [text for units in corpus[:1] for unit in units for text in unit if text]
    options = {"sequence_length": sequence_length, "window_tokens": window_tokens}
    if not expected:
        with pytest.raises(DataError, match="sources of a pack must hold text; got no document"):
            write(out, corpus[:1], form, **options)
        return
    figures = write(out, corpus[:1], form, **options)
    rows = content(out)
    assert [token for tokens, _, count, _ in rows for token in tokens[:count]] == encode(expected)[0].tolist()
    assert sum(documents for *_, documents in rows) == figures["documents"] == len(expected)
    assert sum(count for _, _, count, _ in rows) == figures["tokens"]
    assert len(rows) == figures["rows"]


def test_rows_are_written_in_the_order_in_which_windows_hand_them_out(tmp_path: Path) -> None:
    write(tmp_path, shuffle=True, window_tokens=20)
    windows = list(Tiny(CORPUS, lanes=1, window_tokens=20).windows())
    assert len(windows) > 1
    assert [row[0] for row in content(tmp_path)] == [row for w in windows for row in w.rows.tokens_BX.tolist()]


def test_row_groups_hold_a_multiple_of_the_lanes_and_files_a_few_of_them(tmp_path: Path) -> None:
    figures = write(tmp_path, ((("x" * 150,),),), window_tokens=1000)
    files = sorted(path.name for path in tmp_path.iterdir())
    assert files == ["_packed.json", *(f"packed-{number:05}.parquet" for number in range(5))]
    metadata = [pq.read_metadata(path) for path in sorted(tmp_path.glob("*.parquet"))]
    assert [[m.row_group(g).num_rows for g in range(m.num_row_groups)] for m in metadata] == [[4], [4], [4], [4], [3]]
    assert figures["bytes"] == sum(path.stat().st_size for path in tmp_path.glob("*.parquet"))
    assert json.loads((tmp_path / "_packed.json").read_text()) == {**FORM.to_plain(), **figures}


def test_one_group_holds_a_row_of_lanes_where_that_is_more_than_its_size(tmp_path: Path) -> None:
    tiny = Tiny(((("x" * 150,),),), lanes=1, global_batch_rows=1)
    pack(tiny.steps(), FORM, LOCAL, str(tmp_path), lanes=16, group_tokens=1, file_tokens=1)
    assert [pq.read_metadata(path).num_rows for path in sorted(tmp_path.glob("*.parquet"))] == [16, 3]


@pytest.mark.parametrize("name", ["packed-00000.parquet", "other.parquet", "deep/er.PARQUET"])
def test_a_directory_that_holds_parquet_is_refused_before_a_step_is_taken(tmp_path: Path, name: str) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_bytes(b"x")
    with pytest.raises(
        ConfigError, match=rf"OUT must hold no Parquet files; .* holds .*{name}: name another"
    ) as caught:
        pack(iter(lambda: pytest.fail("taken"), None), FORM, LOCAL, str(tmp_path), lanes=1)
    assert caught.value.exit_code == 2


class Full(Storage):
    """A store that is full after two files."""

    def write_bytes(self, path: str, data: bytes) -> None:
        if path.endswith("packed-00002.parquet"):
            raise StorageError(f"write {path} failed; no space left: make room")
        super().write_bytes(path, data)


def test_a_pack_that_breaks_off_leaves_whole_files_and_no_summary(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="no space left"):
        write(tmp_path, ((("x" * 150,),),), storage=Full(StorageConfig()))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["packed-00000.parquet", "packed-00001.parquet"]
    assert {pq.read_table(path).num_rows for path in tmp_path.iterdir()} == {4}


def test_files_of_the_same_size_with_other_tokens_have_another_footer(tmp_path: Path) -> None:
    sizes, hashes = set(), set()
    for letter in "ab":
        write(tmp_path / letter, (((letter * 30,),),))
        footer = read_footer(LOCAL, str(tmp_path / letter / "packed-00000.parquet"))
        sizes.add(footer.size_bytes)
        hashes.add(footer.hash)
    assert (len(sizes), len(hashes)) == (1, 2)


def test_what_was_written_is_read_in_place(tmp_path: Path) -> None:
    write(tmp_path)
    packed = read_packed(LOCAL, str(tmp_path / "packed-00000.parquet"), 0, 8)
    owner = packed.rows.tokens_BX
    while isinstance(owner, np.ndarray):
        owner = owner.base
    assert isinstance(owner, pa.Buffer)
    assert packed.rows.tokens_BX.tolist() == [row[0] for row in content(tmp_path)[:4]]
    assert packed.rows.lengths_L.tolist() == [length for row in content(tmp_path)[:4] for length in row[1]]


GOOD = PackedRows(
    Rows(np.arange(18, dtype=np.uint16).reshape(2, 9), np.array([3, 6, 4], np.int32), np.array([2, 1], np.int32)),
    np.array([8, 4], np.int32),
    np.array([1, 1], np.int32),
)


def store(path: Path, packed: PackedRows, hashes: object = None, form: PackedFormat = FORM) -> str:
    """A file of one row group; with hashes that are right unless others are given."""
    table = packed.to_table(form.schema)
    with pq.ParquetWriter(path, table.schema, compression="none", use_dictionary=False) as writer:
        writer.write_table(table)
        writer.add_key_value_metadata({HASHES_KEY: json.dumps([packed.hash()] if hashes is None else hashes)})
    return str(path)


def with_rows(**values) -> PackedRows:
    return replace(GOOD, rows=replace(GOOD.rows, **{name: np.array(v, np.int32) for name, v in values.items()}))


def test_rows_survive_the_file(tmp_path: Path) -> None:
    again = read_packed(LOCAL, store(tmp_path / "a.parquet", GOOD), 0, 8)
    assert again.hash() == GOOD.hash()
    assert again.rows.counts_B.tolist() == [2, 1]
    assert (again.input_tokens_B.tolist(), again.documents_B.tolist()) == ([8, 4], [1, 1])


CONTINUED = with_rows(starts_L=[7, 0, 0])
CONTINUE = replace(FORM, position_ids="continue")


def test_starts_survive_the_file_and_belong_to_its_hash(tmp_path: Path) -> None:
    assert CONTINUE.schema.names == [*FORM.schema.names, "starts"]
    again = read_packed(LOCAL, store(tmp_path / "a.parquet", CONTINUED, form=CONTINUE), 0, 8)
    assert again.rows.starts_L.tolist() == [7, 0, 0]
    assert again.hash() == CONTINUED.hash() != GOOD.hash()


@pytest.mark.parametrize(
    ("starts", "reason"),
    [
        ([0, 0, 0], "row 0: documents must be the pieces that start at 0; got 1"),
        ([7, 9, 0], "row 0: documents must be the pieces that start at 0; got 1"),
        ([-7, 0, 0], "row 0: the number of starts below 0 must be 0; got 1"),
    ],
)
def test_a_row_whose_starts_break_a_rule_is_named(tmp_path: Path, starts: list[int], reason: str) -> None:
    path = store(tmp_path / "a.parquet", with_rows(starts_L=starts), form=CONTINUE)
    with pytest.raises(DataError, match=rf"a\.parquet: row group 0, {reason}: run `ingest pack` again"):
        read_packed(LOCAL, path, 0, 8)


def test_a_row_with_fewer_starts_than_pieces_is_named(tmp_path: Path) -> None:
    table = CONTINUED.to_table(CONTINUE.schema)
    starts = pa.array([bytes(8), bytes(8)], pa.binary())
    table = table.set_column(table.schema.get_field_index("starts"), CONTINUE.schema.field("starts"), starts)
    with pq.ParquetWriter(tmp_path / "a.parquet", table.schema) as writer:
        writer.write_table(table)
        writer.add_key_value_metadata({HASHES_KEY: json.dumps(["0"])})
    with pytest.raises(DataError, match=r"row 1: starts must be as many as lengths; got 2 and 1: run `ingest pack`"):
        read_packed(LOCAL, str(tmp_path / "a.parquet"), 0, 8)


@pytest.mark.parametrize(
    ("packed", "reason"),
    [
        (with_rows(lengths_L=[3, 6, 0]), "row 1: the number of lengths below 1 must be 0; got 1"),
        (with_rows(lengths_L=[10, -1, 4]), "row 0: the number of lengths below 1 must be 0; got 1"),
        (with_rows(lengths_L=[3, 7, 4]), r"row 0: lengths must fit 8 \+ 1 tokens; got 10"),
        (with_rows(counts_B=[3, 0]), r"row 0: lengths must fit 8 \+ 1 tokens; got 13"),
        (with_rows(counts_B=[0, 2], lengths_L=[1, 3]), "row 0: input_tokens must be the sum of .*; got 8"),
        (replace(GOOD, input_tokens_B=np.array([8, 0])), "row 1: input_tokens must be 1 or more; got 0"),
        (replace(GOOD, input_tokens_B=np.array([9, 4])), "row 0: input_tokens must fit 8 tokens; got 9"),
        (replace(GOOD, input_tokens_B=np.array([8, 5])), "row 1: input_tokens must be the sum of lengths .*; got 5"),
        (replace(GOOD, input_tokens_B=np.array([6, 4])), "row 0: input_tokens must be the sum of lengths .*; got 6"),
        (replace(GOOD, documents_B=np.array([1, 2])), "row 1: documents must be no more than the pieces; got 2"),
        (replace(GOOD, documents_B=np.array([-1, 1])), "row 0: documents must be no more than the pieces; got -1"),
    ],
)
def test_a_row_that_breaks_a_rule_is_named(tmp_path: Path, packed: PackedRows, reason: str) -> None:
    packed = replace(packed, input_tokens_B=packed.input_tokens_B.astype(np.int32))
    packed = replace(packed, documents_B=packed.documents_B.astype(np.int32))
    path = store(tmp_path / "a.parquet", packed)
    with pytest.raises(DataError, match=rf"a\.parquet: row group 0, {reason}: run `ingest pack` again"):
        read_packed(LOCAL, path, 0, 8)


def test_a_flipped_bit_is_found(tmp_path: Path) -> None:
    path = Path(store(tmp_path / "a.parquet", GOOD))
    data = path.read_bytes()
    place = data.index(GOOD.rows.tokens_BX.tobytes())
    path.write_bytes(data[: place + 7] + bytes([data[place + 7] ^ 1]) + data[place + 8 :])
    with pytest.raises(DataError, match=r"a\.parquet: row group 0 must hold what was packed; hash .* restore the file"):
        read_packed(LOCAL, str(path), 0, 8)


@pytest.mark.parametrize(
    ("row_group", "hashes", "sequence_length", "reason"),
    [
        (1, None, 8, r"a\.parquet has 1 row groups and 1 hashes; got 1: run `ingest index` again"),
        (0, [], 8, r"has 1 row groups and 0 hashes; got 0"),
        (0, {}, 8, r"has 1 row groups and 0 hashes; got 0"),
        (0, None, 9, r"a\.parquet must hold rows of 9 tokens; got rows of 8: run `ingest index` again"),
    ],
)
def test_a_row_group_that_is_not_what_was_asked_for_is_refused(
    tmp_path, row_group, hashes, sequence_length, reason
) -> None:
    path = store(tmp_path / "a.parquet", GOOD, hashes)
    with pytest.raises(DataError, match=reason):
        read_packed(LOCAL, path, row_group, sequence_length)


def test_a_file_that_changed_since_the_manifest_is_refused(tmp_path: Path) -> None:
    path = store(tmp_path / "a.parquet", GOOD)
    with pytest.raises(DataError, match=r"changed since the manifest was made; footer hash was 0, is"):
        read_packed(LOCAL, path, 0, 8, (Path(path).stat().st_size, "0"))


@pytest.mark.parametrize(
    ("stored", "columns", "reason"),
    [
        ({**FORM.to_plain(), "version": 2}, None, "must be packed in version 1; got 2"),
        ({"version": 1}, None, "must say how it was packed; KeyError, 'sequence_length'"),
        ({**FORM.to_plain(), "version": 1, "token_dtype": "int8"}, None, "must say how it was packed; ValueError"),
        ({**FORM.to_plain(), "version": 1, "position_ids": "jump"}, None, "must say how it was packed; ValueError"),
        ({**FORM.to_plain(), "version": 1, "position_ids": "continue"}, None, "must have a column starts of binary"),
        ([], None, "must say how it was packed; TypeError"),
        (
            {**FORM.to_plain(), "version": 1, "sequence_length": 9},
            None,
            r"must have a column tokens of fixed_size_binary\[20\]",
        ),
        ({**FORM.to_plain(), "version": 1}, ["tokens", "lengths"], "must have a column input_tokens of int32; got "),
    ],
)
def test_a_footer_that_promises_other_columns_is_refused(tmp_path: Path, stored, columns, reason: str) -> None:
    table = GOOD.to_table(FORM.schema).replace_schema_metadata({FORMAT_KEY: json.dumps(stored)})
    pq.write_table(table.select(columns) if columns else table, tmp_path / "a.parquet")
    with pytest.raises(DataError, match=rf"a\.parquet {reason}.*: run `ingest pack` again"):
        packed_format(pq.read_metadata(tmp_path / "a.parquet"), str(tmp_path / "a.parquet"))


def test_a_file_of_text_is_not_packed(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": ["a"]}), tmp_path / "a.parquet")
    assert packed_format(pq.read_metadata(tmp_path / "a.parquet"), "a.parquet") is None


def rows_like(values: list[int], pieces: list[list[int]], inputs: list[int], begun: list[int]) -> PackedRows:
    """Rows of 8 + 1 tokens that all are the same."""
    tokens = np.repeat(np.array(values, np.uint16)[:, None], 9, axis=1)
    lengths = np.array([length for row in pieces for length in row], np.int32)
    counts = np.array([len(row) for row in pieces], np.int32)
    return PackedRows(Rows(tokens, lengths, counts), np.array(inputs, np.int32), np.array(begun, np.int32))


UNITS = {
    0: rows_like([10, 11, 12], [[9], [3, 5], [8]], [8, 8, 8], [1, 1, 1]),
    1: rows_like([20, 21], [[4, 4], [7]], [8, 7], [2, 0]),
}


def mixed(shuffle: bool, lanes: int = 4):
    """A window of a packed unit, a text unit and another packed unit."""
    units = (
        UnitSpec(1, 0, "p", 0, 0, "", packed=True),
        UnitSpec(0, 0, "t", 0, 0, ""),
        UnitSpec(1, 0, "p", 1, 0, "", packed=True),
    )
    spec = WindowSpec(Cursors(0, (SourceCursor(0, 0, 0),) * 2), units, True)
    settings = WindowSettings(("text", ""), 8, lanes, 0, shuffle, EOS, "uint16")
    read = lambda unit, column: iter([pa.array(["abcdefg", None, "hi"], pa.large_string())])  # noqa: E731
    return make_window(spec, settings, Text(encode), read, lambda unit: UNITS[unit.row_group])


def test_the_next_packed_units_are_read_while_the_first_is_still_on_its_way() -> None:
    units = tuple(UnitSpec(0, 0, "p", number % 2, 0, "", packed=True) for number in range(6))
    spec = WindowSpec(Cursors(0, (SourceCursor(0, 0, 0),)), units, True)
    together = threading.Barrier(2, timeout=20)

    def read(unit: UnitSpec) -> PackedRows:
        together.wait()  # which one reader alone would never pass
        return UNITS[unit.row_group]

    window = make_window(spec, WindowSettings(("",), 8, 1, 0, False, EOS, "uint16"), Text(encode), None, read)
    assert window.rows.tokens_BX[:, 0].tolist() == [10, 11, 12, 20, 21] * 3


def test_a_packed_unit_that_cannot_be_read_ends_the_window_with_its_error() -> None:
    def read(unit: UnitSpec) -> PackedRows:
        raise DataError(f"{unit.path} must hold rows; got none: restore it")

    spec = WindowSpec(Cursors(0, (SourceCursor(0, 0, 0),)), (UnitSpec(0, 0, "p", 0, 0, "", packed=True),), True)
    with pytest.raises(DataError, match="p must hold rows; got none: restore it"):
        make_window(spec, WindowSettings(("",), 8, 1, 0, False, EOS, "uint16"), Text(encode), None, read)


def first_tokens(window) -> list[list[int]]:
    """The first token of every row, by lane."""
    return [slab.rows.tokens_BX[:, 0].tolist() for slab in window.slabs(window.lanes)]


def test_golden_order_of_a_window_of_text_and_packed_rows() -> None:
    assert first_tokens(mixed(shuffle=False)) == [[97, 10, 21], [99, 11, EOS], [102, 12, EOS], [104, 20, EOS]]
    assert first_tokens(mixed(shuffle=True)) == [[21, 12, 20], [EOS, 102, 99], [10, EOS, 97], [104, 11, EOS]]


def test_a_window_of_text_and_packed_rows_counts_each_source() -> None:
    window = mixed(shuffle=True)
    end = window.prefix.at(window.prefix.rows)
    assert end.source_tokens == (8 + 3, 8 * 4 + 7)
    assert (end.documents, end.skipped) == (2 + 5, 1)
    assert window.prefix.rows == 3
    assert Counter(window.rows.tokens_BX[:, 0].tolist())[EOS] >= 3
    assert (window.rows.counts_B == 0).sum() == 3


def test_a_piece_that_was_read_packed_is_known_by_its_row() -> None:
    window = mixed(shuffle=True)
    row_L = np.repeat(np.arange(len(window.rows)), window.rows.counts_B)
    for row, document in zip(row_L.tolist(), window.piece_document_L.tolist(), strict=True):
        unit, place = document_address(window, document)
        first = int(window.rows.tokens_BX[row, 0])
        assert (unit.packed, unit.row_group, place) == (
            (True, first // 10 - 1, first % 10) if first < 97 else (False, 0, place)
        )


def test_packed_rows_alone_need_padding_only_up_to_a_multiple_of_the_lanes() -> None:
    spec = WindowSpec(Cursors(0, (SourceCursor(0, 0, 0),)), (UnitSpec(0, 0, "p", 0, 0, "", packed=True),), True)
    for lanes, rows in ((1, 3), (2, 4), (3, 3), (4, 4)):
        settings = WindowSettings(("",), 8, lanes, 0, False, EOS, "uint16")
        window = make_window(spec, settings, Text(encode), lambda *_: iter(()), lambda unit: UNITS[0])
        assert len(window.rows) == rows
        assert sorted(window.rows.tokens_BX[:, 0].tolist())[:3] == [10, 11, 12]


@pytest.fixture(scope="module")
def sample(tmp_path_factory, tokenizer_file) -> Path:
    """A run over text in ``run.yaml``, the same text packed, and runs over that: alone, and beside text."""
    folder = tmp_path_factory.mktemp("packed")
    corpus = [*texts(60, seed=4), "", None, *texts(30, seed=5)]
    write_corpus(folder / "corpus", corpus, files=[20, 1, 71], row_group_size=7)
    write_corpus(folder / "more", texts(25, seed=6), files=2, row_group_size=4)
    tokenizer = {"path": str(tokenizer_file), "backend": "tokenizers"}
    text = write_config(folder / "run.yaml", tokenizer=tokenizer)
    pack_without_ray(IngestConfig.from_yaml(text), folder / "rows")
    only = {"name": "rows", "path": "rows"}
    write_config(folder / "packed.yaml", tokenizer=tokenizer, sources=[only], epochs=2)
    write_config(
        folder / "both.yaml",
        tokenizer=tokenizer,
        sources=[{**only, "weight": 0.6}, {"name": "more", "path": "more", "weight": 0.4}],
        total_tokens=7000,
        global_batch_rows=4,
    )
    return folder


def pack_without_ray(config: IngestConfig, out: Path) -> dict:
    run = Run.prepare(config)
    form, lanes = run.packed_format, config.lanes
    found = steps_without_ray(packing_run(run).config)
    return pack(found, form, LOCAL, str(out), lanes=lanes, group_tokens=200, file_tokens=1000)


def test_every_token_that_was_packed_is_streamed_once_an_epoch(sample: Path) -> None:
    figures = json.loads((sample / "rows/_packed.json").read_text())
    found = steps_without_ray(sample / "packed.yaml")
    text = steps_without_ray(sample / "run.yaml")[-1].position
    end = found[-1].position
    assert figures["tokens"] == text.tokens
    assert end.tokens == 2 * figures["tokens"]
    assert end.counts.documents == 2 * figures["documents"] == 2 * 90
    assert end.counts.skipped == 0
    packed = Counter(map(tuple, (row[0] for row in content(sample / "rows"))))
    real = [step.rows.tokens_BX[i].tolist() for step in found for i in np.flatnonzero(step.rows.counts_B)]
    assert Counter(map(tuple, real)) == packed + packed


@pytest.mark.parametrize("name", ["packed.yaml", "both.yaml"])
def test_the_ranks_of_every_world_size_get_the_same_global_batches(sample: Path, name: str) -> None:
    config = IngestConfig.from_yaml(sample / name)
    run, expected = Run.prepare(config), steps_without_ray(sample / name)
    num_windows = expected[-1].position.window + 1
    specs = islice(run.specs(run.plan.start()), num_windows)  # with total_tokens there is no end of them
    windows = [run.maker(spec) for spec in specs]
    for world_size in (2, 4):
        ranks = []
        for rank in range(world_size):
            mine = (list(window.slabs(world_size))[rank] for window in windows)
            lanes = Lanes(config.lanes, config.global_batch_rows, rank, world_size)
            ranks.append(list(steps(mine, run.start(), lanes, run.tokenizer.eos_id, config.total_tokens)))
        before = 0
        for whole, *parts in zip(expected, *ranks, strict=True):
            assert [part.position for part in parts] == [whole.position] * world_size
            digest = sum(map(step_digest, parts)) % 2**64
            assert digest == (whole.position.counts.digest - before) % 2**64
            before = whole.position.counts.digest


def rest(config: Path, found: list[Step], done: int) -> list[dict]:
    start = found[done - 1].position
    return lines_of(steps_without_ray(config, type(start).from_json(start.to_json())), start)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["packed.yaml", "both.yaml"])
def test_a_resume_gives_the_rest(sample: Path, name: str) -> None:
    found = steps_without_ray(sample / name)
    assert len(found) > 20
    for done in (1, 2, 3, *range(7, len(found), 7), len(found) - 1):
        assert rest(sample / name, found, done) == lines_of(found[done:], found[done - 1].position)


def test_tokens_of_a_packed_source_are_counted_and_not_estimated(sample: Path) -> None:
    (source,) = Run.prepare(IngestConfig.from_yaml(sample / "packed.yaml")).manifest.sources
    figures = json.loads((sample / "rows/_packed.json").read_text())
    assert source.packed is not None
    assert source.tokens_per_mib == 0
    assert source.unit_tokens.tolist() == (source.unit_rows * 16).tolist()
    assert source.unit_tokens.sum() == figures["rows"] * 16
    assert (source.unit_rows[:-1] % 4 == 0).all()
    assert source.unit_text_bytes.sum() >= figures["rows"] * 17 * 2


def test_the_manifest_keeps_the_format_and_its_hash_holds_it(sample: Path) -> None:
    manifest = Run.prepare(IngestConfig.from_yaml(sample / "packed.yaml")).manifest
    again = Manifest.from_bytes(manifest.to_bytes())
    assert again.sources[0].packed == manifest.sources[0].packed
    assert again.hash == manifest.hash
    (source,) = manifest.sources
    other = replace(source, packed=replace(source.packed, strategy="other"))
    assert other.hash != source.hash
    with pytest.raises(DataError, match="manifest's arrays must fit each other"):
        replace(source, tokens_per_mib=1)
    with pytest.raises(DataError, match="manifest's arrays must fit each other"):
        replace(source, packed=None)


def test_a_source_of_packed_files_and_text_is_refused_with_one_of_each(sample: Path, tmp_path: Path) -> None:
    settings = IngestConfig.from_yaml(sample / "run.yaml").to_dict()
    settings["sources"] = [{"name": "mix", "path": [str(sample / "corpus"), str(sample / "rows")]}]
    rule = r"source mix must hold files of one kind; .*part-0\.parquet holds text, .*packed-00000\.parquet holds packed"
    with pytest.raises(DataError, match=rule):
        Run.prepare(IngestConfig.from_dict(settings))


def test_a_source_packed_in_two_ways_is_refused(sample: Path) -> None:
    settings = IngestConfig.from_yaml(sample / "run.yaml").to_dict()
    settings["packing"]["sequence_length"] = 8
    pack_without_ray(IngestConfig.from_dict(settings), sample / "short")
    settings["sources"] = [{"name": "mix", "path": [str(sample / "rows"), str(sample / "short")]}]
    with pytest.raises(DataError, match=r'one kind; .*"sequence_length": 16.*"sequence_length": 8'):
        Run.prepare(IngestConfig.from_dict(settings))


@pytest.mark.parametrize("change", ["sequence length", "tokenizer", "eos token"])
def test_data_packed_with_other_settings_is_refused_with_both_values(sample: Path, tmp_path: Path, change: str) -> None:
    settings = IngestConfig.from_yaml(sample / "packed.yaml").to_dict()
    if change == "sequence length":
        settings["packing"]["sequence_length"] = 32
        values = "packing.sequence_length is 16 in the file and 32 in the settings"
    elif change == "eos token":
        settings["tokenizer"]["eos_token"] = "<|other|>"
        values = r"tokenizer\.eos_token is <\|endoftext\|> in the file and <\|other\|> in the settings"
    else:
        settings["tokenizer"]["path"] = str(write_tokenizer(tmp_path / "tokenizer.json", vocab_size=300))
        values = r"tokenizer \(sha256\) is [0-9a-f]{64} in the file and [0-9a-f]{64} in the settings"
    with pytest.raises(
        ConfigError, match=rf"rows/packed-00000\.parquet must be packed .*{values}: set what .*ingest pack"
    ):
        Run.prepare(IngestConfig.from_dict(settings))


def test_packed_rows_cannot_be_skipped_and_packed_files_can(sample: Path, tmp_path: Path) -> None:
    settings = IngestConfig.from_yaml(sample / "packed.yaml").to_dict()
    shutil.copytree(sample / "rows", tmp_path / "rows")
    (tmp_path / "rows/packed-00001.parquet").write_bytes(b"PAR1 and no end")
    settings["sources"][0] |= {"path": str(tmp_path / "rows"), "on_error": {"skip_rows": 5, "skip_files": 1}}
    rule = r"source rows: on_error\.skip_rows must be 0 where rows are packed; got 5, and nobody knows which documents"
    with pytest.raises(ConfigError, match=rule):
        Run.prepare(IngestConfig.from_dict(settings))
    settings["sources"][0]["on_error"] = {"skip_files": 1}
    (skipped,) = Run.prepare(IngestConfig.from_dict(settings)).start().counts.account.skips
    assert skipped.path == str(tmp_path / "rows/packed-00001.parquet")
    assert skipped.reason.startswith("must be a Parquet file; its end is missing, so it is truncated")


@pytest.fixture(scope="module")
def counting(sample: Path) -> Path:
    """A run over the same text whose positions continue, in ``counting.yaml``, and the same packed, in ``on.yaml``."""
    packing = {"sequence_length": 16, "strategy": "best_fit", "position_ids": "continue"}
    settings = IngestConfig.from_yaml(sample / "run.yaml").to_dict() | {"packing": packing}
    pack_without_ray(IngestConfig.from_dict(settings), sample / "on")
    write_config(sample / "counting.yaml", **settings)
    write_config(sample / "on.yaml", **(settings | {"sources": [{"name": "rows", "path": "on"}]}))
    return sample


def test_packed_rows_continue_as_the_stream_that_was_packed(counting: Path) -> None:
    def rows(found: list[Step]) -> Counter:
        rows = (step.rows.slice(i, i + 1) for step in found for i in np.flatnonzero(step.rows.counts_B))
        return Counter((row.tokens_BX.tobytes(), tuple(row.starts_L.tolist())) for row in rows)

    text, found = (
        Run.prepare(IngestConfig.from_yaml(counting / "counting.yaml")),
        steps_without_ray(counting / "on.yaml"),
    )
    assert rows(found) == rows(steps_without_ray(packing_run(text).config))
    assert sum(starts[0] >= 16 for _, starts in rows(found)) > 20
    assert any(len(starts) > 1 and starts[-1] for _, starts in rows(found))
    assert rest(counting / "on.yaml", found, 5) == lines_of(found[5:], found[4].position)


@pytest.mark.parametrize(
    ("config", "path", "file", "run"), [("on", "rows", "restart", "continue"), ("packed", "on", "continue", "restart")]
)
def test_rows_packed_with_other_positions_are_refused(counting: Path, config, path, file, run) -> None:
    settings = IngestConfig.from_yaml(counting / f"{config}.yaml").to_dict()
    settings["sources"] = [{"name": "rows", "path": str(counting / path)}]
    with pytest.raises(ConfigError, match=rf"position_ids is {file} in the file and {run} in the settings: set what"):
        Run.prepare(IngestConfig.from_dict(settings))


def test_packed_data_is_packed_again_row_by_row(sample: Path, tmp_path: Path) -> None:
    settings = IngestConfig.from_yaml(sample / "packed.yaml").to_dict()
    settings |= {"epochs": 1, "shuffle": {"enabled": False, "window_tokens": 600}}
    pack_without_ray(IngestConfig.from_dict(settings), tmp_path)
    assert content(tmp_path) == content(sample / "rows")


def run_command(capsys, *arguments: object) -> tuple[int, str, str]:
    code = main([str(argument) for argument in arguments])
    said = capsys.readouterr()
    return code, said.out, said.err


@pytest.mark.parametrize(
    ("settings", "warning"),
    [({"epochs": 2}, "epochs: 2"), ({"total_tokens": 900}, "total_tokens: 900"), ({"epochs": 1}, None)],
)
def test_the_command_warns_of_documents_that_come_again_and_starts_nothing_where_out_is_taken(
    sample: Path, tmp_path: Path, capsys, settings: dict, warning: str | None
) -> None:
    whole = IngestConfig.from_yaml(sample / "run.yaml").to_dict()
    config = write_config(tmp_path / "run.yaml", **(whole | settings))
    code, printed, said = run_command(capsys, "pack", config, sample / "rows", "--json")
    assert (code, printed) == (2, "")
    assert ("warning" in said) == (warning is not None)
    assert (warning or "") in said
    assert f"ConfigError: OUT must hold no Parquet files; {sample / 'rows'} holds" in said


def test_a_uri_is_written_like_a_path(tmp_path: Path) -> None:
    tiny = Tiny(CORPUS, lanes=1, global_batch_rows=1)
    pack(tiny.steps(), FORM, LOCAL, f"file://{tmp_path}/out", lanes=2)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["_packed.json", "packed-00000.parquet"]
    with pytest.raises(ConfigError, match="OUT must hold no Parquet files"):
        pack(tiny.steps(), FORM, LOCAL, f"file://{tmp_path}/out", lanes=2)


def test_a_source_whose_pack_broke_off_is_refused(sample: Path, tmp_path: Path) -> None:
    shutil.copytree(sample / "rows", tmp_path / "rows")
    settings = IngestConfig.from_yaml(sample / "packed.yaml").to_dict()
    copied = IngestConfig.from_dict(settings | {"sources": [{"name": "rows", "path": str(tmp_path / "rows")}]})
    assert Run.prepare(copied).manifest.sources[0].packed is not None
    (tmp_path / "rows/_packed.json").unlink()
    (tmp_path / "rows/packed-00001.parquet").unlink()
    with pytest.raises(DataError, match=rf"source rows must hold whole packs; {tmp_path}/rows holds no _packed.json"):
        Run.prepare(copied)


@pytest.mark.s3
def test_rows_packed_into_a_bucket_are_the_same_and_are_streamed_from_there(sample: Path, s3_endpoint) -> None:
    storage = {"endpoint": s3_endpoint, "region": "us-east-1"}
    text = IngestConfig.from_yaml(sample / "run.yaml").to_dict() | {"storage": storage}
    run = Run.prepare(IngestConfig.from_dict(text))
    out = "s3://data/packed rows"
    steps = steps_without_ray(packing_run(run).config)
    sizes = {"group_tokens": 200, "file_tokens": 1000}
    pack(steps, run.packed_format, run.storage, out, lanes=run.config.lanes, **sizes)
    for path in (sample / "rows").glob("*.parquet"):
        assert run.storage.read_bytes(f"{out}/{path.name}") == path.read_bytes()
    with pytest.raises(ConfigError, match=f"OUT must hold no Parquet files; {out} holds {out}/packed-00000.parquet"):
        pack(steps, run.packed_format, run.storage, out, lanes=run.config.lanes)
    packed = IngestConfig.from_yaml(sample / "packed.yaml").to_dict()
    there = packed | {"storage": storage, "sources": [{"name": "rows", "path": out}]}
    found = steps_without_ray(IngestConfig.from_dict(there))
    assert lines_of(found) == lines_of(steps_without_ray(sample / "packed.yaml"))


@pytest.mark.ray
@pytest.mark.timeout(400)
def test_pack_then_stream_at_every_world_size_and_resume(sample: Path, shared_ray, tmp_path, capsys) -> None:
    out = tmp_path / "rows"
    code, printed, said = run_command(capsys, "pack", sample / "run.yaml", out, "--json")
    figures = json.loads(printed)
    assert code == 0
    assert figures["tokens"] == steps_without_ray(sample / "run.yaml")[-1].position.tokens
    assert f'sources:\n  - {{name: packed, path: "{out}"}}' in said
    assert Counter(map(repr, content(out))) == Counter(map(repr, content(sample / "rows")))

    settings = IngestConfig.from_yaml(sample / "packed.yaml").to_dict()
    settings["sources"] = [{"name": "packed", "path": str(out)}]
    config = write_config(tmp_path / "packed.yaml", **settings)
    expected = steps_without_ray(config)
    assert expected[-1].position.tokens == 2 * figures["tokens"]
    for world_size in (1, 2):
        lines, state = tmp_path / "lines.jsonl", tmp_path / "state.json"
        stream = ["stream", config, "--quiet", "--digests", lines, "--world-size"]
        assert run_command(capsys, *stream, world_size)[0] == 0
        assert read_lines(lines) == lines_of(expected)
        assert run_command(capsys, *stream, world_size, "--steps", 7, "--state-out", state)[0] == 0
        assert run_command(capsys, *stream, 3 - world_size, "--resume", state)[0] == 0
        assert read_lines(lines) == lines_of(expected[7:], expected[6].position)

    code, printed, said = run_command(capsys, "pack", sample / "run.yaml", out)
    assert (code, printed) == (2, "")
    assert "OUT must hold no Parquet files" in said
