"""From what the user wrote to typed expressions: names looked up, types chosen, implicit casts made visible.

    price * 2 > limit   ->   price * 2.0 > limit.cast(f64)         with price: f64, limit: i32

`flow.py` resolves every expression against its input's schema before it builds an op, so whatever is wrong is
raised at the user's call.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from scalein.dtypes import Schema
from scalein.errors import BadArgument, SourceLoc, UnknownColumn, WrongType, guess
from scalein.ir import aggregates
from scalein.ir.exprs import (
    Agg,
    AggregateResult,
    Call,
    Col,
    Expr,
    Lit,
    OverResult,
    args_of,
    branches,
    post_order,
    walk,
)
from scalein.ir.functions.nested import is_struct
from scalein.ir.functions.registry import ANY, REGISTRY
from scalein.ir.internal_names import is_internal
from scalein.ir.printer import show_agg, show_expr
from scalein.ir.unify import Refused, type_literal

_ALL_COLUMNS = "with_columns(...) keeps all columns; select(*flow.columns, ...) names them"
_MAX_SHOWN = 24


@dataclass(frozen=True, slots=True)
class Scope:
    """What an expression is resolved against: the input's columns, and the user's call for errors.

    `results` are the columns that aggregates have become, and what is computed over other rows; elsewhere these are
    refused.
    """

    schema: Schema
    step: str
    at: SourceLoc
    results: Mapping[Agg | OverResult, str] = field(default_factory=dict)


def resolve(expr: Expr, scope: Scope) -> Expr:
    """The expression with types and explicit casts; raises `UnknownColumn` or `WrongType`."""
    with explained(expr, scope):
        return type_literal(_resolve(expr, scope))


def resolve_agg(agg: Agg, scope: Scope, *, grouped: bool) -> Agg:
    """The aggregate with types; `grouped` says that there are keys or a window, so that no group is empty."""
    args = tuple(resolve(arg, scope) for arg in agg.args)
    where = None if agg.where is None else resolve(agg.where, scope)
    with explained(agg, scope):
        return aggregates.typed(agg, args, where, grouped)


def column(name: str, scope: Scope, hint: str | None = None) -> Col:
    """A typed reference to a column of the input; `hint` is for a name that is like none of them."""
    field = scope.schema.get(name)
    if field is None:
        raise UnknownColumn(f"no column {name!r} in the input of {scope.step}", at=scope.at, has=shown(scope.schema),
                            hint=_ALL_COLUMNS if name == "*" else
                            _as_field(name, scope.schema) or _as_expression(name, scope.schema)
                            or guess(name, scope.schema.names) or hint)
    return Col(name, field.dtype, field.nullable)


def _as_field(name: str, schema: Schema) -> str | None:
    """A hint for a field of a struct, written with points as in SQL."""
    whole, *parts = name.split(".")
    field = schema.get(whole)
    if not parts or field is None or not is_struct(field.dtype):
        return None
    fields = "".join(f".struct.field({part!r})" for part in parts)
    return f"a field of a struct is written col({whole!r}){fields}"


def _as_expression(name: str, schema: Schema) -> str | None:
    """A hint for text that looks like SQL where a column's name is wanted."""
    if not any(sign in name for sign in "<>=+*/"):
        return None
    known = [word for word in re.findall(r"\w+", name) if word in schema.names]
    close = None if known else guess(name, schema.names)
    return close or f'a str is a column\'s name; write an expression as in col("{known[0] if known else "x"}") > 1'


def shown(schema: Schema) -> str:
    """The columns there are, for errors; of a wide table the first ones."""
    fields = tuple(field for field in schema if not is_internal(field.name))
    rest = len(fields) - _MAX_SHOWN
    return f"{Schema(fields[:_MAX_SHOWN])!r}" + (f", and {rest} more" if rest > 0 else "")


def _resolve(expr: Expr, scope: Scope) -> Expr:
    """As `resolve`, but a plain constant stays untyped."""
    done: dict[int, Expr] = {}
    for node in post_order(expr, _given):
        if isinstance(node, Call):
            with explained(node, scope):
                done[id(node)] = REGISTRY[node.fn].rule(node, tuple(done[id(part)] for part in _given(node)))
        elif isinstance(node, AggregateResult | OverResult):
            done[id(node)] = column(_result(node, scope), scope)
        elif isinstance(node, Col):
            is_known = scope.schema.get(node.name) is not None
            done[id(node)] = column(node.name, scope, None if is_known else _text_hint(node, expr, scope.step))
        else:
            done[id(node)] = node
    return done[id(expr)]


def _text_hint(node: Col, expr: Expr, step: str) -> str | None:
    """A hint for a text that is a new column, or among the arguments of a function that takes any number of columns."""
    is_new = node is expr and step == "with_columns"
    is_among = any(isinstance(each, Call) and REGISTRY[each.fn].arity == ANY and node in each.args
                   for each in walk(expr))
    return f"a str is a column's name here; the text is written si.lit({node.name!r})" if is_new or is_among else None


def nested_aggregate(node: AggregateResult, at: SourceLoc) -> BadArgument:
    """The error of an aggregate where rows are meant."""
    return BadArgument(f"{node.name} is an aggregate, inside of another or of its filter", at=at,
                       hint="aggregate in two steps: the second over what the first gives, perhaps joined to the rows")


def _result(node: AggregateResult | OverResult, scope: Scope) -> str:
    """The column that an aggregate has become."""
    if isinstance(node, OverResult):
        if node in scope.results:
            return scope.results[node]
        raise BadArgument(f"{scope.step} takes nothing that is computed over other rows", at=scope.at, found=node.name,
                          hint=f"compute it first: with_columns(x=...).{scope.step.split()[0]}(...)")
    if node.agg in scope.results:
        return scope.results[node.agg]
    if scope.step == "agg":
        raise nested_aggregate(node, scope.at)
    if node.agg.fn not in aggregates.AGGREGATES:
        raise BadArgument(f"{node.name} is of rows in an order", at=scope.at,
                          hint=f'say of which: {node.name}.over("key", order_by="time")')
    raise BadArgument(f"{node.name} is an aggregate, but {scope.step} works row by row", at=scope.at,
                      hint="aggregates go into group_by(...).agg(...); group_by() takes all rows as one group; "
                      '.over("key") gives each row the value of its group')


def _given(expr: Expr) -> tuple[Expr, ...]:
    """The arguments of the rule that types an expression."""
    match expr:
        case Call("if_else"):  # all branches of a chain at once, so that every value meets every other
            return branches(expr)
        case Call("try", (Call() as tried,)):
            return tried.args
        case _:
            return args_of(expr)


@contextmanager
def explained(written: Expr | Agg, scope: Scope) -> Iterator[None]:
    """Turns a refusal into the user's error, with the expression and the line that wrote it."""
    try:
        yield
    except Refused as refused:
        at = scope.at if isinstance(written, Col | Lit) or not written.at.line else written.at
        shown = show_agg(written) if isinstance(written, Agg) else show_expr(written)
        raise WrongType(refused.what, at=at, step=scope.step, expr=shown, hint=refused.hint) from None
