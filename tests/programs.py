"""Hypothesis strategies for programs: typed expressions over a schema, aggregates, whole flows.

Expressions of one type are built from columns and constants of that type, so that few are refused; mixed types have
tests of their own. `exp`, `log` and `pow` are left out of nested expressions: two right answers may differ in the last
bit, and a comparison above would make that a difference in rows. Strategies are cached: making one costs more than
drawing from it, and each occurs many times in those of greater depth.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from functools import cache

import pyarrow as pa
from hypothesis import strategies as st

import scalein as si
from scalein import col, when
from scalein.api.column import Column
from scalein.api.flow import Flow
from scalein.dtypes import DType, Kind, alike, from_arrow_type
from scalein.ir.exprs import Lit
from tests import strategies as data

BOOL = pa.bool_()


def constant(value: object, type_: pa.DataType) -> Column:
    """A typed constant from a physical value: an int for times."""
    return Column(Lit(value, from_arrow_type(type_)))


def constants(type_: pa.DataType) -> st.SearchStrategy[Column]:
    """Constants of a type, null among them."""
    values = data.values(from_arrow_type(type_), extreme=False)
    return (values | values | values | st.none()).map(lambda value: constant(value, type_))


def columns_of(schema: pa.Schema, type_: pa.DataType) -> list[Column]:
    """The columns of a schema that have this type; strings of every form are one type."""
    want = from_arrow_type(type_)
    found = [(field.name, from_arrow_type(field.type)) for field in schema]
    return [col(name) for name, has in found if alike(has, want)]


@cache
def leaves(schema: pa.Schema, type_: pa.DataType) -> st.SearchStrategy[Column]:
    """A column of the type if there is one, sometimes a constant."""
    found = columns_of(schema, type_)
    if not found:
        return constants(type_)
    return st.sampled_from(found) | st.sampled_from(found) | constants(type_)


@cache
def exprs(schema: pa.Schema, type_: pa.DataType, depth: int = 3) -> st.SearchStrategy[Column]:
    """Expressions of a type over a schema, at most `depth` calls deep."""
    if depth == 0:
        return leaves(schema, type_)
    below = exprs(schema, type_, depth - 1)
    made = [leaves(schema, type_), *_any_type(schema, below, depth)]
    dtype = from_arrow_type(type_)
    if dtype.kind is Kind.BOOL:
        made += _conditions(schema, below, depth)
    elif dtype.is_number:
        made += _numbers(below, dtype)
    elif dtype.is_decimal:
        made += _decimals(below, type_)
    elif dtype.is_string:
        made += _texts(below)
    elif dtype.kind in (Kind.TS, Kind.DUR):
        made += _times(schema, below, dtype, depth)
    return st.one_of(made)


def _any_type(schema: pa.Schema, below: st.SearchStrategy[Column], depth: int) -> list[st.SearchStrategy[Column]]:
    condition = exprs(schema, BOOL, depth - 1)
    return [
        st.builds(lambda a, b: a.fill_null(b), below, below),
        st.builds(lambda c, a, b: when(c).then(a).otherwise(b), condition, below, below),
        st.builds(lambda c, d, a, b: when(c).then(a).when(d).then(b), condition, condition, below, below),
    ]


_ARITHMETIC: list[Callable[[Column, Column], Column]] = [
    lambda a, b: a + b,
    lambda a, b: a - b,
    lambda a, b: a * b,
    lambda a, b: a // b,
    lambda a, b: a % b,
]
COMPARISONS: list[Callable[[Column, Column], Column]] = [
    lambda a, b: a == b,
    lambda a, b: a != b,
    lambda a, b: a < b,
    lambda a, b: a <= b,
    lambda a, b: a > b,
    lambda a, b: a >= b,
]
_FLOAT_FUNCTIONS: list[Callable[[Column], Column]] = [
    abs,
    lambda a: -a,
    lambda a: a.floor(),
    lambda a: a.ceil(),
    lambda a: a.sqrt(),
    lambda a: a.round(),
]


def _numbers(below: st.SearchStrategy[Column], dtype: DType) -> list[st.SearchStrategy[Column]]:
    arithmetic = [*_ARITHMETIC, *([lambda a, b: a / b] if dtype.is_float else [])]
    made = [st.builds(lambda f, a, b: f(a, b), st.sampled_from(arithmetic), below, below)]
    if dtype.is_float:
        made.append(st.builds(lambda f, a: f(a), st.sampled_from(_FLOAT_FUNCTIONS), below))
    elif dtype.is_signed:
        made.append(st.builds(lambda f, a: f(a), st.sampled_from(_FLOAT_FUNCTIONS[:2]), below))
    return made


def _decimals(below: st.SearchStrategy[Column], type_: pa.DataType) -> list[st.SearchStrategy[Column]]:
    """Arithmetic whose result is brought back to the type."""
    return [
        st.builds(lambda f, a, b: f(a, b).cast(type_), st.sampled_from(_ARITHMETIC[:2]), below, below),
        st.builds(lambda a, b: (a * b).cast(type_), below, st.sampled_from([2, Decimal("0.5"), Decimal("-1.25")])),
        st.builds(lambda f, a: f(a), st.sampled_from(_FLOAT_FUNCTIONS[:2]), below),
        st.builds(lambda a, digits: a.round(digits), below, st.integers(-2, 3)),
    ]


def _texts(below: st.SearchStrategy[Column]) -> list[st.SearchStrategy[Column]]:
    offsets, lengths = st.integers(-6, 6), st.none() | st.integers(0, 6)
    return [
        st.builds(lambda a, start, length: a.str.slice(start, length), below, offsets, lengths),
        st.builds(lambda a: a.str.lower(), below),
        st.builds(lambda a: a.str.upper(), below),
    ]


def _times(schema: pa.Schema, below: st.SearchStrategy[Column], dtype: DType,
           depth: int) -> list[st.SearchStrategy[Column]]:  # fmt: skip
    span = exprs(schema, pa.duration(dtype.unit), depth - 1)
    made = [st.builds(lambda a, b: a + b, below, span), st.builds(lambda a, b: a - b, below, span)]
    if dtype.kind is Kind.TS:
        made.append(st.builds(lambda a, every: a.dt.truncate(every), below, st.sampled_from(["1s", "1m30s", "1d"])))
    else:
        instant = exprs(schema, pa.timestamp(dtype.unit), depth - 1)
        made.append(st.builds(lambda a, b: a - b, instant, instant))
        made.append(st.builds(lambda a, b: a * b, below, st.integers(-3, 3)))
    return made


PATTERNS = ["", "a", "ab", "view", "ü", "b", "日", "key1", "x" * 40, "'"]


def _conditions(schema: pa.Schema, below: st.SearchStrategy[Column], depth: int) -> list[st.SearchStrategy[Column]]:
    types = [field.type for field in schema if not pa.types.is_dictionary(field.type)] or [pa.int64()]
    return [
        st.builds(lambda a, b: a & b, below, below),
        st.builds(lambda a, b: a | b, below, below),
        st.builds(lambda a: ~a, below),
        *(predicates_on(schema, type_, depth - 1) for type_ in types),
    ]


@cache
def predicates_on(schema: pa.Schema, type_: pa.DataType, depth: int) -> st.SearchStrategy[Column]:
    """Conditions whose operands have this type."""
    value = exprs(schema, type_, depth)
    dtype = from_arrow_type(type_)
    made = [
        st.builds(lambda f, a, b: f(a, b), st.sampled_from(COMPARISONS), value, value),
        st.builds(lambda a: a.is_null(), value),
        st.builds(lambda a: a.is_not_null(), value),
        st.builds(lambda a, low, high: a.between(low, high), value, value, value),
    ]
    if dtype.is_float:
        made.append(st.builds(lambda a: a.is_nan(), value))
    if dtype.is_string:
        pattern = st.sampled_from(PATTERNS)
        made.append(st.builds(lambda a, p: a.str.starts_with(p), value, pattern))
        made.append(st.builds(lambda a, p: a.str.ends_with(p), value, pattern))
        made.append(st.builds(lambda a, p: a.str.contains(p), value, pattern))
    return st.one_of(made)


def predicates(schema: pa.Schema, depth: int = 3) -> st.SearchStrategy[Column]:
    """Conditions over a schema."""
    return exprs(schema, BOOL, depth)


# --- aggregates and flows -------------------------------------------------------------------------


def _is_number(type_: pa.DataType) -> bool:
    return from_arrow_type(type_).is_number


def aggregates_of(name: str, type_: pa.DataType, by: list[str]) -> list[Column]:
    """Every aggregate that a column of this type has; `by` are columns to order by."""
    made = [col(name).count()]
    dtype = from_arrow_type(type_)
    if dtype.is_number or dtype.is_decimal:
        made += [col(name).mean(), col(name).var(), col(name).std()]
    if dtype.is_number or dtype.is_decimal or dtype.kind in (Kind.BOOL, Kind.DUR):
        made += [col(name).sum()]
    if not dtype.is_string:
        made += [col(name).min(), col(name).max(), col(name).first(), col(name).last()]
        made += [aggregate for other in by for aggregate in (col(name).arg_min(other), col(name).arg_max(other))]
    return made


@st.composite
def aggregates(draw: st.DrawFn, schema: pa.Schema) -> dict[str, Column]:
    """Some aggregates over a schema, by output name."""
    by = [field.name for field in schema if not from_arrow_type(field.type).is_string]
    every = [si.count()]
    for field in schema:
        every += aggregates_of(field.name, field.type, by[:2])
    chosen = draw(st.lists(st.integers(0, len(every) - 1), min_size=1, max_size=5))
    return {f"out{place}": every[choice] for place, choice in enumerate(chosen)}


@dataclass(frozen=True, slots=True)
class Program:
    """A flow to be built on a source, and whether its rows come in order."""

    build: Callable[[Flow], Flow]
    ordered: bool
    text: str

    def __repr__(self) -> str:
        return self.text


@st.composite
def programs(draw: st.DrawFn, schema: pa.Schema, other: pa.Table) -> Program:
    """Row operators over a schema, perhaps a join with `other` (which has the schema's first column), then perhaps
    groups."""
    key = schema.names[0]
    steps: list[tuple[str, Callable[[Flow], Flow]]] = []
    ordered = True
    for number in range(draw(st.integers(0, 3))):
        followers = ["limit", "distinct", "sort", "top_k"] if ordered else []  # of the source's order
        kind = draw(st.sampled_from(["filter", "with_columns", "union"] + followers + ["join"] * ordered))
        if kind == "filter":
            predicate = draw(predicates(schema, 2))
            steps.append((f"filter({predicate!r})", lambda flow, p=predicate: flow.filter(p)))
        elif kind == "with_columns":
            made = draw(exprs(schema, draw(st.sampled_from(schema.types)), 2))
            steps.append((f"with n{number}={made!r}", lambda flow, m=made, n=number: flow.with_columns(**{f"n{n}": m})))
        elif kind == "union":
            steps.append(("union itself", lambda flow: flow.union(flow)))
        elif kind == "limit":
            count = draw(st.integers(0, 40))
            steps.append((f"limit({count})", lambda flow, c=count: flow.limit(c)))
        elif kind == "distinct":
            by = draw(st.lists(st.sampled_from(schema.names), max_size=2))
            steps.append((f"distinct({by})", lambda flow, b=by: flow.distinct(*b)))
        elif kind == "sort":
            by, way, last = [draw(st.sampled_from(schema.names))], draw(st.booleans()), draw(st.booleans())
            steps.append((f"sort({by}, {way}, {last})",
                          lambda flow, b=by, w=way, n=last: flow.sort(*b, descending=w, nulls_last=n)))
        elif kind == "top_k":
            by, count = draw(st.lists(st.sampled_from(schema.names), min_size=1, max_size=2)), draw(st.integers(1, 40))
            steps.append((f"top_k({count}, {by})", lambda flow, b=by, c=count: flow.top_k(c, b)))
        elif kind == "join":
            how = draw(st.sampled_from(["inner", "left", "semi", "anti"]))
            ordered = how in ("semi", "anti")
            steps.append((f"join({how})", lambda flow, h=how: flow.join(other, on=key, how=h)))
    if draw(st.booleans()):
        keys = draw(st.sampled_from([[], [key], schema.names[:2]]))
        aggs = draw(aggregates(schema) if ordered else st.just({"n": si.count()}))
        ordered = False
        steps.append((f"group_by({keys}).agg({aggs!r})", lambda flow: flow.group_by(*keys).agg(**aggs)))

    def build(flow: Flow) -> Flow:
        for _, step in steps:
            flow = step(flow)
        return flow

    return Program(build, ordered, " | ".join(text for text, _ in steps) or "nothing")
