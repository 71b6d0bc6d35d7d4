"""Every notebook runs from top to bottom, and is kept without output."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from scalein.cli.demo import missing_for_spark

NOTEBOOKS = sorted((Path(__file__).parent.parent.parent / "notebooks").glob("*.ipynb"))


def code_cells(path: Path) -> list[dict[str, Any]]:
    notebook = json.loads(path.read_text(encoding="utf-8"))
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def test_there_are_notebooks() -> None:
    assert [path.stem for path in NOTEBOOKS][:2] == ["01_first_flow", "02_reading_plans"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path: Path) -> None:
    if "spark" in path.stem and (missing := missing_for_spark()):
        pytest.skip(missing)
    names: dict[str, Any] = {"__name__": "notebook"}
    for cell in code_cells(path):
        exec(compile("".join(cell["source"]), f"{path.name}:{cell['id']}", "exec"), names)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_stored_without_output(path: Path) -> None:
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code_cells(path))
