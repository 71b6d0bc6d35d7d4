"""Rows that wait in files: what is being read is not removed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import scalein as si
from scalein import col
from scalein.exec import window_aggregate
from scalein.exec.window_aggregate import WindowedAggregate
from scalein.state.row_buffer import RowBuffer
from tests import oracle
from tests.same import assert_same

BATCHES = [pa.record_batch({"t": [n, n + 40], "v": [n, 1]}) for n in range(0, 60, 2)]


def test_files_stay_while_they_are_read(tmp_path: Path) -> None:
    log = RowBuffer(tmp_path, BATCHES[0].schema, memory=1)
    for batch in BATCHES[:3]:
        log.add(batch)
    waiting = list(log.segments)
    assert all(each.batch is None for each in waiting)
    with log.pinned(waiting):
        log.replace([])
        log.remove_unreferenced(set())
        assert [log.batch(each).equals(batch) for each, batch in zip(waiting, BATCHES, strict=False)] == [True] * 3
    log.remove_unreferenced(set())
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_removes_nothing_that_is_being_combined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if a checkpoint that names none of the files became whole just then."""
    parts, removed = WindowedAggregate._parts, []

    def meanwhile(self: WindowedAggregate, *given: Any) -> Any:
        self.retain([])
        removed.append(True)
        return parts(self, *given)

    monkeypatch.setattr(window_aggregate, "MIN_COMBINED_ROWS", 5)
    monkeypatch.setattr(window_aggregate, "COMBINE_GROWTH", 1)
    monkeypatch.setattr(WindowedAggregate, "_parts", meanwhile)
    flow = si.from_batches(BATCHES, BATCHES[0].schema).with_watermark("t", 50).group_by(
        "v", si.tumbling("t", 10)).agg(n=si.count(), s=col("v").sum())
    out = si.to_memory()
    flow.start(sink=out, memory="1B", workers=1).wait()
    assert len(removed) > 1
    assert_same(out.table(), oracle.collect(flow))
