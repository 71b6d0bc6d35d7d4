"""A differential test that compared nothing is no test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.comparisons import COMPARISONS


@pytest.fixture(autouse=True)
def something_is_compared(request: pytest.FixtureRequest) -> Iterator[None]:
    """Tests that take an engine compare something with the oracle."""
    before = COMPARISONS.total
    yield
    if "engine" in request.fixturenames:
        assert COMPARISONS.total > before, "nothing was compared in this test"
