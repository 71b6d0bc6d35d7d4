"""A store on a disk that loses power, fills up or fails, at every operation in turn."""

from __future__ import annotations

import errno
import os
import warnings
from contextlib import suppress
from random import Random

import pytest

from scalein.errors import ScaleinError
from scalein.state import format
from scalein.state.budget import Budget
from tests.state.power_cut_disk import PowerCut, PowerCutDisk
from tests.state.store_model import KINDS
from tests.state.store_pair import Op, Pair

TINY = Budget(300_000, 1 << 14, 1 << 12)
CUTS = int(os.environ.get("SCALEIN_STORE_CUTS", "6"))  # operations of a workload at which the disk fails; 0: all
OPS: list[Op] = [
    ("more", 1, 40), ("snapshot", 2, 0), ("more", 3, 300), ("more", 4, 300), ("snapshot", 5, 0), ("delete", 6, 300),
    ("merge", 7, 40), ("more", 8, 300), ("snapshot", 9, 0), ("wait", 0, 0), ("compact", 0, 0), ("upsert", 10, 40),
    ("snapshot", 11, 0), ("reopen", 0, 0), ("more", 12, 300), ("more", 13, 300), ("snapshot", 14, 0), ("wait", 0, 0),
    ("more", 15, 40), ("snapshot", 16, 0), ("snapshot", 17, 0), ("reopen", 0, 0),
]  # fmt: skip


class Workload:
    """Operations on a disk until it fails, and the snapshots that were acknowledged by then."""

    def __init__(self, kind: str, disk: PowerCutDisk, ops: list[Op] = OPS) -> None:
        self.disk = disk
        self.pair: Pair | None = None
        self.error: BaseException | None = None
        self.acknowledged: set[int] = set()
        self.open_ids: set[int] = set()  # of snapshots that open and close took
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            try:
                self.pair = Pair(KINDS[kind], lambda readonly: disk, TINY, 1, keep=2)
                for op in ops:
                    if op[0] == "reopen":
                        self.reopen()
                    else:
                        self.pair.do(op)
                    self.note()
            except (PowerCut, ScaleinError) as error:
                self.error = error
            if self.pair is not None:
                for snapshot in self.pair.waiting:
                    snapshot._capture.done.wait(20)
                self.note()
                with suppress(PowerCut, ScaleinError):
                    self.pair.store._release()

    def note(self) -> None:
        assert self.pair is not None
        self.acknowledged |= {s.id for s in self.pair.waiting if s.is_done and s._capture.error is None}

    def reopen(self) -> None:
        """Close and open the store; the last snapshot is taken here, so that its id is known."""
        assert self.pair is not None
        self.pair.op_snapshot(Random(1), 0)
        for snapshot in self.pair.waiting:
            snapshot.wait(20)
            self.acknowledged.add(snapshot.id)
        self.pair.waiting.clear()
        self.pair.store.close()
        self.pair.store = self.pair.opened()

    def check(self, disk: PowerCutDisk, kind: str) -> None:
        """The store on the disk is an acknowledged snapshot or a later one, and can be continued."""
        pair = Pair(KINDS[kind], lambda readonly: disk, TINY, 1, keep=2)
        try:
            names = format.ids(disk.names(), "snapshot")
            captured = {} if self.pair is None else self.pair.captured
            newest = max((id for id in names if id in captured), default=None)
            last = max(self.acknowledged, default=None)
            if last is not None:
                assert (newest or 0) >= last, f"{names}, though {last} was acknowledged"
            pair.model.content = dict(captured[newest]) if newest is not None else {}
            pair.op_scan(Random(0), 0)
            pair.store.verify()
            pair.op_more(Random(1), 40)
            pair.op_merge(Random(2), 40)
            pair.op_reopen(Random(0), 0)
            pair.op_scan(Random(0), 0)
        finally:
            pair.close()


def sample(count: int, random: Random, most: int = CUTS) -> list[int]:
    """Numbers below `count`, in order."""
    return list(range(count)) if not most or most >= count else sorted(random.sample(range(count), most))


@pytest.mark.parametrize("kind", ["int", "text"])
def test_a_power_cut_at_every_operation(kind: str) -> None:
    healthy = PowerCutDisk()
    run = Workload(kind, healthy)
    assert run.error is None, run.error
    assert sum("run-" in line for line in healthy.log) > 10, "nothing was evicted"
    seed = Random(1)
    for cut in sample(healthy.operations, seed):
        disk = PowerCutDisk()
        disk.fail_at(cut)
        run = Workload(kind, disk)
        for _ in range(2):
            number = seed.randrange(1 << 30)
            try:
                run.check(disk.after_cut(Random(number)), kind)
            except BaseException as error:
                error.add_note(f"cut at {cut}, after it {number}: {disk.log[-5:]}")
                raise


@pytest.mark.parametrize("kind", ["create", "write", "sync", "rename", "remove", "sync_directory", "read"])
@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_each_failing_call_names_the_file_and_loses_nothing(kind: str, number: int) -> None:
    """Each call in turn fails once: the error names the file, and nothing that was acknowledged is lost."""
    healthy = PowerCutDisk()
    Workload("int", healthy)
    calls = healthy._calls.get(kind, 0)
    assert calls > 10 or kind in ("rename", "remove")
    for call in sample(calls, Random(number), CUTS // 3):
        disk = PowerCutDisk()
        disk.fail(kind, call, number)
        run = Workload("int", disk)
        if run.error is not None:
            assert isinstance(run.error, ScaleinError), run.error
            assert "disk/" in str(run.error), run.error
        disk._faults.clear()
        try:
            run.check(disk.after_cut(Random(call)), "int")
            run.check(disk, "int")
        except BaseException as error:
            error.add_note(f"{kind} number {call} failed: {run.error!r}")
            raise


def test_a_full_disk_loses_nothing() -> None:
    healthy = PowerCutDisk()
    Workload("text", healthy)
    # The number of bytes written depends on the time of compactions: another workload may write less.
    for free_bytes in sample(healthy.written_bytes // 2, Random(3), CUTS // 2 or 100):
        disk = PowerCutDisk()
        disk.full_after(free_bytes)
        run = Workload("text", disk)
        assert "disk/" in str(run.error)
        disk.full_after(None)
        run.check(disk, "text")


def test_files_of_a_manifest_that_failed_after_its_rename_are_retained() -> None:
    """The snapshot was never acknowledged, but the next start may find it: its files must exist."""
    disk = PowerCutDisk()
    pair = Pair(KINDS["int"], lambda readonly: disk, TINY, 1)
    for seed in range(6):
        pair.op_more(Random(seed), 300)
    pair.op_snapshot(Random(1), 0)
    pair.wait()
    for seed in range(6):
        pair.op_more(Random(seed), 300)
    disk.fail("sync_directory", 1)
    failed = pair.store.snapshot()
    content = dict(pair.model.content)
    with pytest.raises(ScaleinError):
        failed.wait(20)
    assert format.manifest_name(failed.id) in disk.names(), "the fault came too early"
    for seed in range(6):
        pair.op_more(Random(seed), 300)
    pair.store.compact()
    pair.store._release()  # the process ends without another snapshot
    pair.store = pair.opened()
    pair.model.content = content
    pair.op_scan(Random(0), 0)
    pair.close()


def test_a_run_that_failed_before_the_capture_fails_the_snapshot() -> None:
    """Its records are in no image, so the manifest would name a file that does not exist."""
    disk = PowerCutDisk()
    pair = Pair(KINDS["int"], lambda readonly: disk, TINY, 1)
    pair.op_more(Random(1), 300)
    pair.op_snapshot(Random(1), 0)
    pair.wait()
    pair.op_more(Random(2), 300)
    content, last = dict(pair.model.content), pair.store.stats()["snapshots"]
    store, tiers = pair.store, pair.store._tiers
    tiers.finish_evictions()
    tiers.compactor.wait()
    disk.fail("sync", 0)
    tiers._evict(3, 0.0)
    with pytest.raises(ScaleinError, match="disk/run-"):
        tiers.evictor.evictions[-1].run.written.result()
    finish = tiers.finish_evictions  # the failure is noticed only after it
    tiers.finish_evictions = lambda most=0: None  # type: ignore[assignment,method-assign,misc]
    with pytest.raises(ScaleinError, match="disk/run-"):
        store.snapshot().wait(20)
    tiers.finish_evictions = finish  # type: ignore[method-assign]
    assert store.stats()["snapshots"] == last
    with pytest.raises(ScaleinError, match="disk/run-"):
        tiers.finish_evictions()
    assert pair.model.content == content
    pair.op_scan(Random(0), 0)
    pair.op_reopen(Random(0), 0)
    pair.op_scan(Random(0), 0)
    pair.close()
