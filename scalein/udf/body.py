"""Compiles a function's statements to a typed body, or refuses them with the reason.

The types of locals are a fixed point: a pass over the body widens them at assignments (int to float, not None to
nullable), and passes are repeated until one changes nothing. A local may be read only where every path has set it.
Unreachable statements are dropped.
"""

from __future__ import annotations

import ast
import os

from scalein.dtypes import BOOL, I64, DType
from scalein.ir.exprs import Lit
from scalein.ir.udf import (
    Assign,
    Break,
    Continue,
    ForRange,
    If,
    Part,
    Return,
    Statement,
    Udf,
    Variable,
    While,
    walk,
)
from scalein.udf.conversions import NAMES, common, convert
from scalein.udf.exprs import Exprs
from scalein.udf.known import Known, assigned, join
from scalein.udf.python_source import Source

_REFUSED: dict[type[ast.stmt], str] = {
    ast.FunctionDef: "a function inside it", ast.ClassDef: "a class inside it", ast.With: "with", ast.Try: "try",
    ast.Raise: "raise", ast.Assert: "assert", ast.Import: "import", ast.ImportFrom: "import", ast.Global: "global",
    ast.Nonlocal: "nonlocal", ast.Delete: "del", ast.Match: "match",
}  # fmt: skip

_MAX_DEPTH = 120  # nested parts: deeper ones would exceed Python's recursion limit, for example in a udf's repr
_TOO_DEEP = "it is nested too deeply"

Block = tuple[Statement, ...]


def compile_function(source: Source) -> Udf:
    """The typed function; raises `CannotCompile`."""
    params = source.params()
    dtype, nullable = source.result()
    body = _Body(source, params, dtype, nullable)
    try:
        statements = body.infer()
    except RecursionError:
        raise source.refuse(source.tree, _TOO_DEEP) from None
    variables = (*body.locals(), *body.exprs.hidden.values())
    file = os.path.basename(source.file)
    udf = Udf(source.fn.__name__, file, params, variables, dtype, nullable, statements)
    if any(depth > _MAX_DEPTH for _, depth in walk(udf)):
        raise source.refuse(source.tree, _TOO_DEEP)
    return udf


class _Body:
    def __init__(self, source: Source, params: tuple[Variable, ...], dtype: DType, nullable: bool) -> None:
        self.source, self.params = source, params
        self.dtype, self.nullable = dtype, nullable
        self.declared = {param.name: param for param in params}
        self._declare()
        self.exprs = Exprs(source, set(self.declared) | assigned(source.tree.body))
        self.exprs.types = dict(self.declared)
        self.break_facts: list[list[Known]] = []  # for each enclosing loop, the facts at its breaks

    def _declare(self) -> None:
        """Annotated locals have their type in the whole function, wherever the annotation is."""
        for node in (inner for each in self.source.tree.body for inner in ast.walk(each)):
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                name = node.target.id
                declared = Variable(name, *self.source.annotation(node.annotation))
                if self.declared.setdefault(name, declared) != declared:
                    raise self.source.refuse(node, f"{name!r} has two types", "use another name for the other")

    def locals(self) -> list[Variable]:
        assignment = {param.name for param in self.params}
        return [variable for name, variable in self.exprs.types.items() if name not in assignment]

    def infer(self) -> Block:
        while True:
            before = dict(self.exprs.types)
            self.exprs.hidden.clear()
            statements, end = self.block(self.source.tree.body, Known(frozenset(param.name for param in self.params)))
            if self.exprs.types == before:
                break
        if end is None:
            return statements
        if not self.nullable:
            raise self.source.refuse(self.source.tree.body[-1], "it can end without a return",
                                     "return a value on every path, or write `| None` into its type")
        return (*statements, Return(Lit(None, self.dtype)))

    def block(self, nodes: list[ast.stmt], known: Known | None) -> tuple[Block, Known | None]:
        """The statements up to one that ends the path, and the facts after them; None if the path has ended."""
        found: list[Statement] = []
        for node in nodes:
            if known is None:
                break
            statements, known = self.statement(node, known)
            found += statements
        return tuple(found), known

    def statement(self, node: ast.stmt, known: Known) -> tuple[Block, Known | None]:
        match node:
            case ast.Pass() | ast.Expr(ast.Constant()):  # docstrings too
                return (), known
            case ast.Assign(targets, value):
                return self._assign_all(node, targets, value, known)
            case ast.AnnAssign(ast.Name(name), _, value):
                return ((), known) if value is None else self.assign(node, name, self.exprs.read(value, known), known)
            case ast.AugAssign(ast.Name(name) as target, op, value):
                current = ast.copy_location(ast.Name(name, ast.Load()), target)
                whole = ast.copy_location(ast.BinOp(current, op, value), node)
                return self.assign(node, name, self.exprs.read(whole, known), known)
            case ast.If():
                return self._if(node, known)
            case ast.While():
                return self._while(node, known)
            case ast.For():
                return self._for(node, known)
            case ast.Return():
                return (Return(self._returned(node, known)),), None
            case ast.Break():
                self.break_facts[-1].append(known)
                return (Break(),), None
            case ast.Continue():
                return (Continue(),), None
            case _:
                reason = _REFUSED.get(type(node), "this statement")
                raise self.source.refuse(node, f"{reason} is not supported")

    # --- assignments

    def _assign_all(self, node: ast.stmt, targets: list[ast.expr], value: ast.expr,
                    known: Known) -> tuple[Block, Known]:
        """`a = 1`, `a = b = 1`, or `a, b = b, a`."""
        found: Block = ()
        match targets, value:
            case [ast.Name(name)], _:
                return self.assign(node, name, self.exprs.read(value, known), known)
            case [ast.Tuple(names)], ast.Tuple(values) if len(names) == len(values):
                parts = [self.exprs.read(each, known) for each in values]
                new_values: list[Part] = []
                for part in parts:  # all values are computed before the first name changes
                    if part.dtype is None:
                        new_values.append(part)
                        continue
                    local = self.exprs.new_local(part.dtype, part.nullable)
                    found = (*found, Assign(local.name, part))
                    new_values.append(local)
            case _ if not any(isinstance(target, ast.Tuple) for target in targets):
                part = self.exprs.read(value, known)
                if part.dtype is not None:
                    local = self.exprs.new_local(part.dtype, part.nullable)
                    found, part = (Assign(local.name, part),), local
                names, new_values = targets, [part] * len(targets)
            case _:
                raise self.source.refuse(node, "this way of unpacking is not supported", "write `a, b = x, y`")
        for name_node, part in zip(names, new_values, strict=True):
            if not isinstance(name_node, ast.Name):
                raise self.source.refuse(name_node, "only names can be assigned to")
            statements, known = self.assign(node, name_node.id, part, known)
            found = (*found, *statements)
        return found, known

    def assign(self, node: ast.stmt, name: str, part: Part, known: Known) -> tuple[Block, Known]:
        """One assignment; the local's type widens to hold the value, unless it was declared."""
        declared, old = self.declared.get(name), self.exprs.types.get(name)
        dtype = common([part.dtype, old.dtype if old else None])
        if dtype is None and part.dtype is None:
            raise self.source.refuse(node, f"the type of {name!r} is not known", f"write `{name}: float | None = None`")
        if declared is not None:
            if common([part.dtype, declared.dtype]) != declared.dtype:
                raise self.source.refuse(node, f"{name!r} is {NAMES[declared.dtype]} and cannot become "
                                               f"{NAMES[part.dtype]}", "use another name for it")
            if part.nullable and not declared.nullable:
                raise self.source.refuse(node, f"{name!r} cannot be None",
                                         f"write `{name}: {NAMES[declared.dtype]} | None`")
            dtype = declared.dtype
            self.exprs.types[name] = declared
        elif dtype is None:
            assert old is not None
            raise self.source.refuse(node, f"{name!r} is {NAMES[old.dtype]} and cannot become {NAMES[part.dtype]}",
                                     "use another name for it")
        else:
            self.exprs.types[name] = Variable(name, dtype, part.nullable or (old is not None and old.nullable))
        return (Assign(name, convert(part, dtype)),), known.after(name, part.nullable)

    def _returned(self, node: ast.Return, known: Known) -> Part:
        part = Lit(None) if node.value is None else self.exprs.read(node.value, known)
        if part.nullable and not self.nullable:
            raise self.source.refuse(node, "it may return None, and its type does not say so",
                                     f"write `-> {NAMES[self.dtype]} | None:`")
        if common([part.dtype, self.dtype]) != self.dtype:
            raise self.source.refuse(node, f"it returns {NAMES[part.dtype]}, and its type says {NAMES[self.dtype]}")
        return convert(part, self.dtype)

    # --- branches and loops

    def _if(self, node: ast.If, known: Known) -> tuple[Block, Known | None]:
        condition = self.exprs.condition(node.test, known)
        if isinstance(condition, Lit):
            return self.block(node.body if condition.value else node.orelse, known)
        then, after_then = self.block(node.body, known.given(node.test, True))
        otherwise, after_else = self.block(node.orelse, known.given(node.test, False))
        if after_then is None:  # nothing follows it: a chain of returns is not nested
            return (If(condition, then, ()), *otherwise), after_else
        return (If(condition, then, otherwise),), join((after_then, after_else))

    def _while(self, node: ast.While, known: Known) -> tuple[Block, Known | None]:
        self._no_else(node)
        head = known.without(assigned(node.body))
        condition = self.exprs.condition(node.test, head)
        if condition == Lit(False, BOOL):
            return (), known
        body, break_facts = self._loop_body(node.body, head.given(node.test, True))
        exit_facts = None if isinstance(condition, Lit) else head.given(node.test, False)
        return (While(condition, body),), join((exit_facts, *break_facts))

    def _for(self, node: ast.For, known: Known) -> tuple[Block, Known | None]:
        self._no_else(node)
        if not isinstance(node.target, ast.Name):
            raise self.source.refuse(node.target, "a loop counts with one name")
        start, stop, step = self._range(node.iter, known)
        head = known.without(assigned([node.target, *node.body]))
        counter = self.exprs.new_local(I64)  # the user may assign to the loop's own name
        assignment, inside = self.assign(node, node.target.id, counter, head)
        body, break_facts = self._loop_body(node.body, inside)
        loop = ForRange(counter.name, start, stop, step, (*assignment, *body), node.lineno)
        return (loop,), join((head, *break_facts))

    def _range(self, node: ast.expr, known: Known) -> tuple[Part, Part, Part]:
        match node:
            case ast.Call(ast.Name(name) as called) if name not in self.exprs.names:
                is_range = self.source.outside(called) is range
            case _:
                is_range = False
        if not isinstance(node, ast.Call) or not is_range:
            raise self.source.refuse(node, "a loop goes over range(...) only")
        if node.keywords or not 1 <= len(node.args) <= 3:
            raise self.source.refuse(node, "range takes one to three ints")
        bounds = [self.exprs.integer(arg, known) for arg in node.args]
        if len(bounds) == 1:
            bounds.insert(0, Lit(0, I64))
        return bounds[0], bounds[1], bounds[2] if len(bounds) == 3 else Lit(1, I64)

    def _loop_body(self, nodes: list[ast.stmt], known: Known) -> tuple[Block, list[Known]]:
        self.break_facts.append([])
        body, _ = self.block(nodes, known)
        return body, self.break_facts.pop()

    def _no_else(self, node: ast.While | ast.For) -> None:
        if node.orelse:
            raise self.source.refuse(node.orelse[0], "the else of a loop is not supported")
