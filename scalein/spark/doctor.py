"""Can the executors run flows? Facts of the driver and of each executor's host, and whether a small flow compiles.

The function that runs on executors is pickled by value and needs only Python, so that it can report that scalein is
missing. A job whose tasks wait a moment spreads over all free slots; executors that are busy with other work may not
answer, and the report says so. `diagnose` is a pure function of the facts.
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
from scalein.spark.errors import explain_error
from scalein.spark.session import silence_pandas_warning

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PACKAGES = ("pyspark", "scalein", "pyarrow", "llvmlite", "numpy", "pandas")
PAUSE_S = 0.3  # a task occupies its slot this long, so that other tasks go to other executors
MAX_TASKS = 1000
REMOTE_SLOTS = 2  # assumed for a session of Spark Connect, which does not say how many it has
BROKEN = "broken"  # installed, but cannot be imported


@dataclass(frozen=True, slots=True)
class PythonReport:
    """Facts of one Python: the driver's, or that of the executors of one host."""

    where: str
    python: str
    packages: dict[str, str]  # "" where it is missing
    cpu: str
    cache: str
    works: bool  # a small flow compiles and gives the right rows
    verdict: str
    executors: int = 0


@dataclass(frozen=True, slots=True, repr=False)
class Report:
    """What `doctor` found: `ok`, the `problems` with their remedies, `notes`, and the facts of each host."""

    spark: str
    driver: PythonReport
    executors: tuple[PythonReport, ...]
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


def doctor(spark: SparkSession, timeout: float = 60.0) -> Report:
    """Whether the executors of a session can run flows, and what to do if they cannot.

    `timeout` is in seconds: executors must answer within it.
    """
    silence_pandas_warning()
    driver = _read(next(_probe()([])))
    answers: list[str] = []
    problems: list[str] = []
    executor_count = 1
    try:
        slots, executor_count, run_probes = _prober(spark)
        answers = _run_with_timeout(timeout, spark, lambda: run_probes(min(2 * slots, MAX_TASKS)))
    except TimeoutError:
        problems.append(f"no executor has answered within {timeout:g} s: are there workers, and do they have the cores "
                        "and the memory that the session asks for?")
    except Exception as error:
        translated = explain_error(error)
        problems.append(_sentence(translated.what, translated.hint) if translated else
                        f"a small job fails: {type(error).__name__}: {str(error).strip().splitlines()[0]}")
    executors = group_by_host(answers)
    more, notes = diagnose(driver, executors)
    answered = sum(place.executors for place in executors)
    if executors and answered < executor_count:
        notes.append(f"{answered} of {executor_count} executors answered; the others were busy")
    title = f"Spark {spark.version}" + ("" if _is_remote(spark) else f", {spark.sparkContext.master}")
    return Report(title, driver, executors, (*problems, *more), tuple(notes))


def diagnose(driver: PythonReport, executors: Sequence[PythonReport]) -> tuple[list[str], list[str]]:
    """The problems that keep flows from running on these executors, each with its remedy; and notes."""
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
        wanted, found = driver.packages.get("scalein"), place.packages.get("scalein")
        if found and found not in (BROKEN, wanted):
            problems.append(f"{place.where} has scalein {found}, the driver {wanted}: both need the same version; "
                            "install the same, or call scalein.spark.ship(spark) once")
        differing = [f"{name} {place.packages[name]} (driver: {driver.packages[name]})" for name in PACKAGES
                     if name != "scalein" and place.packages.get(name) not in (None, "", driver.packages.get(name))]
        if differing:
            notes.append(f"{place.where} has {', '.join(differing)}")
    cpus = {place.cpu for place in executors if place.cpu}
    if len(cpus) > 1:
        notes.append(f"{len(cpus)} kinds of CPUs: each compiles for its own")
    return problems, notes


def group_by_host(answers: Iterable[str]) -> tuple[PythonReport, ...]:
    """One report for each host, or several if the Pythons of a host differ; each counts its executors."""
    places: dict[str, tuple[dict[str, Any], set[int]]] = {}
    for answer in answers:
        facts = json.loads(answer)
        process = facts.pop("process")
        signature = json.dumps({key: facts[key] for key in ("where", "python", "packages", "works")}, sort_keys=True)
        places.setdefault(signature, (facts, set()))[1].add(process)
    return tuple(PythonReport(**facts, executors=len(processes)) for _, (facts, processes) in sorted(places.items()))


def _read(answer: str) -> PythonReport:
    facts = json.loads(answer)
    del facts["process"]
    return PythonReport(**{**facts, "where": "driver"})


def _sentence(what: str, hint: str | None) -> str:
    return f"{what}: {hint}" if hint else what


def _probe() -> Callable[[Iterable[object]], Iterator[str]]:
    """The function that runs on executors. A nested function is pickled with its code, not by its module's name."""

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


def _prober(spark: SparkSession) -> tuple[int, int, Callable[[int], list[str]]]:
    """The session's slots, the number of its executors, and a function that runs that many probes on them."""
    probe = _probe()
    if not _is_remote(spark):
        context = spark.sparkContext
        managers = int(context._jsc.sc().getExecutorMemoryStatus().size())  # the driver has one, too
        executor_count = managers - (not str(context.master).startswith("local"))
        return context.defaultParallelism, executor_count, lambda tasks: context.parallelize(
            range(tasks), tasks).mapPartitions(probe).collect()

    def as_batches(batches: Iterable[Any]) -> Iterator[Any]:  # a client of Spark Connect has no RDDs
        import pyarrow as pa

        for answer in probe(batches):
            yield pa.RecordBatch.from_pydict({"answer": [answer]})

    return REMOTE_SLOTS, 1, lambda tasks: [row[0] for row in spark.range(0, tasks, 1, tasks).mapInArrow(
        as_batches, "answer string").collect()]


def _run_with_timeout(seconds: float, spark: SparkSession, work: Callable[[], list[str]]) -> list[str]:
    """The result of `work`; after so many seconds its job is cancelled and TimeoutError raised."""
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
