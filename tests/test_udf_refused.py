"""@si.udf: what is refused where the udf is made, with file, line and reason."""

from __future__ import annotations

import math
from typing import Any

import pytest

import scalein as si
from scalein.errors import CannotCompile

TOO_GREAT = 10**30
ITEMS = [1, 2, 3]


@si.udf(compile=False)
def roman(n: int) -> str:
    return {1: "I", 2: "II", 3: "III"}[n]


def a_list(x: float) -> float:
    y = [x, 1.0]
    return y[0]


def an_unset_local(x: float) -> float:
    if x > 0:
        y = 1.0
    return y


def no_type(x) -> float:  # type: ignore[no-untyped-def]
    return 1.0


def no_result(x: float):  # type: ignore[no-untyped-def]
    return x


def falls_through(x: float) -> float:
    while x > 0:
        return x


def maybe_none(x: float | None) -> float:
    return x + 1


def returns_none(x: float | None) -> float:
    return x


def two_types(x: float) -> float:
    y = 1.0
    y = "a"
    return x if y else 0.0


def narrows(x: int) -> int:
    x = x / 2
    return x


def unknown_function(x: float) -> float:
    return math.gamma(x)


def text_sum(s: str, n: int) -> str:
    return s + n


def text_product(s: str) -> str:
    return s * 2


def float_as_text(x: float) -> str:
    return f"{x}"


def padded_format(n: int) -> str:
    return f"{n:02d}"


def unknown_format(n: int) -> str:
    return f"{n:>5}"


def shown(s: str) -> str:
    return f"{s!r}"


def slice_with_step(s: str) -> str:
    return s[::-1]


def index_of_a_number(n: int) -> str:
    return str(n[0])


def replaces_anything(s: str, old: str) -> str:
    return s.replace(old, "")


def unknown_method(s: str) -> str:
    return s.title()


def strips_anything(s: str, chars: str) -> str:
    return s.strip(chars)


def over_items(x: float) -> float:
    for item in ITEMS:
        x += item
    return x


def captured_list(x: float) -> float:
    return x + ITEMS


def captured_giant(x: int) -> int:
    return x + TOO_GREAT


def raises(x: float) -> float:
    if x < 0:
        raise ValueError("no")
    return x


def calls_itself(n: int) -> int:
    return 1 if n <= 1 else n * calls_itself(n - 1)


def calls_python(n: int) -> str:
    return roman(n)


def compares_kinds(s: str, x: float) -> bool:
    return s == x


def unknown_type(x: list) -> float:  # type: ignore[type-arg]
    return 1.0


def untyped_none(x: float) -> float:
    best = None
    return x if best is None else best


REFUSED = [a_list, an_unset_local, no_type, no_result, falls_through, maybe_none, returns_none, two_types, narrows,
           unknown_function, text_sum, text_product, float_as_text, unknown_format, padded_format, shown,
           slice_with_step, index_of_a_number, replaces_anything, unknown_method, strips_anything, over_items,
           captured_list, captured_giant, raises, calls_itself, calls_python, compares_kinds, unknown_type,
           untyped_none]  # fmt: skip


def test_what_is_refused(golden: Any) -> None:
    texts = []
    for fn in REFUSED:
        with pytest.raises(CannotCompile) as caught:
            si.udf(fn)
        first = fn.__code__.co_firstlineno
        at = caught.value.facts["at"]
        line = int(at.removeprefix("test_udf_refused.py:"))
        assert first <= line < first + 5
        texts.append(str(caught.value).replace(at, f"test_udf_refused.py, line {line - first} of it"))
    assert "\n\n".join(texts) == golden
