"""A job that is started once more: with objects that a running one has, with other sources, with other wishes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import scalein as si
from scalein.jobs.job import Job
from scalein.testing import Stream, until
from tests.jobs.streams import rows_in

BATCHES = [pa.record_batch({"t": pa.array([n, n + 1])}) for n in range(0, 40, 2)]
WHOLE = list(range(40))


def written(folder: Path) -> list[int]:
    return sorted(t for part in folder.glob("part-*") for t in pa.ipc.open_file(part).read_all()["t"].to_pylist())


# --- a sink is one job's


def test_a_start_that_fails_does_not_touch_the_sink_of_a_running_job(tmp_path: Path) -> None:
    """As when a cell of a notebook is run again."""
    stream, sink = Stream({"all": BATCHES}, allowed={"all": 5}), si.to_ipc(tmp_path / "out")

    def start(**options: Any) -> Job:
        return si.from_source(stream).start(sink=sink, every="1h", **options)

    job = start(checkpoint=tmp_path / "c")
    until(lambda: rows_in(job) == 10, job)
    with pytest.raises(si.ScaleinError, match="another job is using this checkpoint"):
        start(checkpoint=tmp_path / "c")
    with pytest.raises(si.BadArgument, match=r"another job's, which is still running(.|\n)*to_ipc"):
        start(checkpoint=tmp_path / "other")
    stream.end()
    job.wait()
    assert written(tmp_path / "out") == WHOLE
    start().wait()  # now it is free
    assert written(tmp_path / "out") == sorted(2 * WHOLE)


def test_what_keeps_nothing_may_serve_many_jobs() -> None:
    out = si.to_memory()
    jobs = [si.from_source(Stream({"all": BATCHES}, ends=False)).start(sink=out) for _ in range(2)]
    until(lambda: out.table().num_rows == 80, jobs[0])
    for job in jobs:
        job.stop()
