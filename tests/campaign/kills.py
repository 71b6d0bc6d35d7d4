"""Jobs killed at random: whatever the shapes, kills and rescales, they commit the rows of `collect` in the end.

    python -m tests.campaign.kills --kills 1000 --seed 1      # so many kills with SIGKILL, over jobs of all shapes
    python -m tests.campaign.kills --seed 1 --only 17         # its 17th job again; kills come at other times

A job has one to three outputs, each a shape of `tests/conformance`, over one source of some partitions. Each life runs
with its own number of workers, is scaled and asked for snapshots meanwhile, and is killed after a random time; the last
one lives to its end. This process only forks, so that a life begins with everything imported.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs

import scalein as si
from scalein.exec.schedule import Schedule, using
from scalein.jobs.job import Job
from scalein.storage.object_store import Location
from tests.conformance.matrix import of_readme
from tests.conformance.shapes import SHAPES, rows
from tests.conformance.ways import check, deal, folded
from tests.jobs.dying import died, is_over, life
from tests.jobs.streams import cut
from tests.schedules import RandomSchedule


class Slow:
    """Batches by partition, with a pause before each; an offset is a number of batches."""

    def __init__(self, batches: dict[str, list[pa.RecordBatch]], pause_s: float) -> None:
        self._batches, self._pause_s = batches, pause_s
        self.schema = next(iter(batches.values()))[0].schema

    def partitions(self) -> list[str]:
        return list(self._batches)

    def read(self, partition: str, offset: Any) -> Iterator[tuple[pa.RecordBatch, Any]]:
        for number in range(offset or 0, len(self._batches[partition])):
            time.sleep(self._pause_s)
            yield self._batches[partition][number], number + 1


class KilledJob:
    """A job of the campaign. What it computes follows from the seed, and so does how each life begins."""

    def __init__(self, seed: str, folder: Path) -> None:
        self._random = random = Random(seed)
        self._folder = folder
        self._emit = random.choice(["final", "changes"])
        support, way = of_readme(), 1 if self._emit == "final" else 2
        shapes = [shape for shape in SHAPES if support[shape.name][way] is None]
        self.shapes = random.sample(shapes, random.choice([1, 1, 2, 3]))
        self._table = rows(random.randrange(1 << 30), random.choice([40, 200, 600]))
        sizes = [random.randint(1, 20), random.randint(1, 20)]
        parts = deal(self._table, random.choice([1, 1, 2, 3]), random)
        self._batches = {f"p{number}": cut(part, sizes) for number, part in enumerate(parts)}
        self._sink = random.choice([si.to_ipc, si.to_ipc, si.to_parquet])
        self._memory = random.choice([None, None, "1B"])
        self.is_remote = random.random() < 0.15
        self.most_kills = random.choice([2, 4, 8, 12])

    def __str__(self) -> str:
        names = ", ".join(shape.name for shape in self.shapes)
        return f'{names} (emit="{self._emit}", memory={self._memory}, {"a remote" if self.is_remote else "a local"} ' \
               f"checkpoint, {self._table.num_rows} rows in {len(self._batches)} partitions)"

    def run(self, most_kills: int) -> int:
        """All lives; gives how often it was killed."""
        killed = 0
        for _ in range(min(self.most_kills, most_kills)):
            if not self.live(is_killed=True):
                return killed
            killed += 1
        assert not self.live(is_killed=False)
        return killed

    def live(self, is_killed: bool) -> bool:
        """One life; whether it was killed."""
        random = self._random
        seed, waits_s = random.randrange(1 << 30), random.choice([0.03, 0.15, 0.5]) * random.random()
        has_begun, begin = os.pipe()
        pid = life(lambda: self.finish(Random(seed), begin, is_hurried=not is_killed))
        os.close(begin)
        if is_killed:
            if random.random() < 0.8:  # else while it opens
                os.read(has_begun, 1)
            end = time.monotonic() + waits_s
            while time.monotonic() < end and not is_over(pid):
                time.sleep(0.001)
            if not is_over(pid):
                os.kill(pid, signal.SIGKILL)
        os.close(has_begun)
        return died(pid)

    def finish(self, random: Random, begin: int, is_hurried: bool = True) -> None:
        """In its own process: run the job to its end, and check what it committed."""
        warnings.simplefilter("ignore")
        tempfile.tempdir = str(self._folder)
        pause_s = 0.0 if is_hurried else random.choice([0.0, 0.001, 0.005])
        seed = random.randrange(1 << 30)
        with using(RandomSchedule(seed) if random.random() < 0.5 else Schedule()):
            job = self._start(pause_s, random)
            os.close(begin)
            while not job.wait(random.choice([0.002, 0.02])):
                try:
                    if random.random() < 0.2:
                        job.snapshot()
                    else:
                        job.scale(random.randint(1, 4))
                except si.BadArgument:  # it has ended meanwhile
                    job.wait()
        assert job.metrics()["late_rows"] == 0, job.metrics()
        self._check()

    def _start(self, pause_s: float, random: Random) -> Job:
        source = si.from_source(Slow(self._batches, pause_s))
        outputs = [shape.flow(source).to(self._sink(self._folder / f"out-{number}"))
                   for number, shape in enumerate(self.shapes)]
        checkpoint: object = self._folder / "checkpoint"
        if self.is_remote:
            checkpoint = Location(fs.SubTreeFileSystem(str(self._folder), fs.LocalFileSystem()), "far", "far://kills")
        return si.start(*outputs, checkpoint=checkpoint, every=random.choice(["1ms", "10ms", "50ms"]), emit=self._emit,
                        workers=random.randint(1, 4), memory=self._memory)

    def _check(self) -> None:
        for number, shape in enumerate(self.shapes):
            folder = self._folder / f"out-{number}"
            want = shape.flow(si.from_arrow(self._table)).collect()
            read = pq.read_table if self._sink is si.to_parquet else lambda path: pa.ipc.open_file(path).read_all()
            parts = [read(path) for path in sorted(folder.glob("part-*"))]
            got = pa.concat_tables(parts) if parts else want.schema.empty_table()
            check(shape, folded(got, shape, want.schema), want)
            assert [path.name for path in folder.glob("_*")] == ["_owner"], "files that are no output were left"


def campaign(seed: int, kills: int, only: int | None, seconds: float, folder: Path) -> int:
    """Jobs until there were so many kills or the time is over, or one of them; gives how many went wrong."""
    killed, kills_by_shape, jobs, remote, wrong = 0, Counter[str](), 0, 0, 0
    start = time.monotonic()
    while killed < kills and time.monotonic() < start + seconds and (only is None or jobs == 0):
        number = jobs if only is None else only
        place = folder / f"job-{number}"
        place.mkdir()
        job = KilledJob(f"{seed} {number}", place)
        jobs, remote = jobs + 1, remote + job.is_remote
        try:
            count = job.run(kills - killed)
        except (SystemExit, AssertionError) as error:
            wrong += 1
            print(f"WRONG: --seed {seed} --only {number}: {error}; {job}; its files are in {place}", flush=True)
            continue
        killed += count
        kills_by_shape.update({shape.name: count for shape in job.shapes})
        shutil.rmtree(place)
    print(f"seed {seed}: {killed} kills of {jobs} jobs ({remote} with remote checkpoints) of {len(kills_by_shape)} "
          f"shapes in {time.monotonic() - start:.0f} s; {wrong} wrong")
    for name, count in kills_by_shape.most_common():
        print(f"{count:6} {name}")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.campaign.kills", description=__doc__)
    parser.add_argument("--kills", type=int, default=1_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int, help="the number of one job")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="no new job after that time")
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="scalein-kills-"))
    return 1 if campaign(given.seed, given.kills, given.only, given.seconds, folder) else 0


if __name__ == "__main__":
    import faulthandler

    faulthandler.enable()
    sys.exit(main())
