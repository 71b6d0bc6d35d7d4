"""Arrow IPC files with wrong bytes: an error that names the file or the right rows, never a crash, in a process that
reads them with kernels.
"""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

import scalein as si
from scalein import col
from scalein.connectors.formats.validate import Validator
from tests.engines import EXAMPLES

ROWS = 500
TABLE = pa.table({
    "n": pa.array(range(ROWS), pa.int64()), "s": [None if k % 7 == 3 else f"text {k % 50}" for k in range(ROWS)],
    "w": pa.array([f"long {k}" * (k % 5) for k in range(ROWS)], pa.large_string()),
    "v": pa.array([f"view {k}" * (k % 3) for k in range(ROWS)], pa.string_view()),
    "d": pa.array([f"word {k % 9}" for k in range(ROWS)]).dictionary_encode(),
    "l": pa.array([[k] * (k % 4) for k in range(ROWS)], pa.list_(pa.int64())),
    "m": pa.array(list(range(ROWS)), pa.decimal128(12, 2)), "b": [k % 3 == 0 for k in range(ROWS)],
    "u": pa.array([{"a": k, "t": f"{k}"} for k in range(ROWS)]),
})  # fmt: skip
FORMATS: dict[str, Callable[..., pa.RecordBatchWriter]] = {"file": pa.ipc.new_file, "stream": pa.ipc.new_stream}

READ = """
import sys, pyarrow as pa, scalein as si
from scalein import col
for line in sys.stdin:
    path = line.strip()
    print("begin", path, flush=True)
    try:
        flow = si.read_ipc(path)
        found = flow.select("n", "s", x=col("w").str.len(), y=col("v").str.upper(), z=col("d").str.lower()).collect()
        groups = flow.group_by("d", "s").agg(n=si.count(), t=col("m").sum(), hi=col("w").max()).collect()
        flat = flow.explode("l").filter(col("b")).collect()
        print("rows", found.num_rows, groups.num_rows, flat.num_rows, flush=True)
    except si.ScaleinError as error:
        print("error", type(error).__name__, path.rpartition("/")[2] in str(error), "at" in error.facts, flush=True)
print("end", flush=True)
"""


def write(path: Path, kind: str, table: pa.Table = TABLE, compression: str | None = None) -> bytes:
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with pa.OSFile(str(path), "wb") as file, FORMATS[kind](file, table.schema, options=options) as writer:
        writer.write_table(table, max_chunksize=100)
    return path.read_bytes()


def read_all(paths: list[Path]) -> list[str]:
    """What a process says of each file."""
    child = subprocess.run([sys.executable, "-c", READ], input="".join(f"{path}\n" for path in paths), text=True,
                           capture_output=True, timeout=300, check=False)
    lines = child.stdout.splitlines()
    assert lines[-1:] == ["end"], (child.returncode, lines[-2:], child.stderr[-2000:])
    return lines[1:-1:2]


@pytest.mark.parametrize("compression", [None, "lz4"])
@pytest.mark.parametrize("kind", FORMATS)
def test_wrong_bytes_are_reported_and_crash_nothing(kind: str, compression: str | None, tmp_path: Path) -> None:
    whole = write(tmp_path / "whole", kind, compression=compression)
    random = np.random.default_rng(7)
    paths = [tmp_path / "whole"]
    for number in range(int(150 * EXAMPLES)):
        damaged = bytearray(whole)
        if number % 5 == 4:
            del damaged[int(random.integers(0, len(whole))) :]
        else:
            for at in random.integers(0, len(whole), int(random.integers(1, 4))):
                damaged[at] = int(random.integers(0, 256)) if number % 2 else damaged[at] ^ 0x80
        paths.append(tmp_path / f"{number}.arrow")
        paths[-1].write_bytes(damaged)
    said = read_all(paths)
    assert said[0] == f"rows {ROWS} {len(TABLE.group_by(['d', 's']).aggregate([]))} {said[0].split()[-1]}"
    assert len(said) == len(paths)
    for path, line in zip(paths, said, strict=True):
        # A damaged name or type of a column is found when the flow is made.
        is_named = line.endswith("True True") or not line.startswith("error BadData")
        assert line.startswith("rows") or (line.startswith("error") and is_named), (path, line)
    assert sum(line.startswith("error BadData") for line in said) > len(paths) // 4


@pytest.mark.parametrize("kind", FORMATS)
def test_one_wrong_offset_of_a_text(kind: str, tmp_path: Path) -> None:
    table = pa.table({"s": [f"text {k}" for k in range(100)]})
    whole = write(tmp_path / "a.arrow", kind, table)
    offsets = struct.pack(
        "<101i", *np.cumsum([0, *(len(f"text {k}") for k in range(100))]))
    at = whole.index(offsets)
    (tmp_path / "a.arrow").write_bytes(whole[: at + 80] + struct.pack("<i", 2**31 - 9) + whole[at + 84 :])
    child = subprocess.run([sys.executable, "-c", f"""
import scalein as si
from scalein import col
try:
    si.read_ipc({str(tmp_path / "a.arrow")!r}).group_by("s").agg(n=si.count()).collect()
except si.BadData as error:
    print(error)
"""], capture_output=True, text=True, check=False)
    assert child.returncode == 0, child.returncode
    assert "a.arrow cannot be read" in child.stdout


@pytest.mark.parametrize("kind", FORMATS)
def test_a_wrong_code_of_a_dictionary(kind: str, tmp_path: Path) -> None:
    table = pa.table({"d": pa.DictionaryArray.from_arrays(pa.array([0, 1, 77, 1], pa.int32()), ["a", "b"], safe=False)})
    write(tmp_path / "a.arrow", kind, table)
    with pytest.raises(si.BadData, match=r"(?s)a\.arrow cannot be read.*codes from 0 to 77"):
        si.read_ipc(tmp_path / "a.arrow").collect()


@pytest.mark.parametrize("kind", FORMATS)
def test_a_file_that_shrinks_while_it_is_read(kind: str, tmp_path: Path) -> None:
    """A mapped file would end the process with SIGBUS, in the kernel that comes to the lost pages."""
    path = tmp_path / "a.arrow"
    rows = 1 << 18
    table = pa.table({"n": pa.array(range(8 * rows), pa.int64())})
    with pa.OSFile(str(path), "wb") as file, FORMATS[kind](file, table.schema) as writer:
        writer.write_table(table, max_chunksize=rows)
    child = subprocess.run([sys.executable, "-c", f"""
import os, scalein as si
from scalein import col
batches = si.read_ipc({str(path)!r}).select(m=col("n") + 1).batches(workers=1)
next(batches)
os.truncate({str(path)!r}, {path.stat().st_size // 8 * 7})
try:
    for batch in batches:
        pass
except si.BadData as error:
    print(error)
"""], capture_output=True, text=True, check=False)
    assert child.returncode == 0, (child.returncode, child.stderr)
    assert "a.arrow" in child.stdout


def test_a_stream_that_is_cut_between_two_batches_while_it_is_read(tmp_path: Path) -> None:
    """Its end looks like that of a whole stream: only its size says otherwise."""
    path = tmp_path / "a.arrow"
    batches = TABLE.select(["n"]).to_batches(max_chunksize=1)
    sizes = []
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, batches[0].schema) as writer:
        for batch in batches:
            writer.write_batch(batch)
            sizes.append(file.tell())
    rows = si.read_ipc(path).batches()
    next(rows)
    os.truncate(path, sizes[-10])
    with pytest.raises(si.BadData, match=r"a\.arrow changed while it was read"):
        list(rows)


def test_batches_share_a_dictionary_that_is_checked_once(tmp_path: Path) -> None:
    words = pa.array([f"word {k}" for k in range(100)])
    codes = pa.array(np.arange(400) % 100, pa.int32())
    write(tmp_path / "a.arrow", "file", pa.table({"d": pa.DictionaryArray.from_arrays(codes, words)}))
    found = si.read_ipc(tmp_path / "a.arrow").group_by("d").agg(n=si.count()).filter(col("n") == 4).collect()
    assert found.num_rows == 100


@pytest.mark.parametrize("dtype", [pa.string(), pa.large_string(), pa.string_view()], ids=str)
@pytest.mark.parametrize(("texts", "is_right"), [
    ([b"ok", b"", None, "J\u00fcrgen".encode(), b"x"], True), ([], True), ([None, None], True), ([b""], True),
    ([b"ok", b"\xff"], False), ([b"a\xc3", b"\xbcb"], False),  # a letter cut between two texts
    ([b"ok", b"\x80"], False), ([b"a" * 100 + b"\xe2\x82"], False),
], ids=str)
def test_texts_are_utf_8(texts: list[bytes | None], is_right: bool, dtype: pa.DataType, tmp_path: Path) -> None:
    views = {pa.string(): pa.binary(), pa.large_string(): pa.large_binary(), pa.string_view(): pa.binary_view()}
    column = pa.array([b"before", *texts, b"\xff after"], views[dtype]).view(dtype).slice(1, len(texts))
    if not is_right:
        with pytest.raises(pa.ArrowInvalid, match=r"(?i)utf"):
            Validator().check(pa.record_batch({"s": column}))
        with pytest.raises(pa.ArrowInvalid, match=r"(?i)utf"):
            Validator().check(pa.record_batch({"s": pa.DictionaryArray.from_arrays(pa.array([0], pa.int8()), column)}))
    else:
        assert Validator().check(pa.record_batch({"s": column})).num_rows == len(texts)
