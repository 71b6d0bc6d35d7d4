"""Sinks: what is written can be read back, appears with its commit, once, and errors name the file."""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

import scalein as si
from scalein.api.flow import Flow
from scalein.connectors.sinks.files import FileSink
from scalein.storage.checked_json import Json
from tests.connectors.kinds import SCHEMA, rows

FORMATS = {
    "parquet": (si.to_parquet, si.read_parquet),
    "ipc": (si.to_ipc, si.read_ipc),
    "csv": (si.to_csv, si.read_csv),
    "json": (si.to_json, si.read_json),
}
formats = pytest.mark.parametrize(("to", "read"), FORMATS.values(), ids=FORMATS)


def test_folders_within_folders_are_synced_up_to_the_sinks_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or a power failure may take a folder that nothing else names."""
    synced: list[str] = []
    monkeypatch.setattr("scalein.connectors.sinks.files.sync_path", synced.append)
    sink = si.to_parquet(tmp_path / "out", partition_by=["a", "b"])
    table = pa.table({"a": [1], "b": [2], "x": [3]})
    sink.open(table.schema, None, "job-1")
    synced.clear()
    sink.write(batch_of(table))
    sink.prepare()
    root = tmp_path / "out"
    assert {str(root) + "/", str(root / "a=1"), str(root / "a=1" / "b=2")} <= set(synced)
    sink.close()


def batch_of(table: pa.Table) -> pa.RecordBatch:
    [batch] = table.combine_chunks().to_batches() or [pa.RecordBatch.from_pylist([], schema=table.schema)]
    return batch


def names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def staged(prepared: Json) -> list[str]:
    assert isinstance(prepared, dict)
    assert isinstance(prepared["files"], list)
    return [str(name) for name in prepared["files"]]


def write(sink: FileSink, *tables: pa.Table, next: str = "job-1") -> None:
    """Each table in an epoch of its own."""
    sink.open(tables[0].schema, None, next)
    for table in tables:
        for start in range(0, table.num_rows, 7):
            sink.write(batch_of(table.slice(start, 7)))
        sink.commit(sink.prepare())
    sink.close()


@formats
def test_rows_come_back(to: Callable[..., FileSink], read: Callable[..., Flow], tmp_path: Path) -> None:
    sink = to(tmp_path / "new" / "out")
    assert isinstance(sink, si.Sink)
    write(sink, rows(0, 20), rows(20, 0), rows(20, 100))
    assert read(tmp_path / "new" / "out", schema=SCHEMA).collect().equals(rows(0, 120))
    [first, second] = names(tmp_path / "new" / "out")
    assert first.startswith("part-job-1-0000000000-0000.")
    assert second.startswith("part-job-1-0000000002-0000.")


@formats
def test_nothing_is_seen_before_its_commit(to: Callable[..., FileSink], read: Callable[..., Flow],
                                           tmp_path: Path) -> None:
    sink = to(tmp_path)
    sink.open(SCHEMA, None, "job-1")
    sink.write(batch_of(rows(0, 10)))
    first = sink.prepare()
    sink.write(batch_of(rows(10, 10)))  # of the next epoch
    second = sink.prepare()
    sink.write(batch_of(rows(20, 10)))
    assert [name for name in names(tmp_path) if not name.startswith("_")] == []
    sink.commit(json.loads(json.dumps(first)))
    assert read(tmp_path, schema=SCHEMA).collect().equals(rows(0, 10))
    sink.commit(second)
    sink.commit(second)
    sink.close()
    assert read(tmp_path, schema=SCHEMA).collect().equals(rows(0, 20))
    assert len(names(tmp_path)) == 2  # close has removed what was not prepared


def test_everything_is_on_disk_when_prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []

    def sync(handle: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{handle}"))

    monkeypatch.setattr(os, "fsync", sync)
    sink = si.to_parquet(tmp_path, partition_by="k")
    table = pa.table({"k": [1, 2], "v": [3, 4]})
    sink.open(table.schema, None, "job-1")
    synced.clear()
    sink.write(batch_of(table))
    prepared = sink.prepare()
    folders = {str(tmp_path), str(tmp_path / "k=1"), str(tmp_path / "k=2")}
    assert set(synced) == {*folders, *(str(tmp_path / name) for name in staged(prepared))}
    synced.clear()
    sink.commit(prepared)
    sink.prepare()
    assert set(synced) == folders - {str(tmp_path)}  # the renames


def test_renames_in_the_folder_of_an_earlier_run_are_on_disk_in_time(tmp_path: Path,
                                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    """With the next `prepare`: what names the files is replaced only then."""
    old, new = (si.to_parquet(tmp_path / name, partition_by="k") for name in ("old", "new"))
    table = pa.table({"k": [1], "v": [3]})
    old.open(table.schema, None, "job-1")
    old.write(batch_of(table))
    prepared = old.prepare()
    old.close()
    new.open(table.schema, prepared, "job-2")
    synced: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda handle: synced.append(os.readlink(f"/proc/self/fd/{handle}")))
    new.prepare()
    assert synced == [str(tmp_path / "old" / "k=1")]
    assert len(list((tmp_path / "old" / "k=1").glob("part-*"))) == 1


def test_close_keeps_what_a_manifest_may_name(tmp_path: Path) -> None:
    sink = si.to_parquet(tmp_path)
    sink.open(SCHEMA, None, "job-1")
    sink.write(batch_of(rows(0, 10)))
    prepared = sink.prepare()
    sink.close()
    sink = si.to_parquet(tmp_path)
    sink.open(SCHEMA, prepared, "job-2")
    assert pq.read_table(tmp_path).equals(rows(0, 10))


def test_another_job_keeps_its_staged_files(tmp_path: Path) -> None:
    mine, other = si.to_parquet(tmp_path), si.to_parquet(tmp_path)
    other.open(SCHEMA, None, "other-1")
    other.write(batch_of(rows(0, 5)))
    prepared = other.prepare()
    mine.open(SCHEMA, None, "mine-1")
    mine.write(batch_of(rows(5, 5)))
    mine.prepare()
    mine.open(SCHEMA, None, "mine-2")  # no manifest names what was prepared
    assert names(tmp_path) == staged(prepared)
    other.commit(prepared)
    assert pq.read_table(tmp_path).equals(rows(0, 5))


def test_epochs_behind_an_older_manifest_go(tmp_path: Path) -> None:
    other = si.to_parquet(tmp_path)
    write(other, pa.table({"v": [-1]}), next="other-9")
    prepared: list[Json] = []
    for run in (9, 10):
        sink = si.to_parquet(tmp_path)
        sink.open(pa.schema({"v": pa.int64()}), prepared[-1] if prepared else None, f"job-{run}")
        for epoch in range(2):
            sink.write(pa.record_batch({"v": [10 * run + epoch]}))
            prepared.append(sink.prepare())
            sink.commit(prepared[-1])
        sink.close()
    seen = [-1, 90, 91, 100, 101]
    for manifest in reversed(prepared):  # the newest of those that are whole; rows behind it will come again
        si.to_parquet(tmp_path).open(pa.schema({"v": pa.int64()}), manifest, "job-11")
        assert sorted(pq.read_table(tmp_path)["v"].to_pylist()) == seen
        seen.pop()


def test_what_is_no_manifest_is_refused(tmp_path: Path) -> None:
    epoch: dict[str, Json] = {"epoch": "job-1-000000", "files": []}
    wrongs: list[Json] = [["x"], {**epoch, "files": ["../x"]}, {**epoch, "files": [5]}, 7, {**epoch, "folder": "here"},
                          {**epoch, "folder": 7}]  # fmt: skip
    for wrong in wrongs:
        with pytest.raises(si.WriteFailed, match="no list of staged files"):
            si.to_parquet(tmp_path).open(SCHEMA, wrong, "job-2")


@formats
def test_files_roll_over(to: Callable[..., FileSink], read: Callable[..., Flow], tmp_path: Path) -> None:
    sink = to(tmp_path, roll=30_000)
    table = pa.table({"v": range(100_000)})
    sink.open(table.schema, None, "job-1")
    for batch in table.to_batches(max_chunksize=2_000):
        sink.write(batch)
    sink.commit(sink.prepare())
    assert len(names(tmp_path)) > 3
    assert all((tmp_path / name).stat().st_size < 150_000 for name in names(tmp_path))
    assert read(tmp_path).collect().equals(table)


def test_numbers_that_do_not_repeat_get_no_dictionary(tmp_path: Path) -> None:
    keys = range(9_000)
    table = pa.table({"key": keys, "few": [k % 9 for k in keys], "text": [f"{k}" for k in keys]})
    write(si.to_parquet(tmp_path), table)
    group = pq.ParquetFile(tmp_path / names(tmp_path)[0]).metadata.row_group(0)
    assert [group.column(k).has_dictionary_page for k in range(3)] == [False, True, True]


@formats
def test_partitioned_by_columns(to: Callable[..., FileSink], read: Callable[..., Flow], tmp_path: Path) -> None:
    odd = ["a/b", "..", None, "", "a=b%20", "é ü", "_x", "a\nb", "*?"]
    table = pa.table({"k": odd * 2, "v": range(18), "d": [datetime.date(2024, 1, 1 + n % 2) for n in range(18)]})
    write(to(tmp_path, partition_by=["k", "d"]), table.slice(0, 10), table.slice(10))
    kind = {"read_parquet": "parquet", "read_ipc": "ipc", "read_csv": "csv", "read_json": "json"}[read.__name__]
    parts = ds.partitioning(pa.schema({"k": pa.string(), "d": pa.date32()}), flavor="hive")
    found = ds.dataset(tmp_path, format=kind, partitioning=parts).to_table(columns=["k", "v", "d"])
    assert found.sort_by("v").cast(table.schema).equals(table)
    assert all(path.name.startswith("part-") for path in tmp_path.rglob("*") if path.is_file())
    again = read(tmp_path).collect().select(["k", "v", "d"])
    assert again.sort_by("v").cast(table.schema).equals(table)


def test_partitions_without_a_name_or_a_rest(tmp_path: Path) -> None:
    schema = pa.schema({"k": pa.string(), "v": pa.list_(pa.int64())})
    for by, error, text in [("q", si.UnknownColumn, "'q'"), ("v", si.WrongType, "cannot name a directory"),
                            (["k", "v"], si.WrongType, "cannot name"), (["k", "k"], si.BadArgument, "different")]:
        with pytest.raises(error, match=text):
            si.to_parquet(tmp_path, partition_by=by).open(schema, None, "job-1")
    with pytest.raises(si.BadArgument, match="none is left"):
        si.to_parquet(tmp_path, partition_by="k").open(pa.schema({"k": pa.string()}), None, "job-1")


def test_many_partitions_do_not_need_many_open_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scalein.connectors.sinks.files._MAX_OPEN", 4)
    table = pa.table({"k": [n % 20 for n in range(200)], "v": range(200)})
    write(si.to_parquet(tmp_path, partition_by="k"), table)
    found = ds.dataset(tmp_path, partitioning="hive").to_table()
    assert sorted(found["v"].to_pylist()) == list(range(200))


def test_small_batches_make_one_row_group(tmp_path: Path) -> None:
    write(si.to_parquet(tmp_path), rows(0, 700))
    [name] = names(tmp_path)
    assert pq.ParquetFile(tmp_path / name).num_row_groups == 1


def test_empty_directories_of_lost_rows_go(tmp_path: Path) -> None:
    sink = si.to_parquet(tmp_path, partition_by=["a", "b"])
    table = pa.table({"a": [1], "b": [2], "v": [3]})
    sink.open(table.schema, None, "job-1")
    sink.write(batch_of(table))
    sink.close()
    assert list(tmp_path.iterdir()) == []
    sink.open(table.schema, None, "job-2")
    sink.write(batch_of(table))
    sink.prepare()
    sink.open(table.schema, None, "job-3")
    assert list(tmp_path.iterdir()) == []


@formats
def test_a_full_disk_is_named(to: Callable[..., FileSink], read: Callable[..., Flow], tmp_path: Path) -> None:
    sink = to(tmp_path, roll=1000)
    sink.open(SCHEMA, None, "job-1")
    sink.write(batch_of(rows(0, 100)))
    committed = sink.prepare()
    sink.commit(committed)
    suffix = names(tmp_path)[0].partition(".")[2]
    os.symlink("/dev/full", tmp_path / f"_staged-job-1-0000000001-0000.{suffix}")
    with pytest.raises(si.WriteFailed, match=rf"(?s)_staged-job-1-\d+1-0000\.{suffix} cannot be written.*No space"):
        _fill(sink)
    sink.close()
    sink.open(SCHEMA, committed, "job-2")
    sink.close()
    assert read(tmp_path, schema=SCHEMA).collect().equals(rows(0, 100))


def _fill(sink: FileSink) -> None:
    for start in range(100, 100_000, 100):
        sink.write(batch_of(rows(start, 100)))
    sink.prepare()


def test_wrong_paths(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(si.WriteFailed, match="file is a file"):
        si.to_parquet(tmp_path / "file")
    with pytest.raises(si.WriteFailed, match="out cannot be written"):
        si.to_parquet(tmp_path / "file" / "out").open(SCHEMA, None, "job-1")
    with pytest.raises(si.BadArgument, match="takes the path"):
        si.to_parquet(5)
    with pytest.raises(si.BadArgument, match="roll"):
        si.to_parquet(tmp_path, roll="much")


def test_types_that_a_format_has_not(tmp_path: Path) -> None:
    nested, binary = pa.schema({"v": pa.list_(pa.int64())}), pa.schema({"v": pa.binary()})
    si.to_json(tmp_path).open(nested, None, "job-1")
    with pytest.raises(si.WriteFailed, match=r"(?s)cannot be written.*list"):
        si.to_csv(tmp_path).open(nested, None, "job-1")
    with pytest.raises(si.WriteFailed, match=r"(?s)cannot be written.*'v' is binary"):
        si.to_json(tmp_path).open(binary, None, "job-1")


def test_json_of_every_type(tmp_path: Path) -> None:
    table = pa.table({
        "i": pa.array([1, None, -5], pa.int32()), "u": pa.array([2**64 - 1, None, 0], pa.uint64()),
        "f": [1e300, float("inf"), -0.5], "d": pa.array([Decimal("1.20"), None, Decimal("-3.00")]),
        "t": pa.array([0, None, 1_700_000_000_123_456], pa.timestamp("us")), "day": pa.array([1, None, 2], pa.date32()),
        "p": [{"x": 1, "y": ["a\"", None]}, None, {"x": None, "y": []}], "b": [True, None, False],
        'odd "name"': ["\x01\\", None, "\u2028"], "time": pa.array([1, None, 2], pa.time64("us")),
        "long": pa.array([1, None, 2], pa.duration("ms")), "z": pa.array([0, None, 1], pa.timestamp("ms", "UTC")),
    })  # fmt: skip
    write(si.to_json(tmp_path), table)
    [path] = [tmp_path / name for name in names(tmp_path)]
    assert [json.loads(line)["f"] for line in path.read_text().split("\n")[:-1]] == [1e300, None, -0.5]
    found = si.read_json(tmp_path, schema=table.schema).collect()
    assert found.drop_columns("f").equals(table.drop_columns("f"))


def test_callback() -> None:
    seen: list[pa.RecordBatch] = []
    sink = si.to_callback(seen.append)
    assert isinstance(sink, si.Sink)
    sink.open(SCHEMA, None, "job-1")
    sink.write(batch_of(rows(0, 3)))
    assert sink.prepare() is None
    sink.commit(None)
    sink.close()
    assert seen == [batch_of(rows(0, 3))]

    def oops(batch: pa.RecordBatch) -> None:
        raise ZeroDivisionError

    with pytest.raises(si.WriteFailed, match="the function oops that gets the rows raised ZeroDivisionError"):
        si.to_callback(oops).write(batch_of(rows(0, 3)))
    with pytest.raises(si.BadArgument, match="takes a function"):
        si.to_callback(5)  # type: ignore[arg-type]


def test_memory() -> None:
    sink = si.to_memory()
    with pytest.raises(si.BadArgument, match="nothing was written"):
        sink.table()
    sink.open(SCHEMA, None, "job-1")
    assert sink.table().equals(SCHEMA.empty_table())
    sink.write(batch_of(rows(0, 3)))
    sink.open(SCHEMA, None, "job-2")
    sink.write(batch_of(rows(3, 3)))
    assert sink.table().equals(rows(0, 6))
    assert repr(sink) == "<to_memory(): 6 rows>"
    with pytest.raises(si.BadArgument, match="another flow"):
        sink.open(pa.schema({"v": pa.int64()}), None, "job-3")


def test_console(capsys: pytest.CaptureFixture[str]) -> None:
    sink = si.to_console(rows=2)
    assert repr(sink) == "to_console(rows=2)"
    sink.open(SCHEMA, None, "job-1")
    sink.write(batch_of(rows(0, 0)))
    sink.write(pa.record_batch({"k": ["a", None, "c"], "t": pa.array([0, 1, None], pa.timestamp("s"))}))
    assert capsys.readouterr().out.splitlines() == [
        "k     t", "────  ───────────────────", "a     1970-01-01 00:00:00", "null  1970-01-01 00:00:01",
        "... 1 more row", ""]  # fmt: skip
    sink.write(pa.record_batch({"l": [[1, 2], None]}))
    assert "[1, 2]" in capsys.readouterr().out
    with pytest.raises(si.BadArgument, match="1 or more"):
        si.to_console(0)
