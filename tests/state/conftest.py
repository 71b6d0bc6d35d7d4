"""Tests of the store: their batches are small, so a few rows are enough for each worker; so are their key groups, which
would all be loaded rather than looked into."""

from __future__ import annotations

import pytest

from scalein.runtime import stored
from scalein.state import lookups


@pytest.fixture(autouse=True)
def few_rows_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored, "WORKER_ROWS", 1)


@pytest.fixture(autouse=True)
def lookups_cost_little(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookups, "READ_WORTH", 64)
