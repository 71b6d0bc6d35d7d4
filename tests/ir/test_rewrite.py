"""Traversals: each op once, identity kept, rules run until they rest."""

from __future__ import annotations

from dataclasses import replace

from scalein import col
from scalein.dtypes import I64
from scalein.ir.exprs import Call, Col, Expr, Lit
from scalein.ir.ops import Filter, Limit, Op, Union
from scalein.ir.printer import show_expr
from scalein.ir.rewrite import map_exprs, map_inputs, rewrite, rewrite_expr, substitute, walk_ops
from tests.ir.plans import events, users


def test_a_shared_input_is_visited_once_and_stays_shared() -> None:
    shared = events().limit(5)
    seen: list[Op] = []

    def rule(op: Op) -> Op | None:
        seen.append(op)
        return replace(op, count=3) if isinstance(op, Limit) and op.count == 5 else None

    op = rewrite(shared.union(shared).op, rule)
    assert isinstance(op, Union)
    assert op.inputs[0] is op.inputs[1]
    assert op.inputs[0] == replace(shared.limit(3).op, input=shared.op.input)  # type: ignore[union-attr, call-arg]
    assert [type(one).__name__ for one in seen] == ["Source", "Limit", "Limit", "Union"]


def test_nothing_to_do_gives_the_same_object() -> None:
    op = events().filter(col("flag")).join(users(), on="user").group_by("city").agg(n=col("qty").sum()).op
    assert rewrite(op, lambda _: None) is op
    assert map_inputs(op, lambda below: below) is op
    assert map_exprs(op, lambda expr: expr) is op


def test_inputs_come_before_their_users() -> None:
    ops = list(walk_ops(events().filter(col("flag")).join(users(), on="user").op))
    assert [type(op).__name__ for op in ops] == ["Source", "Filter", "Source", "Join"]


def test_an_answer_is_visited_again() -> None:
    def countdown(op: Op) -> Op | None:
        return replace(op, count=op.count - 1) if isinstance(op, Limit) and op.count else None

    op = rewrite(events().limit(20).op, countdown)
    assert isinstance(op, Limit)
    assert op.count == 0


def test_the_place_is_kept() -> None:
    op = events().filter(col("flag")).op
    assert isinstance(op, Filter)
    changed = map_exprs(op, lambda expr: Lit(True, expr.dtype))
    assert changed.at == op.at
    assert changed.at.line > 0


def test_substitution_is_one_step() -> None:
    x, y = Col("x", I64), Col("y", I64)
    both = Call("add", (x, y), (), I64)
    assert substitute(both, {"x": y, "y": x}) == Call("add", (y, x), (), I64)


def test_rewrite_expr_goes_from_the_leaves_up() -> None:
    def rule(expr: Expr) -> Expr | None:
        match expr:
            case Col("x"):
                return Lit(1, I64)
            case Call("add", (Lit(int() as a), Lit(int() as b))):
                return Lit(a + b, I64)
            case _:
                return None

    total: Expr = Col("x", I64)
    for _ in range(5):
        total = Call("add", (total, Col("x", I64)), (), I64)
    assert rewrite_expr(total, rule) == Lit(6, I64)


def test_every_expression_knows_its_input() -> None:
    join = events().join(users(), on="user").op
    assert [(show_expr(expr), number) for expr, number in join.exprs()] == [("user", 0), ("user", 1)]
