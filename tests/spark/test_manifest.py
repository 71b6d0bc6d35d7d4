"""Manifests: their content, fencing of drivers, and damage."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pytest
from pyarrow import fs

import scalein as si
from scalein import col
from scalein.errors import NOWHERE, BadArgument, Damaged, NewerFormat, StoreFailed
from scalein.spark.streaming.coordinator import Coordinator
from scalein.spark.streaming.manifest import Manifests
from scalein.spark.streaming.read_state import read_state
from scalein.spark.streaming.stream_plan import StreamPlan
from scalein.storage.object_store import MANIFESTS, STATE, Location, parse_location
from tests.conformance.shapes import Mean
from tests.same import assert_same
from tests.spark.simulated import run, start_stream, tasks_over

ROWS = pa.table({"k": [1, 2, 2], "x": [1.0, 2.0, 3.0]})
FLOW = si.flow(ROWS.schema).group_by("k").agg(n=si.count(), s=col("x").sum())


@pytest.fixture(params=["local", "remote"])
def location(request: pytest.FixtureRequest, tmp_path: Path) -> Location:
    """A local folder, and one that is accessed like an object store."""
    if request.param == "local":
        return parse_location(tmp_path / "checkpoint", NOWHERE)
    return Location(fs.SubTreeFileSystem(str(tmp_path), fs.LocalFileSystem()), "checkpoint", f"far://{tmp_path.name}")


def test_manifests_are_read_as_they_were_written(location: Location) -> None:
    manifests = Manifests(location)
    assert manifests.newest() is None
    manifests.acquire(NOWHERE)
    for number in range(4):
        manifests.publish(number, {"runs": [number], "text": "\u00e9 \n"})
        location.put(f"{STATE}/{number}.arrow", b"x")
        manifests.remove_unreferenced([f"{STATE}/{number}.arrow"], [f"{STATE}/{number - 1}.arrow"])
    assert manifests.newest() == {"format": 2, "start": 1, "batch": 3, "revision": 0, "runs": [3], "text": "\u00e9 \n"}
    assert manifests.all_keys() == [(1, 2, 0), (1, 3, 0)]
    assert location.names(STATE) == ["2.arrow", "3.arrow"]
    revised = manifests.revise(manifests.read(manifests.all_keys()[-1]), {"runs": [4]})
    assert manifests.newest() == revised == {"format": 2, "start": 1, "batch": 3, "revision": 1, "runs": [4]}
    assert manifests.all_keys() == [(1, 2, 0), (1, 3, 0), (1, 3, 1)]
    manifests.close()
    again = Manifests(location)
    again.acquire(NOWHERE)
    assert (again.name, again.start) == (manifests.name, 2)
    again.close()


@pytest.mark.parametrize("damage", ["flipped", "short", "empty", "other", "newer"])
def test_a_damaged_manifest_is_reported_and_not_skipped(tmp_path: Path, damage: str) -> None:
    coordinator = start_stream(FLOW, tmp_path, si.to_memory(), emit="changes")
    run(coordinator, [[ROWS], [ROWS]])
    coordinator.close()
    path = tmp_path / MANIFESTS / "0000000001-0000000001.json"
    data = path.read_bytes()
    middle = len(data) // 2
    location = parse_location(tmp_path, NOWHERE)
    match damage:
        case "flipped":
            path.write_bytes(data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :])
        case "other":
            path.write_bytes((tmp_path / MANIFESTS / "0000000001-0000000000.json").read_bytes())
        case "newer":
            location.put(f"{MANIFESTS}/{path.name}", data.replace(b'"format":2', b'"format":9'))
        case _:
            path.write_bytes(data[:middle] if damage == "short" else b"")
    for read in (lambda: read_state(tmp_path), lambda: start_stream(FLOW, tmp_path, si.to_memory(), emit="changes")):
        with pytest.raises((Damaged, NewerFormat), match=r"0000000001-0000000001\.json"):
            read()


def test_a_manifest_with_unexpected_content_is_damaged(tmp_path: Path) -> None:
    manifests = Manifests(parse_location(tmp_path, NOWHERE))
    manifests.acquire(NOWHERE)
    manifests.publish(0, {"flow": "nonsense", "clock": 3})
    manifests.close()
    with pytest.raises(Damaged, match=r"0000000001-0000000000\.json"):
        start_stream(FLOW, tmp_path, si.to_memory(), emit="changes")
    with pytest.raises(Damaged, match="manifest"):
        read_state(tmp_path)


def test_no_file_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """HDFS removes the old file before the new one has its name: a driver that ends in between would lose both."""
    put, names = Location.put, list[str]()

    def recorded(location: Location, name: str, data: bytes) -> None:
        names.append(name)
        put(location, name, data)

    monkeypatch.setattr(Location, "put", recorded)
    streams = set()
    for number in range(3):
        coordinator = start_stream(FLOW, remote_location(tmp_path), si.to_memory(), emit="changes")
        run(coordinator, [[ROWS]], first=number)
        streams.add((coordinator._manifests.name, coordinator._manifests.start))
        coordinator.close()
    assert len(names) == len(set(names))
    assert len({name for name, _ in streams}) == 1
    assert sorted(start for _, start in streams) == [1, 2, 3]


def test_one_stream_at_a_time(tmp_path: Path) -> None:
    first = start_stream(FLOW, tmp_path, si.to_memory(), emit="changes")
    with pytest.raises(StoreFailed, match="another stream is using"):
        start_stream(FLOW, tmp_path, si.to_memory(), emit="changes")
    first.close()
    start_stream(FLOW, tmp_path, si.to_memory(), emit="changes").close()


def remote_location(folder: Path) -> Location:
    """An object store, where nothing can be locked; each driver has a handle of its own."""
    return Location(fs.SubTreeFileSystem(str(folder), fs.LocalFileSystem()), "checkpoint", f"far://{folder.name}")


def test_a_replaced_driver_cannot_write(tmp_path: Path) -> None:
    """Without a lock, the later start wins."""
    first = start_stream(FLOW, remote_location(tmp_path), si.to_memory(), emit="changes")
    run(first, [[ROWS]])
    second = start_stream(FLOW, remote_location(tmp_path), si.to_memory(), emit="changes")
    for number in range(2):
        with pytest.raises(StoreFailed, match="another driver has taken over"):
            first.run_batch(number, "query", tasks_over([ROWS]), None)
    second.run_batch(1, "query", tasks_over([ROWS]), None)
    second.close()
    first.close()


@pytest.mark.parametrize("done", [0, 1], ids=["at the first batch", "later"])
@pytest.mark.parametrize("successor_runs", [True, False], ids=["successor runs", "successor ends"])
def test_a_manifest_of_a_replaced_driver_is_void(done: int, successor_runs: bool, tmp_path: Path) -> None:
    """A driver is suspended between its check and its write; when it resumes, another one has taken over."""
    mine, out = remote_location(tmp_path), si.to_parquet(tmp_path / "out")
    first = start_stream(FLOW, mine, out, emit="changes")
    run(first, [[ROWS]] * done)
    put, others = mine.put, list[Coordinator]()

    def late(name: str, data: bytes) -> None:
        others.append(start_stream(FLOW, remote_location(tmp_path), si.to_parquet(tmp_path / "out"), emit="changes"))
        if successor_runs:
            run(others[0], [[ROWS]], first=done)
        put(name, data)

    mine.put = late  # type: ignore[method-assign]
    with pytest.raises(StoreFailed, match="another driver has taken over"):
        run(first, [[ROWS]], first=done)
    first.close()
    others[0].close()
    third = start_stream(FLOW, remote_location(tmp_path), si.to_parquet(tmp_path / "out"), emit="changes")
    run(third, [[ROWS]], first=done)  # Spark repeats it in any case
    third.close()
    assert_same(read_state(tmp_path / "checkpoint"), FLOW.collect(pa.concat_tables([ROWS] * (done + 1))))
    changes_out = ds.dataset(tmp_path / "out").to_table()
    assert sorted(changes_out["n"].to_pylist()) == sorted([1, 2] if done == 0 else [1, 2, 2, 4])


def test_a_replaced_driver_removes_no_file_of_its_successor(tmp_path: Path) -> None:
    """After its last check another driver may have taken over, whose tasks write."""
    first, second = Manifests(remote_location(tmp_path)), Manifests(remote_location(tmp_path))
    first.acquire(NOWHERE)
    for number in range(4):
        first.publish(number, {})
    old, new = first.location.new_name(STATE, ".arrow"), ""
    first.location.put(old, b"x")
    check = first.check_not_superseded

    def stalled() -> None:
        nonlocal new
        check()
        second.acquire(NOWHERE)
        second.adopt(second.newest())
        new = second.location.new_name(STATE, ".arrow")
        second.location.put(new, b"x")

    first.check_not_superseded = stalled  # type: ignore[method-assign]
    first.remove_unreferenced([], [])
    assert [f"{STATE}/{name}" for name in first.location.names(STATE)] == [new]
    assert second.all_keys() == [(1, 3, 0), (2, 3, 0)]
    with pytest.raises(StoreFailed, match="another driver has taken over"):
        check()


def test_concurrent_starts_get_different_numbers(tmp_path: Path) -> None:
    first, second = Manifests(remote_location(tmp_path)), Manifests(remote_location(tmp_path))
    put = first.location.put

    def late(name: str, data: bytes) -> None:
        first.location.put = put  # type: ignore[method-assign]
        second.acquire(NOWHERE)
        put(name, data)

    first.location.put = late  # type: ignore[method-assign]
    first.acquire(NOWHERE)
    assert (first.start, second.start) == (2, 1)


def test_manifests_without_a_start_are_read(tmp_path: Path) -> None:
    """As the first version wrote them."""
    coordinator = start_stream(FLOW, tmp_path, si.to_memory(), emit="changes")
    run(coordinator, [[ROWS], [ROWS]])
    coordinator.close()
    for path in (tmp_path / MANIFESTS).glob("*.json"):
        content = json.loads(path.read_bytes().partition(b"\n")[0])
        assert content.pop("start") == 1
        text = json.dumps(content).encode()
        path.with_name(path.name.partition("-")[2]).write_bytes(text + b"\n%08x\n" % zlib.crc32(text))
        path.unlink()
    coordinator = start_stream(FLOW, tmp_path, si.to_memory(), emit="changes")
    run(coordinator, [[ROWS]], first=2)
    coordinator.close()
    assert_same(read_state(tmp_path), FLOW.collect(pa.concat_tables([ROWS] * 3)))


def test_a_manifest_is_published_atomically(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On filesystems that show a file while it is written, it is renamed last."""
    remote = Location(fs.SubTreeFileSystem(str(tmp_path), fs.LocalFileSystem()), "", f"far://{tmp_path.name}")
    remote.create_folders(MANIFESTS)
    remote._is_atomic = False
    for number in range(2):
        remote.put(f"{MANIFESTS}/one", b"%d" % number)
        assert remote.read(f"{MANIFESTS}/one") == b"%d" % number
    with monkeypatch.context() as patch:
        patch.setattr(remote, "files", _Torn(remote.files))
        with pytest.raises(ZeroDivisionError):
            remote.put(f"{MANIFESTS}/two", b"2")
    assert remote.names(MANIFESTS) == ["one"]


class _Torn:
    """A filesystem of a process that crashes before it renames a file."""

    def __init__(self, files: fs.FileSystem) -> None:
        self.open_output_stream, self.get_file_info = files.open_output_stream, files.get_file_info

    def move(self, *names: str) -> None:
        raise ZeroDivisionError


def test_an_address_with_one_slash_is_refused() -> None:
    with pytest.raises(BadArgument, match="two slashes"):
        parse_location("dbfs:/mnt/checkpoint", NOWHERE)


def test_a_changed_flow_is_refused_with_the_difference(tmp_path: Path) -> None:
    coordinator = start_stream(FLOW, tmp_path, si.to_memory(), emit="changes")
    run(coordinator, [[ROWS]])
    coordinator.close()
    other = si.flow(ROWS.schema).group_by("k").agg(n=si.count(), s=col("x").max())
    with pytest.raises(BadArgument, match="other state than the one that wrote the checkpoint") as found:
        start_stream(other, tmp_path, si.to_memory(), emit="changes")
    assert "sum" in found.value.facts["checkpoint"]
    assert "max" in found.value.facts["flow"]
    # Ops that do not shape the state may change.
    start_stream(FLOW.filter(col("n") > 1), tmp_path, si.to_memory(), emit="changes").close()


def test_a_checkpoint_with_outdated_state_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flow = si.flow(ROWS.schema).group_by("k").agg(v=col("x").var())
    with monkeypatch.context() as patch:
        now = StreamPlan.signature.fget
        assert now is not None
        patch.setattr(StreamPlan, "signature", property(
            lambda self: [each.replace(", columns together", "") for each in now(self)]))
        coordinator = start_stream(flow, tmp_path, si.to_memory(), emit="changes")
        run(coordinator, [[ROWS]])
        coordinator.close()
    with pytest.raises(BadArgument, match=r"(?s)an older scalein wrote the checkpoint.*give a new checkpoint"):
        start_stream(flow, tmp_path, si.to_memory(), emit="changes")
    other = si.flow(ROWS.schema).group_by("k").agg(v=col("x").std())
    with pytest.raises(BadArgument, match="other state than the one that wrote the checkpoint"):
        start_stream(other, tmp_path, si.to_memory(), emit="changes")


def test_another_query_on_the_same_checkpoint_is_refused(tmp_path: Path) -> None:
    coordinator = start_stream(FLOW, tmp_path, si.to_memory(), emit="changes")
    run(coordinator, [[ROWS]])
    with pytest.raises(BadArgument, match="another query wrote this checkpoint"):
        coordinator.run_batch(0, "another", tasks_over([ROWS]), None)
    with pytest.raises(Damaged, match="Spark is at batch 3, and the last manifest is that of batch 0"):
        coordinator.run_batch(3, "query", tasks_over([ROWS]), None)
    run(coordinator, [[ROWS]], first=1)
    with pytest.raises(Damaged, match="Spark is at batch 0, and the last manifest is that of batch 1"):
        coordinator.run_batch(0, "query", tasks_over([ROWS]), None)  # an older copy of Spark's folder
    coordinator.close()
    coordinator = start_stream(FLOW, tmp_path / "new", si.to_memory(), emit="changes")
    with pytest.raises(Damaged, match="the last manifest is missing"):
        coordinator.run_batch(3, "query", tasks_over([ROWS]), None)
    coordinator.close()


def test_reading_state_before_the_first_batch(tmp_path: Path) -> None:
    with pytest.raises(BadArgument, match="no state of a stream"):
        read_state(tmp_path)
    with pytest.raises(BadArgument, match="is not supported"):
        read_state("nowhere://at/all")


@pytest.mark.parametrize("window", [None, si.sliding("t", 20, every=10)])
def test_the_state_of_aggregates_of_the_users_own_is_left_out(window: Any, tmp_path: Path) -> None:
    """How they are finished is in their class, and nothing in a checkpoint is imported."""
    rows = pa.table({"k": [1, 2, 2], "x": [1.0, 2.0, 3.0], "t": [1, 12, 15]})
    grouped = si.flow(rows.schema).with_watermark("t", 0).group_by("k", *([] if window is None else [window]))
    flow = grouped.agg(n=si.count(), m=Mean(col("x")), s=col("x").sum())
    coordinator = start_stream(flow, tmp_path, si.to_memory(), emit="changes")
    run(coordinator, [[rows]])
    coordinator.close()
    with pytest.warns(RuntimeWarning, match="the state of m is left out"):
        found = read_state(tmp_path)
    want = flow.collect(rows).drop_columns(["m"])
    assert_same(found, want if window is None else want.filter(pc.field("window_end") > 15))
