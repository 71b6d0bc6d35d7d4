"""Groups: keys, windows, aggregates."""

from __future__ import annotations

from dataclasses import replace

from scalein.dtypes import BOOL, Kind
from tests.campaign.exprs import Known
from tests.campaign.maker import Made, Maker, name
from tests.campaign.rules import AGG_RULES
from tests.campaign.spec import Item, Node, Part, Step, plain
from tests.campaign.takes import is_any


def group_by(maker: Maker) -> Made:
    exact = [column for column in maker.known if column.is_exact and is_any(column.dtype)]
    chosen = maker.rng.sample(exact, min(len(exact), maker.rng.choice([0, 1, 1, 1, 1, 2, 2, 3, 6])))
    items = [name(key.name) for key in chosen]
    known = list(chosen)
    if maker.rng.random() < 0.2:
        exprs, new = maker.exprs, maker.new_name()
        dtype = next(found for found in (exprs.some_type(), BOOL) if is_any(found))
        items.append(Item(f"{new}=", exprs.expr(dtype, maker.depth)))
        known.append(Known(new, dtype))
    # Which of 0.0 and -0.0 stands for their group is nobody's promise.
    known = [replace(key, is_exact=not key.dtype.is_float) for key in known]
    window = _window(maker) if maker.rng.random() < 0.25 else None
    if window is not None:
        place = maker.rng.randrange(0, len([item for item in items if not item.prefix]) + 1)
        items.insert(place, Item("", window))
        known += [Known(end, window.dtype or BOOL) for end in ("window_start", "window_end")]
    aggs = [agg for _ in range(maker.rng.choice([1, 1, 2, 3, 4])) if (agg := _agg(maker, maker.new_name()))]
    aggs = aggs or [(Item(f"{maker.new_name()}=", Node("si.count()", fn="count")), None)]
    known += [column for _, column in aggs if column is not None]
    maker.ordered = False
    return Step((Part("group_by", tuple(items)), Part("agg", tuple(item for item, _ in aggs)))), known


def _agg(maker: Maker, new: str) -> tuple[Item, Known | None] | None:
    rules = [rule for rule in AGG_RULES if maker.ordered or not rule.ordered]
    rule = maker.rng.choices(rules, [rule.weight for rule in rules])[0]
    exprs = maker.exprs
    args = []
    for is_it in rule.of:
        types = [dtype for dtype in exprs.types if is_it(dtype)]
        if not types:
            return None
        dtype = maker.rng.choice(types)
        depth = maker.rng.choice([0, 0, 0, 1, 2])
        node = exprs.tame(dtype, depth) if rule.wants_tame(dtype) else exprs.expr(dtype, depth)
        if node is None or node.dtype is None:
            return None
        args.append(node)
    exact = all(rule.exact(arg.dtype) for arg in args if arg.dtype is not None)
    maker.loose = maker.loose or not exact
    like, write = args[0].dtype if args else None, rule.write
    if maker.rng.random() < 0.2:
        write += f".filter({{{len(args)}}})"
        args.append(exprs.expr(BOOL, 1))
    return Item(f"{new}=", Node(write, tuple(args), fn=rule.fn)), Known(new, like or BOOL, exact)


def _window(maker: Maker) -> Node | None:
    times = [column for column in maker.known if column.is_exact and (
        column.dtype.kind is Kind.TS or (column.dtype.is_int and column.dtype.kind is not Kind.U64))]
    if not times:
        return None
    time = maker.rng.choice(times)
    size: str | int
    every: str | int
    if time.dtype.kind is Kind.TS:
        size, every = maker.rng.choice([("10s", "5s"), ("1h", "20m"), ("1d", "1d"), ("3s", "2s"), ("1000d", "300d")])
    else:
        size, every = maker.rng.choice([(7, 7), (10, 5), (100, 30), (3, 2), (1, 1)])
    if maker.rng.random() < 0.25:
        return replace(plain(f"si.session({time.name!r}, gap={size!r})"), dtype=time.dtype)
    offset = ""
    if time.dtype.is_signed and maker.rng.random() < 0.3:
        offset = f", offset={maker.rng.choice(['7s', '-3h'] if time.dtype.kind is Kind.TS else [4, -1])!r}"
    if size == every or maker.rng.random() < 0.4:
        return replace(plain(f"si.tumbling({time.name!r}, {size!r}{offset})"), dtype=time.dtype)
    if maker.rng.random() < 0.4 and (size, every) not in (("3s", "2s"), ("1000d", "300d"), (100, 30), (3, 2)):
        return replace(plain(f"si.cumulate({time.name!r}, {size!r}, step={every!r}{offset})"), dtype=time.dtype)
    return replace(plain(f"si.sliding({time.name!r}, {size!r}, every={every!r}{offset})"), dtype=time.dtype)
