"""Checks that ops and programs share: each gives what is wrong, in words for an InternalError."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

from scalein.dtypes import DType, alike
from scalein.ir.exprs import Expr
from scalein.ir.printer import show_expr

PROBES = ("inner", "left", "semi", "anti")  # the joins that look a row's keys up


def expect(what: Callable[[], str], found: DType | None, expected: DType | None) -> Iterator[str]:
    """Complain if types differ; the Arrow form of a string is no difference to an expression."""
    if found is not None and expected is not None and alike(found, expected):
        return
    yield f"{what()} is {found!r}, not {expected!r}"


def wrong_names(names: Sequence[str]) -> Iterator[str]:
    """What is wrong with the names of columns."""
    if not names:
        yield "it gives no column"
    if len(set(names)) == len(names):
        return
    yield from (f"two columns are called {name!r}" for name in set(names) if names.count(name) > 1)


def wrong_keys(how: str, left: tuple[Expr, ...], right: tuple[Expr, ...], keeps: bool,
               hows: tuple[str, ...] = PROBES) -> Iterator[str]:
    """What is wrong with how two sides are joined; `hows` are the joins that are known there."""
    if how not in hows:
        yield f"how is {how!r}"
    if keeps and how in ("semi", "anti"):
        yield f"a {how} join keeps nothing of the right side"
    if len(left) != len(right) or not left:
        yield f"{len(left)} keys on the left and {len(right)} on the right"
        return
    for mine, other in zip(left, right, strict=True):
        yield from expect(partial(_key_text, other), other.dtype, mine.dtype)


def _key_text(key: Expr) -> str:
    return f"key {show_expr(key)} of the right side"
