"""`scalein explain`: finds the flow of a file and prints its plan."""

from __future__ import annotations

import sys
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


def test_two_flows_need_a_name(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script.write_text(ONE.replace("views =", "views = clicks ="), encoding="utf-8")
    assert main(["explain", str(script)]) == 1
    assert "has 2 flows at top level" in capsys.readouterr().err


def test_a_missing_file_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "nowhere.py:views"]) == 1
    assert "no file 'nowhere.py'" in capsys.readouterr().err


def test_the_script_has_no_arguments_and_prints_to_stderr(script: Path, capsys: pytest.CaptureFixture[str],
                                                          monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    monkeypatch.setattr(sys, "argv", ["scalein", "explain", "report.py"])
    script.write_text("import sys\nprint(sys.argv)\n" + ONE, encoding="utf-8")
    assert main(["explain", f"{script}:views"]) == 0
    found = capsys.readouterr()
    assert str([str(script)]) in found.err
    assert str(script) not in found.out
    assert sys.argv == ["scalein", "explain", "report.py"]


@pytest.mark.parametrize(("line", "message"), [
    ("1 +", "is no Python"), ("x = 1 // 0", "raised ZeroDivisionError"), ("import sys; sys.exit(3)", "SystemExit"),
    ("views.start(sink=si.to_memory())", 'put it under if __name__ == "__main__":'),
])  # fmt: skip
def test_a_failing_script_is_one_error(script: Path, line: str, message: str,
                                               capsys: pytest.CaptureFixture[str]) -> None:  # fmt: skip
    script.write_text(ONE + line + "\n", encoding="utf-8")
    assert main(["explain", str(script)]) == 1
    error = capsys.readouterr().err
    assert message in error
    assert f"at     report.py:{ONE.count(chr(10)) + 1}" in error
    assert "Traceback" not in error
