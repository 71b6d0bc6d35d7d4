"""Right and outer joins on Spark, by ops that tasks can run: no task sees all rows, so none knows what has no match.

    matched     left join table                                         row by row; the table is sent with the plan
    numbers     group by number of (left join table: number, hit = 1)   a task combines its matches before the shuffle:
                union (all numbers, hit = 0)                            it sends at most a row for each row of the table
    unmatched   numbers with hit = 0, join table by number

The left side is computed twice.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from scalein.api.column import col, lit
from scalein.api.flow import Flow
from scalein.connectors.in_memory import of_table
from scalein.exec.bounded import collect
from scalein.ir import ops
from scalein.ir.exprs import Col, Expr, Named
from scalein.ir.physical import identity
from scalein.ir.rewrite import transform_streams
from scalein.options import Options

_NUMBER, _HIT, _KEY, _LEFT = "#outer.number", "#outer.hit", "#outer.key{}", "#outer.left.{}"


def expand_outer_joins(op: ops.Op) -> ops.Op:
    """The plan with a union of matched and unmatched rows for each right or outer join."""
    return transform_streams(op, lambda each: _expanded(each) if isinstance(each, ops.OuterJoin) else each)


def _expanded(join: ops.OuterJoin) -> ops.Op:
    how = "left" if join.how == "outer" else "inner"
    matched = ops.Join(join.left, join.right, join.left_keys, join.right_keys, how, join.keep, at=join.at)
    return ops.Union((matched, _unmatched(join)), at=join.at)


def _unmatched(join: ops.OuterJoin) -> ops.Op:
    table = _numbered(join)
    names = [_KEY.format(k) for k in range(len(join.right_keys))]
    keys = tuple(_column(table, name) for name in names)
    hits = ops.Join(join.left, table, join.left_keys, keys, "inner", ((_NUMBER, _NUMBER),), at=join.at)
    marks = [Flow(each).select(_NUMBER, **{_HIT: lit(hit)}) for each, hit in ((hits, 1), (table, 0))]
    numbers = marks[0].union(marks[1]).group_by(_NUMBER).agg(col(_HIT).max()).filter(col(_HIT) == 0).select(_NUMBER)
    number = (_column(table, _NUMBER),)
    kept = tuple((name, name) for name in table.schema.names if name != _NUMBER)
    found = ops.Join(numbers.op, table, number, number, "inner", kept, at=join.at)
    origins = {**{key.name: name for key, name in zip(join.left_keys, names, strict=True) if isinstance(key, Col)},
               **dict(join.keep)}
    items = [Named(f.name, _column(found, origins.get(f.name, _LEFT.format(f.name)))) for f in join.schema]
    return ops.Project(found, tuple(items), at=join.at)


def _numbered(join: ops.OuterJoin) -> ops.Source:
    """The table with the number of each row, its keys, and nulls for the columns of the left side."""
    keys = [Named(_KEY.format(k), key) for k, key in enumerate(join.right_keys)]
    table = collect(ops.Project(join.right, (*identity(join.right.schema), *keys)), Options.make(at=join.at))
    for field in join.left.schema.arrow:
        table = table.append_column(_LEFT.format(field.name), pa.nulls(table.num_rows, field.type))
    numbers = pa.array(np.arange(table.num_rows, dtype=np.int64))
    data = of_table(table.append_column(pa.field(_NUMBER, pa.int64(), False), numbers), join.at)
    return ops.Source("static", data.schema, tuple(data.schema.names), data, at=join.at)


def _column(op: ops.Op, name: str) -> Expr:
    field = op.schema[name]
    return Col(name, field.dtype, field.nullable)
