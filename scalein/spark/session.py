"""A Spark session for users without one: on this machine, with this interpreter, quiet.

By default Spark's workers run `python3` of the PATH, which is rarely the interpreter with the packages; the JVM prints
half a screen of warnings, uses two hundred shuffle partitions for two cores, and reports a missing Java as "gateway
process exited". Here PYSPARK_PYTHON is this interpreter, Java is checked before it is started, the JVM's stderr is held
back while it starts and shown only if it fails, and a failing task is reported once, by the error that Python raises,
and not by the log as well (`spark.sparkContext.setLogLevel("WARN")` brings the log back).

A daemon thread (`scalein-spark-stderr`) reads the JVM's stderr for as long as the JVM lives.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import threading
import warnings
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from scalein.options import granted_cores
from scalein.spark.errors import SparkFailed, jvm_exception, translate_errors

if TYPE_CHECKING:
    from pyspark import SparkConf
    from pyspark.sql import SparkSession

MIN_JAVA = 17  # of Spark 4
MAX_MEMORY_MB, MIN_MEMORY_MB = 4096, 1024
_GET_JAVA = ("install one (Debian, Ubuntu: apt install openjdk-17-jre-headless; conda: conda install openjdk=17), or "
             "set JAVA_HOME")


def session(cores: int | None = None, config: Mapping[str, object] | None = None) -> SparkSession:
    """The active Spark session, or a new one on this machine, on `cores` cores (default: all that it may use).

    `config` adds Spark settings, or replaces the defaults. Of an active session only SQL settings can change.
    """
    settings = {key: _setting_text(value) for key, value in (config or {}).items()}
    silence_pandas_warning()
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    from pyspark import SparkConf, SparkContext
    from pyspark.sql import SparkSession

    is_remote = "SPARK_REMOTE" in os.environ or "spark.remote" in settings
    if not is_remote and SparkContext._active_spark_context is None:
        java_version()
        conf = SparkConf(loadDefaults=False)
        conf.setAll([*{**_defaults(cores or granted_cores(), settings.get("spark.master")), **settings}.items()])
        _start(conf)
    builder = SparkSession.builder
    for key, value in settings.items():
        builder = builder.config(key, value)
    with translate_errors():
        return builder.getOrCreate()


def java_version() -> int:
    """The version of the Java that Spark would start; raises SparkFailed with a remedy if Spark cannot use it."""
    home = os.environ.get("JAVA_HOME")
    path = shutil.which(os.path.join(home, "bin", "java")) if home else shutil.which("java")
    if path is None:
        found = f"JAVA_HOME is {home}, and has no bin/java" if home else "no java on the PATH, JAVA_HOME is not set"
        raise SparkFailed(f"Spark needs Java {MIN_JAVA} or newer, and there is none", found=found, hint=_GET_JAVA)
    try:
        output = subprocess.run([path, "-version"], capture_output=True, text=True, timeout=60).stderr
    except (OSError, subprocess.SubprocessError) as error:
        output = str(error)
    number = re.search(r'version "(?:1\.)?(\d+)', output)
    if number is None or int(number[1]) < MIN_JAVA:
        raise SparkFailed(f"Spark needs Java {MIN_JAVA} or newer", found=f"{path}: {output.strip().splitlines()[:1]}",
                          hint=_GET_JAVA)
    return int(number[1])


def silence_pandas_warning() -> None:
    """Every mapInArrow warns that Spark does not support pandas 3 yet; mapInArrow does not use pandas."""
    warnings.filterwarnings("ignore", message="PySpark does not yet fully support pandas", category=FutureWarning)


def _defaults(cores: int, master: str | None) -> dict[str, str]:
    """Settings of a local session; for another master only those that hold anywhere."""
    common = {
        "spark.app.name": "scalein",
        "spark.ui.showConsoleProgress": "false",
        "spark.log.level": "FATAL",
        "spark.sql.session.timeZone": "UTC",  # as everywhere in scalein
        "spark.sql.execution.arrow.pyspark.enabled": "true",  # toPandas and createDataFrame
    }
    if master is not None and not master.startswith("local"):
        return common
    return {
        **common,
        "spark.master": f"local[{cores}]",
        "spark.driver.host": "127.0.0.1",  # a machine's own name need not resolve
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.memory": f"{_driver_memory_mb()}m",  # executors of a local session live in the driver
        "spark.ui.enabled": "false",
        # TCP delays small messages by 40 ms and more (delayed acknowledgements), some in every Python task.
        "spark.python.unix.domain.socket.enabled": "true",
        "spark.sql.shuffle.partitions": str(2 * cores),
    }


def _setting_text(setting: object) -> str:
    return str(setting).lower() if isinstance(setting, bool) else str(setting)


def _driver_memory_mb() -> int:
    """A quarter of the machine's memory, within limits: kernels use memory of Python, not of the JVM."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 20
    return min(MAX_MEMORY_MB, max(MIN_MEMORY_MB, total // 4))


def _start(conf: SparkConf) -> None:
    """Start a SparkContext, and a JVM if there is none yet."""
    from pyspark import SparkContext
    from pyspark.java_gateway import launch_gateway

    stderr = _JvmStderr()
    try:
        with translate_errors():
            gateway = SparkContext._gateway
            if gateway is None:
                with _vm_output_to_stderr():
                    gateway = launch_gateway(conf, {"stderr": stderr.write_to})  # type: ignore[no-untyped-call]
            stderr.close_write_end()
            SparkContext(conf=conf, gateway=gateway)
    except SparkFailed:
        raise
    except Exception as error:
        reason = jvm_exception(error) or stderr.reason() or str(error).splitlines()[0]
        raise SparkFailed("Spark did not start", found=reason, hint=_start_hint(reason, conf)) from error
    finally:
        stderr.close_write_end()
        stderr.pass_on()


@contextmanager
def _vm_output_to_stderr() -> Iterator[None]:
    """A JVM that starts meanwhile writes to its stderr why it cannot, and not to stdout, which is this process's."""
    before = os.environ.get("SPARK_SUBMIT_OPTS")
    os.environ["SPARK_SUBMIT_OPTS"] = f"{before or ''} -XX:+DisplayVMOutputToStderr".strip()
    try:
        yield
    finally:
        if before is None:
            del os.environ["SPARK_SUBMIT_OPTS"]
        else:
            os.environ["SPARK_SUBMIT_OPTS"] = before


def _start_hint(reason: str, conf: SparkConf) -> str | None:
    """What to do about a failure to start."""
    if "jdk.incubator.vector" in reason:
        return "this Java lacks a module that Spark 4 needs; " + _GET_JAVA
    if "UnsupportedClassVersionError" in reason:
        return "this Java is too old; " + _GET_JAVA
    if re.search(r"heap|memory", reason, re.I):
        return f"give Spark another spark.driver.memory than {conf.get('spark.driver.memory', '1g')}"
    return None


class _JvmStderr:
    """The JVM's stderr: buffered while it starts, passed on afterwards."""

    def __init__(self) -> None:
        read_from, self.write_to = os.pipe()
        self._lines: deque[str] = deque(maxlen=200)
        self._passes_on = False
        self._is_write_end_open = True
        self._thread = threading.Thread(target=self._read, args=(read_from,), name="scalein-spark-stderr", daemon=True)
        self._thread.start()

    def close_write_end(self) -> None:
        """Close this process's write end: the JVM has inherited its own."""
        if self._is_write_end_open:
            self._is_write_end_open = False
            os.close(self.write_to)

    def pass_on(self) -> None:
        self._passes_on = True

    def reason(self) -> str:
        """Why the JVM did not start: its exception, or what it says instead, or the first line about an error."""
        self._thread.join(timeout=1)  # it ends with the JVM
        lines = [line.strip() for line in self._lines if line.strip()]
        for first, line in zip(["", *lines], lines, strict=False):
            if (thrown := re.match(r'Exception in thread "\w+" ', line)) is not None:
                return line[thrown.end() :]
            if first == "Error occurred during initialization of VM":
                return line
        return next((line for line in lines if re.search(r"error|exception|not set|cannot|could not", line, re.I)),
                    lines[-1] if lines else "")

    def _read(self, read_from: int) -> None:
        with open(read_from, encoding="utf-8", errors="replace") as file:
            for line in file:
                if self._passes_on:
                    print(line, end="", file=sys.stderr, flush=True)
                else:
                    self._lines.append(line)
