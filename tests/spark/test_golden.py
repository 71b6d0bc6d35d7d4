"""Streams that earlier versions left are continued by this one, with another number of partitions."""

from __future__ import annotations

import shutil
from pathlib import Path

import pyarrow as pa
import pytest

import scalein as si
from scalein.spark.streaming.read_state import read_state
from tests.same import assert_same
from tests.spark import golden
from tests.spark.simulated import fold_changes, rows_of, run, start_stream


def all_rows(batches: list[list[pa.Table]]) -> pa.Table:
    return pa.concat_tables([part for parts in batches for part in parts])


@pytest.mark.parametrize("name", golden.FLOWS)
def test_earlier_state_is_read_and_continued(name: str, tmp_path: Path) -> None:
    flow, emit = golden.flow_of(name), golden.FLOWS[name][1]
    before = golden.BATCHES[: golden.BEFORE]
    shutil.copytree(golden.FOLDER / name, tmp_path / "checkpoint")
    if name != "windows":
        assert_same(read_state(tmp_path / "checkpoint"), flow.collect(all_rows(before)), tolerance=1e-9)
    sink = si.to_memory()
    coordinator = start_stream(flow, tmp_path / "checkpoint", sink, emit=emit, partitions=3)
    try:
        run(coordinator, golden.BATCHES[golden.BEFORE :], first=golden.BEFORE)
    finally:
        coordinator.close()
    got = pa.concat_tables([rows_of(flow, before, tmp_path / "before", emit=emit), sink.table()])
    if name == "windows":  # which of them close depends on the batches
        want = rows_of(flow, golden.BATCHES, tmp_path / "whole", emit=emit)
    else:
        want = flow.collect(all_rows(golden.BATCHES))
        assert_same(read_state(tmp_path / "checkpoint"), want, tolerance=1e-9)
    if emit == "changes":
        got = pa.Table.from_pylist(fold_changes(got, want.column_names[:1]), want.schema)
    assert_same(got, want, tolerance=1e-9)
