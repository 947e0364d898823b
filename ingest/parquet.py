"""Parquet footers and text columns: the only module that decodes files.

Guarantees: a document comes out as valid UTF-8 or as null; a file that is not the one the manifest speaks of is refused
before its first row; whatever is wrong with a file ends in a DataError that names it.

Cost: a footer is one request of 64 KiB, and a second one only where the footer is larger. A row group costs the bytes
of its text column and nothing of the other columns: one request up to 64 MiB; above that, requests of 16 MiB, made as
the rows are taken, so that a row group of any size needs about that much memory (a column chunk of 287 MiB: 25 MiB more
resident instead of 300).

Rejected: ``pyarrow.dataset``, which reads ahead over row groups and files and has no place to check a footer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ingest.account import Bad
from ingest.chunks import column_chunks
from ingest.columns import Columns, Filtered, Item, Picked, holds_text
from ingest.errors import DataError
from ingest.footer import verified
from ingest.retry import one_line
from ingest.storage import Storage

WHOLE_CHUNK_BYTES = 64 << 20
_STREAM_BYTES = 16 << 20
_BATCH_BYTES = 1 << 20  # of text in one array, on average


def text_column(metadata: Any, column: str, path: str) -> int:
    """The index of the text column among the columns of a file; ``doc.text`` is a field of a struct.

    Args:
        metadata: ``pyarrow.parquet.FileMetaData`` of the file.
        column: the name in the settings.
        path: names the file in the error.

    Raises:
        DataError: no such column, several of that name, or its type is neither text, bytes nor null.
    """
    try:
        names = [metadata.schema.column(index).path for index in range(metadata.num_columns)]
        schema = metadata.schema.to_arrow_schema()
    except (OSError, ValueError, pa.ArrowException) as error:
        raise DataError(f"{path} must have columns that Arrow knows; got {one_line(error)}: restore it") from error
    if column not in names:
        known = ", ".join(schema.names[:20]) + (f" and {len(schema) - 20} more" if len(schema) > 20 else "")
        kind, first = "is not there", column.partition(".")[0]
        if first in schema.names:
            of = f"is of type {schema.types[schema.names.index(first)]}"
            kind = of if first == column else f"{kind}, {first} {of}"
        raise DataError(f"{path} must have a text column {column}; it {kind}, columns are {known}: set text_column")
    if names.count(column) > 1:
        raise DataError(f"{path} must have one column {column}; got {names.count(column)}: rename the others")
    kind = _type_of(schema, column)
    if not holds_text(kind):
        raise DataError(f"{path}: column {column} must hold text; got {kind}: set text_column to another column")
    return names.index(column)


def find_columns(metadata: Any, columns: Columns, path: str) -> list[int]:
    """The indexes of all leaf columns that documents are read from.

    Raises:
        DataError: as for ``text_column``, or a column is not of the type that its kind needs.
    """
    return [text_column(metadata, columns.names[0], path)] if columns.kind == "text" else columns.leaves(metadata, path)


def read_documents(
    storage: Storage,
    path: str,
    row_group: int,
    columns: Columns | str,
    expect: tuple[int, str] | None = None,
    *,
    batch_rows: int = 256,
    request_bytes: int | None = None,
    skip: bool = False,
) -> Iterator[Item]:
    """Yields the documents of one row group in order; a null stays null. With a filter, only those it leaves.

    The footer is read and compared when a file is met first; while it is among the last 32, only its size is compared.

    Args:
        storage: opens the file.
        path: the file.
        row_group: index within the file.
        columns: where they stand; a name alone is a text column.
        expect: size in bytes and footer hash from the manifest; None takes the file as it is.
        batch_rows: rows of one array, at most.
        request_bytes: size of one request, to read only the first documents of a large row group; None as described
            at the top.
        skip: yields ``Bad`` in the place of rows that are not UTF-8, and of all from the first ``batch_rows`` on that
            cannot be decoded. What a store does not deliver is never skipped, nor a file that changed.

    Raises:
        DataError: the file changed; or, unless ``skip``, is damaged, or a document is not UTF-8.
        StorageError: the file cannot be opened or read.
    """
    columns = Columns("text", (columns,)) if isinstance(columns, str) else columns
    with storage.open(path) as file:
        metadata = verified(file, path, expect).metadata
        if not 0 <= row_group < metadata.num_row_groups:
            raise DataError(
                f"{path} has {metadata.num_row_groups} row groups; got {row_group}: run `ingest index` again"
            )
        leaves = find_columns(metadata, columns, path)
        if columns.filter is not None:
            leaves = list(dict.fromkeys([*leaves, *columns.filter.leaves(metadata, path)]))
        (chunks,) = column_chunks(metadata, [row_group], leaves, path, file.size())
        if columns.filter is not None and columns.filter.excluded(metadata, [row_group]):
            yield Filtered(metadata.row_group(row_group).num_rows)
            return
        compressed_bytes = sum(chunk.total_compressed_size for chunk in chunks)
        whole = request_bytes is None and compressed_bytes <= WHOLE_CHUNK_BYTES
        num_rows, first = metadata.row_group(row_group).num_rows, 0
        mean_bytes = sum(chunk.total_uncompressed_size for chunk in chunks) // max(1, num_rows)
        batch_rows = max(1, min(batch_rows, _BATCH_BYTES // max(1, mean_bytes)))
        buffer_bytes = 0 if whole else request_bytes or _STREAM_BYTES
        try:
            with decoding(path, row_group):
                reader = pq.ParquetFile(
                    file,
                    metadata=metadata,
                    pre_buffer=whole,
                    buffer_size=buffer_bytes,
                    page_checksum_verification=True,
                )
                names = [metadata.schema.column(index).path for index in leaves]
                batches = reader.iter_batches(batch_rows, row_groups=[row_group], columns=names, use_threads=False)
                for batch in batches:
                    yield from _rows(batch, columns, f"{path}: row group {row_group}", first, skip)
                    first += batch.num_rows
                if first != num_rows:
                    raise pa.ArrowInvalid(f"{first} rows of {num_rows}")
        except UndecodableError as error:
            if not skip:
                raise
            yield Bad(first, num_rows - first, error.reason)


def _type_of(schema: pa.Schema, column: str) -> pa.DataType:
    if column in schema.names:
        return schema.field(column).type
    first, *rest = column.split(".")
    kind = schema.field(first).type
    for name in rest:
        kind = kind.field(name).type if pa.types.is_struct(kind) else kind
    return kind


def _rows(batch: pa.RecordBatch, columns: Columns, where: str, first_row: int, skip: bool) -> Iterator[Item]:
    """The documents of a batch, their text checked to be UTF-8, which Parquet readers do not do.

    Rows that are not are refused, or cut out and named.
    """
    array, numbers = columns.raw(batch), np.arange(first_row, first_row + batch.num_rows)
    if columns.filter is not None:
        try:
            kept = np.flatnonzero(columns.filter.keeps(batch))
        except pa.ArrowInvalid as error:  # no fault of the file, so no row of it is skipped
            rule = f"{where}: filter {columns.filter.text} must compare values that fit the types of its columns"
            raise DataError(f"{rule}; {one_line(error)}: mend the filter or the file") from error
        array, numbers = array.take(pa.array(kept)), numbers[kept]
        if len(kept) < batch.num_rows:
            yield Filtered(batch.num_rows - len(kept))

    def found(rows: pa.Array, start: int) -> pa.Array | Picked:
        return rows if columns.filter is None else Picked(rows, numbers[start : start + len(rows)])

    done = 0
    while done < len(array):
        rest = array.slice(done)
        try:
            yield found(columns.checked(rest), done)
            return
        except pa.ArrowInvalid as error:
            bad = columns.first_invalid(rest)
            if not skip:
                what = f"{where}, row {numbers[done + bad]} must be UTF-8; {one_line(error)}"
                raise DataError(f"{what}: mend it, leave it out, or set on_error") from error
            if bad:
                yield found(columns.checked(rest.slice(0, bad)), done)
            yield Bad(int(numbers[done + bad]), 1, "not UTF-8")
            done += bad + 1


class UndecodableError(DataError):
    """A row group that pyarrow refuses; ``reason`` is what it says."""

    def __init__(self, message: str, reason: str = "") -> None:
        super().__init__(message)
        self.reason = reason


@contextlib.contextmanager
def decoding(path: str, row_group: int) -> Iterator[None]:
    """Names the file and the row group where pyarrow refuses the content; the store's own errors pass as they are.

    Raises:
        DataError: the content cannot be decoded.
    """
    try:
        yield
    except pa.ArrowMemoryError:
        raise
    except (OSError, ValueError, pa.ArrowException) as error:  # ValueError: a name that is not UTF-8
        reason = one_line(error)
        message = f"{path}: row group {row_group} cannot be decoded; {reason}: restore the file, or set on_error"
        raise UndecodableError(message, reason) from error
