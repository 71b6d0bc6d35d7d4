"""Run notebooks and store their outputs: `python notebooks/execute.py [01_first_flow.ipynb ...]`.

Needs `pip install 'scalein[notebook]'`. The digest of the code is stored with the outputs: a test compares it, so that
outputs are always those of the code beside them.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def code_digest(notebook: dict[str, Any]) -> str:
    """Of all code cells."""
    code = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    return hashlib.sha256(json.dumps(code).encode()).hexdigest()[:16]


def execute(path: Path) -> None:
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(HERE)}}).execute()
    for cell in notebook.cells:
        cell.metadata = {}  # times of execution
    notebook.metadata = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
                         "language_info": {"name": "python"}, "executed": code_digest(notebook)}
    nbformat.write(notebook, path)


if __name__ == "__main__":
    os.environ["SCALEIN_CACHE_DIR"] = tempfile.mkdtemp(prefix="scalein-")  # outputs name no folder of this machine
    for each in map(Path, sys.argv[1:] or sorted(HERE.glob("*.ipynb"))):
        print(each.name, flush=True)
        execute(each)
