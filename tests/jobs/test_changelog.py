"""emit="changes": whoever applies the rows in order holds what `collect` gives."""

from __future__ import annotations

import json
import tempfile
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import scalein as si
from scalein import col
from scalein.api.flow import Flow
from scalein.state import LogStore
from scalein.testing import Stream, until
from tests import oracle
from tests.engines import examples
from tests.jobs.streams import Course, ran, rows_in
from tests.jobs.test_fast_paths import rows, run, stream, windows
from tests.jobs.test_same_rows import DELAY_MS, EXPRESSIONS, NAMES, SIMPLE, TOGETHER, courses, tables
from tests.same import assert_same

Build = Callable[[Flow], Flow]

FLOWS: dict[str, tuple[Build, list[str]]] = {
    "running": (lambda s: s.group_by("k", "g").agg(**SIMPLE), ["k", "g"]),
    "no keys": (lambda s: s.group_by().agg(n=si.count(), total=col("x").sum()), []),
    "tumbling": (lambda s: s.with_watermark("t", f"{DELAY_MS}ms").group_by("k", si.tumbling("t", "30ms")).agg(
        n=si.count(), m=col("f").mean()), ["k", "window_start"]),
    "together": (lambda s: s.group_by("k").agg(**TOGETHER), ["k"]),
    "together, row by row": (lambda s: s.group_by("k").agg(v=col("x").var(), s=col("f").std(), a=col("g").arg_min(
        "x"), l=col("f").last(), m=col("f").mean()), ["k"]),
    "together, filtered": (lambda s: s.group_by("k").agg(v=col("x").var(), l=col("x").last()).filter(
        col("l") % 2 == 0), ["k"]),
    "together, no keys": (lambda s: s.group_by().agg(**TOGETHER), []),
    "tumbling together": (lambda s: s.with_watermark("t", f"{DELAY_MS}ms").group_by("k", si.tumbling(
        "t", "30ms")).agg(**TOGETHER), ["k", "window_start"]),
    "sliding": (lambda s: s.with_watermark("t", f"{DELAY_MS}ms").group_by("k", si.sliding(
        "t", "40ms", every="15ms", offset="4ms")).agg(**SIMPLE), ["k", "window_start"]),
    "cumulating": (lambda s: s.with_watermark("t", f"{DELAY_MS}ms").group_by("k", si.cumulate(
        "t", "60ms", step="20ms", offset="7ms")).agg(**SIMPLE), ["k", "window_start", "window_end"]),
    "cumulating together": (lambda s: s.with_watermark("t", f"{DELAY_MS}ms").group_by("g", si.cumulate(
        "t", "60ms", step="20ms")).agg(**TOGETHER), ["g", "window_start", "window_end"]),
    "sliding together": (lambda s: s.with_watermark("t", f"{DELAY_MS}ms").group_by("g", si.sliding(
        "t", "40ms", every="20ms")).agg(**TOGETHER), ["g", "window_start"]),
    "sliding filtered": (lambda s: s.with_watermark("t", f"{DELAY_MS}ms").group_by(si.sliding(
        "t", "60ms", every="20ms")).agg(n=si.count()).filter(col("n") % 3 != 0), ["window_start"]),
    "sliding computed time": (lambda s: s.with_columns(u=col("t")).with_watermark("u", f"{DELAY_MS}ms").group_by(
        "k", si.sliding("u", "30ms", every="10ms")).agg(n=si.count()), ["k", "window_start"]),
    "expressions": (lambda s: s.group_by("k").agg(**EXPRESSIONS), ["k"]),
    "sliding expressions": (lambda s: s.with_watermark("t", f"{DELAY_MS}ms").group_by("g", si.sliding(
        "t", "40ms", every="20ms")).agg(**EXPRESSIONS, c=si.corr("x", "g")), ["g", "window_start"]),
    "computed": (lambda s: s.group_by("k").agg(n=si.count()).select("k", m=col("n") * 2), ["k"]),
    "filtered": (lambda s: s.group_by("k").agg(n=si.count(), s=col("x").sum()).filter(col("s") % 3 == 0), ["k"]),
    "joined": (lambda s: s.group_by("k").agg(n=si.count()).join(NAMES, on="k"), ["k", "name"]),
    "window over window": (lambda s: s.with_watermark("t", f"{DELAY_MS}ms").group_by("k", si.tumbling(
        "t", "20ms")).agg(n=si.count()).group_by("n").agg(c=si.count()), ["n"]),
    "rows": (lambda s: s.filter(col("x") > 0).distinct("k"), ["k"]),
}  # fmt: skip


def applied(changes: pa.Table, keys: list[str]) -> pa.Table:
    """What is left when changes are applied in order; `op` must say what each is."""
    held: dict[Any, dict[str, Any]] = {}
    for row in changes.to_pylist():
        op, key = row.pop("op"), tuple(row[name] for name in keys)
        if op == "insert":
            assert key not in held, f"{key} was there"
            held[key] = row
        elif op == "update":
            assert key in held, f"{key} was not there"
            held[key] = row
        else:
            assert op == "delete"
            assert held.pop(key) == row, "a delete has the values there were"
    return pa.Table.from_pylist(list(held.values()), changes.schema.remove(changes.schema.get_field_index("op")))


@pytest.mark.parametrize("name", FLOWS)
@examples(2)
@given(table=tables(), course=courses())
def test_applied_changes_are_what_collect_gives(name: str, table: pa.Table, course: Course) -> None:
    build, keys = FLOWS[name]
    course.options["emit"] = "changes"
    with tempfile.TemporaryDirectory() as folder:
        changes, _ = ran(build, table, course, Path(folder))
    assert changes.schema.names[-1] == "op"
    assert_same(applied(changes, keys), oracle.collect(build(si.from_arrow(table))), ordered=False, tolerance=1e-9)


@examples(2)
@given(seed=st.integers(0, 1 << 32), window=st.sampled_from([(100, 20), (500, 200), (30, 20), (100, 100)]),
       delay=st.sampled_from([0, 10, 300]), workers=st.integers(1, 3), ordered=st.booleans())  # fmt: skip
def test_changes_of_windows_add_up_to_what_final_gives(seed: int, window: tuple[int, int], delay: int, workers: int,
                                                       ordered: bool) -> None:
    """Also where rows come late, or late for some of their windows only; `collect` knows of no such rows."""
    flow = windows(stream(seed), *window, delay, False, ["k"], ordered)
    want, late, late_rows, timeless_rows = run(flow, [], workers=workers)
    out, others = si.to_memory(), si.to_memory()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        job = flow.start(sink=out, late=others, workers=workers, emit="changes")
        job.wait()
    assert rows(applied(out.table(), ["k", "window_start"])) == want
    assert rows(others.table()) == late
    assert (job.metrics()["late_rows"], job.metrics()["timeless_rows"]) == (late_rows, timeless_rows)


def test_groups_joined_with_a_table_that_does_not_fit() -> None:
    out = si.to_memory()
    flow = si.from_arrow(pa.table({"k": ["a", "b"]})).group_by("k").agg(n=si.count()).join(NAMES, on="k")
    flow.start(sink=out, emit="changes", memory="1B").wait()
    assert sorted(out.table()["name"].to_pylist()) == ["Anna", "Bert"]


@pytest.mark.parametrize("window", [[], [si.tumbling("t", 10)]], ids=["groups", "windows"])
def test_a_round_without_a_row_for_any_group(window: list[Any]) -> None:
    given = [pa.record_batch({"t": [t], "k": [1], "x": [x]}) for t, x in ((0, 0), (1, 1), (2, 0), (3, 0))]
    stream, out = Stream({"a": given}, allowed={"a": 1}), si.to_memory()
    flow = si.from_source(stream).with_watermark("t", 0).filter(col("x") > 0).group_by("k", *window)
    job = flow.agg(n=si.count()).start(sink=out, emit="changes", workers=1)
    for count in range(1, len(given) + 1):
        stream.allow("a", count)
        until(lambda: rows_in(job) == count, job)  # noqa: B023
    job.wait()
    assert out.table().select(["k", "n", "op"]).to_pylist() == [{"k": 1, "n": 1, "op": "insert"}]


def test_a_window_that_slides_has_one_row_a_key_and_batch(tmp_path: Path) -> None:
    """Whatever slices its rows are in. What has closed is not told again, also not behind a checkpoint, though a row
    that is late for it is not for others.
    """
    times = [[0, 1, 2, 3, 4, 9], [4, 5], [30], [9, 17, 21]]
    want = [{(-8, 4): "insert", (-4, 5): "insert", (0, 6): "insert", (4, 2): "insert", (8, 1): "insert"},
            {(-4, 7): "update", (0, 8): "update", (4, 4): "update"},
            {(20, 1): "insert", (24, 1): "insert", (28, 1): "insert"},
            {(12, 2): "insert", (16, 2): "insert", (20, 2): "update"}]  # fmt: skip
    given = [pa.record_batch({"t": pa.array(some, pa.int64())}) for some in times]
    for number, told in enumerate(want):
        seen: list[pa.RecordBatch] = []
        stream = Stream({"a": given}, ends=False, allowed={"a": number + 1})
        flow = si.from_source(stream).with_watermark("t", 8).group_by(si.sliding("t", 12, every=4)).agg(n=si.count())
        job = flow.start(sink=si.to_callback(seen.append), late=si.to_memory(), emit="changes",
                         checkpoint=tmp_path, every="1h")
        until(lambda: rows_in(job) == sum(map(len, times[: number + 1])), job)  # noqa: B023
        job.stop()
        found = [row for batch in seen for row in batch.to_pylist()]
        assert {(row["window_start"], row["n"]): row["op"] for row in found} == told
        assert len(found) == len(told)
        assert all(row["window_end"] == row["window_start"] + 12 for row in found)


@pytest.mark.parametrize("is_indexed", [True, False])
def test_windows_close_after_a_restart(is_indexed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the keys in the checkpoint; checkpoints of earlier versions have none, and the store is scanned."""
    batches = [pa.record_batch({"t": [time] * 50, "k": list(range(50))}) for time in (0, 10, 20, 30, 100)]
    scans: list[LogStore] = []
    real = LogStore.scan

    def scan(self: LogStore) -> pa.RecordBatchReader:
        scans.append(self)
        return real(self)

    def run(allowed: int) -> int:
        stream = Stream({"a": batches}, ends=False, allowed={"a": allowed})
        flow = si.from_source(stream).with_watermark("t", 25).group_by("k", si.tumbling("t", 10)).agg(n=si.count())
        job = flow.start(sink=si.to_memory(), emit="changes", checkpoint=tmp_path, every="1h", memory="64MB")
        until(lambda: rows_in(job) == 50 * allowed, job)
        job.stop()
        (state,) = tmp_path.glob("state-*")
        with LogStore.open(state, readonly=True) as store:
            return len(store)

    monkeypatch.setattr(LogStore, "scan", scan)
    assert run(3) == 150
    newest = sorted(tmp_path.glob("epoch-*.json"))[-1]
    manifest = json.loads(newest.read_bytes().partition(b"\n")[0])
    (files,) = [state["expiry"]["files"] for state in manifest["states"]]
    assert files
    if not is_indexed:
        del manifest["states"][0]["expiry"]
        text = json.dumps(manifest).encode()
        newest.write_bytes(text + b"\n%08x\n" % zlib.crc32(text))
    assert run(4) == 200  # no window closes yet
    assert run(5) == 50
    assert bool(scans) is not is_indexed


@examples(2)
@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=5), min_size=1, max_size=6))
def test_a_key_has_one_row_a_batch(batches: list[list[int]]) -> None:
    given = [pa.record_batch({"k": pa.array(some, pa.int64())}) for some in batches]
    stream = Stream({"a": given}, ends=False, allowed={"a": 0})
    seen: list[pa.RecordBatch] = []
    job = si.from_source(stream).group_by("k").agg(n=si.count()).start(sink=si.to_callback(seen.append),
                                                                      emit="changes", workers=2)
    told: set[int] = set()
    for number, some in enumerate(batches):
        before = len(seen)
        stream.allow("a", number + 1)
        until(lambda: rows_in(job) >= sum(map(len, batches[: number + 1])), job)  # noqa: B023
        job.scale(1)
        rows = [row for batch in seen[before:] for row in batch.to_pylist()]
        assert sorted(row["k"] for row in rows) == sorted(set(some))
        assert all(row["op"] == ("update" if row["k"] in told else "insert") for row in rows)
        told |= set(some)
    job.stop()


@pytest.mark.parametrize(("build", "message"), [
    (lambda s: s.group_by("k").agg(op=si.count()), "'op'"),
    (lambda s: s.select(op=col("k")), "'op'"),
    (lambda s: s.group_by("k").agg(n=si.count()).map_batches(lambda b: b, pa.schema(
        [pa.field("k", pa.string()), pa.field("n", pa.int64(), False)])), "Python function"),
    (lambda s: s.group_by("k").agg(n=si.count(), u=col("x").n_unique()), r"cannot follow n_unique(.|\n)*found  u"),
    (lambda s: s.group_by(si.sliding("x", 4, every=2)).agg(m=col("x").median()), "cannot follow quantile"),
])  # fmt: skip
def test_what_cannot_be_told_is_refused(build: Build, message: str) -> None:
    flow = build(si.from_arrow(pa.table({"k": ["a"], "x": [1]})))
    with pytest.raises(si.ScaleinError, match=message):
        flow.start(sink=si.to_memory(), emit="changes")


def test_what_never_ends_cannot_wait_for_the_end() -> None:
    stream = Stream({"a": pa.table({"k": ["a"], "x": [1]}).to_batches()}, ends=False)
    flow = si.from_source(stream).group_by("k").agg(n=si.count()).group_by("n").agg(m=si.count())
    with pytest.raises(si.ScaleinError, match="endless"):
        flow.start(sink=si.to_memory(), emit="changes")


def test_groups_by_a_key_that_is_called_as_ends_of_windows_are() -> None:
    table = pa.table({"window_end": [1, 2, 1], "x": [1, 2, 3]})
    out = si.to_memory()
    flow = si.from_batches(table.to_batches(max_chunksize=2), table.schema)
    flow.group_by("window_end").agg(n=si.count()).start(sink=out, emit="changes").wait()
    found = out.table().to_pydict()
    assert sorted(zip(found["window_end"], found["n"], strict=True))[-1] == (2, 1)
    assert max(n for end, n in zip(found["window_end"], found["n"], strict=True) if end == 1) == 2
