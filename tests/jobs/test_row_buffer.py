"""Rows that wait in files: what is being read is not removed, and what was not written is not used."""

from __future__ import annotations

import json
import os
import tempfile
import zlib
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import scalein as si
from scalein import col
from scalein.exec import local_state
from scalein.exec.window_aggregate import WindowedAggregate
from scalein.state.row_buffer import RowBuffer
from tests import oracle
from tests.engines import examples
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


def test_a_file_that_shrinks_while_its_rows_are_used(tmp_path: Path) -> None:
    """Rows that were mapped would end the process."""
    rows = pa.record_batch({"t": np.arange(100_000), "v": np.arange(100_000)})
    log = RowBuffer(tmp_path, rows.schema, memory=1)
    log.add(rows)
    (segment,) = log.segments
    assert segment.batch is None
    found = log.batch(segment)
    os.truncate(tmp_path / segment.file, 1000)
    assert found.equals(rows)
    with pytest.raises(si.Damaged, match="buffered rows cannot be read"):
        log.batch(segment)


SAMPLE = pa.RecordBatch.from_arrays([
    pa.array([5, 6, None, 8] * 30), pa.array(["a", None, "a long text that is not inline", "é"] * 30),
    pa.array([b"x", b"", None, b"yz"] * 30), pa.array([Decimal("1.5"), None, Decimal("-2.25"), Decimal(0)] * 30,
                                                      pa.decimal128(20, 2)),
    pa.array([True, None, False, True] * 30), pa.array([[1], [], None, [2, 3]] * 30),
    pa.array([1.5, 2.5, -0.0, 4.0] * 30)],
    schema=pa.schema([("i", pa.int64()), ("s", pa.string()), ("b", pa.binary()), ("d", pa.decimal128(20, 2)),
                      ("f", pa.bool_()), ("l", pa.list_(pa.int64())), pa.field("x", pa.float64(), False)]))  # fmt: skip


@examples(100)
@given(damage=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(1, 255)), min_size=1, max_size=4),
       length=st.none() | st.floats(0, 1), entry=st.none() | st.tuples(st.integers(0, 4), st.integers(-2, 1 << 40)))
def test_damage_whose_checksum_was_forged(damage: list[tuple[float, int]], length: float | None,
                                          entry: tuple[int, int] | None) -> None:
    """Rows are valid, or an error says that they are damaged."""
    with tempfile.TemporaryDirectory() as folder:
        log = RowBuffer(Path(folder), SAMPLE.schema, memory=1)
        for rows in (SAMPLE, SAMPLE.slice(3, 50)):
            log.add(rows, 1, 2)
        about: Any = json.loads(json.dumps(log.to_json(log.segments)))
        for name in about["files"]:
            path = Path(folder, name)
            data = bytearray(path.read_bytes())
            for share, change in damage:
                data[int(len(data) * share)] ^= change
            data = data if length is None else data[: int(len(data) * length)]
            path.write_bytes(data)
            about["files"][name] = zlib.crc32(data)
        if entry is not None and entry[0] != 3:
            about["batches"][0][entry[0]] = entry[1]
        again = RowBuffer(Path(folder), SAMPLE.schema, memory=1)
        again.restore(about)
        for segment in again.segments:
            try:
                found = again.batch(segment)
            except si.Damaged:
                continue
            found.validate(full=True)
            assert found.schema == SAMPLE.schema
            assert not found.column("x").null_count
            assert found.num_rows == segment.rows
            str(found.to_pylist())


def test_a_checkpoint_removes_nothing_that_is_being_combined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if a checkpoint that names none of the files became whole just then."""
    parts, removed = WindowedAggregate._parts, []

    def meanwhile(self: WindowedAggregate, *given: Any) -> Any:
        self.retain([])
        removed.append(True)
        return parts(self, *given)

    monkeypatch.setattr(local_state, "MIN_COMBINED_ROWS", 5)
    monkeypatch.setattr(local_state, "COMBINE_GROWTH", 1)
    monkeypatch.setattr(WindowedAggregate, "_parts", meanwhile)
    flow = si.from_batches(BATCHES, BATCHES[0].schema).with_watermark("t", 50).group_by(
        "v", si.tumbling("t", 10)).agg(n=si.count(), s=col("v").sum())
    out = si.to_memory()
    flow.start(sink=out, memory="1B", workers=1).wait()
    assert len(removed) > 1
    assert_same(out.table(), oracle.collect(flow))
