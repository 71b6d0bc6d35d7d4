"""Processes with one state store each, watched from outside: what they measured, and the memory that they took.

Memory is what the process has of its own (RssAnon and RssShmem), and what the page cache has of the store's files,
mapped or not; a file that was removed and is still open is not seen. With --bench-cgroup it is also what the kernel
counts for the process's own memory cgroup, and a rival is limited by it.

Children can take turns, so that a noisy neighbour meets both sides of a comparison: who waits for its next turn is
suspended, with its threads, so that it neither disturbs the other nor goes on with work that it put off.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
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
def cgroup(parent: Path | None, name: str, limit_over: int | None) -> Iterator[Cgroup | None]:
    if parent is None:
        yield None
        return
    folder = parent / f"scalein-bench-{os.getpid()}-{name}"
    folder.mkdir()
    try:
        yield Cgroup(folder, limit_over)
    finally:
        folder.rmdir()


class Child:
    """A process that does a job of `bench.state_child`, suspended but for its turns; its folder's page cache counts."""

    def __init__(self, c: ctypes.CDLL, job: dict[str, Any], cache: Path, group: Cgroup | None) -> None:
        self._c, self._folder, self._group = c, Path(job["folder"]), group
        self._process = subprocess.Popen([sys.executable, "-m", "bench.state_child", json.dumps(job)], cwd=ROOT,
                                         text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                         preexec_fn=None if group is None else group.enter,
                                         env={**os.environ, "SCALEIN_CACHE_DIR": str(cache)})
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        said = self._stdout.readline().strip()
        assert said == "ready", f"the child ended before it was ready: {said!r}"
        self._before, self._cached_before = own_bytes(self._process.pid), cached_bytes(c, self._folder)
        self._phase = ""
        self.outcome = Outcome({}, cgroup_peak_bytes=None if group is None else 0)
        if group is not None:
            group.ready()
        self._process.send_signal(signal.SIGSTOP)

    def take_turn(self) -> bool:
        """Let it go on to its next turn, or to its end; whether there is a next one."""
        said: list[str] = []

        def listen() -> None:
            while (line := self._stdout.readline()) and line != "turn\n":
                said.append(line.strip())
                self._phase = said[-1]
            if not line:
                said.append("")  # it ended

        self._process.send_signal(signal.SIGCONT)
        self._stdin.write("\n")
        self._stdin.flush()
        listener = threading.Thread(target=listen, daemon=True)
        listener.start()
        while listener.is_alive():
            self._look()
            listener.join(SAMPLE_S)
        if not said or said[-1]:
            self._process.send_signal(signal.SIGSTOP)
            return True
        assert self._process.wait() == 0, f"a child failed: {said}"
        self.outcome.figures = json.loads(said[-2])
        return False

    def _look(self) -> None:
        own, cached = own_bytes(self._process.pid) - self._before, cached_bytes(self._c, self._folder)
        cached -= self._cached_before
        outcome = self.outcome
        if own + cached > outcome.peak_bytes:
            outcome.peak_bytes, outcome.peak_phase = own + cached, self._phase
        outcome.peak_own_bytes = max(outcome.peak_own_bytes, own)
        outcome.peak_cached_bytes = max(outcome.peak_cached_bytes, cached)
        if self._group is not None and outcome.cgroup_peak_bytes is not None:
            outcome.cgroup_peak_bytes = max(outcome.cgroup_peak_bytes, self._group.usage() - self._group.ready_bytes)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


@contextmanager
def child(c: ctypes.CDLL, job: dict[str, Any], *, cache: Path, parent_cgroup: Path | None = None,
          limit_over: int | None = None) -> Iterator[Child]:
    name = Path(job["folder"]).name
    with cgroup(parent_cgroup, name, limit_over) as group:
        one = Child(c, job, cache, group)
        try:
            yield one
        finally:
            one.kill()


def run_child(c: ctypes.CDLL, job: dict[str, Any], cache: Path) -> Outcome:
    """Run a job to its end."""
    with child(c, job, cache=cache) as one:
        while one.take_turn():
            pass
        return one.outcome


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
