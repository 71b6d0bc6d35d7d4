"""`scalein calibrate` and `scalein predict`."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from scalein.cli.main import main
from scalein.model.calibration import TYPICAL, calibration_of

FLOW = """
import scalein as si
totals = si.flow({"k": "int64", "x": "float64"}).group_by("k").agg(total=si.col("x").sum())
"""


@pytest.fixture
def script(tmp_path: Path) -> str:
    (tmp_path / "flows.py").write_text(FLOW)
    pq.write_table(pa.table({"k": np.arange(2_000) % 50, "x": np.arange(2_000) * 0.5}), tmp_path / "sample.parquet")
    return str(tmp_path / "flows.py")


def test_calibrates(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scalein.model.calibrate.BIGGEST", 1 << 16)
    path = tmp_path / "new" / "machine.json"
    assert main(["calibrate", "--to", str(path), "--folder", str(tmp_path)]) == 0
    assert "bandwidth" in capsys.readouterr().out
    found = calibration_of(path)
    assert found.is_measured
    assert found.spark is None
    assert [size for size, _ in found.probes] == [1 << 15, 1 << 16]
    assert main(["calibrate", "--to", str(path), "--folder", str(tmp_path / "none")]) == 1
    assert "the disk cannot be measured" in capsys.readouterr().err


def test_predicts_and_recommends(script: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    TYPICAL.save(tmp_path / "machine.json")
    given = ["predict", script + ":totals", "--sample", str(tmp_path / "sample.parquet"), "--calibration",
             str(tmp_path / "machine.json")]
    assert main([*given, "--workers", "2", "--rate", "1000", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["config"]["workers"] == 2
    assert found["rate"] == 1000
    assert not found["saturated"]
    assert main([*given, "--recommend", "--rate", "1000", "--p99", "10s"]) == 0
    assert capsys.readouterr().out.startswith("Plan: 1 workers")
    limits = ["--rate", "1e12", "--most", "3", "--headroom", "0.5", "--variability", "4"]
    assert main([*given, "--recommend", *limits]) == 0
    assert "not feasible with up to 3 workers" in capsys.readouterr().out


@pytest.mark.parametrize(("given", "text"), [
    (["--sample", "rows.txt"], "a sample is a file"), (["--recommend"], "needs the rate"),
    (["--p99", "1s"], "--recommend"), (["--most", "3"], "--most is about a recommendation"),
    (["--recommend", "--rate", "1", "--workers", "2"], "chooses the configuration itself"), ([], "needs a sample"),
])  # fmt: skip
def test_refuses(script: str, given: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["predict", script, *given]) == 1
    assert text in capsys.readouterr().err
