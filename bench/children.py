"""Processes with one state store each, watched from outside: what they measured, and the memory that they took.

Memory is what the process has of its own (RssAnon and RssShmem), and what the page cache has of the store's files,
mapped or not; a file that was removed and is still open is not seen. With --bench-cgroup it is also what the kernel
counts for the process's own memory cgroup, and a rival is limited by it.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.yardsticks import cached_bytes

ROOT = Path(__file__).parent.parent
SAMPLE_S = 0.2  # looking through the page cache takes milliseconds of a core that the child could use


@dataclass
class Outcome:
    """A child's figures, and the most memory it took beyond what it had when it was ready."""

    figures: dict[str, float]
    peak_bytes: int = 0
    peak_phase: str = ""
    peak_own_bytes: int = 0
    peak_cached_bytes: int = 0
    cgroup_peak_bytes: int | None = None

    def memory(self) -> dict[str, object]:
        facts: dict[str, object] = {f"peak_in_{self.peak_phase}_mb": self.peak_bytes >> 20,
                                    "own_peak_mb": self.peak_own_bytes >> 20,
                                    "page_cache_peak_mb": self.peak_cached_bytes >> 20}  # fmt: skip
        return facts if self.cgroup_peak_bytes is None else {**facts, "cgroup_peak_mb": self.cgroup_peak_bytes >> 20}


@dataclass
class Cgroup:
    """A memory cgroup of one child; v1 and v2 differ in the names of their files."""

    folder: Path
    limit_over: int | None = None  # bytes beyond what the child has when it is ready
    ready_bytes: int = field(default=0, init=False)

    def usage(self) -> int:
        return int(self._file("memory.current", "memory.usage_in_bytes").read_text())

    def ready(self) -> None:
        self.ready_bytes = self.usage()
        if self.limit_over is not None:
            limit = str(self.ready_bytes + self.limit_over)
            self._file("memory.max", "memory.limit_in_bytes").write_text(limit)

    def enter(self) -> None:
        """Called by the child before it becomes another program."""
        (self.folder / "cgroup.procs").write_text(str(os.getpid()))

    def _file(self, *names: str) -> Path:
        return next(self.folder / name for name in names if (self.folder / name).exists())


@contextmanager
def cgroup(parent: Path | None, limit_over: int | None) -> Iterator[Cgroup | None]:
    if parent is None:
        yield None
        return
    folder = parent / f"scalein-bench-{os.getpid()}"
    folder.mkdir()
    try:
        yield Cgroup(folder, limit_over)
    finally:
        folder.rmdir()


def run_child(c: ctypes.CDLL, job: dict[str, Any], *, cache: Path, parent_cgroup: Path | None = None,
              limit_over: int | None = None) -> Outcome:
    """Run a job of `bench.state_child` to its end; its folder's page cache counts."""
    with cgroup(parent_cgroup, limit_over) as group:
        child = subprocess.Popen([sys.executable, "-m", "bench.state_child", json.dumps(job)], cwd=ROOT, text=True,
                                 stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                 preexec_fn=None if group is None else group.enter,
                                 env={**os.environ, "SCALEIN_CACHE_DIR": str(cache)})
        try:
            return _watch(child, Path(job["folder"]), c, group)
        finally:
            child.kill()
            child.wait()


def _watch(child: subprocess.Popen[str], folder: Path, c: ctypes.CDLL, group: Cgroup | None) -> Outcome:
    assert child.stdin is not None
    assert child.stdout is not None
    said = [child.stdout.readline().strip()]
    assert said[0] == "ready", f"the child ended before it was ready: {said[0]!r}"
    before, cached_before = own_bytes(child.pid), cached_bytes(c, folder)
    outcome = Outcome({})
    if group is not None:
        group.ready()
        outcome.cgroup_peak_bytes = 0
    reader = threading.Thread(target=lambda: said.extend(line.strip() for line in child.stdout or ()), daemon=True)
    reader.start()
    child.stdin.write("\n")
    child.stdin.flush()
    while reader.is_alive():
        own, cached = own_bytes(child.pid) - before, cached_bytes(c, folder) - cached_before
        if own + cached > outcome.peak_bytes:
            outcome.peak_bytes, outcome.peak_phase = own + cached, said[-1]
        outcome.peak_own_bytes = max(outcome.peak_own_bytes, own)
        outcome.peak_cached_bytes = max(outcome.peak_cached_bytes, cached)
        if group is not None and outcome.cgroup_peak_bytes is not None:
            outcome.cgroup_peak_bytes = max(outcome.cgroup_peak_bytes, group.usage() - group.ready_bytes)
        time.sleep(SAMPLE_S)
    assert child.wait() == 0, f"a child failed in phase {said[-1]!r}"
    outcome.figures = json.loads(said[-1])
    return outcome


def own_bytes(pid: int) -> int:
    """Memory that belongs to a process alone; 0 if it is gone."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return sum(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith(("RssAnon:", "RssShmem:")))


def drop_page_cache(folder: Path) -> None:
    """Write a folder's files to disk, and forget what the page cache has of them."""
    for path in folder.rglob("*"):
        if path.is_file():
            file = os.open(path, os.O_RDONLY)
            os.fsync(file)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(file)
