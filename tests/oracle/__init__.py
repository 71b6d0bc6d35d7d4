"""The reference engine: what every expression, aggregate, operator and stream means, in plain Python, a row at a time.

It is written for readers and shares no code with the engine beyond the logical plan: no pyarrow.compute, no numpy,
nothing of what runs in production. `tests/test_oracle.py` checks that. Everything is computed anew and by brute force.

    values.py      Arrow <-> Python values; which values are equal, and which comes first
    functions.py   FUNCTIONS: a Python function for each scalar function; casts.py has casts, to and from text too
    udfs.py        compiled user functions
    exprs.py       expressions over one row, and which of them fail there
    aggregates.py  AGGREGATES: a Python function for each aggregate
    relations.py   run(op): each operator over whole inputs
    streams.py     run(flow, events): event time, late rows, windows as they close, changes; joins of streams

A new scalar function is one def or one line in functions.py, a new aggregate one in aggregates.py.
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from scalein.ir.ops import Source
from scalein.ir.rewrite import walk_ops
from tests.oracle.exprs import evaluate
from tests.oracle.relations import run
from tests.oracle.values import rows_of

__all__ = ["collect", "evaluate", "run"]


def collect(flow: Any, data: object = None) -> pa.Table:
    """What `flow.collect(data)` means."""
    if data is None:
        return run(flow.op)
    from scalein import from_arrow

    unbound = [op for op in walk_ops(flow.op) if isinstance(op, Source) and op.data is None]
    return run(flow.op, {id(op): rows_of(from_arrow(data).op.data.read(), op.columns) for op in unbound})
