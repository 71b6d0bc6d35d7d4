"""Nothing kills the interpreter: random flows in a process of its own, whose end is looked at."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.engines import EXAMPLES


@pytest.mark.parametrize("safe", ["0", "1"], ids=["", "safe"])
def test_random_flows_leave_the_process_alive(safe: str) -> None:
    command = [sys.executable, "-m", "tests.exec.fuzz", "1", str(round(10 * EXAMPLES))]
    done = subprocess.run(
        command, env={**os.environ, "SCALEIN_SAFE": safe}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{done.returncode}\n{done.stderr[-5000:]}"
