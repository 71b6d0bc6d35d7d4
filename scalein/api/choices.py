"""Choices between values: `when(condition).then(value)`, more of these, and `otherwise(value)`."""

from __future__ import annotations

from scalein.api.column import Column, as_expr
from scalein.errors import BadArgument, SourceLoc, here
from scalein.ir.exprs import Call, Expr, Lit


class When:
    """A condition that waits for its value: `when(...).then(...)`."""

    __slots__ = ("_branches",)

    def __init__(self, branches: tuple[Expr, ...]) -> None:
        self._branches = branches

    def then(self, value: object) -> Then:
        """The value where the condition is true and none before it was."""
        return Then((*self._branches, _choice(value, "then")))


class Then(Column):
    """A choice that is null where no condition is true, unless `otherwise` follows."""

    __slots__ = ("_branches",)

    def __init__(self, branches: tuple[Expr, ...]) -> None:
        self._branches = branches
        super().__init__(_nested(branches, Lit(None), here()))

    def when(self, condition: object) -> When:
        """Another condition, looked at where those before are not true."""
        return When((*self._branches, _choice(condition, "when")))

    def otherwise(self, value: object) -> Column:
        """The value where no condition is true."""
        return Column(_nested(self._branches, _choice(value, "otherwise"), here()))


def when(condition: object) -> When:
    """The start of a choice; only the branch that is taken can fail.

    >>> from scalein import col, lit, when
    >>> when(col("price") > 12).then(lit("high")).otherwise(lit("low"))
    Column(when(price > 12).then('high').otherwise('low'))
    """
    return When((_choice(condition, "when"),))


def _choice(value: object, step: str) -> Expr:
    at = here()
    if isinstance(value, str):
        raise BadArgument(f"{step} takes a str neither as a column nor as text", at=at, found=repr(value),
                          hint=f"write lit({value!r}) for the text, col({value!r}) for the column")
    return as_expr(value, at)


def _nested(branches: tuple[Expr, ...], last: Expr, at: SourceLoc) -> Expr:
    """Conditions and values in turn, as if_else calls from the last to the first."""
    for condition, value in zip(reversed(branches[::2]), reversed(branches[1::2]), strict=True):
        last = Call("if_else", (condition, value, last), at=at)
    return last
