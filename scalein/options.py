"""Options of one run, and the SCALEIN_* variables that set their defaults: one table, here.

| variable          | option    | meaning                                                          |
|-------------------|-----------|------------------------------------------------------------------|
| SCALEIN_WORKERS   | `workers` | threads that run kernels; default: the cores this process has     |
| SCALEIN_CPU       | `cpu`     | CPU to compile for: "native", "x86-64", "x86-64-v3", ...          |
| SCALEIN_SAFE      | `safe`    | 1: bounds-checked kernels, slow, for hunting a wrong run          |
| SCALEIN_CACHE_DIR | `cache`   | folder of compiled code; "" keeps it in memory only               |

`memory` has no variable: without the argument there is no limit.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from scalein.errors import NOWHERE, BadArgument, SourceLoc

# The CPUs this process had when scalein was imported; see `kernels.workers.start_worker`.
STARTUP_CPUS: frozenset[int] = frozenset(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else frozenset()


def granted_cores() -> int:
    """Cores this process may use: affinity and, on Linux, the cgroup's quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        with open("/sys/fs/cgroup/cpu.max", encoding="ascii") as file:
            quota, period = file.read().split()
        if quota != "max":
            cores = min(cores, max(1, int(quota) // int(period)))
    except (OSError, ValueError):
        pass
    return max(1, cores)


def default_cache_dir() -> str:
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return os.path.join(base, "scalein")


@dataclass(frozen=True, slots=True)
class Options:
    """What a run may use. Results never depend on any of it."""

    workers: int = 1
    cpu: str = "native"
    safe: bool = False
    cache: str = ""
    memory: int | None = None  # bytes that aggregation may use before it goes to disk

    @staticmethod
    def make(*, workers: int | None = None, cpu: str | None = None, safe: bool | None = None,
             cache: str | None = None, memory: str | int | None = None,
             at: SourceLoc = NOWHERE) -> Options:
        """Options given by the call, else by the environment, else the defaults."""
        env = os.environ
        if workers is None:
            text = env.get("SCALEIN_WORKERS", "")
            if text and not text.isdigit():
                raise BadArgument("SCALEIN_WORKERS is not a number of threads", at=at, found=text)
            workers = int(text) if text else granted_cores()
        if isinstance(workers, bool) or not isinstance(workers, int) or not 1 <= workers <= 256:
            raise BadArgument("workers must be an integer from 1 to 256", at=at, found=repr(workers))
        return Options(
            workers=workers,
            cpu=cpu or env.get("SCALEIN_CPU") or "native",
            safe=env.get("SCALEIN_SAFE", "0") not in ("", "0") if safe is None else safe,
            cache=env.get("SCALEIN_CACHE_DIR", default_cache_dir()) if cache is None else cache,
            memory=None if memory is None else parse_size(memory, at=at),
        )


# Amounts of memory as users write them: "64MB", "1.5 GiB", or a number of bytes. MB and MiB both count in 1024s.

_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_FORM = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?\s*", re.IGNORECASE)


def parse_size(given: str | int, what: str = "memory", at: SourceLoc = NOWHERE) -> int:
    """Bytes.

    >>> parse_size("64MB")
    67108864
    >>> parse_size("1.5 GiB")
    1610612736
    """
    if isinstance(given, int) and not isinstance(given, bool) and given > 0:
        return given
    found = _FORM.fullmatch(given) if isinstance(given, str) else None
    size = int(float(found[1]) * _UNITS[found[2].lower()]) if found else 0
    if size <= 0:
        raise BadArgument(f"{what}= takes an amount such as '500MB' or '1.5GB', or a number of bytes", at=at,
                          found=repr(given))
    return size
