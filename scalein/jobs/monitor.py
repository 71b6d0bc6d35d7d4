"""Monitoring a job: a progress bar in the terminal or notebook, Prometheus metrics; its log is `exec/metrics_log.py`.

All of them read `Job.metrics()`; none blocks the job.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from math import inf
from typing import TYPE_CHECKING, Any, cast

from scalein.errors import ScaleinError, StoreFailed, here
from scalein.exec.diagnosis import shown
from scalein.jobs.job_graph import JobGraph
from scalein.jobs.metrics import Metrics
from scalein.notebook_card import format_seconds

if TYPE_CHECKING:
    from scalein.jobs.job import Job

_COUNTERS = ("rows_in", "bytes_in", "rows_out", "late_rows", "timeless_rows", "failed_rows", "epochs",
             "failed_checkpoints", "restarts", "row_groups_skipped", "outlier_rows", "busy_s", "wait_s")  # fmt: skip
_STAGE_COUNTERS = ("rows_in", "rows_out", "busy_s")
_WORKER_COUNTERS = ("rows", "bytes", "useful_s", "wait_s")
_GAUGES = ("workers", "watermark", "state_bytes", "lag_s", "checkpoint_s")


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
        "peak_state_rows": graph.peak_state_rows,
        "busy_s": round(metrics.busy_s, 3), "wait_s": round(metrics.wait_s, 3),
        "latency_s": {f"p{share * 100:g}": metrics.latency.percentile(share) for share in (0.5, 0.99, 0.999)},
        "outputs": [{"sink": place, "run_rows_out": rows} for place, rows in metrics.outputs],
        "stages": [stage.to_json() for stage in graph.stages],
    }  # fmt: skip


def serve(job: Job, port: int) -> tuple[int, Callable[[], None]]:
    """Figures as Prometheus text over HTTP, until the function given back is called; port 0 picks one.

    Names end in their unit, counters in `_total`; every series has the label `job`: see `Job.serve_metrics`.
    """
    try:
        from prometheus_client import CollectorRegistry, start_http_server
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
    except ImportError as error:
        raise ScaleinError("metrics over HTTP need the package prometheus-client", at=here(),
                           hint="pip install 'scalein[jobs]'") from error

    class Collector:
        def collect(self) -> Any:
            found = job.metrics()
            stages = cast(list[dict[str, Any]], found["stages"])
            named = [(f"{number} {stage['stage']}", stage) for number, stage in enumerate(stages)]
            for name in _COUNTERS:
                yield self._family(CounterMetricFamily, name, [((), found[name])])
            for name in _GAUGES:
                yield self._family(GaugeMetricFamily, name, [((), found[name])])
            for name in _STAGE_COUNTERS:
                yield self._family(CounterMetricFamily, f"stage_{name}",
                                   [((title,), stage[name]) for title, stage in named], "stage")
            for name in _WORKER_COUNTERS:
                yield self._family(CounterMetricFamily, f"worker_{name}",
                                   [((title, str(number)), work[name]) for title, stage in named
                                    for number, work in enumerate(stage["workers"])], "stage", "worker")  # fmt: skip
            latency = HistogramMetricFamily("scalein_latency_seconds", "from row in to result out", labels=["job"])
            buckets, total_s = job.latency_buckets()
            shown_as = [("+Inf" if limit == inf else f"{limit:.3g}", count) for limit, count in buckets]
            latency.add_metric([job.name], shown_as, sum_value=total_s)
            yield latency

        def _family(self, kind: Any, name: str, series: list[tuple[tuple[str, ...], object]], *labels: str) -> Any:
            unit = name.removesuffix("_s") + "_seconds" if name.endswith("_s") else name
            family = kind(f"scalein_{unit}", name.removesuffix("_s").replace("_", " "), labels=["job", *labels])
            for values, figure in series:
                if figure is not None:
                    family.add_metric([job.name, *values], float(str(figure)))
            return family

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
