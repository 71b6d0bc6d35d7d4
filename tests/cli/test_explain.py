"""`scalein explain`: finds the flow of a file and prints its plan."""

from __future__ import annotations

from pathlib import Path

import pytest

from scalein.cli.main import main

ONE = """
import pyarrow as pa
import scalein as si
views = si.from_arrow(pa.table({"price": [1.5, 2.5]})).filter(si.col("price") > 2)
if __name__ == "__main__":
    raise SystemExit("a script must not start when it is explained")
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "report.py"
    path.write_text(ONE, encoding="utf-8")
    return path


def test_prints_the_plan(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", f"{script}:views"]) == 0
    named = capsys.readouterr().out
    assert "price" in named
    assert main(["explain", str(script)]) == 0
    assert capsys.readouterr().out == named


def test_a_wrong_name_gets_a_guess(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", f"{script}:veiws"]) == 1
    assert "did you mean 'views'?" in capsys.readouterr().err


def test_two_flows_want_a_name(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script.write_text(ONE.replace("views =", "views = clicks ="), encoding="utf-8")
    assert main(["explain", str(script)]) == 1
    assert "has 2 flows at top level" in capsys.readouterr().err


def test_a_missing_file_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "nowhere.py:views"]) == 1
    assert "no file 'nowhere.py'" in capsys.readouterr().err
