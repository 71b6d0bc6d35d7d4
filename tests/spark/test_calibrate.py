"""The figures of Spark that `scalein calibrate --spark` measures: once, over few rows."""

from __future__ import annotations

from typing import Any

import pytest

from scalein.errors import here
from scalein.model.calibration import SparkFigures
from scalein.spark import calibrate


def test_figures_are_measured(spark: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("BATCHES", 3), ("GROUPS", 1_000), ("GROUP_BATCHES", 3), ("ROWS", 1_000), ("WAVES", 1),
                        ("TURNS", 1)):
        monkeypatch.setattr(calibrate, name, value)
    monkeypatch.setattr(calibrate, "session", lambda: spark)
    found = SparkFigures(**calibrate.measure(here()))
    assert all(getattr(found, name) > 0 for name in SparkFigures.__slots__)
    assert found.batch_s < 60
