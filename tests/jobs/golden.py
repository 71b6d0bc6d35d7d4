"""Jobs as version 1 of the checkpoint format leaves them, kept for every later version: `python -m tests.jobs.golden`.

Each died between its manifest and its commit, with epochs before that. It writes those that are missing; for a new
version of the format it has a new folder. What is there stays.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa

import scalein as si
from scalein import col
from scalein.api.flow import Flow
from scalein.jobs.job import Job
from scalein.testing import Crashed, Stream, crash_at, until

FOLDER = Path(__file__).parent / "golden_v1"
ROWS = 48
TABLE = pa.table({
    "id": [n * 7 % 31 for n in range(ROWS)], "k": [None if n % 11 == 5 else f"key {n % 4}" for n in range(ROWS)],
    "t": pa.array([n * 10 - (200 if n % 13 == 6 else 0) for n in range(ROWS)], pa.timestamp("ms")),
    "x": [float("nan") if n % 17 == 3 else -n / 4 for n in range(ROWS)],
})  # fmt: skip
BATCHES = TABLE.to_batches(max_chunksize=4)


def marked(flow: Flow) -> Flow:
    return flow.with_watermark("t", "25ms")


def together(flow: Flow) -> Flow:
    return marked(flow).group_by("k", si.tumbling("t", "90ms")).agg(
        first=col("x").first(), last=col("id").last(), v=col("id").var(), a=col("k").arg_min("id"))


FLOWS: dict[str, tuple[Callable[[Flow], Flow], dict[str, Any]]] = {
    "running": (lambda s: s.group_by("k").agg(
        n=si.count(), total=col("id").sum(), m=col("x").mean(), hi=col("x").max(), word=col("k").min()), {}),
    "changes": (lambda s: marked(s).group_by("k", si.tumbling("t", "70ms")).agg(n=si.count()), {"emit": "changes"}),
    "windows": (lambda s: marked(s).group_by("k", si.sliding("t", "60ms", every="30ms")).agg(
        n=si.count(), m=col("x").mean()), {}),
    "waiting": (lambda s: marked(s).group_by(si.tumbling("t", "50ms")).agg(ids=col("id").collect()), {}),
    # The first is of a version that kept rows for such aggregates, the second of one that keeps columns.
    "together as rows": (lambda s: together(s), {}),
    "together": (lambda s: together(s), {}),
    "distinct": (lambda s: s.distinct("id").filter(col("x") < 0).limit(100), {}),
    "union": (lambda s: s.filter(col("id") < 9).union(s.filter(col("id") >= 9)).select("id", y=col("id") * 2), {}),
    "sorted": (lambda s: s.sort("x", "id"), {}),
}  # fmt: skip


def start(name: str, folder: Path, stream: Stream) -> Job:
    build, options = FLOWS[name]
    return build(si.from_source(stream)).start(
        sink=si.to_ipc(folder / "out"), late=si.to_ipc(folder / "late"), checkpoint=folder / "checkpoint", every="1h",
        workers=1, **options)


def rows(folder: Path) -> list[str]:
    """What is visible of a job's output, as text, sorted; of changes what they amount to."""
    parts = [pa.ipc.open_file(part).read_all() for part in sorted(folder.glob("part-*"))]
    found = [row for part in parts for row in part.to_pylist()]
    if found and "op" in found[0]:
        assert all(row["op"] in ("insert", "update") for row in found)
        found = list({(row["k"], row["window_start"]): {**row, "op": ""} for row in found}.values())
    return sorted(map(str, found))


def write() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name in FLOWS:
        if (FOLDER / name).exists():  # what a version has written is never written again
            continue
        folder = Path(tempfile.mkdtemp())
        stream = Stream({"all": BATCHES}, allowed={"all": 5})
        with crash_at("commit", 2):
            job = start(name, folder, stream)
            counts = [20, 32] if name != "union" else [40, 64]
            until(lambda: job.metrics()["rows_in"] == counts[0], job)  # noqa: B023
            job.snapshot()
            stream.allow("all", 8)
            until(lambda: job.metrics()["rows_in"] == counts[1], job)  # noqa: B023
            try:
                job.stop()
            except Crashed:
                shutil.copytree(folder, FOLDER / name, ignore=shutil.ignore_patterns("lock", "LOCK"))
        for path in (FOLDER / name / "checkpoint").glob("epoch-*.json"):
            without_folders(path)


def without_folders(path: Path) -> None:
    """A manifest that does not say where the sinks were: that was a folder of this machine."""
    known = json.loads(path.read_bytes().partition(b"\n")[0])
    for output in known["output"]:
        for word in output.values():
            word.pop("folder", None)
    text = json.dumps(known, separators=(",", ":")).encode()
    path.write_bytes(text + b"\n%08x\n" % zlib.crc32(text))


if __name__ == "__main__":
    write()
