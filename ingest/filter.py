"""Which rows of a source count: the text of a predicate to its tree, and the tree to the columns of a file.

    language == "en" and 0.2 < score <= 0.7 and meta.kind in ["a", "b"] and license is not None

The text is parsed by Python's grammar and never run. A row counts where the whole is true, so null leaves it out, as in
SQL.

Guarantees: only the columns of the predicate are read besides the source's own; a row group whose statistics prove that
no row counts is not read at all, and statistics that contradict themselves or are missing lose no row. That is decided
from the footer alone, so it is the same wherever it is decided.

Cost: of indexing, under 0.1 ms a row group; of rows see ``predicate.py``.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from ingest.errors import ConfigError, DataError
from ingest.predicate import Bounds, Column, Compare, IsNull, Joined, Not, Test, Value, compares

MAX_CHARACTERS, MAX_DEPTH = 4096, 32
ALLOWED = (
    "use columns, text, numbers, True and False with == != < <= > >=, `in [..]`, `is None`, and, or, not; "
    'nested fields as meta.lang, other names as column("my name")'
)
_MIRRORED = {"==": "==", "!=": "!=", "<": ">", "<=": ">=", ">": "<", ">=": "<="}
_OPERATORS = {ast.Eq: "==", ast.NotEq: "!=", ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">="}


@dataclass(frozen=True)
class Filter:
    """A predicate on the rows of a file.

    Args:
        text: in one form, whatever its white space and quotes were.
        test: the same as a tree.
        columns: those that it needs.
    """

    text: str
    test: Test
    columns: tuple[str, ...]

    @classmethod
    def parse(cls, text: str, source: str) -> Filter:
        """Reads a predicate.

        Raises:
            ConfigError: names the source, the text, the piece at fault with its column, and what is allowed.
        """
        what = f"source {source}: filter must be a predicate on columns; got {text[:200]!r}"
        if len(text) > MAX_CHARACTERS:
            raise ConfigError(f"{what} of {len(text)} characters: use at most {MAX_CHARACTERS}")
        text = text.strip()
        try:
            tree = ast.parse(text, mode="eval").body
            return cls(ast.unparse(tree), _test(tree), tuple(dict.fromkeys(_names(tree))))
        except SyntaxError as error:
            raise ConfigError(f"{what}, {error.msg} at column {error.offset or 1}: {ALLOWED}") from None
        except (ValueError, RecursionError, MemoryError) as error:  # NUL, or thousands of parentheses
            raise ConfigError(f"{what}, {error or 'nested too deep'}: {ALLOWED}") from None
        except _RefusedError as error:
            before = text.encode()[: error.node.col_offset].decode(errors="replace")
            piece = (ast.get_source_segment(text, error.node) or "")[:60]
            raise ConfigError(f"{what}, where {piece} at column {len(before) + 1} {error}: {ALLOWED}") from None

    def leaves(self, metadata: Any, path: str) -> list[int]:
        """The indexes of the leaf columns that it needs.

        Args:
            metadata: ``pyarrow.parquet.FileMetaData`` of the file.
            path: names the file in the error.

        Raises:
            DataError: no such column, several, or of a type that does not compare with what it is compared with.
        """
        schema = metadata.schema.to_arrow_schema()
        paths = [metadata.schema.column(index).path for index in range(metadata.num_columns)]
        columns = {}
        for name in self.columns:
            kind = _kind(schema, name)
            if kind is None or paths.count(name) != 1:
                of = f"there are {paths.count(name)}" if kind is None or name in paths else f"it is of type {kind}"
                known = ", ".join(schema.names[:20])
                rule = f"{path} must have one column {name} of plain values for filter {self.text}"
                raise DataError(
                    f"{rule}; {of}, columns are {known}: mend the filter, where text needs quotes, or the file"
                )
            columns[name] = _decoded(pa.nulls(0, kind))
        for test in compares(self.test):
            try:
                test.mask(columns)
            except (ValueError, TypeError, pa.ArrowException):
                of = columns[test.column.name].type
                other = test.other.name if isinstance(test.other, Column) else repr(test.other)
                if isinstance(test.other, Column):
                    other = f"column {other} of type {columns[test.other.name].type}"
                rule = f"{path}: filter {self.text} must compare values of one type"
                got = f"column {test.column.name} of type {of} {test.operator} {other}"
                raise DataError(f"{rule}; got {got}: mend the filter or the file") from None
        return [paths.index(name) for name in self.columns]

    def keeps(self, batch: pa.RecordBatch) -> pa.BooleanArray:
        """Whether each row of a batch counts, without nulls."""
        columns = {name: _decoded(column_of(batch, name)) for name in self.columns}
        return pc.fill_null(self.test.mask(columns), False)

    def excluded(self, metadata: Any, row_groups: Iterable[int]) -> set[int]:
        """Those row groups of which the statistics in the footer prove that no row counts."""
        schema = metadata.schema.to_arrow_schema()
        paths = [metadata.schema.column(index).path for index in range(metadata.num_columns)]
        columns = [(name, _decoded(pa.nulls(0, _kind(schema, name))).type, paths.index(name)) for name in self.columns]
        found = set()
        for number in row_groups:
            group = metadata.row_group(number)
            bounds = {name: _bounds(name, kind, group.column(at), group.num_rows) for name, kind, at in columns}
            if True not in self.test.outcomes(bounds):
                found.add(number)
        return found


def column_of(batch: pa.RecordBatch, name: str) -> pa.Array:
    """A column of a batch, or the field of a struct; a dot in a column's name is a dot."""
    if name in batch.schema.names:
        return batch.column(name)
    first, *fields = name.split(".")
    return pc.struct_field(batch.column(first), fields)


def _kind(schema: pa.Schema, name: str) -> pa.DataType | None:
    """The type of a column or of a field of a struct; None where there is none."""
    if name in schema.names:
        return schema.types[schema.names.index(name)]
    first, *fields = name.split(".")
    kind = schema.types[schema.names.index(first)] if first in schema.names else None
    for field in fields:
        if kind is None or not pa.types.is_struct(kind) or kind.get_field_index(field) < 0:
            return None
        kind = kind.field(field).type
    return kind


def _decoded(array: pa.Array) -> pa.Array:
    """The same values in a type that compares."""
    types, kind = pa.types, array.type.value_type if pa.types.is_dictionary(array.type) else array.type
    if types.is_string(kind) or types.is_string_view(kind) or types.is_large_string(kind):
        kind = pa.large_string()
    elif types.is_binary(kind) or types.is_binary_view(kind) or types.is_large_binary(kind):
        kind = pa.large_binary()
    elif types.is_float16(kind):
        kind = pa.float32()
    elif types.is_timestamp(kind) and kind.tz is not None:
        kind = pa.timestamp(kind.unit, "UTC")  # the same moments; Arrow compares no two zones of other units
    return array if array.type == kind else array.cast(kind)


def _bounds(name: str, kind: pa.DataType, chunk: Any, num_rows: int) -> Bounds:
    low = high = None
    found = chunk.statistics
    if found is None:
        return Bounds(kind, None, None, nulls=True, all_null=pa.types.is_null(kind))
    nulls = found.null_count if found.has_null_count else None
    try:
        if found.has_min_max:
            low, high = found.min, found.max
    except (ValueError, OverflowError, NotImplementedError, ImportError, pa.ArrowException):
        pass  # text cut inside a character, a date beyond the calendar
    all_null = nulls == num_rows and not found.has_min_max  # else it contradicts itself
    # Writers disagree on whether a field counts as null where its struct is.
    return Bounds(kind, low, high, nulls=nulls != 0 or "." in name, all_null=all_null)


class _RefusedError(Exception):
    """A piece that is no part of a predicate."""

    def __init__(self, node: ast.expr, reason: str) -> None:
        super().__init__(reason)
        self.node = node


def _test(node: ast.expr, depth: int = 1) -> Test:
    if depth > MAX_DEPTH:
        raise _RefusedError(node, f"is nested deeper than {MAX_DEPTH} times")
    if isinstance(node, ast.BoolOp):
        return Joined(isinstance(node.op, ast.And), tuple(_test(part, depth + 1) for part in node.values))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return Not(_test(node.operand, depth + 1))
    if isinstance(node, ast.Compare):
        places = zip([node.left, *node.comparators], node.ops, node.comparators, strict=False)
        parts = tuple(_compare(left, op, right) for left, op, right in places)
        return parts[0] if len(parts) == 1 else Joined(True, parts)
    column = _column(node)
    if column is None:
        raise _RefusedError(node, "is no comparison")
    return Compare(column, "==", True)


def _compare(left: ast.expr, op: ast.cmpop, right: ast.expr) -> Test:
    if isinstance(op, ast.In | ast.NotIn):
        column = _column(left)
        if column is None:
            raise _RefusedError(left, "is no column")
        if not isinstance(right, ast.List | ast.Tuple | ast.Set) or not right.elts:
            raise _RefusedError(right, "is no list of values")
        inside = Joined(False, tuple(Compare(column, "==", _value(item)) for item in right.elts))
        return inside if isinstance(op, ast.In) else Not(inside)
    if isinstance(op, ast.Is | ast.IsNot):
        column = _column(left)
        if column is None:
            raise _RefusedError(left, "is no column")
        if not isinstance(right, ast.Constant) or right.value is not None:
            raise _RefusedError(right, "is not None")
        return IsNull(column) if isinstance(op, ast.Is) else Not(IsNull(column))
    operator, mine, other = _OPERATORS[type(op)], _column(left), _column(right)
    if mine is not None:
        return Compare(mine, operator, other or _value(right))
    if other is None:
        raise _RefusedError(left, "is compared without a column")
    return Compare(other, _MIRRORED[operator], _value(left))


def _column(node: ast.expr) -> Column | None:
    if isinstance(node, ast.Name):
        return Column(node.id)
    if isinstance(node, ast.Attribute):
        inner = _column(node.value)
        return None if inner is None else Column(f"{inner.name}.{node.attr}")
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "column":
        match node:
            case ast.Call(args=[ast.Constant(value=str(name))], keywords=[]) if name:
                return Column(name)
    return None


def _value(node: ast.expr) -> Value:
    sign = 1
    inner = node
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        sign, inner = -1, node.operand
    value = inner.value if isinstance(inner, ast.Constant) else None
    if sign == -1 and isinstance(value, int | float) and not isinstance(value, bool):
        value = -value
    elif sign == -1:
        value = None
    if not isinstance(value, str | int | float | bool):
        raise _RefusedError(node, "is null, so compare with `is None`" if _is_none(node) else "is no value")
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        raise _RefusedError(node, "is beyond 64 bits")
    return value


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _names(node: ast.expr) -> Iterator[str]:
    """Names of the columns of a predicate that was accepted."""
    column = _column(node)
    if column is not None:
        yield column.name
        return
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.expr):
            yield from _names(child)
