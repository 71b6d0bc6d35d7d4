"""Steps row by row, and those of order: filter, columns, limit, distinct, sort, explode."""

from __future__ import annotations

from dataclasses import replace

import pyarrow as pa

from scalein.dtypes import BOOL, Kind
from tests.campaign.exprs import Known
from tests.campaign.kinds import column_type, dtype_of, type_text
from tests.campaign.maker import Made, Maker, name, step
from tests.campaign.spec import Item, plain
from tests.campaign.takes import is_any, is_list


def filter(maker: Maker) -> Made:
    items = [Item("", maker.exprs.expr(BOOL, max(1, maker.depth))) for _ in range(maker.rng.choice([1, 1, 1, 2]))]
    return step("filter", *items), maker.known


def with_columns(maker: Maker) -> Made:
    made = [maker.new(_old_or_new(maker), maker.depth) for _ in range(maker.rng.choice([1, 1, 2, 3]))]
    new = {known.name: (item, known) for item, known in made}
    kept = [column for column in maker.known if column.name not in new]
    return step("with_columns", *(item for item, _ in new.values())), [*kept, *(known for _, known in new.values())]


def _old_or_new(maker: Maker) -> str:
    return maker.rng.choice(maker.known).name if maker.rng.random() < 0.2 else maker.new_name()


def select(maker: Maker) -> Made:
    kept = maker.rng.sample(maker.known, maker.rng.randrange(0, len(maker.known) + 1))
    made = [maker.new(maker.new_name(), maker.depth) for _ in range(maker.rng.randrange(0 if kept else 1, 3))]
    items = [*(name(column.name) for column in kept), *(item for item, _ in made)]
    return step("select", *items), [*kept, *(known for _, known in made)]


def drop(maker: Maker) -> Made | None:
    if len(maker.known) < 2:
        return None
    gone = maker.rng.choice(maker.known)
    return step("drop", name(gone.name)), [column for column in maker.known if column is not gone]


def rename(maker: Maker) -> Made:
    old, new = maker.rng.choice(maker.known), maker.new_name()
    made = step("rename", Item("", plain(f"{{{old.name!r}: {new!r}}}")), fixed=1)
    return made, [replace(column, name=new) if column is old else column for column in maker.known]


def cast(maker: Maker) -> Made | None:
    exact = [column for column in maker.known if column.is_exact and is_any(column.dtype)]
    if not exact:
        return None
    old, new = maker.rng.choice(exact), column_type(maker.rng)
    if pa.types.is_nested(new):
        return None
    made = step("cast", Item("", plain(f"{{{old.name!r}: {type_text(dtype_of(new).arrow)}}}")), fixed=1)
    return made, [replace(column, dtype=dtype_of(new), is_tame=False) if column is old else column
                  for column in maker.known]


def limit(maker: Maker) -> Made | None:
    if not maker.ordered:
        return None
    return step("limit", Item("", plain(str(maker.rng.choice([0, 1, 5, 17, 64, 300])))), fixed=1), maker.known


def map_batches(maker: Maker) -> Made:
    fn = maker.rng.choice(["same", "valid_only"])
    return step("map_batches", Item("", plain(f"udfs.{fn}")), Item("", plain("flow.schema")), fixed=2), maker.known


def with_watermark(maker: Maker) -> Made | None:
    times = [column for column in maker.known if column.dtype.kind is Kind.TS or column.dtype.is_int]
    if not times:
        return None
    time = maker.rng.choice(times)
    delay = "'5s'" if time.dtype.kind is Kind.TS else "5"
    return step("with_watermark", name(time.name), Item("", plain(delay)), fixed=2), maker.known


# --- order


def distinct(maker: Maker) -> Made | None:
    if any(not column.is_exact or column.dtype.is_nested for column in maker.known):
        return None
    names = maker.rng.sample(maker.known, maker.rng.randrange(0, len(maker.known) + 1)) if maker.ordered else []
    # Without an order either of 0.0 and -0.0 may stay.
    known = [replace(column, is_exact=maker.ordered or not column.dtype.is_float) for column in maker.known]
    return step("distinct", *(name(column.name) for column in names)), known


def sort(maker: Maker) -> Made | None:
    keys = _keys(maker)
    if keys is None:
        return None
    flags = maker.rng.choice(["True", "False", str([maker.rng.random() < 0.5 for _ in keys])])
    items = [name(key.name) for key in keys]
    items += [Item("descending=", plain(flags)), Item("nulls_last=", plain(str(maker.rng.random() < 0.4)))]
    maker.ordered = maker.ordered or {key.name for key in keys} == {column.name for column in maker.known}
    return step("sort", *items, fixed=len(items)), maker.known


def _keys(maker: Maker) -> list[Known] | None:
    """What to sort by: anything if ties have an order, else mostly all columns, so that there are none."""
    if maker.ordered or maker.rng.random() < 0.3:
        fit = [column for column in maker.known if column.is_exact and is_any(column.dtype)]
        return maker.rng.sample(fit, maker.rng.randrange(1, min(3, len(fit)) + 1)) if fit else None
    if all(column.is_exact and is_any(column.dtype) for column in maker.known):
        return maker.rng.sample(maker.known, len(maker.known))
    return None


def top_k(maker: Maker) -> Made | None:
    keys = _keys(maker) if maker.ordered else None
    if keys is None:
        return None
    count = maker.rng.choice([1, 3, 10, 100])
    by = plain(repr([key.name for key in keys]) if len(keys) > 1 else repr(keys[0].name))
    verb = maker.rng.choice(["top_k", "bottom_k"])
    return step(verb, Item("", plain(str(count))), Item("", by), fixed=2), maker.known


def explode(maker: Maker) -> Made | None:
    lists = [column for column in maker.known if is_list(column.dtype)]
    if not lists:
        return None
    names = maker.rng.sample(lists, 2 if len(lists) > 1 and maker.rng.random() < 0.2 else 1)
    return step("explode", *(name(each.name) for each in names), fixed=len(names)), maker.known
