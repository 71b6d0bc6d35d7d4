"""@si.udf: a typed Python function as a function of columns, compiled from its syntax tree.

    @si.udf
    def grade(price: float, qty: int) -> float:
        total = 0.0
        for i in range(qty):
            total += price if i % 2 == 0 else -price / 2
        return total if total > 0 else -1.0

    flow.with_columns(g=grade(col("price"), col("qty")))

It has Python's semantics, with these differences. An int has 64 bits, and overflow is an error. Where Python would
raise (division by zero, the logarithm of a negative number), the row fails with an error that names file and line. A
local has one type: if both ints and floats are assigned to it, it is always a float. `int / int` divides as floats, and
`int ** int` with a negative exponent is an error unless the exponent is a constant. A null argument for a parameter
that is not Optional makes the result null, without a call. Text has `len`, `in`, comparisons, `s[i]` and slices, `+`,
f-strings and `str()` of ints, bools and text, formats such as `{x:.2f}`, and the methods `upper lower strip lstrip
rstrip replace startswith endswith`; an index outside of a text is an error.

A loop in a udf runs inside a kernel; Ctrl-C interrupts it too.

    python_source.py   the function's text, its annotations, the names it refers to
    known.py           flow analysis: which locals are set, and which are not None, at a point of the function
    conversions.py     common types and conversions
    exprs.py           expressions, calls.py the builtins among them
    body.py            statements and the types of locals
"""

from __future__ import annotations

import functools
import types
import typing
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, overload

from scalein.api.column import Column, as_expr
from scalein.dtypes import BOOL, F64, I64, STR, DType
from scalein.errors import BadArgument, CannotCompile, SourceLoc, here
from scalein.ir.exprs import Call

if TYPE_CHECKING:  # what compiles a function is imported with the first one
    from scalein.ir.udf import AnyUdf, PythonUdf

_TYPES: dict[object, DType] = {float: F64, int: I64, bool: BOOL, str: STR}


class UdfFunction:
    """The result of `@si.udf`: called with columns it gives a Column, called with plain values a value.

    `python` is the original function.
    """

    def __init__(self, python: Callable[..., Any], ir: AnyUdf) -> None:
        functools.update_wrapper(self, python)
        self.python = python
        self.ir = ir

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not any(isinstance(arg, Column) for arg in (*args, *kwargs.values())):
            return self._plain(args, kwargs)
        import inspect

        at = here()
        signature = inspect.signature(self.python)
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError as error:
            raise BadArgument(f"{self.ir.name} is called wrongly: {error}", at=at, takes=self._signature()) from None
        bound.apply_defaults()
        given = tuple(as_expr(bound.arguments[name], at) for name in signature.parameters)
        return Column(Call("udf", given, (self.ir,), at=at))

    def _plain(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The function's own value for Python's values."""
        try:
            return self.python(*args, **kwargs)
        except TypeError:
            names = [arg for arg in (*args, *kwargs.values()) if isinstance(arg, str)]
            if not names or any(param.dtype.is_string for param in self.ir.params):
                raise
            raise BadArgument(f"{self.ir.name} takes columns or numbers, not a text", at=here(), found=repr(names[0]),
                              takes=self._signature(), hint=f"a column is written col({names[0]!r})") from None

    def __repr__(self) -> str:
        return f"<udf {self.ir.name}({self._signature()})>"

    def _signature(self) -> str:
        return ", ".join(map(repr, self.ir.params))

    def __reduce__(self) -> str:
        return self.python.__qualname__  # pickled like a function: by its name


@overload
def udf(fn: Callable[..., Any], /) -> UdfFunction: ...
@overload
def udf(*, compile: bool = True) -> Callable[[Callable[..., Any]], UdfFunction]: ...
def udf(fn: Callable[..., Any] | None = None, /, *,
        compile: bool = True) -> UdfFunction | Callable[[Callable[..., Any]], UdfFunction]:  # fmt: skip
    """A typed Python function as a function of columns, compiled when it is first used in a flow.

    Parameters and result are annotated with float, int, bool or str, or one of them with None. Code that cannot be
    compiled is refused here, with file, line and reason; `compile=False` runs the function as plain Python, row by row.

    >>> import pyarrow as pa, scalein as si
    >>> from scalein import col
    >>> @si.udf
    ... def collatz(n: int) -> int:
    ...     steps = 0
    ...     while n > 1:
    ...         n = n // 2 if n % 2 == 0 else 3 * n + 1
    ...         steps += 1
    ...     return steps
    >>> si.from_arrow(pa.table({"n": [1, 6, 27]})).select("n", steps=collatz(col("n"))).collect()["steps"].to_pylist()
    [0, 8, 111]
    >>> collatz(27)
    111
    >>> @si.udf
    ... def initials(first: str, last: str, number: int) -> str:
    ...     if not first or not last:
    ...         return "?"
    ...     return f"{first[0].upper()}.{last[0].upper()}.-{number}"
    >>> people = si.from_arrow(pa.table({"first": ["ada", ""], "last": ["lovelace", "x"], "number": [7, 8]}))
    >>> people.select(i=initials(col("first"), col("last"), col("number"))).collect()["i"].to_pylist()
    ['A.L.-7', '?']
    """
    if fn is None:
        return functools.partial(_make_udf, compile=compile)
    return _make_udf(fn, compile=compile)


def _make_udf(fn: Callable[..., Any], *, compile: bool) -> UdfFunction:
    if isinstance(fn, UdfFunction):
        fn = fn.python
    if not callable(fn):
        raise BadArgument("udf takes a function", at=here(), found=repr(fn))
    if not compile:
        return UdfFunction(fn, _python_udf(fn))
    from scalein.udf.body import compile_function
    from scalein.udf.python_source import read_source

    return UdfFunction(fn, compile_function(read_source(fn)))


def _python_udf(fn: Callable[..., Any]) -> PythonUdf:
    """A function that is not compiled; only its types must be known."""
    import inspect

    from scalein.ir.udf import PythonUdf, Variable

    name = getattr(fn, "__name__", type(fn).__name__)
    code = getattr(fn, "__code__", None)
    at = SourceLoc(code.co_filename, code.co_firstlineno) if code is not None else here()
    try:
        hints, parameters = typing.get_type_hints(fn), inspect.signature(fn).parameters
    except (NameError, TypeError, ValueError) as error:
        raise CannotCompile(f"the types of the udf {name!r} cannot be read", at=at, found=error) from None

    def annotated_type(parameter_name: str) -> tuple[DType, bool]:
        hint = hints.get(parameter_name)
        options = typing.get_args(hint) if isinstance(hint, types.UnionType) or typing.get_origin(hint) else (hint,)
        plain = [option for option in options if option is not types.NoneType]
        if len(plain) != 1 or plain[0] not in _TYPES:
            role = "result" if parameter_name == "return" else f"parameter {parameter_name!r}"
            raise CannotCompile(f"the {role} of the udf {name!r} needs a type", at=at, found=hint,
                                hint="types are float, int, bool, str, and one of them with None: `float | None`")
        return _TYPES[plain[0]], len(options) > 1

    for parameter in parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise CannotCompile(f"the udf {name!r} takes any number of arguments", at=at)
    params = tuple(Variable(each, *annotated_type(each)) for each in parameters)
    return PythonUdf(name, params, *annotated_type("return"), call=fn)
