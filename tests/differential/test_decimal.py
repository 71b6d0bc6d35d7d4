"""Decimals: exact or an error, in arithmetic, rounding, casts, comparisons, keys, joins and aggregates."""

from __future__ import annotations

import operator
from collections.abc import Callable
from decimal import Decimal as D

import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import scalein as si
from scalein import ComputeError, ScaleinError, col, lit, when
from scalein.api.column import Column
from scalein.dtypes import from_arrow_type
from tests import oracle
from tests.engines import (
    COLLECTS,
    DUCKDB,
    Engine,
    check,
    each_compiler,
    each_engine,
    every_engine,
    examples,
    or_refused,
)
from tests.oracle.values import to_arrow
from tests.strategies import DECIMALS, FLOATS, INTS, array_of, of_types, tables

Binary = Callable[[Column, Column], Column]
MOST = 10**38 - 1


def decimals(digits: list[int | None], precision: int, scale: int) -> pa.Array:
    """Decimals by all their digits as one integer."""
    return to_arrow(digits, from_arrow_type(pa.decimal128(precision, scale)))


# --- arithmetic


@every_engine
@pytest.mark.parametrize("op", [operator.add, operator.sub, operator.mul, operator.truediv])
@examples(12)
@given(st.data())
def test_two_columns(engine: Engine, op: Binary, data: st.DataObject) -> None:
    types = st.sampled_from([*DECIMALS, *INTS])
    schema = of_types(data.draw(st.sampled_from(DECIMALS)), data.draw(types))
    table = data.draw(tables(schema, most=64, extreme=data.draw(st.booleans())))
    a, b = (col("a"), col("b")) if data.draw(st.booleans()) else (col("b"), col("a"))
    check(engine, table, or_refused(lambda flow: flow.select(out=op(a, b))), ordered=True)


@every_engine
@examples(16)
@given(st.data())
def test_a_column_and_a_constant(engine: Engine, data: st.DataObject) -> None:
    table = data.draw(tables(of_types(data.draw(st.sampled_from(DECIMALS))), extreme=data.draw(st.booleans())))
    number = data.draw(st.sampled_from([0, 1, -3, 10**9, D("0.5"), D("-1.25"), D("1E3"), D("0.0001"), D(10) ** 20]))
    op = data.draw(st.sampled_from([operator.add, operator.sub, operator.mul, operator.lt, operator.eq, operator.ge]))
    check(engine, table, or_refused(lambda flow: flow.select(l=op(col("a"), number), r=op(lit(number), col("a")))),
          ordered=True)  # fmt: skip


@every_engine
@examples(12)
@given(st.data())
def test_sign_and_round(engine: Engine, data: st.DataObject) -> None:
    type_ = data.draw(st.sampled_from(DECIMALS))
    table = data.draw(tables(of_types(type_), extreme=data.draw(st.booleans())))
    digits = data.draw(st.integers(-4, type_.scale + 1))
    check(engine, table, lambda flow: flow.select(n=-col("a"), a=abs(col("a"))), ordered=True)
    check(engine, table, lambda flow: flow.select(r=col("a").round(digits)), ordered=True)


@every_engine
@examples(12)
@given(st.data())
def test_floats_take_over(engine: Engine, data: st.DataObject) -> None:
    schema = of_types(data.draw(st.sampled_from(DECIMALS)), data.draw(st.sampled_from(FLOATS)))
    table = data.draw(tables(schema, extreme=data.draw(st.booleans())))
    made = {"add": col("a") + col("b"), "mul": col("b") * col("a"), "half": col("a") * 0.5, "root": col("a").sqrt()}
    check(engine, table, lambda flow: flow.select(**made), ordered=True)


@each_engine
def test_types_of_results(engine: Engine) -> None:
    table = pa.table({"a": decimals([150], 5, 2), "b": decimals([25], 9, 1), "i": pa.array([3], pa.int32())})
    made = {"add": col("a") + col("b"), "mul": col("a") * col("b"), "one": 1 - col("a"), "twice": col("a") * 2,
            "int": col("a") + col("i"), "tax": col("a") * D("1.19"), "div": col("a") / col("i"),
            "some": when(col("a") > 1).then(col("a")).otherwise(col("i"))}  # fmt: skip
    found = check(engine, table, lambda flow: flow.select(**made), ordered=True)
    assert found is not None
    assert found.schema.types == [
        pa.decimal128(11, 2), pa.decimal128(14, 3), pa.decimal128(6, 2), pa.decimal128(6, 2), pa.decimal128(13, 2),
        pa.decimal128(8, 4), pa.float64(), pa.decimal128(12, 2),
    ]  # fmt: skip
    assert found.to_pylist() == [{"add": D("4.00"), "mul": D("3.750"), "one": D("-0.50"), "twice": D("3.00"),
                                  "int": D("4.50"), "tax": D("1.7850"), "div": 0.5, "some": D("1.50")}]  # fmt: skip


@each_engine
@pytest.mark.parametrize(("a", "b", "made"), [
    (MOST, 1, col("a") + col("b")),
    (-MOST, 1, col("a") - col("b")),
    (10**19, 10**19, col("a") * col("b")),
    (-(10**20), 10**18, col("a") * col("b")),
    (2**64, 2**63, col("a") * col("b")),
    (2**127 // 10, 10, col("a") * col("b")),
    (MOST, MOST, col("a") * col("b")),
    (MOST, 1, col("a").round(-1)),
])  # fmt: skip
def test_too_many_digits_are_an_error(engine: Engine, a: int, b: int, made: Column) -> None:
    table = pa.table({"a": decimals([a], 38, 0), "b": decimals([b], 38, 0)})
    assert check(engine, table, lambda flow: flow.select(x=made), ordered=True) is None
    # Not asked for, not failed.
    guarded = when(col("a") == 0).then(made)
    found = check(engine, table, lambda flow: flow.select(x=guarded), ordered=True)
    assert found is not None
    assert found["x"].to_pylist() == [None]


@each_engine
def test_the_most_digits_are_none_too_many(engine: Engine) -> None:
    digits = [MOST, -MOST, 10**19, -(10**18)]
    table = pa.table({"a": decimals(digits, 38, 0), "b": decimals([0, 1, 9, -(10**18)], 38, 0)})
    made = {"mul": col("a") * col("b"), "neg": -col("a"), "abs": abs(col("a")), "zero": col("a") - col("a")}
    found = check(engine, table, lambda flow: flow.select(**made), ordered=True)
    assert found is not None
    assert [int(value) for value in found["mul"].to_pylist()] == [0, -MOST, 9 * 10**19, 10**36]


# --- casts


@every_engine
@examples(24)
@given(st.data())
def test_casts_between_decimals_and_numbers(engine: Engine, data: st.DataObject) -> None:
    wide = [*DECIMALS, pa.decimal128(38, 38), pa.decimal128(38, 0), pa.decimal128(2, 0)]
    types = [data.draw(st.sampled_from(wide)), data.draw(st.sampled_from([*wide, *INTS, *FLOATS]))]
    source, target = types if data.draw(st.booleans()) else types[::-1]
    table = data.draw(tables(of_types(source), most=64, extreme=data.draw(st.booleans())))
    check(engine, table, lambda flow: flow.select(out=col("a").cast(target)), ordered=True)
    check(engine, table, lambda flow: flow.select(out=col("a").try_cast(target)), ordered=True)


@every_engine
def test_every_power_of_ten_divides_right(engine: Engine) -> None:
    """Fewer digits behind the point: just below, at and above multiples and halves, up to the most digits there are."""
    columns, made = {}, {}
    for power in range(1, 39):
        unit = 10**power
        most = MOST // unit
        near = [k * unit + rest for k in (0, 1, 7, most - 1, most) for rest in (-1, 0, 1, unit // 2 - 1, unit // 2)]
        sizes = [value for value in [*near, MOST, 2**64, 2**64 - 1, 2**63] if 0 <= value <= MOST]
        digits = [sign * value for value in sizes for sign in (1, -1)]
        columns[f"c{power}"] = decimals((digits + [None] * 58)[:58], 38, power)
        made[f"c{power}"] = col(f"c{power}").cast(pa.decimal128(38, 0))
        made[f"t{power}"] = col(f"c{power}").cast(pa.float64())
    found = check(engine, pa.table(columns), lambda flow: flow.select(**made), ordered=True)
    assert found is not None


@each_compiler
def test_casts_in_examples(engine: Engine) -> None:
    table = pa.table({"a": decimals([249, 250, -250, -249, 995, None], 3, 2), "i": [1, -1, 999, 0, 5, None],
                      "f": [0.25, -0.25, 1e15, 0.05, -9.95, None]})  # fmt: skip
    made = {"near": col("a").cast(pa.decimal128(3, 1)), "whole": col("a").cast(pa.int8()), "real": col("a").cast(float),
            "text": col("a").cast(pa.string()), "dec": col("i").cast(pa.decimal128(6, 3)),
            "of": col("f").cast(pa.decimal128(20, 1))}  # fmt: skip
    found = check(engine, table, lambda flow: flow.select(**made), ordered=True)
    assert found is not None
    assert found.to_pydict() == {
        "near": [D("2.5"), D("2.5"), D("-2.5"), D("-2.5"), D("10.0"), None],
        "whole": [2, 2, -2, -2, 9, None],
        "real": [2.49, 2.5, -2.5, -2.49, 9.95, None],
        "text": ["2.49", "2.50", "-2.50", "-2.49", "9.95", None],
        "dec": [D("1.000"), D("-1.000"), D("999.000"), D("0.000"), D("5.000"), None],
        "of": [D("0.3"), D("-0.3"), D("1000000000000000.0"), D("0.1"), D("-10.0"), None],
    }


@each_compiler
@pytest.mark.parametrize(("array", "target"), [
    (decimals([99995], 5, 4), pa.decimal128(4, 3)),
    (decimals([1000], 4, 0), pa.decimal128(5, 2)),
    (decimals([12800], 5, 2), pa.int8()),
    (decimals([-1], 5, 0), pa.uint8()),
    (decimals([2**63], 38, 0), pa.int64()),
    (pa.array([1000], pa.int16()), pa.decimal128(5, 2)),
    (pa.array([float("nan")]), pa.decimal128(38, 2)),
    (pa.array([float("-inf")]), pa.decimal128(38, 2)),
    (pa.array([1.01e38]), pa.decimal128(38, 0)),
    (pa.array([2.0**200]), pa.decimal128(38, 0)),
    (pa.array([9.996]), pa.decimal128(3, 2)),
    (pa.array(["1.239"]), pa.decimal128(5, 2)),
    (pa.array(["many"]), pa.decimal128(5, 2)),
])  # fmt: skip
def test_impossible_casts(engine: Engine, array: pa.Array, target: pa.DataType) -> None:
    table = pa.table({"a": array})
    assert check(engine, table, lambda flow: flow.select(x=col("a").cast(target)), ordered=True) is None


@each_engine
def test_floats_round_once(engine: Engine) -> None:
    """Decimals beyond 64 bits come as near as floats can: halfway values go to the even one."""
    digits = [2**53 + 1, 2**64 + 2**11, 2**64 + 2**12, 2**64 + 2**11 + 1, 2**100 + 2**47, 2**100 + 2**47 + 1, MOST]
    table = pa.table({"a": decimals([*digits, *(-value for value in digits), None], 38, 0)})
    found = check(engine, table, lambda flow: flow.select(x=col("a").cast(float)), ordered=True)
    assert found is not None
    assert found["x"].to_pylist() == [*map(float, digits), *(-float(value) for value in digits), None]


@pytest.mark.parametrize("cpu", ["native", "x86-64-v3", "x86-64"])
def test_each_row_keeps_its_sign(cpu: str) -> None:
    """LLVM's vectors of 128-bit integers mix up their lanes where a sign or a null selects: they must not be made."""
    floats = [-2.75, 1.5, -1.25, None, 3.0] * 50
    table = pa.table({"f": floats, "d": pa.array([None if f is None else D(f) for f in floats], pa.decimal128(30, 2))})
    made = {"cast": col("f").cast(pa.decimal128(4, 1)), "less": col("d").cast(pa.decimal128(30, 1)),
            "size": abs(col("d")), "some": when(col("f") < 0).then(-col("d")).otherwise(col("d") * 2)}  # fmt: skip
    flow = si.from_arrow(table).select(**made)
    assert flow.collect(cpu=cpu).equals(oracle.collect(flow))


# --- comparisons, keys, joins


@every_engine
@examples(12)
@given(st.data())
def test_comparisons_of_two_types(engine: Engine, data: st.DataObject) -> None:
    small = [pa.decimal128(4, 1), pa.decimal128(18, 2), pa.decimal128(19, 0), pa.decimal128(9, 4), *INTS, *FLOATS]
    schema = of_types(data.draw(st.sampled_from(small[:4])), data.draw(st.sampled_from(small)))
    table = data.draw(tables(schema, extreme=data.draw(st.booleans())))
    made = {"eq": col("a") == col("b"), "lt": col("a") < col("b"), "ge": col("b") >= col("a")}
    check(engine, table, lambda flow: flow.select(**made), ordered=True)


@every_engine
@examples(6)
@given(st.data())
def test_lists_short_and_long(engine: Engine, data: st.DataObject) -> None:
    table = data.draw(tables(of_types(data.draw(st.sampled_from(DECIMALS))), extreme=True))
    some = st.sampled_from([0, 1, -1, D("0.5"), D("1.25"), D("-2.0001"), 10**18, None])
    listed = data.draw(st.lists(some, max_size=6))
    many = [*listed, *(D(number) / 4 for number in range(-40, 40))]
    check(engine, table, lambda flow: flow.select(few=col("a").is_in(listed), many=col("a").is_in(many)), ordered=True)


@every_engine
@pytest.mark.parametrize("how", ["inner", "left", "semi", "anti"])
@examples(4)
@given(st.data())
def test_joins_of_two_types(engine: Engine, how: str, data: st.DataObject) -> None:
    keys = [pa.decimal128(4, 1), pa.decimal128(9, 2), pa.decimal128(30, 4), pa.int16()]
    left = data.draw(tables(of_types(data.draw(st.sampled_from(keys[:3])), pa.int8())))
    right = data.draw(tables(of_types(data.draw(st.sampled_from(keys)), pa.decimal128(38, 10)), most=64))
    other = si.from_arrow(right)
    check(engine, left, lambda flow: flow.join(other, on="a", how=how), ordered=False)


# --- aggregates


@every_engine
@pytest.mark.parametrize("keys", [(), ("b",)], ids=["all", "by key"])
@examples(10)
@given(st.data())
def test_aggregates(engine: Engine, keys: tuple[str, ...], data: st.DataObject) -> None:
    table = data.draw(tables(of_types(data.draw(st.sampled_from(DECIMALS)), data.draw(st.sampled_from(DECIMALS)))))
    a = col("a")
    made = {"s": a.sum(), "m": a.mean(), "lo": a.min(), "hi": a.max(), "f": a.first(), "l": a.last(), "n": a.count(),
            "at": col("b").arg_max("a"), "u": a.n_unique(), "q": a.quantile(0.25), "v": a.std()}  # fmt: skip
    chosen = data.draw(st.lists(st.sampled_from(list(made)), min_size=1, max_size=4, unique=True))
    check(engine, table, lambda flow: flow.group_by(*keys).agg(**{name: made[name] for name in chosen}),
          ordered=False, tolerance=1e-9)  # fmt: skip


@every_engine
@examples(2)
@given(st.data())
def test_many_rows(engine: Engine, data: st.DataObject) -> None:
    schema = of_types(data.draw(st.sampled_from(DECIMALS)), pa.decimal128(12, 2))
    table = data.draw(tables(schema, least=5000, most=5000))
    made = {"s": col("b").sum(), "t": (col("b") * (1 - col("b"))).sum(), "m": col("b").mean(), "n": si.count()}
    check(engine, table, lambda flow: flow.group_by("a").agg(**made), ordered=False)


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("keys", [(), ("k",)], ids=["all", "by key"])
def test_sums_are_exact_until_they_come_out(keys: tuple[str, ...], workers: int) -> None:
    digits = [MOST, MOST, MOST, -5, None, -MOST, -MOST] * 400 + [-MOST] * 399
    total = MOST - 2000
    table = pa.table({"x": decimals(digits, 38, 4), "k": [0] * len(digits)})
    flow = si.from_arrow(table.to_batches(max_chunksize=100)).group_by(*keys)
    found = flow.agg(s=col("x").sum(), m=col("x").mean()).collect(workers=workers)
    assert found["s"].to_pylist() == [D(f"{total}E-4")]
    assert found["m"].to_pylist() == pytest.approx([total / (len(digits) - 400) / 1e4], rel=1e-15)
    over = si.from_arrow(table.slice(0, 2)).group_by(*keys).agg(s=col("x").sum())
    for collect in COLLECTS:
        with pytest.raises(ComputeError, match="overflow"):
            collect(over)
    mean = si.from_arrow(table.slice(0, 2)).group_by(*keys).agg(m=col("x").mean())
    assert mean.collect(workers=workers)["m"].to_pylist() == [1e34]


@each_engine
def test_nothing_and_only_nulls(engine: Engine) -> None:
    made = {"s": col("x").sum(), "m": col("x").mean(), "lo": col("x").min(), "f": col("x").first(), "n": si.count()}
    for rows in (0, 5):
        table = pa.table({"x": pa.nulls(rows, pa.decimal128(9, 2)), "k": pa.nulls(rows, pa.decimal128(20, 2))})
        check(engine, table, lambda flow: flow.group_by().agg(**made), ordered=False)
        check(engine, table, lambda flow: flow.group_by("k").agg(**made), ordered=False)
        check(engine, table, lambda flow: flow.select(y=col("x") * col("k"), z=col("x").fill_null(1)), ordered=True)


def test_negative_scales() -> None:
    table = pa.table({"a": decimals([5, -15, None], 3, -2), "b": decimals([1, 25, 3], 4, 1)})
    made = {"add": col("a") + col("b"), "mul": col("a") * col("b"), "i": col("a").cast(pa.int64()),
            "f": col("a").cast(float), "d": col("a").cast(pa.decimal128(4, -3)), "gt": col("a") > 100,
            "e": col("b").cast(pa.decimal128(4, -1))}  # fmt: skip
    flow = si.from_arrow(table).select(**made)
    found = flow.collect()
    assert found.equals(oracle.collect(flow))
    assert found["i"].to_pylist() == [500, -1500, None]
    assert found["f"].to_pylist() == [500.0, -1500.0, None]
    assert found["gt"].to_pylist() == [True, False, None]


# --- where decimals come from


def test_decimals_of_pandas_and_python() -> None:
    frame = pd.DataFrame({"item": ["pen", "ink", "pen"], "price": [D("1.50"), D("12.25"), None], "count": [10, 2, 3]})
    totals = si.from_arrow(frame).group_by("item").agg(total=(col("price") * col("count")).sum()).collect()
    assert sorted(totals.to_pylist(), key=lambda row: row["item"]) == [
        {"item": "ink", "total": D("24.50")}, {"item": "pen", "total": D("15.00")},
    ]  # fmt: skip


@pytest.mark.parametrize("narrow", [pa.decimal32(7, 2), pa.decimal64(15, 2)])
def test_narrow_decimals_are_widened(narrow: pa.DataType) -> None:
    table = pa.table({"a": array_of([150, None, -25], narrow)})
    found = si.from_arrow(table).with_columns(b=col("a") + 1).collect()
    assert found.schema.types == [pa.decimal128(narrow.precision, 2), pa.decimal128(narrow.precision + 1, 2)]
    assert found["b"].to_pylist() == [D("2.50"), None, D("0.75")]


def test_text_of_a_plan() -> None:
    flow = si.from_arrow(pa.table({"a": decimals([1], 5, 2)})).filter(col("a") >= D("-1.5")).select(x=col("a") * 2)
    assert "a >= Decimal('-1.50')" in flow.explain()
    assert "x: decimal[6, 2]?" in flow.explain()


@pytest.mark.parametrize(("made", "says"), [
    (lambda: col("d") // 2, "// does not take decimals"),
    (lambda: col("d") % col("d"), "% does not take decimals"),
    (lambda: col("d") + col("b"), "+ does not take decimal[5, 2] and bool"),
    (lambda: col("d") * col("s"), "* does not take decimal[5, 2] and str"),
    (lambda: col("deep") * col("deep"), "40 decimals"),
    (lambda: col("d").cast(pa.bool_()), "cannot cast decimal[5, 2] to bool"),
    (lambda: col("d").cast(pa.date32()), "cannot cast decimal[5, 2] to date"),
    (lambda: col("d") == "1.5", "cannot compare decimal[5, 2] and str"),
    (lambda: col("d").str.len(), "takes text, not decimal[5, 2]"),
    (lambda: col("d") + D("NaN"), "no decimal of 38 digits"),
    (lambda: col("d") + D(10) ** 40, "no decimal of 38 digits"),
])  # fmt: skip
def test_what_is_refused(made: Callable[[], Column], says: str) -> None:
    table = pa.table({"d": decimals([1], 5, 2), "b": [True], "s": ["a"], "deep": decimals([1], 20, 20)})
    with pytest.raises(ScaleinError) as caught:
        si.from_arrow(table).select(x=made())
    assert says in str(caught.value)
    assert "test_decimal.py" in str(caught.value)


def test_longer_decimals_are_refused() -> None:
    with pytest.raises(ScaleinError, match="'x' has a type") as caught:
        si.from_arrow(pa.table({"x": pa.array([D(1)], pa.decimal256(50, 2))}))
    assert "pa.decimal128(38" in str(caught.value)


def test_meaning_in_examples() -> None:
    table = pa.table({"p": pa.array([D("19.99"), D("0.01"), None]), "q": [3, 7, 1]})
    made = {"gross": (col("p") * col("q") * D("1.19")).round(2), "share": col("p") / 3}
    found = check(DUCKDB, table, lambda flow: flow.select(**made), ordered=True)
    assert found is not None
    assert found["gross"].to_pylist() == [D("71.3600"), D("0.0800"), None]
