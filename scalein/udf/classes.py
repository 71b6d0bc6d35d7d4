"""Classes of the user's, compiled: their typed fields are state, their methods change it.

A method is compiled like a udf, in which each field is a local with a type of its own: `self.total` is a name like any
other. It ends by storing the fields that it has assigned to.
"""

from __future__ import annotations

import ast
import os
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta

from scalein.dtypes import BOOL, F64, I64, STR, DType, Kind
from scalein.errors import CannotCompile, SourceLoc
from scalein.ir.accumulators import ExprAcc, Slot
from scalein.ir.aggregates import UserAggregate
from scalein.ir.exprs import Call, Expr, Lit
from scalein.ir.ring import Ring, RingOf
from scalein.ir.udf import Method, Return, RingAppend, RingField, Variable, builds_text, walk
from scalein.udf.body import Body, check_depth, compile_function
from scalein.udf.conversions import NAMES, common, constant, plain_constant
from scalein.udf.known import assigned
from scalein.udf.python_source import Source, read_source

_TYPES: dict[object, DType] = {float: F64, int: I64, bool: BOOL, str: STR}
_ALIASES: dict[str, object] = {"Timestamp": datetime, "Duration": timedelta}  # names of ours
_NO_DEFAULT = object()


@dataclass(frozen=True, slots=True)
class UserClass:
    """A class as the user wrote it, with the fields that are its state."""

    python: type
    what: str  # "udaf"
    plain: str | None  # how to run it as plain Python, for errors

    @property
    def title(self) -> str:
        return f"the {self.what} {self.python.__name__!r}"

    def refuse(self, reason: str, hint: str | None = None, found: object = "") -> CannotCompile:
        """The error for the class as a whole, at its first method."""
        methods = (value for value in vars(self.python).values() if isinstance(value, types.FunctionType))
        codes = sorted((method.__code__ for method in methods), key=lambda code: code.co_firstlineno)
        at = SourceLoc(codes[0].co_filename, codes[0].co_firstlineno) if codes else None
        return CannotCompile(f"{self.title} cannot be compiled: {reason}", at=at, found=found, hint=hint)

    def method(self, name: str, yields: bool = False) -> Source:
        """The source of one of its methods."""
        found = vars(self.python).get(name)
        if found is None:
            raise self.refuse(f"it has no method {name!r}")
        return read_source(found, self.title, self.plain, yields)

    def fields(self, types: Mapping[object, DType] = _TYPES,
               other: Callable[[object], Lit | None] = lambda value: None) -> tuple[Slot, ...]:
        """The typed fields, with their defaults; `other` makes constants that are no plain ones."""
        annotations = vars(self.python).get("__annotations__", {})
        if not annotations:
            raise self.refuse("it has no typed fields", "its state is typed fields with defaults: `total: float = 0.0`")
        return tuple(self._field(name, annotation, types, other) for name, annotation in annotations.items())

    def _field(self, name: str, annotation: object, types: Mapping[object, DType],
               other: Callable[[object], Lit | None]) -> Slot:
        known = ", ".join(sorted(NAMES[dtype] for dtype in types.values()))
        ring = ring_type(annotation, types)
        if ring is not None:
            return ring_slot(name, ring)
        dtype, nullable = annotated(annotation, types)
        if dtype is None:
            raise self.refuse(f"the field {name!r} has a type that is not supported", f"types are {known}, and one of "
                              "them with None: `float | None`", found=annotation)
        default = vars(self.python).get(name, _NO_DEFAULT)
        if default is _NO_DEFAULT:
            raise self.refuse(f"the field {name!r} has no default", f"write `{name}: {NAMES[dtype]} = ...`")
        if default is None and nullable:
            return Slot(name, dtype, None, nullable)
        given = plain_constant(default) or other(default)
        if given is None or given.dtype is None or common([given.dtype, dtype]) != dtype:
            raise self.refuse(f"the default of {name!r} is not {NAMES[dtype]}", found=repr(default))
        return Slot(name, dtype, constant(given.value, dtype).value, nullable)


def ring_type(annotation: object, types: Mapping[object, DType]) -> RingOf | None:
    """The type of a ring that an annotation means, if it does; only classes for `process` have them."""
    if datetime not in types:
        return None
    if isinstance(annotation, str):
        match ast.parse(annotation, mode="eval").body:
            case ast.Subscript(ast.Name("Ring") | ast.Attribute(attr="Ring"), ast.Tuple([ast.Name(element),
                                                                                         ast.Constant(int(size))])):
                found: object = Ring[{"float": float, "int": int}.get(element), size]  # type: ignore[misc]
                return found if isinstance(found, RingOf) else None
        return None
    return annotation if isinstance(annotation, RingOf) else None


def ring_slot(name: str, ring: RingOf) -> Slot:
    words = DType(Kind.BIN, form="fixed", width=8 * (ring.size + 1))
    return Slot(name, words, None, ring=F64 if ring.element is float else I64)


def annotated(annotation: object, types: Mapping[object, DType]) -> tuple[DType | None, bool]:
    """The type that an annotation means, as an object or as its text, and whether it allows None."""
    if isinstance(annotation, str):
        names = {**{getattr(known, "__name__", str(known)): known for known in types}, **_ALIASES}
        match ast.parse(annotation, mode="eval").body:
            case ast.BinOp(inner, ast.BitOr(), ast.Constant(None)) | ast.BinOp(ast.Constant(None), ast.BitOr(), inner):
                return annotated(ast.unparse(inner), types)[0], True
            case ast.Subscript(ast.Name("Optional") | ast.Attribute(attr="Optional"), inner):
                return annotated(ast.unparse(inner), types)[0], True
            case ast.Name(name) | ast.Attribute(attr=name):
                return types.get(names.get(name)), False
            case _:
                return None, False
    options = typing.get_args(annotation)
    if type(None) in options:
        rest = [option for option in options if option is not type(None)]
        return (types.get(rest[0]) if len(rest) == 1 else None), True
    return types.get(annotation), False


class MethodBody(Body):
    """The statements of a method, in which fields are locals."""

    def __init__(self, source: Source, params: tuple[Variable, ...]) -> None:
        super().__init__(source, params, F64, nullable=True)

    def fallen_through(self) -> Return:
        return Return(None)

    def returned(self, node: ast.Return, known: object) -> None:
        if node.value is not None and not (isinstance(node.value, ast.Constant) and node.value.value is None):
            raise self.source.refuse(node, "it returns a value", "its result is the state that it leaves")


class Fields(ast.NodeTransformer):
    """Turns `self.total` into a name, and refuses whatever else is done with an object."""

    def __init__(self, source: Source, objects: Mapping[str, tuple[str, tuple[str, ...]]]) -> None:
        self.source, self.objects = source, objects

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        if isinstance(node.value, ast.Name) and node.value.id in self.objects:
            prefix, names = self.objects[node.value.id]
            if node.attr not in names:
                what = "column of the input" if prefix == "row" else "field"
                raise self.source.refuse(node, f"{ast.unparse(node)} is no {what}", f"there are {', '.join(names)}")
            return ast.copy_location(ast.Name(f"{prefix}.{node.attr}", node.ctx), node)
        return self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> ast.AST:
        if node.id in self.objects:
            raise self.source.refuse(node, f"{node.id} can be used for its fields only")
        return node


def compile_method(source: Source, params: tuple[Variable, ...], fields: tuple[Slot, ...],
                   body: MethodBody | None = None, makes_text: bool = False) -> Method:
    """A method whose syntax tree names fields already."""
    found = MethodBody(source, params) if body is None else body
    statements = found.infer()
    stored = assigned(source.tree.body)
    changes = tuple(f"self.{slot.name}" for slot in fields if f"self.{slot.name}" in stored)
    name = f"{source.fn.__qualname__.rpartition('.<locals>.')[2]}"
    appended = {each.name for each, _ in walk(statements) if isinstance(each, RingAppend)}
    rings = tuple(RingField(f"self.{slot.name}", slot.ring, slot.size, f"self.{slot.name}" in appended)
                  for slot in fields if slot.ring is not None)
    method = Method(name, os.path.basename(source.file), params, found.variables(), changes, statements, rings)
    check_depth(source, method)
    if builds_text(method) and not makes_text:
        raise source.refuse(source.tree, "it builds text, which a state cannot hold",
                            "compute it after the aggregation")
    return method


def with_fields(source: Source, objects: Mapping[str, tuple[str, tuple[str, ...]]],
                transformer: Callable[..., Fields] = Fields) -> Source:
    """The source in which fields of objects are names: parameter -> prefix of the names, fields."""
    tree = source.tree
    tree.body = [transformer(source, objects).visit(node) for node in tree.body]
    return source


def own_name(source: Source, count: int | None = None) -> tuple[str, ...]:
    """The names of a method's parameters, of which there are `count`."""
    args = source.tree.args
    names = tuple(arg.arg for arg in (*args.posonlyargs, *args.args))
    if args.vararg or args.kwarg or args.kwonlyargs or args.defaults or not names or count not in (None, len(names)):
        raise source.refuse(source.tree, f"{source.fn.__name__} takes other arguments than it should")
    return names


def variables(fields: tuple[Slot, ...], prefix: str) -> tuple[Variable, ...]:
    return tuple(Variable(f"{prefix}.{slot.name}", slot.dtype, slot.nullable) for slot in fields if slot.ring is None)


def compile_udaf(cls: type) -> UserAggregate:
    """A class with typed fields and the methods update, merge and finish; raises `CannotCompile`."""
    user = UserClass(cls, "udaf", None)
    fields = user.fields({dtype_of: dtype for dtype_of, dtype in _TYPES.items() if dtype != STR})
    names = tuple(slot.name for slot in fields)
    own = variables(fields, "self")

    update = user.method("update")
    me, *args = own_name(update)
    for arg in args:
        if arg == me:
            raise update.refuse(update.tree, "two parameters have one name")
    params = _parameters(update)
    updated = compile_method(with_fields(update, {me: ("self", names)}), (*own, *params), fields)

    merge = user.method("merge")
    me, other = own_name(merge, 2)
    merge = with_fields(merge, {me: ("self", names), other: ("other", names)})
    merged = compile_method(merge, (*own, *variables(fields, "other")), fields)

    finish = user.method("finish")
    (me,) = own_name(finish, 1)
    finished = compile_function(with_fields(finish, {me: ("self", names)}), own)
    if finished.dtype == STR:
        raise finish.refuse(finish.tree, "it gives text, which an aggregate cannot make yet")
    if finished.dtype.is_nested or any(param.dtype.is_nested for param in params):
        where = finish if finished.dtype.is_nested else update
        raise where.refuse(where.tree, "a column holds no tuple and no pieces of text")
    given: tuple[Expr, ...] = tuple(slot.own for slot in fields)
    called = Call("udf", given, (finished,), finished.dtype, finished.nullable)
    acc = ExprAcc(cls.__name__, fields, tuple(not param.nullable for param in params), updated, merged, called)
    return UserAggregate(params, finished.dtype, acc)


def _parameters(source: Source) -> tuple[Variable, ...]:
    """The typed parameters after the first."""
    args = source.tree.args
    given = [*args.posonlyargs, *args.args]
    first = given[0]
    first.annotation = first.annotation or ast.copy_location(ast.Name("float", ast.Load()), first)
    return source.params()[1:]
