"""The README keeps its word: its Python runs, its commands are the ones that .ci/run runs, its folders exist."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from scalein.cli.demo import missing_for_spark

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
PYTHON_BLOCKS = re.findall(r"^```python\n(.*?)^```$", README, flags=re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("source", PYTHON_BLOCKS, ids=lambda source: source.splitlines()[0])
def test_python_blocks_run(source: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    if "scalein.spark" in source and (missing := missing_for_spark()):
        pytest.skip(missing)
    script = tmp_path / "readme.py"  # a file of its own: a udf's source is looked up
    script.write_text(source, encoding="utf-8")
    runpy.run_path(str(script))
    assert capsys.readouterr().out


def test_there_is_an_example_of_some_fifteen_lines() -> None:
    lines = [line for line in PYTHON_BLOCKS[0].splitlines() if line and not line.startswith(("import", "from"))]
    assert len(lines) <= 15


def test_there_are_two_commands() -> None:
    commands = re.findall(r"^python3 -m venv .*$", README, flags=re.MULTILINE)
    assert [command.rsplit(" && ")[-1].split()[0] for command in commands] == [".venv/bin/scalein", ".venv/bin/pytest"]


def test_folders_of_the_map_exist() -> None:
    folders = re.findall(r"^\| `([\w/]+/)` \|", README, flags=re.MULTILINE)
    assert len(folders) >= 9
    assert [folder for folder in folders if not (ROOT / folder).is_dir()] == []
