"""Calibrations: what a machine can do, as figures in a readable file that can be carried to another one.

Without a calibration, predictions use `TYPICAL`, round figures of a server: costs of a flow are measured on this
machine anyway (`profile`), and figures of the machine matter where a prediction leaves what was measured, such as more
workers, state beyond the cache or beyond memory, or another machine.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from itertools import pairwise
from math import exp, isfinite, log
from pathlib import Path

from scalein.errors import BadArgument, SourceLoc, here
from scalein.options import Options, granted_cores

FORMAT = 1
FILE = "calibration.json"  # in the folder of compiled code


@dataclass(frozen=True, slots=True)
class SparkFigures:
    """What Spark costs beside the work itself."""

    batch_s: float  # of a micro-batch without rows
    task_s: float  # of a task without rows
    transfer_bytes_s: float  # of Arrow batches from the JVM to a Python worker, one core
    stage_s: float = 0.05  # that a batch takes longer whose rows are shuffled to a second wave of tasks
    read_bytes_s: float = 1e9  # of columns of Parquet that a task reads, one core
    group_s: float = 2.5e-7  # of a group of state that is read, merged and written, one core


@dataclass(frozen=True, slots=True)
class Calibration:
    """Figures of a machine. Rates are per second; `bandwidth` and `probes` are curves, read between their points.

    >>> round(TYPICAL.bandwidth_of(2) / TYPICAL.bandwidth_of(1), 2)
    1.8
    >>> TYPICAL.probe_s(1 << 16) < TYPICAL.probe_s(1 << 30)
    True
    """

    machine: str
    cores: int
    operations: float  # additions of 64-bit numbers in the cache a second, one thread
    bandwidth: tuple[tuple[int, float], ...]  # threads, and the bytes a second that they copy (read and written)
    probes: tuple[tuple[int, float], ...]  # bytes of a table, and seconds of a read at a random place of it
    disk_read: float  # bytes a second
    disk_write: float
    sync_s: float  # of a small write and its sync
    wake_s: float  # until a thread that waits runs: the median
    wake_p99_s: float
    spark: SparkFigures | None = None
    is_measured: bool = True

    def bandwidth_of(self, threads: int) -> float:
        """Bytes a second that threads copy; beyond the greatest number that was measured, no more than that grew."""
        points = [(float(count), rate) for count, rate in self.bandwidth]
        if threads <= points[-1][0]:
            return _between(points, threads)
        return points[-1][1]

    def probe_s(self, size: float) -> float:
        """Seconds of a read at a random place of a table of so many bytes."""
        return _between([(float(bytes_), seconds) for bytes_, seconds in self.probes], max(size, 1.0))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it to a file, as JSON."""
        found = {"format": FORMAT, **asdict(self)}
        Path(path).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")

    def __str__(self) -> str:
        lines = [self.machine, f"cores         {self.cores}",
                 f"bandwidth     {', '.join(f'{rate / 1e9:.1f} GB/s with {n}' for n, rate in self.bandwidth)} threads",
                 f"probes        {', '.join(f'{t * 1e9:.1f} ns in {_size(size)}' for size, t in self.probes)}",
                 f"disk          read {self.disk_read / 1e6:,.0f} MB/s, write {self.disk_write / 1e6:,.0f} MB/s, "
                 f"sync {self.sync_s * 1e3:.2f} ms",
                 f"wake-up       {self.wake_s * 1e6:.0f} us, p99 {self.wake_p99_s * 1e6:.0f} us"]
        if self.spark is not None:
            lines.append(f"Spark         {self.spark.batch_s * 1e3:.0f} ms a batch, {self.spark.task_s * 1e3:.1f} ms a "
                         f"task, {self.spark.stage_s * 1e3:.0f} ms a shuffle, {self.spark.transfer_bytes_s / 1e6:,.0f} "
                         f"MB/s to a Python worker, {self.spark.read_bytes_s / 1e6:,.0f} MB/s from files, "
                         f"{self.spark.group_s * 1e9:.0f} ns a group")
        return "\n".join(lines)


# Round figures of a server of 2023 with local flash; `machine` says that nothing was measured.
TYPICAL = Calibration(
    machine="not calibrated: figures of a typical server", cores=granted_cores(), operations=2e9,
    bandwidth=((1, 10e9), (2, 18e9), (4, 32e9), (8, 56e9), (16, 90e9), (32, 150e9), (64, 200e9)),
    probes=((1 << 15, 1e-9), (1 << 20, 2e-9), (1 << 24, 6e-9), (1 << 28, 15e-9), (1 << 32, 25e-9)),
    disk_read=1.5e9, disk_write=1.0e9, sync_s=2e-3, wake_s=60e-6, wake_p99_s=400e-6, is_measured=False)


def default_path() -> Path | None:
    """Where `scalein calibrate` keeps this machine's figures; None where nothing is kept on disk."""
    folder = Options.make().cache
    return Path(folder) / FILE if folder else None


def calibration_of(given: object, at: SourceLoc | None = None) -> Calibration:
    """A calibration, or the one of a file; None is this machine's, or else `TYPICAL`."""
    at = here() if at is None else at
    if given is None:
        path = default_path()
        return TYPICAL if path is None or not path.is_file() else read(path, at)
    if isinstance(given, Calibration):
        return given
    if isinstance(given, str | os.PathLike):
        return read(Path(given), at)
    raise BadArgument("a calibration is a file that `scalein calibrate` wrote, or a Calibration", at=at,
                      found=repr(given))


def read(path: Path, at: SourceLoc) -> Calibration:
    """The calibration in a file."""
    hint = "`scalein calibrate --to FILE` writes one"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadArgument("the calibration cannot be read", at=at, file=path, found=error, hint=hint) from error
    except ValueError as error:
        raise BadArgument("the calibration is not JSON", at=at, file=path, found=error, hint=hint) from error
    return of_json(found, at, file=path)


def of_json(found: object, at: SourceLoc, **facts: object) -> Calibration:
    """The calibration that a file's JSON has."""
    try:
        return _parsed(found)
    except (KeyError, TypeError, ValueError) as error:
        raise BadArgument("the calibration has not the figures that it should have", at=at, **facts,
                          found=f"{type(error).__name__}: {error}", hint="`scalein calibrate --to FILE` writes one"
                          ) from error


def _parsed(found: object) -> Calibration:
    if not isinstance(found, Mapping) or found.get("format") != FORMAT:
        raise ValueError(f"not of format {FORMAT}")
    values = {field.name: found[field.name] for field in fields(Calibration)}
    for name in ("operations", "disk_read", "disk_write", "sync_s", "wake_s", "wake_p99_s"):
        values[name] = _positive(values[name], name)
    for name in ("bandwidth", "probes"):
        points = tuple((int(size), _positive(value, name)) for size, value in values[name])
        if not points or [size for size, _ in points] != sorted({size for size, _ in points}) or points[0][0] < 1:
            raise ValueError(f"{name} has no rising points")
        values[name] = points
    if not isinstance(values["cores"], int) or isinstance(values["cores"], bool) or values["cores"] < 1:
        raise ValueError("cores is not a number of cores")
    values["machine"], values["is_measured"] = str(values["machine"]), bool(values["is_measured"])
    if values["spark"] is not None:
        given = values["spark"]
        values["spark"] = SparkFigures(**{  # files of earlier versions lack the figures that have a default
            field.name: _positive(given[field.name], f"spark.{field.name}") for field in fields(SparkFigures)
            if field.default is MISSING or field.name in given})
    return Calibration(**values)


def _positive(value: object, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value) or value <= 0:
        raise ValueError(f"{name} is not a number above 0")
    return float(value)


def _between(points: Sequence[tuple[float, float]], at: float) -> float:
    """The value of a curve, straight between its points where both axes are logarithmic, and flat outside."""
    if at <= points[0][0]:
        return points[0][1]
    for (x0, y0), (x1, y1) in pairwise(points):
        if at <= x1:
            share = (log(at) - log(x0)) / (log(x1) - log(x0))
            return exp(log(y0) + share * (log(y1) - log(y0)))
    return points[-1][1]


def _size(size: float) -> str:
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= unit:
            return f"{size / unit:.3g} {name}"
    return f"{size:.0f} bytes"
