"""SumBounds: bounds of the values of each column, so that rows are test-merged only where a sum might overflow.

The absolute value of a column is at most its bound before a merge plus those of all rows; as long as that fits the
type, no merge can overflow, and rows are merged without a test. The same holds for every partial record, and for every
merge of some of them. A bound that only grew would reach the limit of its type after some batches: once half of the
space left is used up, the records themselves are measured, shard by shard, about `MEASURED_PER_ROW` for a merged row.

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
from scalein.state.run_levels import SHARDS
from scalein.storage.checked_json import Json

if TYPE_CHECKING:
    from scalein.kernels.store import Functions


MEASURED_PER_ROW = 2  # records that are measured for each row that is merged

Measure = Callable[[int], tuple[int, list[int]]]  # shard -> the records that were read, and the greatest values


class SumBounds:
    """The greatest absolute value of each value column, for those whose type can overflow."""

    def __init__(self, value: pa.Schema) -> None:
        self._names = value.names
        self._limits = [_limit(field.type) for field in value]
        self._bounds = [0] * len(value)
        self._measured = [0] * len(value)  # the bounds when they were measured last
        self._new: list[int] | None = None  # bounds of the shards that were measured so far; None: none is
        self._shard = 0  # the next one to measure
        self._credit = 0  # records that may be measured now

    @property
    def names(self) -> list[str]:
        """The columns that can overflow."""
        return [name for name, limit in zip(self._names, self._limits, strict=True) if limit is not None]

    def refresh(self, rows: int, measure: Measure) -> None:
        """Measure some records, if a bound has used up half of its space, before `rows` rows are merged."""
        if self._new is None:
            if not any(limit is not None and 2 * (bound - measured) >= limit - measured for bound, measured, limit in
                       zip(self._bounds, self._measured, self._limits, strict=True)):  # fmt: skip
                return
            self._new, self._shard, self._credit = [0] * len(self._bounds), 0, 0
        self._credit += MEASURED_PER_ROW * rows
        while self._credit > 0 and self._shard < SHARDS:
            count, found = measure(self._shard)
            values = iter(found)
            self._new = [bound if limit is None else max(bound, next(values))
                         for bound, limit in zip(self._new, self._limits, strict=True)]
            self._credit -= count
            self._shard += 1
        if self._shard == SHARDS:
            self._bounds = [min(bound, new) for bound, new in zip(self._bounds, self._new, strict=True)]
            self.stop_measuring()

    def stop_measuring(self) -> None:
        """Use the bounds as they are until they have grown again."""
        self._measured, self._new = list(self._bounds), None

    def check(self, batches: list[pa.RecordBatch], functions: Functions, attempt: Callable[[], None]) -> bool:
        """Add rows to the bounds; whether a sum may overflow, in which case `attempt` has merged copies."""
        bounds = list(self._bounds)
        new = None if self._new is None else list(self._new)  # what was measured grows by these rows as well
        for k, (function, limit) in enumerate(zip(functions, self._limits, strict=True)):
            for batch in batches if limit is not None and function else ():
                most = 1 if function == "count" else _max_abs(batch.column(self._names[k]))
                for each in (bounds,) if new is None else (bounds, new):
                    is_added = function in ("count", "sum")
                    each[k] = each[k] + most * batch.num_rows if is_added else max(each[k], most)
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
        self._bounds, self._new = bounds, new
        return may_overflow

    def to_json(self) -> Json:
        return [str(bound) for bound in self._bounds]

    def restore(self, given: Json) -> None:
        if not isinstance(given, list) or len(given) != len(self._bounds):
            raise ValueError(f"bounds of sums: {given!r}")
        self._bounds = [int(str(bound)) for bound in given]
        self._measured = list(self._bounds)


def greatest(columns: list[pa.Array]) -> list[int]:
    """The greatest absolute value of each column."""
    return [_max_abs(column) for column in columns]


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
