"""The README keeps its word: its Python runs, its commands are the ones that .ci/run runs, its folders exist."""

from __future__ import annotations

import re
import runpy
from datetime import datetime
from pathlib import Path

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest

import scalein as si
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


# The code of each row in Polars, pandas, PySpark and scalein.
HABITS = [re.findall(r"`(.*?)` \|", line) for line in README.splitlines() if line.count("` |") == 4]
ROWS = {"shop": ["a", "b", "a", "c"], "qty": [1, 5, 3, 4], "price": [2.5, 0.5, 9.0, 4.0],
        "city": ["Rome", None, "Oslo", None], "time": [datetime(2024, 5, 1, 0, 0, k) for k in (0, 4, 8, 12)]}
SHOPS = {"shop": ["a", "b"], "owner": ["ann", "bob"]}


@pytest.mark.parametrize(("in_polars", "in_pandas", "in_spark", "here"), HABITS)
def test_the_table_of_habits_means_the_same_everywhere(in_polars: str, in_pandas: str, in_spark: str,
                                                       here: str) -> None:
    names = {"pl": pl, "np": np, "si": si, "col": si.col}
    want = eval(f"flow{here}", {**names, "flow": si.from_arrow(ROWS), "shops": SHOPS}).collect()
    in_order = "sort" in here or "top_k" in here
    polars = eval(f"df{in_polars}", {**names, "df": pl.DataFrame(ROWS), "shops": pl.DataFrame(SHOPS)}).to_arrow()
    pandas = eval(f"df{in_pandas}", {**names, "df": pd.DataFrame(ROWS), "shops": pd.DataFrame(SHOPS)})
    for found in (polars, pa.table(pandas) if hasattr(pandas, "columns") else pandas):
        assert len(found) == want.num_rows
        if "tumbling" not in here:  # windows have columns of their own
            rows = [sorted(each.select(want.column_names).to_pylist(), key=str) if not in_order
                    else each.select(want.column_names).to_pylist() for each in (found, want)]
            assert rows[0] == rows[1]


def test_the_table_of_habits_has_its_rows() -> None:
    assert len(HABITS) == 15


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
