"""Where a stream's rows go: sinks of our own and of others, late rows, folders that change, files that vanish."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
import pytest

import scalein as si
from scalein.connectors.sinks import files
from scalein.errors import NOWHERE, BadArgument, WriteFailed
from scalein.spark.streaming import sinks
from scalein.spark.streaming.commits import Commits
from scalein.spark.streaming.manifest import Manifests
from scalein.spark.streaming.tasks import Batch, Heard
from scalein.storage.object_store import place_of
from tests.same import assert_same
from tests.spark.simulated import acting, begun, run
from tests.spark.test_stream_faults import (
    BATCHES,
    FLOW,
    Death,
    begin,
    check,
    dying,
    let_go,
    rows,
)


class Recorded:
    """A sink of two phases, as users write them; what is committed is what outlives a crash."""

    def __init__(self, disk: dict[str, list[int]]) -> None:
        self._disk, self._rows, self._number = disk, list[int](), 0

    def open(self, schema: pa.Schema, committed: Any, next: str) -> None:
        self._next = next
        self.commit(committed)

    def write(self, batch: pa.RecordBatch) -> None:
        self._rows += batch.column("n").to_pylist()

    def prepare(self) -> Any:
        rows, self._rows, self._number = self._rows, [], self._number + 1
        return {"name": f"{self._next}-{self._number}", "rows": rows}

    def commit(self, prepared: Any) -> None:
        if prepared is not None:
            self._disk[prepared["name"]] = prepared["rows"]

    def close(self) -> None:
        pass


@pytest.mark.parametrize(("target", "name", "before"), [
    (Manifests, "publish", True), (Manifests, "publish", False), (Recorded, "commit", True),
    (Recorded, "commit", False)])
def test_own_sinks_get_each_row_once(target: object, name: str, before: bool, tmp_path: Path) -> None:
    disk: dict[str, list[int]] = {}
    commits = begun(FLOW, tmp_path, Recorded(disk), emit="changes")
    number = 0
    with dying(target, name, 2, before):
        while number < BATCHES:
            try:
                commits.do(number, "query", acting(rows(number)), None)
                number += 1
            except Death:
                let_go(commits)
                commits = begun(FLOW, tmp_path, Recorded(disk), emit="changes")
    commits.close()
    told = [n for some in disk.values() for n in some]
    plain = si.to_memory()
    commits = begun(FLOW, tmp_path / "plain", plain, emit="changes")
    run(commits, [rows(number) for number in range(BATCHES)])
    commits.close()
    assert sorted(told) == sorted(plain.table().column("n").to_pylist())


def test_late_rows_are_staged_with_the_batch(tmp_path: Path) -> None:
    schema = pa.schema([("t", pa.int64()), ("x", pa.int64())])
    flow = si.flow(schema).with_watermark("t", 0).group_by(si.tumbling("t", 10)).agg(n=si.count())
    commits = begun(flow, tmp_path / "checkpoint", si.to_parquet(tmp_path / "out"), late=si.to_csv(tmp_path / "late"))
    run(commits, [[pa.table({"t": [1, 25], "x": [1, 2]}, schema)], [pa.table({"t": [3, 40], "x": [7, 8]}, schema)]],
        attempts=2)  # fmt: skip
    commits.close()
    assert ds.dataset(tmp_path / "late", format="csv").to_table().to_pydict() == {"t": [3], "x": [7]}
    assert sorted(ds.dataset(tmp_path / "out").to_table().column("n").to_pylist()) == [1, 1]


def test_late_rows_may_go_below_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sink of the others looks through its folder for files that nobody wants: these are not."""
    monkeypatch.setattr(sinks, "TIDY_EVERY", 1)
    schema = pa.schema([("t", pa.int64())])
    flow = si.flow(schema).with_watermark("t", 0).group_by(si.tumbling("t", 10)).agg(n=si.count())

    def make() -> Commits:
        return begun(flow, tmp_path / "checkpoint", si.to_parquet(tmp_path / "out"),
                     late=si.to_parquet(tmp_path / "out" / "late"))

    commits = make()
    run(commits, [[pa.table({"t": [1, 25]}, schema)], [pa.table({"t": [2]}, schema)]])
    with monkeypatch.context() as patch:
        patch.setattr(Commits, "_commit", lambda *given: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run(commits, [[pa.table({"t": [3]}, schema)]], first=2)
    commits.close()
    make().close()
    assert sorted(ds.dataset(tmp_path / "out" / "late").to_table().column("t").to_pylist()) == [2, 3]


def test_another_sink_does_not_take_over_what_is_not_visible(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commits = begun(FLOW, tmp_path / "checkpoint", si.to_parquet(tmp_path / "out"), emit="changes")
    with monkeypatch.context() as patch:
        patch.setattr(Commits, "_commit", lambda *given: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run(commits, [rows(0)])
    commits.close()
    commits = begun(FLOW, tmp_path / "checkpoint", si.to_memory(), emit="changes")
    with pytest.raises(BadArgument, match="another sink, whose output"):
        run(commits, [rows(0)])
    commits.close()
    commits = begun(FLOW, tmp_path / "checkpoint", si.to_parquet(tmp_path / "out"), emit="changes")
    run(commits, [rows(0)])
    commits.close()
    commits = begun(FLOW, tmp_path / "checkpoint", sink := si.to_memory(), emit="changes")
    run(commits, [rows(1)], first=1)
    commits.close()
    assert sink.table().num_rows
    told = ds.dataset(tmp_path / "out").to_table().drop_columns("op")
    assert_same(told, FLOW.collect(pa.concat_tables(rows(0))).cast(told.schema))


def end_before_commit(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A first batch whose manifest is there, and whose output is not visible yet."""
    commits = begin(folder)
    with monkeypatch.context() as patch:
        patch.setattr(Commits, "_commit", lambda *given: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run(commits, [rows(0)])
    commits.close()


def test_another_folder_does_not_take_over_either(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    end_before_commit(tmp_path, monkeypatch)
    commits = begun(FLOW, tmp_path / "checkpoint", si.to_parquet(tmp_path / "out2"), emit="changes")
    with pytest.raises(BadArgument, match="another sink, whose output") as found:
        run(commits, [rows(0)])
    assert found.value.facts["found"] == f"files {tmp_path / 'out'}"
    commits.close()
    commits = begin(tmp_path)
    run(commits, [rows(0)])
    commits.close()
    check(tmp_path, batches=1)


def test_output_that_is_gone_is_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    end_before_commit(tmp_path, monkeypatch)
    for path in (tmp_path / "out").iterdir():
        path.unlink()
    with pytest.warns(RuntimeWarning, match="their rows are lost"):
        begin(tmp_path).close()


def test_attempts_may_clean_up_at_any_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here while the driver looks for what attempts have left, behind the commit of a batch."""
    monkeypatch.setattr(sinks, "TIDY_EVERY", 1)
    commits = begin(tmp_path)
    original = files.os.walk

    def walk(folder: str) -> Iterator[Any]:
        for directory, folders, names in original(folder):
            for name in names:
                if name.startswith("_staged-"):
                    (Path(directory) / name).unlink()
            yield directory, folders, names

    monkeypatch.setattr(files.os, "walk", walk)
    run(commits, [rows(number) for number in range(BATCHES - 1)], attempts=2)
    monkeypatch.setattr(files.os, "walk", original)
    later = tmp_path / "out" / f"_staged-{commits._manifests.name}-{BATCHES:010}-000001-other0000.parquet"
    later.write_bytes(b"")  # of a driver that has taken over
    run(commits, [rows(BATCHES - 1)], first=BATCHES - 1, attempts=2)
    commits.close()
    assert list((tmp_path / "out").glob("_staged-*")) == [later]
    later.unlink()
    check(tmp_path)


def test_file_sinks_write_to_this_machine() -> None:
    for address in ("s3://bucket/x", Path("s3://bucket/x"), "file:///x", "dbfs:/x"):
        with pytest.raises(BadArgument, match="this is an address") as found:
            si.to_parquet(address)
        assert "df.write" in found.value.facts["hint"]


def test_files_that_the_driver_does_not_see_are_no_output(tmp_path: Path) -> None:
    """As on machines that have no folder in common."""
    commits = begun(FLOW, tmp_path / "checkpoint", si.to_parquet(tmp_path / "out"), emit="changes")

    def elsewhere(batch: Batch) -> Heard:
        said = acting(rows(0))(batch)
        next((tmp_path / "out").glob("_staged-*")).unlink()
        return said

    with pytest.raises(WriteFailed, match="it is not there"):
        commits.do(0, "query", elsewhere, None)
    commits.close()
    assert Manifests(place_of(tmp_path / "checkpoint", NOWHERE)).newest() is None
