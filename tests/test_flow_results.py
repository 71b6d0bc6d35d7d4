"""What becomes of a flow's rows: Arrow streams, single files, counts, descriptions; and data as Python has it."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.ipc
import pyarrow.json
import pyarrow.parquet as pq
import pytest

import scalein as si
from scalein import col
from scalein.connectors.sinks import single_file

NUMBERS = si.from_arrow({"x": list(range(10)), "s": [f"n{k % 3}" for k in range(10)]})


# --- data as Python has it


def test_dicts_of_lists_and_lists_of_dicts_are_data() -> None:
    columns = {"a": [1, None, 3], "b": ("x", "y", "z"), "c": [[1], [], None], "d": [{"u": 1.5}, None, {"u": None}]}
    want = {"a": [1, None, 3], "b": ["x", "y", "z"], "c": [[1], [], None], "d": [{"u": 1.5}, None, {"u": None}]}
    rows = pa.table({name: list(values) for name, values in columns.items()}).to_pylist()
    assert si.from_arrow(columns).collect().to_pydict() == want
    assert si.from_arrow(rows).collect().to_pydict() == want
    assert si.from_arrow(tuple(rows)).collect().to_pydict() == want


def test_columns_of_a_dict_may_be_arrays() -> None:
    columns = {"n": np.array([1, 2], np.int16), "a": pa.array([1.5, None]), "p": pl.Series([True, None]),
               "c": pa.chunked_array([["x"], ["y"]]), "d": np.array(["2024-01-01", "NaT"], "datetime64[us]")}
    found = si.from_arrow(columns).collect()
    assert found.schema.types == [pa.int16(), pa.float64(), pa.bool_(), pa.string(), pa.timestamp("us")]
    assert found.column("p").to_pylist() == [True, None]


def test_data_given_later_takes_the_flows_types() -> None:
    flow = si.flow({"x": pa.float32(), "d": pa.date32(), "n": pa.int8()})
    rows = [{"x": 1, "d": date(2024, 1, 2), "n": 3}, {"x": 2.5, "d": None, "n": None}]
    assert flow.collect(rows).schema.types == [pa.float32(), pa.date32(), pa.int8()]
    assert flow.collect({"x": [1, 2.5], "d": [date(2024, 1, 2), None], "n": [3, None]}).to_pylist() == rows
    with pytest.raises(si.BadData, match="column 'n' of the data are not all int8"):
        flow.collect({"x": [1], "d": [None], "n": [300]})


def test_other_inputs_take_dicts_too() -> None:
    flow = si.from_arrow([{"k": 1}, {"k": 2}])
    assert flow.join({"k": [2], "name": ["two"]}, on="k").collect().to_pydict() == {"k": [2], "name": ["two"]}
    assert flow.union([{"k": 9}]).collect().to_pydict() == {"k": [1, 2, 9]}
    sink = si.to_memory()
    si.flow({"k": pa.int64()}).start({"k": [5]}, sink=sink).wait()
    assert sink.table().to_pydict() == {"k": [5]}


# --- lists of names


def test_lists_of_names() -> None:
    flow = si.from_arrow({"k": ["b", "a", "b"], "x": [1, 2, 3], "t": [0, 5, 12]})
    assert flow.select(["k", col("x") * 2], y="t").columns == ["k", "x", "y"]
    assert flow.with_columns([col("x") + 1, (col("t") * 2).alias("u")]).columns == ["k", "x", "t", "u"]
    assert flow.drop(["k", "t"]).columns == ["x"]
    assert flow.filter([col("x") > 1, col("t") < 10]).collect()["x"].to_pylist() == [2]
    assert flow.distinct(["k"]).collect()["x"].to_pylist() == [1, 2]
    assert flow.sort(["k", "x"], descending=[False, True]).collect()["x"].to_pylist() == [2, 3, 1]
    assert flow.sort("k", ["x"]).collect()["x"].to_pylist() == [2, 1, 3]
    grouped = flow.group_by(["k", si.tumbling("t", 10)]).agg([si.count(), col("x").sum()], m=col("x").max())
    assert grouped.columns == ["k", "window_start", "window_end", "count", "x", "m"]
    assert grouped.collect().num_rows == 3


# --- Arrow streams


def test_a_flow_is_an_arrow_stream() -> None:
    flow = NUMBERS.filter(col("x") > 6)
    assert pa.table(flow).to_pydict() == {"x": [7, 8, 9], "s": ["n1", "n2", "n0"]}
    assert pl.DataFrame(flow).to_dict(as_series=False) == {"x": [7, 8, 9], "s": ["n1", "n2", "n0"]}
    assert duckdb.sql("SELECT sum(x) AS s FROM flow WHERE x > 7").fetchall() == [(17,)]
    assert pa.table(flow, schema=pa.schema({"x": pa.int64(), "s": pa.string()})).num_rows == 3
    assert pa.RecordBatchReader.from_stream(flow).schema == flow.schema
    assert si.flow(flow.schema).collect(flow).num_rows == 3, "another flow's rows are data"
    with pytest.raises(si.BadArgument, match="has no data yet"):
        pa.table(si.flow({"x": pa.int64()}))


def test_an_arrow_stream_is_computed_while_it_is_read() -> None:
    made: list[int] = []

    def batches() -> Iterator[pa.RecordBatch]:
        for k in range(1000):
            made.append(k)
            yield pa.record_batch({"x": [k]})

    flow = si.from_batches(batches, pa.schema({"x": pa.int64()})).filter(col("x") % 2 == 0)
    reader = pa.RecordBatchReader.from_stream(flow)
    assert not made, "nothing runs before the first batch"
    assert reader.read_next_batch().to_pydict() == {"x": [0]}
    assert len(made) < 900
    reader.close()


def test_errors_reach_the_reader_of_a_stream() -> None:
    flow = NUMBERS.select(y=1 // col("x"))
    with pytest.raises(Exception, match="division by zero"):
        pa.table(flow)


# --- files

READERS: dict[str, tuple[Callable[..., int], Callable[[Path], pa.Table]]] = {
    "parquet": (si.Flow.write_parquet, pq.read_table),
    "ipc": (si.Flow.write_ipc, lambda path: pa.ipc.open_file(path).read_all()),
    "csv": (si.Flow.write_csv, pyarrow.csv.read_csv),
    "json": (si.Flow.write_json, pyarrow.json.read_json),
}
every_format = pytest.mark.parametrize("kind", READERS)


@every_format
def test_a_file_has_all_rows(tmp_path: Path, kind: str) -> None:
    write, read = READERS[kind]
    path = tmp_path / f"rows.{kind}"
    flow = NUMBERS.filter(col("x") % 2 == 1).with_columns(y=col("x") / 2)
    assert write(flow, path) == 5
    assert read(path).to_pydict() == flow.collect().to_pydict()
    assert write(flow.limit(1), str(path), workers=2) == 1
    assert read(path).num_rows == 1, "the old file is replaced"
    assert os.listdir(tmp_path) == [path.name], "nothing else is left"


@pytest.mark.parametrize("kind", ["parquet", "ipc", "csv"])
def test_a_file_without_rows_has_the_columns(tmp_path: Path, kind: str) -> None:
    write, read = READERS[kind]
    assert write(NUMBERS.filter(col("x") > 100), tmp_path / "none") == 0
    assert read(tmp_path / "none").schema.names == ["x", "s"]


@every_format
def test_a_flow_that_fails_leaves_the_old_file(tmp_path: Path, kind: str) -> None:
    write, _ = READERS[kind]
    path = tmp_path / "rows"
    path.write_text("precious")
    parts = [pa.record_batch({"x": [1] * 100})] * 3 + [pa.record_batch({"x": [0]})]
    with pytest.raises(si.ComputeError, match="division by zero"):
        write(si.from_batches(parts).select(y=10 // col("x")), path)
    assert path.read_text() == "precious"
    assert os.listdir(tmp_path) == ["rows"]


def test_a_file_can_be_read_and_written_at_once(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    NUMBERS.write_parquet(path)
    assert si.read_parquet(path).filter(col("x") < 5).write_parquet(path) == 5
    assert pq.read_table(path)["x"].to_pylist() == [0, 1, 2, 3, 4]


def test_rows_are_written_as_they_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(single_file, "GROUP_ROWS", 1000)
    written: list[int] = []

    def batches() -> Iterator[pa.RecordBatch]:
        for _ in range(20):
            yield pa.record_batch({"x": np.arange(700)})
            written.append(sum(path.stat().st_size for path in tmp_path.iterdir()))

    assert si.from_batches(batches, pa.schema({"x": pa.int64()})).write_parquet(tmp_path / "x.parquet") == 14_000
    assert written[2] < written[10] < written[19], "the file grows while the flow runs"
    assert pq.ParquetFile(tmp_path / "x.parquet").num_row_groups == 10
    large = si.from_arrow(pa.table({"x": np.arange(3500)}))
    assert large.write_parquet(tmp_path / "x.parquet") == 3500
    assert pq.ParquetFile(tmp_path / "x.parquet").num_row_groups == 4, "a large batch is cut"


def test_what_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(si.WriteFailed, match=r"is a directory(.*\n)*.*si.to_parquet"):
        NUMBERS.write_parquet(tmp_path)
    with pytest.raises(si.WriteFailed, match="there is no directory"):
        NUMBERS.write_csv(tmp_path / "none" / "x.csv")
    nested = si.from_arrow({"x": [[1]]})
    with pytest.raises(si.WriteFailed, match="cannot be written"):
        nested.write_csv(tmp_path / "x.csv")
    with pytest.raises(si.BadArgument, match="has no data yet"):
        si.flow({"x": int}).write_csv(tmp_path / "x.csv")
    assert os.listdir(tmp_path) == []
    assert si.flow({"x": int}).write_json(tmp_path / "x.json", {"x": [1, 2]}) == 2


@pytest.mark.parametrize(("step", "values", "found"), [
    ("write_csv", [[1]], "column 'c' is list<item: int64>, for which there is no CSV"),
    ("write_json", [b"x"], "column 'c' is binary, for which there is no JSON"),
    ("write_csv", [b"\xff"], "Invalid UTF8 payload"),
])  # fmt: skip
def test_a_column_that_has_no_such_format_is_named_at_the_line_of_the_call(
        tmp_path: Path, step: str, values: list[object], found: str) -> None:
    with pytest.raises(si.WriteFailed) as caught:
        getattr(si.from_arrow({"c": values}), step)(tmp_path / "x")
    assert caught.value.facts["found"] == found
    assert caught.value.facts["at"].startswith("test_flow_results.py:")
    assert not os.listdir(tmp_path)


# --- counts and descriptions


def test_count() -> None:
    assert NUMBERS.count() == 10
    assert NUMBERS.filter(col("x") > 100).count() == 0
    assert NUMBERS.group_by("s").agg(n=si.count()).count(workers=2) == 3
    assert si.flow({"x": int}).filter(col("x") > 1).count({"x": [1, 2, 3]}) == 2


def test_head() -> None:
    assert NUMBERS.head().collect()["x"].to_pylist() == [0, 1, 2, 3, 4]
    assert NUMBERS.head(2).collect()["x"].to_pylist() == [0, 1]
    assert NUMBERS.head(0).collect().num_rows == 0


def test_describe_agrees_with_polars() -> None:
    rng = np.random.default_rng(3)
    table = pa.table({
        "i": pa.array(rng.integers(-100, 100, 501), pa.int32(), mask=rng.random(501) < 0.2),
        "f": pa.array(rng.normal(size=501), mask=rng.random(501) < 0.1),
        "b": pa.array(rng.random(501) < 0.3, mask=rng.random(501) < 0.1),
        "s": pa.array([f"w{k}" for k in rng.integers(0, 50, 501)], mask=rng.random(501) < 0.1),
        "none": pa.nulls(501, pa.float64()),
    })
    found = si.from_arrow(table).describe()
    want = pl.from_arrow(table).describe(interpolation="linear")
    names = found["statistic"].to_pylist()
    assert names == want["statistic"].to_list()
    for name in ("i", "f", "none"):
        np.testing.assert_allclose(_floats(found[name].to_pylist()), _floats(want[name].to_list()), rtol=1e-12)
    assert found["s"].to_pylist() == want["s"].to_list()
    valid = [value for value in table["b"].to_pylist() if value is not None]
    shown = dict(zip(names, found["b"].to_pylist(), strict=True))
    assert (shown["count"], shown["null_count"]) == (len(valid), 501 - len(valid))
    assert math.isclose(shown["mean"], sum(valid) / len(valid))
    assert (shown["min"], shown["max"]) == (0.0, 1.0)


def _floats(values: list[Any]) -> list[float]:
    return [math.nan if value is None else value for value in values]


def test_describe_of_other_types_and_of_no_rows() -> None:
    table = pa.table({"d": pa.array([date(2024, 1, 2), None, date(2023, 5, 6)]), "l": [[1], [], None],
                      "m": [Decimal("1.50"), Decimal("2.50"), None], "z": pa.array([1, 2, 3], pa.time32("s"))})
    found = si.from_arrow(table).describe()
    assert found["d"].to_pylist() == ["2", "1", "2023-09-03", None, "2023-05-06", "2023-07-05", "2023-09-03",
                                      "2023-11-03", "2024-01-02"]
    assert found["l"].to_pylist() == ["2", "1", *[None] * 7]
    assert found["m"].to_pylist()[:3] == [2.0, 1.0, 2.0]
    assert found["z"].to_pylist()[4] == "00:00:01"
    times = pa.table({"ns": pa.array([1, 2], pa.timestamp("ns")), "zone": pa.array([0, 1], pa.timestamp("ms", "UTC")),
                      "took": pa.array([1_000, 2_001], pa.duration("ns"))})
    found = si.from_arrow(times).describe().slice(8)
    assert found.to_pylist() == [{"statistic": "max", "ns": "1970-01-01 00:00:00.000000002",
                                  "zone": "1970-01-01 00:00:00.001Z", "took": "0:00:00.000002"}]
    ends = pa.table({"t": pa.array([2**63 - 1, -(2**63), 1_357_016_400_000_000_001], pa.timestamp("ns"))})
    found = si.from_arrow(ends).describe()["t"].to_pylist()
    assert found[4:9:2] == ["1677-09-21 00:12:43.145224192", "2013-01-01 05:00:00.000000001",
                            "2262-04-11 23:47:16.854775807"], "to the last digit"  # fmt: skip
    odd = pa.table({"f": [math.nan, 1.0, math.inf, -1.0, 2.0],
                    "v": pa.array(["b", "a", None, "c", "a"], pa.string_view()),
                    "z": pa.array([b"b", None, None, b"", b"a"], pa.binary())})
    found = si.from_arrow(odd).describe()
    assert str(found["f"].to_pylist()[4:]) == "[-1.0, 1.0, 2.0, inf, nan]", "NaN is the greatest"
    assert found["v"].to_pylist()[4::4] == ["a", "c"]
    assert found["z"].to_pylist()[4::4] == ["b''", "b'b'"]
    empty = si.from_arrow(table.slice(0, 0)).describe()
    assert [empty[name].to_pylist()[:2] for name in ("d", "m")] == [["0", "0"], [0.0, 0.0]]
    assert pc.all(pc.is_null(empty["m"].slice(2))).as_py()
    assert si.flow({"x": int}).describe({"x": [1, 3]})["x"].to_pylist()[2] == 2.0


def test_describe_shows_text_that_is_no_utf8() -> None:
    broken = pa.Array.from_buffers(pa.string(), 2, pa.array([b"\xffz", b"ok"]).buffers())
    found = si.from_arrow(pa.table({"s": broken})).describe()
    assert found["s"].to_pylist()[4::4] == ["ok", "\N{REPLACEMENT CHARACTER}z"]


def test_describe_reads_its_input_once() -> None:
    once = pa.RecordBatchReader.from_batches(pa.schema({"x": pa.int64()}), iter([pa.record_batch({"x": [1, 2]})]))
    assert si.from_arrow(once).describe()["x"].to_pylist()[:3] == [2.0, 0.0, 1.5]
