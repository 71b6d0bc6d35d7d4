"""Row groups that a filter has nothing of are not read, and the rows are those that a filter gives over all of them."""

from __future__ import annotations

import datetime as dt
import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

import scalein as si
from scalein import col, lit
from scalein.api.column import Column
from scalein.api.flow import Flow
from scalein.connectors.formats.statistics import Condition
from scalein.connectors.sources.files import FileSource
from scalein.testing import assert_same, until
from tests import oracle
from tests.engines import examples

ROWS = 1_000
NAN = float("nan")
TABLE = pa.table({
    "i": pa.array(range(ROWS), pa.int32()), "u": pa.array([2**64 - ROWS + n for n in range(ROWS)], pa.uint64()),
    "small": pa.array([n // 100 * 20 + 50 for n in range(ROWS)], pa.uint8()),
    "f": [NAN if n % 97 == 5 else n - 500.0 for n in range(ROWS)],
    "g": pa.array([n / 8 for n in range(ROWS)], pa.float32()),
    "s": [None if n % 13 == 2 else f"key {n:05}" for n in range(ROWS)],
    "d": pa.array([f"word {n // 100}" for n in range(ROWS)]).dictionary_encode(),
    "t": pa.array(range(0, ROWS * 10, 10), pa.timestamp("ms")), "z": pa.array(range(ROWS), pa.timestamp("us", "UTC")),
    "e": pa.array([None if n < 500 else n for n in range(ROWS)], pa.int64()), "b": [n % 2 == 0 for n in range(ROWS)],
    "l": [[n] for n in range(ROWS)], "a.b": range(ROWS), "a": [{"b": -n} for n in range(ROWS)],
})  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("parquet")
    pq.write_table(TABLE.slice(0, 600), path / "1.parquet", row_group_size=100)
    pq.write_table(TABLE.slice(600), path / "2.parquet", row_group_size=100)
    return path


def skipped(flow: Flow) -> int:
    source: Any = flow.op
    while not hasattr(source, "data"):
        source = source.input
    assert isinstance(source.data.source, FileSource)
    return source.data.source.row_groups_skipped


AT = dt.datetime(1970, 1, 1)
FILTERS: list[tuple[Column, int]] = [
    (col("i") >= 850, 8), (col("i") > 899, 9), (col("i") < 100, 9), (col("i") <= 100, 8), (lit(450) == col("i"), 9),
    (lit(700) <= col("i"), 7), (col("i").between(210, 230), 9),
    (col("i").is_in([5, 999]), 8), (col("i").is_in([-1]), 10),
    (col("u") >= 2**64 - 50, 9), (col("u") < 2**63, 10), (col("small") == 230, 9), (col("small") > 200, 8),
    (col("f") < -390.0, 8), (col("f") <= -401.0, 9), (col("f") == 0.0, 9), (col("f") > 450.0, 0),  # NaN is greater
    (col("f") >= NAN, 0), (col("f") <= NAN, 0), (col("f") == NAN, 0), (col("f").is_in([NAN, 1.0]), 0),
    (col("g") == 12.5, 9), (col("g") < 0.1, 9), (col("s") == "key 00333", 9), (col("s") > "key 00899", 9),
    (col("s").is_in(["key 00001", "key 00999"]), 8), (col("d") == "word 3", 9),
    (col("t") >= AT + dt.timedelta(seconds=9), 9), (col("t") < AT, 10), (col("z") > AT.replace(tzinfo=dt.UTC), 0),
    (col("e") < 600, 9), (col("e") >= 0, 5), ((col("i") > 700) & (col("s") < "key 00750"), 9),
    ((col("i") > 700) & (1_000 // col("i") > 0), 7), ((col("i") > 900) | (col("i") < 50), 0), (~(col("i") > 5), 0),
    (col("i") + 1 > 900, 0), (col("i").cast(pa.int64()) > 900, 0), (col("a.b") > 900, 0), (col("b"), 0),
    ((col("i") > 900).fill_null(False), 9), ((col("i") > 300) & (col("i") < 300), 10), (col("s").is_null(), 0),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(FILTERS)))
def test_a_filter_gives_the_same_rows_from_fewer_row_groups(number: int, folder: Path) -> None:
    predicate, count = FILTERS[number]
    flow = si.read_parquet(folder).filter(predicate).select("i", "s", "f")
    before = skipped(flow)
    got = flow.collect()
    assert skipped(flow) - before == count
    assert_same(got, si.from_arrow(TABLE).filter(predicate).select("i", "s", "f").collect(), ordered=True)


def test_an_error_stays_one_where_it_is_not_filtered(folder: Path) -> None:
    flow = si.read_parquet(folder).filter(1_000 // (col("i") - 950) > 0)
    with pytest.raises(si.ScaleinError, match="division by zero"):
        flow.filter(col("i") > 900).collect()


def test_a_job_skips_and_says_so(folder: Path) -> None:
    def run(flow: Flow) -> tuple[int, Any, Any]:
        rows = si.to_memory()
        job = flow.start(sink=rows)
        job.wait()
        return rows.table().num_rows, job.metrics()["row_groups_skipped"], job.metrics()["rows_in"]

    flow, few = si.read_parquet(folder), col("i") > 849
    assert run(flow.filter(few).select("i")) == (150, 8, 200)
    assert run(flow.with_columns(j=col("i") + 1).filter(few).select("i")) == (150, 8, 200)
    assert run(flow.filter(few).distinct("i").select("i")) == (150, 8, 200)
    # What is not read has no time: where the watermark sees all rows, all are read.
    assert run(flow.with_watermark("t", "1s").filter(few).select("i")) == (150, 0, 1_000)
    assert run(flow.filter(few).with_watermark("t", "1s").select("i")) == (150, 8, 200)
    assert run(flow.filter(few).union(flow.filter(col("i") < 50)).select("i")) == (200, 17, 300)
    job = flow.filter(col("i") < 0).start(sink=si.to_memory())
    job.wait()
    assert job.why_no_output().startswith("The flow's filter keeps no row so far: 10 row groups were skipped")
    assert "8 row groups of Parquet skipped" in flow.filter(few).select("i").explain(analyze=True)


def test_a_job_goes_on_among_skipped_row_groups(folder: Path, tmp_path: Path) -> None:
    wanted = [*range(0, 20), *range(250, 260), *range(590, 610)]

    def start(**options: Any) -> Any:
        flow = si.read_parquet(folder).filter(col("i").is_in(wanted)).select("i")
        return flow.start(sink=si.to_ipc(tmp_path / "out"), checkpoint=tmp_path / "c", every="1h", **options)

    job = start(max_rows_per_second=1)  # a batch is taken whole
    until(lambda: job.metrics()["rows_in"] >= 1, job)
    job.stop()
    assert job.metrics()["rows_in"] < 400
    start().wait()
    parts = [pa.ipc.open_file(part).read_all() for part in (tmp_path / "out").glob("part-*")]
    assert sorted(i for part in parts for i in part.column("i").to_pylist()) == wanted


def test_a_file_of_which_nothing_is_wanted_is_no_shorter_for_that(folder: Path) -> None:
    flow = si.read_parquet(folder).filter(col("i") < 150).select("i")
    source = flow.op.input.input.data.project(["i"]).where((Condition("i", "lt", (150,)),))  # type: ignore[union-attr]
    assert sum(batch.num_rows for batch, _ in source.read_from("files", {"file": "1.parquet", "row": 300})) == 0
    with pytest.raises(si.ScaleinError, match="fewer rows than the 700"):
        list(source.read_from("files", {"file": "1.parquet", "row": 700}))


numbers = st.one_of(st.none(), st.integers(-4, 4))
floats = st.one_of(st.none(), st.sampled_from([NAN, -0.0, 0.0, 1.5, -2.5, float("inf"), 0.1]))
words = st.one_of(st.none(), st.sampled_from(["", "a", "ab", "ä", "日本", "z" * 100, "z" * 100 + "y"]))


@examples(12)
@given(rows=st.lists(st.tuples(numbers, floats, floats, words), max_size=12), size=st.integers(1, 4), data=st.data())
def test_any_filter_over_any_file(rows: list[tuple[Any, ...]], size: int, data: st.DataObject) -> None:
    columns = list(zip(*rows, strict=True)) or [()] * 4
    types = [("i", pa.int16()), ("f", pa.float64()), ("g", pa.float32()), ("s", pa.string())]
    table = pa.table([pa.array(list(c), t) for c, (_, t) in zip(columns, types, strict=True)], [n for n, _ in types])
    values = {"i": numbers, "f": floats, "g": floats, "s": words}

    def test() -> Column:
        name = data.draw(st.sampled_from(list(values)))
        value = data.draw(values[name].filter(lambda v: v is not None))
        how = data.draw(st.sampled_from(["<", "<=", ">", ">=", "==", "in", "mirrored"]))
        if how == "in":
            return col(name).is_in(data.draw(st.lists(values[name], min_size=1, max_size=3).filter(any_known)))
        c = col(name)
        return {"<": c < value, "<=": c <= value, ">": c > value, ">=": c >= value, "==": c == value,
                "mirrored": value >= c}[how]  # fmt: skip

    predicate = test()
    for _ in range(data.draw(st.integers(0, 2))):
        predicate = predicate & test()
    with tempfile.TemporaryDirectory() as place:
        pq.write_table(table, f"{place}/one.parquet", row_group_size=size)
        got = si.read_parquet(place).filter(predicate).collect()
    assert_same(got, oracle.collect(si.from_arrow(table).filter(predicate)), ordered=True)


def any_known(values: list[Any]) -> bool:
    return any(value is not None for value in values)
