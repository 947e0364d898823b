"""Which columns of a file hold a source's documents, and their rows as one Arrow array.

    kind       columns   array                                      nothing to train on, so skipped
    text       one       large_string                               null or empty
    messages   one       list of struct<role, content>              null or empty
    prompt     two       struct<prompt, response> of large_string   null or empty response
    tokens     one       list of integers                           null or empty

Guarantees: what comes out is valid UTF-8. Of a message only role and content are read. Cost: nothing is copied but text
that is not large_string yet.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ingest.account import Bad
from ingest.errors import DataError
from ingest.filter import Filter, column_of

Kind = Literal["text", "messages", "prompt", "tokens"]
SETTINGS: dict[Kind, tuple[str, ...]] = {
    "text": ("text_column",),
    "messages": ("messages",),
    "prompt": ("prompt", "response"),
    "tokens": ("tokens",),
}
"""The settings of a source that name the columns of each kind."""

_WANTED: dict[Kind, str] = {
    "messages": "list<struct<role: string, content: string>>",
    "prompt": "string",
    "tokens": "list of integers",
}


class Filtered(NamedTuple):
    """Rows that a filter leaves out; they are in no array."""

    num_rows: int


@dataclass(frozen=True, eq=False)
class Picked:
    """Rows that a filter leaves.

    Args:
        rows: the documents.
        numbers: int64, of the rows in their row group.
    """

    rows: pa.Array
    numbers: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.rows)


Item: TypeAlias = pa.Array | Bad | Picked | Filtered
"""What reading a row group gives, piece by piece."""


@dataclass(frozen=True)
class Columns:
    """Where a source's documents stand.

    Args:
        kind: how they are stored; see the top.
        names: of the columns, in the order of ``SETTINGS``.
        filter: which rows of them count; None for all.
    """

    kind: Kind
    names: tuple[str, ...]
    filter: Filter | None = None

    def leaves(self, metadata: Any, path: str) -> list[int]:
        """The indexes of the leaf columns to read; not for text, whose column is found by ``text_column``.

        Args:
            metadata: ``pyarrow.parquet.FileMetaData`` of the file.
            path: names the file in the error.

        Raises:
            DataError: no such column, or of another type.
        """
        schema = metadata.schema.to_arrow_schema()
        paths = [metadata.schema.column(index).path for index in range(metadata.num_columns)]
        found: list[int] = []
        for name, setting in zip(self.names, SETTINGS[self.kind], strict=True):
            place = schema.get_field_index(name)  # -1 where there is none or are several
            if place < 0 or not _FITS[self.kind](schema.types[place]):
                got = (
                    f"{schema.names.count(name)} of {', '.join(schema.names[:20])}"
                    if place < 0
                    else schema.types[place]
                )
                rule = f"{path} must have one column {name} of {_WANTED[self.kind]}"
                raise DataError(f"{rule}; got {got}: set {setting} to another column")
            mine = [index for index, leaf in enumerate(paths) if leaf == name or leaf.startswith(f"{name}.")]
            if self.kind == "messages":
                mine = [index for index in mine if paths[index].rpartition(".")[2] in ("role", "content")]
            found += mine
        return found

    def raw(self, batch: pa.RecordBatch) -> pa.Array:
        """The documents of a batch as they were read, one a row."""
        if self.kind == "prompt":
            return pa.StructArray.from_arrays([batch.column(name) for name in self.names], list(SETTINGS["prompt"]))
        return column_of(batch, self.names[0])  # doc.text is a field of a struct

    def checked(self, raw: pa.Array) -> pa.Array:
        """The same as the types at the top.

        Raises:
            pyarrow.ArrowInvalid: text is not UTF-8.
        """
        if self.kind == "text":
            return _utf8(raw)
        if self.kind == "prompt":
            return pa.StructArray.from_arrays([_utf8(raw.field(index)) for index in (0, 1)], list(SETTINGS["prompt"]))
        if self.kind == "messages":
            raw = raw.take(pa.array(np.arange(len(raw))))  # validate looks at all that lies behind a slice of lists
            raw.validate(full=True)
        return raw

    def first_invalid(self, raw: pa.Array) -> int:
        """The first row that is not UTF-8; pyarrow says that there is one, not which."""
        for row in range(len(raw)):
            try:
                self.checked(raw.slice(row, 1))
            except pa.ArrowInvalid:
                return row
        raise AssertionError("validate found a row that decode accepts")


def _utf8(array: pa.Array) -> pa.LargeStringArray:
    text = array.cast(pa.large_string())
    text.validate(full=True)
    return text


def holds_text(kind: pa.DataType) -> bool:
    """Whether a column of this type can be read as text."""
    value = kind.value_type if pa.types.is_dictionary(kind) else kind
    types = pa.types
    text = types.is_string(value) or types.is_large_string(value) or types.is_string_view(value)
    data = types.is_binary(value) or types.is_large_binary(value) or types.is_binary_view(value)
    return bool(text or data or types.is_null(value))


def documents(items: Iterable[Item]) -> Iterator[pa.Array]:
    """The documents alone of what reading gives."""
    for item in items:
        if not isinstance(item, Bad | Filtered):
            yield item.rows if isinstance(item, Picked) else item


def sizes(rows: pa.Array) -> npt.NDArray[np.int64]:
    """int64 [rows], what each row holds, 0 where there is nothing to train on: bytes of text, or items of a list."""
    if pa.types.is_struct(rows.type):
        prompt, response = (_filled(pc.binary_length(rows.field(index))) for index in (0, 1))
        return np.where(response > 0, prompt + response, 0)
    return _filled(pc.list_value_length(rows) if _is_list(rows.type) else pc.binary_length(rows))


def texts(rows: pa.Array) -> list[str]:
    """All text in rows of any kind, for comparing tokenizers on the user's own."""
    if pa.types.is_struct(rows.type):
        return [text for index in (0, 1) for text in rows.field(index).to_pylist() if text]
    if not _is_list(rows.type):
        return [text for text in rows.to_pylist() if text]
    if not pa.types.is_struct(rows.type.value_type):
        return []
    messages = (message for row in rows.to_pylist() for message in row or () if message)
    return [message["content"] for message in messages if message["content"]]


def _filled(lengths: pa.Array) -> npt.NDArray[np.int64]:
    return np.asarray(pc.fill_null(lengths, 0)).astype(np.int64)


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def _is_string(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def _holds_messages(kind: pa.DataType) -> bool:
    if not _is_list(kind) or not pa.types.is_struct(kind.value_type):
        return False
    places = [kind.value_type.get_field_index(name) for name in ("role", "content")]
    return all(place >= 0 and _is_string(kind.value_type.field(place).type) for place in places)


def _holds_tokens(kind: pa.DataType) -> bool:
    return _is_list(kind) and bool(pa.types.is_integer(kind.value_type))


_FITS = {"messages": _holds_messages, "prompt": holds_text, "tokens": _holds_tokens}
