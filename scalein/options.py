"""Options of one run, and the SCALEIN_* variables that set their defaults: one table, here.

| variable          | option    | meaning                                                          |
|-------------------|-----------|------------------------------------------------------------------|
| SCALEIN_WORKERS   | `workers` | threads that run kernels; default: the cores this process has     |
| SCALEIN_CPU       | `cpu`     | CPU to compile for: "native", "x86-64", "x86-64-v3", ...          |
| SCALEIN_SAFE      | `safe`    | 1: bounds-checked kernels, slow, for hunting a wrong run          |
| SCALEIN_CACHE_DIR | `cache`   | folder of compiled code; "" keeps it in memory only               |

`memory` and `deterministic` have no variable: without the argument there is no limit, and float sums are parallel.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from functools import cache

from scalein.errors import NOWHERE, BadArgument, SourceLoc

# The CPUs this process had when scalein was imported; see `kernels.workers.start_worker`.
STARTUP_CPUS: frozenset[int] = frozenset(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else frozenset()


def granted_cores() -> int:
    """Cores this process may use: affinity and, on Linux, the quotas of its cgroup and of those around it."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([cores, *(int(quota) for folder in cgroup_folders("/proc/self") if (quota := _quota(folder)))]))


def _quota(folder: str) -> float:
    """Cores that a cgroup may use, at least one; 0 if it sets no limit."""
    for names in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):  # version 2, version 1
        try:
            words = " ".join(_text(folder, name) for name in names).split()
            quota, period = int(words[0]), int(words[1])
        except (OSError, ValueError, IndexError):
            continue  # "max" is no number: there is no limit
        if quota > 0 and period > 0:
            return max(1.0, quota / period)
    return 0


@cache
def cgroup_folders(process: str) -> tuple[str, ...]:
    """Folders of the cgroups that limit a process's CPU time: its own, and all around it that are mounted here."""
    found: dict[str, None] = {}
    try:
        # `number:controllers:path`; version 2 is number 0, without controllers.
        groups = [line.split(":", 2)[1:] for line in _text(process, "cgroup").splitlines()]
        for line in _text(process, "mountinfo").splitlines():
            # `id parent device root point options [fields] - type source options`
            front, _, back = line.partition(" - ")
            root, point = front.split()[3:5]
            kind, _, options = back.split(" ", 2)
            for controllers, path in groups:
                is_cpu = "cpu" in controllers.split(",") and "cpu" in options.split(",")
                if (kind == "cgroup2" and not controllers) or (kind == "cgroup" and is_cpu):
                    # Inside a container a path may be the host's: then its own folder is the root of the mount.
                    inside = os.path.relpath(path, root) if path.startswith(root) else "."
                    folder = os.path.normpath(os.path.join(point, inside))
                    while folder.startswith(point):
                        found[folder] = None
                        folder = os.path.dirname(folder)
    except (OSError, ValueError, IndexError):
        pass
    return tuple(found)


def _text(folder: str, name: str) -> str:
    with open(os.path.join(folder, name), encoding="utf-8", errors="surrogateescape") as file:
        return file.read()


def default_cache_dir() -> str:
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return os.path.join(base, "scalein")


@dataclass(frozen=True, slots=True)
class Options:
    """What a run may use. Results do not depend on it; without `deterministic`, float sums may differ in rounding."""

    workers: int = 1
    cpu: str = "native"
    safe: bool = False
    cache: str = ""
    memory: int | None = None  # bytes that aggregation may use before it goes to disk
    deterministic: bool = False  # no bit of a float depends on the number of workers

    @staticmethod
    def make(*, workers: int | None = None, cpu: str | None = None, safe: bool | None = None,
             cache: str | None = None, memory: str | int | None = None, deterministic: bool = False,
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
        if not isinstance(deterministic, bool):
            raise BadArgument("deterministic must be True or False", at=at, found=repr(deterministic))
        return Options(
            workers=workers,
            cpu=cpu or env.get("SCALEIN_CPU") or "native",
            safe=env.get("SCALEIN_SAFE", "0") not in ("", "0") if safe is None else safe,
            cache=env.get("SCALEIN_CACHE_DIR", default_cache_dir()) if cache is None else cache,
            memory=None if memory is None else parse_size(memory, at=at),
            deterministic=deterministic,
        )


# Amounts of memory as users write them: "64MB", "1.5 GiB", or a number of bytes. K, M, G and T (KB, MB, ...) count in
# 1000s, Ki, Mi, Gi and Ti (KiB, MiB, ...) in 1024s; case does not matter.

_FORM = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(?:([kmgt])(i?))?b?\s*", re.IGNORECASE)


def parse_size(given: str | int, what: str = "memory", at: SourceLoc = NOWHERE) -> int:
    """Bytes.

    >>> parse_size("64MB"), parse_size("64M")
    (64000000, 64000000)
    >>> parse_size("64MiB"), parse_size("1.5 GiB")
    (67108864, 1610612736)
    """
    if isinstance(given, int) and not isinstance(given, bool) and given > 0:
        return given
    found = _FORM.fullmatch(given) if isinstance(given, str) else None
    size = 0
    if found:
        exponent = " kmgt".index((found[2] or " ").lower())
        size = int(float(found[1]) * (1024 if found[3] else 1000) ** exponent)
    if size <= 0:
        raise BadArgument(f"{what}= takes an amount such as '500MB' or '1.5GB', or a number of bytes", at=at,
                          found=repr(given), hint="MB counts in 1000s, MiB in 1024s")
    return size
