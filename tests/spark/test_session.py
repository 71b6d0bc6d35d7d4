"""`scalein.spark.session`: the right Python, quiet, reused; and one sentence where Spark cannot start."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import scalein as si
import scalein.spark as sis
from scalein import col
from scalein.errors import NOWHERE, BadData, ComputeError, ScaleinError, SourceLoc, StoreFailed
from scalein.spark.errors import SparkFailed, explain_error, translate_errors
from scalein.spark.package import build_zip
from scalein.spark.session import _defaults, java_version, session
from scalein.storage.object_store import parse_location
from tests.spark.pythons import python_that, without


def test_an_active_session_is_reused(spark: Any) -> None:
    assert session() is spark
    before = spark.conf.get("spark.sql.shuffle.partitions")
    assert session(config={"spark.sql.shuffle.partitions": 9}).conf.get("spark.sql.shuffle.partitions") == "9"
    spark.conf.set("spark.sql.shuffle.partitions", before)


def test_workers_run_this_python(spark: Any) -> None:
    found = spark.sparkContext.parallelize([0], 1).map(lambda _: sys.executable).collect()
    assert [os.path.realpath(path) for path in found] == [os.path.realpath(sys.executable)]


def test_defaults_of_a_remote_master() -> None:
    assert "spark.driver.host" in _defaults(2, None)
    assert "spark.driver.host" not in _defaults(2, "spark://127.0.0.1:7077")


# --- Java


def fake_java(folder: Path, message: str, code: int = 0) -> Path:
    (folder / "bin").mkdir()
    java = folder / "bin" / "java"
    java.write_text(f"#!/bin/sh\ncat >&2 <<'END'\n{message}\nEND\nexit {code}\n", encoding="utf-8")
    java.chmod(0o755)
    return folder


def test_no_java_is_one_sentence_and_a_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SparkFailed, match=r"^Spark needs Java 17 or newer, and there is none\n") as caught:
        java_version()
    assert "apt install openjdk-17-jre-headless" in str(caught.value.hint)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(SparkFailed, match="has no bin/java"):
        java_version()


@pytest.mark.parametrize(("message", "number"), [
    ('openjdk version "17.0.15" 2025-04-15', 17), ('java version "21" 2023-09-19', 21),
    ('java version "1.8.0_402"', None), ('openjdk version "11.0.2"', None), ("no such thing", None)])
def test_the_version_of_java_is_checked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, message: str,
                                        number: int | None) -> None:
    monkeypatch.setenv("JAVA_HOME", str(fake_java(tmp_path, message)))
    if number is not None:
        assert java_version() == number
    else:
        with pytest.raises(SparkFailed, match="needs Java 17 or newer") as caught:
            java_version()
        assert message in str(caught.value)


_BROKEN = """
from scalein.spark.session import session
session()
"""


def test_the_error_of_a_java_that_does_not_start_is_shown(tmp_path: Path) -> None:
    script = fake_java(tmp_path, 'openjdk version "17.0.1"\nError: Module jdk.incubator.vector not found', 1)
    done = subprocess.run([sys.executable, "-c", _BROKEN], capture_output=True, text=True, timeout=120,
                          env={**os.environ, "JAVA_HOME": str(script)})
    last = done.stderr[done.stderr.rindex("scalein.spark.errors.SparkFailed: ") :].splitlines()
    assert last[0].endswith("Spark did not start")
    assert last[1].split(maxsplit=1) == ["found", "Error: Module jdk.incubator.vector not found"]
    assert "this Java lacks a module" in last[2]


@pytest.mark.parametrize(("config", "reason", "hint"), [
    ({"spark.driver.memory": "1k"}, "heap", "spark.driver.memory than 1k"),
    ({"spark.driver.memory": "20m"}, "java.lang.OutOfMemoryError", "spark.driver.memory than 20m"),
    ({"spark.master": "nonsense"}, "org.apache.spark.SparkException: Master must", None),
    ({"spark.serializer": "no.such.Serializer"}, "no.such.Serializer", None),
])  # fmt: skip
def test_a_failure_to_start_has_the_jvms_own_words(config: dict[str, str], reason: str, hint: str | None) -> None:
    code = f"from scalein.spark.session import session\nsession(config={config!r})\n"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    last = done.stderr[done.stderr.rindex("scalein.spark.errors.SparkFailed: ") :]
    assert last.splitlines()[0].endswith("Spark did not start")
    assert re.search(rf"^  found  .*{re.escape(reason)}", last, re.M | re.I), last
    assert "lacks a module" not in last
    assert (hint in last) if hint is not None else ("hint" not in last)


# --- translated errors

_TRACE = """Job aborted due to stage failure: Task 0 in stage 1.0 failed 4 times, most recent failure: Lost task 0.3 \
in stage 1.0 (TID 7) (10.0.0.3 executor 1): org.apache.spark.api.python.PythonException: Traceback (most recent call \
last):
  File "worker.py", line 3, in main
{last}

\tat org.apache.spark.api.python.BasePythonRunner$ReaderIterator.handlePythonException(PythonRunner.scala:572)
\tat java.base/java.lang.Thread.run(Thread.java:840)

Driver stacktrace:
\tat org.apache.spark.scheduler.DAGScheduler.abortStage(DAGScheduler.scala:2787)
"""


def in_spark(last: str) -> RuntimeError:
    return RuntimeError(_TRACE.format(last=last))


@pytest.mark.parametrize("error", [
    ComputeError("integer overflow in `x * 2`", at=SourceLoc("report.py", 12), found="9223372036854775807"),
    BadData("the function 'f' of map_batches raised ValueError on batch 0", found="no such\ncurrency", hint="look"),
    ScaleinError("plain"),
    SparkFailed("ours"),
])
def test_a_scalein_error_is_rebuilt_from_its_text(error: ScaleinError) -> None:
    name = f"{type(error).__module__}.{type(error).__qualname__}"
    found = explain_error(in_spark(f"ValueError: x\n\nDuring handling of the above exception, ...\n\n{name}: {error}"))
    assert type(found) is type(error)
    assert (str(found), found.what, found.hint, found.facts) == (str(error), error.what, error.hint, error.facts)


@pytest.mark.parametrize(("text", "what", "hint"), [
    ("pyspark.errors.exceptions.base.PySparkRuntimeError: [PYTHON_VERSION_MISMATCH] Python in worker has different "
     "version: 3.9 than that in driver: 3.11, PySpark cannot run with different minor versions.",
     "the executors run Python 3.9, the driver 3.11, and Spark needs one version", "PYSPARK_PYTHON"),
    ("ModuleNotFoundError: No module named 'scalein'", "the Python of an executor has no package scalein",
     "scalein.spark.ship(spark)"),
    ("ImportError: cannot import name 'X' from 'scalein.spark.map_reduce' (/a/scalein/spark/map_reduce.py)",
     "an executor has another scalein than the driver", "scalein.spark.ship(spark)"),
    ("ModuleNotFoundError: No module named 'llvmlite.ir'", "the Python of an executor has no package llvmlite",
     'pip install "scalein[spark]"'),
    ("[PACKAGE_NOT_INSTALLED] Pandas >= 2.2.0 must be installed; however, it was not found.",
     "the Python of an executor or of the driver has no package Pandas", 'pip install "scalein[spark]"'),
    ("[UNSUPPORTED_PACKAGE_VERSION] PyArrow >= 18.0.0 must be installed; however, your version is 4.0.1.",
     "Spark needs PyArrow 18.0.0 or newer, and there is 4.0.1", "--upgrade"),
    ('java.io.IOException: Cannot run program "/opt/py/bin/python": error=2, No such file or directory',
     "an executor has no Python at /opt/py/bin/python", "PYSPARK_PYTHON"),
    ("org.apache.spark.SparkException: Python worker exited unexpectedly (crashed)",
     "a Python worker of Spark ended without a message: killed for its memory, or it crashed", "memory"),
    ("java.lang.IllegalStateException: Cannot call methods on a stopped SparkContext.",
     "the Spark session has ended", "session()"),
])  # fmt: skip
def test_an_unusable_executor_is_one_sentence_and_a_remedy(text: str, what: str, hint: str) -> None:
    with pytest.raises(SparkFailed) as caught, translate_errors():
        raise in_spark(text)
    assert caught.value.what == what
    assert hint in str(caught.value.hint)
    assert caught.value.facts["on"] == "10.0.0.3, executor 1"
    assert "org.apache" not in str(caught.value)
    assert isinstance(caught.value.__context__, RuntimeError)
    assert caught.value.__suppress_context__


def test_a_file_that_spark_cannot_read_is_named() -> None:
    text = ("[FAILED_READ_FILE.CANNOT_READ_FILE_FOOTER] Encountered error while reading file "
            "file:///data/a%20b.parquet. Could not read footer. SQLSTATE: KD001\n\tat x\n"
            "Caused by: java.lang.RuntimeException: no Parquet file\n")
    with pytest.raises(BadData, match=r"^Spark cannot read the file /data/a b\.parquet") as caught, translate_errors():
        raise RuntimeError(text)
    assert caught.value.facts["found"] == "java.lang.RuntimeException: no Parquet file"


READ_FILE = "Encountered error while reading file file:///data/a.parquet. "


@pytest.mark.parametrize(("text", "what", "hint"), [
    ("[FAILED_READ_FILE.PARQUET_COLUMN_DATA_TYPE_MISMATCH] " + READ_FILE + "Data type mismatches when reading Parquet "
     "column [x]. Expected Spark type bigint, actual Parquet type BINARY. SQLSTATE: KD001\n\tat x\n",
     "column 'x' of /data/a.parquet is BINARY, not bigint", "cast the column"),
    ("[FAILED_READ_FILE.NO_HINT] " + READ_FILE + " SQLSTATE: KD001\n\tat x\n"
     "Caused by: java.lang.RuntimeException: file:/data/a.parquet is not a Parquet file. Expected magic number\n",
     "/data/a.parquet is not a Parquet file", "with its own format"),
    ("[FAILED_READ_FILE.NO_HINT] " + READ_FILE + " SQLSTATE: KD001\n\tat x\n"
     "Caused by: java.io.FileNotFoundException: /data/a.parquet (Permission denied)\n",
     "Spark cannot read the file /data/a.parquet", "permission"),
])  # fmt: skip
def test_skipping_files_is_no_advice_for_what_another_file_or_right_mends(text: str, what: str, hint: str) -> None:
    with pytest.raises(BadData) as caught, translate_errors():
        raise RuntimeError(text)
    assert caught.value.what == what
    assert hint in str(caught.value.hint)
    assert "ignoreCorruptFiles" not in str(caught.value)


def test_a_checkpoint_where_no_folder_can_be_created() -> None:
    with pytest.raises(StoreFailed, match="cannot create a folder of /proc/checkpoint"):
        parse_location("/proc/checkpoint", NOWHERE).create_folders("state")


def test_other_errors_pass_unchanged() -> None:
    with pytest.raises(RuntimeError, match="disk full"), translate_errors():
        raise in_spark("OSError: disk full")


def test_errors_of_workers_are_found_in_sparks_message(spark: Any, monkeypatch: pytest.MonkeyPatch,
                                                       tmp_path: Path) -> None:
    flow = si.flow({"id": pa.int64()}).select(big=col("id") * 2**62)
    df = spark.range(5).mapInArrow(flow.map_in_arrow, sis.schema(flow))
    with pytest.raises(ComputeError, match="overflow") as caught, translate_errors():
        df.collect()
    assert caught.value.facts["at"].startswith("test_session.py:")
    monkeypatch.setattr(spark.sparkContext, "pythonExec", python_that(tmp_path, without("llvmlite")))
    df = spark.range(5).mapInArrow(flow.map_in_arrow, sis.schema(flow))
    with pytest.raises(SparkFailed, match="the Python of an executor has no package llvmlite"), translate_errors():
        df.collect()


_LIMITED = """
import pyarrow as pa, scalein as si, scalein.spark as sis
from scalein.spark.errors import translate_errors
spark = sis.session(cores=1, config={
    "spark.executor.pyspark.memory": "200m", "spark.task.maxFailures": 1,
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"})
q = si.flow({"id": pa.int64()}).select(y=si.col("id") + 1)
with translate_errors():
    spark.range(10).mapInArrow(q.map_in_arrow, sis.schema(q)).collect()
"""


def test_a_limit_of_memory_is_named() -> None:
    done = subprocess.run([sys.executable, "-c", _LIMITED], capture_output=True, text=True, timeout=120)
    last = done.stderr[done.stderr.rindex("scalein.spark.errors.SparkFailed: ") :]
    assert "has no memory left: spark.executor.pyspark.memory is 200m" in last
    assert "raise spark.executor.pyspark.memory" in last


# --- ship


def test_a_zip_has_the_whole_package_and_works(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    zipped = build_zip(tmp_path)
    assert zipped.name == build_zip(tmp_path / "a").name
    assert {"scalein/spark/errors.py", "scalein/spark/errors.pyc"} <= {*zipfile.ZipFile(zipped).namelist()}
    code = ("import sys; sys.path.insert(0, sys.argv[1]); import scalein; "
            "from scalein.api.self_check import try_compiler; print(scalein.__file__, *try_compiler())")
    done = subprocess.run([sys.executable, "-c", code, str(zipped)], capture_output=True, text=True, check=True)
    assert done.stdout.startswith(f"{zipped}/scalein/__init__.pyc True works")
