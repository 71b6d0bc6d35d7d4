"""SumBounds: bounds of the values of each column, so that rows are test-merged only where a sum might overflow.

The absolute value of a column is at most the sum of those of all rows; as long as that fits the type, no merge can
overflow, and rows are merged without a test.

Threads: called under the store's lock.
"""

from __future__ import annotations

from collections.abc import Callable
from decimal import Context
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc

from scalein.arrow_rows import as_numpy
from scalein.errors import ComputeError, here
from scalein.storage.checked_json import Json

if TYPE_CHECKING:
    from scalein.kernels.store import Functions


class SumBounds:
    """The greatest absolute value of each value column; None for types that cannot overflow."""

    def __init__(self, value: pa.Schema) -> None:
        self._names = value.names
        self._limits = [_limit(field.type) for field in value]
        self._bounds = [0] * len(value)

    def check(self, batches: list[pa.RecordBatch], functions: Functions, attempt: Callable[[], None]) -> bool:
        """Add rows to the bounds; whether a sum may overflow, in which case `attempt` has merged copies."""
        bounds = list(self._bounds)
        for k, (function, limit) in enumerate(zip(functions, self._limits, strict=True)):
            for batch in batches if limit is not None and function else ():
                if function == "count":
                    bounds[k] += batch.num_rows
                else:
                    most = _max_abs(batch.column(self._names[k]))
                    bounds[k] = bounds[k] + most * batch.num_rows if function == "sum" else max(bounds[k], most)
        may_overflow = any(limit is not None and bound > limit
                           for bound, limit in zip(bounds, self._limits, strict=True))
        if may_overflow:
            try:
                attempt()
            except ComputeError as error:
                raise ComputeError(error.what, at=here(), hint="none of the rows was merged; a wider column type, or "
                                   "decimals, would hold the sum") from error
            bounds = [bound if limit is None else min(bound, limit)
                      for bound, limit in zip(bounds, self._limits, strict=True)]
        self._bounds = bounds
        return may_overflow

    def to_json(self) -> Json:
        return [str(bound) for bound in self._bounds]

    def restore(self, given: Json) -> None:
        if not isinstance(given, list) or len(given) != len(self._bounds):
            raise ValueError(f"bounds of sums: {given!r}")
        self._bounds = [int(str(bound)) for bound in given]


def _limit(kind: pa.DataType) -> int | None:
    if pa.types.is_integer(kind):
        signed = pa.types.is_signed_integer(kind)
        return int((1 << kind.bit_width - signed) - 1)
    if pa.types.is_duration(kind):
        return (1 << 63) - 1
    if pa.types.is_decimal(kind):
        return int(10**kind.precision) - 1
    return None


def _max_abs(column: pa.Array) -> int:
    if pa.types.is_duration(column.type):
        column = column.cast(pa.int64())
    if pa.types.is_integer(column.type) and not column.null_count:  # numpy is five times as fast for few rows
        values = as_numpy(column)
        return max(abs(int(values.min())), abs(int(values.max()))) if len(values) else 0
    found = pc.min_max(column).as_py()
    if found["min"] is None:
        return 0
    if pa.types.is_decimal(column.type):
        scale = column.type.scale
        exact = Context(prec=100)
        return max(abs(int(found[end].scaleb(scale, exact))) for end in ("min", "max"))
    return int(max(abs(found["min"]), abs(found["max"])))
