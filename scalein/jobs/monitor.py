"""Monitoring a job: a progress bar in the terminal or notebook, a line of JSON a second, Prometheus metrics.

All of them read `Job.metrics()`; none blocks the job.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from scalein.errors import ScaleinError, StoreFailed, here, warn
from scalein.exec.diagnosis import shown
from scalein.jobs.job_graph import JobGraph
from scalein.jobs.metrics import Metrics
from scalein.notebook_card import format_seconds

if TYPE_CHECKING:
    from scalein.jobs.job import Job

_COUNTERS = ("rows_in", "bytes_in", "rows_out", "late_rows", "timeless_rows", "outlier_rows", "failed_rows",
             "epochs", "failed_checkpoints", "row_groups_skipped")  # fmt: skip
_STAGE_COUNTERS = ("rows_in", "rows_out", "busy_s")
_WORKER_COUNTERS = ("rows", "bytes", "useful_s", "wait_s")
_GAUGES = ("workers", "watermark", "state_bytes", "lag_s")


def figures(metrics: Metrics, graph: JobGraph, workers: int) -> dict[str, object]:
    """What a user sees of a job's figures."""
    watermark, dtype = graph.watermark, graph.time_type
    return {
        **metrics.to_json(), "run_rows_in": metrics.of_run("rows_in"), "run_rows_out": metrics.of_run("rows_out"),
        "epochs": metrics.epochs, "failed_checkpoints": metrics.failed_checkpoints,
        "outlier_rows": graph.outlier_rows, "row_groups_skipped": graph.row_groups_skipped,
        "checkpoint_s": metrics.checkpoint_s, "checkpoint_at": metrics.checkpoint_at, "workers": workers,
        "rescales": list(metrics.rescales), "watermark": watermark,
        "watermark_time": None if watermark is None or dtype is None else shown(watermark, dtype),
        "lag_s": graph.lag_s, "lag": None if graph.lag_s is None else format_seconds(graph.lag_s),
        "state_bytes": graph.state_bytes,
        "busy_s": round(metrics.busy_s, 3), "wait_s": round(metrics.wait_s, 3),
        "latency_s": {f"p{share * 100:g}": metrics.latency.percentile(share) for share in (0.5, 0.99, 0.999)},
        "stages": [stage.to_json() for stage in graph.stages],
    }  # fmt: skip


def log_lines(job: Job, path: str | os.PathLike[str], every_s: float = 1.0) -> threading.Thread:
    """Append a line of figures to a file every so often, and one at the end."""
    at = here()
    try:
        file = open(path, "a", encoding="utf-8")  # noqa: SIM115 (the thread closes it)
    except OSError as error:
        raise StoreFailed("cannot write the log of a job", at=at, file=path, found=error) from error

    def write() -> None:
        try:
            lines()
        except OSError as error:  # a full disk is no reason to end the job
            warn(f"the log of a job ends here: {path}: {error}", at)

    def lines() -> None:
        with file:
            before, then = int(str(job.metrics()["rows_in"])), time.monotonic()
            while True:
                has_ended = job.await_end(every_s)
                found = job.metrics()
                now, rows = time.monotonic(), int(str(found["rows_in"]))
                rate = round((rows - before) / max(now - then, 1e-9))
                before, then = rows, now
                line = {"time": round(time.time(), 3), "status": job.status, "rows_per_s": rate, **found}
                file.write(json.dumps(line, default=str) + "\n")
                file.flush()
                if has_ended:
                    return

    thread = threading.Thread(target=write, name="scalein-log", daemon=True)
    thread.start()
    return thread


def serve(job: Job, port: int) -> tuple[int, Callable[[], None]]:
    """Figures as Prometheus text over HTTP, until the function given back is called; port 0 picks one."""
    try:
        from prometheus_client import CollectorRegistry, start_http_server
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
    except ImportError as error:
        raise ScaleinError("metrics over HTTP need the package prometheus-client", at=here(),
                           hint="pip install 'scalein[jobs]'") from error

    class Collector:
        def collect(self) -> Any:
            found = job.metrics()
            for name in _COUNTERS:
                yield CounterMetricFamily(f"scalein_{name}", name.replace("_", " "), value=float(str(found[name])))
            for name in _GAUGES:
                if found[name] is not None:
                    yield GaugeMetricFamily(f"scalein_{name}", name.replace("_", " "), value=float(str(found[name])))
            latency = GaugeMetricFamily("scalein_latency_seconds", "from row in to result out", labels=["quantile"])
            for name, value in found["latency_s"].items():  # type: ignore[attr-defined]
                if value is not None:
                    latency.add_metric([f"{float(name[1:]) / 100:g}"], value)
            yield latency
            stages = cast(list[dict[str, Any]], found["stages"])
            for name in _STAGE_COUNTERS:
                counter = CounterMetricFamily(f"scalein_stage_{name}", name.replace("_", " "), labels=["stage"])
                for number, stage in enumerate(stages):
                    counter.add_metric([f"{number} {stage['stage']}"], float(stage[name]))
                yield counter
            for name in _WORKER_COUNTERS:
                counter = CounterMetricFamily(f"scalein_worker_{name}", name.replace("_", " "),
                                              labels=["stage", "worker"])
                for number, stage in enumerate(stages):
                    for worker, work in enumerate(stage["workers"]):
                        counter.add_metric([f"{number} {stage['stage']}", str(worker)], float(work[name]))
                yield counter

    registry = CollectorRegistry()
    registry.register(Collector())
    try:
        server, thread = start_http_server(port, registry=registry)
    except OSError as error:
        raise StoreFailed("cannot serve the metrics of a job", at=here(), found=error, port=port) from error

    def close() -> None:
        server.shutdown()
        server.server_close()
        thread.join(2.0)

    return int(server.server_address[1]), close


def show_bar(job: Job, timeout_s: float | None = None, every_s: float = 0.2) -> None:
    """A bar with rows a second, watermark, lag, state, checkpoints, until the job ends or some time has passed."""
    try:
        from tqdm.auto import tqdm
    except ImportError as error:
        raise ScaleinError("a progress bar needs the package tqdm", at=here(),
                           hint="pip install 'scalein[jobs]', or wait() without progress=True") from error
    with tqdm(unit=" rows", unit_scale=True, desc="scalein") as bar:
        before, end = 0, None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            left_s = every_s if end is None else max(0.0, min(every_s, end - time.monotonic()))
            is_over = job.await_end(left_s) or left_s < every_s
            found = job.metrics()
            rows = int(str(found["run_rows_in"]))
            bar.update(rows - before)
            before = rows
            bar.set_postfix(out=found["run_rows_out"], late=found["late_rows"], watermark=found["watermark_time"],
                            lag=found["lag"], state=f"{int(str(found['state_bytes'])) / 1e6:,.1f} MB",
                            checkpoints=found["epochs"], workers=found["workers"])
            if is_over:
                return
