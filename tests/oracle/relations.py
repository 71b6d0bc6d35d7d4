"""Every logical operator over whole inputs: lists of rows in, a list of rows out, in the source's order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from scalein.dtypes import plain_arrow
from scalein.errors import BadData, ComputeError
from scalein.ir import ops
from scalein.ir.exprs import Col, Expr, type_of
from scalein.ir.printer import show_expr
from scalein.ir.windows import Window
from tests.oracle.aggregates import aggregate
from tests.oracle.exprs import Failures, meaning
from tests.oracle.values import Row, group_key, order_key, rows_of, table_of


def run(op: ops.Op, given: dict[int, list[Row]] | None = None) -> pa.Table:
    """The whole result of a plan, of exactly its schema."""
    table, failures = attempt(op, given)
    failures.raise_any()
    assert table is not None
    return table


def attempt(op: ops.Op, given: dict[int, list[Row]] | None = None) -> tuple[pa.Table | None, Failures]:
    """The result and all that failed on the way; None where something did."""
    relations = Relations(given=given or {})
    rows = relations.rows(op)
    return None if relations.failures.errors else table_of(rows, op.schema), relations.failures


@dataclass
class Relations:
    """Rows of operators. A row that fails is noted and left out, so that all that can fail is known.

    `given` are the rows of inputs that are not computed here: streams give what has arrived.
    """

    failures: Failures = field(default_factory=Failures)
    given: dict[int, list[Row]] = field(default_factory=dict)  # by id() of the op

    def rows(self, op: ops.Op) -> list[Row]:
        if id(op) in self.given:
            return self.given[id(op)]
        match op:
            case ops.Source():
                return _read(op)
            case ops.Filter():
                kept = self.failures.values(meaning(op.predicate), self.rows(op.input))
                return [row for row, keep in kept if keep is True]
            case ops.Project():
                return self._project(op)
            case ops.Limit():
                return self.rows(op.input)[: op.count]
            case ops.Distinct():
                firsts: dict[tuple[Any, ...], Row] = {}
                for row in self.rows(op.input):
                    firsts.setdefault(group_key(row[name] for name in op.keys), row)
                return list(firsts.values())
            case ops.Sort():
                return self._sort(op)
            case ops.Union():
                return [{**row} for part in op.inputs for row in self.rows(part)]
            case ops.MapBatches():
                return self._map_batches(op)
            case ops.Explode():
                return self._explode(op)
            case ops.OuterJoin():
                return self._outer_join(op)
            case ops.Join():
                return self._join(op)
            case ops.Aggregate():
                return self._aggregate(op)
            case ops.Watermark():
                return self.rows(op.input)

    def _columns(self, exprs: Sequence[Expr], rows: list[Row]) -> list[tuple[Row, tuple[Any, ...]]]:
        """The rows in which none of the expressions fails, with their values."""
        found: dict[int, list[Any]] = {id(row): [] for row in rows}
        for expr in exprs:
            for row, value in self.failures.values(meaning(expr), rows):
                found[id(row)].append(value)
        return [(row, tuple(found[id(row)])) for row in rows if len(found[id(row)]) == len(exprs)]

    def _project(self, op: ops.Project) -> list[Row]:
        names = [item.name for item in op.items]
        computed = self._columns([item.expr for item in op.items], self.rows(op.input))
        return [dict(zip(names, values, strict=True)) for _, values in computed]

    def _sort(self, op: ops.Sort) -> list[Row]:
        """By the last key first: each sort is stable, so it keeps the order of those before it among equals."""
        rows = self._columns([by.expr for by in op.by], self.rows(op.input))
        for number, by in reversed(list(enumerate(op.by))):
            nulls = [row for row in rows if row[1][number] is None]
            known = [row for row in rows if row[1][number] is not None]
            known.sort(key=_nth_key(number), reverse=by.descending)
            rows = known + nulls if op.nulls_last else nulls + known
        return [row for row, _ in rows][: op.count]

    def _map_batches(self, op: ops.MapBatches) -> list[Row]:
        found: list[Row] = []
        for batch in table_of(self.rows(op.input), op.input.schema).to_batches():
            made = op.fn(batch)
            if not isinstance(made, pa.RecordBatch) or _plain(made.schema) != _plain(op.arrow):
                raise BadData("the function of map_batches gave something else than it said", at=op.at,
                              said=_plain(op.arrow), found=_plain(getattr(made, "schema", [])))
            found += rows_of([made], op.arrow.names)
        return found

    def _explode(self, op: ops.Explode) -> list[Row]:
        """A row for each element of the lists, which have one length; null counts as empty."""
        found: list[Row] = []
        for row in self.rows(op.input):
            lists = [row[name] or [] for name in op.lists]
            if len(set(map(len, lists))) > 1:
                self.failures.errors.append(ComputeError(
                    f"lists of different lengths in `explode({', '.join(op.lists)})`", found=row))
                continue
            found += [{**row, **dict(zip(op.lists, each, strict=True))} for each in zip(*lists, strict=True)]
        return found

    def _outer_join(self, op: ops.OuterJoin) -> list[Row]:
        """Every pair whose keys are equal, in the left's order; then the right's rows that are in none."""
        left = self._columns(op.left_keys, self.rows(op.left))
        right = self._columns(op.right_keys, self.rows(op.right))
        found: list[Row] = []
        matched: set[int] = set()
        for row, key in left:
            others = [k for k, (_, other) in enumerate(right)
                      if None not in key and group_key(key) == group_key(other)]
            matched.update(others)
            found += [{**row, **{name: right[k][0][column] for name, column in op.keep}} for k in others]
            if not others and op.how == "outer":
                found.append({**row, **dict.fromkeys((name for name, _ in op.keep), None)})
        nothing = dict.fromkeys(op.left.schema.names)
        for k, (other, key) in enumerate(right):
            if k not in matched:
                names = [mine.name for mine in op.left_keys if isinstance(mine, Col)]
                keys = dict(zip(names, key, strict=True))
                found.append({**nothing, **keys, **{name: other[column] for name, column in op.keep}})
        return found

    def _join(self, op: ops.Join) -> list[Row]:
        """For each row of the left its matches, in the right's order. A key with a null matches nothing."""
        matches: dict[tuple[Any, ...], list[Row]] = {}
        for row, key in self._columns(op.right_keys, self.rows(op.right)):
            if None not in key:
                matches.setdefault(group_key(key), []).append(row)
        found: list[Row] = []
        for row, key in self._columns(op.left_keys, self.rows(op.left)):
            others = matches.get(group_key(key), [])
            match op.how:
                case "semi" | "anti":
                    found += [row] if bool(others) == (op.how == "semi") else []
                case "left" if not others:
                    found.append({**row, **dict.fromkeys((name for name, _ in op.keep), None)})
                case _:
                    found += [{**row, **{name: other[column] for name, column in op.keep}} for other in others]
        return found

    def _aggregate(self, op: ops.Aggregate) -> list[Row]:
        """One row for each group that has rows; without keys and window, one row always."""
        return [row for _, row in self.groups(op, self.windowed(op, self.rows(op.input)))]

    def windowed(self, op: ops.Aggregate, rows: list[Row]) -> list[tuple[Row, tuple[int, int] | None]]:
        """Each row with each window that holds it: none if its time is null or between windows, and then neither its
        keys nor its arguments can fail."""
        if op.window is None:
            return [(row, None) for row in rows]
        found: list[tuple[Row, tuple[int, int] | None]] = []
        for row, time in self.failures.values(meaning(op.window.time), rows):
            try:
                found += [(row, window) for window in windows_of(op.window, time)]
            except ComputeError as error:
                self.failures.errors.append(error)
        return found

    def groups(self, op: ops.Aggregate, rows: list[tuple[Row, tuple[int, int] | None]]
               ) -> list[tuple[tuple[Any, ...], Row]]:  # fmt: skip
        """Each group's key, and the row it gives; the key's values are those of the group's first row."""
        exprs = [*(key.expr for key in op.keys), *(arg for item in op.aggs for arg in item.agg.args)]
        once = list({id(row): row for row, _ in rows}.values())  # a row of several windows is computed once
        values = {id(row): found for row, found in self._columns(exprs, once)}
        shown: dict[tuple[Any, ...], tuple[Any, ...]] = {}
        members: dict[tuple[Any, ...], list[tuple[Any, ...]]] = {}
        if not op.keys and op.window is None:
            shown[()], members[()] = (), []
        for row, window in rows:
            if id(row) not in values:
                continue
            key = (*values[id(row)][: len(op.keys)], *(window or ()))
            group = group_key(key)
            shown.setdefault(group, key)
            members.setdefault(group, []).append(values[id(row)][len(op.keys) :])
        return [(group, self._group(op, shown[group], rows)) for group, rows in members.items()]

    def _group(self, op: ops.Aggregate, key: tuple[Any, ...], rows: list[tuple[Any, ...]]) -> Row:
        found, at = list(key), 0
        for item in op.aggs:
            width = len(item.agg.args)
            columns = [[row[at + k] for row in rows] for k in range(width)] or [[None] * len(rows)]
            at += width
            try:
                found.append(aggregate(item, columns))
            except ComputeError as error:
                self.failures.errors.append(error)
                found.append(None)
        return dict(zip(op.schema.names, found, strict=True))


def _nth_key(number: int) -> Callable[[tuple[Row, tuple[Any, ...]]], Any]:
    return lambda row: order_key(row[1][number])


def _plain(schema: Any) -> list[tuple[str, pa.DataType]]:
    return [(field.name, plain_arrow(field.type)) for field in schema]


def _read(op: ops.Source) -> list[Row]:
    if op.data is None:
        raise BadData("the flow has no data yet", at=op.at, hint="give collect the data")
    return rows_of(op.data.read(), op.columns)  # type: ignore[attr-defined]


def windows_of(window: Window, time: int | None) -> list[tuple[int, int]]:
    """The windows [k * every, k * every + size) that hold a time: none holds null."""
    if time is None:
        return []
    numbers = range((time - window.size) // window.every + 1, time // window.every + 1)
    found = [(k * window.every, k * window.every + window.size) for k in numbers]
    low, high = type_of(window.time).int_range()
    if any(start < low or end > high for start, end in found):
        raise ComputeError(f"overflow in the windows of `{show_expr(window.time)}`", type=type_of(window.time),
                           found=time)
    return found
