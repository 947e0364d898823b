"""Packed Parquet: rows of token ids that were tokenized and packed before; what a file says of itself, and reading it.

One row of the file is one row of T tokens:

    tokens        fixed_size_binary((T + 1) * itemsize): the row with its look-ahead token, little endian, padding eos
    lengths       binary: tokens of each piece, look-ahead included, int32 little endian
    input_tokens  int32: tokens that are inputs, so neither padding nor the look-ahead of a cut
    documents     int32: documents that begin in the row
    starts        binary: where in its document each piece begins, int32 little endian; only where positions continue

The footer holds two keys: ``ingest.packed``, the ``PackedFormat`` as JSON, and ``ingest.packed.hashes``, a JSON list
with one hash a row group. So the hash of the footer, by which the manifest knows a file, speaks of every token although
all packed files of one size would otherwise have the same footer.

Guarantees: a row group is read only if it holds the rows that were written, to the bit; whatever is wrong with one ends
in a DataError that names file, row group and row.

Cost: one process reads 950 million tokens/s of T = 2048 from the page cache, hash and rules included, and returns the
arrays that Arrow decoded, without a copy; a bare pyarrow read with one copy makes 1,260. Rejected, by decoding alone,
plain 2,400: page checksums 980, which cost more than the hash and leave the footer as it is; zstd 390, which saves 57 %
of the bytes of Python's sources; lz4 900 and 45 %; a column of lists of integers 160.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, get_args

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from ingest.errors import ConfigError, DataError
from ingest.footer import verified
from ingest.packing import PositionIds
from ingest.parquet import decoding
from ingest.slab import IntArray, Rows
from ingest.storage import Storage

VERSION = 1
FORMAT_KEY, HASHES_KEY = b"ingest.packed", b"ingest.packed.hashes"
COLUMNS = ("tokens", "lengths", "input_tokens", "documents")
STARTS = "starts"
SUMMARY = "_packed.json"  # beside the files, written last

_SETTINGS = {
    "sequence_length": "packing.sequence_length",
    "tokenizer": "tokenizer (sha256)",
    "eos_token": "tokenizer.eos_token",
    "bos_token": "tokenizer.bos_token",
    "position_ids": "packing.position_ids",
}


@dataclass(frozen=True)
class PackedFormat:
    """How the rows of a packed file were made.

    Args:
        sequence_length: T.
        token_dtype: ``uint16`` or ``uint32``; a run with 32 bits may read a file of 16.
        tokenizer: sha256 of the ``tokenizer.json``.
        eos_token: the token after every document.
        strategy: of the packing; a run with another one may read the file, since packed rows are not packed again.
        bos_token: the one before every document; None without one.
        position_ids: whether the file holds the starts of pieces, for ``continue``.
    """

    sequence_length: int
    token_dtype: str
    tokenizer: str
    eos_token: str
    strategy: str
    bos_token: str | None = None
    position_ids: PositionIds = "restart"

    @property
    def row_bytes(self) -> int:
        """Bytes of one row with its look-ahead token."""
        return (self.sequence_length + 1) * np.dtype(self.token_dtype).itemsize

    @cached_property
    def schema(self) -> pa.Schema:
        """The columns of a file, with ``FORMAT_KEY``."""
        kinds = (pa.binary(self.row_bytes), pa.binary(), pa.int32(), pa.int32())
        columns = [pa.field(name, kind, nullable=False) for name, kind in zip(COLUMNS, kinds, strict=True)]
        if self.position_ids == "continue":
            columns.append(pa.field(STARTS, pa.binary(), nullable=False))
        return pa.schema(columns, metadata={FORMAT_KEY: json.dumps({"version": VERSION, **self.to_plain()})})

    def to_plain(self) -> dict[str, Any]:
        """Plain values, defaults left out; ``from_plain`` takes them back."""
        values = ((each.name, getattr(self, each.name), each.default) for each in fields(self))
        return {name: value for name, value, default in values if value != default}

    @classmethod
    def from_plain(cls, plain: Any) -> PackedFormat:
        """Reads ``to_plain``; keys that are not its own are passed over.

        Raises:
            TypeError, KeyError, ValueError: not what ``to_plain`` gives.
        """
        length, dtype = plain["sequence_length"], plain["token_dtype"]
        positions = plain.get("position_ids", "restart")
        if type(length) is not int or length < 1 or dtype not in ("uint16", "uint32"):
            raise ValueError(f"sequence_length {length!r} of {dtype!r}")
        if positions not in get_args(PositionIds):
            raise ValueError(f"position_ids {positions!r}")
        tokenizer, eos_token, strategy = (str(plain[name]) for name in ("tokenizer", "eos_token", "strategy"))
        return cls(length, dtype, tokenizer, eos_token, strategy, plain.get("bos_token"), positions)

    def require(self, wanted: PackedFormat, path: str) -> None:
        """Refuses a file whose rows are not those that the run would make itself.

        Args:
            wanted: of the run.
            path: names the file in the error.

        Raises:
            ConfigError: names every setting that differs, with both values.
        """
        lines = [
            f"{setting} is {getattr(self, name)} in the file and {getattr(wanted, name)} in the settings"
            for name, setting in _SETTINGS.items()
            if getattr(self, name) != getattr(wanted, name)
        ]
        if lines:
            raise ConfigError(
                f"{path} must be packed with the settings of the run; {'; '.join(lines)}: "
                "set what the file was made with, or run `ingest pack` again"
            )


@dataclass(frozen=True, eq=False)
class PackedRows:
    """Rows as a packed file holds them.

    Args:
        rows: B rows.
        input_tokens_B: int32 [B], at least 1.
        documents_B: int32 [B], documents that begin in the row.
    """

    rows: Rows
    input_tokens_B: npt.NDArray[np.int32]
    documents_B: npt.NDArray[np.int32]

    def to_table(self, schema: pa.Schema) -> pa.Table:
        """The rows as Arrow columns that share their memory."""
        rows, count = self.rows, len(self.rows)
        offsets = pa.py_buffer((4 * _bounds(rows.counts_B)).astype(np.int32))
        tokens = pa.py_buffer(np.ascontiguousarray(rows.tokens_BX))
        lengths, starts = (pa.py_buffer(np.ascontiguousarray(array)) for array in (rows.lengths_L, rows.starts_L))
        columns = [
            pa.Array.from_buffers(schema.field("tokens").type, count, [None, tokens]),
            pa.Array.from_buffers(pa.binary(), count, [None, offsets, lengths]),
            pa.array(self.input_tokens_B, pa.int32()),
            pa.array(self.documents_B, pa.int32()),
        ]
        if STARTS in schema.names:
            columns.append(pa.Array.from_buffers(pa.binary(), count, [None, offsets, starts]))
        return pa.Table.from_arrays(columns, schema=schema)

    def hash(self) -> str:
        """xxh3_64 over the bytes of all arrays, one after another, 16 hex digits."""
        digest = xxhash.xxh3_64()
        rows = self.rows
        for array in (rows.tokens_BX, rows.lengths_L, rows.counts_B, self.input_tokens_B, self.documents_B):
            digest.update(np.ascontiguousarray(array).data)
        digest.update(np.ascontiguousarray(rows.starts_L).data)  # nothing where positions restart
        return digest.hexdigest()


def packed_format(metadata: Any, path: str) -> PackedFormat | None:
    """What a file says of itself; None where it is not a packed file.

    Args:
        metadata: ``pyarrow.parquet.FileMetaData`` of the file.
        path: names the file in the error.

    Raises:
        DataError: it says that it is packed, but not in this version, or its columns are others.
    """
    stored = (metadata.metadata or {}).get(FORMAT_KEY)
    if stored is None:
        return None
    again = "run `ingest pack` again"
    try:
        plain = json.loads(stored)
        if plain["version"] != VERSION:
            raise DataError(f"{path} must be packed in version {VERSION}; got {plain['version']!r}: {again}")
        form = PackedFormat.from_plain(plain)
    except (ValueError, TypeError, KeyError) as error:
        raise DataError(f"{path} must say how it was packed; {type(error).__name__}, {error}: {again}") from error
    schema = metadata.schema.to_arrow_schema()
    places = [schema.get_field_index(name) for name in form.schema.names]  # -1 where there is none or are several
    kinds = [None if place < 0 else schema.types[place] for place in places]
    wrong = [field for field, kind in zip(form.schema, kinds, strict=True) if field.type != kind]
    if wrong:
        got = ", ".join(f"{name} {kind}" for name, kind in zip(schema.names, schema.types, strict=True))
        raise DataError(f"{path} must have a column {wrong[0].name} of {wrong[0].type}; got {got}: {again}")
    return form


def tokens_column(metadata: Any) -> int:
    """The index of the column of tokens in a packed file."""
    index: int = metadata.schema.to_arrow_schema().get_field_index(COLUMNS[0])
    return index


def read_packed(
    storage: Storage, path: str, row_group: int, sequence_length: int, expect: tuple[int, str] | None = None
) -> PackedRows:
    """Reads the rows of one row group.

    Args:
        storage: opens the file.
        path: the file.
        row_group: index within the file.
        sequence_length: T, which the rows must have; tokens are uint16 or uint32, and pieces have starts or not, as
            in the file.
        expect: size in bytes and footer hash from the manifest; None takes the file as it is.

    Raises:
        DataError: the file changed, is damaged, or a row breaks a rule.
        StorageError: the file cannot be opened or read.
    """
    with storage.open(path) as file, decoding(path, row_group):
        metadata = verified(file, path, expect).metadata
        hashes = _hashes(metadata)
        if not 0 <= row_group < min(metadata.num_row_groups, len(hashes)):
            raise DataError(
                f"{path} has {metadata.num_row_groups} row groups and {len(hashes)} hashes; got {row_group}: "
                "run `ingest index` again"
            )
        form = packed_format(metadata, path)
        if form is None or form.sequence_length != sequence_length:
            got = "none" if form is None else f"rows of {form.sequence_length}"
            raise DataError(f"{path} must hold rows of {sequence_length} tokens; got {got}: run `ingest index` again")
        reader = pq.ParquetFile(file, metadata=metadata, pre_buffer=True)
        table = reader.read_row_group(row_group, columns=form.schema.names, use_threads=False)
    where = f"{path}: row group {row_group}"
    packed = _from_table(table.select(form.schema.names), form, where)
    then, now = hashes[row_group], packed.hash()
    if then != now:
        raise DataError(f"{where} must hold what was packed; hash {then} then, {now} now: restore the file")
    _require_sound(packed, sequence_length, where)
    return packed


def _hashes(metadata: Any) -> list[Any]:
    """One for each row group; none where the footer holds no list of them."""
    try:
        hashes = json.loads((metadata.metadata or {}).get(HASHES_KEY, b""))
    except ValueError:
        return []
    return hashes if isinstance(hashes, list) else []


def _from_table(table: pa.Table, form: PackedFormat, where: str) -> PackedRows:
    """The arrays of a table in the columns of ``form``, in place."""
    count, width, dtype = len(table), form.sequence_length + 1, np.dtype(form.token_dtype).newbyteorder("<")
    columns = [_only_chunk(column) for column in table.columns]
    if any(column.null_count for column in columns):
        raise DataError(f"{where} must not hold nulls; got some: restore the file")
    tokens, lengths, input_tokens, documents, *starts = columns
    flat = np.frombuffer(tokens.buffers()[1], dtype, count * width, tokens.offset * form.row_bytes)
    pieces, counts = _integers(lengths, f"{where}, row %d: lengths")
    rows = Rows(flat.reshape(count, width), pieces, counts)
    if starts:
        starts_L, starts_B = _integers(starts[0], f"{where}, row %d: starts")
        if (starts_B != counts).any():
            row = int(np.argmax(starts_B != counts))
            rule = f"{where}, row {row}: starts must be as many as lengths"
            raise DataError(f"{rule}; got {starts_B[row]} and {counts[row]}: run `ingest pack` again")
        rows = replace(rows, starts_L=starts_L)
    return PackedRows(rows, np.asarray(input_tokens), np.asarray(documents))


def _integers(column: pa.Array, what: str) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """All int32 of a binary column, and how many each row holds."""
    _, bounds, data = column.buffers()
    offsets = np.frombuffer(bounds, np.int32, len(column) + 1, 4 * column.offset)
    uneven = np.flatnonzero(offsets % 4)
    if len(uneven):
        raise DataError(f"{what % max(0, uneven[0] - 1)} must be int32; got a part of one: restore it")
    values = np.frombuffer(data or b"", "<i4")[offsets[0] // 4 : offsets[-1] // 4]
    return values, np.diff(offsets) // 4


def _require_sound(packed: PackedRows, sequence_length: int, where: str) -> None:
    """The rules between the columns of each row."""
    rows, inputs = packed.rows, packed.input_tokens_B
    bounds = _bounds(rows.counts_B)
    total = np.concatenate(([0], np.cumsum(rows.lengths_L, dtype=np.int64)))[bounds]
    sums = np.diff(total)
    wrong = np.diff(np.concatenate(([0], np.cumsum(rows.lengths_L < 1)))[bounds])
    rules: tuple[tuple[str, npt.NDArray[Any], npt.NDArray[np.bool_]], ...] = (
        ("the number of lengths below 1 must be 0", wrong, wrong == 0),
        (f"lengths must fit {sequence_length} + 1 tokens", sums, sums <= sequence_length + 1),
        ("input_tokens must be 1 or more", inputs, inputs >= 1),
        ("input_tokens must be the sum of lengths less look-ahead", inputs, _within(sums - inputs, rows.counts_B)),
        (f"input_tokens must fit {sequence_length} tokens", inputs, inputs <= sequence_length),
        ("documents must be no more than the pieces", packed.documents_B, _within(packed.documents_B, rows.counts_B)),
    )
    if len(rows.starts_L):
        begun = np.diff(np.concatenate(([0], np.cumsum(rows.starts_L == 0)))[bounds])
        below = np.diff(np.concatenate(([0], np.cumsum(rows.starts_L < 0)))[bounds])
        documents = "documents must be the pieces that start at 0"
        rules += (
            ("the number of starts below 0 must be 0", below, below == 0),
            (documents, packed.documents_B, packed.documents_B == begun),
        )
    for rule, values, holds in rules:
        if not holds.all():
            row = int(np.argmin(holds))
            raise DataError(f"{where}, row {row}: {rule}; got {values[row]}: run `ingest pack` again")


def _within(values: npt.NDArray[Any], most: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    within: npt.NDArray[np.bool_] = (values >= 0) & (values <= most)
    return within


def _bounds(counts_B: npt.NDArray[np.int32]) -> IntArray:
    """Where the pieces of each row begin, and where the last ones end: int64 [B + 1]."""
    return np.concatenate(([0], np.cumsum(counts_B, dtype=np.int64)))


def _only_chunk(column: pa.ChunkedArray) -> pa.Array:
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
