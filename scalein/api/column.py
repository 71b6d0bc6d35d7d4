"""Column: what `col("x") > 1` gives. It wraps an expression without types; a flow types it when it meets one.

A Column is immutable, and nothing is computed until a flow runs. Strings are text in comparisons and column names
where a column is asked for, as in Polars; where both could be meant, they are refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NoReturn

from scalein.api import hints
from scalein.api.hints import ForeignNames
from scalein.api.methods import Aggregates, DtMethods, ListMethods, StrMethods, StructMethods
from scalein.errors import BadArgument, SourceLoc, here
from scalein.ir.exprs import Agg, AggregateResult, Call, Col, Expr, Lit, OverResult, args_of, walk
from scalein.ir.functions.registry import REGISTRY
from scalein.ir.literals import as_dtype, fit, hint_for_object, literal, own_type
from scalein.ir.printer import show_agg, show_expr
from scalein.ir.resolve import nested_aggregate


class Column(Aggregates):
    """An expression over columns, or an aggregate of one; made by `col`, `lit`, `when` and `count`.

    >>> from scalein import col
    >>> (col("price") * 0.8 - 1).alias("net")
    Column(price * 0.8 - 1, alias='net')
    """

    __slots__ = ("_alias", "_node")
    _called, _elsewhere = "a Column", hints.COLUMN
    __hash__ = None  # type: ignore[assignment]  # == gives a Column, so a Column cannot be a key

    def __init__(self, node: Expr | Agg, alias: str | None = None) -> None:
        self._node = node
        self._alias = alias

    @property
    def node(self) -> Expr | Agg:
        """The expression or aggregate inside, for flows."""
        return self._node

    @property
    def name(self) -> str | None:
        """The alias, else the name of the first column in it, else None."""
        if self._alias is not None:
            return self._alias
        return _first_column(self._node)

    def __repr__(self) -> str:
        text = show_agg(self._node) if isinstance(self._node, Agg) else show_expr(self._node)
        return f"Column({text})" if self._alias is None else f"Column({text}, alias={self._alias!r})"

    def alias(self, name: str) -> Column:
        """The same column under another name.

        >>> from scalein import col
        >>> col("price").sum().alias("total").name
        'total'
        """
        if not isinstance(name, str) or not name:
            raise BadArgument("alias takes a name", at=here(), found=repr(name))
        return Column(self._node, name)

    # --- operators ---

    def _expr(self) -> Expr:
        """The expression, or the column that an aggregate becomes in `agg`."""
        return AggregateResult(show_agg(self._node), agg=self._node) if isinstance(self._node, Agg) else self._node

    def _call(self, fn: str, *others: object, params: tuple[object, ...] = (), dtype: object = None,
              tried: bool = False) -> Column:
        at = here()
        args = (self._expr(), *(as_expr(other, at) for other in others))
        call = Call(fn, args, params, None if dtype is None else as_dtype(dtype, at), at=at)
        return Column(Call("try", (call,), at=at) if tried else call)

    def _swapped(self, fn: str, other: object) -> Column:
        at = here()
        return Column(Call(fn, (as_expr(other, at), self._expr()), at=at))

    def _agg(self, fn: str, *others: object, params: tuple[object, ...] = ()) -> Column:
        return aggregate_of(fn, [self, *(as_column(other, fn) for other in others)], params, here())

    def _filtered(self, conditions: tuple[object, ...]) -> Column:
        at, agg = here(), self._node
        if not isinstance(agg, Agg):
            whole = "an expression of aggregates" if _has_aggregate(agg) else "a column"
            raise BadArgument(f"filter belongs to an aggregate, but this is {whole}", at=at, found=repr(self),
                              hint='write col("x").sum().filter(...); flow.filter(...) drops rows of a flow')
        if not conditions:
            raise BadArgument("filter needs a condition", at=at, hint='for example col("x") > 1')
        where = agg.where
        for each in conditions:
            condition = as_column(each, "filter")._expr()
            where = condition if where is None else Call("and", (where, condition), at=at)
        return Column(replace(agg, where=where), self._alias)

    def _over(self, keys: tuple[object, ...], order_by: object, descending: object, rows: object,
              within: object) -> Column:
        from scalein.api.over import over  # few flows have one

        return over(self, keys, order_by, descending, rows, within, here())

    def __add__(self, other: object) -> Column:
        return self._call("add", other)

    def __radd__(self, other: object) -> Column:
        return self._swapped("add", other)

    def __sub__(self, other: object) -> Column:
        return self._call("sub", other)

    def __rsub__(self, other: object) -> Column:
        return self._swapped("sub", other)

    def __mul__(self, other: object) -> Column:
        return self._call("mul", other)

    def __rmul__(self, other: object) -> Column:
        return self._swapped("mul", other)

    def __truediv__(self, other: object) -> Column:
        return self._call("div", other)

    def __rtruediv__(self, other: object) -> Column:
        return self._swapped("div", other)

    def __floordiv__(self, other: object) -> Column:
        return self._call("floordiv", other)

    def __rfloordiv__(self, other: object) -> Column:
        return self._swapped("floordiv", other)

    def __mod__(self, other: object) -> Column:
        return self._call("mod", other)

    def __rmod__(self, other: object) -> Column:
        return self._swapped("mod", other)

    def __pow__(self, other: object) -> Column:
        return self._call("pow", other)

    def __rpow__(self, other: object) -> Column:
        return self._swapped("pow", other)

    def __neg__(self) -> Column:
        return self._call("neg")

    def __abs__(self) -> Column:
        return self._call("abs")

    def __round__(self, digits: int = 0) -> Column:
        return self.round(digits)

    def __floor__(self) -> Column:
        return self.floor()

    def __ceil__(self) -> Column:
        return self.ceil()

    def __and__(self, other: object) -> Column:
        return self._call("and", other)

    def __rand__(self, other: object) -> Column:
        return self._swapped("and", other)

    def __or__(self, other: object) -> Column:
        return self._call("or", other)

    def __ror__(self, other: object) -> Column:
        return self._swapped("or", other)

    def __invert__(self) -> Column:
        return self._call("not")

    def __eq__(self, other: object) -> Column:  # type: ignore[override]
        return self._compare("eq", "==", other)

    def __ne__(self, other: object) -> Column:  # type: ignore[override]
        return self._compare("ne", "!=", other)

    def __lt__(self, other: object) -> Column:
        return self._compare("lt", "<", other)

    def __le__(self, other: object) -> Column:
        return self._compare("le", "<=", other)

    def __gt__(self, other: object) -> Column:
        return self._compare("gt", ">", other)

    def __ge__(self, other: object) -> Column:
        return self._compare("ge", ">=", other)

    def _compare(self, fn: str, sign: str, other: object) -> Column:
        if other is None:
            raise BadArgument(f"{sign} None is null for every row", at=here(),
                              hint="write .is_null() or .is_not_null()")
        return self._call(fn, other)

    def __bool__(self) -> NoReturn:
        raise BadArgument("a column is neither true nor false by itself", at=here(), found=repr(self),
                          hint=_how_to_decide(self._node))

    def __iter__(self) -> NoReturn:
        raise BadArgument("a column cannot be looped over", at=here(), found=repr(self),
                          hint="for sum(), max() and the like use .sum() and .max() in agg; "
                          "to loop over rows, run the flow with collect()")

    def __contains__(self, value: object) -> NoReturn:
        raise BadArgument("`in` does not look into a column", at=here(), found=repr(self),
                          hint="use .is_in([...]) for rows, .str.contains(...) for text")

    def __len__(self) -> NoReturn:
        raise BadArgument("a column has no length by itself", at=here(), found=repr(self),
                          hint="use si.count() in agg for rows, .str.len() for text, .list.len() for lists")

    def __getitem__(self, item: object) -> NoReturn:
        hint = f"use .struct.field({item!r})" if isinstance(item, str) else (
            ".list.get(i) gives an element, .str.slice(i, 1) a character; flow.limit(n) takes rows")
        raise BadArgument("a column has no items", at=here(), found=f"{self!r}[{item!r}]", hint=hint)

    def __float__(self) -> NoReturn:
        raise BadArgument("a column is not one number", at=here(), found=repr(self),
                          hint="functions of math take one number; a column has .sqrt(), .exp(), .log(), .pow(y), "
                          ".floor(), .ceil() and .abs(), and .cast(float)")

    def __int__(self) -> NoReturn:
        raise BadArgument("a column is not one number", at=here(), found=repr(self), hint="use .cast(int)")

    __index__ = __int__

    # --- numpy ---

    def __array_ufunc__(self, ufunc: object, method: str, *inputs: object, **options: object) -> Column:
        """`np.log(col("x"))`, and what a numpy scalar asks for in `np.int64(1) + col("x")`."""
        at, name = here(), str(getattr(ufunc, "__name__", ufunc))
        fn = next((fn for fn, function in REGISTRY.items() if name in function.numpy), None)
        if fn is None or method != "__call__" or options:
            raise BadArgument(f"np.{name} does not take a column", at=at, hint=hints.NUMPY.get(name, hints.NO_NUMPY))
        return Column(Call(fn, tuple(as_expr(each, at) for each in inputs), at=at))

    def __array_function__(self, function: object, *given: object) -> NoReturn:
        name = str(getattr(function, "__name__", function))
        raise BadArgument(f"np.{name} does not take a column", at=here(),
                          hint=hints.NUMPY.get(name, hints.NO_NUMPY))

    # --- functions ---

    def cast(self, dtype: object) -> Column:
        """The values as another type: an Arrow type, its name, or int, float, str, bool.

        A value that the type cannot hold is an error in live rows; float to int truncates.

        >>> from scalein import col
        >>> col("price").cast("int32")
        Column(price.cast(i32))
        """
        return self._call("cast", dtype=dtype)

    def is_null(self) -> Column:
        """True where the value is missing; never null itself.

        >>> import pyarrow as pa, scalein as si
        >>> from scalein import col
        >>> flow = si.from_arrow(pa.table({"x": [1, None]}))
        >>> flow.select(y=col("x").is_null()).collect()["y"].to_pylist()
        [False, True]
        """
        return self._call("is_null")

    def is_not_null(self) -> Column:
        """True where there is a value; never null itself.

        >>> import pyarrow as pa, scalein as si
        >>> from scalein import col
        >>> flow = si.from_arrow(pa.table({"x": [1, None]}))
        >>> flow.select(y=col("x").is_not_null()).collect()["y"].to_pylist()
        [True, False]
        """
        return self._call("is_not_null")

    def is_nan(self) -> Column:
        """True where a float is NaN; null stays null.

        >>> import pyarrow as pa, scalein as si
        >>> from scalein import col
        >>> flow = si.from_arrow(pa.table({"x": [1.0, float("nan"), None]}))
        >>> flow.select(y=col("x").is_nan()).collect()["y"].to_pylist()
        [False, True, None]
        """
        return self._call("is_nan")

    def fill_null(self, value: object) -> Column:
        """The value, or `value` (a constant or column) where it is missing.

        >>> import pyarrow as pa, scalein as si
        >>> from scalein import col
        >>> flow = si.from_arrow(pa.table({"x": [1, None]}))
        >>> flow.select(y=col("x").fill_null(0)).collect()["y"].to_pylist()
        [1, 0]
        """
        return self._call("fill_null", value)

    def is_in(self, values: Iterable[object]) -> Column:
        """True where the value is one of `values`; as in SQL, null where a null could be the match.

        >>> from scalein import col
        >>> col("kind").is_in(["view", "click"])
        Column(kind.is_in(['view', 'click']))
        """
        at = here()
        is_table = hasattr(values, "columns")
        if isinstance(values, str | bytes | dict | Column) or not (is_table or isinstance(values, Iterable)):
            raise BadArgument("is_in takes a list of constants", at=at, found=repr(values), hint="is_in([1, 2, 3])")
        if is_table:
            raise BadArgument("is_in takes a list of constants, not a table or a flow", at=at,
                              found=type(values).__name__,
                              hint='flow.join(other, left_on="x", right_on="y", how="semi") has the rows with a match')
        listed = [literal(value, at) for value in values]
        plain = tuple(item if item.dtype else item.value for item in listed if item.value is not None)
        return self._call("is_in", params=(plain, len(plain) < len(listed)))

    def between(self, low: object, high: object) -> Column:
        """True where low <= value <= high, both ends included.

        >>> import pyarrow as pa, scalein as si
        >>> from scalein import col
        >>> flow = si.from_arrow(pa.table({"x": [1, 2, 5, None]}))
        >>> flow.select(y=col("x").between(2, 5)).collect()["y"].to_pylist()
        [False, True, True, None]
        """
        return self._call("between", low, high)

    def clip(self, low: object = None, high: object = None) -> Column:
        """The value, `low` where it is less, `high` where it is greater; a null bound does not limit.

        >>> import pyarrow as pa, scalein as si
        >>> from scalein import col
        >>> flow = si.from_arrow(pa.table({"x": [1, 2, 5, None]}))
        >>> flow.select(y=col("x").clip(2, 4)).collect()["y"].to_pylist()
        [2, 2, 4, None]
        """
        return self._call("clip", low, high)

    def abs(self) -> Column:
        """The value without its sign.

        >>> import pyarrow as pa, scalein as si
        >>> from scalein import col
        >>> flow = si.from_arrow(pa.table({"x": [1, -2, None]}))
        >>> flow.select(y=col("x").abs()).collect()["y"].to_pylist()
        [1, 2, None]
        """
        return self._call("abs")

    def round(self, digits: int = 0) -> Column:
        """The value rounded to this number of decimals, halves away from zero; integers stay as they are.

        >>> import pyarrow as pa, scalein as si
        >>> from scalein import col
        >>> flow = si.from_arrow(pa.table({"x": [1.25, -2.5, None]}))
        >>> flow.select(y=col("x").round(1)).collect()["y"].to_pylist()
        [1.3, -2.5, None]
        """
        if isinstance(digits, bool) or not isinstance(digits, int) or not -15 <= digits <= 15:
            raise BadArgument("round takes a number of digits from -15 to 15", at=here(), found=repr(digits))
        return self._call("round", params=(digits,))

    def floor(self) -> Column:
        """The greatest whole number that is not above the value, as a float.

        >>> import pyarrow as pa, scalein as si
        >>> from scalein import col
        >>> flow = si.from_arrow(pa.table({"x": [1.5, -1.5, None]}))
        >>> flow.select(y=col("x").floor()).collect()["y"].to_pylist()
        [1.0, -2.0, None]
        """
        return self._call("floor")

    def ceil(self) -> Column:
        """The least whole number that is not below the value, as a float.

        >>> import pyarrow as pa, scalein as si
        >>> from scalein import col
        >>> flow = si.from_arrow(pa.table({"x": [1.5, -1.5, None]}))
        >>> flow.select(y=col("x").ceil()).collect()["y"].to_pylist()
        [2.0, -1.0, None]
        """
        return self._call("ceil")

    def sqrt(self) -> Column:
        """The square root; NaN of a negative number.

        >>> import pyarrow as pa, scalein as si
        >>> from scalein import col
        >>> flow = si.from_arrow(pa.table({"x": [9.0, -1.0, None]}))
        >>> flow.select(y=col("x").sqrt()).collect()["y"].to_pylist()
        [3.0, nan, None]
        """
        return self._call("sqrt")

    def exp(self) -> Column:
        """e to the power of the value.

        >>> import pyarrow as pa, scalein as si
        >>> from scalein import col
        >>> flow = si.from_arrow(pa.table({"x": [0.0, None]}))
        >>> flow.select(y=col("x").exp()).collect()["y"].to_pylist()
        [1.0, None]
        """
        return self._call("exp")

    def log(self) -> Column:
        """The natural logarithm; -inf of zero, NaN of a negative number.

        >>> import pyarrow as pa, scalein as si
        >>> from scalein import col
        >>> flow = si.from_arrow(pa.table({"x": [1.0, 0.0, None]}))
        >>> flow.select(y=col("x").log()).collect()["y"].to_pylist()
        [0.0, -inf, None]
        """
        return self._call("log")

    def pow(self, exponent: object) -> Column:
        """The value to the power of `exponent`, as a float; the same as `**`.

        >>> import pyarrow as pa, scalein as si
        >>> from scalein import col
        >>> flow = si.from_arrow(pa.table({"x": [3.0, None]}))
        >>> flow.select(y=col("x").pow(2)).collect()["y"].to_pylist()
        [9.0, None]
        """
        return self._call("pow", exponent)

    def hash(self) -> Column:
        """64 bits that are the same for equal values, today and for ever. Null has a hash too.

        It is Spark's `xxhash64`, except for decimals of more than 18 digits. For the bytes that are hashed see
        `scalein.ir.functions.hashing`.

        >>> import pyarrow as pa, scalein as si
        >>> from scalein import col
        >>> si.from_arrow(pa.table({"x": ["Spark", None]})).select(h=col("x").hash()).collect()["h"].to_pylist()
        [-4294468057691064905, 42]
        """
        return self._call("hash")

    @property
    def str(self) -> StrMethods:
        """Functions of text: `col("url").str.starts_with("https")`.

        >>> import scalein as si
        >>> si.from_arrow({"s": ["Ab"]}).select(low=si.col("s").str.lower()).collect().to_pydict()
        {'low': ['ab']}
        """
        return StrMethods(self)

    @property
    def dt(self) -> DtMethods:
        """Functions of times: `col("at").dt.hour()`.

        >>> import datetime as dt, scalein as si
        >>> flow = si.from_arrow({"at": [dt.datetime(2024, 5, 1, 13, 30)]})
        >>> flow.select(hour=si.col("at").dt.hour()).collect().to_pydict()
        {'hour': [13]}
        """
        return DtMethods(self)

    @property
    def list(self) -> ListMethods:
        """Functions of lists: `col("tags").list.len()`.

        >>> import scalein as si
        >>> si.from_arrow({"tags": [["a", "b"], []]}).select(n=si.col("tags").list.len()).collect().to_pydict()
        {'n': [2, 0]}
        """
        return ListMethods(self)

    @property
    def struct(self) -> StructMethods:
        """Functions of structs: `col("address").struct.field("city")`.

        >>> import scalein as si
        >>> flow = si.from_arrow({"address": [{"city": "Rome"}, None]})
        >>> flow.select(city=si.col("address").struct.field("city")).collect().to_pydict()
        {'city': ['Rome', None]}
        """
        return StructMethods(self)

    # --- null where the plain form fails; what fails among the arguments is still an error ---

    def try_cast(self, dtype: object) -> Column:
        """As `cast`, but null where the value has no place in the type.

        >>> import pyarrow as pa, scalein as si
        >>> from scalein import col
        >>> si.from_arrow(pa.table({"x": ["7", "seven"]})).select(n=col("x").try_cast(int)).collect()["n"].to_pylist()
        [7, None]
        """
        return self._call("cast", dtype=dtype, tried=True)

    def try_add(self, other: object) -> Column:
        """`+`, but null where it overflows.

        >>> import pyarrow as pa, scalein as si
        >>> from scalein import col
        >>> flow = si.from_arrow(pa.table({"x": [1, 2**63 - 1]}))
        >>> flow.select(y=col("x").try_add(1)).collect()["y"].to_pylist()
        [2, None]
        """
        return self._call("add", other, tried=True)

    def try_sub(self, other: object) -> Column:
        """`-`, but null where it overflows.

        >>> import pyarrow as pa, scalein as si
        >>> from scalein import col
        >>> flow = si.from_arrow(pa.table({"x": [1, -(2**63)]}))
        >>> flow.select(y=col("x").try_sub(1)).collect()["y"].to_pylist()
        [0, None]
        """
        return self._call("sub", other, tried=True)

    def try_mul(self, other: object) -> Column:
        """`*`, but null where it overflows.

        >>> from scalein import col
        >>> col("price").try_mul(col("count"))
        Column(price.try_mul(count))
        """
        return self._call("mul", other, tried=True)

    def try_floordiv(self, other: object) -> Column:
        """`//`, but null where an integer is divided by zero, or the quotient overflows.

        >>> import pyarrow as pa, scalein as si
        >>> from scalein import col, lit
        >>> flow = si.from_arrow(pa.table({"x": [7, 0]}))
        >>> flow.select(y=lit(20).try_floordiv(col("x"))).collect()["y"].to_pylist()
        [2, None]
        """
        return self._call("floordiv", other, tried=True)

    def try_mod(self, other: object) -> Column:
        """`%`, but null where an integer is divided by zero.

        >>> import pyarrow as pa, scalein as si
        >>> from scalein import col, lit
        >>> flow = si.from_arrow(pa.table({"x": [7, 0]}))
        >>> flow.select(y=lit(20).try_mod(col("x"))).collect()["y"].to_pylist()
        [6, None]
        """
        return self._call("mod", other, tried=True)

    def try_divide(self, other: object) -> Column:
        """`/`, but null where the divisor is zero.

        >>> import pyarrow as pa, scalein as si
        >>> from scalein import col
        >>> flow = si.from_arrow(pa.table({"x": [1, 1], "y": [4, 0]}))
        >>> flow.select(q=col("x").try_divide(col("y"))).collect()["q"].to_pylist()
        [0.25, None]
        """
        return self._call("try_divide", other)


def _first_column(node: Expr | Agg) -> str | None:
    """The name of the leftmost column, or of an aggregate without one; a choice is named after what it chooses."""
    waiting = [node]
    while waiting:
        node = waiting.pop()
        match node:
            case AggregateResult(agg=agg) | OverResult(agg=agg):
                waiting.append(agg)
            case Agg(fn, args):
                if not args:
                    return fn
                waiting += reversed(args)
            case Col(name):
                return name
            case Call("if_else", (_, *values)):
                waiting += reversed(values)
            case _:
                waiting += reversed(args_of(node))
    return None


def _has_aggregate(expr: Expr) -> bool:
    return any(isinstance(node, AggregateResult) for node in walk(expr))


def _how_to_decide(node: Expr | Agg) -> str:
    """A hint for a column that Python asked for its truth; & and | inside of a comparison lack parentheses."""
    match node:
        case Call("eq" | "ne" | "lt" | "le" | "gt" | "ge", (*_, Call("and" | "or"))):
            return "comparisons need parentheses beside & and |: (a > 1) & (b < 2)"
        case Call("lt" | "gt"):
            return ("use & for and, | for or, ~ for not, .is_in for in, .between for a < x < b, "
                    "and si.max_horizontal and si.min_horizontal for max and min")
        case _:
            return "use & for and, | for or, ~ for not, .is_in for in, and .between for a < x < b"


def as_expr(value: object, at: SourceLoc) -> Expr:
    """A column's expression, or the constant that `value` is."""
    return value._expr() if isinstance(value, Column) else literal(value, at)


def as_column(value: object, step: str) -> Column:
    """A column given as such or by name."""
    if isinstance(value, Column):
        return value
    if isinstance(value, str):
        return col(value)
    raise BadArgument(f"{step} takes columns and their names", at=here(), found=repr(value),
                      hint=hint_for_object(value) or "a constant is written lit(...)")


@hints.with_argument_hints
def col(name: str) -> Column:
    """The column of this name, in whatever flow the expression is used.

    >>> from scalein import col
    >>> (col("price") > 10) & col("user").is_not_null()
    Column((price > 10) & user.is_not_null())
    """
    if not isinstance(name, str) or not name:
        raise BadArgument("col takes a column's name", at=here(), found=repr(name))
    return Column(Col(name))


def lit(value: object, dtype: object = None) -> Column:
    """A constant; it takes the type of what it meets, unless `dtype` is given.

    >>> from scalein import lit
    >>> lit("view")
    Column('view')
    """
    at = here()
    constant = literal(value, at)
    if dtype is None or constant.dtype is not None:
        return Column(constant)
    target = as_dtype(dtype, at)
    fitted = fit(value, target)
    if fitted is None:
        raise BadArgument(f"the constant does not fit {target!r}", at=at, found=f"{value!r}, {own_type(value)!r}",
                          hint="leave the type away, or write lit(...).cast(...)")
    return Column(fitted)


@hints.with_argument_hints
def count() -> Column:
    """The number of rows, for `agg`; its name is "count" unless it gets another.

    >>> from scalein import count
    >>> count().alias("views")
    Column(count(), alias='views')
    """
    return Column(Agg("count", (), at=here()))


def cov(x: Column | str, y: Column | str) -> Column:
    """The sample covariance (ddof 1) of two columns, for `agg`; null for fewer than two rows.

    A row counts if neither is null.

    >>> import pyarrow as pa, scalein as si
    >>> flow = si.from_arrow(pa.table({"x": [1.0, 2.0, 3.0, None], "y": [2.0, 4.0, 6.0, 8.0]}))
    >>> flow.group_by().agg(c=si.cov("x", "y")).collect()["c"].to_pylist()
    [2.0]
    """
    return as_column(x, "cov")._agg("cov", y)


def aggregate_of(fn: str, columns: Sequence[Column], params: tuple[object, ...], at: SourceLoc) -> Column:
    """An aggregate over columns, which are no aggregates themselves."""
    args = tuple(column._expr() for column in columns)
    nested = next((arg for arg in args if isinstance(arg, AggregateResult)), None)
    if nested is not None:
        raise nested_aggregate(nested, at)
    return Column(Agg(fn, args, params=params, at=at))


def corr(x: Column | str, y: Column | str) -> Column:
    """The correlation (Pearson's) of two columns, for `agg`; null for fewer than two rows, NaN if either is constant.

    A row counts if neither is null.

    >>> import pyarrow as pa, scalein as si
    >>> flow = si.from_arrow(pa.table({"x": [1.0, 2.0, 3.0], "y": [6.0, 4.0, 2.0]}))
    >>> flow.group_by().agg(c=si.corr("x", "y").round(6)).collect()["c"].to_pylist()
    [-1.0]
    """
    return as_column(x, "corr")._agg("corr", y)


# Choices between values: `when(condition).then(value)`, more of these, and `otherwise(value)`.

class When(ForeignNames):
    """A condition that waits for its value: `when(...).then(...)`."""

    __slots__ = ("_branches",)
    _called, _elsewhere = "when(...) without then(...)", hints.WHEN

    def __init__(self, branches: tuple[Expr, ...]) -> None:
        self._branches = branches

    def __repr__(self) -> str:
        return f"when({show_expr(self._branches[-1])})"

    def then(self, value: object) -> Then:
        """The value where the condition is true and none before it was.

        >>> import scalein as si
        >>> si.from_arrow({"x": [20, 5]}).select(y=si.when(si.col("x") > 9).then(si.lit("big"))).collect().to_pydict()
        {'y': ['big', None]}
        """
        return Then((*self._branches, _choice(value, "then")))


class Then(Column):
    """A choice that is null where no condition is true, unless `otherwise` follows."""

    __slots__ = ("_at", "_branches", "_whole")

    def __init__(self, branches: tuple[Expr, ...]) -> None:
        self._branches, self._at, self._alias = branches, here(), None
        self._whole: Expr | None = None

    @property
    def _node(self) -> Expr:  # type: ignore[override]
        """Nested when it is asked for: of a long choice, each step would nest all those before it."""
        if self._whole is None:
            self._whole = _nested(self._branches, Lit(None), self._at)
        return self._whole

    def when(self, condition: object) -> When:
        """Another condition, looked at where those before are not true.

        >>> import scalein as si
        >>> found = si.when(si.col("x") > 9).then(si.lit("big")).when(si.col("x") > 3).then(si.lit("some"))
        >>> si.from_arrow({"x": [20, 5, 1]}).select(y=found).collect().to_pydict()
        {'y': ['big', 'some', None]}
        """
        return When((*self._branches, _choice(condition, "when")))

    def otherwise(self, value: object) -> Column:
        """The value where no condition is true.

        >>> import scalein as si
        >>> big = si.when(si.col("x") > 9).then(si.lit("big"))
        >>> size = big.when(si.col("x") > 3).then(si.lit("some")).otherwise(si.lit("few"))
        >>> si.from_arrow({"x": [20, 5, 1]}).select(size=size).collect().to_pydict()
        {'size': ['big', 'some', 'few']}
        """
        return Column(_nested(self._branches, _choice(value, "otherwise"), here()))


@hints.with_argument_hints
def when(condition: object) -> When:
    """The start of a choice; only the branch that is taken can fail.

    >>> from scalein import col, lit, when
    >>> when(col("price") > 12).then(lit("high")).otherwise(lit("low"))
    Column(when(price > 12).then('high').otherwise('low'))
    """
    return When((_choice(condition, "when"),))


def _choice(value: object, step: str) -> Expr:
    at = here()
    if isinstance(value, str):
        raise BadArgument(f"{step} takes a str neither as a column nor as text", at=at, found=repr(value),
                          hint=f"write lit({value!r}) for the text, col({value!r}) for the column")
    return as_expr(value, at)


def _nested(branches: tuple[Expr, ...], last: Expr, at: SourceLoc) -> Expr:
    """Conditions and values in turn, as if_else calls from the last to the first."""
    for condition, value in zip(reversed(branches[::2]), reversed(branches[1::2]), strict=True):
        last = Call("if_else", (condition, value, last), at=at)
    return last
