"""scalein doctor: what this machine offers scalein, one line each: CPU, cores, memory, cache folder, versions.

The facts are those of `kernels.machine`. The last line runs a small flow through the compiler and compares the result
with known values: exit code 1 if that fails.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shutil
from importlib import metadata
from pathlib import Path

import scalein as si
from scalein.api.self_check import try_compiler
from scalein.kernels.machine import describe_bandwidth, describe_cache, describe_cpu, describe_memory, proc_fields
from scalein.options import Options, granted_cores


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """None: there is nothing to choose."""


def run(args: argparse.Namespace) -> int:
    options = Options.make()
    print(f"cpu       {describe_cpu()}")
    print(f"cores     {granted_cores()} granted of {os.cpu_count()}; workers by default: {options.workers}")
    print(f"memory    {describe_memory(proc_fields('/proc/meminfo'))}")
    print(f"bandwidth {describe_bandwidth(granted_cores())}")
    print(f"cache     {describe_cache(options.cache)}")
    print(f"options   cpu={options.cpu}, safe={'on' if options.safe else 'off'} (SCALEIN_CPU, SCALEIN_SAFE)")
    print(f"versions  {describe_versions()}")
    print(f"java      {describe_java()}")
    print(f"pyspark   {_version('pyspark', 'not found')}")
    works, verdict = try_compiler()
    print(f"compiler  {verdict}")
    return 0 if works else 1


def describe_versions() -> str:
    packages = ", ".join(f"{name} {_version(name)}" for name in ("llvmlite", "numpy", "pyarrow"))
    system = f"{platform.system()} {platform.release()} {platform.machine()}"
    return f"scalein {si.__version__}, {packages}, python {platform.python_version()}, {system}"


def describe_java() -> str:
    """The Java that Spark would start, and its version by the `release` file of its folder: no JVM is started."""
    home = os.environ.get("JAVA_HOME")
    path = shutil.which(os.path.join(home, "bin", "java") if home else "java")
    if path is None:
        return f"not found: JAVA_HOME is {home}, and has no bin/java" if home else "not found"
    try:
        release = (Path(path).resolve().parent.parent / "release").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        release = ""
    number = re.search(r'^JAVA_VERSION="(.+)"', release, re.MULTILINE)
    return f"{number[1] if number else 'of unknown version'}, {path}"


def _version(package: str, if_missing: str = "missing") -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return if_missing
