"""Facts of this machine: CPU, memory, cache folder, and the memory bandwidth that bounds most scans.

`scalein doctor`, Spark's doctor and `explain(analyze=True)` read them. Every fact is measured or read at the call;
nothing is guessed from a name.
"""

from __future__ import annotations

import os
import platform
import stat
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

COPY_BYTES = 256 << 20  # far beyond L2, and beyond one core's share of most L3s
VECTOR_FEATURES = ("sse4.2", "avx", "avx2", "fma", "bmi2", "avx512f", "avx512bw", "avx512dq", "avx512vl",
                   "avx512vbmi2", "neon", "sve", "sve2")  # LLVM's names


def copy_bandwidth(threads: int = 1, size_bytes: int = COPY_BYTES, repeats: int = 4) -> float:
    """Bytes a second that threads read and write when they copy large arrays, best of some repeats."""
    source = np.ones(size_bytes // 8, dtype=np.int64)
    target = np.empty_like(source)
    parts = list(zip(np.array_split(target, threads), np.array_split(source, threads), strict=True))
    times_s = []
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(repeats + 1):  # the first one also faults the target's pages in
            start = time.perf_counter()
            list(pool.map(lambda part: np.copyto(*part), parts))  # numpy releases the GIL while it copies
            times_s.append(time.perf_counter() - start)
    return 2 * source.nbytes / min(times_s[1:])


def describe_cpu() -> str:
    """The model's name, LLVM's name for it, and the vector features that kernels can use."""
    name = proc_fields("/proc/cpuinfo").get("model name") or platform.processor() or platform.machine()
    try:
        from scalein.llvm_backend.target import target_for  # lazy: a broken llvmlite must not hide the other facts

        target = target_for("native")
    except (ImportError, OSError, RuntimeError) as error:
        return f"{name}; LLVM cannot be asked: {error}"
    found = target.features.split(",")
    return f"{name} ({target.cpu}): {' '.join(f for f in VECTOR_FEATURES if f'+{f}' in found)}"


def describe_memory(fields: dict[str, str]) -> str:
    """Total and available memory, of the fields of /proc/meminfo.

    >>> describe_memory({"MemTotal": "16777216 kB", "MemAvailable": "8388608 kB"})
    '16.0 GiB, 8.0 GiB available'
    """
    try:
        total, available = (int(fields[key].split()[0]) / (1 << 20) for key in ("MemTotal", "MemAvailable"))
    except (KeyError, ValueError):
        return "unknown"
    return f"{total:.1f} GiB, {available:.1f} GiB available"


def describe_bandwidth(cores: int, size_bytes: int = COPY_BYTES) -> str:
    """Copy bandwidth of one core, and of all cores if there are several."""
    one = copy_bandwidth(size_bytes=size_bytes) / 1e9
    many = f", {copy_bandwidth(cores, size_bytes) / 1e9:.1f} GB/s on {cores}" if cores > 1 else ""
    return f"copy {one:.1f} GB/s on one core{many} (bytes read and written)"


def describe_cache(folder: str) -> str:
    """The folder of compiled code and whether it is used: code in a folder that others can write is never loaded."""
    if not folder:
        return "off: compiled code lives as long as the process"
    path = Path(folder)
    try:
        if not path.exists():
            parent = next(p for p in path.parents if p.exists())
            is_writable = os.access(parent, os.W_OK)
            return f"{folder}: " + ("not there yet" if is_writable else "cannot be made, every process compiles anew")
        found = path.stat()
        files = [entry.stat().st_size for entry in path.rglob("*") if entry.is_file()]
    except OSError as error:
        return f"{folder}: not readable ({error.strerror}), every process compiles anew"
    content = f"{len(files)} file{'s' * (len(files) != 1)}, {sum(files) / 1e6:.1f} MB"
    if found.st_uid != os.getuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"{folder}: {content}, not private to you, so not used"
    return f"{folder}: {content}, {'private' if os.access(path, os.W_OK) else 'not writable, new code is not saved'}"


def proc_fields(path: str) -> dict[str, str]:
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
