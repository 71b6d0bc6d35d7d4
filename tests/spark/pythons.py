"""Interpreters that lack packages, for executors that cannot run flows."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import scalein


def python_that(folder: Path, starts: str) -> str:
    """An interpreter that runs some code first."""
    (folder / "sitecustomize.py").write_text(starts, encoding="utf-8")
    path = folder / "python"
    command = f'PYTHONPATH="{folder}:$PYTHONPATH" exec "{sys.executable}" "$@"'
    path.write_text(f"#!/bin/sh\n{command}\n", encoding="utf-8")
    path.chmod(0o755)
    return str(path)


_WITHOUT = """
import sys

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {packages!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Hidden())
"""


def without(*packages: str) -> str:
    """Code for `python_that` that hides packages."""
    return _WITHOUT.format(packages=packages)


_HIDING = """
import sys
sys.path[:] = [path for path in sys.path if path != {root!r}]
sys.meta_path[:] = [finder for finder in sys.meta_path if "__editable__" not in repr(finder)]
"""


def python_without_this_tree(folder: Path) -> str:
    """An interpreter without scalein, to which it can be sent."""
    return python_that(folder, _HIDING.format(root=os.path.dirname(os.path.dirname(scalein.__file__))))
