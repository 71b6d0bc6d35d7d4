"""`ttl=` of aggregates and `distinct`: what has been quiet is forgotten, and begins anew, whatever the batches."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

import scalein as si
from scalein import col
from scalein.api.flow import Flow
from scalein.exec.over_operator import SpacedOver
from scalein.exec.session_changelog import SessionChangelog

KEYS, STEP, TTL = 2_000, 100, 10_000


def in_batches(table: pa.Table, rows: int, delay: int = 0) -> Flow:
    return si.from_batches(table.to_batches(max_chunksize=rows), table.schema).with_watermark("t", delay)


def of_job(flow: Flow, **options: Any) -> list[dict[str, Any]]:
    out = si.to_memory()
    flow.start(sink=out, **options).wait()
    found: list[dict[str, Any]] = out.table().to_pylist()
    return found


def test_a_row_exactly_ttl_later_begins_anew() -> None:
    table = pa.table({"k": ["a", "a", "a", "b"], "t": [0, 9, 19, 20], "v": [1, 2, 4, 8]})
    want = [("a", 3), ("a", 4), ("b", 8)]
    for rows in (1, 4):
        flow = in_batches(table, rows)
        sums = flow.group_by("k").agg(s=col("v").sum(), ttl=10)
        assert sums.schema.names == ["k", "s"]
        assert sorted((row["k"], row["s"]) for row in of_job(sums)) == want
        assert [row["t"] for row in of_job(flow.distinct("k", ttl=10))] == [0, 19, 20]
        assert [(row["k"], row["s"]) for row in of_job(sums, emit="changes") if row["op"] == "insert"][-2:] == want[1:]
    whole = si.from_arrow(table).with_watermark("t", 0)
    assert sorted(map(tuple, (row.values() for row in whole.group_by("k").agg(
        s=col("v").sum(), ttl=10).collect().to_pylist()))) == want
    assert whole.distinct("k", ttl=10).collect()["t"].to_pylist() == [0, 19, 20]


def test_a_change_comes_when_the_watermark_has_passed_its_rows() -> None:
    table = pa.table({"k": [1, 1, 1, 2], "t": [0, 30, 10, 100]})  # 10 comes after 30, and is of the session of 0
    flow = in_batches(table, 1, delay=20).group_by("k", si.session("t", gap=15)).agg(n=si.count())
    found = [(row["window_start"], row["window_end"], row["n"], row["op"]) for row in of_job(flow, emit="changes")]
    # The last batch moves the watermark to 80: the rows of 0 to 30 have been passed, those of a gap at a time.
    assert found == [(0, 25, 2, "insert"), (30, 45, 1, "insert"), (100, 115, 1, "insert")]


def test_a_filter_of_sessions_inserts_and_deletes() -> None:
    table = pa.table({"k": [1, 1, 1, 1], "t": [0, 10, 20, 90]})
    flow = in_batches(table, 1).group_by("k", si.session("t", gap=15)).agg(n=si.count()).filter(col("n") == 2)
    found = [(row["window_end"], row["op"]) for row in of_job(flow, emit="changes")]
    assert found == [(25, "insert"), (25, "delete")]


@pytest.mark.parametrize("operator", [SessionChangelog, SpacedOver])
def test_what_is_quiet_is_forgotten(operator: type, monkeypatch: pytest.MonkeyPatch) -> None:
    """A key that does not come again, each time the watermark moves: a hundred of them are within the time."""
    table = pa.table({"k": range(KEYS), "t": [k * STEP for k in range(KEYS)]})
    sizes: list[int] = []
    forget = operator._forget  # type: ignore[attr-defined]

    def watched(self: Any, until: int) -> None:
        forget(self, until)
        sizes.append(sum(batch.num_rows for batch in self._records.scan()))

    monkeypatch.setattr(operator, "_forget", watched)
    flow = in_batches(table, 100)
    if operator is SessionChangelog:
        assert len(of_job(flow.group_by("k").agg(n=si.count(), ttl=TTL), emit="changes")) == KEYS
    else:
        assert len(of_job(flow.distinct("k", ttl=TTL))) == KEYS
    assert sizes[-1] <= TTL // STEP + 1


@pytest.mark.parametrize(("make", "why"), [
    (lambda f: f.distinct("k", ttl=10, within=10), "within= or ttl="),
    (lambda f: f.group_by("k", si.tumbling("t", 5)).agg(si.count(), ttl=10), "without a window"),
    (lambda f: f.group_by("k").agg(si.count(), ttl="1h"), "ttl must be an integer"),
    (lambda f: f.group_by("k").agg(si.count(), ttl=1), "too short"),
    (lambda f: f.select("k").group_by("k").agg(si.count(), ttl=10), "ttl is in event time"),
    (lambda f: f.select("k").distinct("k", ttl=10), "needs event time"),
])  # fmt: skip
def test_ttl_that_means_nothing(make: Any, why: str) -> None:
    with pytest.raises(si.ScaleinError, match=why):
        make(si.from_arrow({"k": [1], "t": [1]}).with_watermark("t", 0))


def test_an_aggregate_may_be_called_ttl() -> None:
    flow = si.from_arrow({"k": [1, 1], "t": [1, 5]})
    assert flow.group_by("k").agg(ttl=col("t").max()).collect().to_pylist() == [{"k": 1, "ttl": 5}]
