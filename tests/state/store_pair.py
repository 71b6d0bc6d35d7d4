"""A LogStore and its model: operations, given by name, seed and size, are applied to both and compared."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from random import Random

import pyarrow as pa
import pytest

from scalein.errors import ComputeError
from scalein.kernels.store import StoreKernels
from scalein.options import Options
from scalein.state import LogStore, Snapshot, format
from scalein.state.budget import Budget
from scalein.state.compaction import Compactor
from scalein.state.evict import Evictor
from scalein.state.memtable import MemTable
from scalein.state.run_levels import RunLevels
from scalein.state.snapshot import SegmentCopier
from scalein.state.tiers import Tiers
from scalein.storage.filesystem import FileSystem
from tests.state.store_model import KINDS, Content, Kind, Model, Overflow, content_of, rows_of

Op = tuple[str, int, int]  # name, seed, size


@cache
def kernels_of(kind: str, workers: int) -> StoreKernels:
    """Kernels that many stores share, so that they are compiled once."""
    return StoreKernels(KINDS[kind].key, KINDS[kind].value, Options.make(workers=workers))


class Pair:
    """A store that must always equal its model."""

    def __init__(self, kind: Kind, files: Callable[[bool], FileSystem], budget: Budget, workers: int,
                 keep: int = 3) -> None:
        self.kind, self.files, self.budget, self.keep = kind, files, budget, keep
        self.options = Options.make(workers=workers)
        self.model = Model(kind.key, kind.value)
        self.captured: dict[int, Content] = {}  # the content at each snapshot that was started
        self.waiting: list[Snapshot] = []
        self.done: Counter[str] = Counter()
        self.gate = threading.Event()  # while clear, segments are copied by kernels only
        self.gate.set()
        self.store = self.opened()

    def opened(self, snapshot: int | None = None, readonly: bool = False) -> LogStore:
        store = LogStore.open_on(self.files(readonly), key=self.kind.key, value=self.kind.value, budget=self.budget,
                                    snapshot=snapshot, readonly=readonly, keep=self.keep, options=self.options,
                                    kernels=kernels_of(self.kind.name, self.options.workers))
        copier = store._snapshots.copier
        copy = copier.copy

        def waits(*args: object) -> object:
            self.gate.wait()
            return copy(*args)  # type: ignore[arg-type]

        copier.copy = waits  # type: ignore[method-assign,assignment]
        return store

    def do(self, op: Op) -> None:
        name, seed, size = op
        self.done[name] += 1
        getattr(self, f"op_{name}")(Random(seed), size)

    # --- operations

    def op_merge(self, random: Random, size: int) -> None:
        functions = random.choice(self.kind.merges)
        names = [name for name in functions if functions[name] != "count" or random.random() < 0.5]
        self._merge(random, self.kind.table(random, size, names), functions)

    def op_more(self, random: Random, size: int) -> None:
        """Always the same functions, so that partial records accumulate."""
        functions = self.kind.merges[0]
        self._merge(random, self.kind.table(random, size, list(functions)), functions)

    def _merge(self, random: Random, table: pa.Table, functions: dict[str, str]) -> None:
        rows = table if random.random() < 0.5 else table.combine_chunks().to_batches()[0] if table.num_rows else table
        try:
            self.model.merge(table, functions)
        except Overflow:
            assert self.kind.overflows
            self.done["overflow"] += 1
            with pytest.raises(ComputeError, match="overflow"):
                self.store.merge(rows, **functions)
        else:
            if random.random() < 0.5:
                self.store.merge(rows, **functions)
            else:
                assert list(rows_of(self.store.merge_and_get(rows, **functions))) == self.model.get(table)

    def op_upsert(self, random: Random, size: int) -> None:
        table = self.kind.table(random, size, self.kind.value.names)
        self.model.upsert(table)
        self.store.upsert(table)

    def op_delete(self, random: Random, size: int) -> None:
        keys = self.kind.key_table(random, size)
        self.model.delete(keys)
        self.store.delete(keys)

    def op_get(self, random: Random, size: int) -> None:
        keys = self.kind.key_table(random, size)
        found = self.store.get(keys)
        assert found.schema.names == self.kind.value.names
        assert list(rows_of(found)) == self.model.get(keys)

    def op_scan(self, random: Random, size: int) -> None:
        self.check(self.store, self.model.content)

    def op_len(self, random: Random, size: int) -> None:
        assert len(self.store) == len(self.model.content)

    def op_snapshot(self, random: Random, size: int) -> None:
        self.gate.set()  # a capture waits for the previous copy
        snapshot = self.store.snapshot()
        self.captured[snapshot.id] = dict(self.model.content)
        self.waiting.append(snapshot)
        if random.random() < 0.5:
            snapshot.wait()
            assert snapshot.is_done

    def op_slow_snapshot(self, random: Random, size: int) -> None:
        """A snapshot that is not copied before a later operation allows it."""
        self.wait()
        self.gate.clear()
        snapshot = self.store.snapshot()
        self.captured[snapshot.id] = dict(self.model.content)
        self.waiting.append(snapshot)

    def op_wait(self, random: Random, size: int) -> None:
        self.wait()

    def op_compact(self, random: Random, size: int) -> None:
        self.store.compact()

    def op_verify(self, random: Random, size: int) -> None:
        self.gate.set()  # close waits for the snapshot in progress
        self.store.verify()

    def op_reopen(self, random: Random, size: int) -> None:
        self.wait()
        self.store.close()
        self.store = self.opened()

    def op_look_back(self, random: Random, size: int) -> None:
        """Open the retained snapshots read-only."""
        self.wait()
        for id in format.ids(self.files(True).names(), "snapshot"):
            if id in self.captured:
                with self.opened(id, readonly=True) as old:
                    self.check(old, self.captured[id])

    def op_go_back(self, random: Random, size: int) -> None:
        """Continue from a retained snapshot."""
        self.wait()
        self.store.close()
        known = [id for id in format.ids(self.files(True).names(), "snapshot") if id in self.captured]
        id = random.choice(known) if known else None
        self.store = self.opened(id)
        if id is not None:
            self.model.content = dict(self.captured[id])
            self.captured = {k: v for k, v in self.captured.items() if k <= id}

    # --- checks

    def wait(self) -> None:
        self.gate.set()
        for snapshot in self.waiting:
            snapshot.wait(60)
        self.waiting.clear()
        self.store._snapshots._writer.submit(lambda: None).result()  # old ones have been removed

    def check(self, store: LogStore, wanted: Content) -> None:
        found = content_of(store.scan().read_all(), self.kind.key)
        assert_same(found, wanted)

    def close(self) -> None:
        self.gate.set()
        self.store.close()


def assert_same(found: Content, wanted: Content) -> None:
    if found != wanted:
        missing, extra = wanted.keys() - found.keys(), found.keys() - wanted.keys()
        other = [(key, found[key], wanted[key]) for key in found.keys() & wanted.keys() if found[key] != wanted[key]]
        raise AssertionError(f"{len(missing)} missing {list(missing)[:3]}, {len(extra)} too many {list(extra)[:3]}, "
                             f"{len(other)} others (key, found, wanted): {other[:3]}")


@contextmanager
def probes() -> Iterator[Counter[str]]:
    """Count how often the tested code paths ran."""
    seen: Counter[str] = Counter()
    with pytest.MonkeyPatch.context() as patch:

        def count(owner: type, method: str, name: str) -> None:
            original = getattr(owner, method)

            def counted(*args: object, **kwargs: object) -> object:
                seen[name] += 1
                return original(*args, **kwargs)

            patch.setattr(owner, method, counted)

        count(Evictor, "_write_run", "evicted")
        count(Compactor, "_merge", "compacted in background")
        count(Tiers, "_load", "loaded")
        count(Tiers, "_merge_older", "read from disk")
        count(RunLevels, "compact", "merged runs")
        count(SegmentCopier, "copy_now", "undo full")
        count(SegmentCopier, "_merge_logs", "undone")
        count(MemTable, "_grow", "index grew")
        add_chunk = MemTable._allocate_chunk

        def added(self: MemTable, group: int, kind: int, need: int) -> None:
            seen[("record chunk", "text chunk")[kind]] += 1
            add_chunk(self, group, kind, need)

        patch.setattr(MemTable, "_allocate_chunk", added)
        yield seen
