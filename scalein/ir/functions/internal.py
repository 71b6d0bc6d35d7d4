"""Functions that only passes make: no user can call them, and no rule types them."""

from __future__ import annotations

from scalein.ir.exprs import Call, Expr
from scalein.ir.functions.registry import Args, Function, declare


def _as_made(call: Call, args: Args) -> Expr:
    return call


declare(
    # x % c == 0 of integers; `fold` makes it
    Function("divisible", _as_made, show="{0} % {params} == 0", duckdb="({0}::HUGEINT % {params[0]} = 0)"),
)
