"""Tests of the store: their batches are small, so a few rows are enough for each worker; so are their key groups, which
would all be loaded rather than looked into."""

from __future__ import annotations

import pytest

from scalein.kernels import store as store_kernels
from scalein.state import piece_lookups
from tests.state.sample_store import Built


@pytest.fixture(autouse=True)
def few_rows_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_kernels, "WORKER_ROWS", 1)


@pytest.fixture(autouse=True)
def lookups_cost_little(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(piece_lookups, "READ_WORTH", 64)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    found = Built(tmp_path_factory.mktemp("built") / "store")
    assert {name.split("-")[0] for name in found.names} == {"snapshot", "image", "index", "run"}
    return found
