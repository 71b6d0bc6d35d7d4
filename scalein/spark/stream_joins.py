"""Joins of two streams on Spark: rows of both sides are shuffled by their keys, and joined where they meet.

A fragment's op over the rows of both sides (`BufferedJoin`) has the columns of one side in each batch (`JoinSides`).
Rows cross the shuffle with these columns: so a batch's names say which side it is of. Keys and times are columns there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

import pyarrow as pa

from scalein.connectors.in_memory import of_table
from scalein.exec.bounded import Query
from scalein.exec.fragments import Fragment, over
from scalein.ir import ops
from scalein.ir.exprs import Col, Expr, Named, type_of
from scalein.ir.internal_names import internal
from scalein.ir.ops.stream_join import side_column
from scalein.ir.physical import identity
from scalein.ir.rewrite import transform_streams
from scalein.options import Options
from scalein.spark.shuffle import coalesce_batches

SIDES = (0, 1)
GATHERED_BYTES = 32 << 20  # of a side's rows, which are shuffled at once

Found = TypeVar("Found")


def with_join_columns(op: ops.Op) -> ops.Op:
    """The plan with columns for the keys and times of joins of streams, where these are computed."""
    return transform_streams(op, lambda each: _with_columns(each) if isinstance(each, ops.StreamJoin) else each)


def _with_columns(join: ops.StreamJoin) -> ops.Op:
    bound = join.bound
    left, left_keys = _computed(join.left, [*join.left_keys, *([] if bound is None else [bound.left])])
    right, right_keys = _computed(join.right, [*join.right_keys, *([] if bound is None else [bound.right])])
    if left is join.left and right is join.right:
        return join
    if bound is not None:
        bound = replace(bound, left=left_keys.pop(), right=right_keys.pop())
    found = replace(join, left=left, right=right, left_keys=tuple(left_keys), right_keys=tuple(right_keys), bound=bound)
    return found if left is join.left else ops.Project(found, identity(join.schema), at=join.at)


def _computed(rows: ops.Op, exprs: list[Expr]) -> tuple[ops.Op, list[Expr]]:
    """Rows with columns for some expressions, and these columns."""
    items = [Named(internal(f"on{k}"), expr) for k, expr in enumerate(exprs) if not isinstance(expr, Col)]
    if not items:
        return rows, exprs
    columns = {id(item.expr): Col(item.name, type_of(item.expr), item.expr.nullable) for item in items}
    return ops.Project(rows, (*identity(rows.schema), *items), at=rows.at), [columns.get(id(e), e) for e in exprs]


@dataclass(frozen=True)
class JoinSide:
    """What crosses the shuffle of one side."""

    schema: pa.Schema
    keys: tuple[str, ...]
    time: str | None


@dataclass(frozen=True, eq=False)
class ShuffledJoin:
    """The fragment of a join, as tasks run it."""

    fragment: Fragment

    @property
    def _state(self) -> ops.BufferedJoin:
        assert isinstance(self.fragment.state, ops.BufferedJoin)
        return self.fragment.state

    def __reduce__(self) -> tuple[object, ...]:
        return ShuffledJoin, (replace(self.fragment, consumers=[]),)

    @cached_property
    def sides(self) -> tuple[JoinSide, JoinSide]:
        join, given = self._state.join, self.fragment.input.arrow
        bound = (None, None) if join.bound is None else (join.bound.left, join.bound.right)
        left, right = (JoinSide(
            pa.schema([given.field(side_column(k, name)) for name in rows.schema.names]),
            tuple(side_column(k, key.name) for key in keys if isinstance(key, Col)),
            side_column(k, time.name) if isinstance(time, Col) else None)
            for k, rows, keys, time in zip(SIDES, join.inputs, (join.left_keys, join.right_keys), bound, strict=True))
        return left, right

    def side_of(self, names: Sequence[str]) -> int:
        """The side that rows with these columns are of."""
        return SIDES.index(0 if names[0] == self.sides[0].schema.names[0] else 1)

    def by_side(self, batches: Iterable[pa.RecordBatch]) -> Iterator[tuple[int, pa.RecordBatch]]:
        """The rows of both sides in few large batches."""
        gathered: tuple[list[pa.RecordBatch], list[pa.RecordBatch]] = ([], [])
        sizes = [0, 0]
        for batch in batches:
            side = self.side_of(batch.schema.names)
            gathered[side].append(batch)
            sizes[side] += batch.nbytes
            if sizes[side] >= GATHERED_BYTES:
                yield from ((side, each) for each in coalesce_batches(gathered[side], GATHERED_BYTES))
                gathered[side].clear()
                sizes[side] = 0
        for side in SIDES:
            yield from ((side, each) for each in coalesce_batches(gathered[side], GATHERED_BYTES))

    def joined(self, batches: Iterable[pa.RecordBatch], options: Options) -> Iterator[pa.RecordBatch]:
        """The fragment's rows, for all rows of some keys."""
        rows: tuple[list[pa.RecordBatch], list[pa.RecordBatch]] = ([], [])
        for batch in batches:
            rows[self.side_of(batch.schema.names)].append(batch)
        join = self._state.join
        sources = []
        for side, below in zip(SIDES, join.inputs, strict=True):
            names = below.schema.names
            table = pa.Table.from_batches(rows[side], self.sides[side].schema).rename_columns(names)
            rows[side].clear()
            data = of_table(table.cast(below.schema.arrow), join.at)
            sources.append(ops.Source("input", data.schema, tuple(names), data))
        is_smaller = join.how == "inner" and _rows(sources[0]) < _rows(sources[1])
        bounded = replace(join.with_inputs(tuple(sources)), builds_left=is_smaller)
        return Query(over(self.fragment.op, self._state, bounded)).batches(options)


def _rows(source: ops.Source) -> int:
    table = source.data.table  # type: ignore[attr-defined]
    return int(table.num_rows)
