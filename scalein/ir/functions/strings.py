"""Functions of text. Positions and lengths count code points."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from scalein.dtypes import BOOL, I64, STR, TIMES
from scalein.ir.exprs import Call, Expr, Lit, type_of
from scalein.ir.functions.registry import ANY, REGISTRY, Args, Function, Nulls, always, declare, typed
from scalein.ir.unify import Refused, nested_hint, own_type_of, type_literal, unify


def text_argument(call: Call, args: Args) -> Expr:
    """The first argument, a text."""
    arg = type_literal(args[0])
    if not type_of(arg).is_string:
        raise Refused(f"str.{call.fn.removeprefix('str_')} takes text, not {type_of(arg)!r}",
                      nested_hint(type_of(arg)) if type_of(arg).is_nested else "cast it first: .cast(pa.string())")
    return arg


def text_to_text(call: Call, args: Args) -> Expr:
    """Text of the same form as the argument."""
    arg = text_argument(call, args)
    return typed(call, [arg], type_of(arg))


def text_to_bool(call: Call, args: Args) -> Expr:
    """A condition on a text."""
    return typed(call, [text_argument(call, args)], BOOL)


def text_to_int(call: Call, args: Args) -> Expr:
    """A number of a text."""
    return typed(call, [text_argument(call, args)], I64)


def concatenated(call: Call, args: Args) -> Expr:
    """`+` of two texts; constants are joined here."""
    owns = [own_type_of(arg) for arg in args]
    other = next((own for own in owns if own is not None and not own.is_string), None)
    if other is not None:
        shown = " and ".join("null" if own is None else repr(own) for own in owns)
        hint = nested_hint(other) if other.is_nested else (
            "a length of time is written datetime.timedelta(hours=1)" if other.kind in TIMES and any(
                isinstance(arg, Lit) for arg in args) else
            f"cast the {other!r} with .cast(pa.string()), or let si.concat_str(...) do so")
        raise Refused(f"+ does not take {shown}", hint)
    left, right = unify(args, "+ does not take")
    if isinstance(left, Lit) and isinstance(right, Lit):
        is_known = isinstance(left.value, str) and isinstance(right.value, str)
        return Lit(f"{left.value}{right.value}" if is_known else None, left.dtype)
    return typed(replace(call, fn="concat", params=()), [left, right], type_of(left))


def _concat_str(call: Call, args: Args) -> Expr:
    """Texts with a separator between them, spelled out by `+`; other values are cast to text."""
    (separator,) = call.params
    found: Expr | None = None
    for arg in args:
        cast = Call("cast", (arg,), dtype=STR, at=call.at)
        own = own_type_of(arg)
        text = arg if own is None or own.is_string else REGISTRY["cast"].rule(cast, (arg,))
        if found is not None and separator:
            found = concatenated(call, (found, Lit(separator)))
        found = text if found is None else concatenated(call, (found, text))
    assert found is not None
    return type_literal(found) if own_type_of(found) is not None else Lit(None, STR)


def _any(call: Call, args: Sequence[Expr]) -> bool:
    return any(arg.nullable for arg in args)


def _fold_slice(call: Call) -> Callable[[str], str]:
    offset, length = call.params
    assert isinstance(offset, int)
    assert length is None or isinstance(length, int)

    def cut(text: str) -> str:
        start = offset if offset >= 0 else len(text) + offset
        stop = len(text) if length is None else start + length
        return text[max(start, 0) : max(stop, 0)]

    return cut


declare(
    Function("concat", concatenated, 2, Nulls.OWN, nullable=_any, makes_text=always, show="{0} + {1}",
             duckdb="({0} || {1})"),
    Function("concat_str", _concat_str, ANY, Nulls.OWN, nullable=_any, spelled_out=True,
             show="concat_str({args}, separator={params})", sql=("CONCAT_WS",)),
    Function("str_len", text_to_int, fold=lambda call: len, show="{0}.str.len()",
             sql=("CHAR_LENGTH", "LENGTH", "LEN"), duckdb="length({0})"),
    Function("str_slice", text_to_text, fold=_fold_slice, show="{0}.str.slice({params})", sql=("SUBSTRING", "SUBSTR")),
    Function("starts_with", text_to_bool, fold=lambda call: lambda text: text.startswith(call.params[0]),
             show="{0}.str.starts_with({params})", sql=("STARTS_WITH", "STARTSWITH"),
             duckdb="starts_with({0}, {params[0]})", spark="startswith"),
    Function("ends_with", text_to_bool, fold=lambda call: lambda text: text.endswith(call.params[0]),
             show="{0}.str.ends_with({params})", sql=("ENDS_WITH", "SUFFIX"), duckdb="suffix({0}, {params[0]})",
             spark="endswith"),
    Function("contains", text_to_bool, fold=lambda call: lambda text: call.params[0] in text,
             show="{0}.str.contains({params})", sql=("CONTAINS",), duckdb="contains({0}, {params[0]})",
             spark="contains"),
    Function("lower", text_to_text, host=always, arrow="lower", show="{0}.str.lower()", sql=("LOWER",),
             duckdb="lower({0})"),
    Function("upper", text_to_text, host=always, arrow="upper", show="{0}.str.upper()", sql=("UPPER",),
             duckdb="upper({0})"),
    Function("str_strip", text_to_text, host=always, arrow="strip", show="{0}.str.strip({params})", sql=("TRIM",),
             duckdb="trim({0}, {params[0]})"),
    Function("str_lstrip", text_to_text, host=always, arrow="lstrip", show="{0}.str.lstrip({params})", sql=("LTRIM",),
             duckdb="ltrim({0}, {params[0]})"),
    Function("str_rstrip", text_to_text, host=always, arrow="rstrip", show="{0}.str.rstrip({params})", sql=("RTRIM",),
             duckdb="rtrim({0}, {params[0]})"),
    Function("str_split_part", text_to_text, host=always, arrow="split_part", show="{0}.str.split_part({params})",
             sql=("SPLIT_PART",), duckdb="split_part({0}, {params[0]}, {params[1]})"),
    Function("str_extract", text_to_text, gives_null=always, host=always, arrow="extract",
             show="{0}.str.extract({params})", sql=("REGEXP_EXTRACT",),
             duckdb="CASE WHEN regexp_matches({0}, {params[0]}) "
                    "THEN regexp_extract({0}, {params[0]}, {params[1]}) END"),
    Function("str_matches", text_to_bool, host=always, arrow="matches", show="{0}.str.matches({params})",
             sql=("REGEXP_LIKE", "REGEXP_MATCHES"), duckdb="regexp_matches({0}, {params[0]})"),
    Function("str_replace", text_to_text, host=always, arrow="replace", show="{0}.str.replace({params})",
             sql=("REPLACE",), duckdb="replace({0}, {params[0]}, {params[1]})"),
)
