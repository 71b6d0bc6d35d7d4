"""Aggregates that are made of others, written out in the tree before it is planned."""

from __future__ import annotations

from sqlglot import exp


def rewritten(tree: exp.Expr) -> exp.Expr:
    """The tree, with VAR_POP and STDDEV_POP by what is there: the variance of a sample, and a count."""
    for node in list(tree.find_all(exp.VariancePop, exp.StddevPop)):
        whole: exp.Expr = node  # with its FILTER and OVER
        while isinstance(whole.parent, exp.Filter | exp.Window) and whole.arg_key == "this":
            whole = whole.parent
        count, variance = (_instead(whole, node, made) for made in (exp.Count, exp.Variance))
        spread = exp.Div(this=exp.Mul(this=variance, expression=exp.Paren(
            this=exp.Sub(this=count.copy(), expression=exp.Literal.number(1)))), expression=count.copy())
        value = exp.Sqrt(this=spread) if isinstance(node, exp.StddevPop) else spread
        one = exp.If(this=exp.EQ(this=count.copy(), expression=exp.Literal.number(1)),
                     true=exp.Literal.number("0e0"))
        many = exp.If(this=exp.GT(this=count, expression=exp.Literal.number(1)), true=value)
        found = exp.Paren(this=exp.Case(ifs=[one, many]))
        if whole is tree:
            return found
        whole.replace(found)
    return tree


def _instead(whole: exp.Expr, node: exp.Expr, kind: type[exp.Expr]) -> exp.Expr:
    """The same with another aggregate of the same values."""
    if whole is node:
        return kind(this=node.this.copy())
    copied = whole.copy()
    inside = copied.this
    while type(inside) is not type(node):
        inside = inside.this
    inside.replace(kind(this=inside.this.copy()))
    return copied
