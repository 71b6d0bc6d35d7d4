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
that is not Optional makes the result null, without a call. Numbers have the functions of `math` but those of
collections; `int(s)` and `float(s)` read ASCII digits. Text has `len`, `in`, comparisons, `s[i]` and slices, `+`, `*`,
f-strings with formats such as `{x:,.2f}` or `{n:05d}`, most methods of `str`, `ord`, `chr`, and `for c in s`; an index
outside of a text is an error. The text of a float needs a format.

`s.split(sep)` gives pieces that can be counted, indexed, unpacked, joined, searched with `in` and looped over; an index
looks for separators from the start, so a loop over the pieces is `for piece in s.split(sep)`. Tuples are made,
unpacked, indexed with constants, and returned by udfs that others call. A loop goes over `range`, a text, or pieces,
with `enumerate` around them, and may have an `else`. A loop in a udf runs inside a kernel; Ctrl-C interrupts it too.

    python_source.py   the function's text, its annotations, the names it refers to
    known.py           flow analysis: which locals are set, and which are not None, at a point of the function
    conversions.py     common types and conversions
    exprs.py           expressions; calls.py the builtins, text_methods.py the methods of text among them
    body.py            statements and the types of locals
    classes.py         classes with state: @si.udaf; process_class.py: those of group_by(...).process(...)
"""

from __future__ import annotations

import functools
import types
import typing
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, overload

from scalein.api.column import Column, aggregate_of, as_column, as_expr
from scalein.dtypes import BOOL, F64, I64, STR, DType
from scalein.errors import BadArgument, CannotCompile, ShortTraceback, SourceLoc, here
from scalein.ir.exprs import Call

if TYPE_CHECKING:  # what compiles a function is imported with the first one
    from scalein.dtypes import Schema
    from scalein.ir.aggregates import UserAggregate
    from scalein.ir.process import ProcessBody
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
        inner = next((each for each in (*self.ir.params, self.ir) if each.dtype.is_nested), None)
        if inner is not None:
            raise BadArgument(f"{self.ir.name} takes or gives a tuple, which no column holds", at=at,
                              takes=self._signature(), hint="call it from another udf, which returns one of the values")
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
def udf(fn: Callable[..., Any], /, *, compile: bool = True) -> UdfFunction: ...
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
        return functools.partial(udf, compile=compile)
    with ShortTraceback():
        if isinstance(fn, UdfFunction):
            fn = fn.python
        if not callable(fn):
            raise BadArgument("udf takes a function", at=here(), found=repr(fn))
        if not compile:
            return UdfFunction(fn, _python_udf(fn))
        from scalein.udf.body import compile_function
        from scalein.udf.python_source import read_source

        return UdfFunction(fn, compile_function(read_source(fn)))


class Udaf:
    """The result of `@si.udaf`: called with columns it is an aggregate of them. `python` is the original class."""

    def __init__(self, python: type, ir: UserAggregate) -> None:
        functools.update_wrapper(self, python, updated=())
        self.python, self.ir = python, ir

    def __call__(self, *columns: object) -> Column:
        at, name = here(), self.ir.acc.name
        given = [as_column(column, name) for column in columns]
        if len(given) != len(self.ir.params):
            raise BadArgument(f"{name} takes {len(self.ir.params)} columns", at=at, found=str(len(given)),
                              takes=", ".join(map(repr, self.ir.params)))
        return aggregate_of("udaf", given, (self.ir,), at)

    def __repr__(self) -> str:
        return f"<udaf {self.ir.acc.name}({', '.join(map(repr, self.ir.params))})>"

    def __reduce__(self) -> str:
        return self.python.__qualname__  # pickled like a class: by its name


def udaf(cls: type) -> Udaf:
    """A class as an aggregate of columns, compiled: typed fields with defaults are what a group remembers.

    `update` counts a row in, `merge` the rows of another group, and `finish` gives the result. A group with the
    defaults has no rows, so merging one changes nothing; rows and groups come in any order. A row in which an argument
    is null does not count, unless its type has `| None`; where no row counted, the result is null. Fields are of type
    float, int or bool, or one of them with None; the code is that of `@si.udf`, and refused as there.

    >>> import math, pyarrow as pa, scalein as si
    >>> from scalein import col
    >>> @si.udaf
    ... class GeometricMean:
    ...     logs: float = 0.0
    ...     n: int = 0
    ...
    ...     def update(self, x: float):
    ...         self.logs += math.log(x)
    ...         self.n += 1
    ...
    ...     def merge(self, other):
    ...         self.logs += other.logs
    ...         self.n += other.n
    ...
    ...     def finish(self) -> float:
    ...         return math.exp(self.logs / self.n)
    >>> flow = si.from_arrow(pa.table({"k": ["a", "a", "b"], "x": [2.0, 8.0, 5.0]}))
    >>> flow.group_by("k").agg(g=GeometricMean(col("x")).round(6)).collect().sort_by("k").to_pydict()
    {'k': ['a', 'b'], 'g': [4.0, 5.0]}
    """
    with ShortTraceback():
        if not isinstance(cls, type):
            raise BadArgument("udaf takes a class", at=here(), found=repr(cls))
        from scalein.udf.classes import compile_udaf

        return Udaf(cls, compile_udaf(cls))


class ProcessClass:
    """The result of `@si.process`. `python` is the original class."""

    def __init__(self, python: type, compile: bool = True, outputs: Mapping[str, object] | None = None) -> None:
        self.python, self._compiles, self._outputs = python, compile, outputs
        self.__doc__ = python.__doc__

    def over(self, schema: Schema, time: str = "", ttl: int = 0) -> ProcessBody:
        """The class over rows of a schema, whose event time is the column `time`; raises `CannotCompile`."""
        from scalein.udf.process_class import compile_process, python_process

        if not self._compiles:
            return python_process(self.python, schema, self._outputs, time, ttl)
        return compile_process(self.python, schema, time, ttl)

    def __repr__(self) -> str:
        return f"<process {self.python.__name__}>"


@overload
def process(cls: type, /) -> ProcessClass: ...
@overload
def process(*, compile: bool = True,
            outputs: Mapping[str, object] | None = None) -> Callable[[type], ProcessClass]: ...
def process(cls: type | None = None, /, *, compile: bool = True,
            outputs: Mapping[str, object] | None = None) -> ProcessClass | Callable[[type], ProcessClass]:
    """A class as a state machine for `group_by(...).process(...)`: see there.

    With `compile=False` it runs as plain Python, row by row: any code, and slow. Its fields have types all the same, as
    they are what is stored. The types of the rows that it yields are found as for a compiled class; where its code
    cannot be compiled, `outputs` says them.

    >>> import pyarrow as pa, scalein as si
    >>> @si.process(compile=False, outputs={"words": int})
    ... class Words:
    ...     n: int = 0
    ...
    ...     def on_row(self, row):
    ...         self.n += len(row.text.split())
    ...         yield {"words": self.n}
    >>> flow = si.from_arrow(pa.table({"k": [1, 1], "text": ["a b", "c"]})).group_by("k").process(Words)
    >>> flow.collect().to_pydict()
    {'k': [1, 1], 'words': [2, 3]}
    """
    if cls is None:
        return functools.partial(ProcessClass, compile=compile, outputs=outputs)
    if not isinstance(cls, type):
        raise BadArgument("process takes a class", at=here(), found=repr(cls))
    return ProcessClass(cls, compile, outputs)


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
