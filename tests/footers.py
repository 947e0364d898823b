"""Parquet footers taken apart and put together again, to write files that no writer writes.

A struct is a dict of field number to ``[type, value]``, a list ``[type, values]``; numbers are plain. Source: Thrift
compact protocol; the fields are those of parquet.thrift.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ingest.thrift import read_struct

TRUE, FALSE, BYTE, BINARY, LIST, STRUCT = 1, 2, 3, 8, 9, 12

ROWS, GROUPS = 3, 4  # of the file
CHUNKS, GROUP_ROWS = 1, 3  # of a row group
TYPE, VALUES, RAW_BYTES, BYTES, PAGE, DICTIONARY, STATISTICS = 1, 5, 6, 7, 9, 11, 12  # of a chunk
MAX_VALUE, MIN_VALUE = 5, 6  # of its statistics


def alter(path: Path, change: Callable[[dict], object]) -> None:
    """Rewrites the footer of a file as ``change`` leaves it."""
    data = path.read_bytes()
    begin = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    footer = read_struct(data[begin:-8], lambda kind, value: [kind, value])
    assert _write(STRUCT, footer) == data[begin:-8]  # to the last byte
    change(footer)
    new = _write(STRUCT, footer)
    path.write_bytes(data[:begin] + new + len(new).to_bytes(4, "little") + b"PAR1")


def chunk(footer: dict, group: int = 0, column: int = 0) -> dict:
    """The metadata of one column chunk."""
    return footer[GROUPS][1][1][group][CHUNKS][1][1][column][3][1]


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
