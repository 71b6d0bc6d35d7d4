"""Damaged files, files of other stores, other directories: errors name the file."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from random import Random

import numpy as np
import pyarrow as pa
import pytest

from scalein.errors import BadArgument, Damaged, NewerFormat, ScaleinError, StoreFailed
from scalein.state import LogStore, format
from scalein.state.budget import Budget
from scalein.state.manifest import Manifest
from tests.state.sample_store import KIND, Built, copied, opened
from tests.state.store_model import Content, content_of

FLIPS = int(os.environ.get("SCALEIN_STORE_FLIPS", "6"))  # of each kind of file


def look(path: Path, how: str) -> Content | None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        with opened(path, readonly=True) as store:
            if how == "verify":
                store.verify()
                return None
            if how == "get":
                with opened(path, readonly=True) as other:
                    keys = other.scan().read_all().select(KIND.key.names)
                values = store.get(keys)
                columns = {**dict(zip(keys.column_names, keys.columns, strict=True)),
                           **dict(zip(values.column_names, values.columns, strict=True))}  # fmt: skip
                return content_of(pa.table(columns), KIND.key)
            return content_of(store.scan().read_all(), KIND.key)


def is_found(built: Built, path: Path, how: str, name: str) -> bool:
    """Whether the damage of a file is reported; if not, the content must be that of a snapshot."""
    error: ScaleinError | None = None
    try:
        content = look(path, how)
    except ScaleinError as caught:
        error, content = caught, None
    assert error is None or name in str(error), error
    assert content is None or content in built.contents, f"{name}: wrong content"
    return error is not None


@pytest.mark.parametrize("kind", ["snapshot", "image", "index", "run"])
def test_a_flipped_byte_is_detected(built: Built, tmp_path: Path, kind: str) -> None:
    """An error names the file, or the content is that of an older snapshot; never anything else."""
    random = Random(kind)
    path = copied(built, tmp_path / "s")
    found = 0
    for number in range(FLIPS):
        name = random.choice([name for name in built.names if name.startswith(kind)])
        file = path / name
        raw = bytearray(file.read_bytes())
        at = random.choice([random.randrange(len(raw)), random.randrange(64), len(raw) - 1 - random.randrange(64)])
        raw[at] ^= 1 << random.randrange(8)
        file.write_bytes(raw)
        for how in ("scan", "verify", "get")[: 2 + (number % 4 == 0)]:
            found += is_found(built, path, how, name)
        shutil.copyfile(built.path / name, file)
    assert found or kind == "snapshot"


@pytest.mark.parametrize("kind", ["snapshot", "image", "index", "run"])
@pytest.mark.parametrize("what", ["empty", "cut", "gone", "another", "longer", "zeros"])
def test_missing_truncated_and_exchanged_files_are_detected(built: Built, tmp_path: Path, kind: str, what: str) -> None:
    path = copied(built, tmp_path / "s")
    names = [name for name in built.names if name.startswith(kind)]
    file = path / names[-1]
    size = file.stat().st_size
    if what == "empty":
        os.truncate(file, 0)
    elif what == "cut":
        os.truncate(file, size - 4096 if size > 4096 else 100)
    elif what == "gone":
        file.unlink()
    elif what == "another":
        shutil.copyfile(path / names[0], file)
    elif what == "longer":
        os.truncate(file, size + 4096)
    else:
        file.write_bytes(bytes(size))
    for how in ("scan", "verify"):
        is_found(built, path, how, names[-1])


def test_a_damaged_newest_snapshot_falls_back_with_a_warning(built: Built, tmp_path: Path) -> None:
    path = copied(built, tmp_path / "s")
    name = format.manifest_name(built.ids[-1])
    (path / name).write_bytes(b"\x01" * 4096)
    with pytest.warns(RuntimeWarning, match=name):
        store = opened(path)
    assert content_of(store.scan().read_all(), KIND.key) == built.contents[-2]
    assert len(store) == len(built.contents[-2])
    store.close()
    with opened(path) as store:
        assert content_of(store.scan().read_all(), KIND.key) == built.contents[-2]


def test_a_store_whose_snapshots_are_all_damaged_is_refused(built: Built, tmp_path: Path) -> None:
    path = copied(built, tmp_path / "s")
    for name in built.names:
        if name.startswith("snapshot"):
            (path / name).write_bytes(b"\x01" * 4096)
    with pytest.raises(Damaged, match=format.manifest_name(built.ids[-1])):
        opened(path)
    with pytest.raises(Damaged):  # no new store is created there
        LogStore.open(path, key=KIND.key, value=KIND.value)


# --- other formats, other owners, other directories


Change = Callable[[Manifest], None]


def test_a_newer_format_is_refused(built: Built, tmp_path: Path) -> None:
    path = copied(built, tmp_path / "s")
    name = format.manifest_name(built.ids[-1])
    raw = np.frombuffer(bytearray((path / name).read_bytes()), np.uint8)
    raw[8:12].view("<u4")[0] = 99
    format.seal(raw, built.ids[-1])
    (path / name).write_bytes(raw.tobytes())
    with pytest.raises(NewerFormat, match=name):
        opened(path)
    with pytest.raises(NewerFormat, match=name):
        opened(path, readonly=True)
    assert (path / name).read_bytes() == raw.tobytes()


def test_a_second_writer_is_refused_and_readers_are_not(built: Built, tmp_path: Path) -> None:
    path = copied(built, tmp_path / "s")
    with opened(path):
        with pytest.raises(StoreFailed, match=path.name):
            opened(path)
        code = f"from scalein.state import LogStore\nLogStore.open({str(path)!r})"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False,
                              cwd=Path(__file__).parents[2])  # fmt: skip
        assert done.returncode
        assert "StoreFailed" in done.stderr
        assert str(path) in done.stderr
        with opened(path, readonly=True) as reader:
            assert content_of(reader.scan().read_all(), KIND.key) == built.contents[-1]
    opened(path).close()


def test_a_readonly_store_changes_nothing(built: Built, tmp_path: Path) -> None:
    path = copied(built, tmp_path / "s")
    before = {name: (path / name).read_bytes() for name in sorted(os.listdir(path))}
    with opened(path, readonly=True, budget=Budget(250_000, 1 << 14, 1 << 12)) as store:
        for _ in range(2):
            assert content_of(store.scan().read_all(), KIND.key) == built.contents[-1]
            assert len(store) == len(built.contents[-1])
        for call in (lambda: store.delete(pa.table({"user": ["a"], "day": pa.array([1], pa.date32())})), store.snapshot,
                     store.compact):  # fmt: skip
            with pytest.raises(ScaleinError, match="read-only"):
                call()
    assert {name: (path / name).read_bytes() for name in sorted(os.listdir(path))} == before


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_store_in_a_readonly_directory(built: Built, tmp_path: Path) -> None:
    path = copied(built, tmp_path / "s")
    os.chmod(path, 0o500)
    try:
        with pytest.raises(StoreFailed, match=str(path)):
            opened(path)
        with opened(path, readonly=True) as store:
            assert len(store) == len(built.contents[-1])
    finally:
        os.chmod(path, 0o700)


def test_a_directory_without_a_store(tmp_path: Path) -> None:
    for name in ("_notes.txt", "run-me.sh", "image-of-a-cat.png", "snapshot-plan.txt", "_run-1", "run-1.run", "README"):
        (tmp_path / name).write_text("mine")
    mine = sorted(os.listdir(tmp_path))
    for readonly in (True, False):
        with pytest.raises(StoreFailed, match="no store"):
            LogStore.open(tmp_path, readonly=readonly)
    with pytest.raises(StoreFailed, match="no store"):
        LogStore.open(tmp_path / "none")
    assert not (tmp_path / "none").exists()
    with LogStore.open(tmp_path, key={"k": pa.int64()}, value={"n": pa.int64()}) as store:
        for _ in range(5):
            store.merge(pa.table({"k": [1], "n": [1]}), n="sum")
            store.snapshot().wait()
    with LogStore.open(tmp_path) as store:
        assert len(store) == 1
    assert [name for name in mine if (tmp_path / name).exists() and (tmp_path / name).read_text() == "mine"] == mine
    file = tmp_path / "README"
    with pytest.raises(ScaleinError, match="README"):
        LogStore.open(file, key={"k": pa.int64()}, value={"n": pa.int64()})


def test_opening_with_other_columns_is_refused(built: Built) -> None:
    with pytest.raises(BadArgument, match="user"):
        LogStore.open(built.path, key={"k": pa.int64()}, value=KIND.value)
    with pytest.raises(BadArgument, match="seen"):
        LogStore.open(built.path, key=KIND.key, value={"n": pa.int64()})
    with pytest.raises(StoreFailed, match="no snapshot 999"):
        LogStore.open(built.path, snapshot=999)
    LogStore.open(built.path, key=KIND.key, value=KIND.value, readonly=True).close()
