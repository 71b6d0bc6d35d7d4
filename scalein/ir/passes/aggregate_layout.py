"""The layout of an aggregation's table: keys, accumulators, and how outputs come from them. (Direct, hash or radix is
chosen at run time: `exec/direct_addressing.py`, `exec/aggregate.py`.)

Accumulators are shared: `sum`, `mean` and `count` of one column need one sum and one count. The number of
rows is always the first accumulator: it says whether a record has been reached, and stands in for
the count of every column that cannot be null.
"""

from __future__ import annotations

from scalein.ir.aggregates import AGGREGATES
from scalein.ir.exprs import Agg, Named, NamedAgg, type_of
from scalein.ir.tables import Acc, AccKind, Key, Output, Slicing, Table
from scalein.ir.windows import Window


def aggregate_table(keys: tuple[Named, ...], window: Window | None, aggs: tuple[NamedAgg, ...]) -> Table:
    """count, sum(x), mean(x) -> [rows, valid(x), sum(x)] and three outputs."""
    accs: dict[Acc, int] = {Acc(AccKind.ROWS): 0}  # with their numbers

    def number(acc: Acc) -> int:
        return accs.setdefault(acc, len(accs))

    def output(name: str, agg: Agg) -> Output:
        found = AGGREGATES[agg.fn].accumulators(agg, grouped=bool(keys or window))
        return Output(name, agg.fn, type_of(agg), agg.nullable, tuple(map(number, found)))

    outputs = tuple(output(named.name, named.agg) for named in aggs)
    return Table(
        keys=tuple(Key(k.name, type_of(k.expr), k.expr.nullable) for k in keys),
        accs=tuple(accs),
        outputs=outputs,
        slicing=Slicing.NONE if window is None else Slicing.SESSION if window.is_session else Slicing.KEY,
        window=window,
        slice_size=0 if window is None else window.slice_size,
    )


def distinct_table(keys: tuple[Named, ...]) -> Table:
    """The table of a `distinct`: for each key the least number of its rows, which no row has had yet at first."""
    return Table(tuple(Key(k.name, type_of(k.expr), k.expr.nullable) for k in keys), (Acc(AccKind.MIN),), ())
