"""Partitioned folders (`day=2024-01-01/`): the rows of pyarrow.dataset, and no file that a filter rules out is read."""

from __future__ import annotations

import datetime as dt
import itertools
import json
import tempfile
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

import scalein as si
from scalein import col
from scalein.api.column import Column
from tests.connectors.kinds import KINDS, SCHEMA, Kind, connected, read_all, rows, together
from tests.engines import examples

DAY = dt.date(2024, 2, 28)
VALUES: dict[pa.DataType, st.SearchStrategy[Any]] = {
    pa.int32(): st.integers(-(2**31), 2**31 - 1) | st.integers(-3, 3),
    pa.int64(): st.integers(2**31, 2**63 - 1),
    pa.date32(): st.dates(dt.date(1000, 1, 1)),
    pa.string(): st.sampled_from(["a", "a b", "a/b", "..", "a=b%20", "é", "_x", "*?", "1.5", "x1", "2023-02-29"]),
}
KINDS_OF_VALUES = st.sampled_from(list(VALUES.items())).flatmap(
    lambda kind: st.tuples(st.just(kind[0]), st.lists(kind[1] | st.none(), min_size=1, max_size=5)))


def write(table: pa.Table, folder: Path, *by: str) -> None:
    parts = ds.partitioning(pa.schema([table.schema.field(name) for name in by]), flavor="hive")
    ds.write_dataset(table, folder, format="parquet", partitioning=parts, max_partitions=4096)


def put(path: Path, **columns: list[Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path)


@examples(30)
@given(st.data())
def test_the_rows_of_pyarrow(data: st.DataObject) -> None:
    columns = {"v": pa.array(range(40)), "w": pa.array([f"w{n}" for n in range(40)])}
    for name in ("p", "k q")[: data.draw(st.integers(1, 2))]:
        arrow, some = data.draw(KINDS_OF_VALUES)
        columns[name] = pa.array([some[n * 7 % 40 % len(some)] for n in range(40)], arrow)
        if all(value is None for value in some):
            columns[name] = columns[name].cast(pa.string())
    table = pa.table(columns)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(table, folder, *table.column_names[2:])
        flow = si.read_parquet(folder)
        assert flow.schema == table.schema
        parts = ds.partitioning(pa.schema(list(table.schema)[2:]), flavor="hive")
        expected = ds.dataset(folder, format="parquet", partitioning=parts).to_table().sort_by("v")
        assert flow.collect().sort_by("v").equals(expected.select(flow.schema.names))
        wanted = data.draw(st.sampled_from(table["p"].to_pylist()))
        if wanted is not None:
            kept = expected.filter(pa.compute.greater_equal(expected["p"], pa.scalar(wanted, table["p"].type)))
            kept = kept.sort_by("v").select(["p", "v"])
            assert flow.filter(col("p") >= wanted).select("p", "v").collect().sort_by("v").equals(kept)
        assert sorted(map(str, flow.select("p").collect()["p"].to_pylist())) == sorted(map(str, table["p"].to_pylist()))
        assert flow.count() == 40


@pytest.mark.parametrize("condition", [
    col("s") == "view", col("s").is_in(["view", "other"]), col("n") < 2, col("n").is_in([1, 7]), col("d") <= DAY,
    (col("v") > 0) & (col("d") == DAY), col("d") < dt.date(2024, 2, 29),
])
def test_files_that_a_filter_rules_out_are_not_opened(condition: Column, tmp_path: Path) -> None:
    put(tmp_path / "s=view" / "n=1" / "d=2024-02-28" / "a.parquet", v=[1, 2])
    for other in ("s=buy/n=2/d=2024-03-01", "s=__HIVE_DEFAULT_PARTITION__/n=__HIVE_DEFAULT_PARTITION__/"
                  "d=__HIVE_DEFAULT_PARTITION__"):  # fmt: skip
        (tmp_path / other).mkdir(parents=True)
        (tmp_path / other / "damaged.parquet").write_bytes(b"no file of Parquet")
    flow = si.read_parquet(tmp_path, schema={"v": pa.int64()})
    assert flow.schema == pa.schema({"v": pa.int64(), "s": pa.string(), "n": pa.int32(), "d": pa.date32()})
    expected = {"v": [1, 2], "s": ["view"] * 2, "n": [1, 1], "d": [DAY] * 2}
    assert flow.filter(condition).collect().to_pydict() == expected
    assert flow.filter(condition).start(sink=(sink := si.to_memory())).wait(60)
    assert sink.table().to_pydict() == expected
    with pytest.raises(si.BadData, match="damaged"):
        flow.collect()


@pytest.mark.parametrize("kind", KINDS, ids=repr)
def test_all_formats(kind: Kind, tmp_path: Path) -> None:
    for k in range(3):
        (tmp_path / f"_k={k}").mkdir()
        kind.write(rows(k * 50, 50), tmp_path / f"_k={k}" / "rows", 20)
    flow = kind.scan(tmp_path, schema=SCHEMA)
    whole = pa.schema([*SCHEMA, pa.field("_k", pa.int32())])
    expected = rows(0, 150).append_column(whole.field("_k"), pa.array([n // 50 for n in range(150)], pa.int32()))
    assert flow.schema == whole
    batches = read_all(connected(flow))
    assert together(batches, whole).equals(expected)
    for _, offset in batches:
        after = 50 * int(offset["file"][3]) + offset["row"]
        assert together(read_all(connected(flow), json.loads(json.dumps(offset))), whole).equals(expected.slice(after))
    assert flow.select("_k").collect().equals(expected.select(["_k"]))
    assert flow.filter(col("_k") == 1).select("_k", "n").collect().equals(expected.slice(50, 50).select(["_k", "n"]))


def test_types_given(tmp_path: Path) -> None:
    put(tmp_path / "zip=01234" / "a.parquet", v=[1])
    put(tmp_path / "zip=99999" / "a.parquet", v=[2])
    assert si.read_parquet(tmp_path).collect().to_pydict() == {"v": [1, 2], "zip": [1234, 99999]}
    flow = si.read_parquet(tmp_path, schema={"zip": pa.string(), "v": pa.int64()})
    assert flow.filter(col("zip") == "01234").collect().to_pydict() == {"v": [1], "zip": ["01234"]}
    with pytest.raises(si.BadData, match="'zip' is bool"):
        si.read_parquet(tmp_path, schema={"zip": pa.bool_(), "v": pa.int64()}).collect()


def test_a_column_that_the_files_have_too(tmp_path: Path) -> None:
    """As in Spark: its place is that in the files, its value that of the directory."""
    put(tmp_path / "k=1" / "a.parquet", k=["file", "file"], v=[1, 2])
    put(tmp_path / "k=2" / "a.parquet", k=["file"], v=[3])
    flow = si.read_parquet(tmp_path)
    assert flow.collect().to_pydict() == {"k": [1, 1, 2], "v": [1, 2, 3]}
    assert flow.filter(col("k") == 2).collect().to_pydict() == {"k": [2], "v": [3]}
    assert flow.select("k").collect().to_pydict() == {"k": [1, 1, 2]}


@pytest.mark.parametrize("other", ["b.parquet", "sub/b.parquet", "n=1/b.parquet", "k=1/n=2/b.parquet", "=1/b.parquet",
                                   "k=1/k=2/b.parquet"])  # fmt: skip
def test_directories_of_other_columns(other: str, tmp_path: Path) -> None:
    put(tmp_path / "k=1" / "a.parquet", v=[1])
    put(tmp_path / other, v=[2])
    with pytest.raises(si.BadData, match="partitioned table"):
        si.read_parquet(tmp_path)
    assert si.read_parquet(tmp_path / "k=1" / "*.parquet").collect().to_pydict() == {"v": [1]}


def test_followed(tmp_path: Path) -> None:
    put(tmp_path / "k=1" / "a.parquet", v=[1])
    source = connected(si.read_parquet(tmp_path, follow=True))
    with closing(source.read_from("files", None)) as batches:
        for k in (2, 3, None):
            put(tmp_path / "_staged" / "a.parquet", v=[k])
            (tmp_path / "_staged").rename(tmp_path / f"k={k or 'x'}")
            if k is None:
                with pytest.raises(si.BadData, match=r"'k' is int32.*'x'"):
                    list(itertools.islice(batches, 100))
            else:
                found = next(batch for batch, _ in itertools.islice(batches, 100)
                             if batch.num_rows and batch["k"][0].as_py() == k)
                assert found.to_pydict() == {"v": [k], "k": [k]}
