"""Jobs that die: processes that end at a step of the epoch protocol, or whenever it comes to it, and begin again.

    python -m tests.jobs.dying steps FOLDER MOST      one death at each kind of step, and one more while recovering;
                                                      at most so many kinds, others each day
    python -m tests.jobs.dying kills FOLDER ROUNDS    SIGKILL at random, with changes of the workers in between

This process only forks, so that each life begins with everything imported. Prints what it did; fails loudly.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

import scalein as si
from scalein import col
from scalein.api.flow import Flow
from scalein.connectors.sinks.files import FileSink
from scalein.jobs.checkpoint import Checkpoint
from scalein.jobs.job import Job
from scalein.state import LogStore
from scalein.state.row_buffer import RowBuffer
from tests.same import assert_same

ROWS, BATCH = 3_000, 60


def rows() -> pa.Table:
    """Some of them twice."""
    rng = np.random.default_rng(3)
    return pa.table({"id": rng.integers(0, ROWS // 2, ROWS), "k": [f"key {k}" for k in rng.integers(0, 5, ROWS)],
                     "t": pa.array(np.arange(ROWS) + rng.integers(0, 50, ROWS), pa.timestamp("ms")),
                     "x": rng.integers(0, 100, ROWS)})  # fmt: skip


def with_late_rows() -> pa.Table:
    times = rows().column("t").to_numpy().astype(np.int64)
    times[::37] = np.maximum(times[::37] - 500, 0)
    return rows().set_column(2, "t", pa.array(times, pa.timestamp("ms")))


class Slow:
    """The rows in batches, one every so many seconds; an offset is a number of batches."""

    def __init__(self, pause_s: float) -> None:
        self._batches, self._pause_s = with_late_rows().to_batches(max_chunksize=BATCH), pause_s
        self.schema = self._batches[0].schema

    def partitions(self) -> list[str]:
        return ["all"]

    def read(self, partition: str, offset: Any) -> Iterator[tuple[pa.RecordBatch, Any]]:
        for number in range(offset or 0, len(self._batches)):
            time.sleep(self._pause_s)
            yield self._batches[number], number + 1


OUTPUTS = ("out", "fresh", "late")


def fresh(source: Flow) -> Flow:
    """Keys in a store, and rows as they are."""
    return source.with_watermark("t", "60ms").distinct("id")


def flow(source: Flow) -> Flow:
    """The same, and windows in a log."""
    return fresh(source).group_by("k", si.tumbling("t", "100ms")).agg(n=si.count(), total=col("x").sum())


def start(folder: Path, pause_s: float, workers: int = 2) -> Job:
    """Both outputs share the keys."""
    source = si.from_source(Slow(pause_s))
    rows = fresh(source).filter(col("x") > 50)
    return si.start(flow(source).to(si.to_ipc(folder / "out")), rows.to(si.to_ipc(folder / "fresh")),
                    late=si.to_ipc(folder / "late"), checkpoint=folder / "checkpoint", every="1ms", workers=workers)


def output(folder: Path, name: str) -> pa.Table:
    return pa.concat_tables([pa.ipc.open_file(part).read_all() for part in sorted((folder / name).glob("part-*"))])


def whole(folder: Path, pause_s: float) -> None:
    """A life to the end."""
    job = start(folder, pause_s)
    job.wait()
    assert job.metrics()["rows_in"] == ROWS, job.metrics()


def check(folder: Path, undisturbed: Path) -> None:
    """In the directories is every row, once: what a job gave that lived to its end."""
    for name in OUTPUTS:
        assert_same(output(folder, name), output(undisturbed, name))
    left = sorted(path.name for path in folder.rglob("_*"))
    assert left == ["_owner"] * len(OUTPUTS), left


def life(what: Callable[[], None]) -> int:
    """A process of its own; gives its pid."""
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    try:
        what()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)


def status_of(pid: int) -> int:
    """How a process ended, as `os.waitpid` says it; one that hangs is ended. While this process is suspended, the other
    one may be as well: that is no time in which it hangs.
    """
    for _ in range(60_000 // 2):
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return status
        time.sleep(0.002)
    os.kill(pid, signal.SIGABRT)  # faulthandler shows where it hangs
    os.waitpid(pid, 0)
    raise SystemExit("a job hangs")


def died(pid: int) -> bool:
    """Whether a process was killed; it must not have failed."""
    status = status_of(pid)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL, status
        return True
    if os.waitstatus_to_exitcode(status):
        raise SystemExit("a job failed")
    return False


# --- steps


class Steps:
    """Every call that changes a file below a folder, and the borders of the protocol's own steps, in order."""

    def __init__(self, folder: Path, on_step: Callable[[str], None]) -> None:
        self._folder, self._on_step = str(folder), on_step
        for owner, name in ((FileSink, "prepare"), (FileSink, "commit"), (Checkpoint, "publish"),
                            (LogStore, "snapshot"), (RowBuffer, "to_json")):  # fmt: skip
            self._wrap(owner, name, f"{owner.__name__}.{name}")
        for name in ("fsync", "fdatasync"):
            self._wrap(os, name, f"os.{name}")
        sys.addaudithook(self._audit)

    def _wrap(self, owner: Any, name: str, label: str) -> None:
        real = getattr(owner, name)

        def wrapped(*args: Any, **named: Any) -> Any:
            about = label
            if owner is os:
                about = f"{label} {self._short(os.readlink(f'/proc/self/fd/{args[0]}'))}"
            self._on_step(f"before {about}")
            found = real(*args, **named)
            self._on_step(f"after {about}")
            return found

        setattr(owner, name, wrapped)

    def _audit(self, event: str, args: tuple[Any, ...]) -> None:
        if event in ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate"):
            path = str(args[1] if event == "os.rename" else args[0])
            if self._folder in path:
                self._on_step(f"{event} {self._short(path)}")

    def _short(self, path: str) -> str:
        return re.sub(r"[0-9a-f]{8}-\d+|\d+", "N", path.removeprefix(self._folder))


def kinds_of_steps(folder: Path, begin: Callable[[], None]) -> Counter[str]:
    """How often each kind of step happens in a life that ends well."""
    seen = folder / "steps"

    def run() -> None:
        found: Counter[str] = Counter()
        Steps(folder, lambda label: found.update([label]))
        begin()
        seen.write_text("\n".join(found.elements()))

    assert not died(life(run))
    return Counter(seen.read_text().splitlines())


def dies_at(folder: Path, label: str, number: int) -> None:
    """From here on, this process ends before some step, the `number`th of its kind ("": of any)."""
    left = [number]

    def on_step(found: str) -> None:
        if label in ("", found):
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    Steps(folder, on_step)


def steps(folder: Path, most: int, seed: int) -> None:
    rng = random.Random(seed)
    pause_s, deaths = 0.003, 0
    first = folder / "first"
    first.mkdir(parents=True)
    kinds = kinds_of_steps(first, lambda: whole(first, pause_s))
    chosen = sorted(kinds.items())
    if most < len(chosen):
        chosen = rng.sample(chosen, most)
    for number, (label, count) in enumerate(chosen):
        place = folder / f"step-{number}"
        place.mkdir()

        def ends(at: int = rng.randint(1, count), label: str = label, place: Path = place) -> None:
            dies_at(place, label, at)
            whole(place, pause_s)

        def ends_again(at: int = rng.randint(1, 60), place: Path = place) -> None:
            dies_at(place, "", at)
            whole(place, pause_s)

        def goes_on(place: Path = place) -> None:
            whole(place, pause_s)
            check(place, first)

        deaths += died(life(ends)) + died(life(ends_again))
        assert not died(life(goes_on)), label
        shutil.rmtree(place)
    print(f"{len(chosen)} of {len(kinds)} kinds of steps, {deaths} deaths")


# --- kills


def kills(folder: Path, rounds: int, seed: int) -> None:
    rng = random.Random(seed)
    place, first, killed, jobs = folder / "job-0", folder / "first", 0, 0
    first.mkdir(parents=True)
    assert not died(life(lambda: whole(first, 0.001)))
    while killed < rounds:
        place.mkdir(parents=True, exist_ok=True)
        changes = [rng.randint(1, 4) for _ in range(20)]

        has_begun, begin = os.pipe()

        def live(place: Path = place, changes: list[int] = changes, begin: int = begin) -> None:
            job = start(place, 0.01, workers=changes[0])
            os.close(begin)
            while job.is_active:
                job.scale(changes[0])
                changes.append(changes.pop(0))
                job.wait(0.02)
            job.wait()

        pid = life(live)
        os.close(begin)
        if rng.random() < 0.8:  # else while it opens
            os.read(has_begun, 1)
        os.close(has_begun)
        end = time.monotonic() + rng.choice([rng.uniform(0, 0.05), rng.uniform(0, 0.3), rng.uniform(0, 1)])
        while time.monotonic() < end and not is_over(pid):
            time.sleep(0.002)
        if not is_over(pid):
            os.kill(pid, signal.SIGKILL)
        if died(pid):
            killed += 1
            continue
        assert not died(life(lambda place=place: check(place, first)))  # type: ignore[misc]
        shutil.rmtree(place)
        jobs += 1
        place = folder / f"job-{jobs}"
    if place.exists():
        assert not died(life(lambda: whole(place, 0)))
        assert not died(life(lambda: check(place, first)))
        jobs += 1
    print(f"{killed} kills in {jobs} jobs")


def is_over(pid: int) -> bool:
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


if __name__ == "__main__":
    import faulthandler

    faulthandler.enable()
    what, where, *more = sys.argv[1:]
    begin = steps if what == "steps" else kills
    begin(Path(where), int(more[0]), int(os.environ.get("SCALEIN_SEED", int(time.time()) // 86_400)))
