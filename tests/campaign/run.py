"""Runs a campaign: child processes that take lots of flows, a watchdog, progress, findings, a summary.

A child that dies names the flow that killed it; one that says nothing for `HANG_S` seconds is killed. Either is a
finding, and the rest of the lot goes to a new child.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.campaign.child import seed_of
from tests.campaign.flows import flow_of
from tests.campaign.shrink import shrink
from tests.campaign.spec import FlowSpec, reproducer
from tests.campaign.ways import Way, ways_of

HANG_S = 150  # more than a flow, or shrinking one, may take
LOT = 1000  # flows of one child: a new process gives back what LLVM keeps


@dataclass(frozen=True, slots=True)
class Lot:
    """Numbers that one child checks: flows or udfs."""

    what: str
    first: int
    stop: int


@dataclass(slots=True)
class Campaign:
    """What was done so far. Threads share it under `lock`."""

    run: int
    lots: list[Lot]
    findings_path: Path
    shrink_s: float = 40.0
    counts: Counter[str] = field(default_factory=Counter)
    findings: list[dict[str, str]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)
    started: float = field(default_factory=time.monotonic)

    def next_lot(self) -> Lot | None:
        with self.lock:
            return self.lots.pop(0) if self.lots else None

    def add(self, finding: dict[str, str]) -> None:
        with self.lock:
            self.findings.append(finding)
            self.findings_path.parent.mkdir(parents=True, exist_ok=True)
            with self.findings_path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(finding) + "\n")

    def line(self) -> str:
        """Progress."""
        took = max(1e-9, time.monotonic() - self.started)
        done = self.counts["flows"] + self.counts["udfs"]
        cpu = 1000 * self.counts["cpu_s"] / max(1, done)
        return (f"{self.counts['flows']:,} flows, {self.counts['udfs']:,} udfs, {len(self.findings)} findings, "
                f"{done / took:.1f}/s, {cpu:.0f} ms CPU each, {took:.0f} s")

    def summary(self) -> str:
        kinds = Counter(finding["kind"] for finding in self.findings)
        lines = [self.line(), f"{self.counts['failed']:,} flows that fail as they should, "
                 f"{self.counts['by_duck']:,} compared with DuckDB"]
        lines += [f"  {count:5} {kind}" for kind, count in kinds.most_common()] or ["  no differences, no crashes"]
        return "\n".join([*lines, *([f"findings: {self.findings_path}"] if kinds else [])])


def lots_of(flows: int, udfs: int, processes: int) -> list[Lot]:
    """The whole campaign in lots, of even size for few flows."""
    size = max(1, min(LOT, -(-max(flows, udfs) // processes)))
    made = [Lot("flow", first, min(first + size, flows)) for first in range(0, flows, size)]
    return made + [Lot("udf", first, min(first + size, udfs)) for first in range(0, udfs, size)]


def campaign(run: int, flows: int, udfs: int, processes: int, findings: Path, *, quiet: bool = False,
             shrink_s: float = 40.0) -> Campaign:  # fmt: skip
    """Check so many flows and udfs; the findings are in its result and in the file."""
    made = Campaign(run, lots_of(flows, udfs, processes), findings, shrink_s)
    threads = [threading.Thread(target=_work, args=(made,), daemon=True) for _ in range(processes)]
    for thread in threads:
        thread.start()
    shown = 0.0
    while any(thread.is_alive() for thread in threads):
        time.sleep(0.2)
        if not quiet and time.monotonic() - shown > (1 if sys.stderr.isatty() else 60):
            shown = time.monotonic()
            print(f"\r{made.line()}", end="" if sys.stderr.isatty() else "\n", file=sys.stderr, flush=True)
    return made


def _work(made: Campaign) -> None:
    while (lot := made.next_lot()) is not None:
        rest: Lot | None = lot
        while rest is not None and rest.first < rest.stop:
            rest = _run_child(made, rest)


def _run_child(made: Campaign, lot: Lot) -> Lot | None:
    """One child for a lot; what is left of the lot if it died."""
    command = [sys.executable, "-m", "tests.campaign.child", lot.what, str(made.run), str(lot.first), str(lot.stop),
               str(made.shrink_s)]
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors:
        child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
        at, hung = _listened(made, child, lot.first)
        code = child.wait()
        if code == 0:
            return None
        errors.seek(0)
        told = errors.read()[-3000:]
    made.add(_death(made.run, lot.what, at, "hang" if hung else _cause(code), told))
    return Lot(lot.what, at + 1, lot.stop)


def _listened(made: Campaign, child: subprocess.Popen[str], first: int) -> tuple[int, bool]:
    """Take in what a child says; the number that it was at last, and whether it had to be killed."""
    at, hung = first, threading.Event()
    timer = _watch(child, hung)
    for message in _messages(child):
        timer.cancel()
        timer = _watch(child, hung)
        at = message.get("at", at)
        if "problem" in message:
            made.add(message["problem"])
        with made.lock:
            made.counts.update(message.get("done", {}))
    timer.cancel()
    return at, hung.is_set()


def _messages(child: subprocess.Popen[str]) -> Iterator[dict[str, Any]]:
    assert child.stdout is not None
    for line in child.stdout:
        yield json.loads(line)


def _watch(child: subprocess.Popen[str], hung: threading.Event) -> threading.Timer:
    def end() -> None:
        hung.set()
        child.send_signal(signal.SIGABRT)  # faulthandler shows where it was
        try:
            child.wait(10)
        except subprocess.TimeoutExpired:
            child.kill()

    timer = threading.Timer(HANG_S, end)
    timer.daemon = True
    timer.start()
    return timer


def _cause(code: int) -> str:
    return f"crash ({signal.Signals(-code).name})" if code < 0 else f"child ended with {code}"


def _death(run: int, what: str, number: int, kind: str, errors: str) -> dict[str, str]:
    """The finding of a child that died; a crash is shrunk, each try in a process of its own."""
    told = f"--seed {run} --only {number}" + (" --udf 1" if what == "udf" else "")
    if what == "udf" or not kind.startswith("crash"):
        return {"kind": kind, "flow": told, "reproducer": errors}
    seed = seed_of(run, number)
    spec, ways = shrink(flow_of(seed), ways_of(seed), _crashes, tries=60, seconds=120)
    return {"kind": kind, "flow": told,
            "reproducer": reproducer(spec, "".join(way.text() for way in ways), f"{kind}\n{errors}")}


def _crashes(spec: FlowSpec, ways: tuple[Way, ...]) -> bool:
    """Whether a process that checks this flow dies of a signal."""
    descriptor, path = tempfile.mkstemp(suffix=".case")
    try:
        with open(descriptor, "wb") as file:
            pickle.dump((spec, ways), file)
        command = [sys.executable, "-m", "tests.campaign.child", "case", path]
        return subprocess.run(command, capture_output=True, timeout=60, check=False).returncode < 0
    except subprocess.TimeoutExpired:
        return False
    finally:
        os.unlink(path)
