"""scalein top LOG: show a running job in the terminal, from the file that `job.log_metrics(LOG)` writes.

The job may be a stream on Spark. The picture is redrawn every second until it ends or Ctrl-C. With --prediction, a file
that `scalein predict --json` wrote, or with --decisions, that of `job.autoscale(log=...)`, it shows what was predicted
for the job beside what came. Where the output is no terminal, it is shown once.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from math import inf, isfinite
from pathlib import Path
from typing import Any

from scalein.errors import BadArgument, BadData, StoreFailed
from scalein.notebook_card import format_bytes, format_seconds

LINES = 60  # of the log, that are shown as a line of rates
LEAST_S = 0.5  # between two lines whose difference is shown
TAIL_BYTES = 1 << 20  # of the log's end, which are read
_BLOCKS = "▁▂▃▄▅▆▇█"
_CLEAR = "\x1b[H\x1b[J"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("log", metavar="LOG", help="the file that job.log_metrics(...) got")
    parser.add_argument("--decisions", metavar="FILE", help="the file that job.autoscale(log=...) got")
    parser.add_argument("--prediction", metavar="FILE", help="what `scalein predict --json` printed for the job")
    parser.add_argument("--every", type=float, default=1.0, metavar="SECONDS", help="between two looks (default: 1)")
    parser.add_argument("--once", action="store_true", help="show it once, without waiting for what follows")


def run(args: argparse.Namespace) -> int:
    if not args.every > 0:
        raise BadArgument("--every must be above 0 seconds", found=str(args.every))
    prediction = read_prediction(Path(args.prediction)) if args.prediction else None
    is_live = sys.stdout.isatty() and not args.once
    while True:
        lines = read_lines(Path(args.log))
        decisions = read_lines(Path(args.decisions)) if args.decisions else []
        print((_CLEAR if is_live else "") + picture(lines, decisions, prediction), flush=True)
        if not is_live or (lines and lines[-1].get("status") != "running"):
            return 0
        time.sleep(args.every)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The last lines of a file of JSON lines; one that is being written is left out."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - TAIL_BYTES))
            text = file.read()
    except OSError as error:
        raise StoreFailed("cannot read the log of a job", file=path, found=error) from error
    whole = text[:text.rfind(b"\n") + 1].splitlines()
    whole = whole[1:] if size > TAIL_BYTES else whole  # the first may begin in its middle
    try:
        found = [json.loads(line) for line in whole[-LINES:]]
    except ValueError as error:
        raise BadData("a log of a job has a JSON object in each line", file=path, found=error) from error
    if not all(isinstance(line, dict) for line in found):
        raise BadData("a log of a job has a JSON object in each line", file=path)
    return found


def read_prediction(path: Path) -> dict[str, Any]:
    """A prediction as JSON, or that of a plan."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise StoreFailed("cannot read the prediction", file=path, found=error) from error
    except ValueError as error:
        raise BadData("a prediction is a JSON object", file=path, found=error) from error
    found = found.get("prediction", found) if isinstance(found, dict) else {}
    if not isinstance(found, dict) or not isinstance(found.get("max_rate"), int | float) or found["max_rate"] <= 0:
        raise BadData("the file has no prediction", file=path, hint="scalein predict flows.py --json > FILE")
    return found


def picture(lines: Sequence[dict[str, Any]], decisions: Sequence[dict[str, Any]] = (),
            prediction: dict[str, Any] | None = None) -> str:
    """What the last line says, with the rates of the lines before it.

    >>> print(picture([{"status": "running", "rows_per_s": 0}, {"status": "running", "rows_per_s": 800}]))
    running
      rows in         0  800/s ▁█
      rows out        0
    """
    if not lines:
        return "no figures yet: the job writes a line a second"
    now = lines[-1]  # the line of a job's end may follow the one before at once
    earlier = [line for line in lines[:-1] if _passed(now, line) >= LEAST_S]
    before = earlier[-1] if earlier else {}
    rates = [float(line.get("rows_per_s") or 0) for line in lines]
    rows = [("rows in", f"{now.get('rows_in', 0):,}  {rates[-1]:,.0f}/s {_curve(rates)}"),
            ("rows out", f"{now.get('rows_out', 0):,}"), *_facts(now, before)]
    shown = [str(now.get("status", "?")), *(f"  {name:<15} {value}" for name, value in rows)]
    shown += _stages(now, before)
    if prediction is not None:
        shown += _predicted(prediction, rates[-1], now, before)
    if decisions:
        shown += _decisions(decisions[-3:])
    return "\n".join(shown)


def _facts(now: dict[str, Any], before: dict[str, Any]) -> list[tuple[str, str]]:
    rows = []
    if (passed_s := _passed(now, before)) > 0 and "busy_s" in now:
        busy = min(1.0, max(0.0, (now["busy_s"] - before.get("busy_s", 0.0)) / passed_s))
        rows.append(("busy", f"{busy:.0%} of the last {format_seconds(passed_s)}"))
    latency = now.get("latency_s") or {}
    if latency.get("p50") is not None:
        rows.append(("latency", f"p50 {format_seconds(latency['p50'])}, p99 {format_seconds(latency['p99'])}"))
    if now.get("watermark_time") is not None:
        lag = f", {now['lag']} behind the clock" if now.get("lag") else ""
        rows.append(("watermark", f"{now['watermark_time']}{lag}"))
    if "workers" in now:
        rescales = len(now.get("rescales") or ())
        rows.append(("workers", f"{now['workers']}" + (f", rescales: {rescales}" if rescales else "")))
    if "state_bytes" in now:
        rows.append(("state", format_bytes(now["state_bytes"])))
    if now.get("batch_s") is not None:
        rows.append(("batches", f"{now.get('batches', 0):,}, the last in {format_seconds(now['batch_s'])}"))
    if now.get("checkpoint_s") is not None:
        rows.append(("checkpoints", f"{now.get('epochs', 0):,}, the last in {format_seconds(now['checkpoint_s'])}"))
    troubles = ("late_rows", "failed_rows", "outlier_rows", "failed_checkpoints", "restarts")
    return rows + [(name.replace("_", " "), f"{now[name]:,}") for name in troubles if now.get(name)]


def _stages(now: dict[str, Any], before: dict[str, Any]) -> list[str]:
    """Each step: rows of the last second, and how busy it was."""
    passed_s, stages = _passed(now, before), now.get("stages") or []
    then = before.get("stages") or []
    if passed_s <= 0 or len(then) != len(stages) or not stages:
        return []
    width = max(len(str(stage["stage"])) for stage in stages)
    return ["", *(f"  {stage['stage']:<{width}}  {(stage['rows_in'] - old['rows_in']) / passed_s:>14,.0f} rows/s  "
                  f"{min(1.0, (stage['busy_s'] - old['busy_s']) / passed_s):>4.0%} busy"
                  for stage, old in zip(stages, then, strict=True))]


def _predicted(prediction: dict[str, Any], rate: float, now: dict[str, Any], before: dict[str, Any]) -> list[str]:
    """What a prediction says of the rate that there is, beside what came; latency and state are at its own rate."""
    low, high = (prediction.get("intervals") or {}).get("max_rate") or (None, None)
    interval = "" if low is None or high is None else f" ({low:,.0f} to {high:,.0f})"
    batch_s, predicted_batch_s = now.get("batch_s"), prediction.get("batch_s")
    shown = ["", "  predicted -> realized", f"  of at most {prediction['max_rate']:,.0f} rows/s{interval}"]
    if (passed_s := _passed(now, before)) > 0 and "busy_s" in now:
        busy = min(1.0, max(0.0, (now["busy_s"] - before.get("busy_s", 0.0)) / passed_s))
        shown.append(f"  busy  {rate / prediction['max_rate']:.0%} -> {busy:.0%}")
    if batch_s is not None and predicted_batch_s is not None:
        shown.append(f"  batch {format_seconds(predicted_batch_s)} at {prediction['rate']:,.0f} rows/s -> "
                     f"{format_seconds(batch_s)}")
    latency, predicted_s = (now.get("latency_s") or {}).get("p99"), prediction.get("p99_s")
    if latency is not None and predicted_s is not None:
        shown.append(f"  p99   {format_seconds(predicted_s)} at {prediction['rate']:,.0f} rows/s -> "
                     f"{format_seconds(latency)}")
    if "state_bytes" in now and prediction.get("state_bytes") is not None:
        in_files = 0.0 if batch_s is not None else prediction.get("on_disk_bytes") or 0.0  # a job counts its memory
        shown.append(f"  state {format_bytes(prediction['state_bytes'] - in_files)} -> "
                     f"{format_bytes(now['state_bytes'])}")
    return shown


def _decisions(decisions: Sequence[dict[str, Any]]) -> list[str]:
    shown = ["", "  scaling: predicted -> realized"]
    for each in decisions:
        predicted, realized = each.get("predicted") or {}, each.get("realized") or {}
        figures = [f"{realized.get('rate', 0.0):,.0f} rows/s of {each['rate']:,.0f}"]
        if "utilization" in predicted and "utilization" in realized:
            figures.append(f"{predicted['utilization']:.0%} -> {realized['utilization']:.0%} busy")
        if isfinite(predicted.get("p99_s", inf)) and "p99_s" in realized:
            figures.append(f"p99 {format_seconds(predicted['p99_s'])} -> {format_seconds(realized['p99_s'])}")
        shown.append(f"  {each['before']} -> {each['workers']} workers  {', '.join(figures)}: {each['reason']}")
    return shown


def _passed(now: dict[str, Any], before: dict[str, Any]) -> float:
    return float(now["time"] - before["time"]) if "time" in now and "time" in before else 0.0


def _curve(rates: Sequence[float]) -> str:
    top = max(rates) or 1.0
    return "".join(_BLOCKS[min(len(_BLOCKS) - 1, int(rate / top * len(_BLOCKS)))] for rate in rates)
