"""Steps with another input: union and joins."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pyarrow as pa

from scalein.dtypes import BOOL, DType, Kind
from tests.campaign import data
from tests.campaign.exprs import Known
from tests.campaign.kinds import column_type, dtype_of
from tests.campaign.maker import Made, Maker, step
from tests.campaign.spec import ColumnSpec, Item, Node, TableSpec, plain
from tests.campaign.takes import is_any


def union(maker: Maker) -> Made:
    if not maker.steps and maker.rng.random() < 0.4:
        name = f"u{len(maker.tables)}"
        types = [column.type for column in maker.tables[0].columns]
        other = data.table(maker.rng, name, maker.extreme, types)
        maker.tables.append(other)
        return step("union", Item("", plain(f"si.from_arrow({name})")), fixed=1), [
            replace(column, is_tame=column.is_tame and data.is_tame(column.dtype, mine.values))
            for column, mine in zip(maker.known, other.columns, strict=True)]
    if maker.rng.random() < 0.3:
        return step("union", Item("", plain("flow")), fixed=1), maker.known
    condition = maker.exprs.expr(BOOL, max(1, maker.depth))
    return step("union", Item("", Node("flow.filter({0})", (condition,))), fixed=1), maker.known


def join(maker: Maker) -> Made | None:
    exact = [column for column in maker.known if column.is_exact and is_any(column.dtype)]
    if not exact or maker.joins >= 2:
        return None
    maker.joins += 1
    if maker.rng.random() < 0.1:
        return _cross(maker)
    how = maker.rng.choice(["inner", "left", "right", "outer", "semi", "anti"])
    keys = maker.rng.sample(exact, min(len(exact), maker.rng.choice([1, 1, 1, 2])))
    if maker.rng.random() < 0.15 and len(keys) == 1:
        return _join_itself(maker, keys[0], how)
    other = _right_side(maker, keys)
    maker.tables.append(other)
    right = f"si.from_arrow({other.name})" if maker.rng.random() < 0.3 else other.name
    if maker.rng.random() < 0.2 and how not in ("right", "outer"):
        left = [maker.exprs.expr(key.dtype, 2) for key in keys]
        keyed = [Item("", Node(f"left_on=[{', '.join(f'{{{k}}}' for k in range(len(left)))}]", tuple(left))),
                 Item("", plain(f"right_on={[key.name for key in keys]!r}"))]
    else:
        keyed = [Item("", plain(f"on={[key.name for key in keys]!r}"))]
    made = step("join", Item("", plain(right)), *keyed, Item("", plain(f"how={how!r}")), fixed=2 + len(keyed))
    maker.ordered = maker.ordered and how in ("semi", "anti")
    new = [] if how in ("semi", "anti") else _kept(maker, other.columns[len(keys):])
    theirs = {column.name: column for column in other.columns[: len(keys)]} if how in ("right", "outer") else {}
    return made, [_of_either(column, theirs.get(column.name)) for column in maker.known] + new


def _kept(maker: Maker, columns: Sequence[ColumnSpec]) -> list[Known]:
    """What comes from the right side."""
    names = {column.name for column in maker.known}
    return [Known(c.name if c.name not in names else f"{c.name}_right", dtype_of(c.type), True,
                  data.is_tame(dtype_of(c.type), c.values)) for c in columns]


def _of_either(mine: Known, theirs: ColumnSpec | None) -> Known:
    """A key column that holds the keys of both sides; one that was widened has the wide type."""
    if theirs is None:
        return mine
    wide = dtype_of(theirs.type)
    return replace(mine, dtype=wide if wide.is_int else mine.dtype,
                   is_tame=mine.is_tame and data.is_tame(wide, theirs.values))


def _cross(maker: Maker) -> Made:
    count = maker.rng.choice([0, 1, 2, 5])
    columns = tuple(data.column(maker.rng, maker.new_name(), column_type(maker.rng), count, maker.extreme)
                    for _ in range(maker.rng.choice([1, 2])))
    other = TableSpec(f"u{len(maker.tables)}", columns)
    maker.tables.append(other)
    maker.ordered = False
    made = step("join", Item("", plain(other.name)), Item("", plain("how='cross'")), fixed=2)
    return made, [*maker.known, *_kept(maker, columns)]


def _right_side(maker: Maker, keys: list[Known]) -> TableSpec:
    count = maker.rng.choice([0, 1, 3, 6, 12, 12])
    columns = []
    for key in keys:
        seen = next((c.values for c in maker.tables[0].columns if c.name == key.name and
                     dtype_of(c.type) == key.dtype), ())
        values = data.matching(maker.rng, seen, key.dtype, count, maker.extreme)
        wide = key.dtype.is_int and key.dtype.is_signed and maker.rng.random() < 0.2  # keys widen to meet
        columns.append(ColumnSpec(key.name, pa.int64() if wide else key.dtype.arrow, True, values))
    for _ in range(maker.rng.choice([0, 1, 2])):
        free = [column.name for column in maker.known if column.name not in {c.name for c in columns}]
        clashing = bool(free) and maker.rng.random() < 0.15  # the right one gets another name
        new = maker.rng.choice(free) if clashing else maker.new_name()
        columns.append(data.column(maker.rng, new, column_type(maker.rng), count, maker.extreme))
    return TableSpec(f"u{len(maker.tables)}", tuple(columns))


def _join_itself(maker: Maker, key: Known, how: str) -> Made:
    name = maker.new_name()
    right = plain(f"flow.group_by({key.name!r}).agg({name}=si.count())")
    made = step("join", Item("", right), Item("", plain(f"on={key.name!r}")), Item("", plain(f"how={how!r}")),
                 fixed=3)
    maker.ordered = maker.ordered and how in ("semi", "anti")
    new = [] if how in ("semi", "anti") else [Known(name, DType(Kind.I64))]
    return made, [*maker.known, *new]
