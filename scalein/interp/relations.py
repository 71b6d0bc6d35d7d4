"""Every op over whole inputs: columns of plain values in, columns of plain values out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import pyarrow as pa

from scalein.dtypes import Schema, as_plain
from scalein.errors import BadData, ComputeError
from scalein.interp.aggregates import aggregate
from scalein.interp.exprs import compute
from scalein.interp.values import Values, from_arrow, group_key, has_plain_elements, order_key, to_arrow
from scalein.ir.exprs import Expr, type_of
from scalein.ir.ops import (
    Aggregate,
    Distinct,
    Explode,
    Filter,
    Join,
    Limit,
    MapBatches,
    Op,
    Project,
    Sort,
    Source,
    Union,
    Watermark,
    Window,
)
from scalein.ir.printer import show_expr


class _Readable(Protocol):
    def read(self) -> Iterator[pa.RecordBatch]: ...


@dataclass(frozen=True, slots=True)
class Rows:
    """Columns by name; the number of rows stands apart, since a pruned input may have no columns."""

    columns: dict[str, Values]
    count: int

    def at(self, places: Sequence[int]) -> Rows:
        """The rows at these places, in this order."""
        return Rows({name: [values[i] for i in places] for name, values in self.columns.items()}, len(places))

    def compute(self, expr: Expr) -> Values:
        return compute(expr, self.columns, [True] * self.count)

    def keys(self, exprs: Iterable[Expr]) -> list[tuple[Any, ...]]:
        """The values of some expressions, row by row."""
        found = [self.compute(expr) for expr in exprs]
        return [tuple(values[i] for values in found) for i in range(self.count)]


def run(op: Op) -> pa.Table:
    """The whole result of a flow, of exactly the op's schema; in the source's order where there is one."""
    return _to_table(_rows(op), op.schema)


def _to_table(rows: Rows, schema: Schema) -> pa.Table:
    arrays = [to_arrow(rows.columns[field.name], field.dtype) for field in schema]
    return pa.Table.from_arrays(arrays, schema=schema.arrow)


def _rows(op: Op) -> Rows:
    match op:
        case Source():
            return _read(op)
        case Filter():
            rows = _rows(op.input)
            return rows.at([i for i, value in enumerate(rows.compute(op.predicate)) if value is True])
        case Project():
            rows = _rows(op.input)
            return Rows({item.name: rows.compute(item.expr) for item in op.items}, rows.count)
        case Limit():
            rows = _rows(op.input)
            return rows.at(range(min(op.count, rows.count)))
        case Distinct():
            return _distinct(op)
        case Sort():
            return _sort(op)
        case Union():
            return _union(op)
        case MapBatches():
            return _map_batches(op)
        case Explode():
            rows = _rows(op.input)
            lists = [values or [] for values in rows.columns[op.column]]
            repeated = rows.at([i for i, values in enumerate(lists) for _ in values])
            element = op.schema[op.column].dtype
            elements = [value for values in lists for value in values]
            if not has_plain_elements(op.input.schema[op.column].dtype.arrow):
                elements = from_arrow(pa.array(elements, element.arrow))
            return Rows({**repeated.columns, op.column: elements}, repeated.count)
        case Join():
            return _join(op)
        case Aggregate():
            return _aggregate(op)
        case Watermark():
            return _rows(op.input)
    raise AssertionError(f"an op that the interpreter does not know: {op!r}")


def _read(op: Source) -> Rows:
    if op.data is None:
        raise BadData("the flow has no data yet", at=op.at, hint="give collect the data")
    data: _Readable = op.data  # type: ignore[assignment]
    columns: dict[str, Values] = {name: [] for name in op.columns}
    count = 0
    for batch in data.read():
        count += batch.num_rows
        for name, values in columns.items():
            values += from_arrow(batch.column(name))
    return Rows(columns, count)


def _distinct(op: Distinct) -> Rows:
    rows = _rows(op.input)
    firsts: dict[tuple[Any, ...], int] = {}
    for i in range(rows.count):
        firsts.setdefault(group_key([rows.columns[name][i] for name in op.keys]), i)
    return rows.at(list(firsts.values()))


def _sort(op: Sort) -> Rows:
    """By the last key first: each sort is stable, so it keeps the order of those before it among equals."""
    rows = _rows(op.input)
    places = list(range(rows.count))
    for by in reversed(op.by):
        values = rows.compute(by.expr)
        nulls, known = [i for i in places if values[i] is None], [i for i in places if values[i] is not None]
        known.sort(key=lambda i, values=values: order_key(values[i]), reverse=by.descending)  # type: ignore[misc]
        places = known + nulls if op.nulls_last else nulls + known
    return rows.at(places[: op.count])


def _union(op: Union) -> Rows:
    parts = [_rows(part) for part in op.inputs]
    columns = {name: [value for part in parts for value in part.columns[name]] for name in op.schema.names}
    return Rows(columns, sum(part.count for part in parts))


def _map_batches(op: MapBatches) -> Rows:
    columns: dict[str, Values] = {name: [] for name in op.arrow.names}
    count = 0
    for batch in run(op.input).to_batches():
        made = op.fn(batch)
        made = as_plain(made) if isinstance(made, pa.RecordBatch) else made
        if not isinstance(made, pa.RecordBatch) or _columns(made.schema) != _columns(op.arrow):
            raise BadData("the function of map_batches gave something else than it said", at=op.at,
                          said=_columns(op.arrow), found=_columns(getattr(made, "schema", [])) or type(made).__name__)
        count += made.num_rows
        for name, values in columns.items():
            values += from_arrow(made.column(name))
    return Rows(columns, count)


def _columns(schema: Iterable[pa.Field]) -> str:
    return ", ".join(f"{field.name}: {field.type}" for field in schema)


def _join(op: Join) -> Rows:
    """For each row of the left its matches, in the right's order. A key with a null matches nothing."""
    left, right = _rows(op.left), _rows(op.right)
    places: dict[tuple[Any, ...], list[int]] = {}
    for i, key in enumerate(right.keys(op.right_keys)):
        places.setdefault(group_key(key), []).append(i)
    matches = [[] if None in key else places.get(group_key(key), []) for key in left.keys(op.left_keys)]
    match op.how:
        case "semi":
            return left.at([i for i, found in enumerate(matches) if found])
        case "anti":
            return left.at([i for i, found in enumerate(matches) if not found])
    pairs: list[tuple[int, int | None]] = []
    for i, found in enumerate(matches):
        pairs += [(i, j) for j in found]
        if not found and op.how == "left":
            pairs.append((i, None))
    columns = left.at([i for i, _ in pairs]).columns
    for name, column in op.keep:
        columns[name] = [None if j is None else right.columns[column][j] for _, j in pairs]
    return Rows(columns, len(pairs))


def _aggregate(op: Aggregate) -> Rows:
    """One row for each group that has rows; without keys and window, one row always.

    A row is in as many groups as windows hold it: in none if its time is null or between windows, and then neither
    its keys nor its arguments can fail.
    """
    rows = _rows(op.input)
    windows: list[list[tuple[int, ...]]] = [[()]] * rows.count
    if op.window is not None:
        found = [_windows(op.window, time) for time in rows.compute(op.window.time)]
        held = [i for i, some in enumerate(found) if some]
        rows, windows = rows.at(held), [list(found[i]) for i in held]
    keys = rows.keys(item.expr for item in op.keys)
    args = [[rows.compute(arg) for arg in item.agg.args] or [[None] * rows.count] for item in op.aggs]

    shown: dict[tuple[Any, ...], tuple[Any, ...]] = {}  # a group's key and window, as in its first row
    members: dict[tuple[Any, ...], list[int]] = {}
    if not op.keys and op.window is None:
        shown[()], members[()] = (), []
    for i, key in enumerate(keys):
        for window in windows[i]:
            group = group_key((*key, *window))
            shown.setdefault(group, (*key, *window))
            members.setdefault(group, []).append(i)

    names = op.schema.names
    width = len(names) - len(op.aggs)
    columns: dict[str, Values] = {name: [key[k] for key in shown.values()] for k, name in enumerate(names[:width])}
    for item, values in zip(op.aggs, args, strict=True):
        columns[item.name] = [aggregate(item.agg, [[arg[i] for i in places] for arg in values])
                              for places in members.values()]
    return Rows(columns, len(members))


def _windows(window: Window, time: int | None) -> list[tuple[int, int]]:
    """The windows [k * every, k * every + size) that hold a time: none holds null."""
    if time is None:
        return []
    numbers = range((time - window.size) // window.every + 1, time // window.every + 1)
    found = [(k * window.every, k * window.every + window.size) for k in numbers]
    low, high = type_of(window.time).int_range()
    if any(start < low or end > high for start, end in found):
        text = show_expr(window.time)
        raise ComputeError(f"overflow in the windows of `{text}`", type=type_of(window.time), found=time)
    return found
