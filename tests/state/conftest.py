"""Fixtures of the store: test batches and key groups are small, so workers get a few rows each, and lookups are made
cheap: otherwise all groups would be loaded."""

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
    monkeypatch.setattr(piece_lookups, "BYTES_PER_READ", 64)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    found = Built(tmp_path_factory.mktemp("built") / "store")
    assert {name.split("-")[0] for name in found.names} == {"snapshot", "image", "index", "run"}
    return found
