"""Columns of Parquet files that our kernels decode: the same values as pyarrow's, whatever wrote the pages; and of
damaged files no other values than pyarrow's, and no crash."""

from __future__ import annotations

import subprocess
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import scalein as si
from scalein.connectors.formats import parquet as formats_parquet
from scalein.connectors.formats import parquet_decode
from scalein.connectors.formats.parquet_decode import are_compiled, columns_of, decodable
from scalein.errors import BadData
from scalein.kernels import parquet
from scalein.kernels.parquet import DictionaryDecoder, PageDecompressor
from scalein.layout import SLOP
from scalein.llvm_backend import cache
from scalein.options import Options

TYPES = [pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64(), pa.float32(),
         pa.float64(), pa.date32(), pa.timestamp("ms"), pa.timestamp("us", "UTC"), pa.timestamp("ns")]  # fmt: skip
OTHERS = [pa.string(), pa.bool_(), pa.timestamp("s"), pa.decimal128(9, 2), pa.time32("ms"), pa.list_(pa.int64())]


@pytest.fixture(autouse=True)
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats_parquet, "_WORTH_ROWS", 1)
    monkeypatch.setattr(parquet_decode, "_CODED", 0.0)
    monkeypatch.setattr(parquet_decode, "_MAX_DICTIONARY_BYTES", 1 << 30)
    monkeypatch.setattr(parquet, "_WORTH_COMPILING", 0)


def decoded_here(path: Path) -> set[str]:
    """The columns of a file that our kernels decode."""
    metadata = pq.read_metadata(path)
    file, groups = pa.memory_map(str(path)).read_buffer(), list(range(metadata.num_row_groups))
    rows = metadata.num_rows
    return {field.name for field in pq.read_schema(path)
            if decodable(metadata.schema, [field]) and are_compiled([field], rows)
            and columns_of(file, metadata, groups, [field])}


def read(path: Path, batch_rows: int = 1000, columns: list[str] | None = None, use_threads: bool = True) -> pa.Table:
    with pq.ParquetFile(path) as file:
        names = columns or file.schema_arrow.names
        groups = list(range(file.metadata.num_row_groups))
        batches = list(formats_parquet.batches_of(str(path), file, groups, names, batch_rows, use_threads))
        return pa.Table.from_batches(batches, pa.schema([file.schema_arrow.field(name) for name in names]))


def column(dtype: pa.DataType, rows: int, distinct: int, rng: np.random.Generator) -> pa.Array:
    """Few values, in runs of any length, so that pages have repeated numbers and packed ones."""
    codes = rng.integers(0, distinct, rows)
    codes = np.repeat(codes, rng.choice([1, 1, 1, 3, 20, 200], rows))[:rows]
    if pa.types.is_floating(dtype):
        values = np.concatenate([[np.nan, -0.0, np.inf], rng.normal(size=distinct)])[:distinct]
        return pa.array(values[codes].astype(dtype.to_pandas_dtype()))
    bits = dtype.bit_width
    values = rng.integers(0, 1 << 62, distinct).astype(f"<i{bits // 8}")
    return pa.Array.from_buffers(dtype, rows, [None, pa.py_buffer(values[codes].copy())])


def assert_same(got: pa.Table, want: pa.Table) -> None:
    """Bit by bit: NaN too."""
    assert got.schema.equals(want.schema)
    for name in want.column_names:
        ours, theirs = got[name].combine_chunks(), want[name].combine_chunks()
        if pa.types.is_floating(ours.type):
            ours, theirs = (each.view(f"int{each.type.bit_width}") for each in (ours, theirs))
        assert ours.equals(theirs), name


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 1 << 32), rows=st.integers(1, 30_000), row_group=st.integers(500, 20_000),
       distinct=st.sampled_from([1, 2, 3, 7, 256, 257, 5_000, 30_000]), batch_rows=st.integers(1, 9_000),
       compression=st.sampled_from(["snappy", "none", "zstd", "gzip"]), version=st.sampled_from(["1.0", "2.0"]),
       page=st.sampled_from([64, 1_000, 1 << 20]), dictionary_page=st.sampled_from([100, 20_000, 1 << 20]),
       nullable=st.booleans())  # fmt: skip
def test_values_are_those_of_pyarrow(tmp_path_factory: pytest.TempPathFactory, seed: int, rows: int, row_group: int,
                                     distinct: int, batch_rows: int, compression: str, version: str, page: int,
                                     dictionary_page: int, nullable: bool) -> None:
    """Every type, also where a dictionary gets too large and plain pages follow."""
    rng = np.random.default_rng(seed)
    arrays = [column(dtype, rows, distinct, rng) for dtype in TYPES]
    schema = pa.schema([pa.field(f"c{k}", dtype, nullable) for k, dtype in enumerate(TYPES)])
    path = tmp_path_factory.mktemp("parquet") / "a.parquet"
    pq.write_table(pa.table(arrays, schema), path, row_group_size=row_group, compression=compression,
                   data_page_version=version, data_page_size=page, dictionary_pagesize_limit=dictionary_page)
    want = pq.read_table(path)
    got = read(path, batch_rows)
    assert_same(got, want)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 1 << 32), rows=st.integers(1, 10_000), row_group=st.integers(500, 5_000),
       distinct=st.sampled_from([1, 3, 257, 5_000]), batch_rows=st.integers(1, 9_000),
       dictionary_page=st.sampled_from([100, 20_000, 1 << 20]))  # fmt: skip
def test_one_thread_decodes_numbers_beside_text(tmp_path_factory: pytest.TempPathFactory, seed: int, rows: int,
                                                row_group: int, distinct: int, batch_rows: int,
                                                dictionary_page: int) -> None:
    """The kernels the numbers, pyarrow the rest, in the same batches."""
    rng = np.random.default_rng(seed)
    table = pa.table({"text": pa.array([f"{k}" for k in rng.integers(0, distinct, rows)]),
                      **{str(dtype): column(dtype, rows, distinct, rng) for dtype in TYPES[2:5]},
                      "nulls": pa.array(rng.integers(0, 9, rows), mask=rng.random(rows) < 0.5)})  # fmt: skip
    path = tmp_path_factory.mktemp("parquet") / "a.parquet"
    pq.write_table(table, path, row_group_size=row_group, dictionary_pagesize_limit=dictionary_page)
    assert_same(read(path, batch_rows, use_threads=False), table)


def test_it_is_our_kernels_that_decode(tmp_path: Path) -> None:
    """Numbers and times without nulls; and pyarrow whatever else stands beside them."""
    rng = np.random.default_rng(1)
    table = pa.table({**{str(dtype): column(dtype, 5_000, 50, rng) for dtype in TYPES},
                      **{f"other {dtype}": pa.nulls(5_000, dtype) for dtype in OTHERS},
                      "nulls": pa.array([None, *range(4_999)], pa.int64()), "a.b": column(pa.int64(), 5_000, 9, rng),
                      "struct": pa.array([{"x": 1}] * 5_000)})  # fmt: skip
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=700)
    assert decoded_here(tmp_path / "a.parquet") == {str(dtype) for dtype in TYPES}
    want = pq.read_table(tmp_path / "a.parquet")
    assert_same(read(tmp_path / "a.parquet", 999), want)
    assert_same(read(tmp_path / "a.parquet", 999, use_threads=False), want)
    names = [str(dtype) for dtype in TYPES[::-1]]
    assert_same(read(tmp_path / "a.parquet", 999, names), want.select(names))
    pq.write_table(table, tmp_path / "c.parquet", compression="zstd")
    assert decoded_here(tmp_path / "c.parquet") == set()


def test_plain_pages_and_large_dictionaries_are_left_to_pyarrow(tmp_path: Path,
                                                                monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(parquet, "_WORTH_COMPILING", 0)
    rng = np.random.default_rng(3)
    table = pa.table({"few": rng.integers(0, 100, 100_000), "many": rng.integers(0, 1 << 60, 100_000)})
    pq.write_table(table, tmp_path / "a.parquet", dictionary_pagesize_limit=1 << 22)
    assert decoded_here(tmp_path / "a.parquet") == {"few"}
    pq.write_table(table, tmp_path / "b.parquet", dictionary_pagesize_limit=100_000)  # then plain pages follow
    assert decoded_here(tmp_path / "b.parquet") == {"few"}
    pq.write_table(table, tmp_path / "c.parquet", use_dictionary=False)
    assert decoded_here(tmp_path / "c.parquet") == set()


def test_a_kernel_is_compiled_once_many_values_have_missed_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who reads one small file does not wait for a compiler; a kernel that is there is used at once."""
    monkeypatch.setenv("SCALEIN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(cache, "_known", OrderedDict())
    monkeypatch.setattr(parquet, "_WORTH_COMPILING", 12_000)
    monkeypatch.setattr(parquet, "_missed", 0)
    pq.write_table(pa.table({"k": np.arange(5_000) % 7}), tmp_path / "a.parquet")
    found = [decoded_here(tmp_path / "a.parquet") for _ in range(3)]
    assert found == [set(), set(), {"k"}]
    monkeypatch.setattr(parquet, "_missed", 0)
    assert decoded_here(tmp_path / "a.parquet") == {"k"}
    monkeypatch.setattr(cache, "_known", OrderedDict())
    assert decoded_here(tmp_path / "a.parquet") == {"k"}  # on disk


@pytest.mark.parametrize("row_group", [99, 100])
def test_small_row_groups_are_left_to_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, row_group: int) -> None:
    """Opening each twice would take longer than decoding it; and no batch is larger than its bytes may be."""
    monkeypatch.setattr(formats_parquet, "_WORTH_ROWS", 100)
    monkeypatch.setattr(formats_parquet, "_BATCH_BYTES", 8 * 2_000)
    pq.write_table(pa.table({"k": np.arange(9_900) % 7}), tmp_path / "a.parquet", row_group_size=row_group)
    seen: list[int] = []
    monkeypatch.setattr(formats_parquet, "columns_of", lambda *given: seen.append(1) or columns_of(*given))
    with pq.ParquetFile(tmp_path / "a.parquet") as file:
        groups = list(range(file.metadata.num_row_groups))
        batches = list(formats_parquet.batches_of(str(tmp_path / "a.parquet"), file, groups, ["k"], 9_000))
    assert sum(batch.num_rows for batch in batches) == 9_900
    assert len(seen) == (row_group == 100)
    assert not seen or max(batch.num_rows for batch in batches) == 2_000


def test_a_flow_reads_such_files(tmp_path: Path) -> None:
    table = pa.table({"k": np.arange(10_000) % 7, "v": np.arange(10_000) % 13, "s": ["x", "y"] * 5_000})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=3_000)
    assert decoded_here(tmp_path / "a.parquet") == {"k", "v"}
    for keys in (["k"], ["k", "s"]):
        found, want = (flow.group_by(*keys).agg(v=si.col("v").sum()).collect().sort_by([(k, "ascending") for k in keys])
                       for flow in (si.read_parquet(tmp_path), si.from_arrow(table)))  # fmt: skip
        assert found.equals(want)


def outcome(path: Path, read_it: Any) -> pa.Table | None:
    """What is read; None if it cannot be."""
    try:
        found: pa.Table = read_it(path)
        found.validate(full=True)
        return found
    except (BadData, pa.ArrowException, OSError, UnicodeDecodeError):
        return None


@pytest.mark.parametrize("version", ["1.0", "2.0"])
@pytest.mark.parametrize("compression", ["none", "snappy"])
def test_damaged_files_give_what_pyarrow_gives(tmp_path: Path, compression: str, version: str) -> None:
    """A byte changed anywhere before the footer: in headers, levels, runs and dictionaries."""
    rng = np.random.default_rng(2)
    table = pa.table({"a": column(pa.int64(), 400, 30, rng), "b": column(pa.int16(), 400, 300, rng)})
    path = tmp_path / "a.parquet"
    pq.write_table(table, path, compression=compression, data_page_version=version, data_page_size=200)
    assert decoded_here(path) == {"a", "b"}
    whole = bytearray(path.read_bytes())
    footer = len(whole) - 8 - int.from_bytes(whole[-8:-4], "little")
    both = 0
    for at in range(4, footer):
        for flip in (0xFF, 1 << int(rng.integers(0, 8))):
            damaged = bytearray(whole)
            damaged[at] ^= flip
            path.write_bytes(damaged)
            ours, theirs = outcome(path, read), outcome(path, pq.read_table)
            if ours is not None and theirs is not None:
                both += 1
                assert ours.equals(theirs), (at, flip)
    assert both > 100


def decompressed(data: bytes, size: int) -> bytes | None:
    """What a page becomes; what stands behind its room stays as it is."""
    file = np.frombuffer(b"before" + data + b"behind", np.uint8)
    decompressor = PageDecompressor(Options.make())
    decompressor._room = np.full(size + 2 * SLOP, 0xEE, np.uint8)
    opened = decompressor.open(file, np.array([[6, len(data), size, 9, 0, 0, 1, 0]], np.int64))
    assert (decompressor._room[size + SLOP :] == 0xEE).all()
    assert opened is None or opened.tolist() == [[decompressor._room.ctypes.data, size, 9, 0]]
    return None if opened is None else decompressor._room[:size].tobytes()


pieces = st.one_of(
    st.binary(max_size=80), st.tuples(st.binary(min_size=1, max_size=20), st.integers(1, 300)).map(
        lambda each: each[0] * each[1]),
    st.integers(0, 1 << 30).map(lambda seed: np.random.default_rng(seed).bytes(70_000)))  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(parts=st.lists(pieces, min_size=1, max_size=12), repeats=st.integers(1, 4), data=st.data())
def test_snappy_gives_what_was_compressed(parts: list[bytes], repeats: int, data: st.DataObject) -> None:
    """Or nothing, if a byte was changed: or what pyarrow makes of it."""
    whole = b"".join(parts) * repeats
    codec = pa.Codec("snappy")
    small = codec.compress(whole, asbytes=True)
    assert decompressed(small, len(whole)) == whole
    assert decompressed(small, len(whole) + 1) is None
    assert decompressed(small + b"\0", len(whole)) is None
    assert decompressed(small[:-1], len(whole)) is None
    for _ in range(20):
        damaged = bytearray(small)
        damaged[data.draw(st.integers(0, len(small) - 1))] ^= data.draw(st.integers(1, 255))
        try:
            want = codec.decompress(bytes(damaged), len(whole), asbytes=True)
        except (pa.ArrowException, OSError, ValueError):
            want = None
        got = decompressed(bytes(damaged), len(whole))
        assert got is None or got == want


def test_pages_that_claim_to_become_gigabytes_get_no_room(tmp_path: Path) -> None:
    """A page's header says how much it becomes: nobody believes more than Snappy can make of its bytes."""
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"a": np.arange(400) % 50}), path, use_dictionary=["a"])
    whole, about = path.read_bytes(), pq.read_metadata(path).row_group(0).column(0)
    header = bytes([0x15, 0x00, 0x15])  # of the data page: its kind, then how many bytes it becomes, as a varint
    at = whole.index(header, about.data_page_offset) + len(header)
    assert decoded_here(path) == {"a"}
    claimed = whole[:at] + bytes([0xFE, 0x7F]) + whole[at + 2 :]
    path.write_bytes(claimed)
    assert decoded_here(path) == set()


@pytest.mark.parametrize(("data", "want"), [
    (b"\x05\x10abcde", b"abcde"), (b"\x05\x14abcde", None), (b"\x06\x04ab\x01\x02", b"ababab"),
    (b"\x06\x04ab\x01\x03", None), (b"\x06\x04ab\x01\x00", None), (b"\x05\x04ab\x01\x02", None),
    (b"\x05\x04ab\x0a\x01\x00", b"abbbb"), (b"\x05\x04ab\x0b\x02\x00\x00\x00", b"ababa"),
    (b"\x01\xf0\x00x", b"x"), (b"\x01\xfc\x00\x00\x00\x00x", b"x"), (b"\x01\xfc\xff\xff\xff\xffx", None),
    (b"\x00", b""), (b"", None), (b"\x80\x80\x80\x80\x80\x80\x00", None)])  # fmt: skip
def test_elements_of_snappy(data: bytes, want: bytes | None) -> None:
    """Written by hand, so that every kind is there, with lengths and distances that lead too far."""
    assert decompressed(data, data[0] if data and data[0] < 128 else 0) == want


def packed(*numbers: int) -> bytes:
    """A run of numbers of three bits."""
    bits = sum(number << 3 * k for k, number in enumerate(numbers))
    return bytes([len(numbers) // 8 << 1 | 1]) + bits.to_bytes(3 * len(numbers) // 8, "little")


@pytest.mark.parametrize(("runs", "count", "is_sound"), [
    (b"\x08\x04", 4, True), (b"\x08\x05", 4, False),  # one number, four times
    (packed(0, 1, 2, 3, 4, 4, 4, 7), 7, True), (packed(0, 1, 2, 3, 4, 4, 4, 7), 8, False),
    (packed(*[4] * 40), 40, True), (packed(*[4] * 17, 5, *[4] * 22), 40, False),
    (packed(*[4] * 39, 5), 40, False), (packed(*[4] * 8), 9, False)])  # fmt: skip
def test_numbers_that_a_dictionary_does_not_have(runs: bytes, count: int, is_sound: bool) -> None:
    """The kernel says so, wherever in a page they stand; what pads a run may be anything."""
    page = np.frombuffer(b"\x03" + runs, np.uint8)
    decoder = DictionaryDecoder(8, Options.make())
    decoder.set_dictionary(np.arange(5, dtype=np.int64) * 11)
    decoder.set_pages(np.array([[page.ctypes.data, len(page), count, 0]], np.int64))
    out = np.zeros(count, np.int64)
    assert decoder.fill(out) == (count if is_sound else None)
    assert not is_sound or out[-1] == 44


def unpacked(pages: list[bytes], counts: list[int], entries: int) -> list[int] | None:
    memory = [np.frombuffer(page, np.uint8) for page in pages]
    decoder = DictionaryDecoder(8, Options.make())
    decoder.set_dictionary(np.arange(entries, dtype=np.int64) + 100)
    table = [[page.ctypes.data, len(page), count, 0] for page, count in zip(memory, counts, strict=True)]
    decoder.set_pages(np.array(table, np.int64))
    out = np.zeros(sum(counts), np.int64)
    return out.tolist() if decoder.fill(out) == len(out) else None


def test_pages_of_several_widths(tmp_path: Path) -> None:
    """One of no width has the first entry only; a wrong number is found also if a page of another width follows."""
    first, second = b"\x03" + packed(0, 1, 2, 3, 4, 4, 4, 4), b"\x02" + b"\x06\x01"  # the number 1, three times
    want = [100, 101, 102, 103, 104, 104, 104, 104]
    assert unpacked([first, second, b"\x00", first], [8, 3, 5, 8], 5) == [*want, *[101] * 3, *[100] * 5, *want]
    assert unpacked([b"\x03" + packed(*[7] * 8), second], [8, 3], 5) is None
    assert unpacked([b"\x00"], [5], 0) is None


def test_damaged_footers_are_errors(tmp_path: Path) -> None:
    """pyarrow's metadata end the process where a footer is wrong in some ways: they are not asked before its reader."""
    path, script = tmp_path / "a.parquet", (
        "import sys\n"
        "from scalein.connectors.formats import parquet, parquet_decode\n"
        "from scalein.errors import ScaleinError\n"
        "import pyarrow as pa, pyarrow.parquet as pq\n"
        "from scalein.kernels import parquet as kernels\n"
        "parquet._WORTH_ROWS = parquet_decode._CODED = kernels._WORTH_COMPILING = 0\n"
        "whole = bytearray(open(sys.argv[1], 'rb').read())\n"
        "start = len(whole) - 8 - int.from_bytes(whole[-8:-4], 'little')\n"
        "for at in range(start, len(whole) - 8):\n"
        "    for value in (3, 127):\n"
        "        damaged = bytearray(whole)\n"
        "        damaged[at] = value\n"
        "        open(sys.argv[2], 'wb').write(damaged)\n"
        "        try:\n"
        "            form = parquet.Parquet()\n"
        "            for part in form.splits(sys.argv[2], form.schema(sys.argv[2]), None, 0):\n"
        "                print(at, value, sum(batch.num_rows for batch in part.open()), flush=True)\n"
        "        except (ScaleinError, pa.ArrowException, OSError) as error:\n"
        "            print(at, value, type(error).__name__, flush=True)\n")
    pq.write_table(pa.table({"a": np.arange(400) % 50, "b": np.arange(400) % 7}), path, store_schema=False)
    done = subprocess.run([sys.executable, "-c", script, str(path), str(tmp_path / "b.parquet")], text=True,
                          capture_output=True, check=False)  # fmt: skip
    assert done.returncode == 0, (done.stdout[-200:], done.stderr[-2000:])
    assert "BadData" in done.stdout


@settings(max_examples=200, deadline=None)
@given(data=st.binary(min_size=1, max_size=60), width=st.integers(0, 40), count=st.integers(1, 100),
       entries=st.integers(1, 40), has_levels=st.booleans())  # fmt: skip
def test_any_bytes_end_in_values_or_in_none(data: bytes, width: int, count: int, entries: int,
                                            has_levels: bool) -> None:
    """What stands right before and behind the page is none of its bytes: were it read, that would show."""
    found = []
    for beside in (0x00, 0xFF):
        memory = np.full(len(data) + 129, beside, np.uint8)
        page = memory[64 : 64 + 1 + len(data)]
        page[0], page[1:] = width, np.frombuffer(data, np.uint8)
        decoder = DictionaryDecoder(4, Options.make())
        decoder.set_dictionary(np.arange(entries, dtype=np.int32))
        decoder.set_pages(np.array([[page.ctypes.data, len(page), count, has_levels]], np.int64))
        out = np.full(count + 1, -7, np.int32)
        got = decoder.fill(out[:count])
        assert out[count] == -7
        assert got is None or 0 <= width <= 24 or has_levels
        found.append(None if got is None else out[:got].tolist())
        assert found[-1] is None or all(0 <= value < entries for value in found[-1])
    assert found[0] == found[1]
