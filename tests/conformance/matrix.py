"""The README's support matrix: what each shape gives each way."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from random import Random

from tests.conformance.shapes import SHAPES, Shape, rows
from tests.conformance.ways import WAYS, Refused

README = Path(__file__).parents[2] / "README.md"
FIRST, LAST = "<!-- the support matrix: python -m tests.conformance -->", "<!-- end of the support matrix -->"


def reasons(shape: Shape, seed: int, count: int) -> list[str | None]:
    """Run a shape each way, over random rows: the reasons for which it is refused, None where it gives its rows."""
    found: list[str | None] = []
    for way, run in WAYS.items():
        with tempfile.TemporaryDirectory() as folder:
            try:
                run(shape, rows(seed, count), Random(f"{seed} {way}"), Path(folder))
                found.append(None)
            except Refused as refused:
                found.append(refused.reason)
    return found


def written(support: dict[str, list[str | None]]) -> str:
    """The matrix as text: a table, and the reasons below it."""
    notes = list(dict.fromkeys(reason for found in support.values() for reason in found if reason is not None))
    lines = [f"| | {' | '.join(WAYS)} |", f"|---|{'---|' * len(WAYS)}"]
    for name, found in support.items():
        cells = ("yes" if reason is None else f"no ({notes.index(reason) + 1})" for reason in found)
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", *(f"{number}. {note}" for number, note in enumerate(notes, 1))])


def in_readme() -> str:
    found = re.search(f"{re.escape(FIRST)}\n(.*?)\n{re.escape(LAST)}", README.read_text(encoding="utf-8"), re.DOTALL)
    assert found is not None, f"README.md needs the lines {FIRST} and {LAST}"
    return found[1]


def of_readme() -> dict[str, list[str | None]]:
    """What the README says of each shape."""
    text = in_readme()
    notes = dict(re.findall(r"^(\d+)\. (.*)$", text, re.MULTILINE))
    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")][1:]
    return {name: [None if cell == "yes" else notes[cell[4:-1]] for cell in cells] for name, *cells in lines}


def write_readme() -> None:
    text = README.read_text(encoding="utf-8")
    made = written({shape.name: reasons(shape, 1, 40) for shape in SHAPES})
    README.write_text(text.replace(f"{FIRST}\n{in_readme()}\n", f"{FIRST}\n{made}\n"), encoding="utf-8")
