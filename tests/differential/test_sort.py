"""sort, top_k, bottom_k: by any type and expression, in both directions, with nulls first and last."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import scalein as si
from scalein import col
from scalein.api.flow import Flow
from scalein.exec import sort
from tests import oracle
from tests.engines import Engine, check, each_engine, every_engine, examples
from tests.programs import predicates
from tests.same import assert_same
from tests.strategies import ALL, of_types, schemas, tables


@every_engine
@examples(24)
@given(st.data())
def test_every_type_and_direction(engine: Engine, data: st.DataObject) -> None:
    schema = data.draw(schemas(ALL, least=1, most=4))
    table = data.draw(tables(schema, extreme=True))
    by = data.draw(st.lists(st.sampled_from(schema.names), min_size=1, max_size=3))
    ways = data.draw(st.booleans() | st.lists(st.booleans(), min_size=len(by), max_size=len(by)))
    last = data.draw(st.booleans())
    check(engine, table, lambda flow: flow.sort(*by, descending=ways, nulls_last=last), ordered=True)


@every_engine
@examples(16)
@given(st.data())
def test_limit_behind_a_sort(engine: Engine, data: st.DataObject) -> None:
    schema = data.draw(schemas(ALL, least=2, most=3))
    table, count = data.draw(tables(schema, extreme=True)), data.draw(st.integers(0, 70))
    by = data.draw(st.lists(st.sampled_from(schema.names), min_size=1, max_size=2))
    way, last = data.draw(st.booleans()), data.draw(st.booleans())
    build = lambda flow: flow.sort(*by, descending=way, nulls_last=last).select("b", z="a").limit(count)  # noqa: E731
    check(engine, table, build, ordered=True)


@every_engine
@examples(16)
@given(st.data())
def test_top_and_bottom(engine: Engine, data: st.DataObject) -> None:
    schema = data.draw(schemas(ALL, least=1, most=3))
    table, k = data.draw(tables(schema, extreme=True)), data.draw(st.integers(1, 70))
    by = data.draw(st.sampled_from(schema.names) | st.lists(st.sampled_from(schema.names), min_size=1, max_size=2))
    check(engine, table, lambda flow: flow.top_k(k, by), ordered=True)
    check(engine, table, lambda flow: flow.bottom_k(k, by), ordered=True)


@every_engine
@examples(10)
@given(st.data())
def test_between_other_steps(engine: Engine, data: st.DataObject) -> None:
    schema = of_types(pa.int32(), pa.string(), pa.float64())
    table = data.draw(tables(schema))
    before, after = data.draw(predicates(schema, 1)), data.draw(predicates(schema, 1))

    def build(flow: Flow) -> Flow:
        by = [col("a") % 5, col("b").str.upper(), -col("c")]
        return flow.filter(before).sort(*by, descending=[True, False, False]).filter(after).with_columns(z=col("a"))

    check(engine, table, build, ordered=True, errors_may_vanish=True)
    check(engine, table, lambda flow: build(flow).limit(9).filter(col("a") > 0), ordered=True, errors_may_vanish=True)
    firsts = lambda flow: flow.sort("c", "a").group_by("b").agg(f=col("a").first(), l=col("a").last())  # noqa: E731
    check(engine, table, firsts, ordered=False)
    check(engine, table, lambda flow: flow.sort("c", descending=True).distinct("b"), ordered=True)
    check(engine, table, lambda flow: flow.sort("a").union(flow.top_k(3, "c")), ordered=True)


@every_engine
@examples(4)
@given(tables(of_types(pa.string(), pa.int32())))
def test_groups_in_order(engine: Engine, table: pa.Table) -> None:
    totals = lambda flow: flow.group_by("a").agg(n=si.count(), s=col("b").sum())  # noqa: E731
    check(engine, table, lambda flow: totals(flow).sort("s", "a", descending=[True, False]), ordered=True)
    check(engine, table, lambda flow: totals(flow).top_k(3, ["n", "a"]), ordered=True)


@every_engine
@examples(3)
@given(st.data())
def test_many_rows(engine: Engine, data: st.DataObject) -> None:
    table = data.draw(tables(of_types(data.draw(st.sampled_from(ALL)), pa.int64()), least=5000, most=5000))
    check(engine, table, lambda flow: flow.sort("a"), ordered=True)
    check(engine, table, lambda flow: flow.top_k(10, "a"), ordered=True)
    check(engine, table, lambda flow: flow.bottom_k(4000, ["a", "b"]), ordered=True)


@each_engine
def test_nan_is_the_greatest_and_null_where_it_is_wanted(engine: Engine) -> None:
    nan, inf = float("nan"), float("inf")
    table = pa.table({"x": [1.0, nan, None, -inf, inf, -nan, 0.0, -0.0], "n": range(8)})
    for options, want in [
        ({}, [2, 3, 6, 7, 0, 4, 1, 5]),
        ({"descending": True}, [2, 1, 5, 4, 0, 6, 7, 3]),
        ({"nulls_last": True}, [3, 6, 7, 0, 4, 1, 5, 2]),
        ({"descending": True, "nulls_last": True}, [1, 5, 4, 0, 6, 7, 3, 2]),
    ]:
        found = check(engine, table, lambda flow, o=options: flow.sort("x", **o), ordered=True)
        assert found is not None
        assert found["n"].to_pylist() == want
    found = check(engine, table, lambda flow: flow.top_k(3, "x"), ordered=True)
    assert found is not None
    assert found["n"].to_pylist() == [1, 5, 4]


def _batches(count: int, rows: int) -> Iterator[pa.RecordBatch]:
    for start in range(0, count, rows):
        places = range(start, min(start + rows, count))
        yield pa.record_batch({"x": pa.array([p * 7919 % 1009 if p % 11 else None for p in places], pa.int64()),
                               "s": [f"{p % 13}" for p in places], "n": pa.array(places, pa.int64())})  # fmt: skip


@cache
def _first_rows(name: str, count: int, by: tuple[str, ...], k: int) -> pa.Table:
    """What is wanted of so many rows, however they are read."""
    flow = si.from_batches(lambda: _batches(count, count), next(_batches(1, 1)).schema)
    return oracle.collect(flow.sort(*by, descending=True) if name == "sort" else getattr(flow, name)(k, list(by)))


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("rows", [1, 7, 1000, 100_000])
@pytest.mark.parametrize("name", ["bottom_k", "top_k", "sort"])
def test_readers_and_workers(name: str, rows: int, workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces smaller than the number of rows asked for, and larger."""
    monkeypatch.setattr(sort, "PIECE_ROWS", 50)
    monkeypatch.setattr(sort, "RESULT_ROWS", 64)
    count = 300 if rows == 1 else 5000
    schema = next(_batches(1, 1)).schema
    flow = si.from_batches(lambda: _batches(count, rows), schema)
    for by in (["x"], ["s", "x"], ["x", "s"]):
        for k in (1, 30, 200):
            q = flow.sort(*by, descending=True) if name == "sort" else getattr(flow, name)(k, by)
            assert_same(q.collect(workers=workers), _first_rows(name, count, tuple(by), k), ordered=True)


def test_the_first_rows_need_little_room() -> None:
    node = sort.Sort(None, (("x", True),), True, 10)  # type: ignore[arg-type]
    best = sort._Best(node, pa.schema([("x", pa.int64())]), 10)
    most = 0
    for start in range(0, 10**6, 10**4):
        best.add(pa.record_batch({"x": range(start, start + 10**4)}))  # every row is better than all before
        most = max(most, best._rows)
    assert most <= 10 + 10 + sort.PIECE_ROWS + 10**4
    (found,) = best.sorted_rows()
    assert found["x"].to_pylist() == list(range(10**6 - 1, 10**6 - 11, -1))


def test_nothing_in_nothing_out() -> None:
    empty = si.from_arrow(pa.table({"x": pa.array([], pa.int64()), "s": pa.array([], pa.string_view())}))
    for flow in (empty.sort("x"), empty.top_k(3, "s"), empty.distinct(), empty.sort("x").limit(0)):
        assert flow.collect().num_rows == 0
        assert flow.collect().schema == empty.schema


@pytest.mark.parametrize("kind", [pa.float32(), pa.float64()], ids=str)
def test_first_rows_among_nans_and_nulls(kind: pa.DataType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the worst row kept has, a number, NaN or null, it bars just the rows behind it."""
    monkeypatch.setattr(sort, "PIECE_ROWS", 16)
    odd = [float("nan"), None, -float("nan"), 0.0, -0.0, float("inf"), -float("inf"), 1.5, None, -2.0]
    values = [odd[k * 7 % 10] if k % 3 else float(k % 17) for k in range(400)]
    table = pa.table({"x": pa.array(values, kind), "n": range(400), "g": [k % 2 for k in range(400)]})
    for k in (1, 5, 60, 120, 200, 300, 390):
        for by in (["x"], ["x", "g"]):
            for way in (False, True):
                for last in (False, True):
                    flow = si.from_arrow(table).sort(*by, descending=way, nulls_last=last).limit(k)
                    assert_same(flow.collect(), oracle.collect(flow), ordered=True)
