"""Flows and sources that the tests of passes share."""

from __future__ import annotations

from collections.abc import Callable

import pyarrow as pa

import scalein as si
from scalein.api.flow import Flow
from scalein.ir.ops import Op
from scalein.ir.printer import dump
from scalein.ir.verify import verify_ops

EVENTS = pa.schema([
    pa.field("user", pa.string()),
    pa.field("kind", pa.int8(), nullable=False),
    pa.field("qty", pa.int64()),
    pa.field("price", pa.float64()),
    pa.field("flag", pa.bool_()),
    pa.field("time", pa.timestamp("ms"), nullable=False),
])  # fmt: skip
USERS = pa.schema([pa.field("user", pa.string()), pa.field("city", pa.string()), pa.field("age", pa.int32())])


def events() -> Flow:
    return si.flow(EVENTS)


def users() -> Flow:
    return si.flow(USERS)


def before_and_after(flow: Flow, change: Callable[[Op], Op]) -> str:
    """Both plans as text; checks what every pass promises on the way."""
    after = change(flow.op)
    verify_ops(after)
    assert after.schema == flow.op.schema
    assert change(after) == after, "a second run changes the plan again"
    return f"{dump(flow.op)}\n\n{change.__name__} ->\n\n{dump(after)}"
