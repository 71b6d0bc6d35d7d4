"""Arguments of Flow methods, checked and resolved: join keys and their types, unions, sort, distinct, explode."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta

from scalein.api.column import Column, as_column, as_expr, lit
from scalein.api.windows import WindowSpec, resolve_window
from scalein.connectors.in_memory import Batches
from scalein.dtypes import BOOL, DType, Kind, Schema, alike, element_of, from_arrow_type
from scalein.durations import in_units, span
from scalein.errors import BadArgument, BadName, SourceLoc, WrongType, type_name
from scalein.ir.exprs import Agg, Call, Col, Expr, Named, OverResult, type_of, walk
from scalein.ir.functions.nested import is_struct
from scalein.ir.internal_names import internal
from scalein.ir.literals import PLAIN, hint_for_object
from scalein.ir.ops import (
    By,
    Distinct,
    Explode,
    Filter,
    Join,
    Op,
    OuterJoin,
    Over,
    Project,
    Sort,
    Source,
    StreamJoin,
)
from scalein.ir.ops.stream_join import WINDOW_COLUMNS, TimeBound
from scalein.ir.over import Frame, OverCall
from scalein.ir.physical import identity
from scalein.ir.printer import show_expr
from scalein.ir.resolve import Scope, column, resolve, shown
from scalein.ir.rewrite import walk_ops
from scalein.ir.stages import FOREVER
from scalein.ir.unify import as_decimal, cast_to, common_type, nested_hint

_KEYS_HINT = 'write on="id", or left_on="id", right_on="ad_id"'
HOWS = ("inner", "left", "right", "outer", "semi", "anti", "cross")
_HOWS_ELSEWHERE = {
    **dict.fromkeys(("full", "full_outer", "fullouter", "outer_coalesce"), "outer"),
    **dict.fromkeys(("left_outer", "leftouter"), "left"), **dict.fromkeys(("right_outer", "rightouter"), "right"),
    **dict.fromkeys(("left_semi", "leftsemi"), "semi"), **dict.fromkeys(("left_anti", "leftanti"), "anti"),
}  # fmt: skip
Keys = str | Column | Sequence[str | Column]


_CONDITIONS = ("eq", "ne", "lt", "le", "gt", "ge", "and", "or", "not")  # which no key is


def join(left: Op, right: Op, on: Keys | None, left_on: Keys | None, right_on: Keys | None, how: str,
         at: SourceLoc) -> Join:
    """The join of two ops; `right` is read whole first."""
    if how not in HOWS:
        hint = f"it is {_HOWS_ELSEWHERE[how]!r} here" if how in _HOWS_ELSEWHERE else None
        raise BadArgument("no such join", at=at, found=repr(how), has=", ".join(HOWS), hint=hint)
    if how == "cross":
        if on is not None or left_on is not None or right_on is not None:
            raise BadArgument("a cross join has no keys: it gives every pair of rows", at=at,
                              hint="leave on= away, or how=")
        return Join(left, right, (), (), how, _kept(left, right, [], at), at=at)
    left_given, right_given = _both_sides(on, left_on, right_on, at)
    for key in (*left_given, *right_given):
        if isinstance(key, Column) and isinstance(key.node, Call) and key.node.fn in _CONDITIONS:
            raise BadArgument("join takes key columns, not a condition", at=at, found=repr(key),
                              hint='write on="id", or left_on="id", right_on="ad_id"; for another condition '
                                   'how="cross", then filter(...)')
    left_scope = Scope(left.schema, "join (left side)", at)
    right_scope = Scope(right.schema, "join (right side)", at)
    left_keys = [row_expr(as_column(key, "join"), left_scope) for key in left_given]
    right_keys = [row_expr(as_column(key, "join"), right_scope) for key in right_given]
    pairs = [same_type(a, b, at) for a, b in zip(left_keys, right_keys, strict=True)]
    keep = () if how in ("semi", "anti") else _kept(left, right, right_keys, at)
    if how in ("right", "outer"):
        return _outer_join(left, right, left_keys, pairs, how, keep, at)
    return Join(left, right, tuple(a for a, _ in pairs), tuple(b for _, b in pairs), how, keep, at=at)


STREAM_HOWS = HOWS[:-1]
STRATEGIES = ("backward", "forward", "nearest")


def stream_join(left: Op, right: Op, keys: tuple[Keys | None, Keys | None, Keys | None], how: str, *,
                within: object = None, between: object = None, keep: object = None, at: SourceLoc) -> StreamJoin:
    """The join of two streams, by one of the bounds."""
    given = [name for name, value in (("within", within), ("between", between), ("keep", keep)) if value is not None]
    if len(given) > 1:
        raise BadArgument(f"join takes {given[0]}= or {given[1]}=, not both", at=at)
    if how not in STREAM_HOWS:
        if how == "cross":
            raise BadArgument("a join of two streams has keys", at=at, found="how='cross'", hint=_KEYS_HINT)
        join(left, right, *keys, how, at)  # raises
    if within is not None:
        for op in (left, right):
            clash = [name for name in WINDOW_COLUMNS if op.schema.get(name) is not None]
            if clash:
                raise BadName(f"a join in windows adds the column {clash[0]!r}, and there is one", at=at,
                              has=", ".join(op.schema.names), hint="rename it before the join")
    found = join(left, right, *keys, how, at)
    left, right = found.left, found.right
    bound = None
    if within is not None:
        bound = _window_bound(left, right, within, at)
    elif between is not None:
        mine, others = _event_times(left, right, at)
        bound = TimeBound(mine, others, *_interval(between, mine, at))
    elif keep != "forever":
        mine, others = _event_times(left, right, at)
        length = in_units(span(keep, "time to keep", at, zero=True), type_of(mine), "time to keep", show_expr(mine), at)
        bound = TimeBound(mine, others, -length, length)
    return StreamJoin(left, right, found.left_keys, found.right_keys, how, found.keep, bound,
                      builds_left=_rows_in_memory(left) < _rows_in_memory(right), at=at)


def asof_join(left: Op, right: Op, on: str, by: Keys | None, tolerance: object, strategy: str,
              at: SourceLoc) -> StreamJoin:
    """A left join with the row of the right side whose time is nearest in some direction."""
    if strategy not in STRATEGIES:
        raise BadArgument("no such strategy of an as-of join", at=at, found=repr(strategy), has=", ".join(STRATEGIES))
    mine, others = _one_type(_time_column(on, Scope(left.schema, "join_asof (left side)", at)),
                             _time_column(on, Scope(right.schema, "join_asof (right side)", at)), at)
    if by is None or by == []:
        raise BadArgument("join_asof needs by=, the keys that are equal on both sides", at=at,
                          hint='by="symbol"; without a key, with_columns(k=lit(0)) on both sides makes one')
    found = join(left, right, by, None, None, "left", at)
    most = FOREVER
    if tolerance is not None:
        most = in_units(span(tolerance, "tolerance", at, zero=True), type_of(mine), "tolerance", on, at)
    low, high = (0 if strategy == "forward" else -most), (0 if strategy == "backward" else most)
    keep = tuple(pair for pair in found.keep if pair[1] != on)
    return StreamJoin(left, right, found.left_keys, found.right_keys, "left", keep,
                      TimeBound(mine, others, low, high, pick=strategy), at=at)


def _window_bound(left: Op, right: Op, within: object, at: SourceLoc) -> TimeBound:
    if not isinstance(within, WindowSpec):
        raise BadArgument("within= takes a window", at=at, found=repr(within), hint='within=si.tumbling("t", "10s")')
    if within.kind != "tumbling":
        raise BadArgument("a join in windows takes tumbling windows", at=at, found=repr(within),
                          hint='within=si.tumbling("t", "10s"), or between=("-5s", "5s")')
    windows = [resolve_window(within, Scope(op.schema, f"join ({side} side)", at))
               for op, side in ((left, "left"), (right, "right"))]
    mine, others = _one_type(windows[0].time, windows[1].time, at)
    size = in_units(within.size, type_of(mine), "size of the window", show_expr(mine), at)
    offset = 0 if within.offset is None else in_units(within.offset, type_of(mine), "offset of the window",
                                                      show_expr(mine), at)
    return TimeBound(mine, others, size=size, offset=offset % size)


def _event_times(left: Op, right: Op, at: SourceLoc) -> tuple[Expr, Expr]:
    return _one_type(_event_time(left, "left", at), _event_time(right, "right", at), at)


def _event_time(op: Op, side: str, at: SourceLoc) -> Expr:
    """The column of event time."""
    if not op.event_time.column:
        raise BadArgument(f"the {side} side of the join has no event time", at=at, has=", ".join(op.schema.names),
                          hint='give both sides one: .with_watermark("t", "10s")')
    return _time_column(op.event_time.column, Scope(op.schema, f"join ({side} side)", at))


def _time_column(name: str, scope: Scope) -> Expr:
    if not isinstance(name, str):
        raise BadArgument("the time of a join is a column's name", at=scope.at, found=repr(name))
    found = column(name, scope)
    dtype = type_of(found)
    if not (dtype.kind is Kind.TS or dtype.is_int) or (dtype.is_int and not dtype.is_signed and dtype.bits == 64):
        raise WrongType(f"the time of a join is a timestamp or a signed integer, but {name} is {dtype!r}", at=scope.at,
                        step=scope.step, has=shown(scope.schema))
    return found


def _one_type(left: Expr, right: Expr, at: SourceLoc) -> tuple[Expr, Expr]:
    """Both times in one type; an integer is no timestamp."""
    if type_of(left).is_int != type_of(right).is_int:
        raise WrongType(f"the times of a join are of types {type_of(left)!r} and {type_of(right)!r}", at=at,
                        hint="cast one side to the other's type before joining")
    return same_type(left, right, at)


def _interval(between: object, time: Expr, at: SourceLoc) -> tuple[int, int]:
    if not isinstance(between, tuple | list) or len(between) != 2:
        raise BadArgument("between= takes two limits of right time - left time", at=at, found=repr(between),
                          hint='between=("-5s", "5s")')
    low, high = (_limit(each, time, at) for each in between)
    if low > high:
        raise BadArgument("the limits of between= are in the wrong order", at=at, found=repr(between),
                          hint=f"between=({between[1]!r}, {between[0]!r})")
    return low, high


def _limit(value: object, time: Expr, at: SourceLoc) -> int:
    """A limit in units of the time; it may be negative."""
    is_negative = False
    if isinstance(value, str) and value.strip().startswith("-"):
        is_negative, value = True, value.strip()[1:]
    elif (isinstance(value, int) and value < 0) or (isinstance(value, timedelta) and value < timedelta(0)):
        is_negative, value = True, -value
    units = in_units(span(value, "limit of between=", at, zero=True), type_of(time), "limit of between=",
                     show_expr(time), at)
    return -units if is_negative else units


def _rows_in_memory(op: Op) -> float:
    """The rows of the tables in memory that an op reads; inf if there are others."""
    sources = [each.data for each in walk_ops(op) if isinstance(each, Source)]
    return sum(each.table.num_rows if isinstance(each, Batches) and each.table is not None else math.inf
               for each in sources)


def _outer_join(left: Op, right: Op, given: list[Expr], pairs: list[tuple[Expr, Expr]], how: str,
                keep: tuple[tuple[str, str], ...], at: SourceLoc) -> OuterJoin:
    """A join whose left key columns hold the keys of either side, in the type that both have in common."""
    names = [key.name for key in given if isinstance(key, Col)]
    if len(names) < len(given):
        raise BadArgument(f"with how={how!r} the left keys are columns, which hold the keys of either side", at=at,
                          found=", ".join(show_expr(key) for key in given if not isinstance(key, Col)),
                          hint="compute it first: with_columns(k=...).join(..., left_on=\"k\", ...)")
    if len(set(names)) < len(names):
        raise BadArgument(f"with how={how!r} the left keys are different columns, which hold the keys of either side",
                          at=at, found=", ".join(names), hint="with_columns(k2=...) makes a second one")
    typed = {name: key for name, (key, _) in zip(names, pairs, strict=True) if not isinstance(key, Col)}
    if typed:
        scope = Scope(left.schema, "join (left side)", at)
        left = Project(left, tuple(Named(name, typed.get(name, column(name, scope))) for name in left.schema.names),
                       at=at)
    fields = [left.schema[name] for name in names]
    keys = tuple(Col(field.name, field.dtype, field.nullable) for field in fields)
    return OuterJoin(left, right, keys, tuple(b for _, b in pairs), how, keep, at=at)


def _both_sides(on: Keys | None, left_on: Keys | None, right_on: Keys | None,
                at: SourceLoc) -> tuple[list[str | Column], list[str | Column]]:
    hint = _KEYS_HINT
    if on is not None and (left_on is not None or right_on is not None):
        raise BadArgument("join takes on, or left_on and right_on, not both", at=at, hint=hint)
    if on is None and (left_on is None or right_on is None):
        raise BadArgument("join needs on, or both left_on and right_on", at=at,
                          hint=f'{hint}; how="cross" gives every pair of rows')
    left, right = _as_list(on if left_on is None else left_on), _as_list(on if right_on is None else right_on)
    if len(left) != len(right):
        raise BadArgument("left_on and right_on have different lengths", at=at, found=f"{len(left)} and {len(right)}")
    if not left:
        raise BadArgument("join needs at least one key", at=at, hint=hint)
    return left, right


def _as_list(keys: Keys | None) -> list[str | Column]:
    if isinstance(keys, list | tuple):
        return list(keys)
    return [keys]  # type: ignore[list-item]


def same_type(left: Expr, right: Expr, at: SourceLoc) -> tuple[Expr, Expr]:
    """Both keys in the type that holds either without loss."""
    a, b = type_of(left), type_of(right)
    if a.is_nested or b.is_nested:
        raise WrongType(f"join takes no nested keys: {a!r} and {b!r}", at=at,
                        hint=nested_hint(a if a.is_nested else b))
    shared = common_type(a, b)
    if shared is None or not (_is_lossless(a, shared) and _is_lossless(b, shared)):
        raise WrongType(f"join keys of types {a!r} and {b!r} cannot be compared without loss", at=at,
                        hint="cast one side to the other's type before joining")
    return cast_to(left, shared), cast_to(right, shared)


def _is_lossless(source: DType, target: DType) -> bool:
    """f64 holds integers of 32 bits exactly, f32 those of 16; `common_type` sees to all but 64 bits."""
    if target.is_decimal and (have := as_decimal(source)) is not None:
        return have.precision - have.scale <= target.precision - target.scale
    return not ((source.is_int and target.is_float and source.bits == 64) or (source.is_decimal and target.is_float))


def _kept(left: Op, right: Op, right_keys: list[Expr], at: SourceLoc) -> tuple[tuple[str, str], ...]:
    """Output name and column of what comes from the right: all but its keys; a clash gets `_right`."""
    keys = {key.name for key in right_keys if isinstance(key, Col)}
    taken = set(left.schema.names)
    kept = []
    for each in right.schema.names:
        if each in keys:
            continue
        name = each if each not in left.schema.names else f"{each}_right"
        if name in taken:
            raise BadName(f"two outputs of join would be called {name!r}", at=at, left=", ".join(left.schema.names),
                          right=", ".join(right.schema.names), hint="rename one of them before the join")
        taken.add(name)
        kept.append((name, each))
    return tuple(kept)


def projected_to(op: Op, first: Schema, number: int, at: SourceLoc) -> Op:
    """The op in the first one's schema; only the Arrow form of text and nulls may differ."""
    found = op.schema
    if found.names != first.names:
        same = sorted(found.names) == sorted(first.names)
        raise BadName(f"input {number} of union has other columns than the first", at=at, found=shown(found),
                      wanted=shown(first), hint="bring them into one order with select(...)" if same else
                      "select the columns that both have, or add the others: with_columns(x=lit(None, type))")
    for field, want in zip(found, first, strict=True):
        if not alike(field.dtype, want.dtype):
            raise WrongType(f"column {field.name!r} is {field.dtype!r} in input {number} of union, "
                            f"but {want.dtype!r} in the first", at=at, hint="cast one of them")
    if all(field.dtype == want.dtype for field, want in zip(found, first, strict=True)):
        return op
    scope = Scope(found, "union", at)
    items = [Named(f.name, resolve(Call("cast", (Col(f.name),), dtype=f.dtype), scope)) for f in first]
    return Project(op, tuple(items), at=at)


# Outputs of a step: what the user gave, resolved, each under its own name.

def flat(given: Iterable[object]) -> list[object]:
    """Positional arguments; those of a list or tuple count as if they were given one by one."""
    return [each for item in given for each in (item if isinstance(item, list | tuple) else [item])]


def with_overs(op: Op, given: Iterable[object], scope: Scope) -> tuple[Op, Scope]:
    """The op with columns that are computed over other rows, as expressions ask for them; the same if none does."""
    nodes = [each.node for each in given if isinstance(each, Column)]
    if not any(isinstance(part, OverResult) for node in nodes if not isinstance(node, Agg) for part in walk(node)):
        return op, scope
    from scalein.api.over import computed  # few flows have one

    return computed(op, nodes, scope)


def row_outputs(given: Iterable[object], named: Mapping[str, object], scope: Scope) -> list[Named]:
    """Positional columns under their own names, then keyword ones; names are distinct."""
    items = [_own_name(as_item(item, scope), scope) for item in flat(given)]
    items += [Named(name, row_expr(_keyword(value), scope)) for name, value in named.items()]
    check_distinct([item.name for item in items], scope)
    return items


def as_item(item: object, scope: Scope) -> Column:
    """A positional argument as a column: a Column, or a name."""
    if isinstance(item, Column | str):
        return as_column(item, scope.step)
    found = repr(item) if isinstance(item, (*PLAIN, list, tuple, set)) else type_name(item)
    hint = "a constant needs a name: give it as name=value"
    if isinstance(item, list | tuple | set):
        hint = f"unpack it: {scope.step}(*names)"
    elif scope.step == "filter" or not isinstance(item, PLAIN):
        hint = hint_for_object(item) or f'write it with scalein.col: {scope.step}(col("x") > 1)'
    raise BadArgument(f"{scope.step} takes columns and their names", at=scope.at, found=found, hint=hint)


def _keyword(value: object) -> Column:
    """`new=col("x") + 1`; a str names a column, anything else is a constant."""
    return value if isinstance(value, Column) else as_column(value, "") if isinstance(value, str) else lit(value)


def row_expr(given: Column, scope: Scope) -> Expr:
    """The typed expression of a column that is computed row by row."""
    return resolve(as_expr(given, scope.at), scope)


def _own_name(given: Column, scope: Scope) -> Named:
    expr = row_expr(given, scope)
    if given.name is None:
        raise BadName(f"an output of {scope.step} has no name", at=scope.at, found=repr(given),
                      hint="name it with .alias(...), or give it as name=...")
    return Named(given.name, expr)


def check_distinct(names: list[str], scope: Scope, hint: str = "name one of them with .alias(...)") -> None:
    """Raise `BadName` for the first name that appears twice among the outputs."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise BadName(f"two outputs of {scope.step} are called {name!r}", at=scope.at, has=", ".join(names),
                          hint=hint)
        if not name:
            raise BadName(f"an output of {scope.step} has an empty name", at=scope.at)
        seen.add(name)


# Lists into rows: what the user asked to explode, checked.

def explode(op: Op, given: Sequence[object], scope: Scope) -> Explode:
    """The op with a row for each element of some lists."""
    names = flat(given)
    if not names:
        raise BadArgument("explode needs the name of a list", at=scope.at, hint=_lists(scope))
    for name in names:
        if not isinstance(name, str) or not name:
            raise BadArgument("explode takes the name of a column", at=scope.at, found=repr(name),
                              hint="compute it first: with_columns(tags=...).explode(\"tags\")")
        dtype = type_of(column(name, scope))
        element = element_of(dtype)
        if element is None:
            raise WrongType(f"explode takes a list, but {name!r} is {dtype!r}", at=scope.at, step=scope.step,
                            hint=nested_hint(dtype) if dtype.is_nested else _lists(scope))
        from_arrow_type(element.type, name)  # refused here, where the user called, if nothing can be done with it
    return Explode(op, tuple(dict.fromkeys(map(str, names))), at=scope.at)


def unnest(op: Op, given: Sequence[object], scope: Scope) -> Project:
    """The op with the fields of some structs in the places of these; a field of a null struct is null."""
    names = flat(given)
    structs = [field.name for field in scope.schema if is_struct(field.dtype)]
    known = f"the structs here are {', '.join(map(repr, structs))}" if structs else "no column here is a struct"
    if not names:
        raise BadArgument("unnest needs the name of a struct", at=scope.at, hint=known)
    for name in names:
        if not isinstance(name, str) or not name:
            raise BadArgument("unnest takes names of columns", at=scope.at, found=repr(name))
        dtype = type_of(column(name, scope))
        if not is_struct(dtype):
            hint = f"explode({name!r}) makes rows of a list" if element_of(dtype) is not None else known
            raise WrongType(f"unnest takes a struct, but {name!r} is {dtype!r}", at=scope.at, step=scope.step,
                            hint=hint)
    items: list[Named] = []
    for field in scope.schema:
        if field.name not in names:
            items.append(Named(field.name, column(field.name, scope)))
            continue
        struct = as_column(field.name, scope.step).struct
        items += [Named(part.name, row_expr(struct.field(part.name), scope)) for part in field.dtype.nested or ()]
    if not items:
        raise BadArgument("unnest would leave no column: the struct has no fields", at=scope.at)
    check_distinct([item.name for item in items], scope, "rename the column, or take fields with .struct.field(name)")
    return Project(op, tuple(items), at=scope.at)


def _lists(scope: Scope) -> str:
    names = [field.name for field in scope.schema if element_of(field.dtype) is not None]
    if names:
        return f"the lists here are {', '.join(map(repr, names))}"
    return "no column here is a list; .collect() in agg(...) makes them"


# Rows in an order, or the first of each key: what the user gave, resolved and checked.

Order = str | Column | Sequence[str | Column]


def distinct(op: Op, given: Sequence[object], scope: Scope) -> Distinct:
    """The first rows by the named columns; by all of them if none is named."""
    names = flat(given)
    for name in names:
        if not isinstance(name, str):
            hint = "unpack it: distinct(*names)" if isinstance(name, set) else (
                "compute it first: with_columns(k=...).distinct(\"k\")")
            raise BadArgument("distinct takes names of columns", at=scope.at, found=repr(name), hint=hint)
    keys = [column(str(name), scope) for name in names] or [column(name, scope) for name in op.schema.names]
    for key in keys:
        if type_of(key).is_nested:
            hint = "name the columns to tell rows apart by" if not names else nested_hint(type_of(key))
            raise WrongType(f"rows cannot be told apart by {key.name!r}, which is {type_of(key)!r}", at=scope.at,
                            step=scope.step, hint=hint)
    return Distinct(op, tuple(dict.fromkeys(key.name for key in keys)), at=scope.at)


def distinct_in_time(op: Op, given: Sequence[object], within: object, ttl: object, scope: Scope) -> Project:
    """Rows whose keys were not kept for a while of event time, or with `ttl` did not come."""
    if within is not None and ttl is not None:
        raise BadArgument("distinct takes within= or ttl=", at=scope.at, found=f"within={within!r}, ttl={ttl!r}",
                          hint="within= counts from the last row that was kept, ttl= from the last row")
    keys = [column(name, scope) for name in distinct(op, given, scope).keys]
    name = op.event_time.column
    if not name:
        raise BadArgument(f"distinct {'within a time' if ttl is None else 'with ttl='} needs event time", at=scope.at,
                          has=shown(scope.schema), hint='with_watermark("t", "10s") before it')
    time = column(name, scope)
    what = "time between rows of a key" if ttl is None else "ttl"
    units = in_units(span(within if ttl is None else ttl, what, scope.at), type_of(time), what, name, scope.at)
    there = Filter(op, Call("is_not_null", (time,), dtype=BOOL, nullable=False), at=scope.at) if time.nullable else op
    agg = Agg("spaced" if ttl is None else "after_quiet", (), BOOL, False, (units,), scope.at)
    call = OverCall(internal("over0"), agg, Frame(within=units))
    over = Over(there, tuple(keys), (By(time),), (call,), time=name, at=scope.at)
    kept = Filter(over, Col(call.name, BOOL, False), at=scope.at)
    return Project(kept, identity(op.schema), at=scope.at)


def sort(op: Op, given: Sequence[object], descending: object, nulls_last: object, scope: Scope) -> Sort:
    """All rows in order."""
    by = flat(given)
    example = f'for example {scope.step}("x", descending=True)'
    if not by:
        raise BadArgument(f"{scope.step} needs something to sort by", at=scope.at, has=shown(scope.schema),
                          hint=example)
    if not isinstance(nulls_last, bool):
        raise BadArgument("nulls_last is True or False", at=scope.at, found=repr(nulls_last))
    directions = list(descending) if isinstance(descending, list | tuple) else [descending] * len(by)
    if not all(isinstance(each, bool) for each in directions):
        raise BadArgument("descending is True, False, or a list of them", at=scope.at, found=repr(descending),
                          hint=example)
    if len(directions) != len(by):
        raise BadArgument("descending needs one value for each column to sort by", at=scope.at,
                          found=f"{len(directions)} for {len(by)}")
    keys = tuple(_by(each, bool(way), scope) for each, way in zip(by, directions, strict=True))
    return Sort(op, keys, nulls_last, at=scope.at)


def first_rows(op: Op, count: object, by: object, descending: bool, scope: Scope) -> Sort:
    """The rows with the greatest (or least) values, best first; null is never preferred."""
    if isinstance(count, bool) or not isinstance(count, int) or not 0 < count < 2**63:
        hint = f'the number comes first: {scope.step}(10, "x")' if isinstance(count, str | Column) else None
        raise BadArgument(f"{scope.step} takes a number of rows, 1 or more", at=scope.at, found=repr(count), hint=hint)
    listed = list(by) if isinstance(by, list | tuple) else [by]
    if not listed:
        raise BadArgument(f"{scope.step} needs a column to compare rows by", at=scope.at, has=shown(scope.schema),
                          hint=f'for example {scope.step}(10, "x")')
    return Sort(op, tuple(_by(each, descending, scope) for each in listed), True, count, at=scope.at)


def _by(given: object, descending: bool, scope: Scope) -> By:
    if not isinstance(given, str | Column | list | tuple | set):
        raise BadArgument(f"{scope.step} takes columns and their names", at=scope.at, found=repr(given),
                          hint=hint_for_object(given))
    expr = row_expr(as_item(given, scope), scope)
    if type_of(expr).is_nested:
        raise WrongType(f"{type_of(expr)!r} has no order", at=scope.at, step=scope.step, found=repr(given),
                        hint=nested_hint(type_of(expr)))
    return By(expr, descending)
