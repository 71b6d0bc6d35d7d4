"""Plots of the migration experiment, as PNG and SVG."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from scalein.cli.bench_migration import MIGRATIONS, RESCALES, WAYS, CurvePoint, JobRun, StreamRun

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLORS = {"eager": "tab:red", "lazy": "tab:blue", "hybrid": "tab:green", "scale": "tab:blue", "restart": "tab:red",
          "stateless": "tab:blue", "stateful": "tab:green"}
BIN_S = 0.1  # of a job's throughput


def draw(folder: Path, streams: Sequence[StreamRun], jobs: Sequence[JobRun],
         points: Sequence[CurvePoint]) -> list[Path]:
    """Draw what was measured; gives the files."""
    figures: dict[str, Figure] = {}
    for where in dict.fromkeys(run.where for run in streams):
        figures[f"streams-{where}"] = stream_figure([run for run in streams if run.where == where])
    if jobs:
        figures["jobs"] = job_figure(jobs)
    if points:
        figures["curves"] = curve_figure(points, streams)
    found = list[Path]()
    for name, figure in figures.items():
        for kind in ("png", "svg"):
            path = folder / f"{name}.{kind}"
            figure.savefig(path, dpi=90, metadata={"Date": None} if kind == "svg" else None)
            found.append(path)
    return found


def stream_figure(runs: Sequence[StreamRun]) -> Figure:
    """Latency, throughput and bytes moved by batch, a line for each way to migrate."""
    figure, (latency, throughput, moved) = _figure(3)
    for run in sorted(runs, key=lambda run: MIGRATIONS.index(run.migration)):
        style: dict[str, Any] = {"color": COLORS[run.migration], "label": run.migration, "marker": "."}
        at = [each.arrived_s for each in run.batches]
        latency.plot(at, [each.latency_s * 1e3 for each in run.batches], **style)
        throughput.plot(at, [each.rows / each.duration_s / 1e3 for each in run.batches], **style)
        moved.plot(at, [each.moved / 1e6 for each in run.batches], **style)
    for axes, label in ((latency, "latency, ms"), (throughput, "1,000 rows/s\nof a batch"), (moved, "state moved, MB")):
        axes.set_ylabel(label)
        for first in runs[0].firsts():
            axes.axvline(first.arrived_s, color="gray", linestyle=":", linewidth=1)
        axes.set_ylim(bottom=0)
    moved.set_yscale("symlog", linthresh=0.1)
    state_mb = runs[0].firsts()[0].state / 1e6
    latency.set_title(f"Spark, {runs[0].where}: partitions {_rescales()}, {state_mb:,.0f} MB of state", fontsize=10)
    latency.legend(ncols=3, fontsize=8)
    moved.set_xlabel("seconds; dotted: a rescale")
    return figure


def job_figure(runs: Sequence[JobRun]) -> Figure:
    """Throughput and latency over time, a line for each way to rescale."""
    figure, (throughput, latency) = _figure(2)
    for run in sorted(runs, key=lambda run: WAYS.index(run.way)):
        label = {"scale": "job.scale", "restart": "stop and start again"}[run.way]
        at, rows, late_s = (np.array(each) for each in zip(*run.outputs, strict=True))
        edges = np.arange(0, at.max() + BIN_S, BIN_S)
        rates = np.histogram(at, edges, weights=rows)[0] / BIN_S / 1e3
        throughput.plot(edges[:-1], rates, color=COLORS[run.way], label=label, linewidth=1.2)
        latency.plot(at, late_s * 1e3, color=COLORS[run.way], linewidth=1)
        for axes in (throughput, latency):
            for moment in run.rescaled_s:
                axes.axvline(moment, color=COLORS[run.way], linestyle=":", linewidth=1)
    throughput.set_ylabel("1,000 rows/s")
    throughput.set_ylim(bottom=0)
    throughput.set_title(f"a job: workers {_rescales()}", fontsize=10)
    throughput.legend(ncols=2, fontsize=8)
    latency.set_ylabel("latency, ms")
    latency.set_yscale("log")
    latency.set_xlabel("seconds; dotted: a rescale")
    return figure


def curve_figure(points: Sequence[CurvePoint], streams: Sequence[StreamRun]) -> Figure:
    """Throughput and latency by workers, and rows a second of a batch by partitions of streams."""
    by_where = {run.where: run for run in streams if run.migration == "lazy"}
    figure, axes = _figure(1, 3 if by_where else 2)
    for name in dict.fromkeys(point.flow for point in points):
        some = [point for point in points if point.flow == name]
        workers = [point.workers for point in some]
        axes[0].plot(workers, [point.rows_per_s / 1e6 for point in some], color=COLORS[name], marker="o", label=name)
        for quantile, line in (("p99", "-"), ("p50", ":")):
            late_ms = [getattr(point, f"{quantile}_s") * 1e3 for point in some]
            axes[1].plot(workers, late_ms, line, color=COLORS[name], marker="o", label=f"{name}, {quantile}")
    axes[0].set_ylabel("M rows/s")
    axes[1].set_ylabel("latency at half the rate, ms")
    for each in axes[:2]:
        each.set_xlabel("workers of a job")
        each.set_xticks(sorted({point.workers for point in points}))
        each.set_ylim(bottom=0)
        each.legend(fontsize=8)
    if by_where:
        for where, run in by_where.items():
            rates = [np.median([each.rows / each.duration_s / 1e3 for each in run.batches if each.partitions == count])
                     for count in sorted(RESCALES)]
            axes[2].plot(sorted(RESCALES), rates, marker="o", label=f"Spark, {where}")
        axes[2].set_xlabel("partitions of a stream")
        axes[2].set_xticks(sorted(RESCALES))
        axes[2].set_ylabel("1,000 rows/s of a batch")
        axes[2].set_ylim(bottom=0)
        axes[2].legend(fontsize=8)
    return figure


def _rescales() -> str:
    return " to ".join(map(str, RESCALES))


def _figure(rows: int, columns: int = 1) -> tuple[Figure, list[Axes]]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5 if columns == 1 else 3.3 * columns, 1.2 + 1.6 * rows), layout="constrained")
    made: Any = figure.subplots(rows, columns, sharex=columns == 1 and rows > 1)
    axes = list(np.atleast_1d(made).ravel())
    for each in axes:
        each.grid(alpha=0.25)
        each.tick_params(labelsize=8)
    return figure, axes
