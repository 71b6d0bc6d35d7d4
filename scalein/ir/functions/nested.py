"""Functions that take lists and structs apart, and the one that makes structs; pyarrow computes them all."""

from __future__ import annotations

import pyarrow as pa

from scalein.dtypes import I64, DType, Kind, element_of, from_arrow_type
from scalein.errors import WrongType, guess
from scalein.ir.exprs import Call, Expr, type_of
from scalein.ir.functions.registry import ANY, Args, Function, Nulls, always, declare, typed
from scalein.ir.unify import Refused, type_literal


def _list_len(call: Call, args: Args) -> Expr:
    arg, _ = _list(call, args)
    return typed(call, [arg], I64)


def _list_get(call: Call, args: Args) -> Expr:
    arg, element = _list(call, args)
    return typed(call, [arg], element)


def _list(call: Call, args: Args) -> tuple[Expr, DType]:
    """The argument, and the type of its elements."""
    arg = type_literal(args[0])
    element = element_of(type_of(arg))
    if element is None:
        hint = ".struct.field(name) gives a field of a struct" if is_struct(type_of(arg)) else None
        raise Refused(f"{call.fn.replace('_', '.', 1)} takes a list, not {type_of(arg)!r}", hint)
    return arg, _known(element.type)


def _struct_field(call: Call, args: Args) -> Expr:
    arg, name = type_literal(args[0]), str(call.params[0])
    dtype = type_of(arg)
    if not is_struct(dtype):
        hint = "explode the list, or take an element of it: .list.get(0)" if element_of(dtype) is not None else None
        raise Refused(f"struct.field takes a struct, not {dtype!r}", hint)
    assert dtype.nested is not None
    names = [field.name for field in dtype.nested]
    if names.count(name) != 1:
        how = "several fields" if name in names else "no field"
        raise Refused(f"the struct has {how} {name!r}: {', '.join(names) or 'it is empty'}", guess(name, names))
    if isinstance(arg, Call) and arg.fn == "make_struct":
        return arg.args[names.index(name)]
    return typed(call, [arg], _known(dtype.nested.field(name).type))


def _struct(call: Call, args: Args) -> Expr:
    """A struct of its arguments; it is never null, its fields may be."""
    values = [type_literal(arg) for arg in args]
    fields = [pa.field(str(name), type_of(value).arrow) for name, value in zip(call.params, values, strict=True)]
    return typed(call, values, DType(Kind.NESTED, nested=pa.struct(fields)))


def is_struct(dtype: DType) -> bool:
    """Whether values of a type have named fields."""
    return dtype.nested is not None and bool(pa.types.is_struct(dtype.nested))


def _known(arrow: pa.DataType) -> DType:
    try:
        return from_arrow_type(arrow)
    except WrongType:
        raise Refused(f"scalein does not compute with {arrow} yet", "cast the column before handing it over") from None


def _is_nullable_field(call: Call) -> bool:
    nested = type_of(call.args[0]).nested
    assert nested is not None
    return bool(nested.field(str(call.params[0])).nullable)


declare(
    Function("list_len", _list_len, host=always, arrow="list_len", show="{0}.list.len()", sql=("CARDINALITY",),
             duckdb="len({0})"),
    Function("list_get", _list_get, gives_null=always, host=always, arrow="list_get", show="{0}.list.get({params})"),
    Function("make_struct", _struct, ANY, Nulls.NEVER, host=always, arrow="make_struct", show="struct({fields})",
             sql=("STRUCT",), duckdb="struct_pack({fields})"),
    Function("struct_field", _struct_field, gives_null=_is_nullable_field, host=always, arrow="struct_field",
             show="{0}.struct.field({params})", duckdb="struct_extract({0}, {params[0]})"),
)
