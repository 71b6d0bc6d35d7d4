"""Tests of the store: their batches are small, so a few rows are enough for each worker."""

from __future__ import annotations

import pytest

from scalein.runtime import stored


@pytest.fixture(autouse=True)
def few_rows_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored, "WORKER_ROWS", 1)
