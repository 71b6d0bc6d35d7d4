"""Steps in which other rows of a key or a time decide: over, the first rows of groups, joins of streams, ttl."""

from __future__ import annotations

from scalein.dtypes import DType, Kind
from tests.campaign.exprs import Known
from tests.campaign.maker import Made, Maker, name
from tests.campaign.spec import Item, Node, Part, Step, plain
from tests.campaign.takes import is_any

_PLACES = [("si.row_number()", "row_number"), ("si.rank()", "rank"), ("si.dense_rank()", "dense_rank")]


def over(maker: Maker) -> Made | None:
    """A column over other rows; rows that are equal in the order are in the source's."""
    exact = _exact(maker)
    if not maker.ordered or not exact:
        return None
    rng = maker.rng
    keys = rng.sample(exact, min(len(exact), rng.choice([0, 1, 1, 2])))
    by, of, new = rng.choice(exact), rng.choice(exact), maker.new_name()
    frame = ""
    match rng.choice(["place", "shift", "aggregate", "aggregate", "whole"]):
        case "place":
            call, _ = rng.choice(_PLACES)
            known = Known(new, DType(Kind.I64))
        case "shift":
            call, known = f"col({of.name!r}).{rng.choice(['lag', 'lead'])}({rng.choice([1, 2, 7])})", _named(of, new)
        case what:
            call, known = _aggregate(maker, of, new)
            if what == "whole":
                items = [Item(f"{new}=", plain(f"{call}.over({', '.join(repr(key.name) for key in keys)})"))]
                return Step((Part("with_columns", tuple(items)),)), [*maker.known, known]
            frame = rng.choice(["", f", rows={rng.choice([1, 2, 5, 100])}"])
            if _is_time(by) and rng.random() < 0.5:
                frame = f", within={_span(by, rng.choice([0, 3, 50]))}"
    shown = ", ".join([*(repr(key.name) for key in keys), f"order_by={by.name!r}"])
    direction = ", descending=True" if not frame.startswith(", within") and rng.random() < 0.2 else ""
    made = Step((Part("with_columns", (Item(f"{new}=", plain(f"{call}.over({shown}{frame}{direction})")),)),))
    return made, [*maker.known, known]


def _aggregate(maker: Maker, of: Known, new: str) -> tuple[str, Known]:
    fns = ["count", "first", "last", "n_unique"]
    if not of.dtype.is_float:  # which of 0.0 and -0.0 is the least is nobody's promise
        fns += ["min", "max"]
    fn = maker.rng.choice(fns)
    counts = fn in ("count", "n_unique")
    return f"col({of.name!r}).{fn}()", Known(new, DType(Kind.I64)) if counts else _named(of, new)


def top_of_groups(maker: Maker) -> Made | None:
    exact = _exact(maker)
    if not maker.ordered or not exact:
        return None
    keys = maker.rng.sample(exact, min(len(exact), maker.rng.choice([0, 1, 1, 2])))
    items, known = [name(key.name) for key in keys], list(maker.known)
    times = [column for column in exact if _is_time(column)]
    if times and maker.rng.random() < 0.4 and not {"window_start", "window_end"} & {each.name for each in known}:
        time = maker.rng.choice(times)
        items.append(Item("", plain(f"si.tumbling({time.name!r}, {_span(time, 5)})")))
        known += [Known(end, time.dtype) for end in ("window_start", "window_end")]
    by = maker.rng.choice(exact).name
    picked = (Item("", plain(str(maker.rng.choice([1, 2, 9])))), name(by))
    maker.ordered = False
    return Step((Part("group_by", tuple(items), len(items)),
                 Part(maker.rng.choice(["top_k", "bottom_k"]), picked, 2))), known


def distinct_in_time(maker: Maker) -> Made | None:
    exact = _exact(maker)
    times = [column for column in exact if _is_time(column)]
    if not maker.ordered or not times:
        return None
    time = maker.rng.choice(times)
    keys = maker.rng.sample(exact, min(len(exact), maker.rng.choice([1, 1, 2])))
    how = Item(f"{maker.rng.choice(['within', 'ttl'])}=", plain(_span(time, maker.rng.choice([1, 4, 60]))))
    items = (*(name(key.name) for key in keys), how)
    return Step((_watermark(time), Part("distinct", items, len(items)))), maker.known


def group_with_ttl(maker: Maker) -> Made | None:
    exact = _exact(maker)
    times = [column for column in exact if _is_time(column)]
    if not times or {"window_start", "window_end"} & {column.name for column in maker.known}:
        return None
    time, of, new = maker.rng.choice(times), maker.rng.choice(exact), [maker.new_name() for _ in range(2)]
    keys = maker.rng.sample(exact, min(len(exact), maker.rng.choice([1, 1, 2])))
    fn = maker.rng.choice(["count", "n_unique", *([] if of.dtype.is_float else ["min", "max"])])
    aggs = (Item(f"{new[0]}=", Node("si.count()", fn="count")), Item(f"{new[1]}=", plain(f"col({of.name!r}).{fn}()")),
            Item("ttl=", plain(_span(time, maker.rng.choice([2, 9, 60])))))
    maker.ordered = False
    known = [Known(key.name, key.dtype, not key.dtype.is_float) for key in keys]
    return (Step((_watermark(time), Part("group_by", tuple(name(key.name) for key in keys), len(keys)),
                  Part("agg", aggs, len(aggs)))),
            [*known, Known(new[0], DType(Kind.I64)), _named(of, new[1])])


def stream_join(maker: Maker) -> Made | None:
    """The flow with itself, by a key and a time."""
    exact = _exact(maker)
    times = [column for column in exact if _is_time(column)]
    keys = [column for column in exact if column not in times[:1]]
    if not times or not keys or maker.joins >= 2:
        return None
    rng = maker.rng
    time, key = times[0], rng.choice(keys)
    of, new, at = rng.choice(exact), maker.new_name(), maker.new_name()
    right = f"flow.select({key.name!r}, {at}={time.name!r}, {new}={of.name!r}).with_watermark({at!r}, {_span(time, 0)})"
    known = list(maker.known)
    if maker.ordered and rng.random() < 0.3:
        other = f"flow.select({key.name!r}, {time.name!r}, {new}={of.name!r})"
        strategy = rng.choice(["backward", "forward", "nearest"])
        items = [Item("", plain(other)), Item("on=", plain(repr(time.name))), Item("by=", plain(repr(key.name))),
                 Item("strategy=", plain(repr(strategy)))]
        if rng.random() < 0.5:
            items.append(Item("tolerance=", plain(_span(time, rng.choice([1, 20])))))
        parts = [Part("join_asof", tuple(items), len(items))]
    else:
        how = rng.choice(["inner", "left", "right", "outer", "semi", "anti"])
        low, high = sorted((rng.choice([-20, -2, 0]), rng.choice([0, 1, 30])))
        bound = rng.choice([f"between=({_span(time, low)}, {_span(time, high)})", f"keep={_span(time, 5)}",
                            "keep='forever'"])
        items = [Item("", plain(right)), Item("on=", plain(repr(key.name))), Item("how=", plain(repr(how))),
                 Item("", plain(bound))]
        parts = [_watermark(time), Part("join", tuple(items), len(items))]
        known += [] if how in ("semi", "anti") else [_named(time, at)]
    maker.joins += 1
    maker.ordered = False
    return Step(tuple(parts)), [*known, _named(of, new)]


def _exact(maker: Maker) -> list[Known]:
    return [column for column in maker.known if column.is_exact and is_any(column.dtype)]


def _is_time(column: Known) -> bool:
    return column.dtype.kind is Kind.TS or (column.dtype.is_int and column.dtype.is_signed)


def _named(column: Known, new: str) -> Known:
    return Known(new, column.dtype, column.is_exact, column.is_tame)


def _span(time: Known, length: int) -> str:
    return repr(f"{length}s" if time.dtype.kind is Kind.TS else length)


def _watermark(time: Known) -> Part:
    return Part("with_watermark", (name(time.name), Item("", plain(_span(time, 3)))), 2)
