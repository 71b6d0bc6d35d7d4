"""What a udf means for one row: its typed body run by Python, with ints checked to be of 64 bits.

`tests/test_udf.py` compares this, and compiled code, with the function that the user wrote, run by CPython.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from scalein.dtypes import BOOL, F64, I64, STR, DType, Kind
from scalein.errors import InternalError
from scalein.ir.exprs import Lit
from scalein.ir.udf import (
    CLASSES,
    AnyUdf,
    Apply,
    Assign,
    Break,
    Choose,
    Continue,
    Either,
    ForEach,
    ForRange,
    If,
    Invoke,
    Let,
    Local,
    Method,
    Part,
    PythonUdf,
    Return,
    Statement,
    Udf,
    While,
    Yield,
    items_of,
)

Frame = dict[str, Any]
_PYTHON = {F64: float, I64: int, BOOL: bool, STR: str}
_YIELDED = "yield"  # rows that a method has given, in its frame
_INT_LOW, _INT_HIGH = I64.int_range()


class Failed(ArithmeticError):
    """The function has no value for this row; the text says why, and where in the user's file."""


def call(udf: AnyUdf, row: Sequence[Any]) -> Any:
    """The udf's value for the values of one row: null where a parameter that is not Optional gets a null."""
    if any(value is None for value, param in zip(row, udf.params, strict=True) if not param.nullable):
        return None
    return _call_python(udf, row) if isinstance(udf, PythonUdf) else _run(udf, row)


# --- functions that stay Python


def _call_python(udf: PythonUdf, row: Sequence[Any]) -> Any:
    try:
        found = udf.call(*row)
    except Exception as error:
        raise Failed(f"{type(error).__name__} ({error})") from error
    if found is None and udf.nullable:
        return None
    wanted = _PYTHON[udf.dtype]
    if wanted is float and type(found) is int:
        return float(found)
    if not isinstance(found, wanted) or (wanted is int and isinstance(found, bool)):
        raise Failed(f"a result of type {type(found).__name__} instead of {wanted.__name__}")
    return _checked(found) if isinstance(found, int) and wanted is int else found


# --- compiled ones


class _Leave(Exception):
    """Ends a loop's round, a loop or the function."""

    def __init__(self, how: type, value: Any = None) -> None:
        self.how, self.value = how, value


def _run(udf: Udf, row: Sequence[Any]) -> Any:
    frame: Frame = {param.name: value for param, value in zip(udf.params, row, strict=True)}
    try:
        _block(udf, udf.body, frame)
    except _Leave as left:
        return left.value
    raise InternalError(f"the udf {udf.name!r} ended without a return")


def change(method: Method, fields: Frame, args: Sequence[Any]) -> list[list[Any]]:
    """Run a method that changes fields, called `self.x`; `args` are those of its other parameters. Gives the values of
    the rows that it yields.
    """
    for value, param in zip(args, (param for param in method.params if param.name not in fields), strict=True):
        if value is None and not param.nullable:
            raise Failed(f"null in {param.name}")
    frame = dict(fields)
    others = [param.name for param in method.params if param.name not in fields]
    frame.update(zip(others, args, strict=True))
    try:
        _block(method, method.body, frame)
    except _Leave:
        fields.update({name: frame[name] for name in method.changes})
        return frame.get(_YIELDED, [])  # type: ignore[no-any-return]
    raise InternalError(f"the method {method.name!r} ended without a return")


def _block(udf: Udf | Method, statements: Sequence[Statement], frame: Frame) -> None:
    for statement in statements:
        match statement:
            case Assign(name, value):
                frame[name] = _eval(udf, value, frame)
            case If(condition, then, otherwise):
                _block(udf, then if _eval(udf, condition, frame) else otherwise, frame)
            case Return(value):
                raise _Leave(Return, None if value is None else _eval(udf, value, frame))
            case Yield(values):
                frame.setdefault(_YIELDED, []).append([_eval(udf, part, frame) for part in values])
            case Break() | Continue():
                raise _Leave(type(statement))
            case While(condition, body):
                while _eval(udf, condition, frame):
                    if not _round(udf, body, frame):
                        break
            case ForEach(name, values, body):
                for value in _eval(udf, values, frame):
                    frame[name] = value
                    if not _round(udf, body, frame):
                        break
            case ForRange(name):
                bounds = [_eval(udf, part, frame) for part in (statement.start, statement.stop, statement.step)]
                if bounds[2] == 0:
                    raise _failed(udf, "range() with a step of zero", statement.line)
                for number in range(*bounds):
                    frame[name] = number
                    if not _round(udf, statement.body, frame):
                        break


def _round(udf: Udf | Method, body: Sequence[Statement], frame: Frame) -> bool:
    """One round of a loop; whether there may be another."""
    try:
        _block(udf, body, frame)
    except _Leave as left:
        if left.how is Return:
            raise
        return left.how is Continue
    return True


def _eval(udf: Udf | Method, part: Part, frame: Frame) -> Any:
    match part:
        case Lit(value):
            return value
        case Local(name):
            return frame[name]
        case Choose(condition, then, otherwise):
            return _eval(udf, then if _eval(udf, condition, frame) else otherwise, frame)
        case Either(fn, left, right):
            first = _eval(udf, left, frame)
            if part.dtype.kind is Kind.TS and first is not None:  # every time is true
                return _eval(udf, right, frame) if fn == "and" else first
            return _eval(udf, right, frame) if bool(first) == (fn == "and") else first
        case Let(name, value, body):
            frame[name] = _eval(udf, value, frame)
            return _eval(udf, body, frame)
        case Invoke(other, args):
            return _run(other, [_eval(udf, arg, frame) for arg in args])
        case Apply(fn, args):
            values = [_eval(udf, arg, frame) for arg in args]
            try:
                return _apply(fn, part.dtype, values)
            except ZeroDivisionError:
                raise _failed(udf, "division by zero", part.line) from None
            except Failed as error:
                raise _failed(udf, str(error), part.line) from None
            except (ValueError, OverflowError):
                what = "impossible cast" if part.dtype == I64 else "math domain or range error"
                raise _failed(udf, what, part.line) from None


def _failed(udf: Udf | Method, what: str, line: int) -> Failed:
    return Failed(f"{what} at {udf.place(line)}")


def _widened(value: Any, dtype: DType) -> Any:
    if value is None or not isinstance(value, tuple):
        return value if value is None or dtype == STR else _PYTHON[dtype](value) if dtype in _PYTHON else value
    return tuple(_widened(item, typ) for item, (typ, _) in zip(value, items_of(dtype), strict=True))


def _apply(fn: str, dtype: DType, values: list[Any]) -> Any:
    if fn == "to_tuple":
        return _widened(values[0], dtype)
    if fn in _MATH_INTS:
        return _checked(_failing("math domain or range error", getattr(math, fn))(*values))
    if fn in ("to_int", "to_float"):
        return None if values[0] is None else (int if fn == "to_int" else float)(values[0])
    if fn in _MEANING:
        found = _MEANING[fn](*values)
        return _checked(found) if dtype == I64 or dtype.kind in (Kind.TS, Kind.DUR) else found
    if fn in _WHOLE:
        found = _WHOLE[fn](values[0])
        if not _INT_LOW <= found <= _INT_HIGH:
            raise OverflowError
        return found
    if fn == "pow" and dtype == I64:
        return _int_power(*values)
    found = values[0] ** values[1] if fn == "pow" else getattr(math, fn)(*values)
    if isinstance(found, complex):
        raise ValueError
    return found


def _checked(value: int) -> int:
    if not _INT_LOW <= value <= _INT_HIGH:
        raise Failed("integer overflow")
    return value


def _int_power(base: int, exponent: int) -> int:
    if exponent < 0:
        raise Failed("a negative exponent of an int")
    if abs(base) > 1 and exponent > 63:
        raise Failed("integer overflow")
    return _checked(base**exponent)


def _shift_left(value: int, by: int) -> int:
    if by < 0:
        raise Failed("a negative shift")
    if by > 63 and value != 0:
        raise Failed("integer overflow")
    return value << min(by, 63)


def _shift_right(value: int, by: int) -> int:
    if by < 0:
        raise Failed("a negative shift")
    return value >> min(by, 63)


def _char(text: str, index: int) -> str:
    try:
        return text[index]
    except IndexError:
        raise Failed("string index out of range") from None


def _item(values: Any, index: int) -> Any:
    try:
        return values[index]
    except IndexError:
        raise Failed("list index out of range") from None


def _unpacked(values: list[str], count: int) -> list[str]:
    if len(values) != count:
        raise Failed(f"too {'few' if len(values) < count else 'many'} values to unpack")
    return values


def _failing(what: str, fn: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which fails with this text where it raises ValueError or TypeError."""

    def call(*values: Any) -> Any:
        try:
            return fn(*values)
        except (ValueError, TypeError, OverflowError):
            raise Failed(what) from None

    return call


def _ascii_number(kind: type) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        if not text.strip().isascii():
            raise ValueError
        return kind(text)

    return _failing(f"a text that is no {kind.__name__}", read)


def _pad(text: str, width: int, fill: str, align: str) -> str:
    if align == "^":
        return f"{text:{fill}^{max(width, 0)}}"
    return {"<": str.ljust, ">": str.rjust, "c": str.center}[align](text, width, fill)


def _replace(text: str, old: str, new: str, most: int) -> str:
    if not old:
        raise Failed("replace of an empty text")
    return text.replace(old, new, most)


def _chr(point: int) -> str:
    if 0xD800 <= point < 0xE000:
        raise ValueError
    return chr(point)


def _grouped(text: str) -> str:
    whole, point, rest = text.partition(".")
    return f"{int(whole):,}{point}{rest}".replace("0", "-0", whole == "-0") if whole.lstrip("-").isdigit() else text


_MATH_INTS = ("gcd", "lcm", "comb", "perm", "factorial", "isqrt")
_WHOLE: dict[str, Callable[[float], int]] = {
    "trunc": math.trunc, "floor": math.floor, "ceil": math.ceil, "round": round,
}  # fmt: skip
_MEANING: dict[str, Callable[..., Any]] = {
    "add": lambda a, b: a + b, "sub": lambda a, b: a - b, "mul": lambda a, b: a * b, "div": lambda a, b: a / b,
    "floordiv": lambda a, b: a // b, "mod": lambda a, b: a % b, "neg": lambda a: -a, "abs": abs,
    "eq": lambda a, b: a == b, "ne": lambda a, b: a != b, "lt": lambda a, b: a < b, "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b, "ge": lambda a, b: a >= b, "not": lambda a: not a, "truth": bool,
    "is_none": lambda a: a is None, "min": min, "max": max, "len": len, "contains": lambda a, b: b in a,
    "starts_with": str.startswith, "ends_with": str.endswith, "invert": lambda a: ~a,
    "bit_and": lambda a, b: a & b, "bit_or": lambda a, b: a | b, "bit_xor": lambda a, b: a ^ b,
    "shl": _shift_left, "shr": _shift_right, "concat": lambda *texts: "".join(texts), "text": str, "char": _char,
    "slice": lambda text, start, stop: text[start:stop], "upper": str.upper, "lower": str.lower, "strip": str.strip,
    "lstrip": str.lstrip, "rstrip": str.rstrip, "replace": _replace,
    "fixed": lambda x, digits, letter: f"{x:.{digits}{letter}}", "grouped": _grouped,
    "tuple": lambda *items: items, "item": _item, "among": lambda texts, text: text in texts, "unpacked": _unpacked,
    "words": lambda text, most: text.split(None, most), "split": _failing("an empty separator", str.split),
    "rsplit": str.rsplit, "join": str.join, "casefold": str.casefold,
    "titled": str.title, "removeprefix": str.removeprefix, "removesuffix": str.removesuffix, "pad": _pad,
    "find": str.find, "rfind": str.rfind, "count": str.count,
    "index": _failing("substring not found", str.index), "rindex": _failing("substring not found", str.rindex),
    "partition": _failing("an empty separator", str.partition),
    "rpartition": _failing("an empty separator", str.rpartition), "zfill": str.zfill,
    "repeat": lambda text, count: text * count, "reversed": lambda text: text[::-1],
    "ord": _failing("ord() of a text that is not one character", ord),
    "chr": _failing("chr() of a number that is no character", _chr),
    "int_of": _ascii_number(int), "float_of": _ascii_number(float), "rounded": round,
    "frexp": math.frexp, "modf": math.modf, "is_integer": float.is_integer, "bit_length": int.bit_length,
    "bit_count": int.bit_count,
    "isclose": lambda a, b, rel, absolute: math.isclose(a, b, rel_tol=rel, abs_tol=absolute),
    **{name: getattr(str, name) for name in CLASSES},
}  # fmt: skip
