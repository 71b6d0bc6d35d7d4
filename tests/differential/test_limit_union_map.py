"""limit, union, map_batches, select, drop, rename, cast: whole rows in their order."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc
from hypothesis import given
from hypothesis import strategies as st

import scalein as si
from scalein import col
from scalein.api.flow import Flow
from tests.engines import Engine, check, every_compiler, every_engine, examples
from tests.programs import predicates
from tests.strategies import of_types, schemas, tables


@every_engine
@examples(12)
@given(st.data())
def test_limit_takes_the_first_rows(engine: Engine, data: st.DataObject) -> None:
    schema = data.draw(schemas(most=3))
    table, count = data.draw(tables(schema)), data.draw(st.integers(0, 80))
    condition = data.draw(predicates(schema, 1))
    check(engine, table, lambda flow: flow.limit(count), ordered=True)
    check(engine, table, lambda flow: flow.filter(condition).limit(count), ordered=True)
    check(engine, table, lambda flow: flow.limit(count).filter(condition), ordered=True)


@every_engine
@examples(4)
@given(st.data())
def test_groups_of_the_first_rows(engine: Engine, data: st.DataObject) -> None:
    table, count = data.draw(tables(of_types(pa.int16(), pa.int32()))), data.draw(st.integers(0, 80))
    build = lambda flow: flow.limit(count).group_by("a").agg(n=si.count(), last=col("b").last())  # noqa: E731
    check(engine, table, build, ordered=False)


@every_engine
@examples(12)
@given(st.data())
def test_union_is_one_behind_the_other(engine: Engine, data: st.DataObject) -> None:
    schema = data.draw(schemas(most=3))
    table, second = data.draw(tables(schema)), data.draw(tables(schema))
    condition = data.draw(predicates(schema, 1))
    count = data.draw(st.integers(0, 40))

    def build(flow: Flow) -> Flow:
        return flow.union(si.from_arrow(second), flow.filter(condition)).limit(count)

    check(engine, table, build, ordered=True)


@every_engine
@examples(4)
@given(st.data())
def test_aggregates_over_a_union(engine: Engine, data: st.DataObject) -> None:
    schema = of_types(pa.string(), pa.int32())
    table, second = data.draw(tables(schema)), data.draw(tables(schema))
    made = {"n": si.count(), "first": col("b").first(), "last": col("b").last(), "s": col("b").sum()}
    check(engine, table, lambda flow: flow.union(si.from_arrow(second)).group_by("a").agg(**made), ordered=False)


def _double(batch: pa.RecordBatch) -> pa.RecordBatch:
    kept = batch.filter(pc.is_valid(batch.column("a")))
    return pa.record_batch({"twice": pc.multiply(kept.column("a").cast(pa.int64()), 2), "b": kept.column("b")})


@every_compiler
@examples(6)
@given(tables(of_types(pa.int32(), pa.float64())))
def test_map_batches(engine: Engine, table: pa.Table) -> None:
    schema = pa.schema([("twice", pa.int64()), ("b", pa.float64())])

    def build(flow: Flow) -> Flow:
        return flow.filter(col("b").is_not_null()).map_batches(_double, schema).filter(col("twice") > 2)

    found = check(engine, table, build, ordered=True)
    rows = zip(table["a"].to_pylist(), table["b"].to_pylist(), strict=True)
    want = [2 * a for a, b in rows if a is not None and b is not None and 2 * a > 2]
    assert found is not None
    assert found["twice"].to_pylist() == want


@every_engine
@examples(8)
@given(st.data())
def test_columns_are_chosen_named_and_cast(engine: Engine, data: st.DataObject) -> None:
    table = data.draw(tables(of_types(pa.int32(), pa.string(), pa.bool_(), pa.float32())))

    def build(flow: Flow) -> Flow:
        renamed = flow.rename({"a": "z", "b": "a"}).cast({"z": pa.int64(), "d": pa.float64()})
        return renamed.drop("c").with_columns(z=col("z") + 1, w=col("z")).select("w", "a", "z", "d")

    check(engine, table, build, ordered=True)


@every_engine
@examples(8)
@given(st.data())
def test_everything_passes_through_unchanged(engine: Engine, data: st.DataObject) -> None:
    schema = data.draw(schemas(least=1, most=6))
    table = data.draw(tables(schema, extreme=True))
    check(engine, table, lambda flow: flow, ordered=True)
    check(engine, table, lambda flow: flow.select(*reversed(schema.names)), ordered=True)
