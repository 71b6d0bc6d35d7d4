"""Runs of a stream's state: files, ranges of key groups, lookups and merges, with colliding hashes."""

from __future__ import annotations

import os
import zlib
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import fs

import scalein as si
from scalein import col
from scalein.errors import NOWHERE, ComputeError, Damaged
from scalein.spark.streaming.event_time import Clock
from scalein.spark.streaming.reduce_side import ReduceInput, Reducer
from scalein.spark.streaming.stream_plan import MapSummary, StreamPlan
from scalein.state import hash_runs, merge_runs
from scalein.state.hash_runs import (
    HASH,
    Block,
    Run,
    choose_to_merge,
    hash_with_slices,
    hottest_range,
    hottest_ranges,
    join_ranges,
    migration_width,
    read_run,
    sort_by_hash,
    write_run,
)
from scalein.state.key_groups import key_group_ranges, partition_of_key_groups
from scalein.state.merge_runs import key_numbers, look_up, merge_blocks
from scalein.storage.object_store import STATE, Location, parse_location
from tests.engines import EXAMPLES, examples
from tests.spark.simulated import OPTIONS

NAN = float("nan")
NUMBERS = pa.schema([("v", pa.int64())])
COLUMNS = pa.schema([("s", pa.string()), ("f", pa.float64()), ("v", pa.int64())])
key_lists = st.lists(st.tuples(st.sampled_from([None, "a", "bb", "ccc"]), st.sampled_from([None, 0.0, -0.0, 1.5, NAN])),
                     max_size=30)  # fmt: skip


def make_location(folder: Path) -> Location:
    found = parse_location(folder, NOWHERE)
    found.create_folders(STATE)
    return found


def rows(keys: list[tuple[str | None, float | None]], value: int = 1, groups: int = 4) -> pa.RecordBatch:
    """One row for each key, sorted, with few different hashes: several keys share one."""
    hashes = np.array([_coarse_hash(key, groups) for key in keys], np.uint64)
    names = ["s", "f", "v"]
    batch = pa.RecordBatch.from_arrays([pa.array([key[0] for key in keys], pa.string()),
                                        pa.array([key[1] for key in keys], pa.float64()),
                                        pa.array([value] * len(keys), pa.int64())], names=names)  # fmt: skip
    return sort_by_hash(batch, hashes)


def _coarse_hash(key: tuple[str | None, float | None], groups: int) -> int:
    text, number = key
    same = 7 if number is None else 5 if number != number else int(number * 2)
    return ((7 if text is None else len(text)) * 100 + same) * 7919 % groups * (1 << 64) // groups


def key_of(row: dict[str, object]) -> tuple[object, ...]:
    """A key as it is compared: all NaNs are equal, and both zeros."""
    value = row["f"]
    assert value is None or isinstance(value, float)
    return row["s"], None if value is None else "nan" if value != value else value + 0.0


class AddingCombiner:
    """A Combiner that adds the values of a key."""

    names: ClassVar = ["v"]

    def combine_pairs(self, left: pa.RecordBatch, right: pa.RecordBatch) -> list[pa.Array]:
        return [pc.add(left.column("v"), right.column("v"))]

    def combine_numbered(self, batch: pa.RecordBatch, numbers: np.ndarray) -> pa.RecordBatch:
        totals = np.bincount(numbers, weights=np.asarray(batch.column("v"))).astype(np.int64)
        return pa.RecordBatch.from_arrays([pa.array(totals)], names=["v"])


@examples(24)
@given(parts=st.lists(key_lists, min_size=1, max_size=4), piece_rows=st.sampled_from([2, 7, 1000]),
       groups=st.sampled_from([1, 4, 1 << 20]))
def test_a_merge_has_every_key_once_with_all_its_values(parts: list[list[tuple[str | None, float | None]]],
                                                        piece_rows: int, groups: int) -> None:
    # Each part has a key once: unlike values of equal keys come from different parts.
    unique = [list({key_of({"s": s, "f": f}): (s, f) for s, f in part}.values()) for part in parts]
    blocks = [[rows(part, value=10**k, groups=groups)] for k, part in enumerate(unique)]
    want: defaultdict[object, int] = defaultdict(int)
    for k, part in enumerate(unique):
        for s, f in part:
            want[key_of({"s": s, "f": f})] += 10**k
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(merge_runs, "BLOCK_ROWS", piece_rows)
        found = list(merge_blocks(blocks, ["s", "f"], AddingCombiner()))
    got = [row for each in found for row in each.block.to_pylist()]
    assert {key_of(row): row["v"] for row in got} == want
    assert len(got) == len(want)
    hashes = [row[HASH] for row in got]
    assert hashes == sorted(hashes)
    # `at` is the position of each row of the first part, and `existed` says whether another part had its key.
    at = [each.block.slice(int(k), 1).to_pylist()[0] for each in found for k in each.at]
    assert [key_of(row) for row in at] == [key_of(row) for row in blocks[0][0].to_pylist()]
    existed = [bool(there) for each in found for there in each.existed]
    rest = {key_of({"s": s, "f": f}) for part in unique[1:] for s, f in part}
    assert existed == [key_of(row) in rest for row in blocks[0][0].to_pylist()]


@examples(15)
@given(parts=st.lists(key_lists, min_size=1, max_size=3))
def test_rows_that_do_not_combine_all_remain(parts: list[list[tuple[str | None, float | None]]]) -> None:
    blocks = [[rows(part, value=k)] for k, part in enumerate(parts)]
    got = [(key_of(row), row["v"]) for each in merge_blocks(blocks, ["s", "f"], None) for row in each.block.to_pylist()]
    want = [(key_of({"s": s, "f": f}), k) for k, part in enumerate(parts) for s, f in part]
    assert sorted(map(repr, got)) == sorted(map(repr, want))


@examples(15)
@given(wanted=key_lists, there=key_lists)
def test_a_lookup_finds_all_rows_of_a_key_and_no_others(wanted: list[tuple[str | None, float | None]],
                                                        there: list[tuple[str | None, float | None]]) -> None:
    wanted_rows, block = rows(wanted), rows(there)
    asked = [key_of(row) for row in wanted_rows.to_pylist()]
    got = [(int(number), key_of(row)) for found in look_up(wanted_rows, [block.slice(0, 3), block.slice(3)], ["s", "f"])
           for number, row in zip(found.numbers, found.rows.to_pylist(), strict=True)]
    want = [(number, key) for number, key in enumerate(asked) for row in block.to_pylist() if key_of(row) == key]
    assert sorted(map(repr, got)) == sorted(map(repr, want))


@examples(15)
@given(keys=key_lists)
def test_key_numbers(keys: list[tuple[str | None, float | None]]) -> None:
    batch = rows(keys)
    numbers = key_numbers(batch, ["s", "f"])
    found = {}
    for row, number in zip(batch.to_pylist(), numbers, strict=True):
        assert found.setdefault(key_of(row), number) == number
    assert sorted(found.values()) == list(range(len(found)))


def test_ranges_are_those_of_the_shuffle() -> None:
    for count in (1, 2, 3, 5, 7, 100, 255, 256):
        targets = partition_of_key_groups(count)
        assert [(int(np.flatnonzero(targets == k)[0]), int(np.flatnonzero(targets == k)[-1]) + 1)
                for k in range(count)] == key_group_ranges(count)


def test_what_migrates_with_a_batch_is_in_proportion_to_it() -> None:
    assert migration_width(64, 750, 3) == 8  # of a small state, an eighth
    assert migration_width(86, 750, 3) == 11
    assert migration_width(64, 1_500_000, 15_000) == 1  # of a large one, what a batch can bear
    assert migration_width(64, 1_500_000, 70_000) == 5


def test_ranges_of_several_runs_migrate_first_where_a_batch_has_most_rows() -> None:
    rows = np.zeros(256, np.int64)
    rows[[3, 200, 201]] = [5, 9, 9]
    runs = [Run("state/a.arrow", 0, 16, 100, 1, 1), Run("state/a.arrow", 196, 202, 100, 1, 1)]

    def ranges(found: list[Run]) -> list[tuple[int, int]]:
        return [(run.first, run.last) for run in found]

    moving, rest = hottest_ranges(runs, 8, rows)
    assert ranges(moving) == [(196, 202), (2, 4)]
    assert ranges(rest) == [(0, 2), (4, 16)]
    moving, rest = hottest_ranges(runs, 256, rows)
    assert sorted(ranges(moving)) == ranges(runs)
    assert not rest


def test_the_hottest_range_migrates_first() -> None:
    run, rows = Run("a", 64, 128, 100, 10, 1), np.zeros(256, np.int64)
    rows[3], rows[100:104] = 1000, 5
    migrated, rest = hottest_range(run, 8, rows)
    assert migrated.last - migrated.first == 8
    assert migrated.first <= 100
    assert migrated.last >= 104
    assert join_ranges([migrated, *rest]) == [run]
    assert hottest_range(run, 64, rows) == hottest_range(run, 100, rows) == (run, [])


def test_slices_of_a_key_have_its_key_group() -> None:
    hashes = np.random.default_rng(1).integers(0, 1 << 63, 1000).astype(np.uint64) * np.uint64(2)
    mixed = hash_with_slices(hashes, np.arange(1000) * 10_000 - 5_000_000)
    assert (mixed >> np.uint64(56) == hashes >> np.uint64(56)).all()
    assert len(np.unique(hash_with_slices(np.full(1000, hashes[0]), np.arange(1000)))) == 1000


def test_a_run_gives_the_rows_of_a_range(tmp_path: Path) -> None:
    hashes = np.sort(np.random.default_rng(2).integers(0, 1 << 64, 5000, np.uint64))
    batch = pa.RecordBatch.from_arrays([pa.array(hashes), pa.array(np.arange(5000))], names=[HASH, "v"])
    blocks = [batch.slice(0, 1700), batch.slice(1700, 0), batch.slice(1700)]
    run = write_run(make_location(tmp_path), blocks, (0, 256), "v")
    assert run is not None
    assert (run.rows, run.oldest, run.newest) == (5000, 0, 4999)
    assert Run.from_json(run.to_json()) == run
    got = []
    for first, last in key_group_ranges(7):
        part = run.within(first, last)
        assert part is not None
        blocks = read_run(make_location(tmp_path), part, NUMBERS)
        assert all(first <= int(h) >> 56 < last for block in blocks for h in np.asarray(block.column(HASH)))
        got += [v for block in blocks for v in block.column("v").to_pylist()]
    assert got == list(range(5000))
    parts = [run.within(0, 100), run.within(100, 256)]
    assert join_ranges(part for part in reversed(parts) if part is not None) == [run]
    assert run.within(0, 100) == Run(run.file, 0, 100, 5000, run.size_bytes, run.sum, 0, 4999, run.blocks)
    assert write_run(make_location(tmp_path), [batch.slice(0, 0)], (0, 256), None) is None


def test_only_blocks_that_are_needed_are_read(tmp_path: Path) -> None:
    """A damaged block is not noticed until it is read."""
    hash_runs._open_files.clear()
    hashes = np.arange(256, dtype=np.uint64) << np.uint64(56)
    batch = pa.RecordBatch.from_arrays([pa.array(hashes), pa.array(np.arange(256))], names=[HASH, "v"])
    here = make_location(tmp_path)
    run = write_run(here, [batch.slice(first, 64) for first in range(0, 256, 64)], (0, 256), None)
    assert run is not None
    path, (start, end, *_) = tmp_path / run.file, run.blocks[2]
    data = bytearray(path.read_bytes())
    data[(start + end) // 2] ^= 1
    path.write_bytes(data)
    for first, last in ((0, 64), (60, 128), (192, 256), (0, 256), (130, 131)):
        part = run.within(first, last)
        assert part is not None
        if last <= 128 or first >= 192:
            found = [v for block in read_run(here, part, NUMBERS) for v in block["v"].to_pylist()]
            assert found == list(range(first, last))
        else:
            with pytest.raises(Damaged, match="not what was written"):
                read_run(here, part, NUMBERS)


def test_blocks_with_the_crc_of_earlier_versions_are_verified(tmp_path: Path) -> None:
    here = make_location(tmp_path)
    run = write_run(here, [rows([("a", 1.0), ("bb", None)])], (0, 256), None)
    assert run is not None
    data = (tmp_path / run.file).read_bytes()
    assert [block.kind for block in run.blocks] == [hash_runs.COMPILED]
    content = sealed(run, data).to_json()
    content[8] = [block[:5] for block in content[8]]  # type: ignore[index, union-attr]
    old = Run.from_json(content)
    for text in (data, data[:200] + bytes([data[200] ^ 1]) + data[201:]):
        hash_runs._open_files.clear()
        (tmp_path / run.file).write_bytes(text)
        if text == data:
            assert sum(block.num_rows for block in read_run(here, old, COLUMNS)) == 2
        else:
            with pytest.raises(Damaged, match="not what was written"):
                read_run(here, old, COLUMNS)


def test_a_run_without_block_checksums_is_verified_as_a_whole(tmp_path: Path) -> None:
    """As the first version wrote them."""
    here = make_location(tmp_path)
    run = write_run(here, [rows([("a", 1.0), ("bb", None)])], (0, 256), None)
    assert run is not None
    data = (tmp_path / run.file).read_bytes()
    old = Run.from_json([*replace(run, sum=zlib.crc32(data)).to_json()[:8]])
    for text in (data, bytes([data[0] ^ 1]) + data[1:]):
        hash_runs._open_files.clear()
        (tmp_path / run.file).write_bytes(text)
        if text == data:
            assert sum(block.num_rows for block in read_run(here, old, COLUMNS)) == 2
        else:
            with pytest.raises(Damaged, match="not what was written"):
                read_run(here, old, COLUMNS)


@pytest.mark.parametrize("damage", ["flipped", "short", "gone"])
def test_a_damaged_run_is_reported(tmp_path: Path, damage: str) -> None:
    hash_runs._open_files.clear()
    here = make_location(tmp_path)
    run = write_run(here, [rows([("a", 1.0), (None, None)])], (0, 256), None)
    assert run is not None
    path = tmp_path / run.file
    data = bytearray(path.read_bytes())
    if damage == "gone":
        path.unlink()
    else:
        data[len(data) // 2] ^= 4
        path.write_bytes(data[: len(data) // 2] if damage == "short" else data)
    with pytest.raises(Damaged, match=str(run.file)):
        read_run(here, run, COLUMNS)


def sealed(run: Run, data: bytes) -> Run:
    """The run with the checksums of other bytes."""
    blocks = tuple(block._replace(sum=zlib.crc32(data[block.start : block.end]), kind=hash_runs.CRC32)
                   for block in run.blocks)
    return replace(run, size_bytes=len(data), blocks=blocks, sum=zlib.crc32(data[blocks[-1].end :]))


@pytest.mark.parametrize("seed", range(max(1, round(EXAMPLES))))
def test_resealed_damage_is_an_error_or_other_values(seed: int, tmp_path: Path) -> None:
    """A checksum can be forged: hostile counts, offsets and types must not reach a kernel."""
    random, here = Random(seed), make_location(tmp_path)
    flow = si.flow(COLUMNS).group_by("s", "f").agg(v=col("v").sum(), n=si.count(), t=col("s").max(), d=col("v").var())
    plan = StreamPlan(flow.op, "changes", "drop", "raise", NOWHERE)
    keys = [(random.choice([None, "", "a", "longer than twelve bytes", chr(k)]), k / 2) for k in range(100, 140)]
    given = pa.RecordBatch.from_pylist([{"s": s, "f": f, "v": random.randint(-9, 9)} for s, f in keys], COLUMNS)
    reducer, out = Reducer(plan, OPTIONS), list[pa.RecordBatch]()
    shuffled = list(plan.map_rows([given], Clock(), MapSummary(), OPTIONS))

    def reduce(runs_before: list[Run]) -> list[Run]:
        return reducer.run(ReduceInput((0, 256), runs_before, Clock(), Clock()), shuffled, here, out.append).runs

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(merge_runs, "BLOCK_ROWS", 15)
        (run,) = reduce([])
        path, (again,) = tmp_path / run.file, reduce([run])
        assert again.rows == run.rows == len(keys)
        assert len(run.blocks) > 1
        data, refused = path.read_bytes(), list[str]()
        for _ in range(60):
            damaged = bytearray(data)
            for _ in range(random.choice([1, 1, 2, 8])):
                at = random.randrange(8, len(damaged) - 8)
                word = random.choice([0, 1, (1 << 31) - 1, (1 << 32) - 1, 1 << 62, (1 << 64) - 1,
                                      random.getrandbits(64)]).to_bytes(8, "little")
                size = random.choice([1, 4, 8])
                damaged[at : at + size] = word[:size]
            path.unlink()  # the file may still be mapped
            path.write_bytes(damaged)
            hash_runs._open_files.clear()
            try:
                reduce([sealed(run, bytes(damaged))])
            except Damaged as error:
                refused.append(str(error))
            except ComputeError:
                pass  # of values that are valid, and too large
        assert refused
        assert all(run.file in text for text in refused)


@pytest.mark.parametrize("content", [
    pytest.param({"last": 257}, id="key groups"), pytest.param({"file": "state/../../x.arrow"}, id="name"),
    pytest.param({"size_bytes": 10}, id="size"), pytest.param({"blocks": (Block(-8, 16, 0, 0, 0),)}, id="start"),
    pytest.param({"blocks": (Block(8, 16, 0, 0, 0), Block(8, 24, 0, 0, 0))}, id="overlap")])  # fmt: skip
def test_a_run_that_cannot_be_is_refused(content: dict[str, Any], tmp_path: Path) -> None:
    run = write_run(make_location(tmp_path), [rows([("a", 1.0)])], (0, 256), None)
    assert run is not None
    with pytest.raises(ValueError, match=r"key groups|file|blocks"):
        Run.from_json(replace(run, **content).to_json())


def test_runs_of_other_filesystems_are_read_through_a_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr("tempfile.tempdir", None)
    (tmp_path / "tmp").mkdir()
    remote = Location(fs.SubTreeFileSystem(str(tmp_path), fs.LocalFileSystem()), "far", "far://away")
    remote.create_folders(STATE)
    run = write_run(remote, [rows([("a", 1.0), ("bb", None)])], (0, 256), None)
    assert run is not None
    hash_runs._open_files.clear()
    first = [block.to_pylist() for block in read_run(remote, run, COLUMNS)]
    hash_runs._open_files.clear()
    (tmp_path / "far" / run.file).unlink()  # the copy is sufficient
    assert [block.to_pylist() for block in read_run(remote, run, COLUMNS)] == first
    copies = list((tmp_path / "tmp").rglob("*.arrow"))
    assert len(copies) == 1
    hash_runs._open_files.clear()
    (tmp_path / "far" / run.file).write_bytes(copies[0].read_bytes())
    copies[0].write_bytes(bytes(run.size_bytes))  # as after a power failure: it is copied again
    assert [block.to_pylist() for block in read_run(remote, run, COLUMNS)] == first
    os.utime(copies[0], (0, 0))
    write_run(remote, [rows([("a", 1.0)])], (0, 256), None)
    other = write_run(remote, [rows([("a", 1.0)])], (0, 256), None)
    assert other is not None
    read_run(remote, other, COLUMNS)  # makes a copy, and removes copies that were not used for long
    assert not copies[0].exists()
    hash_runs._open_files.clear()


def test_copies_take_at_most_half_of_a_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    remote = Location(fs.SubTreeFileSystem(str(tmp_path), fs.LocalFileSystem()), "far", "far://away")
    remote.create_folders(STATE)
    written = [run for _ in range(4) if (run := write_run(remote, [rows([("a", 1.0)])], (0, 256), None)) is not None]
    size = written[0].size_bytes
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=size))  # besides the space of copies
    for number, run in enumerate(written):
        remote.map_file(run.file)
        os.utime(remote._path_of_copy(run.file), (10**9 * 2 + number,) * 2)
        assert os.path.exists(remote._path_of_copy(run.file))
    assert len(list(tmp_path.glob("scalein-runs-*/*"))) == 1


def test_few_runs_remain_after_many_batches() -> None:
    sizes: list[int] = []
    written = 0
    for _ in range(3000):
        chosen = choose_to_merge(sizes, 10)
        new = 10 + sum(sizes[k] for k in chosen)
        written += new
        sizes = [size for k, size in enumerate(sizes) if k not in chosen] + [new]
        assert len(sizes) <= 8
    assert sum(sizes) == 30_000
    assert written < 20 * 30_000  # each row is written a few times only
