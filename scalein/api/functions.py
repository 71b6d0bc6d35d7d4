"""Functions of several columns: what is no method of one of them. A str names a column, anything else is a constant."""

from __future__ import annotations

from scalein.api.column import Column, as_expr, col
from scalein.api.hints import with_argument_hints
from scalein.errors import BadArgument, BadName, SourceLoc, here
from scalein.ir.exprs import Agg, Call, Expr
from scalein.ir.functions.registry import REGISTRY


@with_argument_hints
def concat_str(*columns: object, separator: str = "") -> Column:
    """The values of all columns as one text, with a separator between them; null where one of them is.

    What is no text is cast to it. `+` joins texts as well.

    >>> import pyarrow as pa, scalein as si
    >>> flow = si.from_arrow(pa.table({"k": ["a", "b", None], "n": [1, 2, 3]}))
    >>> flow.select(y=si.concat_str("k", "n", separator="/")).collect()["y"].to_pylist()
    ['a/1', 'b/2', None]
    """
    if not isinstance(separator, str):
        raise BadArgument("the separator of concat_str is a text", at=here(), found=repr(separator))
    return _call("concat_str", columns, params=(separator,))


def coalesce(*columns: object) -> Column:
    """The first value that is not null, in the type that all of them share.

    >>> import pyarrow as pa, scalein as si
    >>> flow = si.from_arrow(pa.table({"x": [1, None, None], "y": [5, 6, None]}))
    >>> flow.select(z=si.coalesce("x", "y", 0)).collect()["z"].to_pylist()
    [1, 6, 0]
    """
    return _call("coalesce", columns)


def max_horizontal(*columns: object) -> Column:
    """The greatest of the values in a row, null only where all are; NaN is the greatest float.

    >>> import pyarrow as pa, scalein as si
    >>> flow = si.from_arrow(pa.table({"x": [1, 5, None], "y": [2.5, None, None]}))
    >>> flow.select(z=si.max_horizontal("x", "y")).collect()["z"].to_pylist()
    [2.5, 5.0, None]
    """
    return _call("row_max", columns)


def min_horizontal(*columns: object) -> Column:
    """The least of the values in a row, null only where all are; NaN is the greatest float.

    >>> import pyarrow as pa, scalein as si
    >>> flow = si.from_arrow(pa.table({"x": [1, 5, None], "y": [2.5, None, None]}))
    >>> flow.select(z=si.min_horizontal("x", "y", 3)).collect()["z"].to_pylist()
    [1.0, 3.0, 3.0]
    """
    return _call("row_min", columns)


def struct(*columns: str | Column, **named: object) -> Column:
    """A struct of some values: columns under their own names, then named ones. It is never null, its fields may be.

    >>> import pyarrow as pa, scalein as si
    >>> from scalein import col
    >>> flow = si.from_arrow(pa.table({"x": [1, None]}))
    >>> flow.select(s=si.struct("x", twice=col("x") * 2)).collect()["s"].to_pylist()
    [{'x': 1, 'twice': 2}, {'x': None, 'twice': None}]
    """
    at = here()
    fields: dict[str, object] = {}
    for each in columns:
        column = col(each) if isinstance(each, str) else each
        if not isinstance(column, Column) or column.name is None:
            raise BadName("a field of struct has no name", at=at, found=repr(each), hint="give it as name=...")
        if column.name in fields:
            raise BadName(f"two fields of struct are called {column.name!r}", at=at,
                          hint="name one of them with .alias(...)")
        fields[column.name] = column
    for name, value in named.items():
        if name in fields:
            raise BadName(f"two fields of struct are called {name!r}", at=at)
        fields[name] = value
    if not fields:
        raise BadArgument("struct needs at least one field", at=at, hint="si.struct(x=col('x'), y=col('y') + 1)")
    return Column(Call("make_struct", tuple(_given(value, at) for value in fields.values()), tuple(fields), at=at))


def row_number() -> Column:
    """The number of a row in the order of its partition, from 1 on, for `over`.

    >>> import scalein as si
    >>> flow = si.from_arrow({"shop": ["a", "b", "a"], "price": [3, 2, 1]})
    >>> flow.with_columns(n=si.row_number().over("shop", order_by="price")).collect()["n"].to_pylist()
    [2, 1, 1]
    """
    return Column(Agg("row_number", (), at=here()))


def rank() -> Column:
    """1 and the number of rows before this one in the order of its partition, for `over`; equal rows have one rank.

    >>> import scalein as si
    >>> flow = si.from_arrow({"price": [3, 1, 3, 4]})
    >>> flow.with_columns(n=si.rank().over(order_by="price")).collect()["n"].to_pylist()
    [2, 1, 2, 4]
    """
    return Column(Agg("rank", (), at=here()))


def dense_rank() -> Column:
    """As `rank`, without gaps after equal rows.

    >>> import scalein as si
    >>> flow = si.from_arrow({"price": [3, 1, 3, 4]})
    >>> flow.with_columns(n=si.dense_rank().over(order_by="price")).collect()["n"].to_pylist()
    [2, 1, 2, 3]
    """
    return Column(Agg("dense_rank", (), at=here()))


def _call(fn: str, columns: tuple[object, ...], params: tuple[object, ...] = ()) -> Column:
    """The call of a function over one or more columns, which may also come as one list."""
    at = here()
    if len(columns) == 1 and isinstance(columns[0], list | tuple):
        columns = tuple(columns[0])
    if not columns:
        name = REGISTRY[fn].show.partition("(")[0]
        raise BadArgument(f"{name} needs at least one column", at=at, hint=f'for example si.{name}("x", "y")')
    return Column(Call(fn, tuple(_given(column, at) for column in columns), params, at=at))


def _given(value: object, at: SourceLoc) -> Expr:
    return as_expr(col(value) if isinstance(value, str) else value, at)
