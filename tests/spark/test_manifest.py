"""Manifests: what they say, who may write them, and what happens to damaged ones."""

from __future__ import annotations

import json
import zlib
from pathlib import Path

import pyarrow as pa
import pyarrow.dataset as ds
import pytest
from pyarrow import fs

import scalein as si
from scalein import col
from scalein.errors import NOWHERE, BadArgument, Damaged, NewerFormat, StoreFailed
from scalein.spark.streaming.commits import Commits
from scalein.spark.streaming.manifest import Manifests
from scalein.spark.streaming.read_state import read_state
from scalein.spark.streaming.work import Work
from scalein.storage.object_store import MANIFESTS, STATE, Location, parse_location
from tests.same import assert_same
from tests.spark.simulated import acting, begun, run

ROWS = pa.table({"k": [1, 2, 2], "x": [1.0, 2.0, 3.0]})
FLOW = si.flow(ROWS.schema).group_by("k").agg(n=si.count(), s=col("x").sum())


@pytest.fixture(params=["local", "elsewhere"])
def location(request: pytest.FixtureRequest, tmp_path: Path) -> Location:
    """A folder of this machine, and one that is reached as a store elsewhere is."""
    if request.param == "local":
        return parse_location(tmp_path / "checkpoint", NOWHERE)
    return Location(fs.SubTreeFileSystem(str(tmp_path), fs.LocalFileSystem()), "checkpoint", f"far://{tmp_path.name}")


def test_manifests_are_read_as_they_were_written(location: Location) -> None:
    manifests = Manifests(location)
    assert manifests.newest() is None
    manifests.take(NOWHERE)
    for number in range(4):
        manifests.publish(number, {"runs": [number], "text": "\u00e9 \n"})
        location.put(f"{STATE}/{number}.arrow", b"x")
        manifests.forget([f"{STATE}/{number}.arrow"], [f"{STATE}/{number - 1}.arrow"])
    assert manifests.newest() == {"format": 1, "start": 1, "batch": 3, "runs": [3], "text": "\u00e9 \n"}
    assert manifests.known() == [(1, 2), (1, 3)]
    assert location.names(STATE) == ["2.arrow", "3.arrow"]
    manifests.close()
    again = Manifests(location)
    again.take(NOWHERE)
    assert (again.name, again.start) == (manifests.name, 2)
    again.close()


@pytest.mark.parametrize("damage", ["flipped", "short", "empty", "other", "newer"])
def test_a_damaged_manifest_is_named_and_not_passed_over(tmp_path: Path, damage: str) -> None:
    commits = begun(FLOW, tmp_path, si.to_memory(), emit="changes")
    run(commits, [[ROWS], [ROWS]])
    commits.close()
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
            location.put(f"{MANIFESTS}/{path.name}", data.replace(b'"format":1', b'"format":9'))
        case _:
            path.write_bytes(data[:middle] if damage == "short" else b"")
    for look in (lambda: read_state(tmp_path), lambda: begun(FLOW, tmp_path, si.to_memory(), emit="changes")):
        with pytest.raises((Damaged, NewerFormat), match=r"0000000001-0000000001\.json"):
            look()


def test_a_manifest_that_says_nonsense_is_damaged(tmp_path: Path) -> None:
    manifests = Manifests(parse_location(tmp_path, NOWHERE))
    manifests.take(NOWHERE)
    manifests.publish(0, {"flow": "nonsense", "clock": 3})
    manifests.close()
    with pytest.raises(Damaged, match=r"0000000001-0000000000\.json"):
        begun(FLOW, tmp_path, si.to_memory(), emit="changes")
    with pytest.raises(Damaged, match="manifest"):
        read_state(tmp_path)


def test_one_stream_at_a_time(tmp_path: Path) -> None:
    first = begun(FLOW, tmp_path, si.to_memory(), emit="changes")
    with pytest.raises(StoreFailed, match="another stream is using"):
        begun(FLOW, tmp_path, si.to_memory(), emit="changes")
    first.close()
    begun(FLOW, tmp_path, si.to_memory(), emit="changes").close()


def remote_location(folder: Path) -> Location:
    """A store elsewhere, where nothing can be locked; each driver has a handle of its own."""
    return Location(fs.SubTreeFileSystem(str(folder), fs.LocalFileSystem()), "checkpoint", f"far://{folder.name}")


def test_a_driver_that_was_replaced_writes_no_more(tmp_path: Path) -> None:
    """Where there is no lock, the one that came later wins."""
    first = begun(FLOW, remote_location(tmp_path), si.to_memory(), emit="changes")
    run(first, [[ROWS]])
    second = begun(FLOW, remote_location(tmp_path), si.to_memory(), emit="changes")
    for number in range(2):
        with pytest.raises(StoreFailed, match="another driver has taken over"):
            first.do(number, "query", acting([ROWS]), None)
    second.do(1, "query", acting([ROWS]), None)
    second.close()
    first.close()


@pytest.mark.parametrize("done", [0, 1], ids=["at the first batch", "later"])
@pytest.mark.parametrize("goes_on", [True, False], ids=["the other goes on", "the other ends"])
def test_a_manifest_that_comes_late_is_void(done: int, goes_on: bool, tmp_path: Path) -> None:
    """A driver finds that it may write, and stands still; when it goes on, another one has taken over."""
    mine, out = remote_location(tmp_path), si.to_parquet(tmp_path / "out")
    first = begun(FLOW, mine, out, emit="changes")
    run(first, [[ROWS]] * done)
    put, others = mine.put, list[Commits]()

    def late(name: str, data: bytes) -> None:
        others.append(begun(FLOW, remote_location(tmp_path), si.to_parquet(tmp_path / "out"), emit="changes"))
        if goes_on:
            run(others[0], [[ROWS]], first=done)
        put(name, data)

    mine.put = late  # type: ignore[method-assign]
    with pytest.raises(StoreFailed, match="another driver has taken over"):
        run(first, [[ROWS]], first=done)
    first.close()
    others[0].close()
    third = begun(FLOW, remote_location(tmp_path), si.to_parquet(tmp_path / "out"), emit="changes")
    run(third, [[ROWS]], first=done)  # Spark plays it again in any case
    third.close()
    assert_same(read_state(tmp_path / "checkpoint"), FLOW.collect(pa.concat_tables([ROWS] * (done + 1))))
    told = ds.dataset(tmp_path / "out").to_table()
    assert sorted(told["n"].to_pylist()) == sorted([1, 2] if done == 0 else [1, 2, 2, 4])


def test_a_driver_that_was_replaced_removes_nothing_of_others(tmp_path: Path) -> None:
    """While it makes output visible, or behind its last look, another one may have taken over, and its tasks write."""
    first, second = Manifests(remote_location(tmp_path)), Manifests(remote_location(tmp_path))
    first.take(NOWHERE)
    for number in range(4):
        first.publish(number, {})
    old, new = first.location.new_name(STATE, ".arrow"), ""
    first.location.put(old, b"x")
    check = first.check

    def stalled() -> None:
        nonlocal new
        check()
        second.take(NOWHERE)
        second.adopt(second.newest())
        new = second.location.new_name(STATE, ".arrow")
        second.location.put(new, b"x")

    first.check = stalled  # type: ignore[method-assign]
    first.forget([], [])
    assert [f"{STATE}/{name}" for name in first.location.names(STATE)] == [new]
    assert second.known() == [(1, 3), (2, 3)]
    with pytest.raises(StoreFailed, match="another driver has taken over"):
        check()


def test_starts_at_one_moment_have_unlike_numbers(tmp_path: Path) -> None:
    first, second = Manifests(remote_location(tmp_path)), Manifests(remote_location(tmp_path))
    put = first.location.put

    def late(name: str, data: bytes) -> None:
        first.location.put = put  # type: ignore[method-assign]
        second.take(NOWHERE)
        put(name, data)

    first.location.put = late  # type: ignore[method-assign]
    first.take(NOWHERE)
    assert (first.start, second.start) == (2, 1)


def test_manifests_without_a_start_are_read(tmp_path: Path) -> None:
    """As the first version wrote them."""
    commits = begun(FLOW, tmp_path, si.to_memory(), emit="changes")
    run(commits, [[ROWS], [ROWS]])
    commits.close()
    for path in (tmp_path / MANIFESTS).glob("*.json"):
        content = json.loads(path.read_bytes().partition(b"\n")[0])
        assert content.pop("start") == 1
        text = json.dumps(content).encode()
        path.with_name(path.name.partition("-")[2]).write_bytes(text + b"\n%08x\n" % zlib.crc32(text))
        path.unlink()
    commits = begun(FLOW, tmp_path, si.to_memory(), emit="changes")
    run(commits, [[ROWS]], first=2)
    commits.close()
    assert_same(read_state(tmp_path), FLOW.collect(pa.concat_tables([ROWS] * 3)))


def test_a_manifest_is_never_there_in_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where others see a file that is being written, it gets its name last."""
    far = Location(fs.SubTreeFileSystem(str(tmp_path), fs.LocalFileSystem()), "", f"far://{tmp_path.name}")
    far.create_folders(MANIFESTS)
    far._is_atomic = False
    for number in range(2):
        far.put(f"{MANIFESTS}/one", b"%d" % number)
        assert far.read(f"{MANIFESTS}/one") == b"%d" % number
    with monkeypatch.context() as patch:
        patch.setattr(far, "files", _Torn(far.files))
        with pytest.raises(ZeroDivisionError):
            far.put(f"{MANIFESTS}/two", b"2")
    assert far.names(MANIFESTS) == ["one"]


class _Torn:
    """A filesystem under a process that ends before a file has its name."""

    def __init__(self, files: fs.FileSystem) -> None:
        self.open_output_stream, self.get_file_info = files.open_output_stream, files.get_file_info

    def move(self, *names: str) -> None:
        raise ZeroDivisionError


def test_an_address_with_one_slash_is_no_path() -> None:
    with pytest.raises(BadArgument, match="two slashes"):
        parse_location("dbfs:/mnt/checkpoint", NOWHERE)


def test_a_changed_flow_is_refused_with_the_difference(tmp_path: Path) -> None:
    commits = begun(FLOW, tmp_path, si.to_memory(), emit="changes")
    run(commits, [[ROWS]])
    commits.close()
    other = si.flow(ROWS.schema).group_by("k").agg(n=si.count(), s=col("x").max())
    with pytest.raises(BadArgument, match="other state than the one that wrote the checkpoint") as found:
        begun(other, tmp_path, si.to_memory(), emit="changes")
    assert "sum" in found.value.facts["checkpoint"]
    assert "max" in found.value.facts["flow"]
    # What stands around the state may change.
    begun(FLOW.filter(col("n") > 1), tmp_path, si.to_memory(), emit="changes").close()


def test_a_checkpoint_of_rows_that_are_kept_no_more_is_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flow = si.flow(ROWS.schema).group_by("k").agg(v=col("x").var())
    with monkeypatch.context() as patch:
        now = Work.signature.fget
        assert now is not None
        patch.setattr(Work, "signature", property(
            lambda self: [each.replace(", columns together", "") for each in now(self)]))
        commits = begun(flow, tmp_path, si.to_memory(), emit="changes")
        run(commits, [[ROWS]])
        commits.close()
    with pytest.raises(BadArgument, match=r"(?s)an older scalein wrote the checkpoint.*give a new checkpoint"):
        begun(flow, tmp_path, si.to_memory(), emit="changes")
    other = si.flow(ROWS.schema).group_by("k").agg(v=col("x").std())
    with pytest.raises(BadArgument, match="other state than the one that wrote the checkpoint"):
        begun(other, tmp_path, si.to_memory(), emit="changes")


def test_another_query_on_the_same_checkpoint_is_refused(tmp_path: Path) -> None:
    commits = begun(FLOW, tmp_path, si.to_memory(), emit="changes")
    run(commits, [[ROWS]])
    with pytest.raises(BadArgument, match="another query wrote this checkpoint"):
        commits.do(0, "another", acting([ROWS]), None)
    with pytest.raises(Damaged, match="Spark is at batch 3, and the last manifest is that of batch 0"):
        commits.do(3, "query", acting([ROWS]), None)
    run(commits, [[ROWS]], first=1)
    with pytest.raises(Damaged, match="Spark is at batch 0, and the last manifest is that of batch 1"):
        commits.do(0, "query", acting([ROWS]), None)  # an older copy of Spark's part of the checkpoint
    commits.close()
    commits = begun(FLOW, tmp_path / "new", si.to_memory(), emit="changes")
    with pytest.raises(Damaged, match="the last manifest is missing"):
        commits.do(3, "query", acting([ROWS]), None)
    commits.close()


def test_there_is_no_state_yet(tmp_path: Path) -> None:
    with pytest.raises(BadArgument, match="no state of a stream"):
        read_state(tmp_path)
    with pytest.raises(BadArgument, match="is not supported"):
        read_state("nowhere://at/all")
