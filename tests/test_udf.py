"""@si.udf: examples of what is compiled, nulls, failing rows, pickling, and functions that stay Python."""

from __future__ import annotations

import math
import os
import pickle
import signal
import subprocess
import sys
import time
from collections import Counter
from math import sqrt
from typing import Any, Optional

import numpy as np
import pyarrow as pa
import pytest

import scalein as si
from scalein import col, lit, when
from scalein.errors import BadArgument, CannotCompile, ComputeError, WrongType
from scalein.udf import UdfFunction
from tests import oracle
from tests.engines import COLLECTS
from tests.same import assert_same

RATE = 2.5
LABEL = "big"

ENGINES = pytest.mark.parametrize("engine", ["llvm", "oracle"])


@si.udf
def grade(price: float, qty: int) -> float:
    """The example of the documentation."""
    total = 0.0
    for i in range(qty):
        if i % 2 == 0:
            total += price
        else:
            total -= price / 2
    return total if total > 0 else -1.0


@si.udf
def collatz(n: int) -> int:
    steps = 0
    while n > 1:
        n = n // 2 if n % 2 == 0 else 3 * n + 1
        steps += 1
    return steps


@si.udf
def twice(x: float, times: float = 2.0) -> float:
    return x * times


@si.udf(compile=False)
def roman(n: int) -> str:
    return {1: "I", 2: "II", 3: "III"}[n]


def run(udf: UdfFunction, *columns: list[Any], engine: str = "llvm") -> list[Any]:
    """The udf over columns of these values, in the types of its parameters."""
    given = zip(udf.ir.params, columns, strict=True)
    arrays = {param.name: pa.array(values, param.dtype.arrow) for param, values in given}
    flow = si.from_arrow(pa.table(arrays)).select(out=udf(*map(col, arrays)))
    found = flow.collect() if engine == "llvm" else oracle.collect(flow)
    assert found.schema.equals(flow.schema)
    return found["out"].to_pylist()  # type: ignore[no-any-return]


def check(udf: UdfFunction, *columns: list[Any]) -> list[Any]:
    """Both engines give what Python gives."""
    want = [udf.python(*row) for row in zip(*columns, strict=True)]
    for engine in ("llvm", "oracle"):
        got = run(udf, *columns, engine=engine)
        assert repr(got) == repr(want), engine
        assert [type(value) for value in got] == [type(value) for value in want]
    return want


# --- what is compiled


def test_loops_and_early_returns() -> None:
    check(grade, [1.5, -2.0, 3.0, 0.0], [0, 3, 4, 9])
    assert check(collatz, [1, 6, 27, -5])[2] == 111


def test_python_arithmetic() -> None:
    @si.udf
    def mixed(a: int, b: int) -> float:
        return a // b + a % b + a / b + (a - b) ** 2 + -a + (-7) // b + a**-1 + (a & b) + (a | 3) + (~a ^ b) + (a >> 2)

    @si.udf
    def floats(a: float, b: float) -> float:
        return a // b * 1000 + a % b

    check(mixed, [7, -7, 7, -7, 1], [2, 2, -2, -2, 3])
    check(floats, [7.5, -7.5, 7.5, -7.5, 1e308, 0.3], [2.0, 2.0, -2.0, -2.0, 0.7, 0.1])


@pytest.mark.parametrize("fn", ["floordiv", "mod"])
def test_floats_divide_like_cpython(fn: str) -> None:
    @si.udf
    def floordiv(a: float, b: float) -> float:
        return a // b

    @si.udf
    def mod(a: float, b: float) -> float:
        return a % b

    values = [0.0, -0.0, 1.0, -1.0, 0.1, -0.3, 5e-324, 1.7e308, math.inf, -math.inf, math.nan, 7.0, 2.5]
    pairs = [(a, b) for a in values for b in values if b != 0]
    check({"floordiv": floordiv, "mod": mod}[fn], *map(list, zip(*pairs, strict=True)))


def test_ints_and_floats_are_compared_exactly() -> None:
    @si.udf
    def below(a: int, b: float) -> int:
        return (a < b) + 2 * (a == b) + 4 * (b <= a) + 8 * (a != b) + 16 * (a > b) + 32 * (b >= a)

    ints = [2**53 + 1, 2**53, 2**63 - 1, -(2**63), 0, 1]
    floats = [float(2**53), 2.0**63, -(2.0**63), math.nan, math.inf, -math.inf, 0.5, -0.0]
    pairs = [(a, b) for a in ints for b in floats]
    check(below, *map(list, zip(*pairs, strict=True)))


def test_widening() -> None:
    @si.udf
    def widened(n: int) -> float:
        total = 0  # a float all along, because of what is added
        for i in range(n):
            total += i / 2
        low: float = 1
        flag = True
        flag = 3 if n > 2 else flag
        return total + low + flag

    assert [round(x, 3) for x in run(widened, [0, 3, 5])] == [2.0, 5.5, 9.0]


def test_conditions() -> None:
    @si.udf
    def tangled(a: int, b: float, s: str) -> bool:
        if not a or (b and s):
            return 0 < a < b < 10 or s in ("x", "yy") or a in (1, 2)
        elif s > "m" and "a" not in s:
            return not s.startswith("ü") and s == max(s, "n")
        return bool(s) and not s.endswith("z")

    ints, floats, texts = [0, 1, 2, -3], [0.0, 1.5, math.nan, 9.0], ["", "x", "yy", "ürgs", "zebra", "n", "az"]
    rows = [(a, b, s) for a in ints for b in floats for s in texts]
    check(tangled, *map(list, zip(*rows, strict=True)))


def test_control_flow() -> None:
    @si.udf
    def nested(n: int) -> int:
        """Breaks, continues, a loop variable that is assigned to, unpacking, a chain of assignments."""
        a, b = 0, 1
        c = d = n
        for i in range(n, -n, -2):
            if i == 3:
                continue
            a, b = b, a + b
            while True:
                c -= 1
                if c % 3 == 0:
                    break
                if c < -50:
                    return -1
            for j in range(2, i):
                j += 1
                d += j
                if d > 40:
                    break
            i = 100
        pass
        return a * 1000 + b + c + d

    check(nested, [0, 1, 2, 5, 9, 20])


def test_constants_and_other_udfs() -> None:
    offset = 4

    @si.udf
    def total(x: float, n: int) -> float:
        return twice(x) + twice(n, times=3) + twice(times=x, x=RATE) + offset + sqrt(math.pi) + len(LABEL)

    check(total, [1.0, -2.5], [3, 4])


def test_math() -> None:
    @si.udf
    def many(x: float) -> float:
        return (
            math.exp(-x) + math.log(x) + math.log(x, 3) + math.atan2(x, 2) + math.hypot(x, 1) + math.pow(x, 0.5)
            + math.floor(x) + math.ceil(x) + round(x) + int(x) + math.degrees(x) + math.fmod(x, 0.7) + abs(-x)
            + math.isnan(x) + math.copysign(1, x) + math.cbrt(x) + math.erf(x) + min(x, 2, 3.5) + max(1, x)
        )  # fmt: skip

    values = [0.5, 1.0, 1.5, 2.5, 3.25, 1e10]
    np.testing.assert_allclose(run(many, values), [many.python(x) for x in values], rtol=1e-14)


def test_text() -> None:
    @si.udf
    def label(s: str, x: float) -> str:
        if s < "m":
            return LABEL if x > RATE else s
        return min(s, "pq") if len(s) == 4 else "日本語"

    check(label, ["a", "b", "zzzz", "öäüß", "nn"], [1.0, 3.0, 0.0, 1.0, 2.0])
    flow = si.from_arrow(pa.table({"s": pa.array(["a", "zzzz", "a"]).dictionary_encode(), "x": [1.0, 2.0, 3.0]}))
    grouped = flow.group_by(k=label(col("s"), col("x"))).agg(n=si.count())
    counts = {row["k"]: row["n"] for row in grouped.collect().to_pylist()}
    assert counts == {"a": 1, "big": 1, "pq": 1}


def test_parts_of_text() -> None:
    @si.udf
    def ends(s: str, n: int) -> str:
        if not s:
            return "empty"
        return s[0] + s[-1] + "|" + s[n:] + "|" + s[:n] + "|" + s[-n:n] + "|" + s[1:-1]

    words = ["banana", "", "x", "日本語", "👩🏽‍🚀", "éa"]
    for n in (-(2**63), -3, -1, 0, 1, 2, 7, 2**63 - 1):
        if n == -(2**63):  # -n is no int
            with pytest.raises(ComputeError, match="integer overflow at"):
                run(ends, words, [n] * len(words))
        else:
            check(ends, words, [n] * len(words))


@pytest.mark.parametrize("engine", ["llvm", "oracle"])
@pytest.mark.parametrize("index", [3, -4, 2**63 - 1])
def test_an_index_outside_of_a_text_names_the_line(engine: str, index: int) -> None:
    @si.udf
    def char(s: str, n: int) -> str:
        return s[n]

    with pytest.raises(ComputeError, match=r"string index out of range at test_udf.py:\d+"):
        run(char, ["abc"], [index], engine=engine)
    assert run(char, ["日本語"], [max(-3, min(2, index))], engine=engine) == ["語" if index > 0 else "日"]


def test_text_is_built() -> None:
    @si.udf
    def label(s: str, n: int, b: bool, x: float) -> str:
        found = s.upper() + "/" + s.lower()
        found += f"<{n}|{b}|{s!s}|{x:.3f}|{n:.1f}>" + str(n > 3) + str(n) + ""
        return found.replace("a", "").replace("<", s)

    words = ["banana", "", "ΟΔΥΣΣΕΥΣ ΑΣ", "straße ŉ ﬃ İ", "日本語"]
    numbers = [0, -1, 2**63 - 1, -(2**63), 1234567890]
    check(label, words, numbers, [True, False] * 2 + [True], [0.0005, -0.0, math.inf, -math.nan, 1e308])


def test_constants_of_text_are_joined_before_it_runs() -> None:
    @si.udf
    def constant(x: float) -> str:
        return "a" + f"{1}{True}" + "" + str(2.5)

    assert check(constant, [1.0]) == ["a1True2.5"]
    assert "concat" not in repr(constant.ir)


def test_case_and_whitespace_of_every_code_point() -> None:
    @si.udf
    def changed(s: str) -> str:
        return s.upper() + "|" + s.lower() + "|" + ("." + s + ".").strip(".") + "|" + s.strip()

    every = [chr(point) for point in range(0x110000) if not 0xD800 <= point < 0xE000]
    got = si.from_arrow(pa.table({"s": every})).select(r=changed(col("s"))).collect()["r"].to_pylist()
    assert [(char, found) for char, found in zip(every, got, strict=True) if found != changed.python(char)] == []


def test_the_case_of_a_final_sigma_depends_on_its_neighbours() -> None:
    @si.udf
    def lower(s: str) -> str:
        return s.lower()

    rng = np.random.default_rng(2)
    letters = np.array(list("ΣΣΣaB1 .'\u0301\u00ad\u0345\u02b0日"))
    check(lower, ["".join(rng.choice(letters, size)) for size in rng.integers(0, 9, 2000)])


def test_long_texts_and_many_rows() -> None:
    @si.udf
    def repeated(s: str, n: int) -> str:
        found = s
        for _ in range(n):
            found = found + found
        return found[:3] + str(len(found))

    assert check(repeated, ["abc", "é", ""], [16, 18, 5])
    count = 50_000
    table = pa.table({"s": [f"word {k}" for k in range(count)], "n": range(count)})
    expected = [f"WORD {k}/{k}" for k in range(count)]

    @si.udf
    def shouted(s: str, n: int) -> str:
        return f"{s.upper()}/{n}"

    flow = si.from_arrow(table)
    for workers in (1, 3):
        assert flow.select(r=shouted(col("s"), col("n"))).collect(workers=workers)["r"].to_pylist() == expected
    grouped = flow.filter(shouted(col("s"), col("n")).str.ends_with("7")).group_by(
        k=shouted(col("s"), col("n") % 10).str.slice(0, 6)).agg(n=si.count(), last=shouted(col("s"), col("n")).max())
    assert_same(grouped.collect(workers=2), oracle.collect(grouped))


def test_groups_of_built_text_are_partitioned_and_spilled() -> None:
    @si.udf
    def key(s: str, n: int) -> str:
        return f"{s.upper()}-{n}"

    rng = np.random.default_rng(1)
    words = np.array(["ab", "straße", "z" * 30])[rng.integers(0, 3, 60_000)].tolist()
    numbers = rng.integers(0, 20_000, 60_000).tolist()
    want = Counter(map(key.python, words, numbers))
    flow = si.from_arrow(pa.table({"s": words, "n": numbers})).group_by(k=key(col("s"), col("n"))).agg(c=si.count())
    for memory in (None, "1MB"):
        found = flow.collect(workers=2, memory=memory)
        assert dict(zip(found["k"].to_pylist(), found["c"].to_pylist(), strict=True)) == want


# --- None


def test_optional_values() -> None:
    @si.udf
    def filled(x: float | None, n: Optional[int], s: "str | None") -> float | None:  # noqa: UP037, UP045
        if x is None and n is None:
            return None
        best: float | None = None
        for i in range(n or 3):
            if best is None or i > best:
                best = float(i) if i != 1 else best
        if s:
            return best
        y = x if x is not None else n and float(n)
        return y if y is None else y + 1

    check(filled, [None, 1.0, None, 2.0, None], [None, None, 4, 0, 2], [None, "", "a", "", ""])


def test_a_null_is_not_passed_to_a_parameter_that_is_not_optional() -> None:
    @si.udf
    def strict(x: int, y: int | None) -> int:
        return 10 // x if y is None else y

    for engine in ("llvm", "oracle"):
        assert run(strict, [1, None, 5, None], [None, None, 7, 1], engine=engine) == [10, None, 7, None]
    schema = pa.schema([pa.field("x", pa.int64(), nullable=False), pa.field("y", pa.int64())])
    flow = si.flow(schema)
    assert flow.select(z=strict(col("x"), col("y"))).schema.field("z").nullable is False
    assert flow.select(z=strict(col("y"), col("x"))).schema.field("z").nullable is True


def test_filtered_rows_are_not_computed() -> None:
    @si.udf
    def forever(x: int) -> int:
        while x > 0:
            pass
        return 1 // (x + 1)

    table = pa.table({"x": [5, 0, -1, None, -2], "ok": [False, True, False, True, True]})
    flow = si.from_arrow(table).select(y=when(col("ok")).then(forever(col("x"))).otherwise(7))
    for collect in COLLECTS:
        assert collect(flow)["y"].to_pylist() == [7, 1, 7, None, -1]
    filtered = si.from_arrow(table).filter(col("ok")).filter(forever(col("x")) == 1)
    assert filtered.collect()["x"].to_pylist() == [0]


# --- failures


@ENGINES
@pytest.mark.parametrize(("value", "what"), [
    (3, "division by zero"), (2**40, "integer overflow"), (4, "math domain or range error"),
    (5, "impossible cast"), (6, "a negative exponent of an int"), (7, "range() with a step of zero"),
])  # fmt: skip
def test_a_row_that_fails(value: int, what: str, engine: str) -> None:
    @si.udf
    def fails(x: int) -> float:
        if x == 4:
            return math.log(x - 4)
        if x == 5:
            return int(x * 1e200)
        if x == 6:
            return 2 ** (x - 7)
        if x == 7:
            for i in range(0, 5, x - 7):
                return i
        return x * x // (x - 3)

    assert run(fails, [2], engine=engine) == [-4.0]
    line = {3: 11, 2**40: 11, 4: 3, 5: 5, 6: 7, 7: 9}[value] + fails.python.__code__.co_firstlineno
    with pytest.raises(ComputeError) as caught:
        run(fails, [2, value, 9], engine=engine)
    assert f"{what} at test_udf.py:{line}" in str(caught.value)
    assert "fails(x)" in str(caught.value)
    assert "at     test_udf.py:" in str(caught.value)


def test_division_of_floats_by_zero_is_an_error_as_in_python() -> None:
    with pytest.raises(ComputeError, match="division by zero"):
        run(si.udf(_ratio), [1.0], [0.0])


def _ratio(a: float, b: float) -> float:
    return a / b


# --- calls


def test_lambdas_and_lost_sources() -> None:
    with pytest.raises(CannotCompile, match="written with def"):
        si.udf(lambda x: x)
    space: dict[str, Any] = {}
    exec("def f(x: float) -> float:\n    return x", space)
    with pytest.raises(CannotCompile, match="source text is not available"):
        si.udf(space["f"])
    assert run(si.udf(compile=False)(space["f"]), [1.5]) == [1.5]


def test_calls() -> None:
    assert grade(2.0, 1) == 2.0
    assert grade.__name__ == "grade"
    assert grade.__doc__ == "The example of the documentation."
    assert repr(grade(col("p"), qty=2)) == "Column(grade(p, 2))"
    assert repr(twice) == "<udf twice(x: f64, times: f64)>"
    small, large = pa.array([1, 2], pa.int16()), pa.array([1, 2], pa.uint64())
    flow = si.from_arrow(pa.table({"p": small, "s": ["a", "b"], "u": large}))
    assert flow.select(x=twice(col("p"))).collect()["x"].to_pylist() == [2.0, 4.0]
    assert flow.select(x=grade(lit(2.0), col("p"))).collect()["x"].to_pylist() == [2.0, 1.0]
    with pytest.raises(BadArgument, match="grade is called wrongly: missing a required argument: 'qty'"):
        grade(col("p"))
    with pytest.raises(WrongType, match="grade takes float as 'price', not str"):
        flow.select(x=grade(col("s"), 1))
    with pytest.raises(WrongType, match="grade takes int as 'qty', not f64"):
        flow.select(x=grade(1.0, col("p") / 2))
    with pytest.raises(WrongType, match="grade takes int as 'qty', not u64"):
        flow.select(x=grade(1.0, col("u")))
    with pytest.raises(BadArgument, match="is an aggregate"):
        flow.select(x=twice(col("p").sum()))


def test_pickling() -> None:
    for function in (grade, twice):
        again = pickle.loads(pickle.dumps(function.ir))
        assert again == function.ir
        assert hash(again) == hash(function.ir)
        assert repr(again) == repr(function.ir)
    assert pickle.loads(pickle.dumps(grade)) is grade
    assert pickle.loads(pickle.dumps(roman.ir)) == roman.ir


def test_the_code_cache_distinguishes_udfs() -> None:
    results = []
    for factor in (1.0, 2.0, -0.0, 0.0):

        @si.udf
        def scaled(x: float) -> float:
            return x * factor  # noqa: B023

        results += run(scaled, [3.0])
    assert list(map(repr, results)) == ["3.0", "6.0", "-0.0", "0.0"]


# --- functions that stay Python


def test_plain_python() -> None:
    assert run(roman, [1, 3, None]) == ["I", "III", None]
    assert run(roman, [1, 3, None], engine="oracle") == ["I", "III", None]
    flow = si.from_arrow(pa.table({"n": [1, 9, 2]}))
    assert "roman(n)" in flow.select(r=roman(col("n"))).explain("fused")
    guarded = flow.select(r=when(col("n") < 4).then(roman(col("n"))).otherwise(lit("?")))
    assert guarded.collect()["r"].to_pylist() == ["I", "?", "II"]
    for collect in COLLECTS:
        with pytest.raises(ComputeError, match=r"KeyError \(9\) in `roman\(n\)`"):
            collect(flow.select(r=roman(col("n"))))


def test_plain_python_that_returns_another_type() -> None:
    @si.udf(compile=False)
    def liar(x: int) -> int:
        return "no"  # type: ignore[return-value]

    with pytest.raises(ComputeError, match="a result of type str instead of int"):
        run(liar, [1])
    with pytest.raises(CannotCompile, match="parameter 'x' of the udf 'untyped' needs a type"):

        @si.udf(compile=False)
        def untyped(x):  # type: ignore[no-untyped-def]
            return 1


# --- Ctrl-C

ENDLESS = """
import sys, pyarrow as pa, scalein as si
from scalein import col
from tests import oracle

@si.udf
def endless(x: int) -> int:
    while x >= 0:
        x = x % 7
    return x

def run(x):
    si.from_arrow(pa.table({"x": x})).filter(endless(col("x")) == 1).collect(workers=int(sys.argv[1]))

run([-1] * 1000)  # imports all that it needs: class bodies hide what interrupts them
try:
    print("started", flush=True)
    run(list(range(1000)))
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


@pytest.mark.parametrize("workers", [1, 2])
def test_ctrl_c_ends_a_loop(workers: int, tmp_path: Any) -> None:
    file = tmp_path / "endless.py"
    file.write_text(ENDLESS)
    where = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(file), str(workers)]
    with subprocess.Popen(command, text=True, stdout=subprocess.PIPE, env=where) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "started\n"
        time.sleep(1.5)
        assert process.poll() is None
        os.kill(process.pid, signal.SIGINT)
        try:
            assert process.communicate(timeout=20)[0] == "interrupted\n"
        finally:
            process.kill()
