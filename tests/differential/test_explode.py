"""explode: a row for each element, in order; null and empty lists give none."""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import scalein as si
from scalein import BadArgument, UnknownColumn, WrongType, col
from scalein.api.flow import Flow
from scalein.exec import host
from tests import nested
from tests.engines import DUCKDB, Engine, check, engines_and, every_engine, examples
from tests.nested import LISTS, NESTED, STRUCTS, UNTRANSLATED


@engines_and("arrow", LISTS, untranslated=UNTRANSLATED)
@examples(2)
@given(st.data())
def test_every_layout(engine: Engine, arrow: pa.DataType, data: st.DataObject) -> None:
    other = data.draw(st.sampled_from(STRUCTS if engine is DUCKDB else NESTED))
    table = data.draw(nested.tables(arrow, other))
    found = check(engine, table, lambda flow: flow.explode("n0"), ordered=True)
    assert found is not None
    lists, keys = table["n0"].to_pylist(), table["k"].to_pylist()
    assert repr(found["n0"].to_pylist()) == repr([value for each in lists for value in each or []])
    assert found["k"].to_pylist() == [k for k, each in zip(keys, lists, strict=True) for _ in each or []]
    check(engine, table, lambda flow: flow.explode("n0").select("x").limit(5), ordered=True)


@every_engine
@examples(6)
@given(nested.tables(pa.list_(pa.list_(pa.int64())), pa.large_list(pa.string())))
def test_between_other_steps(engine: Engine, table: pa.Table) -> None:
    def build(flow: Flow) -> Flow:
        rows = flow.filter(col("k") > 0).explode("n0").with_columns(n=col("n0").list.len()).explode("n0")
        return rows.filter((col("n0") > 2) & (col("x") != "text 1") & (col("n0") * col("k") > 8)).explode("n1")

    check(engine, table, build, ordered=True)
    check(engine, table, lambda flow: build(flow).group_by("n1").agg(n=si.count(), s=col("n0").sum()), ordered=False)
    check(engine, table, lambda flow: flow.explode("n0").union(flow.explode("n0").limit(3)), ordered=True)
    check(engine, table, lambda flow: flow.explode("n1").group_by().agg(n=si.count()), ordered=False)


@every_engine
@examples(4)
@given(nested.tables(pa.list_(pa.int64())))
def test_rows_without_elements_cannot_fail(engine: Engine, table: pa.Table) -> None:
    """A filter that can fail must not move below: it would meet rows that are gone above."""

    def build(flow: Flow) -> Flow:
        return flow.filter(col("n0").list.len().fill_null(0) * col("k") == 0).explode("n0").filter(6 // col("k") > 0)

    check(engine, table, build, ordered=True)


@every_engine
@examples(4)
@given(nested.tables(pa.list_(pa.int64())))
def test_back_and_forth(engine: Engine, table: pa.Table) -> None:
    def build(flow: Flow) -> Flow:
        lists = flow.explode("n0").group_by("x").agg(all=col("n0").collect())
        return lists.filter(col("all").list.len() > 1).explode("all")

    check(engine, table, build, ordered=False)


@every_engine
@examples(6)
@given(st.data())
def test_several_lists_side_by_side(engine: Engine, data: st.DataObject) -> None:
    """The lists have one length in a row, or both engines fail."""
    table = data.draw(nested.tables(pa.list_(pa.int64())))
    made = [None if each is None else [f"{k}" if k % 3 else None for k in range(len(each))]
            for each in table["n0"].to_pylist()]
    if data.draw(st.booleans()):  # null counts as empty
        made = [None if each == [] else each for each in made]
    if made and data.draw(st.sampled_from([False, False, True])):
        made[data.draw(st.integers(0, len(made) - 1))] = ["one", "more", "than", "most", "lists", "have", "here"]
    table = table.append_column("more", pa.array(made, pa.large_list(pa.string())))
    check(engine, table, lambda flow: flow.explode("n0", "more"), ordered=True)
    check(engine, table, lambda flow: flow.explode(["more", "n0"]).select("k", "more"), ordered=True)


def test_lists_of_different_lengths_are_named() -> None:
    flow = si.from_arrow({"id": [1, 2], "a": [[1, 2], [3]], "b": [["x", "y"], ["z", "w"]], "c": [0, 0]})
    with pytest.raises(si.ComputeError) as caught:
        flow.explode("a", "b").collect()
    assert "`explode(a, b)`" in str(caught.value)
    assert "a: 1, b: 2" in str(caught.value)
    assert "id: 2" in str(caught.value)


def test_the_result_has_the_elements_type() -> None:
    whole = pa.field("item", pa.int32(), nullable=False)
    table = pa.table({"a": ["x"], "n": pa.array([[1, 2]], pa.list_(whole)), "b": [1.5]})
    flow = si.from_arrow(table).explode("n")
    assert flow.schema.field("n") == pa.field("n", pa.int32(), nullable=False)
    assert flow.columns == ["a", "n", "b"]
    assert flow.collect().schema == flow.schema
    words = pa.ListArray.from_arrays([0, 2, 3], pa.array(["p", "q", "p"]).dictionary_encode())
    found = si.from_arrow(pa.table({"n": words})).explode("n").filter(col("n") != "q").collect()
    assert found.to_pydict() == {"n": ["p", "p"]}


def test_batches_stay_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "PIECE_ROWS", 100)
    table = pa.table({"k": [1, 2, 3], "n": [list(range(250)), None, list(range(30))]})
    batches = list(si.from_arrow(table).explode("n").batches())
    assert [batch.num_rows for batch in batches] == [100, 100, 80]
    assert pa.Table.from_batches(batches)["n"].to_pylist() == [*range(250), *range(30)]
    assert pa.Table.from_batches(batches)["k"].to_pylist() == [1] * 250 + [3] * 30


def test_elements_in_a_row_are_not_copied() -> None:
    table = pa.table({"n": [[1, 2], [3], [4, 5]]}).slice(1)
    found = si.from_arrow(table).explode("n").collect()["n"].chunk(0)
    assert found.buffers()[1].address == table["n"].chunk(0).values.buffers()[1].address
    assert found.to_pylist() == [3, 4, 5]


def test_plans() -> None:
    table = pa.table({"k": [1], "n": [[1]], "unused": [1]})
    flow = si.from_arrow(table).explode("n").filter((col("k") > 0) & (col("n") > 0)).select("k", "n")
    assert flow.explain().splitlines() == [
        "Filter n > 0",
        "  Explode n  -> k: i64?, n: i64?",
        "    Filter k > 0",
        "      Source arrow  -> k: i64?, n: list<item: int64>?",
    ]
    assert "explode n, by pyarrow" in flow.explain("fused")
    assert "Explode" in str(flow.graph())


def test_errors() -> None:
    flow = si.from_arrow(pa.table({"k": [1], "n": [[1]], "s": [{"a": 1}]}))
    with pytest.raises(WrongType, match="explode takes a list, but 'k' is i64"):
        flow.explode("k")
    with pytest.raises(WrongType, match=r"'s' is struct(.*\n)*.*struct.field"):
        flow.explode("s")
    with pytest.raises(UnknownColumn, match="no column 'm' in the input of explode"):
        flow.explode("m")
    with pytest.raises(BadArgument, match=r"needs the name of a list(.*\n)*.*'n'"):
        flow.explode()
    with pytest.raises(BadArgument, match="takes the name of a column"):
        flow.explode(col("n"))  # type: ignore[arg-type]
