"""Files whose footers and shapes no common writer makes: the very text, or an error that names the file."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ingest.columns import Columns
from ingest.errors import DataError
from ingest.index import index_file
from ingest.parquet import read_documents
from ingest.sources import SourceConfig
from ingest.storage import FileInfo, Storage
from tests.footers import (
    BYTES,
    CHUNKS,
    DICTIONARY,
    GROUP_ROWS,
    GROUPS,
    MAX_VALUE,
    MIN_VALUE,
    PAGE,
    RAW_BYTES,
    ROWS,
    STATISTICS,
    TYPE,
    VALUES,
    alter,
    chunk,
)

WORDS = [f"word{i} " * 5 if i % 7 else None for i in range(40)]


def read(path) -> list[str | None]:
    """All documents of a file, by a manifest made of it as it is."""
    storage, path = Storage(), str(path)
    indexed = index_file(storage, FileInfo(path, 0, ""), Columns("text", ("text",)))
    groups = [read_documents(storage, path, group, "text", indexed.entry.content) for group in indexed.row_groups]
    return [text for arrays in groups for array in arrays for text in array.to_pylist()]


def put(field: int, value: int, of=chunk):
    """A change of one number in the first chunk, or in what ``of`` finds."""
    return lambda footer: of(footer)[field].__setitem__(1, value)


def less(field: int, by: int):
    return lambda footer: chunk(footer)[field].__setitem__(1, chunk(footer)[field][1] - by)


def group(footer: dict) -> dict:
    return footer[GROUPS][1][1][0]


def swap_statistics(footer: dict) -> None:
    found = chunk(footer)[STATISTICS][1]
    found[MAX_VALUE][1], found[MIN_VALUE][1] = found[MIN_VALUE][1], found[MAX_VALUE][1]


DAMAGED = r"must be a Parquet file; its footer is damaged \("
CORRUPT = DAMAGED + "Invalid column metadata"
COUNTED = "row group 0 must count its rows as its columns do; got "
UNDECODABLE = "row group 0 cannot be decoded; "
CHANGES = {
    "more values than rows": (put(VALUES, 25), COUNTED + "20 rows, 25 values"),
    "fewer values than the pages hold": (put(VALUES, 15), None),
    "a negative number of values": (put(VALUES, -1), UNDECODABLE + "0 rows of 20"),
    "fewer rows than values, which would be lost": (put(GROUP_ROWS, 15, group), COUNTED + "15 rows, 20 values"),
    "more rows than values": (put(GROUP_ROWS, 25, group), UNDECODABLE + "20 rows of 25"),
    "a negative number of rows": (put(GROUP_ROWS, -20, group), COUNTED + "-20 rows"),
    "another number of rows in all": (put(ROWS, 7, lambda footer: footer), None),
    "a compressed size that is too small": (less(BYTES, 50), UNDECODABLE),
    "a compressed size that is too large": (less(BYTES, -50), None),
    "a compressed size below zero": (put(BYTES, -5), CORRUPT),
    "a compressed size beyond the file": (put(BYTES, 2**50), CORRUPT),
    "an uncompressed size below zero": (put(RAW_BYTES, -5), COUNTED + "20 rows, 20 values of -5 bytes"),
    "a page beyond the file": (put(PAGE, 2**40), CORRUPT),
    "a page before the file": (put(PAGE, -4), CORRUPT),
    "a page in the middle of another": (less(PAGE, -3), UNDECODABLE),
    "statistics whose least is their greatest": (swap_statistics, None),
    "a row group without columns": (
        lambda footer: group(footer)[CHUNKS][1][1].clear(),
        DAMAGED + "The file only has 0 columns",
    ),
}


@pytest.mark.parametrize(("change", "words"), CHANGES.values(), ids=CHANGES)
def test_a_footer_with_one_wrong_number_gives_the_very_text_or_names_the_file(tmp_path, change, words):
    pq.write_table(pa.table({"text": WORDS}), tmp_path / "a.parquet", row_group_size=20, use_dictionary=False)
    alter(tmp_path / "a.parquet", change)
    if words is None:
        assert read(tmp_path / "a.parquet") == WORDS
    else:
        with pytest.raises(DataError, match=rf"a\.parquet:? {words}"):
            read(tmp_path / "a.parquet")


@pytest.mark.parametrize(
    "change",
    [put(DICTIONARY, 2**40), lambda footer: chunk(footer).pop(DICTIONARY)],
    ids=["beyond the file", "not mentioned"],
)
def test_a_dictionary_page_that_is_missing_is_refused_by_name(tmp_path, change):
    pq.write_table(pa.table({"text": WORDS}), tmp_path / "a.parquet", row_group_size=20)
    alter(tmp_path / "a.parquet", change)
    with pytest.raises(DataError, match=r"a\.parquet: row group 0 cannot be decoded; Dictionary page must be before"):
        read(tmp_path / "a.parquet")


def test_a_page_whose_checksum_is_wrong_is_refused_by_name(tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": WORDS}), path, compression="none", use_dictionary=False, write_page_checksum=True)
    data = path.read_bytes()
    path.write_bytes(data.replace(b"word8", b"word9", 1))
    with pytest.raises(DataError, match=r"a\.parquet: row group 0 cannot be decoded; .*CRC"):
        read(path)


def test_levels_that_run_over_are_refused_by_name(tmp_path):
    """The levels of the first page: their length in bytes, 4 bytes little endian, then runs; here a run of 2**27."""
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": ["a"] * 40}), path, compression="none", use_dictionary=False)
    data = path.read_bytes()
    assert data.count(b"\x02\x00\x00\x00\x50\x01") == 1  # a run of 40 ones
    path.write_bytes(data.replace(b"\x02\x00\x00\x00\x50\x01", b"\xff\x00\x00\x7f\x50\x01"))
    with pytest.raises(DataError, match=r"a\.parquet: row group 0 cannot be decoded; "):
        read(path)


def nested(depth: int) -> pa.Array:
    array = pa.array(range(40))
    for _ in range(depth):
        array = pa.StructArray.from_arrays([array], names=["in"])
    return array


BESIDE = {
    "10,000 columns": ({f"column{i}": [i] * 40 for i in range(10_000)}, {}),
    "structs 60 deep": ({"deep": nested(60)}, {}),
    "a footer of 4 MB": ({}, {"metadata": {"note": "n" * 4_000_000}}),
    "INT96": ({"at": pa.array([1] * 40, pa.timestamp("ns"))}, {"use_deprecated_int96_timestamps": True}),
    "BYTE_STREAM_SPLIT": (
        {"score": [0.5] * 40},
        {"use_dictionary": False, "column_encoding": {"score": "BYTE_STREAM_SPLIT", "text": "DELTA_BYTE_ARRAY"}},
    ),
    "DELTA_BINARY_PACKED in pages of version 2": (
        {"n": list(range(40))},
        {
            "use_dictionary": False,
            "data_page_version": "2.0",
            "column_encoding": {"n": "DELTA_BINARY_PACKED", "text": "DELTA_LENGTH_BYTE_ARRAY"},
        },
    ),
}


@pytest.mark.parametrize(("columns", "options"), BESIDE.values(), ids=BESIDE)
def test_text_reads_beside_columns_of_any_kind(tmp_path, columns, options):
    table = pa.table({**columns, "text": WORDS}).replace_schema_metadata(options.pop("metadata", None))
    pq.write_table(table, tmp_path / "a.parquet", **options)
    assert read(tmp_path / "a.parquet") == WORDS


def test_a_file_without_columns_or_with_two_of_one_name_is_refused_by_name(tmp_path):
    pq.write_table(pa.table({}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a\.parquet must have a text column text; it is not there, columns are "):
        read(tmp_path / "a.parquet")
    pq.write_table(pa.table([["a"], ["b"]], names=["text", "text"]), tmp_path / "b.parquet")
    with pytest.raises(DataError, match=r"b\.parquet must have one column text; got 2: rename the others"):
        read(tmp_path / "b.parquet")


def bounds(number: int):
    """A change of the bounds of the second column to so many bytes."""

    def change(footer: dict) -> None:
        found = chunk(footer, column=1)[STATISTICS][1]
        for field in (1, 2):  # the older pair, which some readers prefer
            found.pop(field, None)
        found[MAX_VALUE][1] = found[MIN_VALUE][1] = b"\1" * number

    return change


def test_statistics_that_come_twice_are_refused_as_pyarrow_joins_them(tmp_path):
    path, short = tmp_path / "a.parquet", b"\x58\x01\1\x18\x01\1\0"  # fields 5 and 6: bounds of one byte
    pq.write_table(pa.table({"text": WORDS, "kind": range(40)}), path)
    mark = b"\x18\x01\x7f\0"  # what stands for them: field 1

    def change(footer: dict) -> None:
        chunk(footer, column=1)[STATISTICS][1] = {1: [8, b"\x7f"]}

    alter(path, change)
    data = path.read_bytes()
    begin = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    footer = data[begin:-8]
    assert footer.count(mark) == 1
    footer = footer.replace(mark, short + b"\x0c\x18\0")  # then field 12 again, 24 in zigzag, and empty
    path.write_bytes(data[:begin] + footer + len(footer).to_bytes(4, "little") + b"PAR1")
    columns = SourceConfig(name="a", path="a", filter="kind is not None").columns
    with pytest.raises(DataError, match=r"a\.parquet must have statistics that fit column kind"):
        index_file(Storage(), FileInfo(str(path), 0, ""), columns)


def another_type(footer: dict) -> None:
    chunk(footer, column=1)[TYPE][1] ^= 3


@pytest.mark.parametrize(
    ("values", "change", "fits"),
    [
        (pa.array(range(40)), bounds(8), True),
        (pa.array(range(40)), bounds(7), False),
        (pa.array(range(40)), bounds(0), False),
        (pa.array(range(40), pa.int32()), bounds(3), False),
        (pa.array(map(float, range(40))), bounds(4), False),
        (pa.array([True, False] * 20), bounds(0), False),
        (pa.array([b"ab"] * 40, pa.binary(2)), bounds(1), False),
        (pa.array(["ab"] * 40), bounds(0), True),
        (pa.array(range(40)), another_type, False),
    ],
)
def test_statistics_that_do_not_fit_the_column_of_a_filter_are_refused_and_end_no_process(
    tmp_path, values, change, fits
):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": WORDS, "kind": values}), path)
    alter(path, change)
    file, columns = FileInfo(str(path), 0, ""), SourceConfig(name="a", path="a", filter="kind is not None").columns
    if fits:
        assert index_file(Storage(), file, columns).rows == [40]
    else:
        with pytest.raises(
            DataError, match=r"a\.parquet must have statistics that fit column kind of type [A-Z0-9_]+;"
        ):
            index_file(Storage(), file, columns)
    assert read(path) == WORDS
