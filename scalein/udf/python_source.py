"""The source of a Python function: its syntax tree, its annotations, and the names it refers to."""

from __future__ import annotations

import ast
import builtins
import inspect
import linecache
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType, ModuleType

from scalein.dtypes import BOOL, F64, I64, STR, DType
from scalein.errors import CannotCompile, SourceLoc
from scalein.ir.udf import TEXTS, Variable, tuple_of

_TYPES = {"float": F64, "int": I64, "bool": BOOL, "str": STR}
PLAIN_PYTHON = "@si.udf(compile=False) runs it as plain Python, row by row"
_KNOWN_TYPES = "types are float, int, bool, str, and one of them with None: `float | None`"
_HELPER_TYPES = f"{_KNOWN_TYPES}; a udf that others call has tuples too: `tuple[float, int]`"
_MAX_SHOWN = 60


@dataclass(frozen=True, slots=True)
class Source:
    """A function's source; `refuse` makes the error for a part of it, with file, line and reason."""

    fn: FunctionType
    tree: ast.FunctionDef
    file: str
    of: str = ""  # the class of a method, as errors call it: "the udaf 'GeometricMean'"
    plain: str | None = PLAIN_PYTHON  # how what cannot be compiled can run after all

    def refuse(self, node: ast.AST, reason: str, hint: str | None = PLAIN_PYTHON) -> CannotCompile:
        """The error for a part that cannot be compiled; the caller raises it."""
        line = getattr(node, "lineno", self.tree.lineno)
        written = linecache.getline(self.file, line).strip()
        found = "" if isinstance(node, ast.FunctionDef) else _short(node)
        if isinstance(node, ast.stmt) or found == written:
            found = ""  # the line says it
        if hint is not None and hint.endswith(PLAIN_PYTHON):
            hint = f"{hint.removesuffix(PLAIN_PYTHON)}{self.plain or ''}".removesuffix("; ") or None
        return CannotCompile(f"{self.of or f'the udf {self.fn.__name__!r}'} cannot be compiled: {reason}",
                             at=SourceLoc(self.file, line), line=written, found=found, hint=hint)

    def params(self) -> tuple[Variable, ...]:
        """The parameters with their types; defaults are looked up where the function is called."""
        args = self.tree.args
        for extra in (args.vararg, args.kwarg):
            if extra is not None:
                raise self.refuse(extra, "it takes any number of arguments")
        return tuple(self._variable(arg) for arg in (*args.posonlyargs, *args.args, *args.kwonlyargs))

    def _variable(self, arg: ast.arg) -> Variable:
        if arg.annotation is None:
            raise self.refuse(arg, f"the parameter {arg.arg!r} has no type", _KNOWN_TYPES)
        return Variable(arg.arg, *self.annotation(arg.annotation))

    def result(self) -> tuple[DType, bool]:
        """The type of the result, and whether it may be None."""
        if self.tree.returns is None:
            raise self.refuse(self.tree, "it does not say what it returns", "write the type: `-> float:`")
        return self.annotation(self.tree.returns)

    def annotation(self, node: ast.expr) -> tuple[DType, bool]:
        """The type of an annotation, and whether it allows None."""
        match node:
            case ast.Name(name) if name in _TYPES:
                return _TYPES[name], False
            case ast.Constant(str(text)):
                try:
                    return self.annotation(ast.copy_location(ast.parse(text, mode="eval").body, node))
                except SyntaxError:
                    pass
            case ast.BinOp(inner, ast.BitOr(), ast.Constant(None)) | ast.BinOp(ast.Constant(None), ast.BitOr(), inner):
                return self.annotation(inner)[0], True
            case ast.Subscript(ast.Name("Optional") | ast.Attribute(attr="Optional"), inner):
                return self.annotation(inner)[0], True
            case ast.Subscript(ast.Name("tuple" | "Tuple") | ast.Attribute(attr="Tuple"), ast.Tuple(items)) if items:
                return tuple_of([self.annotation(item) for item in items]), False
            case ast.Subscript(ast.Name("tuple" | "Tuple"), ast.Name() as item):
                return tuple_of([self.annotation(item)]), False
            case ast.Subscript(ast.Name("list" | "List"), ast.Name("str")):
                return TEXTS, False
        raise self.refuse(node, "it has a type that udfs do not support", _HELPER_TYPES)

    def outside(self, node: ast.expr) -> object:
        """The value of a non-local name or `module.name`, looked up once, now."""
        match node:
            case ast.Name(name):
                return self._lookup(node, name)
            case ast.Attribute(base, name):
                module = self.outside(base)
                if isinstance(module, ModuleType) and hasattr(module, name):
                    return getattr(module, name)
        raise self.refuse(node, f"{_short(node)} is not known when the udf is made")

    def _lookup(self, node: ast.expr, name: str) -> object:
        code = self.fn.__code__
        if name in code.co_freevars:
            cell = (self.fn.__closure__ or ())[code.co_freevars.index(name)]
            try:
                return cell.cell_contents
            except ValueError:
                pass
        elif name in self.fn.__globals__ and name != self.fn.__name__:
            return self.fn.__globals__[name]
        elif hasattr(builtins, name):
            return getattr(builtins, name)
        if name == self.fn.__name__:
            raise self.refuse(node, "it calls itself", "write it as a loop; " + PLAIN_PYTHON)
        raise self.refuse(node, f"the name {name!r} is not defined when the udf is made",
                          "constants and other udfs must stand before the udf that uses them")


def _short(node: ast.AST) -> str:
    text = ast.unparse(node).splitlines()[0]
    return text if len(text) <= _MAX_SHOWN else text[: _MAX_SHOWN - 3] + "..."


def read_source(fn: Callable[..., object], of: str = "", plain: str | None = PLAIN_PYTHON,
                yields: bool = False) -> Source:
    """The source of a function that was written with `def`; of a method, `of` is its class."""
    name = getattr(fn, "__name__", repr(fn))
    if not isinstance(fn, FunctionType) or name == "<lambda>":
        raise CannotCompile(f"udf takes a function written with def, not {name}", at=_location(fn))
    try:
        lines, first = inspect.getsourcelines(fn)
    except (OSError, TypeError):
        raise CannotCompile(f"{of or f'the udf {name!r}'} cannot be compiled: its source text is not available",
                            at=_location(fn),
                            hint="write it in a file or a notebook cell; " + PLAIN_PYTHON) from None
    # An indented function is parsed as the body of an `if`, which adds a line before it.
    tree = ast.parse("if True:\n" + "".join(lines)) if lines[0][:1].isspace() else ast.parse("\n" + "".join(lines))
    ast.increment_lineno(tree, first - 2)
    found = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == name]
    if not found or (inspect.isgeneratorfunction(fn) and not yields):
        raise CannotCompile(f"{of or f'the udf {name!r}'} cannot be compiled: it is not a plain function",
                            at=_location(fn), hint=plain)
    return Source(fn, found[0], fn.__code__.co_filename, of, plain)


def _location(fn: object) -> SourceLoc | None:
    code = getattr(fn, "__code__", None)
    return SourceLoc(code.co_filename, code.co_firstlineno) if code is not None else None
