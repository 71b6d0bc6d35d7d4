"""Aggregates of a column, for `group_by(...).agg(...)`: `col("price").sum()`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from scalein.errors import BadArgument, here

if TYPE_CHECKING:
    from scalein.api.column import Column


class Aggregates:
    """The aggregate methods of a Column."""

    __slots__ = ()

    if TYPE_CHECKING:  # Column's own

        def _agg(self, fn: str, *others: object, params: tuple[object, ...] = ()) -> Column: ...

    def count(self) -> Column:
        """The number of values that are not null."""
        return self._agg("count_valid")

    def sum(self) -> Column:
        """The sum of the values; integers come out in 64 bits, and overflow is an error."""
        return self._agg("sum")

    def mean(self) -> Column:
        """The mean of the values, as a float."""
        return self._agg("mean")

    def min(self) -> Column:
        """The least value; NaN is the greatest float."""
        return self._agg("min")

    def max(self) -> Column:
        """The greatest value; NaN is the greatest float."""
        return self._agg("max")

    def var(self) -> Column:
        """The sample variance (ddof 1); null for fewer than two values."""
        return self._agg("var")

    def std(self) -> Column:
        """The sample standard deviation (ddof 1); null for fewer than two values."""
        return self._agg("std")

    def first(self) -> Column:
        """The value of the group's first row, null included."""
        return self._agg("first")

    def last(self) -> Column:
        """The value of the group's last row, null included."""
        return self._agg("last")

    def arg_min(self, by: object) -> Column:
        """The value in the row where `by` (a name or column) is least; the first such row."""
        return self._agg("arg_min", by)

    def arg_max(self, by: object) -> Column:
        """The value in the row where `by` (a name or column) is greatest; the first such row.

        >>> from scalein import col
        >>> col("user").arg_max("price")
        Column(user.arg_max(price))
        """
        return self._agg("arg_max", by)

    def n_unique(self) -> Column:
        """The number of different values; null is none of them."""
        return self._agg("n_unique")

    def quantile(self, q: float) -> Column:
        """The value below which a share `q` of the values lies, interpolated linearly; 0.5 is the median.

        >>> from scalein import col
        >>> col("latency").quantile(0.99)
        Column(latency.quantile(0.99))
        """
        return self._agg("quantile", params=(_share(q, "quantile"),))

    def approx_n_unique(self) -> Column:
        """About how many different values there are (HyperLogLog), in 512 bytes a group.

        Usually within 5 %, rarely off by more than 15 %.
        """
        return self._agg("approx_n_unique")

    def approx_quantile(self, q: float) -> Column:
        """About the `quantile(q)`: of values rounded to 8 significant bits, of which a group keeps each once."""
        return self._agg("approx_quantile", params=(_share(q, "approx_quantile"),))

    def median(self) -> Column:
        """The value in the middle, or the mean of the two that are: `quantile(0.5)`."""
        return self._agg("quantile", params=(0.5,))

    def collect(self) -> Column:
        """The values as a list, in the source's order; nulls are left out."""
        return self._agg("collect")

    def top_k(self, k: int, by: object) -> Column:
        """The values in the `k` rows where `by` is greatest, as a list: the greatest first, ties in the source's order.

        Rows without a value, or without `by`, do not count.

        >>> from scalein import col
        >>> col("user").top_k(3, by="price")
        Column(user.top_k(3, price))
        """
        if isinstance(k, bool) or not isinstance(k, int) or k < 1:
            raise BadArgument("top_k takes a whole number of rows, at least 1", at=here(), found=repr(k))
        return self._agg("top_k", by, params=(k,))


def _share(q: float, fn: str) -> float:
    if isinstance(q, bool) or not isinstance(q, int | float) or not 0 <= q <= 1:
        raise BadArgument(f"{fn} takes a share between 0 and 1", at=here(), found=repr(q),
                          hint="write 0.95 for the 95th percentile")
    return float(q)
