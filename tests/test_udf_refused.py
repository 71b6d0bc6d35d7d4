"""@si.udf: what is refused where the udf is made, with file, line and reason."""

from __future__ import annotations

import math
from typing import Any

import pytest

import scalein as si
from scalein.errors import BadArgument, CannotCompile

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
    return math.fsum([x, x])


def text_sum(s: str, n: int) -> str:
    return s + n


def text_product(s: str) -> str:
    return s * 2.5


def float_as_text(x: float) -> str:
    return f"{x}"


def padded_format(n: int) -> str:
    return f"{n:02x}"


def unknown_format(n: int) -> str:
    return f"{n:_}"


def shown(s: str) -> str:
    return f"{s!r}"


def slice_with_step(s: str) -> str:
    return s[::2]


def index_of_a_number(n: int) -> str:
    return str(n[0])


def replaces_anything(s: str, old: str) -> str:
    return s.replace("", old)


def unknown_method(s: str) -> str:
    return s.title()


def strips_anything(s: str, chars: str) -> str:
    return s.strip(chars)


def slice_of_pieces(s: str) -> str:
    return s.split(",")[1:][0]


def unknown_separator(s: str, sep: str) -> str:
    return s.rsplit(sep, 1)[0]


def splits_at_nothing(s: str) -> str:
    return s.split("")[0]


def index_that_varies(n: int) -> int:
    return (1, 2)[n]


def compares_tuples(n: int) -> bool:
    return (n, 1) == (1, n)


def unpacks_too_many(n: int) -> int:
    a, b, c = n, 1
    return a + b + c


def two_kinds_of_items(n: int) -> int:
    pair = (n, "a")
    pair = ("a", n)
    return pair[1]


def may_not_be_found(s: str) -> str:
    for word in s.split():
        if word.isupper():
            break
    else:
        word = None
    return word


def over_a_number(n: int) -> int:
    for digit in n:
        n += digit
    return n


def returns_a_piece_of_none(s: str | None) -> str:
    if s == "":
        return s
    return s.split(",")[0]


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
           slice_with_step, slice_of_pieces, unknown_separator, splits_at_nothing,
           index_that_varies, compares_tuples, unpacks_too_many, two_kinds_of_items, may_not_be_found, over_a_number,
           returns_a_piece_of_none, index_of_a_number, replaces_anything, unknown_method, strips_anything, over_items,
           captured_list, captured_giant, raises, calls_itself, calls_python, compares_kinds, unknown_type,
           untyped_none]  # fmt: skip


def test_the_traceback_is_that_of_the_users_line() -> None:
    with pytest.raises(CannotCompile) as caught:

        @si.udaf
        class Opens:
            n: int = 0

            def update(self, x: float):  # type: ignore[no-untyped-def]
                self.n += len(open("x").read())  # noqa: SIM115

            def merge(self, other):  # type: ignore[no-untyped-def]
                self.n += other.n

            def finish(self) -> int:
                return self.n

    for fn in (a_list, unknown_type, lambda x: x, open):
        with pytest.raises(CannotCompile) as other:
            si.udf(fn)
        assert [entry.name for entry in other.traceback] == [entry.name for entry in caught.traceback]
    with pytest.raises(CannotCompile) as other:
        si.udf(compile=True)(a_list)
    assert [entry.name for entry in other.traceback] == ["test_the_traceback_is_that_of_the_users_line"]
    assert "line   self.n += len(open(" in str(caught.value)


def test_a_udf_with_tuples_is_no_column() -> None:
    @si.udf
    def both(s: str) -> tuple[str, str]:
        before, _, after = s.partition("/")
        return before, after

    assert both("a/b") == ("a", "b")
    with pytest.raises(BadArgument, match="both takes or gives a tuple, which no column holds"):
        both(si.col("s"))


def test_what_is_refused(golden: Any) -> None:
    texts = []
    for fn in REFUSED:
        with pytest.raises(CannotCompile) as caught:
            si.udf(fn)
        first = fn.__code__.co_firstlineno
        at = caught.value.facts["at"]
        line = int(at.removeprefix("test_udf_refused.py:"))
        assert first <= line < first + 8
        texts.append(str(caught.value).replace(at, f"test_udf_refused.py, line {line - first} of it"))
    assert "\n\n".join(texts) == golden
