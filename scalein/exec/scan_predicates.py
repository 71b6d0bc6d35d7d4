"""Scan predicates: conjuncts of a filter by which a source skips rows; comparisons of a column with constants."""

from __future__ import annotations

from collections.abc import Iterator

from scalein.connectors.base import BoundSource
from scalein.connectors.formats.statistics import Condition
from scalein.dtypes import Kind
from scalein.ir import ops
from scalein.ir.exprs import Call, Col, Expr, Lit, type_of
from scalein.ir.physical import Host, Limit, Node, Pipeline, Scan, Sort
from scalein.ir.rewrite import walk_ops
from scalein.ir.stages import FilterStep

_MIRRORED = {"eq": "eq", "lt": "gt", "le": "ge", "gt": "lt", "ge": "le"}


def conditions_of(predicate: Expr) -> tuple[Condition, ...]:
    """Conditions that are true in every row which passes the predicate.

    A conjunct before one of them may fail in rows that are skipped: that can hide an error, never cause one.
    """
    return tuple(_conditions(predicate))


def scan_conditions(node: Node) -> tuple[Condition, ...]:
    """Conditions of the first filter over a plan's scan."""
    while True:
        match node:
            case Pipeline(input=Scan(), steps=(FilterStep(predicate), *_)):
                return conditions_of(predicate)
            case Pipeline() | Host() | Limit() | Sort():
                node = node.input
            case _:
                return ()


def row_groups_skipped(*roots: ops.Op) -> int:
    """How many row groups the sources of flows have skipped so far, in all their runs."""
    found = {id(source.data): source.data.row_groups_skipped for root in roots for source in walk_ops(root)
             if isinstance(source, ops.Source) and isinstance(source.data, BoundSource)}
    return sum(found.values())


def _conditions(expr: Expr) -> Iterator[Condition]:
    match expr:
        case Call("and", args):
            for arg in args:
                yield from _conditions(arg)
        case Call("fill_null", (inner, Lit(False))):  # a predicate that guards another
            yield from _conditions(inner)
        case Call("eq" | "lt" | "le" | "gt" | "ge" as how, (Col() as column, Lit(value))) if _fits(column, value):
            yield Condition(column.name, how, (value,))
        case Call("eq" | "lt" | "le" | "gt" | "ge" as how, (Lit(value), Col() as column)) if _fits(column, value):
            yield Condition(column.name, _MIRRORED[how], (value,))
        case Call("is_in", (Col() as column,), (tuple() as values, _)) if all(_fits(column, v) for v in values):
            yield Condition(column.name, "in", values)


def _fits(column: Col, value: object) -> bool:
    """Whether sources compare values of the column's type; comparisons with null were folded before."""
    dtype = type_of(column)
    return value is not None and (dtype.is_int or dtype.is_float or dtype.is_string
                                  or dtype.kind in (Kind.TS, Kind.DATE))
