"""Are the executors fit? What the driver has, what each executor's host has, and whether a small flow compiles there.

What runs on the executors crosses by value and needs nothing but Python, so that it can tell that scalein is missing.
A job whose tasks wait a moment is spread over all free slots; executors that are busy with other work may not answer,
and that is said. `judged` decides, as a function of plain facts.
"""

from __future__ import annotations

import html
import json
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from scalein.connectors.sinks.simple import format_table
from scalein.spark.errors import explained
from scalein.spark.session import quieten_pandas

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PACKAGES = ("pyspark", "scalein", "pyarrow", "llvmlite", "numpy", "pandas")
PAUSE_S = 0.3  # a task keeps its slot this long, so that the others go elsewhere
MOST_TASKS = 1000
BROKEN = "broken"  # there, but it cannot be imported


@dataclass(frozen=True, slots=True)
class Fitness:
    """What one Python has to offer: the driver's, or that of the executors of one host."""

    where: str
    python: str
    packages: dict[str, str]  # "" where it is missing
    cpu: str
    cache: str
    works: bool  # a small flow was compiled and gave the right rows
    verdict: str
    executors: int = 0


@dataclass(frozen=True, slots=True, repr=False)
class Checkup:
    """What `doctor` found: `ok`, the `problems` with their remedies, `notes`, and the facts of each place."""

    spark: str
    driver: Fitness
    executors: tuple[Fitness, ...]
    problems: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return not self.problems

    def __repr__(self) -> str:
        lines = [f"{self.spark}: {self._verdict()}", "", format_table(self._table()), ""]
        lines += [f"{name:<8} {text}" for name, text in self._lines()]
        return "\n".join(lines).rstrip()

    def _repr_html_(self) -> str:
        table = self._table()
        head = "".join(f"<th>{html.escape(name)}</th>" for name in table.column_names)
        body = "".join("<tr>" + "".join(f"<td>{html.escape(str(cell))}</td>" for cell in row.values()) + "</tr>"
                       for row in table.to_pylist())
        items = "".join(f"<li><b>{name}</b> {html.escape(text)}</li>" for name, text in self._lines())
        return (f"<p>{html.escape(self.spark)}: <b>{html.escape(self._verdict())}</b></p>"
                f"<table><tr>{head}</tr>{body}</table><ul>{items}</ul>")

    def _verdict(self) -> str:
        if self.ok:
            return "fit for scalein"
        return f"not fit for scalein, {len(self.problems)} problem{'s' * (len(self.problems) > 1)}"

    def _table(self) -> pa.Table:
        places = (self.driver, *self.executors)
        columns = {"": [place.where for place in places], "python": [place.python for place in places]}
        columns |= {name: [place.packages.get(name) or "missing" for place in places] for name in PACKAGES}
        return pa.table(columns)

    def _lines(self) -> Iterator[tuple[str, str]]:
        for name in ("cpu", "cache", "verdict"):
            places: dict[str, list[str]] = {}
            for place in (self.driver, *self.executors):
                places.setdefault(getattr(place, name), []).append(place.where)
            label = "compiler" if name == "verdict" else name
            yield from ((label, f"{text} [{', '.join(where)}]") for text, where in places.items() if text)
        yield from (("note", note) for note in self.notes)
        yield from (("problem", problem) for problem in self.problems)


def doctor(spark: SparkSession, timeout: float = 60.0) -> Checkup:
    """Whether the executors of a session can run flows, and what to do if they cannot.

    `timeout` is how many seconds executors have to answer.
    """
    quieten_pandas()
    driver = _read(next(_probe()([])))
    answers: list[str] = []
    problems: list[str] = []
    known = 1
    try:
        slots, known, ask = _asker(spark)
        answers = _within(timeout, spark, lambda: ask(min(2 * slots, MOST_TASKS)))
    except TimeoutError:
        problems.append(f"no executor has answered within {timeout:g} s: are there workers, and do they have the cores "
                        "and the memory that the session asks for?")
    except Exception as error:
        ours = explained(error)
        problems.append(_sentence(ours.what, ours.hint) if ours else
                        f"a small job fails: {type(error).__name__}: {str(error).strip().splitlines()[0]}")
    executors = gathered(answers)
    more, notes = judged(driver, executors)
    asked = sum(place.executors for place in executors)
    if executors and asked < known:
        notes.append(f"{asked} of {known} executors answered; the others were busy")
    about = f"Spark {spark.version}" + ("" if _is_remote(spark) else f", {spark.sparkContext.master}")
    return Checkup(about, driver, executors, (*problems, *more), tuple(notes))


def judged(driver: Fitness, executors: Sequence[Fitness]) -> tuple[list[str], list[str]]:
    """What keeps flows from running on these executors, each with its remedy; and what one should know."""
    problems, notes = [], []
    for place in (driver, *executors):
        missing = [name for name in PACKAGES if not place.packages.get(name)]
        if "scalein" in missing:
            problems.append(f"{place.where} has no scalein: install it there, or call scalein.spark.ship(spark) once")
        others = [name for name in missing if name != "scalein"]
        if others:
            problems.append(f'{place.where} has no {" and no ".join(others)}: pip install "scalein[spark]" there')
        if not missing and not place.works:
            problems.append(f"the compiler {place.verdict} on {place.where}")
    for place in executors:
        ours, theirs = driver.packages.get("scalein"), place.packages.get("scalein")
        if theirs and theirs not in (BROKEN, ours):
            problems.append(f"{place.where} has scalein {theirs}, the driver {ours}: plans of one version are for that "
                            "version; install the same, or call scalein.spark.ship(spark) once")
        unlike = [f"{name} {place.packages[name]} (driver: {driver.packages[name]})" for name in PACKAGES
                  if name != "scalein" and place.packages.get(name) not in (None, "", driver.packages.get(name))]
        if unlike:
            notes.append(f"{place.where} has {', '.join(unlike)}")
    cpus = {place.cpu for place in executors if place.cpu}
    if len(cpus) > 1:
        notes.append(f"{len(cpus)} kinds of CPUs: each compiles for its own")
    return problems, notes


def gathered(answers: Iterable[str]) -> tuple[Fitness, ...]:
    """One entry a host, or several if the Pythons of a host differ; each with the number of its executors."""
    places: dict[str, tuple[dict[str, Any], set[int]]] = {}
    for answer in answers:
        facts = json.loads(answer)
        process = facts.pop("process")
        alike = json.dumps({key: facts[key] for key in ("where", "python", "packages", "works")}, sort_keys=True)
        places.setdefault(alike, (facts, set()))[1].add(process)
    return tuple(Fitness(**facts, executors=len(processes)) for _, (facts, processes) in sorted(places.items()))


def _read(answer: str) -> Fitness:
    facts = json.loads(answer)
    del facts["process"]
    return Fitness(**{**facts, "where": "driver"})


def _sentence(what: str, hint: str | None) -> str:
    return f"{what}: {hint}" if hint else what


def _probe() -> Callable[[Iterable[object]], Iterator[str]]:
    """What runs on executors. A function of a function is pickled with its code, and not by the name of its module."""

    def probe(rows: Iterable[object]) -> Iterator[str]:
        import importlib
        import json
        import os
        import platform
        import socket
        import time

        for _ in rows:
            time.sleep(PAUSE_S)
        packages = {}
        for name in PACKAGES:
            try:
                packages[name] = importlib.import_module(name).__version__
            except ModuleNotFoundError as error:
                packages[name] = "" if error.name == name else BROKEN
            except Exception:
                packages[name] = BROKEN
        facts = {"where": socket.gethostname(), "process": os.getppid(), "packages": packages,
                 "python": platform.python_version(), "cpu": "", "cache": "", "works": False, "verdict": ""}
        try:
            from scalein.api.self_check import try_compiler
            from scalein.kernels.machine import describe_cache, describe_cpu
            from scalein.options import Options

            facts["cpu"], facts["cache"] = describe_cpu(), describe_cache(Options.make().cache)
            facts["works"], facts["verdict"] = try_compiler()
        except Exception as error:
            facts["verdict"] = f"fails: {type(error).__name__}: {error}"
        yield json.dumps(facts)

    return probe


def _asker(spark: SparkSession) -> tuple[int, int, Callable[[int], list[str]]]:
    """Slots of the session, executors that it has, and how to run that many probes there."""
    probe = _probe()
    if not _is_remote(spark):
        context = spark.sparkContext
        known = int(context._jsc.sc().getExecutorMemoryStatus().size()) - (not str(context.master).startswith("local"))
        return context.defaultParallelism, known, lambda tasks: context.parallelize(
            range(tasks), tasks).mapPartitions(probe).collect()

    def as_batches(batches: Iterable[Any]) -> Iterator[Any]:  # a client of Spark Connect has no RDDs
        import pyarrow as pa

        for answer in probe(batches):
            yield pa.RecordBatch.from_pydict({"answer": [answer]})

    slots = int(spark.conf.get("spark.sql.shuffle.partitions") or "2")
    return slots, 1, lambda tasks: [row[0] for row in spark.range(0, tasks, 1, tasks).mapInArrow(
        as_batches, "answer string").collect()]


def _within(seconds: float, spark: SparkSession, work: Callable[[], list[str]]) -> list[str]:
    """What `work` gives; its job is cancelled after that many seconds, and TimeoutError is raised."""
    is_late = threading.Event()
    tag = "scalein-doctor"

    def cancel() -> None:
        is_late.set()
        if _is_remote(spark):
            spark.interruptTag(tag)
        else:
            spark.sparkContext.cancelJobGroup(tag)

    timer = threading.Timer(seconds, cancel)
    timer.daemon = True
    if _is_remote(spark):
        spark.addTag(tag)
    else:
        spark.sparkContext.setJobGroup(tag, "scalein.spark.doctor", interruptOnCancel=True)
    timer.start()
    try:
        return work()
    except Exception as error:
        raise (TimeoutError() if is_late.is_set() else error) from error
    finally:
        timer.cancel()
        if _is_remote(spark):
            spark.removeTag(tag)
        else:
            for name in ("spark.jobGroup.id", "spark.job.description", "spark.job.interruptOnCancel"):
                spark.sparkContext.setLocalProperty(name, None)  # type: ignore[arg-type]


def _is_remote(spark: SparkSession) -> bool:
    return type(spark).__module__.startswith("pyspark.sql.connect")
