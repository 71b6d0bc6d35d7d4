"""verify_program: every promise of the fused form, broken once."""

from __future__ import annotations

from dataclasses import replace

import pytest

import scalein as si
from scalein import col
from scalein.compiler import compile_flow
from scalein.dtypes import BOOL, I32, I64, STR, Field, Schema
from scalein.errors import InternalError
from scalein.ir.exprs import Call, Col, Lit, Named
from scalein.ir.physical import Host, JoinBuild, Limit, Node, OuterJoin, Pipeline, Scan, Union, WindowAggregate
from scalein.ir.stages import FilterStep, Probe, ProjectStep
from scalein.ir.tables import Acc, AccKind
from scalein.ir.verify import verify_program
from tests.ir.plans import events, users

EVENTS, USERS = Scan(events().op), Scan(users().op)  # type: ignore[arg-type]
QTY, USER, FLAG = Col("qty", I64), Col("user", STR), Col("flag", BOOL)
ITEMS = (Named("qty", QTY),)
QTYS = Schema((Field("qty", I64),))
UPPER = Call("upper", (USER,), (), STR)
TABLE = JoinBuild(USERS, (USER,), ("age",))
PROBE = Probe(0, (USER,), "inner", (("age", "age"),))
GROUPED = compile_flow(events().group_by("user", si.tumbling("time", "10s")).agg(s=col("qty").sum()).op)
assert isinstance(GROUPED, WindowAggregate)


def joined(probe: Probe = PROBE, table: JoinBuild = TABLE, *items: Named) -> Pipeline:
    return Pipeline(EVENTS, (probe,), items or ITEMS, joins=((0, table),))


def grouped(**changes: object) -> WindowAggregate:
    return replace(GROUPED, table=replace(GROUPED.table, **changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(("node", "wrong"), [
    (Pipeline(EVENTS, (FilterStep(Col("nope", BOOL)),), ITEMS), "no column 'nope' in its input"),
    (Pipeline(EVENTS, (FilterStep(QTY),), ITEMS), "a predicate is i64, not bool"),
    (Pipeline(EVENTS, (), (Named("a", Col("qty", I32)),)), "column 'qty' is i32, not i64"),
    (Pipeline(EVENTS, (), (*ITEMS, *ITEMS)), "two columns are called 'qty'"),
    (Pipeline(EVENTS, (), ()), "it gives no column"),
    (Pipeline(EVENTS, (ProjectStep((Named("q", QTY),)),), ITEMS), "no column 'qty' in its input"),
    (Pipeline(EVENTS, (ProjectStep(ITEMS), FilterStep(FLAG)), ITEMS), "no column 'flag' in its input"),
    (Pipeline(EVENTS, (ProjectStep((*ITEMS, *ITEMS)),), ITEMS), "two columns are called 'qty'"),
    (Pipeline(EVENTS, (), (Named("u", UPPER),)), "user.str.upper() is pyarrow's to compute, and stands in a kernel"),
    (Pipeline(EVENTS, (PROBE,), ITEMS), "it probes joins [0] and has tables []"),
    (Pipeline(EVENTS, (), ITEMS, joins=((0, TABLE),)), "it probes joins [] and has tables [0]"),
    (Pipeline(EVENTS, (PROBE, PROBE), ITEMS, joins=((0, TABLE), (0, TABLE))), "joins [0, 0] and has tables [0, 0]"),
    (joined(replace(PROBE, keys=(QTY,))), "key user of the right side is str, not i64"),
    (joined(replace(PROBE, keys=(USER, USER))), "2 keys on the left and 1 on the right"),
    (joined(replace(PROBE, how="semi")), "a semi join keeps nothing"),
    (joined(replace(PROBE, keep=(("city", "city"),))), "no column 'city' in join0"),
    (joined(PROBE, replace(TABLE, keys=(Col("name", STR),))), "no column 'name' in its input"),
    (joined(replace(PROBE, how="left"), TABLE, Named("age", Col("age", I32, nullable=False))), "can be null"),
    (OuterJoin(joined(), 1, (None,), QTYS), "it has no outer table join1"),
    (OuterJoin(joined(), 0, (None,), QTYS), "it has no outer table join0"),
    (OuterJoin(joined(PROBE, replace(TABLE, is_outer=True)), 0, (None,), QTYS), "nothing marks the rows of join0"),
    (OuterJoin(joined(replace(PROBE, marks=True), replace(TABLE, is_outer=True)), 0, ("city",), QTYS),
     "no column 'city' in join0"),
    (OuterJoin(joined(replace(PROBE, marks=True), replace(TABLE, is_outer=True)), 0, (None,), USERS.schema),
     "an input has columns"),
    (grouped(keys=()), "1 keys for a table of 0"),
    (grouped(keys=(replace(GROUPED.table.keys[0], dtype=I64),)), "key 'user' is str, not i64"),
    (grouped(keys=(replace(GROUPED.table.keys[0], nullable=False),)), "key 'user' can be null, but its layout"),
    (grouped(accs=GROUPED.table.accs[:2]), "output 's' is made of accumulators (1, 2) of 2"),
    (grouped(accs=GROUPED.table.accs[1:], outputs=()), "the first accumulator does not count rows"),
    (grouped(accs=(*GROUPED.table.accs, Acc(AccKind.MAX, Col("gone", I64)))), "no column 'gone' in its input"),
    (grouped(slice_size=3000), "a window of 10000 every 10000 in slices of 3000"),
    (Host(EVENTS, None, (Named("u", Call("upper", (Col("name", STR),), (), STR)),)), "no column 'name' in its input"),
    (Limit(EVENTS, -1), "count is -1"),
    (Union((EVENTS, USERS), EVENTS.schema), "an input has columns ['user', 'city', 'age']"),
    (Union((Pipeline(EVENTS, (), ITEMS),), Schema((Field("qty", I32, True),))),
     "column 'qty' of an input is i64, not i32"),
    (Limit(Pipeline(EVENTS, (FilterStep(Lit(1, I64)),), ITEMS), 3), "Pipeline: a predicate is i64, not bool"),
    (joined(PROBE, replace(TABLE, input=Limit(USERS, -2))), "Limit: count is -2"),
])  # fmt: skip
def test_a_broken_promise_is_named(node: Node, wrong: str) -> None:
    with pytest.raises(InternalError) as raised:
        verify_program(node)
    assert wrong in raised.value.what
    assert "scan input" in raised.value.facts["plan"]


def test_sound_programs_pass() -> None:
    verify_program(GROUPED)
    verify_program(joined(PROBE, TABLE, Named("age", Col("age", I32))))
    verify_program(joined(replace(PROBE, how="anti", keep=())))
    verify_program(Host(EVENTS, None, (Named("u", UPPER),)))


def test_one_join_may_stand_in_two_kernels() -> None:
    flow = events().join(users(), on="user")
    verify_program(compile_flow(flow.union(flow).op))
    verify_program(compile_flow(flow.join(flow.select("user", q="qty"), on="user").op))
