"""Processes that end without a word: no row is lost, none comes twice.

SCALEIN_JOB_KILLS=200 kills so often, at random, and once at every kind of step. The default tries a few.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

KILLS = int(os.environ.get("SCALEIN_JOB_KILLS", "0"))


def run(*args: object) -> str:
    done = subprocess.run([sys.executable, "-m", "tests.jobs.dying", *map(str, args)], capture_output=True, text=True,
                          cwd=Path(__file__).parents[2], timeout=3_600, check=False)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_death_at_each_step_of_an_epoch(tmp_path: Path) -> None:
    assert "deaths" in run("steps", tmp_path / "steps", 1_000 if KILLS else 4)


def test_killed_again_and_again(tmp_path: Path) -> None:
    assert "kills" in run("kills", tmp_path / "kills", KILLS or 6)
