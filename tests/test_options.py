"""Sizes as users write them, and the cores that cgroups grant."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import scalein as si
from scalein import options
from scalein.options import cgroup_folders, granted_cores, parse_size


@pytest.mark.parametrize(("given", "size"), [
    (1, 1), ("1", 1), ("7 b", 7), ("64MB", 64_000_000), ("64 mb", 64_000_000), ("64M", 64_000_000), ("64m", 64_000_000),
    ("64MiB", 64 << 20), ("64 Mi", 64 << 20), ("64mib", 64 << 20), ("1k", 1000), ("1K", 1000), ("1KB", 1000),
    ("1KiB", 1024), ("1.5GB", 1_500_000_000), ("1.5 GiB", 3 << 29), ("2G", 2 * 10**9), ("2TB", 2 * 10**12),
    ("2TiB", 2 << 40), ("0.1kb", 100),
])  # fmt: skip
def test_sizes(given: str | int, size: int) -> None:
    """MB counts in 1000s and MiB in 1024s, as DuckDB, Kubernetes and disks have it."""
    assert parse_size(given) == size


@pytest.mark.parametrize("given", ["", "MB", "0", "-1MB", "1XB", "1iB", "1MMB", "one", 0, -5, True, None, 1.5])
def test_what_is_no_size(given: object) -> None:
    with pytest.raises(si.BadArgument, match="takes an amount such as"):
        parse_size(given)  # type: ignore[arg-type]


def process(folder: Path, cgroup: str, mounts: list[str]) -> str:
    """A folder like /proc/self."""
    folder.mkdir(exist_ok=True)
    (folder / "cgroup").write_text(cgroup)
    (folder / "mountinfo").write_text("".join(f"{line}\n" for line in mounts))
    return str(folder)


def group(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


def cores(monkeypatch: pytest.MonkeyPatch, process: str) -> int:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    folders = cgroup_folders(process)
    monkeypatch.setattr(options, "cgroup_folders", lambda _: folders)
    return granted_cores()


def test_a_nested_cgroup_and_the_least_around_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "cgroup"
    mounts = ["21 20 0:19 / /proc rw - proc proc rw", f"30 20 0:26 / {root} rw,nosuid shared:4 - cgroup2 cgroup2 rw"]
    group(root)  # the root has no limit, and no file for one
    group(root / "system.slice", cpu__max="400000 100000\n")
    group(root / "system.slice" / "a.service", cpu__max="max 100000\n")
    group(root / "system.slice" / "b.service", cpu__max="250000 100000\n")
    group(root / "system.slice" / "c.service", cpu__max="5000 100000\n")
    for name, wanted in (("a", 4), ("b", 2), ("c", 1)):
        folder = process(tmp_path / name, f"0::/system.slice/{name}.service\n", mounts)
        assert cores(monkeypatch, folder) == wanted
    assert cores(monkeypatch, process(tmp_path / "root", "0::/\n", mounts)) == 64


def test_a_container_whose_paths_are_the_hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "cgroup"
    group(root, cpu__max="300000 100000\n")
    mounts = [f"30 20 0:26 /docker/abc {root} ro - cgroup2 cgroup rw"]
    assert cores(monkeypatch, process(tmp_path / "a", "0::/docker/abc\n", mounts)) == 3
    group(root / "inner", cpu__max="200000 100000\n")
    assert cores(monkeypatch, process(tmp_path / "b", "0::/docker/abc/inner\n", mounts)) == 2
    assert cores(monkeypatch, process(tmp_path / "c", "0::/../elsewhere\n", mounts)) == 3


def test_version_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "cpu,cpuacct"
    group(root, cpu__cfs_quota_us="-1\n", cpu__cfs_period_us="100000\n")
    group(root / "user" / "me", cpu__cfs_quota_us="350000\n", cpu__cfs_period_us="100000\n")
    mounts = [f"31 20 0:27 / {tmp_path}/memory rw - cgroup cgroup rw,memory",
              f"32 20 0:28 / {root} rw - cgroup cgroup rw,cpu,cpuacct"]
    cgroup = "5:memory:/elsewhere\n4:cpu,cpuacct:/user/me\n0::/init.scope\n"
    assert cores(monkeypatch, process(tmp_path / "a", cgroup, mounts)) == 3


def test_a_system_without_cgroups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cores(monkeypatch, str(tmp_path / "nothing")) == 64
    assert cores(monkeypatch, process(tmp_path / "odd", "what\n\n", ["is", "this - "])) == 64
