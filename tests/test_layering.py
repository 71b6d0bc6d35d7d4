"""Which package may import which, lazy imports and imports by name included, and that `import scalein` stays light."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pytest

ROOT = Path(__file__).parent.parent / "scalein"

# The layers, lowest first. A package may import itself and whatever stands in an earlier layer; those of TOGETHER may
# import one another too.
LAYERS: dict[str, tuple[str, ...]] = {
    "base": ("cancellation", "errors", "options", "dtypes", "durations", "memory", "layout", "notebook_card",
             "arrow_rows"),
    "plan": ("ir", "compiler"),
    "durable": ("storage",),
    "code": ("llvm_backend", "arrow_functions"),
    "kernels": ("kernels",),
    "data": ("state", "connectors"),
    "exec": ("exec",),
    "api": ("api", "sql", "udf"),
    "drivers": ("jobs", "spark"),
    "tools": ("model", "nexmark", "cli", "testing"),
}
TOGETHER = ("base", "plan", "api", "tools")
LAYER_OF = {package: layer for layer, packages in LAYERS.items() for package in packages}
ORDER = list(LAYERS)
ROOTS = ("__init__", "__main__")  # what users import and start: may import anything


# Third-party packages that have one importer.
ONLY_IN = {"llvmlite": ("llvm_backend",), "pyspark": ("spark",), "sqlglot": ("sql",)}

# What neither importing scalein nor a small query needs, beyond what pyarrow imports: up to hundreds of ms each.
HEAVY = ("asyncio", "ast", "concurrent.futures", "csv", "difflib", "duckdb", "html", "inspect", "logging", "pandas",
         "polars", "pyarrow.compute", "pyarrow.csv", "pyarrow.dataset", "pyarrow.flight", "pyarrow.fs",
         "pyarrow.parquet", "pyspark", "socket", "sqlglot", "tempfile", "scalein.arrow_functions",
         "scalein.connectors.sinks", "scalein.connectors.sources", "scalein.ir.store_kernels", "scalein.ir.udf",
         "scalein.jobs", "scalein.state", "scalein.udf.body")
# What only running needs; of LLVM, only compiling.
ENGINE = ("llvmlite", "scalein.compiler", "scalein.exec", "scalein.kernels", "scalein.llvm_backend")
COMPILER = ("llvmlite.binding", "llvmlite.ir", "scalein.llvm_backend.jit", "scalein.llvm_backend.stage")
IMPORT_LIMIT_S = 0.1
CI_FACTOR = 5  # seconds of the CPU, which another process may have made slow


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
        elif (name := _imported_by_name(child)) is not None:
            yield Import(importer, name, child.lineno, is_lazy=True)
        else:
            inside = is_lazy or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            is_for_types = isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"
            yield from _imports_in(child, importer, inside or is_for_types)


def _imported_by_name(node: ast.AST) -> str | None:
    """The module that `import_module("...")` or `__import__("...")` names, where it is spelled out and one of ours."""
    match node:
        case ast.Call(func=ast.Name("import_module" | "__import__") | ast.Attribute(attr="import_module"),
                      args=[ast.Constant(str() as name), *_]) if name.startswith("scalein."):  # fmt: skip
            return name
        case _:
            return None


def is_in(module: str, package: str) -> bool:
    return package == "" or module == package or module.startswith(package + ".")


def package_of(module: str) -> str:
    return module.partition(".")[0]


def is_allowed(found: Import) -> bool:
    """Whether the layers allow it. The api layer may import any layer inside functions, which run a flow."""
    source, target = package_of(found.importer), package_of(found.name.removeprefix("scalein."))
    if source in ROOTS or source == target or target not in LAYER_OF:  # `from scalein import col`: what users import
        return target in LAYER_OF or source in ROOTS or LAYER_OF[source] == "tools"
    lower, upper = LAYER_OF[target], LAYER_OF[source]
    if lower == upper:
        return upper in TOGETHER
    return ORDER.index(lower) < ORDER.index(upper) or (upper == "api" and found.is_lazy)


def test_every_package_has_a_layer() -> None:
    found = {package_of(name) for name, _ in modules()} - set(ROOTS)
    assert found <= set(LAYER_OF)


def test_every_import_respects_the_layers() -> None:
    wrong = [found for found in imports() if found.name.startswith("scalein.") and not is_allowed(found)]
    assert [f"{each.importer}:{each.line} imports {each.name}" for each in wrong] == []


@pytest.mark.parametrize("package", ONLY_IN)
def test_a_heavy_package_has_one_importer(package: str) -> None:
    users = {found.importer for found in imports() if is_in(found.name, package)}
    assert [user for user in users if not any(is_in(user, place) for place in ONLY_IN[package])] == []


def test_ir_stays_pure() -> None:
    """The IR reads and writes nothing: no file, socket, thread or process."""
    banned = ("os", "io", "socket", "threading", "subprocess", "multiprocessing", "ctypes", "pathlib", "tempfile")
    wrong = [f for f in imports() if is_in(f.importer, "ir") and any(is_in(f.name, name) for name in banned)]
    assert wrong == []


_IMPORT = """
import sys, time
import pyarrow
before = set(sys.modules)
start = time.process_time()
import scalein
print(time.process_time() - start, *(set(sys.modules) - before))
"""

_ANSWER = """
import sys, time
import pyarrow as pa
before = set(sys.modules)
table = pa.ipc.open_file(sys.argv[1]).read_all()
import scalein as si
flow = si.from_arrow(table).filter(si.col("x") > 1).group_by("k").agg(n=si.count(), most=si.col("x").max())
found = flow.collect().to_pydict()
print(0.0, *(set(sys.modules) - before))
assert found == {"k": ["b"], "n": [2], "most": [3]}, found
"""

_QUERIES = """
import sys
import pyarrow as pa
table = pa.ipc.open_file(sys.argv[1]).read_all()
import scalein as si
flow = si.from_arrow(table)
flow.write_parquet(sys.argv[2])
flow.join(table.slice(0, 2).select(["x"]), on="x").sort("k", descending=True).collect()
flow.join(table.slice(0, 1).select(["k"]), on="k", how="left").top_k(1, by="x").collect()
flow.group_by("x").agg(n=si.count(), all=si.col("k").collect()).collect()
si.read_parquet(sys.argv[2]).filter(si.col("x") > 1).group_by("k").agg(mean=si.col("x").mean()).collect()
print(0.0, *sys.modules)
"""


def _run(code: str, *args: str, cache: Path | None = None) -> tuple[float, set[str]]:
    """What a new process measured, and the modules that it imported."""
    environment = os.environ if cache is None else {**os.environ, "SCALEIN_CACHE_DIR": str(cache)}
    done = subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True, check=True,
                          cwd=ROOT.parent, env=environment)
    seconds, *names = done.stdout.split()
    return float(seconds), set(names)


def _among(names: set[str], packages: tuple[str, ...]) -> list[str]:
    return sorted(name for name in names if any(is_in(name, package) for package in packages))


def test_import_is_light() -> None:
    runs = [_run(_IMPORT) for _ in range(3)]
    assert _among(runs[0][1], (*HEAVY, *ENGINE)) == []
    assert min(seconds for seconds, _ in runs) < IMPORT_LIMIT_S * CI_FACTOR


def test_a_first_answer_is_light(tmp_path: Path) -> None:
    """A small query in a new process imports no more than it needs, and nothing of LLVM if its kernels are cached."""
    path = _written(tmp_path)
    _, cold = _run(_ANSWER, path, cache=tmp_path / "cache")
    assert _among(cold, COMPILER) != []
    _, warm = _run(_ANSWER, path, cache=tmp_path / "cache")
    assert _among(warm, (*HEAVY, *COMPILER)) == []


def test_queries_do_not_import_pandas(tmp_path: Path) -> None:
    """pyarrow does, where pandas is installed, for every array that it makes of Python's values or of numpy's."""
    assert _among(_run(_QUERIES, _written(tmp_path), str(tmp_path / "table.parquet"))[1], ("pandas",)) == []


def _written(folder: Path) -> str:
    """A small table in a file: to make it in the process would import pandas."""
    path = folder / "table.arrow"
    table = pa.table({"k": ["a", "b", "b"], "x": [1, 2, 3]})
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    return str(path)
