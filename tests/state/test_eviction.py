"""StoreKernels of the way to disk and back, held against numpy and plain Python."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from scalein.kernels.store import StoreKernels, new_buffer
from scalein.layout import HITS_SHIFT, MOST_HITS, TOMB, SortedRecords
from scalein.options import Options
from scalein.state import LogStore, arena
from scalein.state.arena import Arena, Buckets
from scalein.state.bloom import empty_filter, mark_bits, shift_of
from scalein.state.memtable import HotTable
from scalein.state.run_blocks import Pulled, Shape, cut, pack
from scalein.state.run_levels import least_kept, pointers_to, to_merge
from scalein.state.workspace import Room
from scalein.storage.filesystem import aligned_buffer

KEY, VALUE = pa.schema([("a", pa.int32()), ("b", pa.int64())]), pa.schema([("n", pa.int64())])
GROUPS = range(32, 48)
MOST = (1 << 64) - 1


@pytest.fixture(scope="module")
def kernels() -> StoreKernels:
    return StoreKernels(KEY, VALUE, Options.make(workers=1))


Hits = dict[tuple[int | None, int], int]


def filled(kernels: StoreKernels, rows: int) -> tuple[HotTable, Hits]:
    """A table whose keys were hit as often as the dict says."""
    rng = np.random.default_rng(rows)
    table = HotTable(kernels, Arena(1 << 20, 1 << 28), 1 << 12)
    a, b = rng.integers(0, 4, rows), (rng.random(rows) ** 3 * rows / 3).astype(np.int64)
    batch = pa.record_batch({"a": pa.array(a.astype(np.int32), mask=a == 3), "b": b, "n": np.ones(rows, np.int64)})
    kernels.upsert(table, batch, ("sum",), 1)
    hits: Hits = {}
    for key in zip(batch["a"].to_pylist(), b.tolist(), strict=True):
        hits[key] = hits.get(key, 0) + 1
    return table, hits


def rows_at(kernels: StoreKernels, pointers: np.ndarray) -> Hits:
    if not len(pointers):
        return {}
    rows = pa.Table.from_batches(kernels.rows(pointers, ["a", "b", "n"])).to_pylist()
    assert len({(row["a"], row["b"]) for row in rows}) == len(rows)
    return {(row["a"], row["b"]): row["n"] for row in rows}


@pytest.mark.parametrize("rows", [10, 5_000, 300_000])
@pytest.mark.parametrize("least", [0, 2, 9, 256])
def test_those_hit_least_leave_in_order_and_the_others_stay(kernels: StoreKernels, rows: int, least: int) -> None:
    table, hits = filled(kernels, rows)
    groups = range(256)
    before = rows_at(kernels, np.concatenate([table.pointers(group) for group in groups]))
    assert before == hits
    left = table.thin(groups, least, 0, new_buffer)
    leaving = left.in_order()
    assert left.count == len(leaving.hashes)
    assert rows_at(kernels, leaving.pointers) == {key: n for key, n in hits.items() if min(n, MOST_HITS) < least}
    assert (leaving.hashes == kernels.hash_keys(np.ascontiguousarray(leaving.pointers))).all()
    assert (np.diff(leaving.hashes.astype(object)) >= 0).all()
    staying = np.concatenate([table.pointers(group) for group in groups])
    kept = rows_at(kernels, staying)
    assert kept == {key: n for key, n in hits.items() if min(n, MOST_HITS) >= least}
    halved = kernels.gather(staying)[:, :8].copy().view(np.uint64)[:, 0] >> np.uint64(HITS_SHIFT) & np.uint64(MOST_HITS)
    assert {key: min(n, MOST_HITS) // 2 for key, n in kept.items()} == dict(zip(kept, halved.tolist(), strict=True))
    table.give_back(left.chunks)
    assert sum(map(table.record_count, groups)) == len(kept)
    # Everything is where its index says, also what comes next, perhaps to chunks that were given back.
    keys = list(hits)
    batch = pa.record_batch({"a": pa.array([a for a, _ in keys], pa.int32()), "b": [b for _, b in keys],
                             "n": np.ones(len(keys), np.int64)})  # fmt: skip
    kernels.upsert(table, batch, ("sum",), 1)
    assert rows_at(kernels, kernels.lookup(table, batch)[0]) == {key: kept.get(key, 0) + 1 for key in hits}


def test_other_groups_stay_as_they_are_and_flags_are_dropped(kernels: StoreKernels) -> None:
    table, hits = filled(kernels, 20_000)
    some = list(hits)[::7]
    dead = pa.record_batch({"a": pa.array([a for a, _ in some], pa.int32()), "b": [b for _, b in some]})
    for group in range(256):
        table.set_flags(group, 2)  # so that what is deleted leaves a trace
    kernels.delete(table, dead, 1)
    mine = rows_at(kernels, np.concatenate([table.pointers(group) for group in GROUPS]))
    others = [table.pointers(group) for group in range(256) if group not in GROUPS]
    left = table.thin(GROUPS, 256, TOMB, new_buffer)
    gone = rows_at(kernels, left.in_order().pointers)
    assert left.count == len(gone)
    assert 0 < len(gone) < len(mine)
    assert set(gone) == set(mine) - set(some)
    assert all((mine == now).all() for mine, now in zip(
        others, [table.pointers(group) for group in range(256) if group not in GROUPS], strict=True))  # fmt: skip


def test_kernels_take_chunks_by_themselves(kernels: StoreKernels) -> None:
    table, hits = filled(kernels, 300_000)
    assert rows_at(kernels, np.concatenate([table.pointers(group) for group in range(256)])) == hits
    used = table.chunks.rows[: table.chunks.count]
    used = used[used[:, 0] >= 0]
    assert len(np.unique(used[:, 2])) == len(used)  # nobody has a chunk of another
    assert any(pool.left for pool in table._pools)
    waiting = {int(chunk) - table.arena.base for pool in table._pools for chunk in pool.chunks[: pool.left]}
    assert not waiting & set(used[:, 2].tolist())
    assert table.arena.in_use == used[:, 3].sum() + len(waiting) * (1 << 12)


@pytest.mark.parametrize("sizes", [[0], [5], [3, 0], [0, 4, 1], [100, 1, 50, 7, 900, 3, 3, 2, 8]])
def test_lists_are_merged_with_their_ages_in_order(kernels: StoreKernels, sizes: list[int]) -> None:
    rng = np.random.default_rng(sum(sizes))
    lists = [SortedRecords(np.sort(rng.integers(0, 40, size, np.uint64) * np.uint64(0x0666666666666666)),
                    rng.integers(0, 1 << 60, size, np.uint64)) for size in sizes]  # fmt: skip
    room = Room()
    hashes = np.concatenate([one.hashes for one in lists])
    order = np.argsort(hashes, kind="stable")
    for _ in range(2):  # the second time in memory that has room for all
        room.begin()
        merged = kernels.merge_sorted(lists, room.words)
        assert (merged.hashes == hashes[order]).all()
        assert (merged.pointers == np.concatenate([one.pointers for one in lists])[order]).all()


@pytest.mark.parametrize("count", [1, 127, 128, 1000])
def test_blocks_are_packed_and_opened_as_numpy_does(kernels: StoreKernels, count: int) -> None:
    table, _ = filled(kernels, 20_000)
    records = kernels.gather(np.concatenate([table.pointers(group) for group in range(256)])[:count])
    shape = Shape(kernels.record_bytes)
    per_block, size = shape.whole_block
    plain = Pulled(records, np.zeros(0, np.uint8), np.zeros(len(records), np.int64))
    wanted = pack(shape, plain, cut(shape, plain.text_ends), 7, 8192, kernels.checksums)
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
def test_a_block_that_claims_too_much_is_not_opened(kernels: StoreKernels, claims: tuple[int, int]) -> None:
    per_block, size = Shape(kernels.record_bytes).whole_block
    area = aligned_buffer(size)
    area[:] = 0
    area[:8].view("<u4")[:] = claims
    area[8:16].view("<u8")[:] = kernels.checksums(area.reshape(1, -1), np.array([7 ^ 4096], np.uint64))
    assert kernels.read_blocks(area, np.array([[1, 7, 4096]]), per_block, size, 0, MOST) == [None]


def test_blocks_of_several_runs_are_opened_at_once(kernels: StoreKernels) -> None:
    table, _ = filled(kernels, 20_000)
    left = table.thin(range(256), 256, 0, new_buffer).in_order()
    per_block, size = Shape(kernels.record_bytes).whole_block
    cuts = [left.pointers[:1], left.pointers[1:1000], left.pointers[1000:1000], left.pointers[1000:]]
    blocks = [-(-len(some) // per_block) for some in cuts]
    area = aligned_buffer(sum(blocks) * size)
    pieces = np.array([[count, k + 1, 4096 * (k + 1)] for k, count in enumerate(blocks)])
    at = 0
    for some, (count, id, offset) in zip(cuts, pieces.tolist(), strict=True):
        if count:
            kernels.pack(area[at : at + count * size], kernels.gather(np.ascontiguousarray(some)), per_block, size, id,
                         offset)
        at += count * size
    least, greatest = (int(left.hashes[k]) for k in (500, len(left.hashes) - 7))
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


def test_filters_are_the_same_bits(kernels: StoreKernels) -> None:
    hashes = np.random.default_rng(3).integers(0, 1 << 63, 5_000, np.uint64) * np.uint64(2)
    mine, theirs = empty_filter(5_000), empty_filter(5_000)
    kernels.set_filter_bits(mine, hashes, shift_of(mine))
    mark_bits(theirs, hashes, shift_of(theirs))
    assert mine.any()
    assert mine.tobytes() == theirs.tobytes()


def test_index_memory_is_zero_whenever_it_is_taken() -> None:
    buckets = Buckets(1 << 24)
    rng = np.random.default_rng(2)
    taken: list[tuple[int, int]] = []
    for _ in range(2_000):
        if taken and rng.random() < 0.5:
            buckets.give_back(*taken.pop(int(rng.integers(len(taken)))))
            continue
        size = 1 << int(rng.integers(9, 15))
        place = buckets.take(size)
        area = buckets.memory[place - buckets.base :][:size]
        assert not area.any()
        area[:] = 255
        taken.append((place, size))
        assert buckets.in_use == sum(size for _, size in taken) <= buckets.touched
    spans = sorted((place, place + size) for place, size in taken)
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))


def test_room_is_used_again_and_grows_to_what_is_needed() -> None:
    room = Room()
    for step in range(3):
        room.begin()
        pieces = [room.words(1_000), room.bytes(10_000), room.words(5 + step)]
        for k, piece in enumerate(pieces):
            assert piece.ctypes.data % 4096 == 0
            piece[:] = k
        assert [int(piece[0]) for piece in pieces] == [int(piece[-1]) for piece in pieces] == [0, 1, 2]


def test_who_stays_in_memory() -> None:
    hits = np.array([1] * 50 + [2] * 20 + [10] * 20 + [255] * 10)
    assert least_kept(hits, 0.0) == 256
    assert least_kept(hits, 0.1) == 11
    assert least_kept(hits, 0.4) == 3
    assert least_kept(hits, 1.0) == 2
    assert least_kept(np.full(5, 255), 0.5) == 256


def test_which_runs_are_merged() -> None:
    assert to_merge([]) == 0
    assert to_merge([100, 50]) == 2
    assert to_merge([100, 50, 50]) == 0
    assert to_merge([1000] + [10] * 7) == 8
    assert to_merge([1000] + [10] * 8) == 1
    assert to_merge([1000, 80] + [10] * 8) == 2
    assert to_merge([1000] + [80] * 8) == 1


def test_free_chunks_become_larger_ones_and_go_back_to_the_system() -> None:
    arena = Arena(1 << 16, 1 << 26, whole=1 << 14)
    rng = np.random.default_rng(5)
    taken: dict[int, int] = {}
    most = 0
    for step in range(4_000):
        if step % 500 == 499:
            arena.trim(int(rng.integers(1, 1 << 18)), int(rng.integers(-1, 1 << 17)))
        if taken and rng.random() < (0.45 if step < 2_000 else 0.55):
            offset = list(taken)[int(rng.integers(len(taken)))]
            arena.give_back(offset, taken.pop(offset))
        else:
            size = 1 << int(rng.integers(12, 15))
            offset = arena.take(size)
            assert offset % size == 0
            taken[offset] = size
            arena.memory[offset : offset + size] = 1
        most = max(most, arena.in_use)
        assert arena.in_use == sum(taken.values()) <= arena.touched
    spans = sorted((offset, offset + size) for offset, size in taken.items())
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))
    for offset, size in taken.items():
        arena.give_back(offset, size)
    before = arena.segments
    for _ in range(most >> 15):  # half of what was once in use, all of it as larger chunks
        arena.take(1 << 14)
    assert arena.segments == before


def test_taking_and_giving_back_leaves_no_trace() -> None:
    arena = Arena(1 << 16, 1 << 26, whole=1 << 14)
    for _ in range(2_000):
        arena.give_back(arena.take(1 << 12), 1 << 12)
    assert sum(len(free._heap) for free in arena._free.values()) < 500


def test_memory_that_records_left_is_used_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages that go back to the system are cleared when they come again: a store in its stride gives none back."""
    forgotten: list[int] = []
    real = arena.forget
    monkeypatch.setattr(arena, "forget", lambda place, size: (forgotten.append(size), real(place, size))[1])
    random, rows = np.random.default_rng(0), 60_000
    with LogStore.open(tmp_path, key={"k": pa.int64()}, value={"n": pa.int64()}, memory=32 << 20) as store:
        for step in range(60):
            if step == 30:
                forgotten.clear()
            store.merge(pa.table({"k": random.integers(0, 1 << 40, rows), "n": np.ones(rows, np.int64)}), n="sum")
            store._tiers.settle()  # a thread that is late gives its chunks back late
        assert any(store._tiers.cold.runs)
        assert sum(forgotten) < 30 * rows * store._kernels.record_bytes // 4
