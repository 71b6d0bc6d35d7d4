"""Checksums, manifests, images and indexes: they are read as they were written, and every flipped byte is detected."""

from __future__ import annotations

import itertools
import json
import struct
from collections.abc import Callable
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scalein.errors import Damaged, InternalError, NewerFormat
from scalein.options import Options
from scalein.state import format, manifest
from scalein.state.checksum import ByteChecksum, block_checksum, block_checksums, compiled_checksums
from scalein.state.index_runs import IndexRead, IndexRun, IndexWriter, make_entries
from scalein.state.manifest import Manifest
from scalein.state.run_file import IndexMemory, RunFile
from scalein.state.segment_images import Extent, ImageFile, ImageWriter
from scalein.storage.checked_json import Json
from tests.state.power_cut_disk import PowerCutDisk
from tests.state.reference_records import M64, Row, reference_checksum, write_run

BLOCK = format.BLOCK


# --- checksums


def test_checksums_of_known_blocks() -> None:
    counted = (np.arange(8192) % 251).astype(np.uint8)
    assert block_checksum(np.zeros(4096, np.uint8), 0) == 0xF95DFA9554872CA1
    assert block_checksum(counted[:4096], 7) == 0x4A0117144C4FDC4D
    assert block_checksum(counted.data, M64) == 0xB2A7B77A1C87DCFA


@given(st.integers(0, 300), st.sampled_from([64, 4096]), st.integers(0, 1 << 32))
@settings(deadline=None, max_examples=20)
def test_checksums_of_a_batch_equal_those_of_single_blocks(count: int, size: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    data, seeds = random.integers(0, 256, (count, size), np.uint8), random.integers(0, M64, count, np.uint64)
    found = block_checksums(data, seeds)
    for k in {0, count // 2, count - 1} & set(range(count)):
        wanted = reference_checksum(data[k].tobytes(), int(seeds[k]))
        assert int(found[k]) == block_checksum(data[k], seeds[k]) == wanted


@given(st.integers(0, 20_000), st.integers(0, 1 << 32))
@settings(deadline=None, max_examples=20)
def test_checksums_of_any_bytes_do_not_depend_on_their_parts(size: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    data = random.integers(0, 256, size, np.uint8).tobytes()
    padded = data.ljust(-(-size // 4096) * 4096, b"\0")
    sums = [reference_checksum(padded[at : at + 4096], at // 4096) for at in range(0, len(padded), 4096)]
    wanted = reference_checksum(b"".join(each.to_bytes(8, "little") for each in [*sums, *[0] * (-len(sums) % 8)]), size)
    cuts = [0, *sorted(random.integers(0, size + 1, 4).tolist()), size]
    for checksums in (block_checksums, compiled_checksums(Options.make(workers=1))):
        found = ByteChecksum(checksums)
        for start, end in itertools.pairwise(cuts):
            found.update(data[start:end])
        assert found.digest() == wanted


# --- manifests

JSONS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=10,
)
TABLES = st.dictionaries(st.text(max_size=5), st.builds(
    lambda kind, values: np.array(values).astype(kind), st.sampled_from(["<u8", "<i4", "|u1", "<f8", ">u2"]),
    st.lists(st.integers(0, 200), max_size=30)), max_size=4)  # fmt: skip


@given(st.integers(0, (1 << 63) - 1), st.dictionaries(st.text(max_size=5), JSONS, max_size=4), TABLES)
@settings(deadline=None)
def test_manifests_are_read_as_they_were_written(id: int, meta: dict[str, Json], tables: dict[str, np.ndarray]) -> None:
    data = manifest.encode(Manifest(id, meta, tables))
    assert len(data) % BLOCK == 0
    found = manifest.decode(data, id, "snapshot")
    assert (found.id, found.meta) == (id, meta)
    assert {name: table.tolist() for name, table in found.tables.items()} == {k: v.tolist() for k, v in tables.items()}
    assert [t.dtype for t in found.tables.values()] == [t.dtype.newbyteorder("<") for t in tables.values()]


def some_manifest(id: int = 3) -> Manifest:
    return Manifest(id, {"tables": ["clicks"]}, {"runs": np.arange(20, dtype=np.uint32)})


def resealed(change: Callable[[np.ndarray], None], id: int = 3) -> np.ndarray:
    """A changed manifest with a valid seal."""
    data = manifest.encode(some_manifest())
    change(data)
    format.seal(data, id)
    return data


def test_a_newer_format_is_refused() -> None:
    def newer(data: np.ndarray) -> None:
        data[8] = 7

    disk = PowerCutDisk({format.manifest_name(3): resealed(newer).tobytes(),
                          format.manifest_name(2): manifest.encode(some_manifest(2)).tobytes()})  # fmt: skip
    with pytest.raises(NewerFormat, match="newer scalein") as caught:
        list(manifest.newest(disk))  # and does not fall back to 2
    assert caught.value.facts["format"] == "7"
    assert caught.value.facts["reads"] == "up to format 3"
    assert format.manifest_name(3) in caught.value.facts["file"]


def with_json(text: bytes) -> Callable[[np.ndarray], None]:
    def change(data: np.ndarray) -> None:
        data[24:32].view("<u8")[0] = len(text)
        data[32:40].view("<u8")[0] = 0
        data[40 : 40 + len(text)] = np.frombuffer(text, np.uint8)

    return change


def word(at: int, value: int) -> Callable[[np.ndarray], None]:
    return lambda data: data[at : at + 8].view("<u8").__setitem__(0, value)


HOSTILE = {
    "json after the end": word(24, 1 << 40),
    "tables after the end": word(32, 1 << 40),
    "sizes that overflow": word(24, M64 - 30),
    "no json": with_json(b"{{"),
    "no text": with_json(b"\xff\xfe\xfd"),
    "deep json": with_json(b"[" * 3000),
    "a list": with_json(b"[]"),
    "no tables": with_json(b'{"meta":{}}'),
    "objects": with_json(b'{"meta":{},"tables":[["x","|O",0]]}'),
    "negative": with_json(b'{"meta":{},"tables":[["x","<u8",-1]]}'),
    "many": with_json(b'{"meta":{},"tables":[["x","<u8",100000000000000000000000]]}'),
    "infinitely many": with_json(b'{"meta":{},"tables":[["x","<u8",Infinity]]}'),
    "meta is a list": with_json(b'{"meta":[],"tables":[]}'),
    "version 0": lambda data: data.__setitem__(8, 0),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_manifest_is_damage(what: str) -> None:
    with pytest.raises(Damaged, match="disk/snapshot-3"):
        manifest.decode(resealed(HOSTILE[what]), 3, "disk/snapshot-3")


@pytest.mark.parametrize("size", [0, 1, 4095, 4097])
def test_a_manifest_of_another_size_is_damage(size: int) -> None:
    with pytest.raises(Damaged, match="size"):
        manifest.decode(np.zeros(size, np.uint8), 3, "snapshot")


def test_a_manifest_under_another_name_is_damage() -> None:
    with pytest.raises(Damaged, match="another file"):
        manifest.decode(manifest.encode(some_manifest(3)), 4, "snapshot")


def test_a_damaged_newest_manifest_is_reported_before_the_next_older_one() -> None:
    disk = PowerCutDisk()
    for id in (1, 2):
        manifest.publish(disk, some_manifest(id))
    disk.flip(format.manifest_name(2), 77)
    damaged, intact = manifest.newest(disk)
    assert isinstance(damaged, Damaged)
    assert format.manifest_name(2) in str(damaged)
    assert isinstance(intact, Manifest)
    assert intact.id == 1


def test_tables_of_a_manifest_are_arrays_of_numbers() -> None:
    for table in (np.array([None]), np.zeros((2, 2)), np.array(["x"])):
        with pytest.raises(InternalError):
            manifest.encode(Manifest(1, {}, {"x": table}))


def test_a_manifest_has_the_documented_bytes() -> None:
    content = manifest.encode(some_manifest()).tobytes()
    text = json.dumps({"meta": {"tables": ["clicks"]}, "tables": [["runs", "<u4", 20]]}, separators=(",", ":")).encode()
    start = struct.pack("<8sIIQQQ", b"SCSNAP\0\0", 3, 0, 3, len(text), 80) + text + struct.pack("<20I", *range(20))
    assert content == start + bytes(BLOCK - 8 - len(start)) + content[-8:]
    assert content[-8:] == reference_checksum(content[:-8] + bytes(8), 3).to_bytes(8, "little")


# --- images


@given(st.lists(st.integers(1, 600), min_size=1, max_size=3), st.integers(0, 1 << 32))
@settings(deadline=None, max_examples=30)
def test_images_are_read_as_they_were_written(sizes: list[int], seed: int) -> None:
    random = Random(seed)
    disk = PowerCutDisk()
    writer = ImageWriter(disk, 8)
    parts = [np.frombuffer(random.randbytes(size * BLOCK), np.uint8) for size in sizes]
    extents = [writer.add(k, part) for k, part in enumerate(parts)]
    assert writer.finish() == len(disk.content(format.image_name(8))) == extents[-1].end
    image = ImageFile(disk, 8)
    assert extents[0].offset == BLOCK
    for extent, part in zip(extents, parts, strict=True):
        start = random.randrange(len(part))
        size = random.randint(0, len(part) - start)
        blocks = part.reshape(-1, BLOCK)[start // BLOCK : -(-(start + size) // BLOCK)]
        ranges, stored = image.block_ranges(extent, start, size), disk.content(format.image_name(8))
        assert stored[ranges.offset :][: ranges.size] == blocks.tobytes()
        sums = stored[ranges.sums_offset :][: ranges.sums_size][ranges.sums_begin :][: 8 * len(blocks)]
        assert ranges.sums_offset % BLOCK == ranges.sums_size % BLOCK == 0
        seeds = np.uint64(8) ^ (np.uint64(ranges.offset) + np.arange(len(blocks), dtype=np.uint64) * np.uint64(BLOCK))
        assert sums == block_checksums(np.ascontiguousarray(blocks), seeds).tobytes()
        assert image.read(extent, start, size).tobytes() == part[start : start + size].tobytes()
        image.verify(extent)
    content = disk.content(format.image_name(8))
    assert content[:24] == struct.pack("<8sIIQ", b"SCIMAGE\0", 3, 0, 8)
    first_sum = content[extents[0].offset + extents[0].size :][:8]
    assert first_sum == reference_checksum(content[BLOCK : 2 * BLOCK], 8 ^ BLOCK).to_bytes(8, "little")


NO_EXTENTS = [(0, BLOCK), (BLOCK, 4 * BLOCK), (BLOCK, 0), (BLOCK + 1, BLOCK), (BLOCK, 100), (BLOCK, -BLOCK),
              (-BLOCK, BLOCK), (1 << 62, 1 << 62), (BLOCK, 3 * BLOCK)]  # fmt: skip


@pytest.mark.parametrize(("offset", "size"), NO_EXTENTS)
@pytest.mark.parametrize("kind", [int, np.int64])
def test_a_hostile_extent_is_damage(offset: int, size: int, kind: type) -> None:
    disk = PowerCutDisk()
    writer = ImageWriter(disk, 8)
    writer.add(0, np.zeros(2 * BLOCK, np.uint8))
    writer.finish()
    with pytest.raises(Damaged, match=r"image-0000000008\.seg"):
        ImageFile(disk, 8).read(Extent(0, kind(offset), kind(size)), 0, 1)


@pytest.mark.parametrize(("start", "size"), [(0, 8193), (8192, 1), (-1, 1), (1, -1), (1 << 62, 1)])
def test_bytes_after_an_extent_are_not_read(start: int, size: int) -> None:
    disk = PowerCutDisk()
    writer = ImageWriter(disk, 8)
    extent = writer.add(0, np.zeros(2 * BLOCK, np.uint8))
    writer.add(1, np.zeros(2 * BLOCK, np.uint8))
    writer.finish()
    with pytest.raises(Damaged):
        ImageFile(disk, 8).read(extent, start, size)


def test_an_abandoned_image_leaves_no_file() -> None:
    disk = PowerCutDisk()
    writer = ImageWriter(disk, 8)
    with pytest.raises(InternalError):
        writer.add(0, np.zeros(100, np.uint8))
    writer.abandon()
    assert disk.names() == []


# --- indexes


def read_blocks(run: IndexRun, part: IndexRead) -> np.ndarray:
    return np.concatenate([run.input.read(offset, BLOCK) for offset in part.offsets.tolist()])


def load_directory(run: IndexRun, hashes: np.ndarray, most: int = 2) -> list[int]:
    """Load the directory blocks for hashes; returns the numbers of the blocks that were read."""
    parts = run.directory_reads(hashes, most)
    assert all(len(part.numbers) <= most for part in parts)
    for part in parts:
        run.add_directory_blocks(part, read_blocks(run, part))
    assert not run.directory_reads(hashes, most)
    return [number for part in parts for number in part.numbers.tolist()]


def write_index(disk: PowerCutDisk, given: dict[int, tuple[np.ndarray, np.ndarray]], id: int = 9) -> None:
    """`given`: hashes and offsets by group."""
    writer = IndexWriter(disk, id, 1)
    for group, (hashes, places) in given.items():
        writer.add(group, np.sort(make_entries(hashes, places)))
    writer.finish()


@given(st.dictionaries(st.integers(0, 255), st.integers(1, 1400), max_size=4), st.integers(0, 1 << 32))
@settings(deadline=None, max_examples=30)
def test_indexes_are_read_as_they_were_written(counts: dict[int, int], seed: int) -> None:
    """Also if many hashes differ in their lowest bits only, across blocks and groups."""
    random, disk = np.random.default_rng(seed), PowerCutDisk()
    given_: dict[int, tuple[np.ndarray, np.ndarray]] = {}
    for group, count in sorted(counts.items()):
        low = random.integers(0, random.choice([3, 1 << 29]), count, np.uint64) << np.uint64(27)
        hashes = np.uint64(group << 56) | low | random.integers(0, 1 << 27, count, np.uint64)
        given_[group] = hashes, random.integers(0, 1 << 35, count) * 8
    write_index(disk, given_)
    run = IndexRun(disk, 9)
    run.verify()
    assert run.count == sum(counts.values())
    every = np.concatenate([np.zeros(0, np.uint64), *(hashes for hashes, _ in given_.values())])
    asked = np.unique(np.append(every[::3], random.integers(0, M64, 5, np.uint64)))
    load_directory(run, asked)
    found: set[tuple[int, int]] = set()
    for part in run.entry_reads(asked, 2):
        area = read_blocks(run, part)
        found |= set(zip(*(column.tolist() for column in run.matches(part, area)[::-1]), strict=True))
    wanted = {(one, place) for one in asked.tolist() for hashes, places in given_.values()
              for theirs, place in zip(hashes.tolist(), places.tolist(), strict=True) if one >> 27 == theirs >> 27}
    assert found == wanted


def test_an_index_has_the_documented_bytes() -> None:
    disk = PowerCutDisk()
    hashes = (np.uint64(7 << 56) | np.arange(512, dtype=np.uint64) << np.uint64(27)) + np.uint64(5)
    write_index(disk, {7: (hashes, np.arange(512) * 40), 9: (hashes[:1] + np.uint64(2 << 56), np.array([80]))})
    content = disk.content(format.index_name(9))
    header = struct.pack("<8sIIQ", b"SCINDEX\0", 3, 0, 9) + struct.pack("<257Q", *[0] * 8, 512, 512, *[513] * 247)
    assert content[: len(header)] == header
    assert content[:BLOCK][-8:] == reference_checksum(content[: BLOCK - 8] + bytes(8), 9).to_bytes(8, "little")
    entries = [bits << 35 | bits * 5 for bits in range(512)] + [10]
    for number in (0, 1):
        words = entries[511 * number : 511 * (number + 1)]
        block = bytes(8) + struct.pack(f"<{len(words)}Q", *words) + bytes(8 * (511 - len(words)))
        sum = reference_checksum(block, 9 ^ BLOCK * (1 + number)).to_bytes(8, "little")
        assert content[BLOCK * (1 + number) :][:BLOCK] == sum + block[8:]
    directory = bytes(8) + struct.pack("<QQ", 7 << 56, 7 << 56 | 511 << 27) + bytes(BLOCK - 24)
    sum = reference_checksum(directory, 9 ^ 3 * BLOCK).to_bytes(8, "little")
    assert content[3 * BLOCK :] == sum + directory[8:]


def test_a_lookup_reads_the_directory_of_its_group_only() -> None:
    """Here: 256 groups of 3 blocks each; the directory has two blocks."""
    random, disk = np.random.default_rng(3), PowerCutDisk()
    groups = {group: np.uint64(group << 56) | random.integers(0, 1 << 56, 3 * 511, np.uint64) for group in range(256)}
    write_index(disk, {group: (hashes, np.arange(len(hashes)) * 8) for group, hashes in groups.items()})
    held = IndexMemory()
    run = IndexRun(disk, 9, index_memory=held)
    assert run.blocks == 768
    assert [load_directory(run, groups[group][:1]) for group in (3, 4, 255, 170, 0)] == [[768], [], [769], [], []]
    assert held.bytes == 2 * BLOCK
    run.close()
    assert held.bytes == 0
    run = IndexRun(disk, 9)
    assert load_directory(run, np.sort(groups[170])[:1]) == [768, 769]  # its blocks 510 to 512 are in both


def test_a_flipped_byte_of_a_directory_is_detected_by_its_readers() -> None:
    disk = PowerCutDisk()
    hashes = np.arange(256, dtype=np.uint64) << np.uint64(56)
    many = np.repeat(np.arange(3 * 511, dtype=np.uint64), 256).reshape(-1, 256).T << np.uint64(30)
    write_index(disk, {g: (hashes[g] | many[g], np.arange(3 * 511) * 8) for g in range(256)})
    disk.flip(format.index_name(9), BLOCK * (1 + 769) + 100, 1)
    run = IndexRun(disk, 9)
    load_directory(run, hashes[:100])
    with pytest.raises(Damaged, match=format.index_name(9)):
        load_directory(run, hashes[200:])


HOSTILE_BORDERS = {"first": (0, 1), "descending": (100, 50), "more than there are": (256, 100_000),
                   "huge": (256, M64), "fewer": (256, 1)}  # fmt: skip


@pytest.mark.parametrize("what", HOSTILE_BORDERS)
def test_hostile_bounds_of_an_index_are_damage(what: str) -> None:
    disk = PowerCutDisk()
    write_index(disk, {3: (np.uint64(3 << 56) + np.arange(600, dtype=np.uint64), np.arange(600) * 8)})
    content = np.frombuffer(bytearray(disk.content(format.index_name(9))), np.uint8)
    at, value = HOSTILE_BORDERS[what]
    content[24:][8 * at :][:8].view("<u8")[0] = value
    format.seal(content[:BLOCK], 9)
    disk.replace(format.index_name(9), content.tobytes())
    with pytest.raises(Damaged, match=format.index_name(9)):
        IndexRun(disk, 9)


def test_an_unsorted_index_is_refused() -> None:
    writer = IndexWriter(PowerCutDisk(), 9, 1)
    with pytest.raises(InternalError):
        writer.add(4, np.array([2, 1], np.uint64))
    writer.add(4, np.array([1, 2], np.uint64))
    with pytest.raises(InternalError):
        writer.add(4, np.array([3], np.uint64))


# --- damage


def every_kind() -> tuple[PowerCutDisk, dict[str, Callable[[], object]]]:
    """A disk with one file of each kind, and a call that reads the whole file for each."""
    disk = PowerCutDisk()
    random = Random(0)
    rows: list[Row] = [(k, (random.randbytes(random.choice([3, 30, 400])),)) for k in range(40)]
    rows.append((40, (random.randbytes(6000),)))
    write_run(disk, rows, np.arange(41).astype(np.uint64), 24, (8,))
    manifest.publish(disk, some_manifest())
    writer = ImageWriter(disk, 8)
    data = np.frombuffer(random.randbytes(7 * BLOCK), np.uint8)
    extents = [writer.add(0, data[: 3 * BLOCK]), writer.add(4, data[3 * BLOCK :])]
    writer.finish()

    random_hashes = np.random.default_rng(0).integers(0, M64, 900, np.uint64)
    in_groups = {group: random_hashes[random_hashes >> np.uint64(56) == group] for group in range(256)}
    write_index(disk, {group: (some, np.arange(len(some)) * 8) for group, some in in_groups.items()})

    def verify_image() -> None:
        for extent in extents:
            ImageFile(disk, 8).verify(extent)

    return disk, {
        format.run_name(5): lambda: RunFile(disk, 5, 24, (8,)).verify(),
        format.manifest_name(3): lambda: manifest.read(disk, 3),
        format.image_name(8): verify_image,
        format.index_name(9): lambda: IndexRun(disk, 9).verify(),
    }


@pytest.mark.parametrize("name", every_kind()[1])
def test_every_flipped_byte_is_detected(name: str) -> None:
    disk, calls = every_kind()
    calls[name]()
    content = disk.content(name)
    random = Random(1)
    # All bytes at the start and end of blocks, and some in between.
    places = [at for at in range(len(content)) if at % BLOCK < 80 or at % BLOCK >= BLOCK - 9 or random.random() < 0.01]
    for at in places:
        disk.flip(name, at, 1 << random.randrange(8))
        with pytest.raises(Damaged, match=name):
            calls[name]()
        disk.replace(name, content)
    calls[name]()


@pytest.mark.parametrize("name", every_kind()[1])
def test_every_truncated_or_extended_file_is_detected(name: str) -> None:
    disk, calls = every_kind()
    content = disk.content(name)
    sizes = (0, 1, 100, BLOCK - 1, BLOCK, BLOCK + 1, len(content) - BLOCK, len(content) - 1)
    others = [content[:size] for size in sizes]
    longer = [] if name.startswith("image") else [content + bytes(1), content + bytes(BLOCK)]
    for other in others + longer:
        if len(other) != len(content):
            disk.replace(name, other)
            with pytest.raises(Damaged, match=name):
                calls[name]()
