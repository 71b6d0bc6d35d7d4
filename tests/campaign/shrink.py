"""A smaller flow that is wrong in the same manner: greedy, one change at a time, as long as there is one that keeps it.

`is_wrong(spec, ways)` says whether a candidate still is; a candidate that cannot be built is not.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa

from scalein.dtypes import DType
from tests.campaign.kinds import constant_text, dtype_of, plain_of
from tests.campaign.spec import ColumnSpec, FlowSpec, Item, Node, Part, Step, TableSpec, plain
from tests.campaign.ways import Way

IsWrong = Callable[[FlowSpec, tuple[Way, ...]], bool]
Case = tuple[FlowSpec, tuple[Way, ...]]


def shrink(spec: FlowSpec, ways: tuple[Way, ...], is_wrong: IsWrong, *, tries: int = 400, seconds: float = 60) -> Case:
    """The smallest case found with so many tries."""
    case = (spec, ways)
    until = time.monotonic() + seconds
    improved = True
    while improved:
        improved = False
        for change in (_fewer_steps, _fewer_rows, _fewer_items, _smaller_nodes, _fewer_columns, _plainer_ways,
                       _plainer_columns, _plainer_values):  # fmt: skip
            found = True
            while found:  # the same sort of change as long as it helps: later places are still there after it
                found = False
                for candidate in change(case):
                    if tries <= 0 or time.monotonic() > until:
                        return case
                    tries -= 1
                    if is_wrong(*candidate):
                        case, found, improved = candidate, True, True
                        break
    return case


def _fewer_steps(case: Case) -> Iterator[Case]:
    spec, ways = case
    for place in reversed(range(len(spec.steps))):
        rest = spec.steps[place + 1 :]
        yield replace(spec, steps=spec.steps[:place] + rest), ways
        given = {f"col({item.prefix[:-1]!r})": item.node for part in spec.steps[place].parts for item in part.items
                 if item.prefix and item.node.dtype is not None}
        if given and rest:
            yield replace(spec, steps=spec.steps[:place] + tuple(_inlined(step, given) for step in rest)), ways
    if len(ways) > 1:
        yield spec, ways[:1]
        yield spec, ways[1:]


def _inlined(step: Step, given: Mapping[str, Node]) -> Step:
    """The step with columns replaced by the expressions that made them."""
    parts = [replace(part, items=tuple(Item(item.prefix, _replaced(item.node, given)) for item in part.items))
             for part in step.parts]
    return Step(tuple(parts))


def _replaced(node: Node, given: Mapping[str, Node]) -> Node:
    if not node.args:
        return given.get(node.pattern, node)
    return replace(node, args=tuple(_replaced(arg, given) for arg in node.args))


def _with_table(spec: FlowSpec, place: int, table: TableSpec) -> FlowSpec:
    return replace(spec, tables=(*spec.tables[:place], table, *spec.tables[place + 1 :]))


def _fewer_rows(case: Case) -> Iterator[Case]:
    spec, ways = case
    for place, table in enumerate(spec.tables):
        count = table.count
        parts: list[Sequence[int]] = [range(0, count // 2), range(count // 2, count)] if count > 1 else []
        size = max(1, count // 8)
        parts += [[*range(start), *range(start + size, count)] for start in range(0, count, size)] if count else []
        for part in parts:
            yield _with_table(spec, place, table.rows(part)), ways


def _fewer_items(case: Case) -> Iterator[Case]:
    spec, ways = case
    for at, step in enumerate(spec.steps):
        for which, part in enumerate(step.parts):
            for k in range(part.fixed, len(part.items)):
                fewer = replace(part, items=part.items[:k] + part.items[k + 1 :])
                if fewer.items or part.verb == "group_by":
                    yield _with_part(spec, at, which, fewer), ways


def _with_part(spec: FlowSpec, at: int, which: int, part: Part) -> FlowSpec:
    step = spec.steps[at]
    changed = Step((*step.parts[:which], part, *step.parts[which + 1 :]))
    return replace(spec, steps=(*spec.steps[:at], changed, *spec.steps[at + 1 :]))


def _smaller_nodes(case: Case) -> Iterator[Case]:
    spec, ways = case
    for at, step in enumerate(spec.steps):
        for which, part in enumerate(step.parts):
            for k, item in enumerate(part.items):
                for node in _smaller(item.node):
                    items = (*part.items[:k], Item(item.prefix, node), *part.items[k + 1 :])
                    yield _with_part(spec, at, which, replace(part, items=items)), ways


def _smaller(node: Node) -> Iterator[Node]:
    """The node with one place replaced by something below it, or by a constant."""
    if node.dtype is not None and node.args:
        below = [each for each in node.walk() if each is not node and each.dtype is not None]
        same = [each for each in below if each.dtype == node.dtype]
        yield from sorted(same, key=lambda each: len(each.text()))
        yield plain(constant_text(_simplest(node.dtype), node.dtype), node.dtype)
        yield plain(constant_text(None, node.dtype), node.dtype)
    for k, arg in enumerate(node.args):
        for other in _smaller(arg):
            yield replace(node, args=(*node.args[:k], other, *node.args[k + 1 :]))


def _simplest(dtype: DType) -> object:
    return plain_of(dtype, 1)


def _fewer_columns(case: Case) -> Iterator[Case]:
    spec, ways = case
    for place, table in enumerate(spec.tables):
        if place and table.name not in spec.text():
            yield replace(spec, tables=spec.tables[:place] + spec.tables[place + 1 :]), ways
            continue
        for k in range(len(table.columns)):
            columns = table.columns[:k] + table.columns[k + 1 :]
            if columns:
                yield _with_table(spec, place, replace(table, columns=columns)), ways


def _plainer_ways(case: Case) -> Iterator[Case]:
    spec, ways = case
    for k, way in enumerate(ways):
        for name, value in (("source", "table"), ("batches", ()), ("workers", 1), ("workers", 2), ("reorder", False),
                            ("safe", False), ("cpu", "native"), ("level", "raw"), ("level", "full")):  # fmt: skip
            now = getattr(way, name)
            if now != value and not (name == "workers" and now < value) and not (name == "level" and now == "raw"):
                changed: dict[str, Any] = {name: value}
                yield spec, (*ways[:k], replace(way, **changed), *ways[k + 1 :])


def _plainer_columns(case: Case) -> Iterator[Case]:
    """Without chunks and offsets; dictionaries, views and large strings as plain strings."""
    spec, ways = case
    for place, table in enumerate(spec.tables):
        if table.cuts:
            yield _with_table(spec, place, replace(table, cuts=())), ways
        for k, column in enumerate(table.columns):
            for other in _plainer(column):
                columns = (*table.columns[:k], other, *table.columns[k + 1 :])
                yield _with_table(spec, place, replace(table, columns=columns)), ways


def _plainer(column: ColumnSpec) -> Iterator[ColumnSpec]:
    if column.before or column.after:
        yield column.rows(range(column.count))
    if dtype_of(column.type).is_string and column.type != pa.string():
        yield replace(column, type=pa.string())
    if not column.nullable:
        yield replace(column, nullable=True)


def _plainer_values(case: Case) -> Iterator[Case]:
    spec, ways = case
    for place, table in enumerate(spec.tables):
        if table.count > 12:
            continue
        for k, column in enumerate(table.columns):
            dtype = dtype_of(column.type)
            if dtype.is_nested:
                continue
            plainest = [plain_of(dtype, 1), plain_of(dtype, 0)]
            for i, value in enumerate(column.values):
                if value is None or value in plainest:
                    continue
                for other in plainest[:1]:
                    changed = replace(column, values=(*column.values[:i], other, *column.values[i + 1 :]))
                    columns = (*table.columns[:k], changed, *table.columns[k + 1 :])
                    yield _with_table(spec, place, replace(table, columns=columns)), ways
