"""Manifests and files on a disk that loses power, fills up and fails; and the simulated disk itself."""

from __future__ import annotations

import errno
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scalein.errors import Damaged, StoreFailed
from scalein.state import format, manifest
from scalein.state.format import image_name, manifest_name, run_name
from scalein.state.manifest import Manifest
from scalein.state.run_file import RunFile
from scalein.state.run_writer import RunWriter
from scalein.state.segment_images import Extent, ImageFile, ImageWriter
from tests.state.power_cut_disk import PAGE, PowerCut, PowerCutDisk

SEEDS = st.integers(0, 1 << 32)


def snapshot(id: int, size: int = 3) -> Manifest:
    return Manifest(id, {"rows": id * 10}, {"runs": np.arange(id, id + size, dtype=np.uint64)})


def facts(found: Manifest) -> tuple[int, object, list[int]]:
    return found.id, found.meta, found.tables["runs"].tolist()


@settings(deadline=None, max_examples=150)
@given(cut_at=st.integers(0, 30), size=st.sampled_from([3, 2000]), seed=SEEDS)
def test_a_power_cut_leaves_the_old_manifest_or_the_new_one(cut_at: int, size: int, seed: int) -> None:
    disk = PowerCutDisk()
    disk.fail_at(cut_at)
    acknowledged = tried = 0
    try:
        for id in range(1, 5):
            tried = id
            manifest.publish(disk, snapshot(id, size))
            acknowledged = id
            if id > 1:
                disk.remove(manifest_name(id - 1))
    except PowerCut:
        pass
    found = list(manifest.newest(disk.after_cut(Random(seed))))
    assert not any(isinstance(one, Damaged) for one in found)
    ids = [one.id for one in found if isinstance(one, Manifest)]
    assert ids == sorted(ids, reverse=True)
    assert (ids[0] if ids else 0) in (acknowledged, tried)
    assert all(facts(one) == facts(snapshot(one.id, size)) for one in found if isinstance(one, Manifest))


def test_the_operations_of_publish(golden: object) -> None:
    disk = PowerCutDisk()
    manifest.publish(disk, snapshot(1))
    assert "\n".join(disk.log) == golden


@settings(deadline=None, max_examples=100)
@given(cut_at=st.integers(0, 40), seed=SEEDS)
def test_the_files_that_a_manifest_names_exist(cut_at: int, seed: int) -> None:
    disk = PowerCutDisk()
    disk.fail_at(cut_at)
    try:
        for id in range(1, 4):
            writer = RunWriter(disk, id, 8, "{}")
            writer.add(np.arange(3000, dtype=np.uint64).view(np.uint8).reshape(-1, 8), np.arange(3000, dtype=np.uint64))
            writer.finish()
            image = ImageWriter(disk, id)
            extent = image.add(0, np.full(3 * PAGE, id, np.uint8))
            image.finish()
            manifest.publish(disk, Manifest(id, {}, {"extent": np.array(extent)}))
            for kind in ("snapshot", "run", "image"):
                for old in format.ids(disk.names(), kind):
                    if old < id:
                        disk.remove({"run": run_name, "image": image_name}.get(kind, manifest_name)(old))
            disk.sync_directory()
    except PowerCut:
        pass
    after = disk.after_cut(Random(seed))
    found = next(manifest.newest(after), None)
    if isinstance(found, Manifest):
        RunFile(after, found.id, 8).verify()
        ImageFile(after, found.id).verify(Extent(*found.tables["extent"].tolist()))
    else:
        assert found is None


@pytest.mark.parametrize("kind", ["create", "write", "sync", "sync_directory", "rename"])
def test_a_failed_publish_leaves_the_old_manifest(kind: str) -> None:
    disk = PowerCutDisk()
    manifest.publish(disk, snapshot(1))
    disk.fail(kind, 0)
    with pytest.raises(StoreFailed, match="Input/output error") as caught:
        manifest.publish(disk, snapshot(2))
    assert (manifest_name(2) in caught.value.facts["file"]) == (kind != "sync_directory")
    assert disk.names() == [manifest_name(1)]
    manifest.publish(disk, snapshot(2))
    assert [facts(one) for one in manifest.newest(disk) if isinstance(one, Manifest)] == [
        facts(snapshot(2)), facts(snapshot(1))]  # fmt: skip


@pytest.mark.parametrize("free_bytes", [0, 1, 4000])
def test_a_full_disk_leaves_the_old_manifest(free_bytes: int) -> None:
    disk = PowerCutDisk()
    manifest.publish(disk, snapshot(1))
    disk.full_after(free_bytes)
    with pytest.raises(StoreFailed, match="No space left"):
        manifest.publish(disk, snapshot(2))
    assert disk.names() == [manifest_name(1)]


def test_a_read_error_does_not_fall_back_to_an_older_manifest() -> None:
    disk = PowerCutDisk()
    for id in (1, 2):
        manifest.publish(disk, snapshot(id))
    disk.fail("read", 0)
    with pytest.raises(StoreFailed, match=r"snapshot-0000000002\.manifest"):
        next(manifest.newest(disk))


# --- the simulated disk


def test_synced_bytes_survive_and_unsynced_ones_may_not() -> None:
    disk = PowerCutDisk()
    out = disk.create("a")
    out.write(0, np.full(PAGE, 1, np.uint8))
    out.sync()
    disk.sync_directory()
    out.write(0, np.full(2 * PAGE, 2, np.uint8))
    found = {disk.after_cut(Random(seed)).content("a") for seed in range(400)}
    assert {content[:PAGE] for content in found} >= {bytes([1]) * PAGE, bytes([2]) * PAGE}
    assert any(len(set(content[:PAGE])) == 2 for content in found)  # written in part
    assert {len(content) for content in found} >= {PAGE, 2 * PAGE}
    assert all(set(content[:PAGE]) <= {1, 2} and set(content[PAGE:]) <= {0, 2} for content in found)
    out.sync()
    assert {disk.after_cut(Random(seed)).content("a") for seed in range(50)} == {bytes([2]) * 2 * PAGE}


def test_names_survive_once_the_directory_is_synced() -> None:
    disk = PowerCutDisk({"old": b"0"})
    out = disk.create("_new")
    out.write(0, np.ones(1, np.uint8))
    out.sync()
    disk.rename("_new", "new")
    disk.remove("old")
    after = {tuple(disk.after_cut(Random(seed)).names()) for seed in range(200)}
    assert after >= {("old",), (), ("_new",), ("new", "old"), ("new",), ("_new", "old")}
    disk.sync_directory()
    assert {tuple(disk.after_cut(Random(seed)).names()) for seed in range(50)} == {("new",)}
    assert disk.after_cut(Random(0)).content("new") == b"\1"


def test_a_failed_sync_is_not_repaired_by_the_next_one() -> None:
    disk = PowerCutDisk()
    out = disk.create("a")
    disk.sync_directory()
    out.write(0, np.ones(PAGE, np.uint8))
    disk.fail("sync", 0)
    with pytest.raises(StoreFailed, match="Input/output error"):
        out.sync()
    out.sync()
    assert any(disk.after_cut(Random(seed)).content("a") != b"\1" * PAGE for seed in range(50))


def test_every_operation_fails_after_a_power_cut() -> None:
    disk = PowerCutDisk({"a": b"0"})
    source = disk.open("a")
    disk.fail_at(0)
    with pytest.raises(PowerCut):
        disk.remove("a")
    for call in (disk.names, disk.sync_directory, disk.lock, lambda: source.read(0, 1), lambda: disk.open("a")):
        with pytest.raises(PowerCut):
            call()
    assert {tuple(disk.after_cut(Random(seed)).names()) for seed in range(50)} == {("a",), ()}


def test_injected_faults_name_the_file_and_occur_once() -> None:
    disk = PowerCutDisk({"a": b"0123"})
    source = disk.open("a")
    disk.fail("read", 1)
    assert source.read(0, 4).tobytes() == b"0123"
    with pytest.raises(StoreFailed, match="disk/a") as caught:
        source.read(2, 1)
    assert (caught.value.facts["error"], caught.value.facts["offset"]) == ("EIO", "2")
    assert source.read(2, 1).tobytes() == b"2"
    with pytest.raises(Damaged, match="ends too early"):
        source.read(2, 3)
    disk.fail("create", 0, errno.EROFS)
    with pytest.raises(StoreFailed, match="Read-only"):
        disk.create("b")
    disk.remove("a")
    assert source.read(0, 1).tobytes() == b"0"
    held = disk.lock()
    with pytest.raises(StoreFailed, match="open in another"):
        disk.lock()
    held.release()
    disk.lock()
