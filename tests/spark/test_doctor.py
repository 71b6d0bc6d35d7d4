"""`scalein.spark.doctor`: reports facts, and problems with their remedies."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import scalein
from scalein.spark.doctor import PACKAGES, PythonReport, Report, diagnose, doctor, group_by_host
from tests.spark.pythons import python_that, without

HERE = PythonReport("driver", "3.11.2", dict.fromkeys(PACKAGES, "1.0"), "a CPU", "a folder", True, "works")
THERE = replace(HERE, where="host-1", executors=2)


def test_a_local_session_is_fit(spark: Any) -> None:
    found = doctor(spark)
    assert found.ok, found
    assert found.problems == ()
    (place,) = found.executors
    assert place.packages == found.driver.packages
    assert place.packages["scalein"] == scalein.__version__
    assert place.works
    shown = repr(found)
    assert shown.startswith(f"Spark {spark.version}, local[2]: fit for scalein\n")
    assert "cpu " in shown
    assert "cache " in shown
    assert "<table>" in found._repr_html_()


@pytest.mark.parametrize(("packages", "message"), [
    (("scalein",), "has no scalein: install it there, or call scalein.spark.ship(spark) once"),
    (("llvmlite", "pandas"), 'has no llvmlite and no pandas: pip install "scalein[spark]" there'),
])
def test_a_missing_package_is_reported(spark: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
                                       packages: tuple[str, ...], message: str) -> None:
    monkeypatch.setattr(spark.sparkContext, "pythonExec", python_that(tmp_path, without(*packages)))
    found = doctor(spark)
    assert not found.ok
    assert any(problem.endswith(message) for problem in found.problems), found
    assert "not fit for scalein, 1 problem\n" in repr(found)


def test_another_python_is_reported(spark: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spark.sparkContext, "pythonVer", "3.2")
    (problem,) = doctor(spark).problems
    assert problem.startswith(f"the executors run Python 3.{sys.version_info[1]}, the driver 3.2, and Spark needs one")


def test_a_missing_python_is_reported(spark: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spark.sparkContext, "pythonExec", "/no/such/python")
    (problem,) = doctor(spark).problems
    assert problem.startswith("an executor has no Python at /no/such/python: set PYSPARK_PYTHON")


def test_executors_that_do_not_answer(spark: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    slow = python_that(tmp_path, "import time; time.sleep(1.5)\n")
    monkeypatch.setattr(spark.sparkContext, "pythonExec", slow)
    (problem,) = doctor(spark, timeout=0.5).problems
    assert problem.startswith("no executor has answered within 0.5 s")


class _Remote:
    """A session of Spark Connect that runs tasks here."""

    version = "4.1.0"

    def __init__(self) -> None:
        self.tasks: list[int] = []

    def range(self, start: int, end: int, step: int, partitions: int) -> _Remote:
        assert (start, end, step) == (0, partitions, 1)
        self.tasks.append(partitions)
        return self

    def mapInArrow(self, fn: Any, schema: str) -> _Remote:
        self._fn = fn
        return self

    def collect(self) -> list[tuple[str]]:
        return [(batch.column(0)[0].as_py(),) for _ in range(self.tasks[-1]) for batch in self._fn(iter([]))]

    def addTag(self, tag: str) -> None:
        self.tags = {tag}

    def removeTag(self, tag: str) -> None:
        self.tags.remove(tag)


def test_a_session_of_spark_connect_is_asked_few_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_Remote, "__module__", "pyspark.sql.connect.session")
    session = _Remote()
    found = doctor(session)  # type: ignore[arg-type]
    assert found.ok, found
    assert session.tasks == [4]
    assert not session.tags


def test_different_versions_are_reported() -> None:
    assert diagnose(HERE, [THERE]) == ([], [])
    older = replace(THERE, packages={**THERE.packages, "scalein": "0.9", "pyarrow": "0.8"})
    problems, notes = diagnose(HERE, [THERE, older])
    assert problems == ["host-1 has scalein 0.9, the driver 1.0: both need the same version; install "
                        "the same, or call scalein.spark.ship(spark) once"]
    assert notes == ["host-1 has pyarrow 0.8 (driver: 1.0)"]
    assert diagnose(HERE, [THERE, replace(THERE, cpu="other")])[1] == ["2 kinds of CPUs: each compiles for its own"]
    assert diagnose(HERE, [replace(THERE, works=False, verdict="fails: X")])[0] == ["the compiler fails: X on host-1"]


def test_executors_of_a_host_are_grouped() -> None:
    answer = ('{"where": "%s", "process": %d, "packages": {}, "python": "3", "cpu": "", "cache": "", "works": true, '
              '"verdict": "took 1 ms"}')
    found = group_by_host([answer % ("b", 1), answer % ("a", 1), answer % ("a", 2), answer % ("a", 1)])
    assert [(place.where, place.executors) for place in found] == [("a", 2), ("b", 1)]


def test_html_is_escaped() -> None:
    shown = Report("Spark", HERE, (replace(THERE, where="<b>"),), ("<i>",), ())._repr_html_()
    assert "&lt;b&gt;" in shown
    assert "<i>" not in shown
