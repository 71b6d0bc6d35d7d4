"""verify_ops: every promise, broken once."""

from __future__ import annotations

from dataclasses import replace

import pytest

import scalein as si
from scalein import col
from scalein.dtypes import BOOL, F64, I32, I64, STR
from scalein.errors import InternalError
from scalein.ir.exprs import Agg, Call, Col, Lit, Named, NamedAgg
from scalein.ir.ops import Aggregate, Filter, Join, Limit, Op, OuterJoin, Project, Source, Union, Watermark
from scalein.ir.verify import verify_ops
from scalein.ir.windows import Window
from tests.ir.plans import events, users

SOURCE = events().op
USERS = users().op
QTY, USER, TIME = Col("qty", I64), Col("user", STR), Col("time", SOURCE.schema["time"].dtype, False)
assert isinstance(SOURCE, Source)


def call(fn: str, *args: Col | Lit | Call) -> Call:
    return Call(fn, args, (), BOOL)


@pytest.mark.parametrize(("op", "wrong"), [
    (Filter(SOURCE, Col("nope", BOOL)), "no column 'nope' in its input"),
    (Filter(SOURCE, Col("qty", BOOL)), "column 'qty' is bool, not i64"),
    (Filter(SOURCE, Col("flag", BOOL, nullable=False)), "column 'flag' can be null and is read as if it could not"),
    (Filter(SOURCE, Col("flag")), "flag has no type"),
    (Filter(SOURCE, QTY), "the predicate is i64, not bool"),
    (Filter(SOURCE, call("gt", QTY, Lit(1.0, F64))), "the right side of qty > 1.0 is f64, not i64"),
    (Filter(SOURCE, call("gt", QTY, Lit(1.0, I64))), "literal 1.0 of type i64"),
    (Filter(SOURCE, call("and", Col("flag", BOOL), QTY)), "a part of flag & qty is i64, not bool"),
    (Filter(SOURCE, call("frobnicate", QTY)), "no function 'frobnicate'"),
    (Filter(SOURCE, call("eq", QTY)), "eq with 1 arguments"),
    (Filter(SOURCE, call("if_else", Col("flag", BOOL), Lit(True, BOOL), QTY)), "a branch of"),
    (Project(SOURCE, ()), "it gives no column"),
    (Project(SOURCE, (Named("a", QTY), Named("a", USER))), "two columns are called 'a'"),
    (Limit(SOURCE, -1), "count is -1"),
    (Watermark(Project(SOURCE, (Named("time", TIME),)), "time2", 3), "no column 'time2' in its input"),
    (Union((SOURCE, USERS)), "its inputs have columns"),
    (Join(SOURCE, USERS, (QTY,), (Col("age", I32),), "inner"), "key age of the right side is i32, not i64"),
    (Join(SOURCE, USERS, (USER,), (USER,), "outer"), "how is 'outer'"),
    (Join(SOURCE, USERS, (USER,), (USER,), "cross"), "a cross join has keys"),
    (OuterJoin(SOURCE, USERS, (USER,), (USER,), "left"), "how is 'left'"),
    (OuterJoin(SOURCE, USERS, (USER, USER), (USER, USER), "outer"), "its left keys are not different columns"),
    (Join(SOURCE, USERS, (USER,), (), "inner"), "1 keys on the left and 0 on the right"),
    (Join(SOURCE, USERS, (USER,), (USER,), "semi", (("city", "city"),)), "a semi join keeps nothing"),
    (Join(SOURCE, USERS, (USER,), (USER,), "inner", (("qty", "age"),)), "two columns are called 'qty'"),
    (Aggregate(SOURCE, (), Window(TIME, 0, 1), ()), "a window of 0 every 1"),
    (Aggregate(SOURCE, (), None, (NamedAgg("n", Agg("sum", (), I64)),)), "aggregate sum with 0 arguments"),
    (replace(SOURCE, columns=("qty", "gone")), "no column 'gone' in its data"),
])  # fmt: skip
def test_a_broken_promise_is_named(op: Op, wrong: str) -> None:
    with pytest.raises(InternalError) as raised:
        verify_ops(op)
    assert wrong in raised.value.what
    assert "Source" in raised.value.facts["plan"]


def test_a_broken_op_is_found_below_others() -> None:
    broken = Limit(Filter(SOURCE, QTY), 3)
    with pytest.raises(InternalError, match="Filter: the predicate is i64, not bool"):
        verify_ops(broken)


def test_a_sound_plan_passes() -> None:
    flow = events().filter(col("flag")).join(users(), on="user").group_by("city").agg(n=si.count())
    verify_ops(flow.op)
