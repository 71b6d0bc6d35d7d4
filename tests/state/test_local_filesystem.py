"""LocalFileSystem: complete writes and reads, errors that name the file, locks, aligned memory."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from scalein.errors import Damaged, ScaleinError, StoreFailed
from scalein.storage import filesystem as filesystem_module
from scalein.storage import local as local_module
from scalein.storage.filesystem import PAGE, FileSystem, aligned_buffer
from scalein.storage.local import LocalFileSystem

MIB = 1 << 20


@pytest.fixture(autouse=True)
def waits_for_the_disk(real_syncs: dict[str, Callable[[int], None]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages leave the cache when they are on the disk."""
    for name, sync in real_syncs.items():
        monkeypatch.setattr(os, name, sync)


def some_bytes(size: int, seed: int = 0) -> np.ndarray:
    data = aligned_buffer(size)
    data[:] = np.random.default_rng(seed).integers(0, 256, size, np.uint8)
    return data


def written(files: FileSystem, name: str, data: np.ndarray, size_bytes: int = 0) -> None:
    output = files.create(name, size_bytes)
    output.write(0, data)
    output.sync()
    output.close()


def cached_pages(path: Path) -> int:
    """Pages of a file in the page cache, as `mincore` counts them."""
    import ctypes
    import mmap

    size = path.stat().st_size
    with open(path, "rb") as file, mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ) as area:
        view = np.frombuffer(area, np.uint8)
        there = np.zeros(-(-size // PAGE), np.uint8)
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
        assert libc.mincore(view.ctypes.data, size, there.ctypes.data) == 0
        del view
        return int((there & 1).sum())


@pytest.mark.parametrize("size", [0, 1, PAGE, 3 * PAGE + 17, MIB, 3 * MIB + 5])
@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("direct", [True, False])
def test_a_file_is_read_as_it_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, shift: int,
                                          direct: bool) -> None:
    if not direct:
        monkeypatch.setattr(local_module, "DIRECT_BYTES", 1 << 62)
        monkeypatch.setattr(local_module, "UNSYNCED_BYTES", 5 * PAGE)
    data = some_bytes(size + 1)[shift : shift + size]
    files = LocalFileSystem(tmp_path / "store")
    written(files, "a", data, size_bytes=size + 10_000)
    assert os.path.getsize(files.path_of("a")) == size
    found = files.open("a")
    assert found.size == size
    assert found.read(0, size).tobytes() == data.tobytes()
    middle = found.read(size // 3, size - size // 3)
    assert middle.tobytes() == data[size // 3 :].tobytes()
    assert size == 0 or middle.ctypes.data % PAGE == 0
    into = aligned_buffer(size // PAGE * PAGE)
    found.prefetch(0, size)
    found.read_into(0, into.data, direct=True)
    assert into.tobytes() == data[: len(into)].tobytes()
    found.close()
    found.close()


def test_large_writes_bypass_the_page_cache(tmp_path: Path) -> None:
    files = LocalFileSystem(tmp_path)
    data = some_bytes(4 * MIB)
    written(files, "direct", data)
    written(files, "bounced", data[1:])
    written(files, "small", data[: PAGE * 3])
    assert [cached_pages(tmp_path / name) for name in ("direct", "bounced", "small")] == [0, 0, 0]
    found = files.open("direct")
    found.read_into(0, aligned_buffer(4 * MIB).data, direct=True)
    found.read(0, 4 * MIB)
    assert cached_pages(tmp_path / "direct") == 0
    found.read_into(0, aligned_buffer(4 * MIB).data)
    assert cached_pages(tmp_path / "direct") == 1024
    found.drop_cache(0, MIB)
    assert cached_pages(tmp_path / "direct") <= 1024 - 128  # a large folio at the end may remain
    found.drop_cache()
    assert cached_pages(tmp_path / "direct") == 0


def test_writes_are_buffered_where_direct_writes_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = LocalFileSystem(tmp_path)
    data = some_bytes(2 * MIB)
    output = files.create("a")
    pwrite = os.pwrite

    def refusing(fd: int, part: memoryview, offset: int) -> int:
        if fd == output._direct:
            raise OSError(errno.EINVAL, "no")
        return pwrite(fd, part, offset)

    monkeypatch.setattr(os, "pwrite", refusing)
    output.write(0, data)
    output.sync()
    output.close()
    assert files.open("a").read(0, len(data)).tobytes() == data.tobytes()


def test_short_writes_and_reads_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pwrite, preadv = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: pwrite(fd, data[: max(1, len(data) // 3)], at))
    monkeypatch.setattr(os, "preadv", lambda fd, into, at: preadv(fd, [into[0][: max(1, len(into[0]) // 3)]], at))
    files = LocalFileSystem(tmp_path)
    data = some_bytes(MIB + 3)
    written(files, "a", data)
    found = files.open("a")
    assert found.read(0, MIB + 3).tobytes() == data.tobytes()
    into = aligned_buffer(MIB)
    found.read_into(0, into.data, direct=True)
    assert into.tobytes() == data[:MIB].tobytes()


def test_an_open_file_stays_readable_after_it_is_removed_or_replaced(tmp_path: Path) -> None:
    files = LocalFileSystem(tmp_path)
    written(files, "a", some_bytes(MIB, 1))
    old = files.open("a")
    written(files, "a", some_bytes(MIB, 2))
    files.remove("a")
    into = aligned_buffer(MIB)
    old.read_into(0, into.data, direct=True)
    assert old.read(0, MIB).tobytes() == into.tobytes() == some_bytes(MIB, 1).tobytes()


def test_a_rename_replaces_the_target(tmp_path: Path) -> None:
    files = LocalFileSystem(tmp_path / "deep" / "store")
    for name in ("b", "_c"):
        written(files, name, some_bytes(10))
    files.rename("_c", "b")
    files.sync_directory()
    assert files.names() == ["b"]


@pytest.mark.parametrize(("size", "offset"), [(11, 0), (1, 10), (1 << 62, 5)])
def test_reading_after_the_end_of_a_file_is_damage(tmp_path: Path, size: int, offset: int) -> None:
    files = LocalFileSystem(tmp_path)
    written(files, "run", some_bytes(10))
    with pytest.raises(Damaged, match="ends too early") as caught:
        files.open("run").read(offset, size)
    assert caught.value.facts["file"] == files.path_of("run")
    cut = files.open("run")
    os.truncate(files.path_of("run"), 3)
    with pytest.raises(Damaged, match="ends too early"):
        cut.read(0, 10)


REFUSALS: dict[str, tuple[int, Callable[[FileSystem], object]]] = {
    "open": (errno.ENOENT, lambda files: files.open("a")),
    "rename": (errno.ENOENT, lambda files: files.rename("a", "b")),
    "remove": (errno.ENOENT, lambda files: files.remove("a")),
    "create": (errno.ENOENT, lambda files: files.create("no/such")),
    "a folder": (errno.EISDIR, lambda files: files.create("folder")),
}


@pytest.mark.parametrize("what", REFUSALS)
def test_errors_of_the_system_name_the_file(tmp_path: Path, what: str) -> None:
    (tmp_path / "folder").mkdir()
    number, call = REFUSALS[what]
    with pytest.raises(StoreFailed, match=os.strerror(number)) as caught:
        call(LocalFileSystem(tmp_path))
    assert caught.value.facts["error"] == errno.errorcode[number]
    assert caught.value.facts["file"].startswith(str(tmp_path))


@pytest.mark.parametrize("call", ["pwrite", "fdatasync", "preadv", "posix_fallocate"])
@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_errors_of_the_disk_name_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str,
                                          number: int) -> None:
    files = LocalFileSystem(tmp_path)
    written(files, "old", some_bytes(PAGE))

    def failing(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, call, failing)
    reading = lambda: files.open("old").read(0, PAGE)  # noqa: E731
    writing = lambda: written(files, "new", some_bytes(PAGE), size_bytes=PAGE)  # noqa: E731
    with pytest.raises(StoreFailed, match=os.strerror(number)) as caught:
        (reading if call == "preadv" else writing)()
    assert caught.value.facts["file"] == files.path_of("old" if call == "preadv" else "new")
    assert caught.value.hint
    assert ("new" in files.names()) == (call in ("pwrite", "fdatasync"))


def test_a_full_disk_is_reported_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(StoreFailed) as caught:
        LocalFileSystem(tmp_path).create("a", size_bytes=1 << 55)
    assert caught.value.facts["error"] in ("ENOSPC", "EFBIG")
    assert os.listdir(tmp_path) == []


def test_a_readonly_file_system_is_not_written(tmp_path: Path) -> None:
    written(LocalFileSystem(tmp_path), "a", some_bytes(10))
    files = LocalFileSystem(tmp_path, readonly=True)
    assert files.open("a").size == 10
    calls: list[Callable[[], object]] = [
        lambda: files.create("b"), lambda: files.rename("a", "b"), lambda: files.remove("a"), files.lock]  # fmt: skip
    for call in calls:
        with pytest.raises(StoreFailed, match="readonly"):
            call()
    assert files.names() == ["a"]


def test_a_path_that_is_not_a_directory_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    for path, readonly in ((tmp_path / "file", False), (tmp_path / "file" / "x", False), (tmp_path / "none", True)):
        with pytest.raises(StoreFailed, match="directory") as caught:
            LocalFileSystem(path, readonly)
        assert caught.value.facts["file"] == str(path)


def test_other_platforms_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(StoreFailed, match="runs on Linux only"):
        LocalFileSystem(tmp_path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_an_unwritable_directory_is_reported(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(StoreFailed, match="Permission denied"):
            LocalFileSystem(tmp_path).create("a")
    finally:
        tmp_path.chmod(0o700)


def test_the_directory_lock_is_exclusive(tmp_path: Path) -> None:
    held = LocalFileSystem(tmp_path).lock()
    with pytest.raises(ScaleinError, match="open in another process") as caught:
        LocalFileSystem(tmp_path).lock()
    assert caught.value.facts["owner"] == "this process"
    assert caught.value.facts["file"] == str(tmp_path)
    held.release()
    held.release()
    LocalFileSystem(tmp_path).lock().release()


def test_the_lock_error_names_the_owning_process(tmp_path: Path) -> None:
    code = ("import sys; from scalein.storage.local import LocalFileSystem; "
            "lock = LocalFileSystem(sys.argv[1]).lock(); print(); input()")
    root = Path(__file__).parents[2]
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                          cwd=root) as other:  # fmt: skip
        assert other.stdout is not None
        other.stdout.readline()
        with pytest.raises(StoreFailed, match="open in another process") as caught:
            LocalFileSystem(tmp_path).lock()
        assert caught.value.facts["owner"] == f"process {other.pid}"
        other.kill()
    LocalFileSystem(tmp_path).lock().release()  # the lock of a killed process is released


def test_running_out_of_memory_is_not_a_file_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object, **__: object) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(filesystem_module.mmap, "mmap", none)
    with pytest.raises(MemoryError):
        aligned_buffer(filesystem_module.MAPPED_BYTES)
