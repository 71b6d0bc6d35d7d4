"""How calls that take lists and structs apart are typed."""

from __future__ import annotations

from collections.abc import Callable

import pyarrow as pa

from scalein.dtypes import I64, DType, element_of, from_arrow_type
from scalein.errors import WrongType, guess
from scalein.ir.exprs import Call, Expr, type_of
from scalein.ir.unify import Refused, settle, typed

Rule = Callable[[Call, tuple[Expr, ...]], Expr]


def _list_len(call: Call, args: tuple[Expr, ...]) -> Expr:
    arg, _ = _list(call, args)
    return typed(call, [arg], I64)


def _list_get(call: Call, args: tuple[Expr, ...]) -> Expr:
    arg, element = _list(call, args)
    return typed(call, [arg], element, nullable=True)


def _list(call: Call, args: tuple[Expr, ...]) -> tuple[Expr, DType]:
    """The argument, and the type of its elements."""
    arg = settle(args[0])
    element = element_of(type_of(arg))
    if element is None:
        hint = ".struct.field(name) gives a field of a struct" if is_struct(type_of(arg)) else None
        raise Refused(f"{call.fn.replace('_', '.', 1)} takes a list, not {type_of(arg)!r}", hint)
    return arg, _known(element.type)


def _struct_field(call: Call, args: tuple[Expr, ...]) -> Expr:
    arg, name = settle(args[0]), str(call.params[0])
    dtype = type_of(arg)
    if not is_struct(dtype):
        hint = "explode the list, or take an element of it: .list.get(0)" if element_of(dtype) is not None else None
        raise Refused(f"struct.field takes a struct, not {dtype!r}", hint)
    assert dtype.nested is not None
    names = [field.name for field in dtype.nested]
    if names.count(name) != 1:
        how = "several fields" if name in names else "no field"
        raise Refused(f"the struct has {how} {name!r}: {', '.join(names) or 'it is empty'}", guess(name, names))
    field = dtype.nested.field(name)
    return typed(call, [arg], _known(field.type), nullable=arg.nullable or field.nullable)


def is_struct(dtype: DType) -> bool:
    """Whether values of a type have named fields."""
    return dtype.nested is not None and bool(pa.types.is_struct(dtype.nested))


def _known(arrow: pa.DataType) -> DType:
    try:
        return from_arrow_type(arrow)
    except WrongType:
        raise Refused(f"scalein does not compute with {arrow} yet", "cast the column before handing it over") from None


NESTED_RULES: dict[str, Rule] = {"list_len": _list_len, "list_get": _list_get, "struct_field": _struct_field}
