"""Everything that a Parquet file, a directory and a document can be: read or refused in words, never lost or wrong."""

from __future__ import annotations

import base64
import json
import os
import selectors
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pyarrow.parquet.encryption as pe
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ingest.config import IngestConfig
from ingest.errors import DataError
from ingest.footer import read_footer
from ingest.parquet import read_documents, text_column
from ingest.run import Run
from ingest.storage import Storage
from tests.conftest import ROOT, steps_without_ray, texts, write_config

FUZZ_EXAMPLES = int(os.environ.get("INGEST_FUZZ_EXAMPLES", "300"))  # of each kind of file, about 100 a second


def documents(path, column="text"):
    """What a file holds, and what was asked of its store for it."""
    storage = Storage()
    groups = range(pq.read_metadata(path).num_row_groups)
    arrays = [array for group in groups for array in read_documents(storage, str(path), group, column)]
    return [text for array in arrays for text in array.to_pylist()], storage.traffic


@pytest.fixture
def run_over(tmp_path, tokenizer_file):
    """A config over a path of the test, with rows of 16 tokens."""

    def write(path, backend="tokenizers", **options):
        return write_config(
            tmp_path / "run.yaml",
            sources=[{"name": "only", "path": str(path), **options}],
            tokenizer={"path": str(tokenizer_file), "backend": backend},
        )

    return write


@pytest.mark.parametrize("codec", ["none", "snappy", "gzip", "brotli", "zstd", "lz4"])
@pytest.mark.parametrize("pages", ["1.0", "2.0"])
def test_every_codec_and_page_version_that_arrow_writes_reads(tmp_path, codec, pages):
    words = texts(50)
    table = pa.table({"text": words})
    pq.write_table(table, tmp_path / "a.parquet", compression=codec, data_page_version=pages, row_group_size=20)
    assert documents(tmp_path / "a.parquet")[0] == words


@pytest.mark.parametrize("encoding", ["PLAIN", "DELTA_LENGTH_BYTE_ARRAY", "DELTA_BYTE_ARRAY"])
def test_every_encoding_of_text_reads(tmp_path, encoding):
    pq.write_table(
        pa.table({"text": texts(50)}),
        tmp_path / "a.parquet",
        use_dictionary=False,
        column_encoding={"text": encoding},
    )
    assert documents(tmp_path / "a.parquet")[0] == texts(50)


class Keys(pe.KmsClient):
    def wrap_key(self, key, identifier):
        return base64.b64encode(key)

    def unwrap_key(self, key, identifier):
        return base64.b64decode(key)


@pytest.mark.parametrize(("readable", "what"), [(True, "its columns are"), (False, "its footer is")])
def test_an_encrypted_file_is_refused_by_name_before_its_columns_are_touched(tmp_path, readable, what):
    """Arrow ends the process where the metadata of an encrypted column is asked for."""
    how = pe.EncryptionConfiguration(footer_key="a", column_keys={"b": ["text"]}, plaintext_footer=readable)
    factory = pe.CryptoFactory(lambda _: Keys())
    with pq.ParquetWriter(
        tmp_path / "a.parquet",
        pa.schema([("text", pa.string())]),
        encryption_properties=factory.file_encryption_properties(pe.KmsConnectionConfig(), how),
    ) as writer:
        writer.write_table(pa.table({"text": ["a"]}))
    with pytest.raises(DataError, match=rf"a\.parquet must not be encrypted; {what}: write it without encryption"):
        read_footer(Storage(), str(tmp_path / "a.parquet"))


def test_an_unknown_codec_is_named(tmp_path):
    """The footer says LZO, codec 3, where it said ZSTD, codec 6: field 4 of the column's metadata, zigzag."""
    pq.write_table(pa.table({"text": ["abc" * 100]}), tmp_path / "a.parquet", compression="zstd")
    data = bytearray((tmp_path / "a.parquet").read_bytes())
    at = data.rindex(b"text\x15\x0c") + 5  # the end of the path in the schema, then i32 field with zigzag(6)
    data[at] = 0x06
    (tmp_path / "a.parquet").write_bytes(data)
    assert pq.read_metadata(tmp_path / "a.parquet").row_group(0).column(0).compression == "LZO"
    with pytest.raises(DataError, match=r"a\.parquet: row group 0 cannot be decoded; .*LZO.*: restore the file"):
        documents(tmp_path / "a.parquet")


def test_text_inside_a_list_is_refused_with_the_list_s_type(tmp_path):
    pq.write_table(pa.table({"messages": [[{"content": "a"}]]}), tmp_path / "a.parquet")
    with pytest.raises(
        DataError, match=r"text column messages\.content; it is not there, messages is of type list<element: struct"
    ):
        text_column(read_footer(Storage(), str(tmp_path / "a.parquet")).metadata, "messages.content", "a.parquet")


def test_one_column_of_five_hundred_costs_its_own_bytes(tmp_path):
    wide = {f"column{i}": [f"{i} {row}" * 20 for row in range(200)] for i in range(500)}
    pq.write_table(pa.table({**wide, "text": texts(200)}), tmp_path / "a.parquet", use_dictionary=False)
    chunk = pq.read_metadata(tmp_path / "a.parquet").row_group(0).column(500).total_compressed_size
    path = str(tmp_path / "a.parquet")
    storage, footer = Storage(), read_footer(Storage(), path)
    expect = (footer.size_bytes, footer.hash)
    list(read_documents(storage, path, 0, "text", expect))  # the footer once, then it is known
    before = storage.traffic
    assert [text for array in read_documents(storage, path, 0, "text", expect) for text in array.to_pylist()] == texts(
        200
    )
    assert (storage.traffic - before).read_bytes == chunk
    assert footer.size_bytes > 100 * chunk


def test_files_agree_in_the_text_column_and_may_differ_in_everything_else(tmp_path, run_over):
    tables = {
        "day=1/a b.parquet": pa.table({"text": ["a", None], "n": [1, 2]}),
        "day=1/100%.parquet": pa.table({"n": ["x"], "text": pa.array(["b"], pa.large_string())}),
        "day=2/x%20y#z.parquet": pa.table({"text": pa.nulls(2)}),
        "day=2/ünï.parquet": pa.table({"text": pa.array(["c", "d"]).dictionary_encode(), "more": [1.5, 2.5]}),
        "day=3/none.parquet": pa.table({"text": pa.array([], pa.string())}),
        "day=3/group.parquet": pa.table({"text": pa.array(["e", "f", "g"], pa.string_view())}),
    }
    for name, table in tables.items():
        (tmp_path / "d" / name).parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(table, tmp_path / "d" / name, row_group_size=2)
    for stray in ("_SUCCESS", ".a b.parquet.crc", "day=1/_tmp.parquet", "day=2/.hidden.parquet"):
        (tmp_path / "d" / stray).write_bytes(b"stray")
    (tmp_path / "d" / "empty.parquet").write_bytes(b"")
    end = steps_without_ray(run_over(tmp_path / "d"))[-1].position
    (only,) = end.counts.account.sources
    assert (only.read, only.documents, only.empty, only.bad) == (10, 7, 3, 0)
    assert only.tokens == end.tokens == 14  # a letter and its eos


def test_a_file_without_row_groups_is_a_file_without_rows(tmp_path, run_over):
    (tmp_path / "d").mkdir()
    with pq.ParquetWriter(tmp_path / "d/none.parquet", pa.schema([("text", pa.string())])):
        pass
    pq.write_table(pa.table({"text": ["a"]}), tmp_path / "d/one.parquet")
    assert pq.read_metadata(tmp_path / "d/none.parquet").num_row_groups == 0
    run = Run.prepare(IngestConfig.from_yaml(run_over(tmp_path / "d")))
    assert run.manifest.sources[0].warnings == ("1 of 2 files hold no rows",)
    assert run.manifest.sources[0].unit_rows.tolist() == [1]


ODD_DOCUMENTS = {
    "null": (None, 0),
    "empty": ("", 0),
    "whitespace": (" \n\t ", 1),
    "NUL": ("a\0b\0", 1),
    "a special token": ("<|endoftext|><|other|>", 1),
    "a byte order mark": ("\ufeff", 1),
    "outside the basic plane": ("\U0001f600" * 3, 1),
}


@pytest.mark.parametrize(("text", "used"), ODD_DOCUMENTS.values(), ids=ODD_DOCUMENTS)
def test_a_document_is_used_as_it_is_or_counted_as_empty(tmp_path, run_over, text, used):
    (tmp_path / "d").mkdir()
    pq.write_table(pa.table({"text": pa.array([text, "after"], pa.string())}), tmp_path / "d/a.parquet")
    run = Run.prepare(IngestConfig.from_yaml(run_over(tmp_path / "d")))
    (window,) = map(run.maker, run.specs(run.start().cursors))
    (only,) = window.prefix.account.sources
    assert (only.read, only.documents, only.empty) == (2, 1 + used, 1 - used)
    eos = run.tokenizer.eos_id
    begins = window.rows.tokens_BX.ravel().tolist()
    assert only.tokens == sum(len(run.tokenizer.encode([each])[0]) for each in (text, "after") if each)
    if text == "<|endoftext|><|other|>":
        assert begins.count(eos) >= 2
        assert only.tokens > 12  # letters, not two ids


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_enormous_documents_take_time_in_proportion_and_are_trained_whole(tmp_path, run_over):
    huge = {"text": "the row of tokens " * 2_800_000, "letter": "a" * 20_000_000, "spaces": " " * 20_000_000}
    (tmp_path / "d").mkdir()
    rows = ["before", *huge.values(), "after"]
    pq.write_table(pa.table({"text": pa.array(rows, pa.large_string())}), tmp_path / "d/a.parquet")
    run = Run.prepare(IngestConfig.from_yaml(run_over(tmp_path / "d", backend="auto")))
    (window,) = map(run.maker, run.specs(run.start().cursors))
    (only,) = window.prefix.account.sources
    assert (only.read, only.documents) == (5, 5)
    assert only.tokens == int(window.prefix.tokens_O[-1]) > 20_000_000


class Child:
    """The process that reads damaged files; a new one where the last crashed."""

    def __init__(self, file):
        self.file, self.process = file, None

    def ask(self, flips, timeout_s=20):
        if self.process is None:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.fuzzed", str(self.file)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                cwd=ROOT,
            )
        self.process.stdin.write(json.dumps(flips).encode() + b"\n")
        self.process.stdin.flush()
        with selectors.DefaultSelector() as ready:
            ready.register(self.process.stdout, selectors.EVENT_READ)
            answer = self.process.stdout.readline().decode().strip() if ready.select(timeout_s) else "HANGS"
        if not answer or answer == "HANGS":
            self.end()
        return answer or "CRASHES"

    def end(self):
        if self.process is not None:
            self.process.kill()
            self.process.communicate()
            self.process = None


def test_statistics_that_contradict_their_column_are_refused_by_name_and_do_not_end_the_process(tmp_path):
    """Nullable text, declared to be required: its statistics count one level too many, at which pyarrow aborts."""
    pq.write_table(pa.table({"text": ["a", None]}), tmp_path / "a.parquet")
    data = (tmp_path / "a.parquet").read_bytes()
    repetition = data.rindex(b"\x15\x0c\x25\x02\x18\x04text") + 3  # of a BYTE_ARRAY: OPTIONAL, zigzag(1)
    child = Child(tmp_path / "a.parquet")
    try:
        assert child.ask([(repetition, 0x02)]) == "DataError"
    finally:
        child.end()
    (tmp_path / "b.parquet").write_bytes(data[:repetition] + b"\0" + data[repetition + 1 :])
    words = r"b\.parquet must be a Parquet file; its footer is damaged \(Definition level histogram size mismatch"
    with pytest.raises(DataError, match=words):
        documents(tmp_path / "b.parquet")


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "options",
    [
        {"compression": "none", "use_dictionary": False},
        {"compression": "zstd"},
        {"compression": "snappy", "use_dictionary": False, "data_page_version": "2.0"},
        {"compression": "none", "use_dictionary": False, "column_encoding": {"text": "DELTA_BYTE_ARRAY"}},
    ],
    ids=["plain", "dictionary", "pages of version 2", "delta"],
)
def test_a_damaged_file_is_refused_or_gives_the_very_text_and_neither_hangs_nor_crashes(tmp_path, options):
    words = [f"word{i} " * 5 if i % 7 else None for i in range(40)]
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": words}), path, row_group_size=20, write_page_checksum=True, **options)
    end = path.stat().st_size - 1
    places = st.integers(0, end) | st.integers(end - read_footer(Storage(), str(path)).metadata.serialized_size, end)
    flip = st.tuples(places, st.integers(0, 7).map(lambda bit: 1 << bit))
    child = Child(path)

    @settings(max_examples=FUZZ_EXAMPLES, suppress_health_check=list(HealthCheck))
    @given(st.lists(flip, min_size=1, max_size=3))
    def fuzz(flips):
        assert child.ask(flips) in ("same", "DataError", "UndecodableError", "StorageError")

    try:
        assert child.ask([]) == "same"
        assert child.ask([(4, 0xFF), (path.stat().st_size - 1, 0xFF)]) == "DataError"
        fuzz()
    finally:
        child.end()
