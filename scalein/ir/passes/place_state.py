"""place_state: a table for each aggregation: keys, accumulators, and how outputs come from them.

Accumulators are shared: `sum`, `mean` and `count` of one column need one sum and one count. The number of
rows is always the first accumulator: it says whether a record has been reached, and stands in for
the count of every column that cannot be null.
"""

from __future__ import annotations

from collections.abc import Callable
from math import gcd

from scalein.dtypes import BOOL, I64
from scalein.ir import ops
from scalein.ir.exprs import Agg, Call, Expr, Lit, Named, NamedAgg, type_of
from scalein.ir.functions.registry import can_fail
from scalein.ir.tables import Acc, AccKind, Key, Output, Slicing, Table

MAX_RING_SLICES = 16  # more slices a window go through keys: a record would not fit a few cache lines


def place_state(keys: tuple[Named, ...], window: ops.Window | None, aggs: tuple[NamedAgg, ...]) -> Table:
    """count, sum(x), mean(x) -> [rows, valid(x), sum(x)] and three outputs."""
    accs: list[Acc] = [Acc(AccKind.ROWS)]

    def number(acc: Acc) -> int:
        if acc not in accs:
            accs.append(acc)
        return accs.index(acc)

    outputs = tuple(Output(a.name, a.agg.fn, type_of(a.agg), a.agg.nullable, _accs(a.agg, bool(keys or window), number))
                    for a in aggs)
    return Table(
        keys=tuple(Key(k.name, type_of(k.expr), k.expr.nullable) for k in keys),
        accs=tuple(accs),
        outputs=outputs,
        slicing=Slicing.NONE if window is None else Slicing.KEY,
        window=window,
        slice_size=0 if window is None else gcd(window.size, window.every),
    )


def _accs(agg: Agg, grouped: bool, number: Callable[[Acc], int]) -> tuple[int, ...]:
    """The accumulators an aggregate is finished from; the second, if any, counts its values.

    A group that exists has a row, so a column that cannot be null needs no count to tell "none".
    """
    if agg.fn == "count":
        return (number(Acc(AccKind.ROWS)),)
    arg = agg.args[0]
    # What can fail is computed even where it cannot be null: whether it fails must not depend on how the data comes.
    values = Acc(AccKind.VALID, arg) if arg.nullable or can_fail(arg) else Acc(AccKind.ROWS)
    match agg.fn:
        case "count_valid":
            return (number(values),)
        case "sum" | "min" | "max":
            kind = {"min": AccKind.MIN, "max": AccKind.MAX}.get(agg.fn) or _sum_kind(arg)
            main = number(Acc(kind, arg))
            return (main,) if grouped and not arg.nullable else (main, number(values))
        case "mean":
            return (number(Acc(_sum_kind(arg), arg)), number(values))
        case "var" | "std":
            return (number(Acc(AccKind.MOMENTS, arg)),)
        case "first" | "last":
            return (number(Acc(AccKind(agg.fn), arg)),)
        case "n_unique":
            return (number(Acc(AccKind.DISTINCT, arg)),)
        case "approx_n_unique":
            return (number(Acc(AccKind.SKETCH, _hashed(arg))),)
        case "quantile" | "approx_quantile":
            coarse = ("coarse",) if agg.fn == "approx_quantile" else ()
            log = number(Acc(AccKind.VALUES, arg, params=coarse))
            return (number(Acc(AccKind.QUANTILE, arg, params=(*agg.params, *coarse))), log)
        case "collect":
            return (number(Acc(AccKind.LIST, arg)),)
        case "top_k":
            return (number(Acc(AccKind.TOP, arg, agg.args[1], agg.params)),)
        case _:
            return (number(Acc(AccKind(agg.fn), arg, agg.args[1])),)


def place_first_rows(keys: tuple[Named, ...]) -> Table:
    """The table of a `distinct`: for each key the least number of its rows, which no row has had yet at first."""
    return Table(tuple(Key(k.name, type_of(k.expr), k.expr.nullable) for k in keys), (Acc(AccKind.MIN),), ())


def _hashed(arg: Expr) -> Expr:
    """The stable hash of a value; null stays null, so that it is not counted."""
    hashed = Call("hash", (arg,), (), I64, False)
    if not arg.nullable:
        return hashed
    return Call("if_else", (Call("is_not_null", (arg,), (), BOOL, False), hashed, Lit(None, I64)), (), I64)


def _sum_kind(arg: Expr) -> AccKind:
    return AccKind.FSUM if type_of(arg).is_float else AccKind.ISUM
