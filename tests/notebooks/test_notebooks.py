"""Every notebook runs from top to bottom, and is stored with the outputs of the code that is in it."""

from __future__ import annotations

import json
import linecache
import re
from pathlib import Path
from typing import Any

import matplotlib
import pytest

from notebooks.execute import code_digest
from scalein.cli.demo import missing_for_spark

FOLDER = Path(__file__).parent.parent.parent / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
OWN_PATH = re.compile(r"/(home|root|Users|work)/")  # temporary folders are nobody's


def read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def code_cells(path: Path) -> list[dict[str, Any]]:
    return [cell for cell in read(path)["cells"] if cell["cell_type"] == "code"]


def test_there_are_notebooks() -> None:
    assert [path.stem for path in NOTEBOOKS][:2] == ["01_first_flow", "02_reading_plans"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    if "spark" in path.stem:
        if missing := missing_for_spark():
            pytest.skip(missing)
        request.getfixturevalue("spark")  # the session that the notebook finds
    monkeypatch.chdir(FOLDER)
    names: dict[str, Any] = {"__name__": "notebook"}
    with matplotlib.rc_context({"backend": "agg"}):
        for cell in code_cells(path):
            source, place = "".join(cell["source"]), f"{path.name}:{cell['id']}"
            linecache.cache[place] = (len(source), None, source.splitlines(keepends=True), place)  # as IPython does
            exec(compile(source, place, "exec"), names)
        matplotlib.pyplot.close("all")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_stored_with_its_outputs(path: Path) -> None:
    cells = code_cells(path)
    assert read(path)["metadata"]["executed"] == code_digest(read(path)), "run `python notebooks/execute.py`"
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert len(outputs) > len(cells) / 2
    assert {output["output_type"] for output in outputs} <= {"stream", "display_data", "execute_result"}  # no errors
    shown = json.dumps([{**output, "data": {**output.get("data", {}), "image/png": ""}} for output in outputs])
    assert "Traceback" not in shown
    assert OWN_PATH.search(shown) is None


def test_there_are_plots_and_cards() -> None:
    data = [output.get("data", {}) for path in NOTEBOOKS for cell in code_cells(path) for output in cell["outputs"]]
    assert sum("image/png" in each for each in data) >= 6
    html = "".join("".join(each.get("text/html", "")) for each in data)
    assert "<b>Job</b>" in html
    assert "<b>LogStore</b>" in html
