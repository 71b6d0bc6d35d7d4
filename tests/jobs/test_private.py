"""What jobs and connectors keep to themselves: a change of it must not reach further than its own module."""

from __future__ import annotations

import pytest

from tests.test_layering import imports


@pytest.mark.parametrize("package", ["jobs", "connectors"])
def test_nobody_imports_private_names(package: str) -> None:
    found = [each for each in imports() if each.name.startswith(f"scalein.{package}.")]
    assert found
    assert not [each for each in found if each.name.rpartition(".")[2].startswith("_")]
