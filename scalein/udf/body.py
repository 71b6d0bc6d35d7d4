"""Compiles a function's statements to a typed body, or refuses them with the reason.

The types of locals are a fixed point: a pass over the body widens them at assignments (int to float, not None to
nullable), and passes are repeated until one changes nothing. A local may be read only where every path has set it.
Unreachable statements are dropped.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TypeVar

from scalein.dtypes import BOOL, I64, STR, DType
from scalein.ir.exprs import Lit
from scalein.ir.udf import (
    TEXTS,
    Apply,
    Assign,
    Break,
    Continue,
    ForEach,
    ForRange,
    If,
    Local,
    Part,
    Return,
    Statement,
    Udf,
    Variable,
    While,
    is_tuple,
    items_of,
    walk,
)
from scalein.udf.conversions import NAMES, common, convert, is_settled
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
T = TypeVar("T")


def compile_function(source: Source, params: tuple[Variable, ...] | None = None) -> Udf:
    """The typed function; raises `CannotCompile`. `params` are those of a method: the fields of its object."""
    params = source.params() if params is None else params
    dtype, nullable = source.result()
    body = Body(source, params, dtype, nullable)
    statements = body.infer()
    udf = Udf(source.fn.__name__, os.path.basename(source.file), params, body.variables(), dtype, nullable, statements)
    check_depth(source, udf)
    return udf


def check_depth(source: Source, compiled: object) -> None:
    if any(depth > _MAX_DEPTH for _, depth in walk(compiled)):
        raise source.refuse(source.tree, _TOO_DEEP)


class Body:
    """Types and translates the statements of a function."""

    def __init__(self, source: Source, params: tuple[Variable, ...], dtype: DType, nullable: bool) -> None:
        self.source, self.params = source, params
        self.dtype, self.nullable = dtype, nullable
        self.declared = {param.name: param for param in params}
        self._declare()
        self.exprs = self.new_exprs(source, set(self.declared) | assigned(source.tree.body))
        self.exprs.types = dict(self.declared)
        self.loops: list[Loop] = []  # those around a statement

    def new_exprs(self, source: Source, names: set[str]) -> Exprs:
        return Exprs(source, names)

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

    def variables(self) -> tuple[Variable, ...]:
        """All locals, those without a name in the user's code included."""
        return (*self.locals(), *self.exprs.hidden.values())

    def infer(self) -> Block:
        """The typed statements."""
        try:
            return self._infer()
        except RecursionError:
            raise self.source.refuse(self.source.tree, _TOO_DEEP) from None

    def _infer(self) -> Block:
        while True:
            before = dict(self.exprs.types)
            self.exprs.hidden.clear()
            statements, end = self.block(self.source.tree.body, Known(frozenset(param.name for param in self.params)))
            if self.exprs.types == before:
                break
        return statements if end is None else (*statements, self.fallen_through())

    def fallen_through(self) -> Return:
        """What a function returns that ends without a return."""
        if not self.nullable:
            raise self.source.refuse(self.source.tree.body[-1], "it can end without a return",
                                     "return a value on every path, or write `| None` into its type")
        return Return(Lit(None, self.dtype))

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
                return (Return(self.returned(node, known)),), None
            case ast.Break():
                loop = self.loops[-1]
                loop.at_breaks.append(known)
                marks = () if loop.is_broken is None else (Assign(loop.is_broken.name, Lit(True, BOOL)),)
                return (*marks, Break()), None
            case ast.Continue():
                self.loops[-1].at_continues.append(known)
                return (Continue(),), None
            case _:
                reason = _REFUSED.get(type(node), "this statement")
                raise self.source.refuse(node, f"{reason} is not supported")

    # --- assignments

    def _assign_all(self, node: ast.stmt, targets: list[ast.expr], value: ast.expr,
                    known: Known) -> tuple[Block, Known]:
        """`a = 1`, `a = b = 1`, `a, b = b, a`, or `a, b = pair`."""
        found: Block = ()
        match targets, value:
            case [ast.Name(name)], _:
                return self.assign(node, name, self.exprs.read(value, known), known)
            case [ast.Tuple(names) | ast.List(names)], ast.Tuple(values) if len(names) == len(values):
                parts = [self.exprs.settled(node, self.exprs.read(each, known)) for each in values]
                new_values: list[Part] = []
                for part in parts:  # all values are computed before the first name changes
                    if part.dtype is None:
                        new_values.append(part)
                        continue
                    local = self.exprs.new_local(part.dtype, part.nullable)
                    found = (*found, Assign(local.name, part))
                    new_values.append(local)
            case _:
                part = self.exprs.settled(node, self.exprs.read(value, known))
                if part.dtype is not None:
                    local = self.exprs.new_local(part.dtype, part.nullable)
                    found, part = (Assign(local.name, part),), local
                names, new_values = targets, [part] * len(targets)
        for target, part in zip(names, new_values, strict=True):
            statements, known = self._assign_to(node, target, part, known)
            found = (*found, *statements)
        return found, known

    def _assign_to(self, node: ast.stmt, target: ast.expr, part: Part, known: Known) -> tuple[Block, Known]:
        """A name, or names that a tuple or a split text is unpacked to."""
        match target:
            case ast.Name(name):
                return self.assign(node, name, part, known)
            case ast.Tuple(names) | ast.List(names) if not any(isinstance(name, ast.Starred) for name in names):
                pass
            case _:
                raise self.source.refuse(target, "only names can be assigned to")
        if part.nullable:
            raise self.source.refuse(node, "it unpacks what may be None", "test it first")
        if part.dtype == TEXTS:
            wanted = Lit(len(names), I64)
            local = self.exprs.new_local(TEXTS)
            found: Block = (Assign(local.name, Apply("unpacked", (part, wanted), TEXTS, line=node.lineno)),)
            items: list[Part] = [Apply("item", (local, Lit(k, I64)), STR, line=node.lineno) for k in range(len(names))]
        elif is_tuple(part.dtype):
            assert part.dtype is not None
            types = items_of(part.dtype)
            if len(types) != len(names):
                raise self.source.refuse(node, f"{len(types)} values cannot be unpacked to {len(names)} names")
            local = self.exprs.new_local(part.dtype)
            found = (Assign(local.name, part),)
            items = [Apply("item", (local, Lit(k, I64)), *typ) for k, typ in enumerate(types)]
        else:
            raise self.source.refuse(node, f"{NAMES[part.dtype]} cannot be unpacked", "write `a, b = x, y`")
        for each, item in zip(names, items, strict=True):
            statements, known = self._assign_to(node, each, item, known)
            found = (*found, *statements)
        return found, known

    def assign(self, node: ast.stmt, name: str, part: Part, known: Known) -> tuple[Block, Known]:
        """One assignment; the local's type widens to hold the value, unless it was declared."""
        declared, old = self.declared.get(name), self.exprs.types.get(name)
        dtype = common([part.dtype, old.dtype if old else None])
        if dtype is not None and not is_settled(dtype):
            self.exprs.settled(node, part)
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

    def returned(self, node: ast.Return, known: Known) -> Part | None:
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
        if self.exprs.condition(node.test, known) == Lit(False, BOOL):  # before the first round
            return self.block(node.orelse, known)

        def once(head: Known) -> Compiled[While]:
            condition = self.exprs.condition(node.test, head)
            with self._loop(node) as loop:
                body, end = self.block(node.body, head.given(node.test, True))
            exit_facts = None if isinstance(condition, Lit) else head.given(node.test, False)
            return loop, While(condition, body), exit_facts, end

        loop, statement, exit_facts, _ = self._rounds(known, node.body, once)
        return self._after_loop(node, loop, statement, exit_facts)

    def _rounds(self, known: Known, nodes: Sequence[ast.AST], once: Callable[[Known], Compiled[T]]) -> Compiled[T]:
        """A loop whose `nodes` assign, compiled `once` for the facts at its head: those that hold before it, and
        again after each of its rounds. What is not None before it is taken not to be, until a round says otherwise.
        """
        names = assigned(nodes)
        held, hidden = known.not_none & names, dict(self.exprs.hidden)
        while True:
            found = once(replace(known, not_none=known.not_none - names | held))
            loop, end = found[0], found[-1]
            left = held.intersection(*(facts.not_none for facts in (end, *loop.at_continues) if facts is not None))
            if left == held:
                return found
            held = left
            self.exprs.hidden.clear()
            self.exprs.hidden.update(hidden)

    def _for(self, node: ast.For, known: Known) -> tuple[Block, Known | None]:
        before: Block = ()
        bounds = values = count = None
        match node.iter:
            case ast.Call(ast.Name(name) as called, args, keywords) if name not in self.exprs.names:
                over = self.source.outside(called)
                if over is range:
                    bounds = self._range(node.iter, known)
                elif over is enumerate and isinstance(node.target, ast.Tuple) and len(node.target.elts) == 2:
                    first = [*args[1:], *(keyword.value for keyword in keywords)]
                    if not args or len(first) > 1 or any(keyword.arg != "start" for keyword in keywords):
                        raise self.source.refuse(node.iter, "enumerate takes a text or a split one, and where to start")
                    count = self.exprs.new_local(I64)
                    values = self._iterated(args[0], known)
                    start = self.exprs.integer(first[0], known) if first else Lit(0, I64)
                    before = (Assign(count.name, start),)
        if bounds is None and values is None:
            values = self._iterated(node.iter, known)
        counter = self.exprs.new_local(I64 if values is None else STR)  # the user may assign to the loop's own name

        def once(head: Known) -> Compiled[Block]:
            target, inside = node.target, head
            assignment: Block = ()
            if count is not None:
                assert isinstance(target, ast.Tuple)
                number, target = target.elts
                assignment, inside = self._assign_to(node, number, count, inside)
                following = Apply("add", (count, Lit(1, I64)), I64, line=node.lineno)
                assignment = (*assignment, Assign(count.name, following))
            named, inside = self._assign_to(node, target, counter, inside)
            with self._loop(node) as loop:
                body, end = self.block(node.body, inside)
            return loop, (*assignment, *named, *body), head, end

        loop, whole, head, _ = self._rounds(known, [node.target, *node.body], once)
        if values is not None:
            done: Statement = ForEach(counter.name, values, whole)
        else:
            assert bounds is not None
            done = ForRange(counter.name, *bounds, whole, node.lineno)
        statements, after = self._after_loop(node, loop, done, head)
        return (*before, *statements), after

    def _iterated(self, node: ast.expr, known: Known) -> Part:
        """A text or the pieces of one, which a loop goes over."""
        reason = "a loop goes over range(...), a text or what split gives"
        if isinstance(node, ast.Tuple | ast.List | ast.Dict | ast.Set):
            raise self.source.refuse(node, reason)
        is_outside = isinstance(node, ast.Name | ast.Attribute) and not self.exprs.is_value(node)
        if is_outside and not isinstance(self.source.outside(node), str):
            raise self.source.refuse(node, reason)
        part = self.exprs.value(node, known)
        if part.dtype not in (STR, TEXTS):
            raise self.source.refuse(node, f"{reason}, not over {NAMES[part.dtype]}")
        return part

    def _range(self, node: ast.Call, known: Known) -> tuple[Part, Part, Part]:
        if node.keywords or not 1 <= len(node.args) <= 3:
            raise self.source.refuse(node, "range takes one to three ints")
        bounds = [self.exprs.integer(arg, known) for arg in node.args]
        if len(bounds) == 1:
            bounds.insert(0, Lit(0, I64))
        return bounds[0], bounds[1], bounds[2] if len(bounds) == 3 else Lit(1, I64)

    @contextmanager
    def _loop(self, node: ast.While | ast.For) -> Iterator[Loop]:
        """Around the body of a loop."""
        has_else = bool(node.orelse)
        loop = Loop(self.exprs.new_local(BOOL) if has_else else None)
        self.loops.append(loop)
        yield loop
        self.loops.pop()

    def _after_loop(self, node: ast.While | ast.For, loop: Loop, statement: Statement,
                    known: Known | None) -> tuple[Block, Known | None]:
        """The loop, and its else where it ends without a break; `known` are the facts there."""
        if loop.is_broken is None or known is None:
            return (statement,), join((known, *loop.at_breaks))
        otherwise, after_else = self.block(node.orelse, known)
        flag = loop.is_broken
        before: Block = ()
        if not loop.at_breaks:
            found: Block = otherwise
        else:
            before = (Assign(flag.name, Lit(False, BOOL)),)
            found = (If(Apply("not", (flag,), BOOL), otherwise, ()),)
        return (*before, statement, *found), join((after_else, *loop.at_breaks))


@dataclass(slots=True)
class Loop:
    """A loop whose body is being compiled."""

    is_broken: Local | None  # whether a break ended it, if it has an else
    at_breaks: list[Known] = field(default_factory=list)  # the facts there
    at_continues: list[Known] = field(default_factory=list)


# What a loop consists of, and the facts where its test fails and at the end of a round; None: it does not come there.
Compiled = tuple[Loop, T, Known | None, Known | None]
