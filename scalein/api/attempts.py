"""Functions that give null where their plain forms fail: `col("x").try_cast(int)`.

Only the named call is tried. What fails among its arguments is still an error, unless it is tried as well.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from scalein.api.column import Column


class Attempts:
    """The `try_` methods of a Column."""

    __slots__ = ()

    if TYPE_CHECKING:  # both are Column's own

        def _call(self, fn: str, *others: object, params: tuple[object, ...] = ()) -> Column: ...

        def _tried(self, fn: str, *others: object, dtype: object = None) -> Column: ...

    def try_cast(self, dtype: object) -> Column:
        """As `cast`, but null where the value has no place in the type.

        >>> import pyarrow as pa, scalein as si
        >>> from scalein import col
        >>> si.from_arrow(pa.table({"x": ["7", "seven"]})).select(n=col("x").try_cast(int)).collect()["n"].to_pylist()
        [7, None]
        """
        return self._tried("cast", dtype=dtype)

    def try_add(self, other: object) -> Column:
        """`+`, but null where it overflows."""
        return self._tried("add", other)

    def try_sub(self, other: object) -> Column:
        """`-`, but null where it overflows."""
        return self._tried("sub", other)

    def try_mul(self, other: object) -> Column:
        """`*`, but null where it overflows.

        >>> from scalein import col
        >>> col("price").try_mul(col("count"))
        Column(price.try_mul(count))
        """
        return self._tried("mul", other)

    def try_floordiv(self, other: object) -> Column:
        """`//`, but null where an integer is divided by zero, or the quotient overflows."""
        return self._tried("floordiv", other)

    def try_mod(self, other: object) -> Column:
        """`%`, but null where an integer is divided by zero."""
        return self._tried("mod", other)

    def try_divide(self, other: object) -> Column:
        """`/`, but null where the divisor is zero.

        >>> import pyarrow as pa, scalein as si
        >>> from scalein import col
        >>> flow = si.from_arrow(pa.table({"x": [1, 1], "y": [4, 0]}))
        >>> flow.select(q=col("x").try_divide(col("y"))).collect()["q"].to_pylist()
        [0.25, None]
        """
        return self._call("try_divide", other)
