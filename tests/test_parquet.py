"""Footers and text columns, on tiny files that the tests write."""

from __future__ import annotations

import errno

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import xxhash

from ingest.errors import DataError, StorageError
from ingest.footer import read_footer
from ingest.parquet import read_documents, text_column
from ingest.storage import Storage


def parquet(path, *columns, **options):
    """Writes a file of (name, array) columns and returns its path."""
    pq.write_table(
        pa.Table.from_arrays([array for _, array in columns], [name for name, _ in columns]), path, **options
    )
    return str(path)


def texts(path, row_group=0, column="text", expect=None, storage=None, **options):
    arrays = read_documents(storage or Storage(), path, row_group, column, expect, **options)
    return [text for array in arrays for text in array.to_pylist()]


class CountingFile:
    """A local file that records its reads and fails the reads it is told to."""

    def __init__(self, path, reads, failures):
        self.file, self.reads, self.failures = pa.OSFile(path), reads, failures

    def size(self):
        return self.file.size()

    def read_at(self, num_bytes, offset):
        self.reads.append(num_bytes)
        if len(self.reads) in self.failures:
            raise ConnectionResetError(errno.ECONNRESET, "reset")
        return self.file.read_at(num_bytes, offset)

    def close(self):
        self.file.close()


class CountingStorage(Storage):
    """A storage of local files that records every read and fails the reads numbered in ``failures``, from 1."""

    def __init__(self, failures=()):
        super().__init__()
        self.reads, self.failures = [], frozenset(failures)

    def _native(self, path):
        return CountingFile(path, self.reads, self.failures)


def test_a_footer_is_read_with_its_hash_and_the_size_of_the_file(tmp_path):
    path = parquet(tmp_path / "a.parquet", ("text", pa.array(["a", "b"])))
    data = (tmp_path / "a.parquet").read_bytes()
    length = int.from_bytes(data[-8:-4], "little")
    footer = read_footer(Storage(), path)
    assert (footer.size_bytes, footer.metadata.num_rows) == (len(data), 2)
    assert footer.hash == xxhash.xxh3_64_hexdigest(data[-8 - length : -8])
    assert len(footer.hash) == 16


def test_a_footer_takes_one_read_and_a_second_one_only_if_it_is_large(tmp_path):
    small = parquet(tmp_path / "a.parquet", ("text", pa.array(["a"])))
    large = parquet(tmp_path / "b.parquet", *((f"column{i}", pa.array(["a"])) for i in range(1000)))
    storage = CountingStorage()
    assert read_footer(storage, small).metadata.num_columns == 1
    assert len(storage.reads) == 1
    assert read_footer(storage, large).metadata.num_columns == 1000
    assert len(storage.reads) == 3


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda data: b"", "it has 0 bytes"),
        (lambda data: b"text, not Parquet", "it neither begins nor ends like one"),
        (lambda data: data[:-20], "its end is missing, so it is truncated"),
        (lambda data: data[:-4] + b"PARE", "must not be encrypted"),
        (lambda data: data[:-8] + b"\xff\xff\xff\x7fPAR1", "its footer claims 2147483647 of"),
        (lambda data: data[:-8] + b"\x03\0\0\0PAR1", "its footer is damaged"),
    ],
)
def test_what_is_not_parquet_is_refused_by_name(tmp_path, damage, reason):
    path = parquet(tmp_path / "a.parquet", ("text", pa.array(["a"])))
    (tmp_path / "a.parquet").write_bytes(damage((tmp_path / "a.parquet").read_bytes()))
    with pytest.raises(DataError, match=rf"a\.parquet .*{reason}"):
        read_footer(Storage(), path)


def test_a_missing_file_is_a_storage_error():
    with pytest.raises(StorageError, match="open /nowhere failed"):
        read_footer(Storage(), "/nowhere")


WORDS = pa.array(["one", None, "", "zwölf"])


@pytest.mark.parametrize(
    "kind",
    [
        pa.string(),
        pa.large_string(),
        pa.string_view(),
        pa.binary(),
        pa.large_binary(),
        pa.binary_view(),
        pa.dictionary(pa.int32(), pa.string()),
        pa.dictionary(pa.int8(), pa.large_string()),
        pa.dictionary(pa.int32(), pa.binary()),
    ],
    ids=str,
)
def test_every_kind_of_text_reads_as_large_string(tmp_path, kind):
    path = parquet(tmp_path / "a.parquet", ("text", WORDS.cast(kind)))
    arrays = list(read_documents(Storage(), path, 0, "text", None))
    assert [array.type for array in arrays] == [pa.large_string()]
    assert arrays[0].to_pylist() == ["one", None, "", "zwölf"]


def test_a_column_without_a_type_reads_as_nulls(tmp_path):
    path = parquet(tmp_path / "a.parquet", ("text", pa.nulls(3)))
    assert texts(path) == [None, None, None]


def test_a_field_of_a_struct_is_a_text_column_and_a_null_struct_a_null_document(tmp_path):
    docs = pa.array([{"text": "a", "id": 1}, None, {"text": None, "id": 2}])
    assert texts(parquet(tmp_path / "a.parquet", ("doc", docs)), column="doc.text") == ["a", None, None]


def test_a_dot_in_a_name_is_a_dot(tmp_path):
    assert texts(parquet(tmp_path / "a.parquet", ("doc.text", pa.array(["a"]))), column="doc.text") == ["a"]


@pytest.mark.parametrize(
    ("columns", "column", "reason"),
    [
        ([("body", WORDS), ("n", WORDS)], "text", "must have a text column text; it is not there, columns are body, n"),
        ([("text", pa.array([1, 2]))], "text", "column text must hold text; got int64: set text_column"),
        ([("text", pa.array([["a"]]))], "text", r"column text; it is of type list<element: string>"),
        ([("text", pa.array([["a"]]))], "text.list.element", "column text.list.element must hold text; got list"),
        ([("text", WORDS), ("text", WORDS)], "text", "must have one column text; got 2"),
    ],
)
def test_a_column_that_holds_no_text_is_refused_with_its_type(tmp_path, columns, column, reason):
    path = parquet(tmp_path / "a.parquet", *columns)
    with pytest.raises(DataError, match=rf"a\.parquet.* {reason}"):
        text_column(read_footer(Storage(), path).metadata, column, path)


def test_the_text_column_is_found_among_others(tmp_path):
    path = parquet(tmp_path / "a.parquet", ("id", pa.array([1])), ("text", pa.array(["a"])))
    assert text_column(read_footer(Storage(), path).metadata, "text", path) == 1


def test_only_the_row_group_asked_for_is_read_in_batches(tmp_path):
    path = parquet(tmp_path / "a.parquet", ("text", pa.array(list("abcdefg"))), row_group_size=4)
    arrays = list(read_documents(Storage(), path, 0, "text", None, batch_rows=3))
    assert [array.to_pylist() for array in arrays] == [["a", "b", "c"], ["d"]]
    assert texts(path, row_group=1) == ["e", "f", "g"]
    with pytest.raises(DataError, match=r"a\.parquet has 2 row groups; got 2: run `ingest index` again"):
        texts(path, row_group=2)


def test_a_wide_file_costs_the_bytes_of_its_text_column(tmp_path):
    wide = [(f"column{i}", pa.array([f"{i} {row}" * 20 for row in range(100)])) for i in range(50)]
    path = parquet(tmp_path / "a.parquet", *wide, ("text", pa.array(["abc"] * 100)))
    storage = CountingStorage()
    assert len(texts(path, storage=storage)) == 100
    chunk = read_footer(Storage(), path).metadata.row_group(0).column(50).total_compressed_size
    assert storage.reads == [64 << 10, chunk]


def test_a_file_that_is_the_manifest_s_reads(tmp_path):
    path = parquet(tmp_path / "a.parquet", ("text", pa.array(["a", "b"])))
    footer = read_footer(Storage(), path)
    assert texts(path, expect=(footer.size_bytes, footer.hash)) == ["a", "b"]


def test_a_footer_that_was_checked_is_not_read_again(tmp_path):
    path = parquet(tmp_path / "a.parquet", ("text", pa.array(["a", "b"])))
    footer = read_footer(Storage(), path)
    storage = CountingStorage()
    for _ in range(2):
        assert texts(path, expect=(footer.size_bytes, footer.hash), storage=storage) == ["a", "b"]
    assert len(storage.reads) == 3


def test_a_changed_file_is_refused_by_name(tmp_path):
    path = parquet(tmp_path / "a.parquet", ("text", pa.array(["a", "b"])))
    old = read_footer(Storage(), path)
    parquet(tmp_path / "a.parquet", ("text", pa.array(["a", "c"])))
    same_size = read_footer(Storage(), path).size_bytes == old.size_bytes
    assert same_size
    with pytest.raises(
        DataError, match=rf"a\.parquet changed .*; footer hash was {old.hash}, is .*: run `ingest index`"
    ):
        texts(path, expect=(old.size_bytes, old.hash))
    parquet(tmp_path / "a.parquet", ("text", pa.array(["a", "longer"])))
    with pytest.raises(DataError, match=rf"a\.parquet changed .*; size in bytes was {old.size_bytes}, is "):
        texts(path, expect=(old.size_bytes, old.hash))


@pytest.mark.parametrize(
    "kind", [pa.binary(), pa.binary_view(), pa.string(), pa.dictionary(pa.int32(), pa.binary())], ids=str
)
def test_bytes_that_are_not_utf8_are_refused_with_their_row(tmp_path, kind):
    data = pa.array([b"a", None, b"b", b"\xff", b"c"])
    array = pa.Array.from_buffers(kind, 5, data.buffers()) if pa.types.is_string(kind) else data.cast(kind)
    path = parquet(tmp_path / "a.parquet", ("text", array))
    with pytest.raises(DataError, match=r"a\.parquet: row group 0, row 3 must be UTF-8"):
        texts(path, batch_rows=2)


def test_a_damaged_page_is_refused_with_its_row_group(tmp_path):
    path = parquet(tmp_path / "a.parquet", ("text", pa.array(["abc" * 100] * 9)), write_page_checksum=True)
    data = bytearray((tmp_path / "a.parquet").read_bytes())
    data[60] ^= 1
    (tmp_path / "a.parquet").write_bytes(data)
    with pytest.raises(DataError, match=r"a\.parquet: row group 0 cannot be decoded; .*: restore the file"):
        texts(path)


@pytest.mark.parametrize("failures", [[1], [2]])
def test_a_lost_connection_repeats_and_loses_no_row(tmp_path, failures):
    path = parquet(tmp_path / "a.parquet", ("text", pa.array(list("abcdefg"))))
    assert texts(path, storage=CountingStorage(failures), batch_rows=2) == list("abcdefg")


def test_a_connection_lost_between_documents_repeats_and_loses_no_row(tmp_path):
    words = [f"{i:03}" * 100 for i in range(300)]
    path = parquet(
        tmp_path / "a.parquet",
        ("text", pa.array(words)),
        compression="none",
        use_dictionary=False,
        data_page_size=1024,
        write_batch_size=8,
    )
    calm = CountingStorage()
    assert texts(path, storage=calm, batch_rows=16, request_bytes=8192) == words
    assert len(calm.reads) > 9
    assert texts(path, storage=CountingStorage([7]), batch_rows=16, request_bytes=8192) == words


def test_the_first_documents_of_a_row_group_cost_a_part_of_it(tmp_path):
    words = [f"{i:03}" * 100 for i in range(300)]
    path = parquet(tmp_path / "a.parquet", ("text", pa.array(words)), compression="none", use_dictionary=False)
    storage = CountingStorage()
    assert next(read_documents(storage, path, 0, "text", batch_rows=2, request_bytes=4096)).to_pylist() == words[:2]
    assert storage.reads[0] == 64 << 10
    assert sum(storage.reads[1:]) < 300_000
