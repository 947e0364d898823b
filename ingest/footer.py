"""Footers of Parquet files: read, compared with the manifest, and kept for the next row group.

Guarantees: a file that is not the one the manifest speaks of is refused; whatever is wrong with a footer ends in a
DataError that names the file.

Cost: one request of 64 KiB, and a second one only where the footer is larger.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from ingest.errors import DataError
from ingest.retry import one_line
from ingest.storage import Storage
from ingest.thrift import read_struct

_TAIL_BYTES = 64 << 10
_MAX_CACHED_FOOTERS = 32
_SIGNATURE_BYTES = 12 + 16
"""Nonce and tag behind a readable footer where columns are encrypted, whose metadata ends the process when touched.
Source: Parquet Modular Encryption, section 5.5."""
_TYPES = (  # physical types in the order of their numbers, and bytes of a value; None where the column says its own
    *(("BOOLEAN", 1), ("INT32", 4), ("INT64", 8), ("INT96", 12), ("FLOAT", 4), ("DOUBLE", 8), ("BYTE_ARRAY", 0)),
    ("FIXED_LEN_BYTE_ARRAY", None),
)
_BOUNDS = (1, 2, 5, 6)  # max, min, max_value, min_value


@dataclass(frozen=True)
class Footer:
    """The metadata of one file.

    Args:
        metadata: ``pyarrow.parquet.FileMetaData``.
        hash: xxh3_64 of the footer's bytes (without the length and the magic after it), 16 hex digits.
        size_bytes: length of the whole file.
        content: the footer's bytes.
    """

    metadata: Any
    hash: str
    size_bytes: int
    content: bytes


class _Footers:
    """The footers parsed last in this process, by path, size and hash; a changed file has another key."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._footers: OrderedDict[tuple[str, int, str], Footer] = OrderedDict()

    def get(self, key: tuple[str, int, str]) -> Footer | None:
        with self._lock:
            if key in self._footers:
                self._footers.move_to_end(key)
            return self._footers.get(key)

    def put(self, path: str, footer: Footer) -> None:
        with self._lock:
            self._footers[path, footer.size_bytes, footer.hash] = footer
            if len(self._footers) > _MAX_CACHED_FOOTERS:
                self._footers.popitem(last=False)


_FOOTERS = _Footers()


def read_footer(storage: Storage, path: str) -> Footer:
    """Reads and parses the footer of a file.

    Raises:
        DataError: not a Parquet file, truncated, damaged or encrypted.
        StorageError: the file cannot be opened or read.
    """
    with storage.open(path) as file:
        return _footer(file, path)


def verified(file: Any, path: str, expect: tuple[int, str] | None) -> Footer:
    """The footer of an open file, compared with the size and footer hash of the manifest.

    Raises:
        DataError: the file changed since, or is not Parquet.
    """
    size = file.size()
    if expect is not None:
        _check(path, "size in bytes", expect[0], size)
        cached = _FOOTERS.get((path, *expect))
        if cached is not None:
            return cached
    footer = _footer(file, path)
    if expect is not None:
        _check(path, "footer hash", expect[1], footer.hash)
        _FOOTERS.put(path, footer)
    return footer


def _check(path: str, what: str, promised: object, value: object) -> None:
    if promised != value:
        raise DataError(
            f"{path} changed since the manifest was made; {what} was {promised}, is {value}: "
            "run `ingest index` again or restore the file"
        )


def require_bounds(footer: Footer, leaves: list[int], path: str) -> None:
    """Refuses statistics that do not fit their column: pyarrow ends the process when it is asked for them.

    It is done when the manifest is made; from then on the hash of the footer vouches for it.

    Args:
        footer: of the file.
        leaves: indexes of the columns whose statistics are wanted.
        path: names the file in the error.

    Raises:
        DataError: names the file and the column.

    Source: parquet.thrift, FileMetaData, RowGroup, ColumnChunk, ColumnMetaData, Statistics.
    """
    said: dict[int, Any] | None = None
    for leaf in leaves:
        column = footer.metadata.schema.column(leaf)
        try:
            said = said or read_struct(footer.content)
            chunks = [group[1][leaf][3] for group in said[4]]
            fit = all(_fits(chunk[1], chunk.get(12, {}), column) for chunk in chunks)
        except (IndexError, KeyError, TypeError, ValueError, AttributeError):  # not what its fields should be
            fit = False
        if not fit:
            rule = f"{path} must have statistics that fit column {column.path} of type {column.physical_type}"
            raise DataError(f"{rule}; its footer is damaged: restore it, or write it without statistics")


def _fits(kind: int, bounds: dict[int, bytes], column: Any) -> bool:
    name, width = _TYPES[kind]
    least = min((len(bounds[field]) for field in _BOUNDS if field in bounds), default=None)
    return name == column.physical_type and (least is None or least >= (column.length if width is None else width))


def _footer(file: Any, path: str) -> Footer:
    size = file.size()
    if size < 12:
        raise DataError(f"{path} must be a Parquet file; it has {size} bytes: restore it or leave it out")
    tail = _read_at(file, max(0, size - _TAIL_BYTES), min(size, _TAIL_BYTES))
    if tail[-4:] == b"PARE":
        raise DataError(f"{path} must not be encrypted; its footer is: write it without encryption")
    if tail[-4:] != b"PAR1":
        begins = _read_at(file, 0, 4) == b"PAR1"
        fault = "its end is missing, so it is truncated" if begins else "it neither begins nor ends like one"
        raise DataError(f"{path} must be a Parquet file; {fault}: restore it or leave it out")
    length = int.from_bytes(tail[-8:-4], "little")
    if length > size - 12:
        raise DataError(f"{path} must be a Parquet file; its footer claims {length} of {size} bytes: restore it")
    footer = tail[-8 - length : -8] if length + 8 <= len(tail) else _read_at(file, size - 8 - length, length)
    try:
        metadata = pq.read_metadata(pa.BufferReader(b"PAR1" + footer + length.to_bytes(4, "little") + b"PAR1"))
    except (OSError, ValueError, pa.ArrowException) as error:  # ValueError: a name that is not UTF-8
        raise DataError(
            f"{path} must be a Parquet file; its footer is damaged ({one_line(error)}): restore it"
        ) from error
    if length - metadata.serialized_size == _SIGNATURE_BYTES:
        raise DataError(f"{path} must not be encrypted; its columns are: write it without encryption")
    return Footer(metadata, xxhash.xxh3_64_hexdigest(footer), size, footer)


def _read_at(file: Any, offset: int, length: int) -> bytes:
    data: bytes = file.read_at(length, offset)
    return data
