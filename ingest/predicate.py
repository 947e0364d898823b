"""A predicate on rows as a tree, evaluated on columns and on statistics.

Logic has three values, as in SQL: a comparison with null is null.

    not null = null      null and false = false      null or true = true      x is None: true or false, never null

On statistics each node gives the set of values that some row might have. What is missing, contradicts itself or is not
understood allows everything; a float column may always hold NaN, which no statistics show.

Cost: a few vectorized comparisons a batch, under 1 µs a row. Rejected: pyarrow's own expressions, which take NaN for
impossible where statistics bound a column, and tell neither which rows of a batch they keep nor which column is at
fault.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

Value = str | int | float | bool
Outcomes = frozenset[bool | None]
ANYTHING: Outcomes = frozenset({True, False, None})

_KERNELS: dict[str, Callable[[Any, Any], Any]] = {
    "==": pc.equal,
    "!=": pc.not_equal,
    "<": pc.less,
    "<=": pc.less_equal,
    ">": pc.greater,
    ">=": pc.greater_equal,
}


class Bounds(NamedTuple):
    """What the footer says of one column in one row group."""

    kind: pa.DataType
    low: Any  # None: nothing is known
    high: Any
    nulls: bool  # some may be null
    all_null: bool


@dataclass(frozen=True)
class Column:
    """A column, or a field of a struct."""

    name: str


@dataclass(frozen=True)
class Compare:
    """A column against a value or another column."""

    column: Column
    operator: str
    other: Value | Column

    def mask(self, columns: Mapping[str, pa.Array]) -> pa.Array:
        """Each row's value."""
        array = columns[self.column.name]
        other = columns[self.other.name] if isinstance(self.other, Column) else _scalar(self.other, array.type)
        if pa.types.is_integer(array.type) and pa.types.is_floating(other.type):
            array = array.cast(pa.float64(), safe=False)  # large integers are rounded, not refused
        if pa.types.is_floating(array.type) and pa.types.is_integer(other.type):
            other = other.cast(pa.float64(), safe=False)
        if isinstance(self.other, Column) and pa.types.is_uint64(array.type) != pa.types.is_uint64(other.type):
            array, other = (_wide(side) for side in (array, other))
        return _KERNELS[self.operator](array, other)

    def outcomes(self, bounds: Mapping[str, Bounds]) -> Outcomes:
        """What rows might give."""
        of = bounds[self.column.name]
        if of.all_null:
            return frozenset({None})
        if isinstance(self.other, Column) or of.low is None:
            return ANYTHING
        value, low, high = _scalar(self.other, of.kind).as_py(), of.low, of.high
        try:
            raw = isinstance(low, bytes)  # those of float16 are, and float takes digits
            if isinstance(value, float) and not raw:
                low, high = float(low), float(high)  # rounds as rows do, and keeps their order
            if isinstance(value, datetime):  # of nanoseconds these may be rounded
                low, high = low - timedelta(microseconds=1), high + timedelta(microseconds=1)
            if not low <= high:  # NaN, or a contradiction
                return ANYTHING
            found: set[bool | None] = _within(self.operator, value, low, high)
        except (TypeError, OverflowError, ValueError):  # bytes for text, a date beyond the calendar
            return ANYTHING
        if of.nulls:
            found.add(None)
        if pa.types.is_floating(of.kind):
            found.add(self.operator == "!=")  # NaN
        return frozenset(found)


@dataclass(frozen=True)
class IsNull:
    """Whether a column is null."""

    column: Column

    def mask(self, columns: Mapping[str, pa.Array]) -> pa.Array:
        """Each row's value."""
        return pc.is_null(columns[self.column.name])

    def outcomes(self, bounds: Mapping[str, Bounds]) -> Outcomes:
        """What rows might give."""
        of = bounds[self.column.name]
        return frozenset(({True} if of.nulls else set()) | (set() if of.all_null else {False}))


@dataclass(frozen=True)
class Not:
    """The contrary."""

    part: Test

    def mask(self, columns: Mapping[str, pa.Array]) -> pa.Array:
        """Each row's value."""
        return pc.invert(self.part.mask(columns))

    def outcomes(self, bounds: Mapping[str, Bounds]) -> Outcomes:
        """What rows might give."""
        return frozenset(None if value is None else not value for value in self.part.outcomes(bounds))


@dataclass(frozen=True)
class Joined:
    """All of the parts, or one of them."""

    every: bool
    parts: tuple[Test, ...]

    def mask(self, columns: Mapping[str, pa.Array]) -> pa.Array:
        """Each row's value."""
        join = pc.and_kleene if self.every else pc.or_kleene
        whole, *rest = (part.mask(columns) for part in self.parts)
        for mask in rest:
            whole = join(whole, mask)
        return whole

    def outcomes(self, bounds: Mapping[str, Bounds]) -> Outcomes:
        """What rows might give."""
        whole: Outcomes = frozenset({self.every})
        for part in self.parts:
            whole = frozenset(_both(pair, self.every) for pair in itertools.product(whole, part.outcomes(bounds)))
        return whole


Test = Compare | IsNull | Not | Joined


def _both(pair: tuple[bool | None, bool | None], every: bool) -> bool | None:
    """Three-valued and, or."""
    return (not every) if (not every) in pair else None if None in pair else every


def _within(operator: str, value: Any, low: Any, high: Any) -> set[bool | None]:
    """What comparisons with ``value`` give for numbers from ``low`` to ``high``."""
    true, false = {
        "<": (low < value, high >= value),
        "<=": (low <= value, high > value),
        ">": (high > value, low <= value),
        ">=": (high >= value, low < value),
        "==": (low <= value <= high, not low == high == value),
        "!=": (not low == high == value, low <= value <= high),
    }[operator]
    return {given for given, there in ((True, true), (False, false)) if there}


def compares(test: Test) -> Iterator[Compare]:
    """All comparisons in a tree."""
    if isinstance(test, Compare):
        yield test
    parts = test.parts if isinstance(test, Joined) else (test.part,) if isinstance(test, Not) else ()
    for part in parts:
        yield from compares(part)


def _wide(array: pa.Array) -> pa.Array:
    """Integers in a type that holds all of uint64 and int64: Arrow would cast one to the other, and refuse some."""
    return array.cast(pa.decimal128(20)) if pa.types.is_integer(array.type) else array


def _scalar(value: Value, kind: pa.DataType) -> pa.Scalar:
    """A value of a predicate as it compares with a column of some type, after ``decoded``.

    Raises:
        ValueError: it does not.
    """
    types, number = pa.types, isinstance(value, int | float) and not isinstance(value, bool)
    if types.is_null(kind) or (types.is_boolean(kind) and isinstance(value, bool)):
        return pa.scalar(value)
    if number and types.is_floating(kind):
        return pa.scalar(float(value))
    if number and types.is_integer(kind):
        try:
            return pa.scalar(value, kind if isinstance(value, int) else pa.float64())
        except (pa.ArrowInvalid, OverflowError):  # beyond the column's integers, and none of them rounds to it
            return pa.scalar(math.copysign(math.inf, float(value)))
    if isinstance(value, str):
        return _from_text(value, kind)
    raise ValueError(f"{value!r} does not compare with {kind}")


def _from_text(value: str, kind: pa.DataType) -> pa.Scalar:
    types = pa.types
    if types.is_large_string(kind):
        return pa.scalar(value, kind)
    if types.is_large_binary(kind):
        return pa.scalar(value.encode(), kind)
    if types.is_date(kind):
        return pa.scalar(date.fromisoformat(value))
    if types.is_timestamp(kind):
        moment = datetime.fromisoformat(value)
        if re.search(r"[.,]\d{7}", value):  # Python drops the rest without a word
            raise ValueError(f"{value!r} is finer than microseconds")
        if kind.tz is not None and moment.tzinfo is None:
            moment = moment.replace(tzinfo=UTC)
        if kind.tz is None and moment.tzinfo is not None:
            raise ValueError(f"{value!r} has a time zone, and {kind} has none")
        return pa.scalar(moment, pa.timestamp("us", kind.tz and "UTC"))
    raise ValueError(f"{value!r} does not compare with {kind}")
