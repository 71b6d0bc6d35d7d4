"""Profiles of flows whose steps keep different things, of times of every type, and of samples as users give them."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import scalein as si
from scalein import col
from scalein.api.flow import Flow
from scalein.model.model import Model
from scalein.model.profile import profile
from scalein.model.states import states_of

ROWS = 20_000
EVENTS = pa.table({"time": pa.array(np.arange(ROWS), pa.timestamp("ms")), "user": np.arange(ROWS) * 7919 % 500,
                   "price": np.random.default_rng(1).random(ROWS)})
RATE = 10_000.0  # rows a second of event time; a row has 24 bytes
DELAY, HOUR = "1s", 3_600.0


def timed() -> Flow:
    return si.from_arrow(EVENTS).with_watermark("time", DELAY)


def state_of(flow: Flow) -> float:
    """Bytes of state after an hour at the rate."""
    return sum(each.count(RATE, None, RATE * HOUR) * each.group_bytes for each in states_of(flow.op, ROWS))


@pytest.mark.parametrize(("flow", "expected"), [
    (lambda: si.from_arrow(EVENTS).limit(100), 0),
    (lambda: timed().group_by("user", si.tumbling("time", "2s")).top_k(2, by="price"), RATE * 3 * (24 + 17)),
    (lambda: timed().with_columns(p=col("price").sum().over("user", order_by="time", within="3s")), RATE * 4 * 24),
    (lambda: timed().with_columns(p=col("price").lag(1).over("user", order_by="time")), RATE * 24 + 500 * 80),
    (lambda: timed().with_columns(p=col("price").sum().over("user", order_by="time")), RATE * 24 + 500 * 40),
    (lambda: timed().distinct("user", within="1s"), RATE * 24 + 500 * 48),
    (lambda: timed().distinct("user", ttl="1s"), RATE * 24 + 500 * 48),
    (lambda: timed().group_by("user", si.tumbling("time", "1s")).agg(n=si.count()).sort("window_end"), 500 * 112),
    (lambda: si.from_arrow(EVENTS).sort("price"), RATE * HOUR * 24),  # what waits for the end keeps all
    (lambda: si.from_arrow(EVENTS).group_by("user").top_k(2, by="price"), RATE * HOUR * 24),
    (lambda: si.from_arrow(EVENTS).group_by("user", si.count_window(10)).agg(n=si.count()), RATE * HOUR * 24),
    (lambda: si.from_arrow(EVENTS).group_by("user").agg(n=si.count()), 500 * 40),
])  # fmt: skip
def test_what_steps_keep(flow: object, expected: float) -> None:
    """By hand: what waits for the watermark, windows, frames in time, and what is remembered of 500 keys."""
    found = state_of(flow())  # type: ignore[operator]
    assert expected / 1.6 <= found <= expected * 1.6


def test_a_flow_with_columns_of_our_own_is_profiled() -> None:
    """Rows numbered for count windows, and rows of windows, have columns with names that users may not give."""
    flow = si.flow(EVENTS.schema).with_watermark("time", DELAY)
    for q in (flow.group_by("user", si.count_window(10)).agg(n=si.count()),
              flow.group_by("user", si.tumbling("time", "2s")).top_k(2, by="price")):
        assert profile(q, EVENTS).predict(rate=1e5).max_rate > 0


@pytest.mark.parametrize("kind", ["int8", "int16", "uint16", "int32", "int64", "timestamp[s]"])
def test_times_of_every_type(kind: str) -> None:
    """A sample is repeated no further than the type of its times reaches."""
    times = (np.arange(6_000) // 100).astype("int32")
    table = pa.table({"t": pa.array(times).cast("int64").cast(kind), "k": np.arange(6_000) % 10})
    length = "5s" if kind.startswith("timestamp") else 5
    delay = "1s" if kind.startswith("timestamp") else 1
    q = si.flow(table.schema).with_watermark("t", delay).group_by("k", si.tumbling("t", length)).agg(n=si.count())
    found = profile(q, table)
    assert found.costs.rows == 6_000
    assert found.predict().max_rate > 0


def test_times_at_the_end_of_their_type() -> None:
    times = np.arange(6_000) // 100 + (1 << 31) - 100
    table = pa.table({"t": pa.array(times, pa.int32()), "k": np.arange(6_000) % 10})
    q = si.flow(table.schema).with_watermark("t", 1).group_by("k", si.tumbling("t", 5)).agg(n=si.count())
    assert profile(q, table).predict().max_rate > 0


def test_what_hands_over_batches_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread of Python for each source takes turns with what prepares kernels."""
    module = importlib.import_module("scalein.model.profile")  # the package has a function of this name
    monkeypatch.setattr(module, "_reading_s", lambda table, columns: 1.0)
    costs = profile(si.flow({"k": pa.int64()}).filter(col("k") > 1), {"k": list(range(5_000))}).costs
    assert costs.batch_s >= 1.0
    assert costs.alone is not None
    assert costs.alone.batch_s >= 1.0


@pytest.mark.parametrize("rows", [1, 3, 100])
def test_a_tiny_sample_gives_a_guess_and_says_so(rows: int) -> None:
    q = si.flow({"k": pa.int64()}).group_by("k").agg(n=si.count())
    found = profile(q, {"k": list(range(rows))}).predict(workers=1)
    assert any("the sample has only" in note for note in found.notes)
    assert found.high / found.low > 2
    assert found.p99_s < 10.0  # of rounds as long as jobs make them, not of thousands with a few rows


def endless(start: int, count: int) -> pa.RecordBatch:
    return pa.record_batch({"n": np.arange(start, start + count)})


class Quiet:
    """Two endless partitions: one never has a row."""

    schema = pa.schema({"n": pa.int64()})
    bounded = False

    def partitions(self) -> list[str]:
        return ["none", "some"]

    def read(self, partition: str, offset: object) -> Iterator[tuple[pa.RecordBatch, int]]:
        number = 0
        while True:
            number += 1
            yield endless(0, 1_000 if partition == "some" else 0), number


def rows_of(model: Model) -> int:
    return model.costs.rows


def test_rows_of_a_source_without_an_end(tmp_path: Path) -> None:
    pq.write_table(pa.table({"n": np.arange(6_000)}), tmp_path / "a.parquet")
    followed = profile(si.read_parquet(tmp_path, follow=True).filter(col("n") > 2))
    made = profile(si.generate(endless, {"n": pa.int64()}, batch_rows=1 << 20).filter(col("n") > 2))
    quiet = profile(si.from_source(Quiet()).filter(col("n") > 2))
    assert (rows_of(followed), rows_of(made)) == (6_000, 1 << 21)
    assert 0 < rows_of(quiet) <= 1 << 21
    assert rows_of(quiet) % 1_000 == 0 or rows_of(quiet) == 1 << 21


def test_a_sample_of_a_bound_flow_as_columns() -> None:
    q = si.from_arrow(pa.table({"k": [1, 2, 3]})).group_by("k").agg(n=si.count())
    assert rows_of(profile(q, {"k": [1, 2] * 3_000})) == 6_000
    assert rows_of(profile(q, {"arrow": pa.table({"k": [1, 2] * 3_000})})) == 6_000  # by the name of its source
