"""A process that checks flows and udfs one after the other, and tells of each before it begins.

It writes lines of JSON: {"at": n} before flow n, so that whoever finds this process dead or silent knows which one did
it; {"done": ...} after it; {"problem": ...} with the reproducer of what it found, shrunk.
"""

from __future__ import annotations

import faulthandler
import json
import os
import pickle
import signal
import sys
import time
import traceback
from collections import Counter
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import IO

from tests.campaign import udf_check
from tests.campaign.check import Facts, Refused, check
from tests.campaign.flows import flow_of
from tests.campaign.shrink import shrink
from tests.campaign.spec import FlowSpec, reproducer
from tests.campaign.ways import Way, prepare, ways_of

DUCK_SHARE = 3  # every third flow is compared with DuckDB too, which costs as much as running it
SHRUNK_ALIKE = 3  # of exceptions with one text; more would cost time and tell nothing new


def seed_of(run: int, number: int) -> int:
    """The seed of a flow: a run's flows have seeds of their own."""
    return run * 10_000_000 + number * 2


@dataclass(slots=True)
class Counts:
    """What was checked."""

    flows: int = 0
    udfs: int = 0
    failed: int = 0  # flows in which the oracle fails
    by_duck: int = 0
    cpu_s: float = 0.0


def check_flow(run: int, number: int) -> tuple[FlowSpec, tuple[Way, ...], Facts]:
    """The flow of a number, and what became of it."""
    seed = seed_of(run, number)
    spec, ways = flow_of(seed), ways_of(seed)
    return spec, ways, check(spec, ways, with_duck=number % DUCK_SHARE == 0)


def has_problem(kind: str, spec: FlowSpec, ways: tuple[Way, ...]) -> bool:
    """Whether a flow is wrong in this manner."""
    try:
        problem = check(spec, ways, with_duck="DuckDB" in kind).problem
    except Refused:
        return False
    return problem is not None and problem.kind == kind


def report(run: int, number: int, spec: FlowSpec, ways: tuple[Way, ...], facts: Facts,
           seconds: float) -> dict[str, str]:  # fmt: skip
    """A problem, shrunk, as the parent and the file of findings have it."""
    assert facts.problem is not None
    kind = facts.problem.kind
    ways = facts.problem.ways or ways[:1]
    spec, ways = shrink(spec, ways, lambda s, w: has_problem(kind, s, w), seconds=seconds)
    problem = check(spec, ways, with_duck="DuckDB" in kind).problem or facts.problem
    text = reproducer(spec, "".join(way.text() for way in ways), f"{problem.kind}\n{problem.text}")
    return {"kind": kind, "flow": f"--seed {run} --only {number}", "reproducer": text}


def work(run: int, first: int, stop: int, what: str, seconds: float) -> None:
    """Check the flows (or udfs) from first to stop."""
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever else prints, prints beside
    faulthandler.enable()
    prepare()
    seen = Counter[str]()
    for number in range(first, stop):
        _tell(out, {"at": number})
        counts, started = Counts(), time.process_time()
        if os.environ.get("CAMPAIGN_KILL") == str(number):  # for the test of what follows
            os.kill(os.getpid(), signal.SIGSEGV)
        if what == "udf":
            found = udf_check.problem(seed_of(run, number))
            counts.udfs += 1
            if found is not None:
                _tell(out, {"problem": {"kind": "udf", "flow": f"--seed {run} --only {number} --udf 1",
                                        "reproducer": found}})
        else:
            _one_flow(out, run, number, counts, seen, seconds)
        counts.cpu_s = time.process_time() - started
        _tell(out, {"done": asdict(counts)})


def _one_flow(out: IO[str], run: int, number: int, counts: Counts, seen: Counter[str], seconds: float) -> None:
    counts.flows += 1
    try:
        spec, ways, facts = check_flow(run, number)
    except Exception as error:
        _tell(out, {"problem": {"kind": f"building or checking raises {type(error).__name__}",
                                "flow": f"--seed {run} --only {number}", "reproducer": traceback.format_exc()}})
        return
    counts.failed += facts.failed
    counts.by_duck += facts.by_duck
    if facts.problem is not None:
        like = f"{facts.problem.kind} {facts.problem.text.splitlines()[-1:]}" if "raises" in facts.problem.kind else ""
        seen[like] += bool(like)
        _tell(out, {"problem": report(run, number, spec, ways, facts, seconds if seen[like] <= SHRUNK_ALIKE else 0.0)})


def _tell(out: IO[str], message: dict[str, object]) -> None:
    out.write(json.dumps(message) + "\n")
    out.flush()


def main() -> None:
    """`flow|udf RUN FIRST STOP SECONDS` checks; `case FILE` checks one pickled flow, and is 0 if it survives."""
    what, *rest = sys.argv[1:]
    if what == "case":
        prepare()
        with open(rest[0], "rb") as file:
            spec, ways = pickle.load(file)
        with suppress(Refused):
            check(spec, ways, with_duck=False)
    else:
        run, first, stop = map(int, rest[:3])
        work(run, first, stop, what, float(rest[3]))
    sys.stderr.flush()
    os._exit(0)  # DuckDB would tell at length what it leaks at an orderly end


if __name__ == "__main__":
    main()
