"""Who may import whom (STYLE.md, section 5), and that `import scalein` stays light."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent / "scalein"

# durations: plain values that ir types literals by; hashing: what a value's hash is, for all engines
BASE = ("errors", "dtypes", "layout", "options", "durations", "hashing", "memory", "sizes")
ANYTHING = ("",)

# Package or module -> what it may import besides itself and BASE. The longest matching name decides.
MAY_IMPORT: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(BASE, ()),
    "ir": (),
    "state": (),
    "metrics": (),
    "connectors": (),
    "interp": ("ir",),
    "model": ("ir", "metrics"),
    "llvm_backend": ("ir",),
    "compiler": ("ir", "llvm_backend"),
    "runtime": ("ir", "compiler", "llvm_backend", "interp", "state", "connectors", "metrics"),
    "jobs": ("ir", "compiler", "interp", "runtime", "state", "connectors"),
    "spark": ANYTHING,
    "testing": ANYTHING,
    "cli": ANYTHING,
    "__main__": ANYTHING,
    "__init__": ANYTHING,
}
# What the user meets: may import one another, and the engine only inside of functions that run it.
FACE = ("ir", "connectors", "elsewhere", "column", "attempts", "namespaces", "aggregates", "windows", "binding", "flow",
        "groups", "choices", "combine", "ordering", "naming", "nesting", "graph", "udf", "sql",
        "reading", "writing", "starting", "in_spark")  # fmt: skip
ENGINE = ("compiler", "interp", "runtime", "jobs", "spark", "model")
MAY_IMPORT |= {name: FACE for name in FACE if name not in ("ir", "connectors")}

# Third-party packages that have one importer.
ONLY_IN = {"llvmlite": ("llvm_backend",), "pyspark": ("spark",), "sqlglot": ("sql",)}

LIGHT = ("llvmlite", "pyspark", "pandas", "polars", "duckdb", "sqlglot", "scalein.llvm_backend", "scalein.runtime")
IMPORT_LIMIT_S = 0.2
CI_FACTOR = 5  # a busy machine of two cores is no stopwatch


class Import(NamedTuple):
    importer: str  # module name below scalein: "ir.passes.fold"
    name: str  # the full name imported: "scalein.ir.ops" or "llvmlite.ir"
    line: int
    is_lazy: bool  # inside of a function, or for a type checker only


def modules() -> Iterator[tuple[str, Path]]:
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        yield ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts), path


def imports() -> Iterator[Import]:
    for name, path in modules():
        yield from _imports_in(ast.parse(path.read_text(encoding="utf-8")), name, is_lazy=False)


def _imports_in(node: ast.AST, importer: str, is_lazy: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (Import(importer, alias.name, child.lineno, is_lazy) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, f"{importer}:{child.lineno}: a relative import"
            assert child.module is not None
            # A name taken from a module counts as something inside of it: prefixes are all that is compared.
            for alias in child.names:
                yield Import(importer, f"{child.module}.{alias.name}", child.lineno, is_lazy)
        else:
            inside = is_lazy or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            is_for_types = isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"
            yield from _imports_in(child, importer, inside or is_for_types)


def is_in(module: str, package: str) -> bool:
    return package == "" or module == package or module.startswith(package + ".")


def layer_of(module: str) -> str:
    found = [name for name in MAY_IMPORT if is_in(module, name)]
    assert found, f"scalein/{module.replace('.', '/')}.py has no layer: give it one in tests/test_layering.py"
    return max(found, key=len)


def test_every_import_respects_the_layers() -> None:
    wrong = []
    for found in imports():
        if not found.name.startswith("scalein."):
            continue
        target = found.name.removeprefix("scalein.")
        layer = layer_of(found.importer)
        allowed = (*BASE, layer, *MAY_IMPORT[layer], *(ENGINE if layer in FACE and found.is_lazy else ()))
        if not any(is_in(target, package) for package in allowed):
            wrong.append(f"{found.importer}:{found.line} imports {found.name}")
    assert wrong == []


@pytest.mark.parametrize("package", ONLY_IN)
def test_a_heavy_package_has_one_importer(package: str) -> None:
    users = {found.importer for found in imports() if is_in(found.name, package)}
    assert [user for user in users if not any(is_in(user, place) for place in ONLY_IN[package])] == []


def test_ir_stays_pure() -> None:
    """The IR reads and writes nothing: no file, socket, thread or process."""
    banned = ("os", "io", "socket", "threading", "subprocess", "multiprocessing", "ctypes", "pathlib", "tempfile")
    wrong = [f for f in imports() if is_in(f.importer, "ir") and any(is_in(f.name, name) for name in banned)]
    assert wrong == []


_MEASURE = """
import sys, time
start = time.perf_counter()
import scalein
took = time.perf_counter() - start
print(took, *(name for name in {names!r} if name in sys.modules))
"""


def test_import_is_light() -> None:
    code = _MEASURE.format(names=LIGHT)
    runs = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT.parent)
            for _ in range(3)]  # fmt: skip
    times, heavy = zip(*((float(out[0]), out[1:]) for out in (run.stdout.split() for run in runs)), strict=True)
    assert heavy[0] == []
    assert min(times) < IMPORT_LIMIT_S * CI_FACTOR
