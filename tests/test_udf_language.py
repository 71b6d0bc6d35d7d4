"""@si.udf: pieces of text, tuples, loops over them, numbers in text, formats; against the same function in Python.

Programs at random are in `udf_programs.py`.
"""

from __future__ import annotations

import linecache
import math
import re
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import scalein as si
from scalein import col
from scalein.errors import CannotCompile, ComputeError
from scalein.udf import UdfFunction
from tests import oracle
from tests.engines import examples
from tests.test_udf import check, run

ALLOWED = ("view", "click")
WORDS = st.text(alphabet="ab,/ \t\u2003é本", max_size=12)
SMALL = st.integers(-9, 9)


@si.udf
def halves(s: str) -> tuple[str, float | None]:
    """What stands before the first colon, and the number after it."""
    if ":" not in s:
        return s, None
    name, value = s.split(":", 1)
    return name.strip(), float(value)


@si.udf
def fields(line: str) -> float | None:
    name, value = halves(line)
    if value is None or name in ALLOWED:
        return None
    pair = (len(name), value)
    while pair[0] > 3:
        pair = (pair[0] - 1, pair[1] * 2)
        if pair[1] > 100:
            break
    else:
        return pair[1] + 0.5
    return pair[1]


def test_tuples_optional_values_and_loops_with_an_else() -> None:
    lines = ["a:1", " abcdef : 7e1", "none", "view:3", "abcdef:-2", "", "日本語日本語:12.5"]
    assert check(fields, lines) == [1.5, 140.0, None, None, -15.5, None, 100.5]


def test_tuples_widen_and_nest() -> None:
    @si.udf
    def swapped(p: tuple[int, float], flag: bool) -> tuple[float, float | None]:
        return (p[1], p[0]) if flag else (p[0], None)

    @si.udf
    def both(n: int, x: float) -> float:
        whole = ((n, x), "a")
        (k, y), text = whole
        t: tuple[float, float | None] = (k, None)
        for flag in range(2):
            t = swapped((k, y), flag == 1)
            first, second = t
            if second is None:
                second = first
            y += second * len(text) + t[-2]
        a, b = b, a = n, k
        return y + a * b + len(whole)

    want = [both.python(n, x) for n, x in ((1, 2.5), (-3, 1e10), (0, -0.0))]
    assert run(both, [1, -3, 0], [2.5, 1e10, -0.0]) == want
    assert run(both, [1, -3, 0], [2.5, 1e10, -0.0], engine="oracle") == want


# --- each method by values at random

_METHODS: dict[str, str] = {
    "split(SEP, n)": "'|'.join(s.split(t, n))", "split(BLANK)": "f'{len(s.split())}' + '|'.join(s.split(None, n))",
    "rsplit": "'|'.join(s.rsplit(',', n)) + '|'.join(s.rsplit('本/', n))", "index": "s.split(t)[n]",
    "among": "str(t in s.split()) + str(t not in s.split(','))", "find": "str(s.find(t)) + str(s.find(t, n, -n))",
    "rfind": "str(s.rfind(t)) + str(s.rfind(t, n))", "count": "f'{s.count(t)},{s.count(t, n)},{s.count(t, n, 3)}'",
    "indices": "f'{s.index(t)} {s.rindex(t)}'", "partition": "s.partition(t)[0] + '|' + s.rpartition(t)[-1]",
    "affixes": "s.removeprefix(t) + '|' + s.removesuffix(t) + str(s.startswith(('a', t)))",
    "pads": "s.ljust(n) + '|' + s.rjust(n, '本') + '|' + s.center(n, '-') + '|' + s.zfill(n)",
    "formats": "f'[{s:>7}|{s:^8}|{s:é<5}|{s:.3}|{n:04d}|{n:+,}|{n:^5}|{n / 7:8.3f}|{n / 3:+.1e}]'",
    "repeats": "s * n + s[::-1] + s.replace('a', t, n)", "cases": "s.capitalize() + s.casefold() + t.upper()",
    "characters": "chr(ord(t[0]) + abs(n)) + str(ord(s[-1]))",
}  # fmt: skip


@pytest.fixture(scope="module")
def methods() -> dict[str, UdfFunction]:
    return {name: _written(text) for name, text in _METHODS.items()}


def _written(expression: str) -> UdfFunction:
    file, text = f"<{expression}>", f"def made(s: str, t: str, n: int) -> str:\n    return {expression}\n"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    space: dict[str, Any] = {"math": math}
    exec(compile(text, file, "exec"), space)
    return si.udf(space["made"])


@pytest.mark.parametrize("name", _METHODS)
@examples(8)
@given(rows=st.lists(st.tuples(WORDS, st.text(alphabet="ab,/é本", max_size=2), SMALL), min_size=1, max_size=30))
def test_methods_of_text(name: str, methods: dict[str, UdfFunction], rows: list[tuple[str, str, int]]) -> None:
    _same_rows(methods[name], rows)


def _same_rows(udf: UdfFunction, rows: list[tuple[Any, ...]]) -> None:
    """What Python gives for rows, and an error for those in which it raises."""
    good, want, bad = [], [], []
    for row in rows:
        try:
            want.append(udf.python(*row))
            good.append(row)
        except (ValueError, IndexError, TypeError, OverflowError, ZeroDivisionError):
            bad.append(row)
    for row in bad[:2]:
        for engine in ("llvm", "oracle"):
            with pytest.raises(ComputeError):
                run(udf, *([value] for value in row), engine=engine)
    if good:
        for engine in ("llvm", "oracle"):
            assert run(udf, *map(list, zip(*good, strict=True)), engine=engine) == want


@si.udf
def as_int(s: str) -> int:
    return int(s)


@si.udf
def as_float(s: str) -> float:
    return float(s)


_NUMBERS = st.one_of(
    st.from_regex(re.compile(r"\s?[+-]?[0-9_]{0,21}\.?[0-9_]{0,9}([eE][+-]?[0-9]{1,3})?\s?", re.ASCII), fullmatch=True),
    st.floats().map(repr), st.integers(-(2**63) - 9, -(2**63) + 9).map(str), st.integers(2**63 - 9, 2**63 + 9).map(str),
    st.sampled_from(["inf", "-Infinity", "NaN", "+nan", "infinit", "1__0", "_1", "1_", "1e", "1e+", ".", "-", "", " 7 ",
                     "0x1", "1e99999999999", "9007199254740993", "4.9e-324", "0_0.0_1e-0"]),
)  # fmt: skip


@examples(20)
@given(st.lists(_NUMBERS, min_size=1, max_size=20))
def test_numbers_are_read_as_python_reads_them(texts: list[str]) -> None:
    for udf, kind in ((as_int, int), (as_float, float)):
        good, want, bad = [], [], []
        for text in texts:
            try:
                value = kind(text)
                assert kind is float or -(2**63) <= value < 2**63
                want.append(repr(value))
                good.append(text)
            except (ValueError, AssertionError):
                bad.append(text)
        for text in bad[:3]:
            with pytest.raises(ComputeError):
                run(udf, [text])
        for engine in ("llvm", "oracle"):
            assert list(map(repr, run(udf, good, engine=engine))) == want


@si.udf
def rounds(x: float) -> str:
    return f"{round(x, 2):.17g} {round(x, 0):.17g} {round(x, 10):.17g} {x:,.2f} {x:.3%} {x:012.4f} {x:+g}"


@examples(20)
@given(st.lists(st.one_of(st.floats(), st.integers(-10_000, 10_000).map(lambda n: n / 200)), min_size=1, max_size=20))
def test_floats_are_rounded_and_written_as_python_does(values: list[float]) -> None:
    _same_rows(rounds, [(value,) for value in values])


@si.udf
def whole(n: int, k: int) -> int:
    q, r = divmod(n, k)
    few = abs(k) % 70
    return (math.gcd(n, k) ^ math.isqrt(abs(n)) ^ math.comb(60, few) ^ math.lcm(k, few) ^ q ^ r ^ n.bit_length()
            ^ n.bit_count() ^ math.perm(20, few) ^ math.factorial(few % 21) ^ math.comb(few, 3))  # fmt: skip


@si.udf
def parts(x: float, y: float) -> float:
    fraction, exponent = math.frexp(x)
    rest, floor = math.modf(y)
    near = math.isclose(x, y, rel_tol=0.25) + 2 * math.isclose(x, y, abs_tol=1.0) + 4 * x.is_integer()
    return (fraction * exponent + rest * 3 + math.ulp(x) + near + math.nextafter(y, x)
            + math.ldexp(fraction, exponent // 2) + (math.copysign(1, floor) + floor * 1e-300))  # fmt: skip


@examples(20)
@given(st.lists(st.tuples(st.integers(-(2**63), 2**63 - 1), st.integers(-99, 2**40)), min_size=1, max_size=20),
       st.lists(st.tuples(st.floats(), st.floats()), min_size=1, max_size=20))  # fmt: skip
def test_the_rest_of_math(ints: list[tuple[int, int]], floats: list[tuple[float, float]]) -> None:
    _same_rows(whole, [row for row in ints if row[0] != -(2**63)])  # its magnitude is no int
    want = [parts.python(*row) for row in floats]
    for engine in ("llvm", "oracle"):
        found = run(parts, *map(list, zip(*floats, strict=True)), engine=engine)
        assert list(map(repr, found)) == list(map(repr, want))


@pytest.mark.parametrize(("expression", "what"), [
    ("math.factorial(n + 21)", "integer overflow"), ("math.comb(70, n + 35)", "integer overflow"),
    ("math.isqrt(n - 1)", "math domain or range error"), ("int(str(n) + 'x')", "a text that is no int"),
    ("len('a,b'.split(',')[n + 2])", "list index out of range"), ("len('a,b'.split(',')[n - 3])", "list index"),
    ("ord('ab'[n:])", r"ord\(\) of a text that is not one character"), ("'ab'.index('c' * (n + 1))", "substring not"),
    ("len(chr(n + 0x110000))", r"chr\(\) of a number"), ("len('ab'.split('a' * n)[0])", "an empty"),
    ("len('ab'.partition('a' * n)[0])", "an empty separator"), ("int(float('1' * (n + 20)))", "impossible cast"),
    ("len('ab'.replace('a' * n, 'b'))", "replace of an empty text"), ("len('x' * (n + 2**62))", "no memory for text"),
])  # fmt: skip
def test_a_row_that_fails_says_why(expression: str, what: str) -> None:
    udf = _written(f"str({expression})")
    for engine in ("llvm", "oracle")[: 1 if "memory" in what else 2]:
        with pytest.raises(ComputeError, match=what):
            run(udf, ["s"], ["t"], [0], engine=engine)


def test_a_piece_too_many_cannot_be_unpacked() -> None:
    @si.udf
    def two(s: str) -> str:
        a, b = s.split(",")
        return b + a

    check(two, ["a,b", ","])
    for text, what in (("a", "few"), ("a,b,c", "many")):
        for engine in ("llvm", "oracle"):
            with pytest.raises(ComputeError, match=rf"too {what} values to unpack at test_udf_language.py:\d+"):
                run(two, [text], engine=engine)


def test_pieces_in_a_long_text_and_in_many_rows() -> None:
    @si.udf
    def longest(s: str, sep: str) -> str:
        found, place = "", -1
        for k, word in enumerate(s.split(sep)):
            if len(word) > len(found):
                found, place = word, k
        return f"{place}:{found}"

    lines = [",".join(str(k * j) for k in range(j % 40)) for j in range(3000)]
    want = [longest.python(line, ",") for line in lines]
    flow = si.from_arrow(pa.table({"s": lines})).select(r=longest(col("s"), si.lit(",")))
    assert flow.collect(workers=2)["r"].to_pylist() == want
    assert oracle.collect(flow)["r"].to_pylist() == want
    assert check(longest, [",".join(map(str, range(11_000)))], [","])[0] == "10000:10000"


def test_udfs_that_call_each_other_are_refused() -> None:
    def first(n: int) -> int:
        return second(n) if n else 0

    with pytest.raises(CannotCompile, match="'second' is not defined when the udf is made"):
        si.udf(first)

    @si.udf
    def second(n: int) -> int:
        return n + 1

    assert run(si.udf(first), [0, 4]) == [0, 5]


def test_bodies_of_classes_have_the_same_language() -> None:
    @si.udaf
    class Digits:
        total: int = 0
        best: int | None = None

        def update(self, line: str):  # type: ignore[no-untyped-def]
            name, _, numbers = line.partition(":")
            for k, text in enumerate(numbers.split()):
                if not text.isdigit():
                    break
                value = int(text) * (k + 1) + len(name)
                self.total += value
                self.best = value if self.best is None or value > self.best else self.best
            else:
                self.total += 1000

        def merge(self, other):  # type: ignore[no-untyped-def]
            self.total += other.total
            if self.best is None or (other.best is not None and other.best > self.best):
                self.best = other.best

        def finish(self) -> int | None:
            return None if self.best is None else self.total * 10 + self.best

    @si.process
    class Parts:
        count: int = 0

        def on_row(self, row):  # type: ignore[no-untyped-def]
            low, high = (0, self.count) if self.count % 2 else (self.count, 9)
            for part in row.line.split(":")[1].split():
                if part == "x":
                    return
                self.count += len(part)
                yield {"part": part, "low": low, "high": high, "number": float(part) if part.isdigit() else None}

    lines = ["a:1 2 3", "b:", "ab:7 x 9", "a:5", "b:x"]
    keys = [0, 0, 1, 1, 2]
    flow = si.from_arrow(pa.table({"k": keys, "line": lines})).group_by("k")
    want = {}
    for key in set(keys):
        state = Digits.python()
        for line in (line for own, line in zip(keys, lines, strict=True) if own == key):
            state.update(line)
        want[key] = state.finish()
    aggregate = flow.agg(d=Digits(col("line")))
    parts_ = flow.process(Parts)
    assert dict(zip(*aggregate.collect().to_pydict().values(), strict=True)) == want
    assert dict(zip(*oracle.collect(aggregate).to_pydict().values(), strict=True)) == want
    given = [(0, "1", 0, 9, 1.0), (0, "2", 0, 9, 2.0), (0, "3", 0, 9, 3.0), (1, "7", 0, 9, 7.0), (1, "5", 0, 1, 5.0)]
    for collected in (parts_.collect(), oracle.collect(parts_)):
        assert sorted(map(tuple, map(dict.values, collected.to_pylist()))) == sorted(given)


@si.udf
def halved(x: float | None) -> float:
    if x is None:
        return 0.0
    while x > 1.0:
        x = x / 2
    return x


@si.udf
def doubled(x: float | None, n: int) -> float:
    if x is None:
        return 0.5
    for k in range(n):
        for _ in range(2):
            if x > 100.0:
                x = 1.0
                continue
            x = x * 2 + k
    return x


@si.udf
def until_none(x: float | None, n: int) -> float:
    """It becomes None in a round, so it must be tested in each."""
    while x is not None:
        if x > n:
            x = None
            continue
        x = x + 1.0
        n = n - 1
    return float(n)


def test_what_is_not_none_stays_so_in_loops() -> None:
    check(halved, [None, 5.0, 0.5, 1e9])
    for function in (doubled, until_none):
        check(function, [None, 5.0, 0.5], [1, 9, 3])


def test_what_may_be_none_after_a_round_is_refused() -> None:
    def refused(x: float | None, n: int) -> float:
        if x is None:
            return 0.0
        for _ in range(n):
            if x > 3.0:
                x = None
                continue
            x = 2.0
        return 1.0

    with pytest.raises(CannotCompile, match="x may be None here"):
        si.udf(refused)


@si.process
class Halves:
    last: float | None = None

    def on_row(self, row: Any) -> Any:
        if self.last is None:
            self.last = row.x
            return
        while self.last > 1.0:
            self.last = self.last / 2
        yield {"x": self.last}
        self.last = row.x


def test_fields_that_are_not_none_stay_so_in_loops() -> None:
    rows = si.from_arrow({"k": [1, 1, 1], "x": [5.0, 7.0, 0.1]}).group_by("k").process(Halves).collect()
    assert rows["x"].to_pylist() == [0.625, 0.875]
