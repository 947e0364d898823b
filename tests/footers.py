"""Parquet footers taken apart and put together again, to write files that no writer writes.

A struct is a dict of field number to ``[type, value]``, a list ``[type, values]``; numbers are plain. Source: Thrift
compact protocol; the fields are those of parquet.thrift.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ingest.thrift import varint

TRUE, FALSE, BYTE, BINARY, LIST, STRUCT = 1, 2, 3, 8, 9, 12

ROWS, GROUPS = 3, 4  # of the file
CHUNKS, GROUP_ROWS = 1, 3  # of a row group
TYPE, VALUES, RAW_BYTES, BYTES, PAGE, DICTIONARY, STATISTICS = 1, 5, 6, 7, 9, 11, 12  # of a chunk
MAX_VALUE, MIN_VALUE = 5, 6  # of its statistics


def alter(path: Path, change: Callable[[dict], object]) -> None:
    """Rewrites the footer of a file as ``change`` leaves it."""
    data = path.read_bytes()
    begin = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    footer, end = _read(data, begin, STRUCT)
    assert (end, _write(STRUCT, footer)) == (len(data) - 8, data[begin:-8])
    change(footer)
    new = _write(STRUCT, footer)
    path.write_bytes(data[:begin] + new + len(new).to_bytes(4, "little") + b"PAR1")


def chunk(footer: dict, group: int = 0, column: int = 0) -> dict:
    """The metadata of one column chunk."""
    return footer[GROUPS][1][1][group][CHUNKS][1][1][column][3][1]


def _read(data: bytes, at: int, kind: int) -> tuple[Any, int]:
    if kind in (TRUE, FALSE):
        return kind == TRUE, at
    if kind == BYTE:
        return data[at], at + 1
    if kind == BINARY:
        length, at = varint(data, at)
        return data[at : at + length], at + length
    if kind == LIST:
        return _read_list(data, at)
    if kind == STRUCT:
        return _read_struct(data, at)
    value, at = varint(data, at)
    return (value >> 1) ^ -(value & 1), at


def _read_list(data: bytes, at: int) -> tuple[list, int]:
    count, of, at = data[at] >> 4, data[at] & 15, at + 1
    if count == 15:
        count, at = varint(data, at)
    values = []
    for _ in range(count):
        value, at = _read(data, at, BYTE if of in (TRUE, FALSE) else of)
        values.append(value)
    return [of, values], at


def _read_struct(data: bytes, at: int) -> tuple[dict[int, list], int]:
    fields: dict[int, list] = {}
    number = 0
    while data[at]:
        number, of, at = number + (data[at] >> 4), data[at] & 15, at + 1  # Parquet's numbers are never 16 apart
        value, at = _read(data, at, of)
        fields[number] = [of, value]
    return fields, at + 1


def _number(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def _write(kind: int, value: Any) -> bytes:
    if kind in (TRUE, FALSE):
        return b""
    if kind == BYTE:
        return bytes([value])
    if kind == BINARY:
        return _number(len(value)) + value
    if kind == LIST:
        of, values = value
        head = bytes([len(values) << 4 | of]) if len(values) < 15 else bytes([0xF0 | of]) + _number(len(values))
        return head + b"".join(_write(BYTE if of in (TRUE, FALSE) else of, each) for each in values)
    if kind == STRUCT:
        out, last = b"", 0
        for number, (of, each) in sorted(value.items()):
            out += bytes([(number - last) << 4 | of]) + _write(of, each)
            last = number
        return out + b"\0"
    return _number(value << 1 if value >= 0 else (-value << 1) - 1)
