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

from scalein.errors import NOWHERE
from tests.oracle.exprs import evaluate
from tests.oracle.relations import run

__all__ = ["collect", "evaluate", "run"]


def collect(flow: Any, data: object = None) -> pa.Table:
    """What `flow.collect(data)` means."""
    from scalein.api.sources import bind

    return run(bind(flow.op, data, NOWHERE))
