"""scalein doctor: what this machine offers scalein, one line each: CPU, cores, memory, cache folder, versions.

Every line is measured or read now; nothing is guessed from a name. The last line runs a small flow through the
compiler and compares it with the reference interpreter: exit code 1 if that fails.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shutil
import stat
import sys
import time
from importlib import metadata
from pathlib import Path

import pyarrow as pa

import scalein as si
from scalein import col
from scalein.kernels.machine import copy_bandwidth
from scalein.options import Options, granted_cores

VECTOR_FEATURES = ("sse4.2", "avx", "avx2", "fma", "bmi2", "avx512f", "avx512bw", "avx512dq", "avx512vl",
                   "avx512vbmi2", "neon", "sve", "sve2")  # LLVM's names


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """None: there is nothing to choose."""


def run(args: argparse.Namespace) -> int:
    options = Options.make()
    print(f"cpu       {describe_cpu()}")
    print(f"cores     {granted_cores()} granted of {os.cpu_count()}; workers by default: {options.workers}")
    print(f"memory    {describe_memory(_proc_fields('/proc/meminfo'))}")
    print(f"bandwidth {describe_bandwidth(granted_cores())}")
    print(f"cache     {describe_cache(options.cache)}")
    print(f"options   cpu={options.cpu}, safe={'on' if options.safe else 'off'} (SCALEIN_CPU, SCALEIN_SAFE)")
    print(f"versions  {describe_versions()}")
    print(f"java      {describe_java()}")
    print(f"pyspark   {_version('pyspark', 'not found')}")
    works, verdict = try_compiler()
    print(f"compiler  {verdict}")
    return 0 if works else 1


def describe_cpu() -> str:
    """The model's name, LLVM's name for it, and the vector features that kernels can use."""
    name = _proc_fields("/proc/cpuinfo").get("model name") or platform.processor() or platform.machine()
    try:
        from scalein.llvm_backend.target import target_for  # here, so that a broken llvmlite leaves us the other lines

        target = target_for("native")
    except (ImportError, OSError, RuntimeError) as error:
        return f"{name}; LLVM cannot be asked: {error}"
    found = target.features.split(",")
    return f"{name} ({target.cpu}): {' '.join(f for f in VECTOR_FEATURES if f'+{f}' in found)}"


def describe_memory(fields: dict[str, str]) -> str:
    """Total and available memory.

    >>> describe_memory({"MemTotal": "16777216 kB", "MemAvailable": "8388608 kB"})
    '16.0 GiB, 8.0 GiB available'
    """
    try:
        total, available = (int(fields[key].split()[0]) / (1 << 20) for key in ("MemTotal", "MemAvailable"))
    except (KeyError, ValueError):
        return "unknown"
    return f"{total:.1f} GiB, {available:.1f} GiB available"


def describe_bandwidth(cores: int) -> str:
    one = copy_bandwidth() / 1e9
    many = f", {copy_bandwidth(cores) / 1e9:.1f} GB/s on {cores}" if cores > 1 else ""
    return f"copy {one:.1f} GB/s on one core{many} (bytes read and written)"


def describe_cache(folder: str) -> str:
    """Where compiled code is kept, and whether it can be: code of a folder that others can write is never loaded."""
    if not folder:
        return "off: compiled code lives as long as the process"
    path = Path(folder)
    try:
        if not path.exists():
            parent = next(p for p in path.parents if p.exists())
            able = os.access(parent, os.W_OK)
            return f"{folder}: " + ("not there yet" if able else "cannot be made, every process compiles anew")
        found = path.stat()
        files = [entry.stat().st_size for entry in path.rglob("*") if entry.is_file()]
    except OSError as error:
        return f"{folder}: not readable ({error.strerror}), every process compiles anew"
    state = f"{len(files)} file{'s' * (len(files) != 1)}, {sum(files) / 1e6:.1f} MB"
    if found.st_uid != os.getuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"{folder}: {state}, not private to you, so not used"
    return f"{folder}: {state}, {'private' if os.access(path, os.W_OK) else 'not writable, new code is not kept'}"


def describe_versions() -> str:
    packages = ", ".join(f"{name} {_version(name)}" for name in ("llvmlite", "numpy", "pyarrow"))
    system = f"{platform.system()} {platform.release()} {platform.machine()}"
    return f"scalein {si.__version__}, {packages}, python {platform.python_version()}, {system}"


def describe_java() -> str:
    """The Java that Spark would start, as the file beside it says: none is started to be asked."""
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


def try_compiler() -> tuple[bool, str]:
    """Whether a small flow gives the same compiled and interpreted, and the sentence that says so."""
    table = pa.table({"k": [1, 2, 1, 3], "v": [10, 20, 30, 40]})
    flow = si.from_arrow(table).filter(col("v") > 10).group_by("k").agg(total=col("v").sum())
    start = time.perf_counter()
    try:
        got = flow.collect(engine="llvm")
    except Exception as error:  # whatever is broken here, the doctor is to report it
        return False, f"fails: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    took_ms = (time.perf_counter() - start) * 1e3
    if not got.sort_by("k").equals(flow.collect(engine="interp").sort_by("k")):
        return False, "gives wrong results: please report this with the lines above"
    return True, f"works; a first small flow took {took_ms:.0f} ms"


def _version(package: str, otherwise: str = "missing") -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return otherwise


def _proc_fields(path: str) -> dict[str, str]:
    """`name: value` lines of a /proc file, the first of each name; empty where there is no such file."""
    if not sys.platform.startswith("linux"):
        return {}
    fields: dict[str, str] = {}
    try:
        for line in Path(path).read_text(encoding="utf-8").splitlines():
            name, _, value = line.partition(":")
            fields.setdefault(name.strip(), value.strip())
    except OSError:
        pass
    return fields
