"""Host steps: what pyarrow computes of some expressions, what kernels compute for it before, and what is left.

    s.cast(i64) + 1            pyarrow   #:host0 = s.cast(i64)
                               left      #:host0 + 1
    (x + 1).cast(str)          kernel    #:host0 = x + 1
                               pyarrow   #:host1 = #:host0.cast(str)
    flag & (s.cast(i64) > 3)   kernel    #:host0 = when(~flag).then(None).otherwise(s)
                               pyarrow   #:host1 = #:host0.cast(i64)
                               left      flag & (#:host1 > 3)

pyarrow computes whole columns, and no row may fail that does not ask for the value: where a branch is not taken, or
`and` and `or` are decided. So what can fail there is given null for an argument in those rows: null cannot fail.

Which functions pyarrow computes stands in their declarations (`host=`, in `ir/functions/`).
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import replace

from scalein.dtypes import BOOL
from scalein.ir.exprs import Call, Col, Expr, Lit, Named, columns, type_of
from scalein.ir.functions.registry import can_fail, fallible, has_host, is_host
from scalein.ir.internal_names import internal
from scalein.ir.physical import Host, Node, Pipeline, identity
from scalein.ir.rewrite import Stacked, operands, run_stacked

HOST = internal("host")  # before its number
Guards = tuple[tuple[Expr, bool], ...]  # a row asks where each condition is true, or (False) where each is not


class HostSteps:
    """The steps that some expressions over one input need; shared parts are computed once."""

    def __init__(self, numbers: Iterator[int]) -> None:
        self._numbers = numbers
        self._steps: list[list[Named]] = []  # of a kernel and of pyarrow in turn
        self._step_of: dict[str, int] = {}
        self._made: dict[Expr, Col] = {}
        self._asked: dict[Call, list[tuple[Guards, Col]]] = {}
        self._origins: list[Named] = []

    def over(self, node: Node) -> Node:
        """The input with a column for each part that was computed."""
        for number, made in enumerate(self._steps):
            items = (*identity(node.schema), *made)
            if made and number % 2:
                node = Host(node, None, items, tuple(self._origins))
            elif made:
                node = Pipeline(node, (), items, name="project")
        return node

    def left(self, expr: Expr, guards: Guards = ()) -> Expr:
        """The expression as a kernel computes it after these steps, evaluated only in rows where `guards` hold."""
        return run_stacked(self._left(expr, guards))

    def _left(self, expr: Expr, guards: Guards) -> Stacked[Expr]:
        match expr:
            case Col() | Lit():
                return expr
            case Call() if is_host(expr):
                return (yield self._hosted(expr, guards))
            case Call("and" | "or" as fn, (first, second)):
                first = yield self._left(first, guards)
                # One for each operand: then `a & b` asks for b, and `a & b & c` for c, under guards that begin alike.
                settled = tuple((_not(e) if fn == "and" else e, False) for e in operands(first, fn)) if (
                    has_host(second)) else ()
                args: tuple[Expr, ...] = (first, (yield self._left(second, (*guards, *settled))))
            case Call("if_else", (condition, then, otherwise)):
                condition = yield self._left(condition, guards)
                then = yield self._left(then, (*guards, (condition, True)))
                args = (condition, then, (yield self._left(otherwise, (*guards, (condition, False)))))
            case Call("fill_null", (first, second)):
                first = yield self._left(first, guards)
                missing = Call("is_null", (first,), dtype=BOOL, nullable=False)
                args = (first, (yield self._left(second, (*guards, (missing, True)))))
            case _:
                args = yield from self._all_left(expr.args, guards)
        return replace(expr, args=args)

    def _all_left(self, exprs: tuple[Expr, ...], guards: Guards) -> Generator[Stacked[Expr], Expr, tuple[Expr, ...]]:
        found = []
        for expr in exprs:
            found.append((yield self._left(expr, guards)))
        return tuple(found)

    def _hosted(self, expr: Call, guards: Guards) -> Stacked[Expr]:
        """The column of a call that pyarrow computes."""
        call = _computed(expr)
        args = yield from self._all_left(call.args, guards)
        if not fallible(expr) and not any(map(can_fail, args)):
            guards = ()
        plain = _with_args(expr, args)
        known = self._asked.setdefault(plain, [])
        for others, column in known:  # what is asked for in more rows is computed for these as well
            if guards[: len(others)] == others:
                return column
        given = tuple(self._argument(*pair, guards) for pair in zip(args, call.args, strict=True))
        made = _with_args(expr, given)
        if guards:
            made = replace(made, nullable=True)
        if guards and call.fn == "udf":  # to which null may be a value like others
            asked = self._column(_where_asked(Lit(True, BOOL), guards), Lit(True, BOOL))
            made = Call("if_else", (asked, made, Lit(None, made.dtype)), dtype=made.dtype)
        found = self._column(made, expr)
        known.append((guards, found))
        return found

    def _argument(self, arg: Expr, origin: Expr, guards: Guards) -> Expr:
        """An argument as pyarrow finds it: a column, made by a kernel if need be, or a constant."""
        arg = _where_asked(arg, guards)
        return self._column(arg, origin) if isinstance(arg, Call) else arg

    def _column(self, expr: Expr, origin: Expr) -> Col:
        """A new column, in the first step after all that it reads; `origin` is the user's expression."""
        if expr not in self._made:
            step = 1 + max((self._step_of.get(name, -1) for name in columns(expr)), default=-1)
            step += step % 2 != has_host(expr)
            self._steps += [[] for _ in range(step + 1 - len(self._steps))]
            name = f"{HOST}{next(self._numbers)}"
            self._steps[step].append(Named(name, expr))
            self._step_of[name] = step
            self._origins.append(Named(name, origin))
            self._made[expr] = Col(name, expr.dtype, expr.nullable)
        return self._made[expr]


def _computed(expr: Call) -> Call:
    """The call whose arguments count: of a `try` the one that is tried."""
    if expr.fn != "try":
        return expr
    (tried,) = expr.args
    assert isinstance(tried, Call)
    return tried


def _with_args(expr: Call, args: tuple[Expr, ...]) -> Call:
    call = replace(_computed(expr), args=args)
    return replace(expr, args=(call,)) if expr.fn == "try" else call


def _where_asked(value: Expr, guards: Guards) -> Expr:
    """The value in rows that ask for it, null in the others."""
    null = Lit(None, type_of(value))
    for condition, is_true in reversed(guards):
        branches = (value, null) if is_true else (null, value)
        value = Call("if_else", (condition, *branches), dtype=value.dtype)
    return value


def _not(expr: Expr) -> Call:
    return Call("not", (expr,), dtype=BOOL, nullable=expr.nullable)
