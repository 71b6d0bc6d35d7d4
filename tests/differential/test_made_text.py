"""Text that kernels make: concatenation, alone and inside of everything that reads text."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import scalein as si
from scalein import WrongType, col, lit, when
from scalein.api.flow import Flow
from tests.engines import Engine, by_oracle, check, compare, each_engine, every_compiler, every_engine, examples
from tests.engines import by_engine as run
from tests.strategies import FIXED, STRINGS, of_types, tables

strings = st.sampled_from(STRINGS)
joined = col("a") + "-" + col("b")

USES: dict[str, Callable[[Flow], Flow]] = {
    "columns": lambda flow: flow.select(x=joined, y=lit("<") + col("a") + ">", z=col("b") + col("a")),
    "filter": lambda flow: flow.filter(joined != "a-b").select("n", x=joined),
    "filter of a column": lambda flow: flow.with_columns(x=joined).filter(col("x") > "b").select("x", "n"),
    "functions": lambda flow: flow.select(n=joined.str.len(), s=joined.str.slice(1, 3), e=joined.str.ends_with("b"),
                                          i=joined.is_in(["a-b", "-"]), h=joined.fill_null("none"), c=joined == "a-a"),
    "pyarrow's functions": lambda flow: flow.select(u=joined.str.upper(), x=(col("a").str.lower() + "|") + joined),
    "choices": lambda flow: flow.select(x=when(col("n") > 0).then(joined).otherwise(col("b") + "!"),
                                        y=si.coalesce(joined, col("b"), lit("none"))),
    "groups": lambda flow: flow.group_by(k=joined).agg(n=si.count(), s=col("n").cast(pa.float64()).max()),
    "aggregates": lambda flow: flow.group_by("n").agg(
        low=joined.min(), high=joined.max(), first=joined.first(), many=joined.n_unique(), all=joined.collect(),
        best=joined.top_k(2, by="n"), at=joined.arg_max("b")),
    "one group": lambda flow: flow.group_by().agg(low=joined.min(), many=joined.n_unique()),
    "distinct": lambda flow: flow.with_columns(x=joined).distinct("x").select("x"),
    "sort": lambda flow: flow.sort(joined, "n"),
    "join": lambda flow: flow.select("n", x=joined).join(
        pa.table({"x": ["a-b", "b-a", "-", "a-"], "v": [1, 2, 3, 4]}), on="x", how="left"),
    "several rows": lambda flow: flow.with_columns(x=joined).join(
        pa.table({"n": pa.array([0, 1, 1, 7, 7, 7], pa.int8()), "w": ["p", "q", "r", "s", "t", "u"]}), on="n")
    .select(y=col("x") + col("w"), x="x"),
}  # fmt: skip
ORDERED = {"columns", "filter", "filter of a column", "functions", "pyarrow's functions", "choices", "distinct", "sort",
           "join", "several rows"}  # fmt: skip


@every_engine
@pytest.mark.parametrize("name", USES)
@examples(6)
@given(st.data())
def test_uses(engine: Engine, name: str, data: st.DataObject) -> None:
    table = data.draw(tables(of_types(data.draw(strings), data.draw(strings))))
    numbers = np.random.default_rng(table.num_rows).integers(-3, 8, table.num_rows)
    table = table.append_column("n", pa.array(numbers, pa.int8()))
    check(engine, table, USES[name], ordered=name in ORDERED)


@every_compiler
@examples(12)
@given(st.data())
def test_other_types_become_text(engine: Engine, data: st.DataObject) -> None:
    types = data.draw(strings), data.draw(st.sampled_from([t for t in FIXED if not pa.types.is_duration(t)]))
    table = data.draw(tables(of_types(*types), most=64))
    check(engine, table, lambda flow: flow.select(x=si.concat_str("a", "b", 7, separator=", "), y=si.concat_str("b")),
          ordered=True)


@each_engine
def test_meaning_in_examples(engine: Engine) -> None:
    table = pa.table({"a": ["x", "", None, "é"], "n": [1, None, 3, -4]})
    found = check(engine, table, lambda flow: flow.select(
        both=col("a") + col("a"), left="<" + col("a"), none=col("a") + None,
        text=si.concat_str("a", "n", separator="/"), alone=si.concat_str("n"), constant=lit("p") + "q"), ordered=True)
    assert found is not None
    assert found.to_pydict() == {
        "both": ["xx", "", None, "éé"], "left": ["<x", "<", None, "<é"], "none": [None] * 4,
        "text": ["x/1", None, None, "é/-4"], "alone": ["1", None, "3", "-4"], "constant": ["pq"] * 4}  # fmt: skip


def test_more_text_than_a_chunk_and_than_an_output() -> None:
    table = pa.table({"a": ["x" * 40_000, None, "", "y" * 100_000] * 300, "n": range(1200)})
    flow = si.from_arrow(table).select(t=col("a") + "|" + col("a"), n=(col("a") + "!").str.len())
    compare(run(flow), by_oracle(flow.op), ordered=True)


def test_many_groups_by_text_that_is_made() -> None:
    """So many that rows are partitioned, and their keys are read long after the block in which they were made."""
    words = [f"a key that is longer than twelve bytes {k}" for k in range(200_000)]
    flow = si.from_arrow(pa.table({"a": words * 2})).group_by(k=col("a") + "#" + col("a").str.slice(0, 9))
    for workers in (1, 3):
        found = flow.agg(n=si.count(), last=(col("a") + "!").max()).collect(workers=workers)
        assert sorted(found["k"].to_pylist()) == sorted(f"{word}#a key tha" for word in words)
        assert set(found["n"].to_pylist()) == {2}
        assert sorted(found["last"].to_pylist()) == sorted(f"{word}!" for word in words)


def test_many_columns_of_made_text() -> None:
    """More than are stored for a block: the others are made where they are read."""
    table = pa.table({"a": ["x", None, "z"], "n": [1, 2, 3]})
    flow = si.from_arrow(table).select(**{f"c{k}": col("a") + f"{k}" for k in range(150)})
    compare(run(flow), by_oracle(flow.op), ordered=True)


def test_deep_chains() -> None:
    flow = si.from_arrow(pa.table({"a": ["x", None, "yz"]}))
    text = col("a")
    for _ in range(2_000):
        text = text + "."
    assert flow.select(t=text).collect()["t"].to_pylist() == ["x" + "." * 2_000, None, "yz" + "." * 2_000]


def test_a_job_makes_the_same() -> None:
    table = pa.table({"a": ["x", "y", None] * 100, "t": pa.array(range(300), pa.timestamp("s"))})
    found: list[dict[str, object]] = []
    flow = si.from_arrow(table).with_watermark("t", "1s").group_by(k=col("a") + "!" + col("t").dt.strftime("%M")).agg(
        n=si.count())
    flow.start(sink=si.to_callback(lambda batch: found.extend(batch.to_pylist()))).wait()
    want = flow.collect().to_pylist()
    assert sorted(map(repr, found)) == sorted(map(repr, want))
    assert {"k": "x!00", "n": 20} in found


def test_text_and_numbers_do_not_mix_without_a_cast() -> None:
    flow = si.from_arrow(pa.table({"s": ["a"], "x": [1], "t": [datetime(2024, 5, 1)], "l": [[1]]}))
    for made in (lambda: col("s") + col("x"), lambda: col("x") + col("s"), lambda: col("s") + 1, lambda: 1.5 + col("s"),
                 lambda: col("s") + col("t")):
        with pytest.raises(WrongType, match=r"\+ does not take(.|\n)*hint.*\.cast\(pa\.string\(\)\).*concat_str"):
            flow.select(y=made())
    with pytest.raises(WrongType, match=r"\+ does not take(.|\n)*a list can be passed through"):
        flow.select(y=col("s") + col("l"))
    with pytest.raises(WrongType, match="cannot cast list"):
        flow.select(y=si.concat_str("s", "l"))
    with pytest.raises(si.BadArgument, match="at least one column"):
        si.concat_str()
    with pytest.raises(si.BadArgument, match="separator"):
        si.concat_str("s", separator=1)  # type: ignore[arg-type]


def test_how_it_reads() -> None:
    assert repr(col("a") + "-" + col("b")) == "Column(a + '-' + b)"
    assert repr(si.concat_str("a", "b", separator="/")) == "Column(concat_str(a, b, separator='/'))"
    flow = si.from_arrow(pa.table({"a": ["x"], "b": [1]})).select(y=si.concat_str("a", "b", separator="/"))
    assert "a + '/' + b.cast(str)" in flow.explain()
