"""Random Python functions: compiled and by the oracle, against CPython."""

from __future__ import annotations

import os

from tests.campaign.ways import CPUS, use_level
from tests.udf_programs import differences, program

ROWS = 40


def problem(seed: int) -> str | None:
    """What is wrong with the udf of a seed: the function, and the rows that differ."""
    made = program(seed)
    use_level("full" if seed % 5 == 0 else "raw")
    os.environ["SCALEIN_SAFE"] = "1" if seed // 2 % 7 == 0 else "0"
    found = list(differences(made, ROWS, workers=1 + seed // 2 % 3, cpu=CPUS[seed // 2 % len(CPUS)]))
    return "\n".join([made.text, *found]) if found else None
