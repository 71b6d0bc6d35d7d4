"""The doctor: one line for each fact, and failures are reported."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import pyarrow as pa
import pytest

from scalein.api.flow import Flow
from scalein.api.self_check import try_compiler
from scalein.cli import doctor
from scalein.cli.main import main
from scalein.kernels.machine import copy_bandwidth, describe_bandwidth, describe_cache


def test_one_line_for_each_fact(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "describe_bandwidth", partial(describe_bandwidth, size_bytes=1 << 20))
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [
        "cpu", "cores", "memory", "bandwidth", "cache", "options", "versions", "java", "pyspark",
        "compiler"]
    assert lines[-1].split(maxsplit=1)[1].startswith("works;")


def test_a_broken_compiler_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: object, *args: object, **kwargs: object) -> object:
        raise OSError("no LLVM here")

    monkeypatch.setattr(Flow, "collect", broken)
    assert try_compiler() == (False, "fails: OSError: no LLVM here")


def test_wrong_results_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Flow, "collect", lambda self: pa.table({"k": [1, 2, 3], "total": [40, 20, 40]}))
    assert try_compiler() == (False, "gives wrong results: please report this with the lines above")


def test_java_is_found_but_not_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    assert doctor.describe_java() == f"not found: JAVA_HOME is {tmp_path}, and has no bin/java"
    java = tmp_path / "bin" / "java"
    java.parent.mkdir()
    java.write_text("no program", encoding="utf-8")
    java.chmod(0o755)
    assert doctor.describe_java() == f"of unknown version, {java}"
    (tmp_path / "release").write_text('IMPLEMENTOR="X"\nJAVA_VERSION="17.0.15"\n', encoding="utf-8")
    assert doctor.describe_java() == f"17.0.15, {java}"
    monkeypatch.delenv("JAVA_HOME")
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    assert doctor.describe_java() == "not found"


def test_bandwidth_is_a_rate() -> None:
    assert copy_bandwidth(2, size_bytes=8 << 20, repeats=2) > 1e7


def test_cache_states(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    assert describe_cache("") == "off: compiled code lives as long as the process"
    assert describe_cache(str(folder)) == f"{folder}: not there yet"
    folder.mkdir(mode=0o700)
    (folder / "kernel").write_bytes(b"x" * 300_000)
    assert describe_cache(str(folder)) == f"{folder}: 1 file, 0.3 MB, private"
    folder.chmod(0o777)
    assert describe_cache(str(folder)).endswith("not private to you, so not used")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_an_unwritable_cache_is_named(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    assert "cannot be made" in describe_cache(str(tmp_path / "cache"))
    tmp_path.chmod(0o700)
