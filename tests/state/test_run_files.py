"""Runs: they are read as they were written, by hash and completely; a hostile one causes no access outside of it."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scalein.errors import BadArgument, Damaged, InternalError, StoreFailed
from scalein.state import format, run_writer
from scalein.state.checksum import block_checksum
from scalein.state.run_file import RunFile
from scalein.state.run_writer import RunWriter
from scalein.storage.local import LocalFileSystem
from tests.state.power_cut_disk import PowerCutDisk
from tests.state.reference_records import M64, Row, decoded, reference_checksum, write_run

BLOCK = format.BLOCK

SIZES = st.sampled_from([0, 1, 12, 13, 40, 300]) | st.sampled_from([0, 5, 4000, 4096, 9000])


def blocks_at(run: RunFile, offsets: np.ndarray) -> list[int]:
    """The numbers of the blocks at these offsets of the file."""
    return [run._directory[1].tolist().index(offset) for offset in offsets.tolist()]


@settings(deadline=None, max_examples=40)
@given(stride=st.sampled_from([8, 24, 40, 2040, 4080, 4088, 9000]), cells=st.integers(0, 2), count=st.integers(0, 300),
       step=st.sampled_from([1, 7, 1000]), write_bytes=st.sampled_from([1, 5000, 4 << 20]), spread=st.integers(1, 300),
       seed=st.integers(0, 1 << 32), data=st.data())  # fmt: skip
def test_runs_are_read_as_they_were_written(stride: int, cells: int, count: int, step: int, write_bytes: int,
                                            spread: int, seed: int, data: st.DataObject) -> None:
    random = Random(seed)
    places = tuple(8 + 16 * k for k in range(cells) if 8 + 16 * k + 16 <= stride)
    sizes = data.draw(st.lists(SIZES, min_size=1, max_size=5))
    rows: list[Row] = [(random.getrandbits(64), tuple(random.randbytes(random.choice(sizes)) for _ in places))
                       for _ in range(count)]  # fmt: skip
    hashes = np.sort(np.array([random.randrange(spread) << 50 for _ in rows], np.uint64))
    disk = PowerCutDisk()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_writer, "WRITE_BYTES", write_bytes)
        info = write_run(disk, rows, hashes, stride, places, step)
    run = RunFile(disk, 5, stride, places)
    assert info.record_count == run.record_count == count
    assert info.size_bytes == run.size_bytes == len(disk.content(format.run_name(5)))
    assert info.block_count == run.block_count
    assert run.spec == '{"how": "sum"}'
    if count:
        assert (run.least_hash, run.greatest_hash) == (int(hashes[0]), int(hashes[-1]))
        assert (info.least_hash, info.greatest_hash) == (int(hashes[0]), int(hashes[-1]))
    assert [row for part in run.scan(random.choice([1, 10_000, 1 << 20])) for row in decoded(part, places)] == rows
    run.verify()

    wanted = np.unique(np.array([random.randrange(spread + 3) << 50 for _ in range(random.randint(0, 5))], np.uint64))
    found = run.candidate_blocks(wanted)
    in_blocks = [decoded(run.read_range(k, k + 1), places) for k in blocks_at(run, found.offsets)]
    for hash in wanted.tolist():
        expected = [row for row, theirs in zip(rows, hashes.tolist(), strict=True) if theirs == hash]
        asked = found.block[found.hashes == hash].tolist()
        assert [row for k in asked for row in in_blocks[k] if row in expected] == expected
    assert (np.diff(found.offsets) >= found.sizes[:-1]).all()
    assert sorted(set(found.block.tolist())) == list(range(len(found.offsets)))
    if places == () and spread == 300 and count:
        assert len(found.offsets) <= sum(2 + np.count_nonzero(hashes == h) for h in wanted)


def test_a_hash_outside_of_the_run_needs_no_block() -> None:
    disk = PowerCutDisk()
    write_run(disk, [(k, ()) for k in range(2000)], np.arange(1000, 3000).astype(np.uint64), 40, ())
    run = RunFile(disk, 5, 40)
    for asked, blocks in (([0, 999, 3000, M64], []), ([1000], [0]), ([1000, 2999], [0, run.block_count - 1])):
        assert blocks_at(run, run.candidate_blocks(np.array(asked, np.uint64)).offsets) == blocks
    assert run.block_count == -(-2000 // 102)


def test_a_run_in_a_local_directory(tmp_path: Path) -> None:
    files = LocalFileSystem(tmp_path)
    random = np.random.default_rng(1)
    records = random.integers(0, 256, (300_000, 32), np.uint8)
    hashes = np.sort(random.integers(0, M64, 300_000, np.uint64))
    writer = RunWriter(files, 9, 32, "{}", expected_bytes=50 << 20)
    for start in range(0, 300_000, 70_001):
        writer.add(records[start : start + 70_001], hashes[start : start + 70_001])
    info = writer.finish()
    run = RunFile(files, 9, 32)
    assert (tmp_path / format.run_name(9)).stat().st_size == info.size_bytes == run.size_bytes
    assert np.concatenate([part.records for part in run.scan()]).tobytes() == records.tobytes()
    some = np.sort(random.choice(hashes, 500, replace=False))
    found = {record.tobytes() for k in blocks_at(run, run.candidate_blocks(some).offsets)
             for record in run.read_range(k, k + 1).records}
    assert {record.tobytes() for record in records[np.isin(hashes, some)]} <= found
    files.remove(format.run_name(9))
    run.verify()
    run.close()


def test_the_writer_copies_its_input() -> None:
    disk = PowerCutDisk()
    writer = RunWriter(disk, 5, 8, "{}")
    numbers, hashes = np.arange(10, dtype=np.uint64), np.arange(10, dtype=np.uint64)
    writer.add(numbers.view(np.uint8).reshape(10, 8), hashes)
    numbers[:], hashes[:] = 99, 99
    writer.finish()
    run = RunFile(disk, 5, 8)
    assert [part.records.view("<u8").ravel().tolist() for part in run.scan()] == [list(range(10))]
    assert (run.least_hash, run.greatest_hash) == (0, 9)


def test_an_abandoned_run_leaves_no_file() -> None:
    disk = PowerCutDisk()
    writer = RunWriter(disk, 5, 8, "{}")
    disk.full_after(100)
    writer.add(np.zeros((10, 8), np.uint8), np.zeros(10, np.uint64))
    with pytest.raises(StoreFailed, match=r"run-0000000005\.run"):
        writer.finish()
    writer.abandon()
    assert disk.names() == []


def test_invalid_arguments_of_the_writer_are_refused() -> None:
    writer = RunWriter(PowerCutDisk(), 5, 8, "{}")
    writer.add(np.zeros((1, 8), np.uint8), np.array([5], np.uint64))
    for hashes in ([4], [6, 5]):
        with pytest.raises(InternalError, match="sorted"):
            writer.add(np.zeros((len(hashes), 8), np.uint8), np.array(hashes, np.uint64))
    with pytest.raises(InternalError):
        RunWriter(PowerCutDisk(), 5, 12, "{}")
    with pytest.raises(InternalError):
        RunWriter(PowerCutDisk(), 5, 16, "{}", text_cells=(8,))
    with pytest.raises(BadArgument, match="do not fit"):
        RunWriter(PowerCutDisk(), 5, 16, "x" * 5000)


def hostile_run(change: Callable[[bytearray], None]) -> PowerCutDisk:
    """A changed run with valid seals: one block, 3 records of 24 bytes with a long string each."""
    disk = PowerCutDisk()
    write_run(disk, [(k, (b"x" * 100,)) for k in range(3)], np.arange(3).astype(np.uint64), 24, (8,))
    content = bytearray(disk.content(format.run_name(5)))
    assert len(content) == 3 * BLOCK
    change(content)
    areas = np.frombuffer(content, np.uint8).reshape(-1, BLOCK)
    format.seal(areas[0], 5)
    format.seal(areas[2], 5)
    areas[1, 8:16] = 0
    areas[1, 8:16].view("<u8")[0] = block_checksum(areas[1], 5 ^ BLOCK)
    disk.replace(format.run_name(5), bytes(content))
    return disk


def put(kind: str, at: int, *values: int) -> Callable[[bytearray], None]:
    return lambda content: struct.pack_into(kind, content, at, *values)


CELL = BLOCK + 16 + 8  # of the first record
HOSTILE_RUNS = {
    "many records": put("<I", BLOCK, (1 << 32) - 1),
    "no records": put("<I", BLOCK, 0),
    "a record more": put("<I", BLOCK, 4),
    "much text": put("<I", BLOCK + 4, (1 << 32) - 1),
    "a long string": put("<I", CELL, 301),
    "the longest string": put("<I", CELL, (1 << 32) - 1),
    "a string before its block": put("<Q", CELL + 8, M64),
    "a string that wraps around": put("<Q", CELL + 8, M64 - 50),
    "a string in the records": put("<Q", CELL + 8, 20),
    "a string after the text": put("<Q", CELL + 8, 16 + 72 + 201),
    "a string at an address": put("<Q", CELL + 8, 0x7F0000000000),
    "many blocks": put("<Q", 32, 1 << 60),
    "no blocks": put("<Q", 32, 0),
    "a directory elsewhere": put("<Q", 40, BLOCK),
    "a directory after the end": put("<Q", 40, M64 - BLOCK + 1),
    "a large directory": put("<Q", 48, 1 << 60),
    "a filter of no size": put("<Q", 72, 3),
    "a large filter": put("<Q", 72, 1 << 40),
    "a long spec": put("<I", 80, 4096),
    "a spec that is no text": put("<B", 84, 0xFF),
    "records of another size": put("<I", 12, 32),
    "other counts": put("<Q", 24, 4),
    "another least hash": put("<Q", 56, 4),
}


@pytest.mark.parametrize("what", HOSTILE_RUNS)
def test_a_hostile_run_is_damage(what: str) -> None:
    hostile_run(lambda content: None)
    disk = hostile_run(HOSTILE_RUNS[what])
    with pytest.raises(Damaged, match=r"run-0000000005\.run"):
        RunFile(disk, 5, 24, (8,)).verify()
    if what != "other counts":  # detected only by reading the whole file
        with pytest.raises(Damaged, match=r"run-0000000005\.run"):
            RunFile(disk, 5, 24, (8,)).read_range(0, 1)


DIRECTORIES = {
    "a block at 0": ([0, 1, 2], [0, 2, 3, 4]),
    "a block after the end": ([0, 1, 2], [1, 2, 3, 1 << 31]),
    "an empty block": ([0, 1, 2], [1, 2, 2, 4]),
    "a block before the last": ([0, 1, 2], [1, 3, 2, 4]),
    "unsorted hashes": ([0, 2, 1], [1, 2, 3, 4]),
    "another least hash": ([1, 1, 2], [1, 2, 3, 4]),
}


@pytest.mark.parametrize("what", DIRECTORIES)
def test_a_hostile_directory_is_damage(what: str) -> None:
    disk = PowerCutDisk()
    write_run(disk, [(k, ()) for k in range(3)], np.arange(3).astype(np.uint64), 4080, ())
    content = bytearray(disk.content(format.run_name(5)))
    hashes, starts = DIRECTORIES[what]
    assert struct.unpack_from("<3Q4I", content, 4 * BLOCK) == (0, 1, 2, 1, 2, 3, 4)
    struct.pack_into("<3Q4I", content, 4 * BLOCK, *hashes, *starts)
    format.seal(np.frombuffer(content, np.uint8)[4 * BLOCK :], 5)
    disk.replace(format.run_name(5), bytes(content))
    with pytest.raises(Damaged, match="is inconsistent"):
        RunFile(disk, 5, 4080).candidate_blocks(np.array([1], np.uint64))


def test_a_run_has_the_documented_bytes() -> None:
    disk = PowerCutDisk()
    write_run(disk, [(7, (b"short",)), (8, (b"longer than twelve",))], np.array([3, 9], np.uint64), 24, (8,))
    content = disk.content(format.run_name(5))
    spec = b'{"how": "sum"}'
    header = struct.pack("<8sIIQQQQQQQQI", b"SCRUN\0\0\0", 3, 24, 5, 2, 1, 2 * BLOCK, BLOCK, 3, 9, 0, len(spec)) + spec
    assert content[: len(header)] == header
    block = struct.pack("<QI12sQI4sQ", 7, 5, b"short", 8, 18, b"long", 16 + 48) + b"longer than twelve"
    assert content[BLOCK : BLOCK + 8] == struct.pack("<II", 2, 18)
    assert content[BLOCK + 16 : BLOCK + 16 + len(block)] == block
    assert not any(content[BLOCK + 16 + len(block) : 2 * BLOCK])
    assert content[2 * BLOCK : 2 * BLOCK + 16] == struct.pack("<QII", 3, 1, 2)
    assert len(content) == 3 * BLOCK
    for start, seed in ((0, 5), (2 * BLOCK, 5)):
        area = content[start : start + BLOCK - 8] + bytes(8)
        assert content[start + BLOCK - 8 : start + BLOCK] == reference_checksum(area, seed).to_bytes(8, "little")
    block = content[BLOCK : BLOCK + 8] + bytes(8) + content[BLOCK + 16 : 2 * BLOCK]
    assert content[BLOCK + 8 : BLOCK + 16] == reference_checksum(block, 5 ^ BLOCK).to_bytes(8, "little")


def test_a_filter_rejects_no_hash_that_the_run_has() -> None:
    rng = np.random.default_rng(1)
    hashes = np.unique(rng.integers(0, 2**60, 3_000).astype(np.uint64))
    disk = PowerCutDisk()
    writer = RunWriter(disk, 5, 24, "[]", filter_records=len(hashes))
    writer.add(np.zeros((len(hashes), 24), np.uint8), hashes)
    writer.finish()
    run = RunFile(disk, 5, 24)
    assert run.may_have(hashes).all()
    others = np.setdiff1d(rng.integers(0, 2**60, 20_000).astype(np.uint64), hashes)
    assert run.may_have(others).mean() < 0.05
    run.verify()


def test_a_run_without_a_filter_rejects_no_hash() -> None:
    disk = PowerCutDisk()
    write_run(disk, [(7, ())], np.array([3], np.uint64), 24, ())
    assert RunFile(disk, 5, 24).may_have(np.array([1, 2, 3], np.uint64)).all()
