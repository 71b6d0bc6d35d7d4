"""The code cache: hits, and everything that may be wrong with its folder or files. It never raises."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest

import scalein as si
from scalein import col
from scalein.ir.stages import Stage
from scalein.kernels import call
from scalein.llvm_backend import cache
from scalein.llvm_backend.cache import Compiled
from scalein.options import Options

TABLE = pa.table({"k": ["a", "b", "a"], "x": [1, 2, 3]})
Run = Callable[[object], list[str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs a flow in what is, for the cache, a new process; where each of its kernels came from."""

    def once(folder: object) -> list[str]:
        origins: list[str] = []

        def recorded(stage: Stage, options: Options) -> Compiled:
            known = set(cache._known.values())
            found = cache.load_kernel(stage, options)
            origins.append("memory" if found in known else found.origin)
            return found

        monkeypatch.setenv("SCALEIN_CACHE_DIR", str(folder))
        monkeypatch.setattr(cache, "_known", OrderedDict())
        cache._target.cache_clear()
        monkeypatch.setattr(call, "load_kernel", recorded)
        for _ in range(2):  # a flow that was run before would not ask for its kernels again
            flow = si.from_arrow(TABLE).filter(col("x") != 2).group_by("k").agg(s=(col("x") + 1).sum())
            assert flow.collect(workers=1).to_pylist() == [{"k": "a", "s": 6}]
        return origins

    return once


def _files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.kernel"))


def test_first_compiled_then_from_memory_and_from_disk(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "not" / "there yet"
    first = run(folder)
    half = len(first) // 2
    assert set(first[:half]) == {"compiled"}
    assert set(first[half:]) == {"memory"}
    again = run(folder)
    assert set(again[:half]) == {"disk"}
    assert set(again[half:]) == {"memory"}
    assert len(_files(folder)) == half
    assert set(os.listdir(folder)) == {"native.target", *(file.name for file in _files(folder))}  # all of them whole
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {file.stat().st_mode & 0o777 for file in _files(folder)} == {0o600}


def test_no_folder_means_memory_only(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "disk" not in run("") + run("")
    assert not list(tmp_path.iterdir())


def _flipped(content: bytes) -> bytes:
    return content[:-7] + bytes([content[-7] ^ 1]) + content[-6:]


def _signed(body: bytes) -> bytes:
    """A body that the checksum says is whole."""
    return cache._MAGIC + hashlib.sha256(body).hexdigest().encode() + body


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda content: b"",
    "cut in the head": lambda content: content[:40],
    "cut at the end": lambda content: content[:-1],
    "one bit": _flipped,
    "another magic": lambda content: b"X" + content[1:],
    "longer": lambda content: content + b"\0",
    "no ascii": lambda content: b"\xff" * len(content),
    "no line": lambda content: _signed(b"{}"),
    "no json": lambda content: _signed(b"{\n" + content),
    "another json": lambda content: _signed(b"[1]\n" + content),
    "fields missing": lambda content: _signed(
        json.dumps({"name": "group", "slots": []}).encode() + b"\n" + content[-4000:]
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_files_are_compiled_again(run: Run, tmp_path: Path, damage: str) -> None:
    run(tmp_path)
    whole = {file: file.read_bytes() for file in _files(tmp_path)}
    for file, content in whole.items():
        file.write_bytes(DAMAGE[damage](content))
    assert "disk" not in run(tmp_path)
    assert {file.read_bytes()[: len(cache._MAGIC)] for file in whole} == {cache._MAGIC}
    assert "disk" in run(tmp_path)  # they have been written anew


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
def test_files_that_others_may_write_are_not_used(run: Run, tmp_path: Path, mode: int) -> None:
    run(tmp_path)
    for file in _files(tmp_path):
        file.chmod(mode)
    assert "disk" not in run(tmp_path)


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777, 0o1777])
def test_a_folder_that_others_may_write_is_not_used(run: Run, tmp_path: Path, mode: int) -> None:
    folder = tmp_path / "shared"
    run(folder)
    before = {file.name: file.stat().st_mtime_ns for file in _files(folder)}
    folder.chmod(mode)
    assert "disk" not in run(folder)
    assert before == {file.name: file.stat().st_mtime_ns for file in _files(folder)}


def test_what_belongs_to_somebody_else_is_not_used(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(tmp_path)
    me = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: me + 1)
    assert "disk" not in run(tmp_path)


def test_links_are_not_followed_to_code(run: Run, tmp_path: Path) -> None:
    real, folder = tmp_path / "real", tmp_path / "cache"
    run(real)
    folder.mkdir(mode=0o700)
    for file in _files(real):
        (folder / file.name).symlink_to(file)
    assert "disk" not in run(folder)


def test_folders_that_cannot_be(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "a file"
    file.write_text("x")
    closed = tmp_path / "read only"
    closed.mkdir(mode=0o500)
    for folder in (
        file,
        file / "below",
        closed / "below",
        "/proc/none",
        "/dev/null",
        tmp_path / ("x" * 300),
        tmp_path / "\udcff" / "x",
    ):
        assert set(run(folder)) <= {"compiled", "memory", "disk"}

    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", refuse)
    full = tmp_path / "full disk"
    assert "disk" not in run(full)
    assert not list(full.iterdir())


def test_another_version_or_cpu_is_another_kernel(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(tmp_path)
    count = len(_files(tmp_path))
    monkeypatch.setenv("SCALEIN_CPU", "x86-64")
    assert "disk" not in run(tmp_path)
    monkeypatch.delenv("SCALEIN_CPU")
    for name in ("_code_version", "_version_now"):
        monkeypatch.setattr(cache, name, lambda: "another")
    assert "disk" not in run(tmp_path)
    assert len(_files(tmp_path)) == 3 * count


def test_the_version_is_that_of_the_files_that_were_imported() -> None:
    """Files that changed between import and first kernel would give old kernels a new version's name, for ever."""
    program = "from scalein.llvm_backend import cache; print(cache._code_version.cache_info().currsize)"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout == "1\n"


PROGRAM = """
import sys
import pyarrow as pa, scalein as si
from scalein import col
from scalein.llvm_backend import cache
table = pa.table({"k": [f"a key of some length {n % 7}" for n in range(5000)], "x": range(5000)})
flow = si.from_arrow(table).filter(col("x") % 3 != 0).group_by("k").agg(n=si.count(), s=col("x").sum())
found = flow.collect(workers=2)
print(sum(found["s"].to_pylist()), {kernel.origin for kernel in cache._known.values()},
      {"scalein.llvm_backend.stage", "llvmlite.binding"} & set(sys.modules))
"""


def _start(folder: Path) -> subprocess.Popen[str]:
    environment = {**os.environ, "SCALEIN_CACHE_DIR": str(folder)}
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM], env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def test_many_processes_at_once(tmp_path: Path) -> None:
    total = sum(x for x in range(5000) if x % 3)
    for _ in range(2):
        started = [_start(tmp_path) for _ in range(4)]
        for process in started:
            out, err = process.communicate(timeout=60)
            assert process.returncode == 0, err
            assert out.startswith(f"{total} "), out
    assert out.split()[1:] == ["{'disk'}", "set()"]  # a warm start compiles nothing, and does not load LLVM
    assert {path.suffix for path in tmp_path.iterdir()} == {".kernel", ".target"}


@pytest.mark.parametrize("change", [
    lambda content: _signed(json.dumps(["another machine", "triple", "cpu", "features"]).encode()),
    _flipped, lambda content: b""], ids=["another machine", "damaged", "empty"])  # fmt: skip
def test_the_cpu_is_found_again(run: Run, tmp_path: Path, change: Callable[[bytes], bytes]) -> None:
    """A folder may be shared by machines with different CPUs, and a machine may get another one."""
    run(tmp_path)
    file = tmp_path / "native.target"
    whole = file.read_bytes()
    file.write_bytes(change(whole))
    assert set(run(tmp_path)) == {"disk", "memory"}
    assert file.read_bytes() == whole


def test_what_the_cpu_is_called_is_remembered(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(tmp_path)

    def refuse(cpu: str) -> None:
        raise AssertionError("LLVM was asked for the CPU again")

    monkeypatch.setattr(cache, "target_for", refuse)
    assert set(run(tmp_path)) == {"disk", "memory"}


def _kernel_files(folder: Path, count: int, size: int) -> list[Path]:
    """Files in the order of their age, the oldest first."""
    files = [folder / f"{k:064x}.kernel" for k in range(count)]
    for k, file in enumerate(files):
        file.write_bytes(bytes(size))
        os.utime(file, (1_000_000 + k, 1_000_000 + k))
    return files


def test_the_folder_is_trimmed_by_age(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = _kernel_files(tmp_path, 10, 100_000)
    run(tmp_path)
    assert all(file.exists() for file in old)  # far below 256 MB
    monkeypatch.setattr(cache, "MAX_BYTES", 800_000)
    monkeypatch.setattr(cache, "TRIM_EVERY", 1)
    written = set(_files(tmp_path)) - set(old)
    for file in written:
        file.unlink()
    assert "compiled" in run(tmp_path)
    left = [file for file in old if file.exists()]
    assert left == old[-len(left):]
    assert 2 <= len(left) <= 6
    assert written <= set(_files(tmp_path))  # the newest stay
    assert sum(file.stat().st_size for file in _files(tmp_path)) <= 800_000


def test_a_kernel_that_is_used_is_young_again(run: Run, tmp_path: Path) -> None:
    run(tmp_path)
    for file in _files(tmp_path):
        os.utime(file, (1_000_000, 1_000_000))
    assert "disk" in run(tmp_path)
    assert all(file.stat().st_mtime > 2_000_000 for file in _files(tmp_path))


def test_trimming_removes_what_was_never_finished_and_nothing_else(tmp_path: Path) -> None:
    _kernel_files(tmp_path, 3, 10)
    for name in ("unfinished-old", "unfinished-new", "notes.txt"):
        (tmp_path / name).write_bytes(b"x")
    os.utime(tmp_path / "unfinished-old", (1_000_000, 1_000_000))
    os.utime(tmp_path / "notes.txt", (1_000_000, 1_000_000))
    cache.trim(str(tmp_path))
    assert sorted(os.listdir(tmp_path))[-2:] == ["notes.txt", "unfinished-new"]
    assert len(_files(tmp_path)) == 3


def test_many_processes_trim_at_once(tmp_path: Path) -> None:
    _kernel_files(tmp_path, 400, 1000)
    program = ("import sys; from scalein.llvm_backend import cache; cache.MAX_BYTES = 100_000\n"
               "for _ in range(20): cache.trim(sys.argv[1])")
    children = [subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stderr=subprocess.PIPE, text=True)
                for _ in range(3)]  # fmt: skip
    assert [child.communicate()[1] for child in children] == [""] * 3
    assert len(_files(tmp_path)) == 75


def test_trimming_never_raises(tmp_path: Path) -> None:
    cache.trim(str(tmp_path / "not there"))
    (tmp_path / "file").write_bytes(b"")
    cache.trim(str(tmp_path / "file"))


@pytest.mark.parametrize("name", ["ir/exprs.py", "ir/passes/fuse.py", "llvm_backend/functions/casts.py", "layout.py",
                                  "llvm_backend/parquet/snappy.py", "kernels/specialise.py", "dtypes.py"])  # fmt: skip
def test_the_version_covers_what_shapes_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    package = Path(cache.__file__).parent.parent
    for path in package.rglob("*.py"):
        copy = tmp_path / "scalein" / path.relative_to(package)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.touch()
    monkeypatch.setattr(cache, "__file__", str(tmp_path / "scalein" / "llvm_backend" / "cache.py"))
    before = cache._version_now()
    assert cache._version_now() == before
    (tmp_path / "scalein" / name).write_text("changed")
    assert cache._version_now() != before
