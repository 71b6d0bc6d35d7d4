"""distinct: the first row of each key, in the source's order, wherever it stands in a flow."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import scalein as si
from scalein import col
from scalein.api.flow import Flow
from tests import oracle
from tests.engines import Engine, check, each_engine, every_engine, examples
from tests.programs import predicates
from tests.same import assert_same
from tests.strategies import ALL, STRINGS, array_of, of_types, schemas, tables


@every_engine
@examples(16)
@given(st.data())
def test_rows_unlike_any_before(engine: Engine, data: st.DataObject) -> None:
    schema = data.draw(schemas(ALL, least=1, most=3))
    table = data.draw(tables(schema))
    check(engine, table, lambda flow: flow.union(flow).distinct(), ordered=True)


@every_engine
@examples(16)
@given(st.data())
def test_first_row_of_each_key(engine: Engine, data: st.DataObject) -> None:
    schema = data.draw(schemas(ALL, least=2, most=4))
    table = data.draw(tables(schema))
    keys = data.draw(st.lists(st.sampled_from(schema.names), min_size=1, max_size=2))
    check(engine, table, lambda flow: flow.distinct(*keys), ordered=True)


@every_engine
@examples(12)
@given(st.data())
def test_between_other_steps(engine: Engine, data: st.DataObject) -> None:
    schema = data.draw(schemas(ALL, least=2, most=3))
    table = data.draw(tables(schema))
    before, after = data.draw(predicates(schema, 2)), data.draw(predicates(schema, 2))

    def build(flow: Flow) -> Flow:
        return flow.filter(before).with_columns(z=col("a")).distinct("z").filter(after).select("b", y="z").limit(40)

    check(engine, table, build, ordered=True, errors_may_vanish=True)


@every_engine
@examples(8)
@given(st.data())
def test_a_filter_that_reads_keys_or_not(engine: Engine, data: st.DataObject) -> None:
    schema = data.draw(schemas(ALL, least=2, most=2))
    table, condition = data.draw(tables(schema)), data.draw(predicates(of_types(schema.types[0]), 2))
    check(engine, table, lambda flow: flow.distinct("a").filter(condition), ordered=True, errors_may_vanish=True)
    check(engine, table, lambda flow: flow.distinct("b").filter(condition), ordered=True, errors_may_vanish=True)
    check(engine, table, lambda flow: flow.distinct().filter(condition), ordered=True, errors_may_vanish=True)


@every_engine
@examples(10)
@given(st.data())
def test_twice_and_into_groups(engine: Engine, data: st.DataObject) -> None:
    schema = of_types(data.draw(st.sampled_from(ALL)), data.draw(st.sampled_from(ALL)), pa.int32())
    table = data.draw(tables(schema))
    made = {"n": si.count(), "s": col("c").sum(), "f": col("c").first()}
    check(engine, table, lambda flow: flow.distinct("a", "b").distinct("b"), ordered=True)
    check(engine, table, lambda flow: flow.distinct("a", "b").group_by("a").agg(**made), ordered=False)
    check(engine, table, lambda flow: flow.distinct("a").group_by().agg(**made), ordered=False)


@every_engine
@examples(6)
@given(st.data())
def test_of_groups(engine: Engine, data: st.DataObject) -> None:
    table = data.draw(tables(of_types(data.draw(st.sampled_from(ALL)), pa.int8())))
    check(engine, table, lambda flow: flow.group_by("a").agg(n=si.count()).select("n").distinct(), ordered=False)
    having = lambda flow: flow.group_by("a", "b").agg(n=si.count()).filter(col("n") > 1).distinct("a").select("a")  # noqa: E731
    check(engine, table, having, ordered=False)


@every_engine
@examples(10)
@given(st.data())
def test_beside_joins(engine: Engine, data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from([pa.int32(), pa.string(), pa.dictionary(pa.int32(), pa.string())]))
    table = data.draw(tables(of_types(kind, pa.int16())))
    right = data.draw(tables(of_types(kind, pa.int8(), pa.string())))
    how = data.draw(st.sampled_from(["inner", "left"]))
    once = lambda flow: flow.join(si.from_arrow(right).distinct("a"), on="a", how=how).distinct("b")  # noqa: E731
    check(engine, table, once, ordered=True)
    # Rows with several matches: the columns of the left are alike in all of them. Their order is nobody's promise.
    twice = lambda flow: flow.join(right, on="a", how=how).select("a", "b").distinct()  # noqa: E731
    check(engine, table, twice, ordered=False)
    behind = lambda flow: flow.distinct("b").join(right, on="a", how=how)  # noqa: E731
    check(engine, table, behind, ordered=False)
    kept = data.draw(st.sampled_from(["semi", "anti"]))
    check(engine, table, lambda flow: flow.join(right, on="a", how=kept).distinct("b"), ordered=True)


@every_engine
@examples(3)
@given(st.data())
def test_many_rows(engine: Engine, data: st.DataObject) -> None:
    table = data.draw(tables(of_types(data.draw(st.sampled_from(ALL)), pa.int64(), pa.string()), least=5000, most=5000))
    check(engine, table, lambda flow: flow.distinct("a"), ordered=True)
    check(engine, table, lambda flow: flow.distinct("c", "a"), ordered=True)


@every_engine
@examples(4)
@given(st.data())
def test_more_columns_than_null_bits(engine: Engine, data: st.DataObject) -> None:
    count = data.draw(st.integers(62, 70))
    names = [f"c{k}" for k in range(count)]
    rows = data.draw(st.lists(st.tuples(st.integers(0, count - 1), st.none() | st.integers(0, 1)), max_size=12))
    columns = {name: pa.array([value if place == k else 0 for place, value in rows], pa.int8())
               for k, name in enumerate(names)}
    check(engine, pa.table(columns), lambda flow: flow.distinct(), ordered=True)


@each_engine
def test_zeros_nans_and_nulls_are_one_value_each(engine: Engine) -> None:
    nan = float("nan")
    for kind in (pa.float32(), pa.float64()):
        table = pa.table({"k": pa.array([0.0, -0.0, nan, -nan, None, None], kind), "n": range(6)})
        found = check(engine, table, lambda flow: flow.distinct("k"), ordered=True)
        assert found is not None
        assert found["n"].to_pylist() == [0, 2, 4]


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("kind", STRINGS, ids=str)
def test_batches_that_bring_nulls_and_dictionaries_late(kind: pa.DataType, workers: int) -> None:
    """A reader gives no facts of the whole: kernels change on the way, the table must not."""
    parts = [["a", "b"], [], ["b"], [None, "c", "a"], ["a longer key than twelve bytes", None], ["x" * 5000] * 3, ["c"]]
    batches = [pa.record_batch({"k": array_of(part, kind), "n": pa.array(range(len(part)), pa.int8())})
               for part in parts]  # fmt: skip

    def read() -> Iterator[pa.RecordBatch]:
        yield from batches

    flow = si.from_batches(read, batches[0].schema).distinct("k")
    found = flow.collect(workers=workers)
    assert_same(found, oracle.collect(flow), ordered=True)
    assert found["k"].to_pylist() == ["a", "b", None, "c", "a longer key than twelve bytes", "x" * 5000]


@pytest.mark.parametrize("workers", [1, 3])
def test_tables_grow_while_rows_stream_out(workers: int) -> None:
    """Far more keys than a new table holds, so kernels leave in the middle of blocks and run them again."""
    count = 300_000
    keys = [k * 7919 % count for k in range(count)]
    text = pa.array([f"{k:020d}" for k in keys])
    table = pa.table({"k": keys, "t": text, "n": range(count)})
    twice = pa.concat_tables([table, table])
    for key in ("k", "t"):
        flow = si.from_arrow(twice).distinct(key).filter(col("n") % 2 == 0).select("n", m=col("n") + 1)
        found = flow.collect(workers=workers)
        assert found["n"].to_pylist() == list(range(0, count, 2))


def test_few_rows_are_enough_for_a_limit() -> None:
    asked: list[int] = []

    def read() -> Iterator[pa.RecordBatch]:
        for number in range(100):
            asked.append(number)
            yield pa.record_batch({"x": [number // 2]})

    flow = si.from_batches(read, pa.schema([("x", pa.int64())])).distinct().limit(3)
    assert flow.collect().to_pydict() == {"x": [0, 1, 2]}
    assert len(asked) < 10


@pytest.mark.parametrize("workers", [1, 2])
def test_into_many_groups_and_sliding_windows(workers: int) -> None:
    """Groups that try some rows first, or read a table twice otherwise, see each row behind a distinct once."""
    count = 600_000
    table = pa.table({"k": [k % (count // 2) for k in range(count)], "t": [k // 100 for k in range(count)]})
    firsts = si.from_arrow(table).distinct("k")
    found = firsts.group_by("k").agg(n=si.count(), t=col("t").last()).collect(workers=workers).sort_by("k")
    assert found["n"].to_pylist() == [1] * (count // 2)
    assert found["t"].to_pylist() == [k // 100 for k in range(count // 2)]
    few = firsts.with_columns(g=col("k") % 3).group_by("g", si.sliding("t", 4, every=2)).agg(n=si.count())
    assert sum(few.collect(workers=workers)["n"].to_pylist()) == count
