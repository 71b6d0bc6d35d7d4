"""Eviction: the kernels, compared with numpy and plain Python; memory allocation; decisions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from scalein.kernels.store import StoreKernels, new_buffer
from scalein.layout import ACCESSES_SHIFT, MAX_ACCESSES, TOMB, SortedRecords
from scalein.options import Options
from scalein.state import LogStore, arena
from scalein.state.arena import Arena, BucketAllocator, Workspace
from scalein.state.bloom import empty_filter, filter_shift, set_bits
from scalein.state.budget import Budget
from scalein.state.compaction import first_to_compact
from scalein.state.evict import Evictor, RecordSource, eviction_threshold
from scalein.state.memtable import MemTable
from scalein.state.run_blocks import DetachedRecords, RecordShape, pack, plan_blocks
from scalein.state.run_levels import pointers_to
from scalein.storage.filesystem import aligned_buffer

KEY, VALUE = pa.schema([("a", pa.int32()), ("b", pa.int64())]), pa.schema([("n", pa.int64())])
GROUPS = range(32, 48)
MOST = (1 << 64) - 1


@pytest.fixture(scope="module")
def kernels() -> StoreKernels:
    return StoreKernels(KEY, VALUE, Options.make(workers=1))


Accesses = dict[tuple[int | None, int], int]


def filled(kernels: StoreKernels, rows: int) -> tuple[MemTable, Accesses]:
    """A table, and the number of accesses of each key."""
    rng = np.random.default_rng(rows)
    table = MemTable(kernels, Arena(1 << 20, 1 << 28), 1 << 12)
    a, b = rng.integers(0, 4, rows), (rng.random(rows) ** 3 * rows / 3).astype(np.int64)
    batch = pa.record_batch({"a": pa.array(a.astype(np.int32), mask=a == 3), "b": b, "n": np.ones(rows, np.int64)})
    kernels.upsert(table, batch, ("sum",), 1)
    accesses: Accesses = {}
    for key in zip(batch["a"].to_pylist(), b.tolist(), strict=True):
        accesses[key] = accesses.get(key, 0) + 1
    return table, accesses


def rows_at(kernels: StoreKernels, pointers: np.ndarray) -> Accesses:
    if not len(pointers):
        return {}
    rows = pa.Table.from_batches(kernels.rows(pointers, ["a", "b", "n"])).to_pylist()
    assert len({(row["a"], row["b"]) for row in rows}) == len(rows)
    return {(row["a"], row["b"]): row["n"] for row in rows}


@pytest.mark.parametrize("rows", [10, 5_000, 300_000])
@pytest.mark.parametrize("least", [0, 2, 9, 256])
def test_the_least_accessed_records_are_evicted_in_order(kernels: StoreKernels, rows: int, least: int) -> None:
    table, accesses = filled(kernels, rows)
    groups = range(256)
    before = rows_at(kernels, np.concatenate([table.pointers(group) for group in groups]))
    assert before == accesses
    eviction = table.evict(groups, least, 0, new_buffer)
    evicted = eviction.in_order()
    assert eviction.count == len(evicted.hashes)
    assert rows_at(kernels, evicted.pointers) == {key: n for key, n in accesses.items() if min(n, MAX_ACCESSES) < least}
    assert (evicted.hashes == kernels.hash_keys(np.ascontiguousarray(evicted.pointers))).all()
    assert (np.diff(evicted.hashes.astype(object)) >= 0).all()
    retained = np.concatenate([table.pointers(group) for group in groups])
    remaining = rows_at(kernels, retained)
    assert remaining == {key: n for key, n in accesses.items() if min(n, MAX_ACCESSES) >= least}
    heads = kernels.gather(retained)[:, :8].copy().view(np.uint64)[:, 0]
    halved = heads >> np.uint64(ACCESSES_SHIFT) & np.uint64(MAX_ACCESSES)
    wanted = {key: min(n, MAX_ACCESSES) // 2 for key, n in remaining.items()}
    assert wanted == dict(zip(remaining, halved.tolist(), strict=True))
    table.free(eviction.chunks)
    assert sum(map(table.record_count, groups)) == len(remaining)
    # All records are found by the index, also new ones, which may be in chunks that were freed.
    keys = list(accesses)
    batch = pa.record_batch({"a": pa.array([a for a, _ in keys], pa.int32()), "b": [b for _, b in keys],
                             "n": np.ones(len(keys), np.int64)})  # fmt: skip
    kernels.upsert(table, batch, ("sum",), 1)
    assert rows_at(kernels, kernels.lookup(table, batch)[0]) == {key: remaining.get(key, 0) + 1 for key in accesses}


def test_an_eviction_changes_no_other_group_and_drops_flagged_records(kernels: StoreKernels) -> None:
    table, accesses = filled(kernels, 20_000)
    some = list(accesses)[::7]
    dead = pa.record_batch({"a": pa.array([a for a, _ in some], pa.int32()), "b": [b for _, b in some]})
    for group in range(256):
        table.set_flags(group, 2)  # PARTIAL: a deletion leaves a tombstone
    kernels.delete(table, dead, 1)
    mine = rows_at(kernels, np.concatenate([table.pointers(group) for group in GROUPS]))
    others = [table.pointers(group) for group in range(256) if group not in GROUPS]
    eviction = table.evict(GROUPS, 256, TOMB, new_buffer)
    gone = rows_at(kernels, eviction.in_order().pointers)
    assert eviction.count == len(gone)
    assert 0 < len(gone) < len(mine)
    assert set(gone) == set(mine) - set(some)
    assert all((mine == now).all() for mine, now in zip(
        others, [table.pointers(group) for group in range(256) if group not in GROUPS], strict=True))  # fmt: skip


def test_kernels_use_chunks_of_the_pool(kernels: StoreKernels) -> None:
    table, accesses = filled(kernels, 300_000)
    assert rows_at(kernels, np.concatenate([table.pointers(group) for group in range(256)])) == accesses
    used = table.chunks.rows[: table.chunks.count]
    used = used[used[:, 0] >= 0]
    assert len(np.unique(used[:, 2])) == len(used)  # no chunk has two owners
    assert any(pool.left for pool in table._pools)
    waiting = {int(chunk) - table.arena.base for pool in table._pools for chunk in pool.chunks[: pool.left]}
    assert not waiting & set(used[:, 2].tolist())
    assert table.arena.in_use == used[:, 3].sum() + len(waiting) * (1 << 12)


@pytest.mark.parametrize("sizes", [[0], [5], [3, 0], [0, 4, 1], [100, 1, 50, 7, 900, 3, 3, 2, 8]])
def test_sorted_lists_are_merged_in_the_order_of_age(kernels: StoreKernels, sizes: list[int]) -> None:
    rng = np.random.default_rng(sum(sizes))
    lists = [SortedRecords(np.sort(rng.integers(0, 40, size, np.uint64) * np.uint64(0x0666666666666666)),
                    rng.integers(0, 1 << 60, size, np.uint64)) for size in sizes]  # fmt: skip
    workspace = Workspace()
    hashes = np.concatenate([one.hashes for one in lists])
    order = np.argsort(hashes, kind="stable")
    for _ in range(2):  # the second time the workspace is large enough
        workspace.reset()
        merged = kernels.merge_sorted(lists, workspace.word_buffer)
        assert (merged.hashes == hashes[order]).all()
        assert (merged.pointers == np.concatenate([one.pointers for one in lists])[order]).all()


@pytest.mark.parametrize("count", [1, 127, 128, 1000])
def test_the_block_kernels_equal_numpy(kernels: StoreKernels, count: int) -> None:
    table, _ = filled(kernels, 20_000)
    records = kernels.gather(np.concatenate([table.pointers(group) for group in range(256)])[:count])
    shape = RecordShape(kernels.record_bytes)
    per_block, size = shape.full_block
    plain = DetachedRecords(records, np.zeros(0, np.uint8), np.zeros(len(records), np.int64))
    wanted = pack(shape, plain, plan_blocks(shape, plain.text_ends), 7, 8192, kernels.checksums)
    area = aligned_buffer(len(wanted))
    kernels.pack(area, records, per_block, size, 7, 8192)
    assert area.tobytes() == wanted.tobytes()
    pieces = np.array([[len(area) // size, 7, 8192]])
    [found] = kernels.read_blocks(area, pieces, per_block, size, 0, MOST)
    assert found is not None
    assert kernels.gather(found.pointers).tobytes() == records.tobytes()
    assert (found.hashes == kernels.hash_keys(pointers_to(records))).all()
    assert area.tobytes() == wanted.tobytes()
    assert kernels.read_blocks(area, pieces - [0, 0, 4096], per_block, size, 0, MOST) == [None]
    rng = np.random.default_rng(count)
    for at in (0, 4, 8, len(area) - 1, *rng.integers(0, len(area), 20).tolist()):
        area[at] ^= 1 << int(rng.integers(8))
        assert kernels.read_blocks(area, pieces, per_block, size, 0, MOST) == [None]
        area[:] = wanted


@pytest.mark.parametrize("claims", [(0, 0), (200, 0), (1 << 31, 0), (5, 1)])
def test_a_block_that_claims_too_many_records_is_refused(kernels: StoreKernels, claims: tuple[int, int]) -> None:
    per_block, size = RecordShape(kernels.record_bytes).full_block
    area = aligned_buffer(size)
    area[:] = 0
    area[:8].view("<u4")[:] = claims
    area[8:16].view("<u8")[:] = kernels.checksums(area.reshape(1, -1), np.array([7 ^ 4096], np.uint64))
    assert kernels.read_blocks(area, np.array([[1, 7, 4096]]), per_block, size, 0, MOST) == [None]


def test_blocks_of_several_runs_are_read_at_once(kernels: StoreKernels) -> None:
    table, _ = filled(kernels, 20_000)
    eviction = table.evict(range(256), 256, 0, new_buffer).in_order()
    per_block, size = RecordShape(kernels.record_bytes).full_block
    cuts = [eviction.pointers[:1], eviction.pointers[1:1000], eviction.pointers[1000:1000], eviction.pointers[1000:]]
    blocks = [-(-len(some) // per_block) for some in cuts]
    area = aligned_buffer(sum(blocks) * size)
    pieces = np.array([[count, k + 1, 4096 * (k + 1)] for k, count in enumerate(blocks)])
    at = 0
    for some, (count, id, offset) in zip(cuts, pieces.tolist(), strict=True):
        if count:
            kernels.pack(area[at : at + count * size], kernels.gather(np.ascontiguousarray(some)), per_block, size, id,
                         offset)
        at += count * size
    least, greatest = (int(eviction.hashes[k]) for k in (500, len(eviction.hashes) - 7))
    found = kernels.read_blocks(area, pieces, per_block, size, least, greatest)
    for some, one in zip(cuts, found, strict=True):
        assert one is not None
        hashes = kernels.hash_keys(np.ascontiguousarray(some))
        inside = (hashes >= np.uint64(least)) & (hashes <= np.uint64(greatest))
        assert (one.hashes == hashes[inside]).all()
        assert kernels.gather(one.pointers).tobytes() == kernels.gather(some[inside]).tobytes()
    area[blocks[0] * size + 100] ^= 1  # of the second
    assert [one is None for one in kernels.read_blocks(area, pieces, per_block, size, 0, MOST)] == [
        False, True, False, False]  # fmt: skip


def test_the_filter_kernel_equals_numpy(kernels: StoreKernels) -> None:
    hashes = np.random.default_rng(3).integers(0, 1 << 63, 5_000, np.uint64) * np.uint64(2)
    mine, theirs = empty_filter(5_000), empty_filter(5_000)
    kernels.set_filter_bits(mine, hashes, filter_shift(mine))
    set_bits(theirs, hashes, filter_shift(theirs))
    assert mine.any()
    assert mine.tobytes() == theirs.tobytes()


def test_allocated_index_memory_is_zero() -> None:
    buckets = BucketAllocator(1 << 24)
    rng = np.random.default_rng(2)
    taken: list[tuple[int, int]] = []
    for _ in range(2_000):
        if taken and rng.random() < 0.5:
            buckets.free(*taken.pop(int(rng.integers(len(taken)))))
            continue
        size = 1 << int(rng.integers(9, 15))
        place = buckets.allocate(size)
        area = buckets.memory[place - buckets.base :][:size]
        assert not area.any()
        area[:] = 255
        taken.append((place, size))
        assert buckets.in_use == sum(size for _, size in taken) <= buckets.committed_bytes
    spans = sorted((place, place + size) for place, size in taken)
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))


def test_a_workspace_is_reused_and_grows() -> None:
    workspace = Workspace()
    for step in range(3):
        workspace.reset()
        buffers = [workspace.word_buffer(1_000), workspace.byte_buffer(10_000), workspace.word_buffer(5 + step)]
        for k, buffer in enumerate(buffers):
            assert buffer.ctypes.data % 4096 == 0
            buffer[:] = k
        assert [int(buffer[0]) for buffer in buffers] == [int(buffer[-1]) for buffer in buffers] == [0, 1, 2]


def test_the_eviction_threshold() -> None:
    accesses = np.array([1] * 50 + [2] * 20 + [10] * 20 + [255] * 10)
    assert eviction_threshold(accesses, 0.0) == 256
    assert eviction_threshold(accesses, 0.1) == 11
    assert eviction_threshold(accesses, 0.4) == 3
    assert eviction_threshold(accesses, 1.0) == 2
    assert eviction_threshold(np.full(5, 255), 0.5) == 256


def test_the_choice_of_runs_to_compact() -> None:
    assert first_to_compact([]) == 0
    assert first_to_compact([100, 50]) == 2
    assert first_to_compact([100, 50, 50]) == 0
    assert first_to_compact([1000] + [10] * 7) == 8
    assert first_to_compact([1000] + [10] * 8) == 1
    assert first_to_compact([1000, 80] + [10] * 8) == 2
    assert first_to_compact([1000] + [80] * 8) == 1


def test_free_chunks_coalesce_and_return_to_the_system() -> None:
    arena = Arena(1 << 16, 1 << 26, coalesced=1 << 14)
    rng = np.random.default_rng(5)
    taken: dict[int, int] = {}
    most = 0
    for step in range(4_000):
        if step % 500 == 499:
            arena.trim(int(rng.integers(1, 1 << 18)), int(rng.integers(-1, 1 << 17)))
        if taken and rng.random() < (0.45 if step < 2_000 else 0.55):
            offset = list(taken)[int(rng.integers(len(taken)))]
            arena.free(offset, taken.pop(offset))
        else:
            size = 1 << int(rng.integers(12, 15))
            offset = arena.allocate(size)
            assert offset % size == 0
            taken[offset] = size
            arena.memory[offset : offset + size] = 1
        most = max(most, arena.in_use)
        assert arena.in_use == sum(taken.values()) <= arena.committed_bytes
    spans = sorted((offset, offset + size) for offset, size in taken.items())
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))
    for offset, size in taken.items():
        arena.free(offset, size)
    before = arena.segments
    for _ in range(most >> 15):  # half of what was once in use, all of it as larger chunks
        arena.allocate(1 << 14)
    assert arena.segments == before


def test_free_lists_stay_small() -> None:
    arena = Arena(1 << 16, 1 << 26, coalesced=1 << 14)
    for _ in range(2_000):
        arena.free(arena.allocate(1 << 12), 1 << 12)
    assert sum(len(free._heap) for free in arena._free.values()) < 500


def test_memory_of_evicted_records_is_reused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages that go back to the system are zeroed when they come again: a store in a steady state returns none."""
    returned: list[int] = []
    real = arena.forget
    monkeypatch.setattr(arena, "forget", lambda start, size: (returned.append(size), real(start, size))[1])
    random, rows = np.random.default_rng(0), 60_000
    with LogStore.open(tmp_path, key={"k": pa.int64()}, value={"n": pa.int64()}, memory=32 << 20) as store:
        for step in range(60):
            if step == 30:
                returned.clear()
            store.merge(pa.table({"k": random.integers(0, 1 << 40, rows), "n": np.ones(rows, np.int64)}), n="sum")
            store._tiers.finish_evictions()  # a late thread would free its chunks late
        assert any(store._tiers.levels.runs)
        assert sum(returned) < 30 * rows * store._kernels.record_bytes // 4


def test_records_with_text_are_copied_a_few_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An eviction takes little memory beside the budget; records with text have less of it, as their copies take more.
    """
    steps: list[tuple[int, int]] = []
    start_write = Evictor._start_write

    def counted(self: Evictor, shard: int, count: int, functions: Any, records: RecordSource, chunks: Any) -> Any:
        def parts(most: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
            for part, hashes in records(most):
                steps.append((len(part), most))
                yield part, hashes

        return start_write(self, shard, count, functions, parts, chunks)

    monkeypatch.setattr(Evictor, "_start_write", counted)
    with LogStore.open(tmp_path, key={"k": pa.string()}, value={"n": pa.int64()}, memory="8MB") as store:
        for start in range(0, 400_000, 50_000):
            keys = [f"a key of some length {k}" for k in range(start, start + 50_000)]
            store.merge(pa.table({"k": keys, "n": np.ones(len(keys), np.int64)}), n="sum")
        assert steps
        assert all(rows <= most for rows, most in steps)
        assert len(store) == 400_000
    plain = Budget.of(1000)
    assert replace(plain, has_text=True).memtable_bytes < plain.memtable_bytes
