"""`deterministic=True`: floats are equal to the last bit, whatever the number of workers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pytest

import scalein as si
from scalein import Flow, col
from scalein.exec import radix
from scalein.exec.schedule import Schedule, using

ROWS = 20_000
FLOATS = [col("v").sum().alias("s"), col("v").mean().alias("m"), col("v").std().alias("d"),
          si.corr(col("v"), col("t")).alias("c")]  # fmt: skip


class SmallMorsels(Schedule):
    """Cuts few rows as production cuts many: the sizes depend on the number of workers."""

    def morsel_rows(self, proposed: int) -> int:
        return proposed >> 12


def table() -> pa.Table:
    random = np.random.default_rng(7)
    keys = random.integers(0, 50, ROWS)
    return pa.table({"k": keys, "w": [f"key {key}" for key in keys], "t": np.sort(random.integers(0, 1000, ROWS)),
                     "v": random.normal(size=ROWS) * 10.0 ** random.integers(-9, 9, ROWS)})


TABLE = table()


def batch_sum(batch: pa.RecordBatch) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict({"v": [float(np.nansum(batch["v"].to_numpy(zero_copy_only=False)))]})


def bits(table: pa.Table) -> list[pa.Array]:
    """The columns, floats as integers: so -0.0 is not 0.0, and NaN is itself."""
    columns = [column.combine_chunks() for column in table.itercolumns()]
    return [column.view(pa.int64()) if pa.types.is_float64(column.type) else column for column in columns]


FLOWS: dict[str, Callable[[Flow], Flow]] = {
    "no keys": lambda s: s.group_by().agg(*FLOATS),
    "few keys": lambda s: s.group_by("k").agg(*FLOATS),
    "text keys": lambda s: s.filter(col("t") > 3).group_by("w").agg(*FLOATS),
    "many keys": lambda s: s.group_by(many=col("t") * 10**9 + col("k")).agg(*FLOATS),
    "sliding windows": lambda s: s.group_by("k", si.sliding("t", 100, every=50)).agg(*FLOATS),
    "sums of groups": lambda s: s.group_by("w").agg(n=si.count()).group_by().agg(s=(1.0 / col("n")).sum()),
    "sums of batches": lambda s: s.select(v=col("v") * 0.1).map_batches(batch_sum, schema={"v": pa.float64()})
                                  .group_by().agg(s=col("v").sum()),
    "a joined table": lambda s: s.head(500).join(si.from_arrow(TABLE).group_by("k").agg(*FLOATS), on="k"),
}  # fmt: skip


@pytest.mark.parametrize("name", FLOWS)
def test_no_bit_depends_on_the_workers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(radix, "SAMPLE_ROWS", 1000)
    batches = TABLE.to_batches(max_chunksize=9_000)
    nulls = pa.RecordBatch.from_pydict({"k": [1], "w": [None], "t": [999], "v": [None]}, TABLE.schema)
    with using(SmallMorsels()):
        for source in (si.from_arrow(TABLE), si.from_batches(lambda: iter([*batches, nulls]), TABLE.schema)):
            want, flow = bits(FLOWS[name](source).collect(workers=1, deterministic=True)), FLOWS[name](source)
            assert len(want[0])
            flow.collect(workers=3)  # what it retains is not used
            for workers in (2, 3, 5):
                assert bits(flow.collect(workers=workers, deterministic=True)) == want


def test_what_it_takes() -> None:
    with pytest.raises(si.BadArgument, match="deterministic must be True or False"):
        si.from_arrow(TABLE).collect(deterministic=1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"rounds of a job depend on time"):
        si.from_arrow(TABLE).start(sink=si.to_memory(), deterministic=True)  # type: ignore[call-arg]
