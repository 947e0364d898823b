"""What crosses from the actors to the ranks: round trip without a copy, refusals, and the digest's literal values."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
import xxhash

from ingest.errors import OrderError
from ingest.plan import Cursors, SourceCursor
from ingest.slab import (
    SCHEMA,
    Counts,
    Prefix,
    Rows,
    Slab,
    cursors_from_json,
    cursors_to_json,
    row_digests,
)

CURSORS = Cursors(7, (SourceCursor(1, 2, 3), SourceCursor(0, 9, 0)))


def rows_of(tokens, pieces, dtype=np.uint16) -> Rows:
    """Rows from token lists and the piece lengths of each row."""
    lengths = np.array([length for row in pieces for length in row], np.int32)
    return Rows(np.array(tokens, dtype), lengths, np.array([len(row) for row in pieces], np.int32))


def prefix_of(num_rows: int) -> Prefix:
    steps = np.arange(num_rows + 1)
    return Prefix(steps * 4, steps * 2, steps, np.stack([steps * 3, steps], axis=1), steps.astype(np.uint64) * 2**62, 5)


SLAB = Slab(CURSORS, 1, 2, True, rows_of([[1, 2, 3], [4, 5, 256]], [[3], [1, 2]]), prefix_of(2))
EMPTY = Slab(CURSORS, 0, 1, False, Rows.padding(0, 3, np.uint32, 0), prefix_of(0))


def plain(slab: Slab) -> list:
    rows, prefix = slab.rows, slab.prefix
    arrays = (rows.tokens_BX, rows.lengths_L, rows.counts_B, prefix.tokens_O, prefix.documents_O)
    arrays += (prefix.documents_cut_O, prefix.source_tokens_OK, prefix.digest_O)
    values = [(array.dtype.str, array.shape, array.tolist()) for array in arrays]
    return [slab.cursors, slab.rank, slab.world_size, slab.last, prefix.skipped, *values]


def shown(rows: Rows) -> tuple[list, list, list]:
    return rows.tokens_BX.tolist(), rows.lengths_L.tolist(), rows.counts_B.tolist()


@pytest.mark.parametrize("slab", [SLAB, EMPTY], ids=["two rows", "no rows"])
def test_a_slab_survives_the_table(slab: Slab) -> None:
    table = slab.to_table()
    assert (table.num_rows, table.schema) == (1, SCHEMA)
    assert plain(Slab.from_table(table)) == plain(slab)
    assert slab.window == 7


def test_a_slab_survives_arrow_ipc_as_ray_sends_it() -> None:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, SCHEMA) as writer:
        writer.write_table(SLAB.to_table())
    table = pa.ipc.open_stream(sink.getvalue()).read_all()
    assert plain(Slab.from_table(table)) == plain(SLAB)


def test_the_table_shares_the_memory_of_the_arrays_and_the_slab_that_of_the_table() -> None:
    table = SLAB.to_table()
    back = Slab.from_table(table)
    assert np.shares_memory(back.rows.tokens_BX, SLAB.rows.tokens_BX)
    address = table["tokens"].chunk(0).buffers()[2].address
    assert back.rows.tokens_BX.__array_interface__["data"][0] == address


def test_what_is_read_cannot_be_written() -> None:
    back = Slab.from_table(SLAB.to_table())
    assert not any(array.flags.writeable for array in (back.rows.tokens_BX, back.rows.lengths_L, back.prefix.digest_O))


def test_a_slice_of_a_slab_is_sent_whole_and_alone() -> None:
    part = Slab(CURSORS, 1, 2, True, SLAB.rows.slice(1, 2), prefix_of(1))
    assert shown(Slab.from_table(part.to_table()).rows) == ([[4, 5, 256]], [1, 2], [2])


def test_a_row_in_the_middle_of_a_larger_table_is_read_where_it_lies() -> None:
    both = pa.concat_tables([EMPTY.to_table(), SLAB.to_table()]).combine_chunks()
    assert plain(Slab.from_table(both.slice(0, 1))) == plain(EMPTY)
    assert plain(Slab.from_table(both.slice(1, 1))) == plain(SLAB)


@pytest.mark.parametrize(
    "table",
    [
        pa.concat_tables([SLAB.to_table(), SLAB.to_table()]),
        SLAB.to_table().slice(0, 0),
        SLAB.to_table().drop_columns("counts"),
        SLAB.to_table().append_column("more", pa.array([1])),
        SLAB.to_table().select(SCHEMA.names[::-1]),
        pa.table({"item": [1]}),
    ],
    ids=["merged", "empty", "column lost", "column more", "columns in another order", "something else"],
)
def test_a_block_that_is_not_exactly_one_slab_is_refused(table: pa.Table) -> None:
    with pytest.raises(OrderError, match=rf"a block must be one slab; got {table.num_rows} rows of \["):
        Slab.from_table(table)


def test_starts_survive_the_table_and_belong_to_the_digest_behind_each_length() -> None:
    rows = replace(SLAB.rows, starts_L=np.array([0, 70_000, 0], np.int32))
    back = Slab.from_table(replace(SLAB, rows=rows).to_table()).rows
    assert back.starts_L.tolist() == [0, 70_000, 0]
    assert back.slice(1, 2).starts_L.tolist() == [70_000, 0]
    assert Rows.concatenate([back.slice(1, 2), back.slice(0, 1)]).starts_L.tolist() == [70_000, 0, 0]
    content = np.array([4, 5, 256], "<u2").tobytes() + np.array([1, 70_000, 2, 0], "<i4").tobytes()
    [digest] = row_digests(rows.slice(1, 2), np.array([7]), np.array([5])).tolist()
    assert digest == xxhash.xxh3_64_intdigest(content, seed=(7 << 32) + 5)


def test_golden_digests() -> None:
    windows, indexes = np.array([0, 7]), np.array([0, 5])
    assert row_digests(SLAB.rows, windows, indexes).tolist() == [0x9222FB8216C14545, 0x887DCD96B9CB102B]
    wide = Rows(SLAB.rows.tokens_BX.astype(np.uint32), SLAB.rows.lengths_L, SLAB.rows.counts_B)
    assert row_digests(wide, windows, indexes).tolist() == [0x72EDD5EFD0505D14, 0xF61B2CDA110F7892]


def test_a_digest_is_the_documented_hash_of_the_rows_bytes() -> None:
    content = np.array([4, 5, 256], "<u2").tobytes() + np.array([1, 2], "<i4").tobytes()
    expected = xxhash.xxh3_64_intdigest(content, seed=(7 << 32) + 5)
    assert row_digests(SLAB.rows, np.array([0, 7]), np.array([0, 5]))[1] == expected


@pytest.mark.parametrize(
    ("tokens", "pieces", "window", "index"),
    [
        ([[4, 5, 257]], [[1, 2]], 7, 5),
        ([[4, 6, 256]], [[1, 2]], 7, 5),
        ([[4, 5, 256]], [[2, 1]], 7, 5),
        ([[4, 5, 256]], [[3]], 7, 5),
        ([[4, 5, 256]], [[1, 2]], 8, 5),
        ([[4, 5, 256]], [[1, 2]], 7, 6),
    ],
    ids=["look-ahead", "token", "pieces", "number of pieces", "window", "index"],
)
def test_a_digest_depends_on_content_pieces_and_address(tokens, pieces, window: int, index: int) -> None:
    digest = row_digests(rows_of([[4, 5, 256]], [[1, 2]]), np.array([7]), np.array([5]))[0]
    assert row_digests(rows_of(tokens, pieces), np.array([window]), np.array([index]))[0] != digest


def test_prefix_sums_count_the_first_rows_of_every_lane_and_skips_at_the_end() -> None:
    prefix = prefix_of(2)
    assert prefix.rows == 2
    assert prefix.at(0) == Counts(0, 0, 0, 0, (0, 0), 0)
    assert prefix.at(1) == Counts(4, 2, 1, 0, (3, 1), 2**62)
    assert prefix.at(2) == Counts(8, 4, 2, 5, (6, 2), 2**63)


def test_the_prefix_of_a_window_without_rows_counts_its_skips() -> None:
    assert prefix_of(0).at(0) == Counts(0, 0, 0, 5, (0, 0), 0)


def test_counts_add_up_and_digests_wrap() -> None:
    added = Counts(1, 2, 1, 3, (1, 0), 2**64 - 1) + Counts(10, 20, 2, 30, (4, 6), 3)
    assert added == Counts(11, 22, 3, 33, (5, 6), 2)
    assert Counts.zero(2) + added == added


def test_rows_are_sliced_with_their_pieces() -> None:
    rows = rows_of([[1, 2], [3, 4], [5, 6]], [[1, 1], [], [2]])
    assert shown(rows.slice(0, 1)) == ([[1, 2]], [1, 1], [2])
    assert shown(rows.slice(1, 3)) == ([[3, 4], [5, 6]], [2], [0, 1])
    assert shown(rows.slice(2, 2)) == ([], [], [])
    assert np.shares_memory(rows.slice(1, 3).tokens_BX, rows.tokens_BX)


def test_concatenating_slices_gives_the_rows_again() -> None:
    rows = rows_of([[1, 2], [3, 4], [5, 6]], [[1, 1], [], [2]])
    assert shown(Rows.concatenate([rows.slice(0, 1), rows.slice(1, 1), rows.slice(1, 3)])) == shown(rows)
    assert len(rows) == 3


def test_padding_rows_hold_eos_and_no_piece() -> None:
    assert shown(Rows.padding(2, 3, np.uint16, 9)) == ([[9, 9, 9], [9, 9, 9]], [], [0, 0])


def test_cursors_survive_json() -> None:
    text = json.dumps(cursors_to_json(CURSORS))
    assert text == '{"window": 7, "sources": [[1, 2, 3], [0, 9, 0]]}'
    assert cursors_from_json(json.loads(text)) == CURSORS
