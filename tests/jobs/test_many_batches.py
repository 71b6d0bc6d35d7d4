"""A window that stays open while many small batches arrive: they are put together, and nothing is lost."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

import scalein as si
from scalein import col
from scalein.arrow_rows import filtered
from scalein.exec import local_state
from scalein.testing import assert_same


@pytest.mark.parametrize("memory", [None, "10KB"])
@pytest.mark.parametrize("is_sized", [True, False])
def test_batches_are_put_together(is_sized: bool, memory: str | None, tmp_path: Path,
                                  monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_state, "MAX_BATCHES", 5)
    batches = [pa.record_batch({"t": pa.array([n]), "k": pa.array([f"key {n % 3}"]), "x": pa.array([n % 7])})
               for n in range(150)]  # fmt: skip
    grouped = si.from_batches(batches).with_watermark("t", 0).group_by("k", si.tumbling("t", 100))
    flow = grouped.agg(xs=col("x").collect()) if is_sized else grouped.agg(n=si.count(), best=col("x").max())
    rows = si.to_memory()
    job = flow.start(sink=rows, checkpoint=tmp_path, every="1ms", memory=memory, max_rows_per_second=300)
    job.wait()
    assert job.metrics()["epochs"] > 2
    assert_same(rows.table(), flow.collect())


@pytest.mark.parametrize("kind", [pa.string_view(), pa.list_(pa.string_view()), pa.binary_view()])
def test_rows_of_types_that_pyarrow_cannot_filter(kind: pa.DataType) -> None:
    values = [b"a", None, b"c"] if kind == pa.binary_view() else ["a", None, "c"]
    given = [[value] for value in values] if pa.types.is_list(kind) else values
    batch = pa.RecordBatch.from_arrays([pa.array(given, kind)], names=["x"])
    found = filtered(batch, pa.array([True, None, True]))
    assert found.schema == batch.schema
    assert found.to_pydict() == {"x": [given[0], given[2]]}
