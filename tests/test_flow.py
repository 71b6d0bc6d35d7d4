"""Flows: the ops and schemas that the fluent API builds, and the data they take."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta

import duckdb
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.dataset as ds
import pytest

import scalein as si
from scalein import col, lit, when
from scalein.durations import span
from scalein.errors import NOWHERE
from scalein.ir import ops
from tests import oracle
from tests.conftest import Golden

EVENTS = pa.table({
    "time": pa.array([datetime(2024, 5, 1, 0, 0, s) for s in (1, 2, 11)], pa.timestamp("ms")),
    "ad": pa.array([1, 2, 1], pa.int32()),
    "kind": ["view", "click", None],
    "price": [1.5, None, 3.0],
})  # fmt: skip
ADS = pa.table({"ad": pa.array([1, 3], pa.int64()), "campaign": ["a", "b"], "price": [9.0, 8.0]})
flow = si.from_arrow(EVENTS)


def rows(given: si.Flow, data: object = None) -> dict[str, list[object]]:
    return oracle.collect(given, data).to_pydict()  # type: ignore[no-any-return]


# --- rows ---


def test_a_flow_reads_as_its_plan(golden: Golden) -> None:
    views = (
        flow.with_watermark("time", "2s")
        .filter(col("kind") == "view", col("price") > 1)
        .join(ADS, on="ad")
        .group_by("campaign", si.sliding("time", "10s", every="2s"))
        .agg(si.count().alias("views"), last=col("time").max())
    )
    assert repr(views) == golden


def test_select_names_and_expressions() -> None:
    got = flow.select("ad", col("price").fill_null(0.0), twice=col("ad") * 2, same="kind", one=1)
    assert got.columns == ["ad", "price", "twice", "same", "one"]
    assert rows(got)["twice"] == [2, 4, 2]


def test_with_columns_replaces_in_place_and_adds_at_the_end() -> None:
    got = flow.with_columns(col("price") * 2, ad2=col("ad") + 1)
    assert got.columns == ["time", "ad", "kind", "price", "ad2"]
    assert rows(got.select("price", "ad2")) == {"price": [3.0, None, 6.0], "ad2": [2, 3, 2]}


def test_a_choice_is_named_after_what_it_chooses() -> None:
    assert flow.select(when(col("kind") == "view").then(col("price"))).columns == ["price"]


def test_drop_rename_cast() -> None:
    got = flow.drop("time", "kind").rename({"ad": "price", "price": "ad"}).cast({"price": "int8", "ad": float})
    assert got.schema == pa.schema([("price", pa.int8()), ("ad", pa.float64())])


def test_union_takes_text_in_any_form() -> None:
    wide = EVENTS.set_column(2, "kind", EVENTS["kind"].cast(pa.large_string()))
    got = flow.union(wide, flow.limit(1))
    assert got.schema == flow.schema
    assert rows(got)["ad"] == [1, 2, 1, 1, 2, 1, 1]


def test_map_batches_says_what_comes_out() -> None:
    def double(batch: pa.RecordBatch) -> pa.RecordBatch:
        return pa.record_batch({"n": [batch.num_rows]})

    assert rows(flow.map_batches(double, {"n": int})) == {"n": [3]}


def test_a_flow_is_not_changed_by_its_methods() -> None:
    before = repr(flow)
    flow.filter(col("ad") > 1).select("ad")
    assert repr(flow) == before


def test_ops_know_the_line_that_made_them() -> None:
    op = flow.filter(col("ad") > 1).op
    assert isinstance(op, ops.Filter)
    assert op.at.file.endswith("test_flow.py")


def test_plans_can_be_pickled() -> None:
    op = flow.filter(col("ad") > 1).group_by("kind").agg(n=si.count()).op
    assert pickle.loads(pickle.dumps(op)) == op


# --- groups and joins ---


def test_aggregates_are_named_after_their_column() -> None:
    got = flow.group_by("kind").agg(si.count(), col("price").sum(), (col("ad") * 2).max(), n=col("price").count())
    assert got.columns == ["kind", "count", "price", "ad", "n"]


def test_windows_stand_behind_the_keys() -> None:
    got = flow.group_by("ad", si.tumbling("time", "10s"), cheap=col("price") < 2).agg(n=si.count())
    assert got.columns == ["ad", "cheap", "window_start", "window_end", "n"]
    assert not got.schema.field("window_start").nullable
    assert got.schema.field("window_end").type == pa.timestamp("ms")


def test_a_window_is_in_units_of_its_column() -> None:
    op = flow.group_by(si.sliding("time", timedelta(seconds=10), every="500ms")).agg(si.count()).op
    assert isinstance(op, ops.Aggregate)
    assert op.window is not None
    assert (op.window.size, op.window.every) == (10_000, 500)


def test_no_keys_are_one_group() -> None:
    assert rows(flow.limit(0).group_by().agg(n=si.count(), s=col("ad").sum())) == {"n": [0], "s": [None]}


def test_join_output_and_key_types() -> None:
    got = flow.join(ADS, on="ad", how="left")
    assert got.columns == ["time", "ad", "kind", "price", "campaign", "price_right"]
    assert got.schema.field("ad").type == pa.int32()
    assert isinstance(got.op, ops.Join)
    assert [repr(key.dtype) for key in (*got.op.left_keys, *got.op.right_keys)] == ["i64", "i64"]
    assert rows(got.select("campaign")) == {"campaign": ["a", None, "a"]}


@pytest.mark.parametrize(("how", "found"), [("semi", [1, 1]), ("anti", [2])])
def test_semi_and_anti_joins_add_no_columns(how: str, found: list[int]) -> None:
    got = flow.join(ADS, left_on=[col("ad") + 0], right_on=["ad"], how=how)
    assert got.columns == flow.columns
    assert rows(got)["ad"] == found


def test_a_right_key_under_another_name_is_left_out() -> None:
    assert flow.join(ADS.rename_columns(["id", "campaign", "x"]), left_on="ad", right_on="id").columns == [
        "time", "ad", "kind", "price", "campaign", "x"]  # fmt: skip


# --- data ---

SMALL = EVENTS.select(["ad", "kind"])


def relation() -> duckdb.DuckDBPyRelation:
    con = duckdb.connect()
    con.register("small", SMALL)
    return con.sql("select * from small")


GIVEN: dict[str, Callable[[], object]] = {
    "table": lambda: SMALL,
    "batch": lambda: SMALL.combine_chunks().to_batches()[0],
    "batches": lambda: SMALL.to_batches(max_chunksize=1),
    "pandas": lambda: SMALL.to_pandas(),
    "indexed pandas": lambda: SMALL.to_pandas().set_index(pd.Index([7, 8, 9])),
    "polars": lambda: pl.from_arrow(SMALL),
    "dataset": lambda: ds.dataset(SMALL),
    "scanner": lambda: ds.dataset(SMALL).scanner(),
    "struct array": lambda: SMALL.to_struct_array().combine_chunks(),
    "duckdb": relation,
}


@pytest.mark.parametrize("give", GIVEN.values(), ids=GIVEN)
def test_takes_what_people_have_more_than_once(give: Callable[[], object]) -> None:
    got = si.from_arrow(give()).filter(col("kind") == "view")
    assert rows(got) == rows(got) == {"ad": [1], "kind": ["view"]}
    assert rows(si.flow(SMALL.schema).filter(col("kind") == "view"), give()) == {"ad": [1], "kind": ["view"]}


def test_a_table_is_not_copied() -> None:
    op = flow.op
    assert isinstance(op, ops.Source)
    table: pa.Table = op.data.table  # type: ignore[attr-defined]
    assert table["ad"].chunk(0).buffers()[1].address == EVENTS["ad"].chunk(0).buffers()[1].address


def test_an_iterator_is_read_once_and_a_function_often() -> None:
    def batches() -> Iterator[pa.RecordBatch]:
        yield from SMALL.to_batches(max_chunksize=1)

    often = si.from_batches(batches, SMALL.schema)
    assert rows(often) == rows(often) == SMALL.to_pydict()
    assert rows(si.from_batches(batches(), SMALL.schema)) == SMALL.to_pydict()


def test_an_iterator_is_not_read_ahead() -> None:
    read = []

    def batches() -> Iterator[pa.RecordBatch]:
        for number, batch in enumerate(SMALL.to_batches(max_chunksize=1)):
            read.append(number)
            yield batch

    source = si.from_batches(batches(), SMALL.schema).op
    assert isinstance(source, ops.Source)
    assert read == []
    next(source.data.read())  # type: ignore[attr-defined]
    assert read == [0]


def test_metadata_does_not_matter() -> None:
    marked = SMALL.replace_schema_metadata({"a": "b"})
    assert si.from_arrow(marked).op == si.from_arrow(SMALL).op
    assert rows(si.from_batches(iter(marked.to_batches()), SMALL.schema)) == SMALL.to_pydict()


def test_unbound_flows_take_columns_in_any_order_and_more_of_them() -> None:
    q = si.flow({"kind": str, "ad": pa.int32()}).filter(col("ad") > 1)
    assert rows(q, EVENTS) == {"kind": ["click"], "ad": [2]}
    assert rows(q, EVENTS.to_reader(max_chunksize=1)) == {"kind": ["click"], "ad": [2]}


@pytest.mark.parametrize("form", [pa.large_string(), pa.string_view(), pa.dictionary(pa.int8(), pa.string())], ids=str)
def test_unbound_flows_take_text_in_any_form(form: pa.DataType) -> None:
    data = EVENTS.set_column(2, "kind", EVENTS["kind"].cast(pa.string()).cast(form)
                             if not pa.types.is_dictionary(form) else EVENTS["kind"].dictionary_encode())
    got = si.flow({"kind": pa.string()}).filter(col("kind") == "click")
    assert oracle.collect(got, data) == pa.table({"kind": ["click"]})


def test_dictionaries_come_out_as_strings() -> None:
    coded = si.from_arrow(SMALL.set_column(1, "kind", SMALL["kind"].dictionary_encode()))
    assert coded.schema.field("kind").type == pa.string()


def test_notebooks_show_schema_and_plan() -> None:
    html = flow.filter(col("ad") < 2)._repr_html_()
    assert "<td>price</td><td>f64</td>" in html
    assert "Filter ad &lt; 2" in html
    assert "flowchart" in str(flow.graph()) or "graph" in str(flow.graph())


def test_numpy_and_python_agree_on_columns() -> None:
    assert repr(lit(1) + col("x")) == repr(1 + col("x"))


# --- durations ---

SECOND = 10**9


@pytest.mark.parametrize(("written", "seconds"), [
    ("10s", 10), ("5m", 300), ("1h30m", 5400), ("2d", 172_800), ("10 minutes", 600), ("1 hour 30 min", 5400),
    ("500ms", 0.5), (" 3S ", 3), ("1w", 604_800), (timedelta(minutes=2), 120),
])  # fmt: skip
def test_durations(written: str | timedelta, seconds: float) -> None:
    found = span(written, "size", NOWHERE)
    assert (found.length, found.is_count) == (seconds * SECOND, False)


def test_a_plain_number_is_a_count() -> None:
    found = span(10, "size", NOWHERE)
    assert (found.length, found.is_count) == (10, True)


@pytest.mark.parametrize(("name", "use"), [("where", "filter"), ("groupBy", "group_by"), ("show", "print")])
def test_a_name_from_elsewhere_is_told_what_it_is_called_here(name: str, use: str) -> None:
    with pytest.raises(AttributeError, match=f"use {use}"):
        getattr(si.from_arrow(pa.table({"x": [1]})), name)


def test_text_that_looks_like_sql_is_told_how_to_write_it() -> None:
    with pytest.raises(si.UnknownColumn, match=r'col\("v"\) > 1'):
        si.from_arrow(pa.table({"v": [1]})).filter("v > 1")


def test_limit_0_asks_for_no_batch() -> None:
    asked: list[int] = []

    def batches() -> Iterator[pa.RecordBatch]:
        asked.append(1)
        yield pa.record_batch({"x": [1, 2]})

    source = si.from_batches(batches, {"x": pa.int64()})
    assert source.limit(0).collect().num_rows == 0
    assert source.filter(col("x") > 0).limit(0).collect().num_rows == 0
    assert list(source.limit(0).batches()) == []
    sink = si.to_memory()
    source.limit(0).start(sink=sink).wait()
    assert sink.table().num_rows == 0
    assert asked == []
    assert source.limit(1).collect().num_rows == 1
    assert asked == [1]
