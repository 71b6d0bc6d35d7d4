"""Names from PySpark, pandas, Polars, Flink and Bytewax: each is answered with the name here, and Python's protocols
still work. So are functions of numpy and math.
"""

from __future__ import annotations

import copy
import math
import pickle
import re
from collections.abc import Callable, Iterator, Mapping

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest

import scalein as si
from scalein import BadArgument, col, errors
from scalein.api import hints
from scalein.api.column import Column

FLOW = si.from_arrow(pa.table({"x": [1, 2], "s": ["a", "b"]}))
GROUPS = FLOW.group_by("s")
EMPTY = pa.schema({"x": pa.int64()})
MET: list[tuple[object, Mapping[str, str]]] = [
    (FLOW, hints.FLOW), (col("x"), hints.COLUMN), (col("s").str, hints.STR), (col("x").dt, hints.DT),
    (col("x").list, hints.LIST), (col("x").struct, hints.STRUCT), (GROUPS, hints.GROUP_BY),
    (si.when(col("x") > 1), hints.WHEN), (si, hints.MODULE),
]  # fmt: skip


@si.udf
def _half(v: float) -> float:
    return v / 2


IDS = ["flow", "column", "str", "dt", "list", "struct", "group_by", "when", "module"]


@pytest.mark.parametrize(("met", "name", "hint"), [
    (FLOW, "with_column", "a Flow has no 'with_column'; use with_columns"),
    (col("x"), "isin", "a Column has no 'isin'; use is_in"),
    (col("x"), "desc", "a Column has no 'desc'; use flow.sort(column, descending=True)"),
    (col("s").str, "to_lowercase", ".str has no 'to_lowercase'; use lower"),
    (col("x").dt, "dayofyear", ".dt has no 'dayofyear'; use ordinal_day"),
    (col("x").list, "last", ".list has no 'last'; use get(-1)"),
    (col("x").struct, "getField", ".struct has no 'getField'; use field"),
    (GROUPS, "count", "a GroupBy has no 'count'; use .agg(si.count())"),
    (si, "greatest", "scalein has no 'greatest'; use max_horizontal"),
    (si, "hopping", 'scalein has no \'hopping\'; use sliding("t", "10s", every="2s")'),
    (si, "window_all", "scalein has no 'window_all'; use flow.group_by(si.tumbling(...)), without keys"),
    (col("x"), "nothing_like_it", "a Column has no 'nothing_like_it'"),
    (FLOW, "s", "a Flow has no 's'; col('s') is the column"),
    (FLOW, "null_count", "a Flow has no 'null_count'; use describe()"),
    (FLOW, "value_counts", "a Flow has no 'value_counts'; use group_by(name).agg(si.count())"),
    (col("x"), "null_count", "a Column has no 'null_count'; use si.count().filter(column.is_null())"),
    (col("x"), "corr", "a Column has no 'corr'; use si.corr(x, y)"),
    (si, "Int64", "scalein has no 'Int64'; use a type of pyarrow or its name: pa.int64(), \"int64\""),
    (si.when(col("x") > 1), "otherwise", "when(...) without then(...) has no 'otherwise'; use then(value) first"),
])  # fmt: skip
def test_a_name_from_elsewhere_is_answered(met: object, name: str, hint: str) -> None:
    with pytest.raises(AttributeError) as caught:
        getattr(met, name)
    assert (str(caught.value), caught.value.name) == (hint, name)


@pytest.mark.parametrize(("met", "table"), MET, ids=IDS)
def test_hints_are_about_names_that_are_missing_and_lead_to_some_that_are_not(
    met: object, table: Mapping[str, str]
) -> None:
    assert [name for name in table if hasattr(met, name)] == []
    homes = {"flow": FLOW, "si": si, ".str": col("x").str, ".list": col("x").list, ".struct": col("x").struct,
             'col("x")': col("x"), 'col("x").str': col("x").str, 'col("x").dt': col("x").dt}  # fmt: skip
    for hint in table.values():
        if found := re.match(r"use (\w+)\b(?!\.)", hint):
            assert hasattr(met, found[1]) or found[1] in ("it", "print", "when", "Python", "a"), hint
        if found := re.match(r'use (flow|si|\.str|\.list|\.struct|col\("x"\)(?:\.str|\.dt)?)\.(\w+)', hint):
            assert hasattr(homes[found[1]], found[2]) or found[2] in ("str", "dt"), hint


@pytest.mark.parametrize(("met", "table"), MET[:-1], ids=IDS[:-1])
def test_protocols_find_what_they_look_for_missing(met: object, table: Mapping[str, str]) -> None:
    for name in ("_repr_png_", "_ipython_display_", "__array__", "__arrow_c_array__", "__array_interface__"):
        assert not hasattr(met, name)
    assert hasattr(met, "__arrow_c_stream__") == isinstance(met, si.Flow)
    assert repr(copy.copy(met)).partition(" at ")[0] == repr(met).partition(" at ")[0]


@pytest.mark.parametrize(("slip", "hint"), [
    (lambda: FLOW["x"], "a Flow has no items; col('x') is the column, and flow.select('x') the flow of it alone"),
    (lambda: FLOW["x", "s"], "a Flow has no items; use flow.select('x', 's')"),
    (lambda: FLOW[["x", "s"]], "a Flow has no items; use flow.select('x', 's')"),
    (lambda: FLOW[:3], "a Flow has no items; use flow.limit(n), or collect() and slice its table"),
    (lambda: FLOW[col("x") > 1], "a Flow has no items; use flow.filter(condition), or flow.select(...)"),
    (lambda: len(FLOW), "a Flow has no length before it runs; use flow.count()"),
    (lambda: list(FLOW), "a Flow cannot be looped over; use flow.batches(), or flow.collect().to_pylist() for rows"),
    (lambda: "x" in FLOW, "`in` does not look into a Flow; flow.columns has the names: 'x' in flow.columns"),
])  # fmt: skip
def test_subscripts_length_loops_and_in_are_answered(slip: Callable[[], object], hint: str) -> None:
    with pytest.raises(TypeError) as caught:
        slip()
    assert str(caught.value) == hint
    assert bool(FLOW), "a flow is true, whatever it will give"


X = si.from_arrow({"x": [1]})


@pytest.mark.parametrize(("slip", "hint"), [
    (lambda: FLOW.sort("x", ascending=False), "'ascending'; use descending=True"),
    (lambda: FLOW.sort(by="x"), "'by'; give only the columns: sort(\"x\", \"y\")"),
    (lambda: FLOW.sort("x", key=len), "'key'; it is sort(*by, descending=False, nulls_last=False)"),
    (lambda: FLOW.join(X, on="x", suffix="_r"), "'suffix'; a name that both sides have gets _right"),
    (lambda: FLOW.join(X, "x", "left"), 'use join(other, on="x", how="left")'),
    (lambda: FLOW.write_parquet("x", partition_by="s"), "si.to_parquet(folder, partition_by="),
    (lambda: FLOW.write_csv(), "'path'; it is write_csv(path, data=None"),
    (lambda: FLOW.rename(columns={"x": "y"}), 'use rename({"old": "new"})'),
    (lambda: FLOW.filter(x=1), 'filter(col("x") == 1)'),
    (lambda: FLOW.distinct(subset=["x"]), 'distinct("x", "y")'),
    (lambda: FLOW.start(), "start(sink=si.to_parquet(folder))"),
    (lambda: si.sliding("t", "10s", "2s"), 'use sliding("time", "10s", every="2s")'),
    (lambda: si.tumbling("t", every="2s"), "for windows that overlap"),
    (lambda: si.when(col("x") > 1, 1), "use when(condition).then(value).otherwise(other)"),
    (lambda: si.when(col("x") > 1).then(1, 2), "then(value).otherwise(other)"),
    (lambda: col("s").str.strptime("%Y"), 'strptime(pa.timestamp("us"), "%Y-%m-%d")'),
    (lambda: col("s").str.contains("a|b", regex=True), "matches(pattern)"),
    (lambda: col("x").is_in(1, 2), "is_in([1, 2, 3])"),
    (lambda: col("x").std(ddof=0), "(ddof 1)"),
    (lambda: col("x", "s"), "it takes one name"),
    (lambda: si.count("x"), 'col("x").count() counts values'),
    (lambda: si.concat_str("x", sep="-"), "use separator="),
    (lambda: si.read_csv("a.csv", sep=";"), "use delimiter="),
    (lambda: si.read_parquet("a", columns=["x"]), "use .select(...)"),
    (lambda: si.to_parquet("a", partition_cols="x"), "use partition_by="),
])  # fmt: skip
def test_arguments_from_elsewhere_are_answered(slip: Callable[[], object], hint: str) -> None:
    with pytest.raises(TypeError) as caught:
        slip()
    assert hint in str(caught.value)


def test_every_function_with_hints_for_arguments_gives_them_and_is_documented_as_before() -> None:
    """By its own name, so that a function that is renamed or not decorated is found."""
    from scalein.api import column, flow, functions, methods, sinks, sources, windows

    for name in hints.ARGUMENTS:
        owner, _, method = name.rpartition(".")
        homes = [getattr(module, owner) if owner else module
                 for module in (column, flow, functions, methods, sinks, sources, windows)
                 if hasattr(module, owner or method)]
        function = getattr(homes[0], method)
        assert function.__wrapped__.__qualname__ == name
        assert function.__globals__ is function.__wrapped__.__globals__, "doctests are collected of the module's own"
        with pytest.raises(TypeError, match="no_such_argument'; "):
            function(no_such_argument=1)


def test_a_type_error_inside_of_a_function_stays_as_it_is() -> None:
    class Mine:
        def __iter__(self) -> Iterator[object]:
            raise TypeError("my own")

    with pytest.raises(TypeError, match=r"^my own$"):
        col("x").is_in(Mine())


@pytest.mark.parametrize(("name", "hint"), [
    ("key_by", "group_by"), ("keyBy", "group_by"), ("window_all", "group_by(si.tumbling"), ("groupby", "group_by"),
    ("where", "filter"), ("withColumn", "with_columns"), ("map", "@si.udf"), ("flat_map", "explode"),
    ("show", "print(flow.head().collect())"), ("to_pandas", "collect().to_pandas()"), ("agg", "group_by().agg"),
    ("crossJoin", 'join(other, how="cross")'), ("shape", "count()"), ("to_parquet", "write_parquet"),
    ("fold_window", "group_by"), ("assign_timestamps_and_watermarks", "with_watermark"),
])  # fmt: skip
def test_what_is_written_first_by_habit(name: str, hint: str) -> None:
    with pytest.raises(AttributeError, match=re.escape(hint)):
        getattr(FLOW, name)


def test_the_package_shows_its_public_names_only() -> None:
    assert dir(si) == sorted(si.__all__)
    assert [name for name in vars(errors) if isinstance(found := getattr(errors, name), type)
            and issubclass(found, si.ScaleinError) and name not in si.__all__] == []


def test_columns_can_be_copied_and_pickled() -> None:
    written = (col("x") + 1).alias("y")
    for again in (copy.deepcopy(written), pickle.loads(pickle.dumps(written))):
        assert repr(again) == repr(written)


def test_modules_of_the_package_are_still_found() -> None:
    from scalein import compiler

    assert compiler.compile_flow(FLOW.op) is not None


@pytest.mark.parametrize(("made", "same"), [
    (lambda x: np.log(x), lambda x: x.log()), (lambda x: np.sqrt(x), lambda x: x.sqrt()),
    (lambda x: np.exp(x), lambda x: x.exp()), (lambda x: np.abs(x), lambda x: x.abs()),
    (lambda x: np.floor(x), lambda x: x.floor()), (lambda x: np.power(x, 2), lambda x: x**2),
    (lambda x: np.isnan(x), lambda x: x.is_nan()), (lambda x: np.add(1, x), lambda x: 1 + x),
    (lambda x: np.float64(2) * x, lambda x: 2.0 * x), (lambda x: np.int64(1) - x, lambda x: 1 - x),
    (lambda x: x / np.float32(0.5), lambda x: x / 0.5), (lambda x: np.int8(3) < x, lambda x: si.lit(3) < x),
    (lambda x: np.logical_and(x > 1, x < 2), lambda x: (x > 1) & (x < 2)), (lambda x: np.negative(x), lambda x: -x),
    (lambda x: round(x, 2), lambda x: x.round(2)), (lambda x: math.floor(x), lambda x: x.floor()),
    (lambda x: math.ceil(x), lambda x: x.ceil()), (lambda x: abs(x), lambda x: x.abs()),
])  # fmt: skip
def test_functions_of_numpy_and_math_that_have_an_equal(
    made: Callable[[Column], Column], same: Callable[[Column], Column]
) -> None:
    found, want = made(col("x")), same(col("x"))
    assert isinstance(found, Column)
    assert repr(found) == repr(want)
    table = pa.table({"x": [1.5, 0.25, None, float("nan")]})
    flow = si.from_arrow(table)
    assert repr(flow.select(y=found).collect()) == repr(flow.select(y=want).collect())


@pytest.mark.parametrize(("slip", "says"), [
    (lambda x: np.log10(x), "np.log10 does not take a column(.|\n)*log\\(\\) / math"),
    (lambda x: np.maximum(x, 1), "si.max_horizontal"), (lambda x: np.sin(x), "np.sin(.|\n)*@si.udf"),
    (lambda x: np.add(x, 1, out=np.zeros(1)), "np.add does not take"), (lambda x: np.add.reduce(x), "np.add"),
    (lambda x: np.where(x > 1, 2, 3), r"np.where(.|\n)*when"), (lambda x: np.round(x, 1), r"np.round(.|\n)*\.round"),
    (lambda x: np.sum(x), r"np.sum(.|\n)*\.sum\(\)"), (lambda x: np.array([1, 2]) + x, "ndarray cannot be used"),
    (lambda x: math.sqrt(x), r"not one number(.|\n)*\.sqrt\(\)"), (lambda x: math.log(x), r"\.log\(\)"),
    (lambda x: float(x), r"\.cast\(float\)"), (lambda x: int(x), r"\.cast\(int\)"),
    (lambda x: range(x), "not one number"), (lambda x: len(x), "si.count"), (lambda x: x[0], r"\.list\.get"),
    (lambda x: x["a"], r"\.struct\.field\('a'\)"), (lambda x: bool(x), "neither true nor false"),
    (lambda x: [*x], "looped over"), (lambda x: 1 if x > 2 else 3, "& for and"),
    (lambda x: 3 in x, "is_in"), (lambda x: list(x), "looped over"), (lambda x: sum(x), r"\.sum\(\) (.|\n)*in agg"),
    (lambda x: max(x, 3), "max_horizontal"), (lambda x: min(x, x + 1), "min_horizontal"),
    (lambda x: x == 1 & x == 2, "parentheses"), (lambda x: x > 1 | x > 2, "parentheses"),
    (lambda x: FLOW.select(y=si.when(x > 1)), r"when\(x > 1\)(.|\n)*then\(value\)"),
    (lambda x: FLOW.select(y=pl.col("x")), "polars.Expr(.|\n)*scalein's col"),
    (lambda x: x + pl.col("x"), "polars.Expr(.|\n)*scalein's col"),
    (lambda x: FLOW.sort(pl.col("x")), "scalein's col"),
    (lambda x: FLOW.group_by("x").agg(pl.col("s")), "scalein's col"),
    (lambda x: x + FLOW, "a flow is not a column"), (lambda x: FLOW.describe("x"), r"flow\.select\('x'\)"),
    (lambda x: FLOW.count(["x", "s"]), r"flow\.select\('x', 's'\)"),
    (lambda x: si.flow(EMPTY).count(), r"count\(data\)"),
    (lambda x: si.flow(EMPTY).describe(), r"describe\(data\)"),
    (lambda x: si.flow(pl.Schema({"x": pl.Int64})), "to_arrow"),
    (lambda x: si.flow(pd.DataFrame({"x": [1]}).dtypes), "from_pandas"),
    (lambda x: si.flow(EMPTY.empty_table()), r"\.schema"),
    (lambda x: x.str.strptime("%Y", pa.date32()), "after the type"), (lambda x: FLOW.select(x.abs), "parentheses"),
    (lambda x: FLOW.select(y=x.dt.year), "parentheses"), (lambda x: FLOW.group_by("x").agg(x.sum), "parentheses"),
    (lambda x: FLOW.group_by("x", as_index=False), "no option 'as_index'(.|\n)*leave it out"),
    (lambda x: FLOW.group_by("s").agg(y=("x", "max")), r"write col\('x'\)\.max\(\)"),
    (lambda x: FLOW.join(FLOW, x == x), r"not a condition(.|\n)*left_on="),
    (lambda x: FLOW.join(FLOW, on=[x > col("elsewhere")]), "not a condition"),
    (lambda x: FLOW.union([FLOW, FLOW]), r"not a list of them(.|\n)*flow\.union\(\*others\)"),
    (lambda x: x.is_in(FLOW), 'not a table or a flow(.|\n)*how="semi"'),
    (lambda x: x.is_in(FLOW.collect()), 'not a table or a flow(.|\n)*how="semi"'),
    (lambda x: x.is_in(pd.DataFrame({"x": [1]})), 'not a table or a flow(.|\n)*how="semi"'),
    (lambda x: si.read_csv("https://host/a.csv"), r"read_csv takes a path(.|\n)*not a URL(.|\n)*from_arrow"),
    (lambda x: si.read_parquet("s3://bucket/*.parquet"), "not a URL"),
    (lambda x: _half("x"), r"_half takes columns or numbers(.|\n)*col\('x'\)"),
])  # fmt: skip
def test_slips_are_answered_at_their_line(slip: Callable[[Column], object], says: str) -> None:
    with pytest.raises(BadArgument, match=says) as caught:
        slip(col("x"))
    assert caught.value.facts["at"].startswith("test_elsewhere.py:")


def test_names_that_are_no_columns() -> None:
    for slip, says in ((lambda: FLOW.with_columns(y="abc"), r"written si\.lit\('abc'\)"),
                       (lambda: FLOW.select("*", y=col("x") + 1), r"with_columns\(\.\.\.\) keeps all columns")):
        with pytest.raises(si.UnknownColumn, match=says):
            slip()
