"""What a flow is to Spark: a function of a partition's batches or rows, and something to pickle."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from typing import Any

import pyarrow as pa

from scalein.api.hints import Hinted
from scalein.ir import ops


class InSpark(Hinted):
    """The part of a Flow that Spark's workers call."""

    __slots__ = ("op",)
    op: ops.Op

    def map_in_arrow(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """The flow's rows for each partition of a DataFrame: `df.mapInArrow(q.map_in_arrow, scalein.spark.schema(q))`.

        The flow begins with `si.flow(schema)`. What needs other rows (`group_by`, `sort`, `distinct`, `limit`) sees
        those of its partition only: `scalein.spark.apply(q, df)` is the whole flow on the whole DataFrame. Small
        batches are joined, so their number in the result is another one.
        """
        from scalein.spark.batch.tasks import map_in_arrow

        return map_in_arrow(self.op, batches)

    def map_partitions(self, rows: Iterable[Any]) -> Iterator[Any]:
        """The same for `df.rdd.mapPartitions(q.map_partitions)`: Rows, dicts, or tuples in the schema's order.

        Spark's rows are Python objects, each of which is made and read on its own: `map_in_arrow` is far faster.
        """
        from scalein.spark.batch.tasks import map_partitions

        return map_partitions(self.op, rows)

    def __reduce__(self) -> tuple[object, ...]:
        if find_spec("pyspark") is None:
            return type(self), (self.op,)
        from scalein.spark.serialize import rebuilt, ship

        return rebuilt, (type(self), *ship(self.op))
