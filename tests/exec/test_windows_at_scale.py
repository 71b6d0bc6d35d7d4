"""Windows over many rows: in order, out of order, with gaps; in rings, by slices, directly addressed."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

import scalein as si
from scalein import col
from scalein.exec import ring
from tests.scale import assert_same_rows, by_duckdb, every_way, source_of

ROWS = 40_000


def _times(case: str) -> np.ndarray:
    """Integer times. Windows are some hundred units long."""
    rng = np.random.default_rng(1)
    steady = np.arange(ROWS) // 10
    match case:
        case "in order":
            return steady
        case "slightly out of order":
            return steady + rng.integers(-30, 30, ROWS)
        case "far out of order":
            return np.where(rng.random(ROWS) < 0.001, steady - 2000, steady)
        case "random":
            return rng.integers(0, 4000, ROWS)
        case "backwards":
            return steady[::-1]
        case "huge gaps":
            gap = np.arange(ROWS) // (256 * 50)  # between two blocks: a ring can go on
            return steady + gap * 10**15
        case "negative":
            return steady - 10**12
        case "one instant":
            return np.full(ROWS, -1)
        case _:
            raise AssertionError(case)


CASES = [
    "in order",
    "slightly out of order",
    "far out of order",
    "random",
    "backwards",
    "huge gaps",
    "negative",
    "one instant",
]


def _table(case: str, keys: int) -> pa.Table:
    rng = np.random.default_rng(2)
    t = pa.array(_times(case), mask=rng.random(ROWS) < 0.01)
    x = pa.array(rng.integers(-100, 100, ROWS), mask=rng.random(ROWS) < 0.1)
    return pa.table({"k": rng.integers(0, keys, ROWS) * 1_000_003, "t": t, "x": x, "row": np.arange(ROWS)})


def _windows(size: int, every: int, keys: str = "k, ") -> str:
    """Each row in each of its windows: those that begin at a multiple of `every` and less than `size` before it."""
    back = -(-size // every)
    return f"""SELECT {keys}(floor(t / {every}.0)::BIGINT - back) * {every} AS window_start,
        window_start + {size} AS window_end, count(*) AS n, sum(x)::BIGINT AS s, min(row) AS f, max(row) AS l
        FROM t, (SELECT unnest(range({back})) AS back)
        WHERE t < (floor(t / {every}.0)::BIGINT - back) * {every} + {size} GROUP BY ALL"""


def _summed(flow: si.Flow, window: object, *keys: str) -> si.Flow:
    return flow.group_by(*keys, window).agg(n=si.count(), s=col("x").sum(), f=col("row").first(), l=col("row").last())


@pytest.mark.parametrize("keys", [3, 2000], ids=["few keys", "many keys"])
@pytest.mark.parametrize(("size", "every"), [(100, 100), (300, 100), (250, 100), (600, 25)],
                         ids=["tumbling", "sliding", "gcd is half a step", "24 slices"])  # fmt: skip
@pytest.mark.parametrize("case", CASES)
def test_windows(case: str, size: int, every: int, keys: int) -> None:
    table = _table(case, keys)
    want = by_duckdb(_windows(size, every), t=table)
    window = si.tumbling("t", size) if size == every else si.sliding("t", size, every=every)
    for source, workers in (("table", 1), ("reader", 2)):
        got = _summed(source_of(table, source), window, "k").collect(workers=workers)
        assert_same_rows(got, want, ["k", "window_start"])


@pytest.mark.parametrize("keys", [3, 2000], ids=["few keys", "many keys"])
@pytest.mark.parametrize("case", CASES)
def test_windows_that_cumulate_or_are_moved(case: str, keys: int) -> None:
    table = _table(case, keys)
    moved = table.set_column(1, "t", pc.subtract(table["t"], 130))
    back = "SELECT * REPLACE (window_start + 130 AS window_start, window_end + 130 AS window_end)"
    cumulating = f"""{back} FROM (SELECT k, floor(t / 300.0)::BIGINT * 300 AS window_start,
        window_start + (step + 1) * 60 AS window_end, count(*) AS n, sum(x)::BIGINT AS s, min(row) AS f, max(row) AS l
        FROM t, (SELECT unnest(range(5)) AS step) WHERE t < window_start + (step + 1) * 60 GROUP BY ALL)"""
    wanted = ((si.cumulate("t", 300, step=60, offset=130), cumulating),
              (si.sliding("t", 250, every=100, offset=30), f"{back} FROM ({_windows(250, 100)})"),
              (si.tumbling("t", 200, offset=-70), f"{back} FROM ({_windows(200, 200)})"))
    for window, query in wanted:
        want = by_duckdb(query, t=moved)
        for source, workers in (("table", 1), ("reader", 2)):
            got = _summed(source_of(table, source), window, "k").collect(workers=workers)
            assert_same_rows(got, want, ["k", "window_start", "window_end"])


def test_as_many_slices_as_a_ring_takes() -> None:
    table = _table("in order", 2000)
    got = _summed(si.from_arrow(table), si.sliding("t", 512, every=32), "k").collect(workers=2)
    assert_same_rows(got, by_duckdb(_windows(512, 32), t=table), ["k", "window_start"])


@every_way
@pytest.mark.parametrize("case", ["in order", "slightly out of order", "far out of order", "huge gaps"])
def test_sliding_over_text_and_null_keys(case: str, source: str, workers: int) -> None:
    table = _table(case, 4000)
    text = pa.array(
        [None if n % 40 == 3 else f"a key with a number {n}" for n in (table["k"].to_numpy() // 1_000_003).tolist()]
    )
    table = table.set_column(0, "k", text)
    got = _summed(source_of(table, source), si.sliding("t", 300, every=100), "k").collect(workers=workers)
    assert_same_rows(got, by_duckdb(_windows(300, 100), t=table), ["k", "window_start"])


@every_way
@pytest.mark.parametrize("case", ["in order", "random", "huge gaps", "negative"])
def test_sliding_without_keys(case: str, source: str, workers: int) -> None:
    table = _table(case, 4)
    got = _summed(source_of(table, source), si.sliding("t", 300, every=100)).collect(workers=workers)
    assert_same_rows(got, by_duckdb(_windows(300, 100, keys=""), t=table), ["window_start"])


@every_way
def test_sliding_with_moments_extremes_and_steps_behind(source: str, workers: int) -> None:
    table = _table("slightly out of order", 3000)
    made = {"m": col("x").mean(), "v": col("x").var(), "hi": col("x").max(), "at": col("row").arg_max("x")}
    flow = source_of(table, source).filter(col("x") > -90).group_by("k", si.sliding("t", 300, every=100)).agg(**made)
    got = flow.filter(col("hi") > 10).with_columns(twice=col("hi") * 2).collect(workers=workers)
    want = by_duckdb(
        """SELECT k, (floor(t / 100.0)::BIGINT - back) * 100 AS window_start, window_start + 300 AS window_end,
        avg(x) AS m, var_samp(x) AS v, max(x) AS hi, arg_max(row, x * 1000000 - row) AS at, hi * 2 AS twice
        FROM t, (SELECT unnest(range(3)) AS back) WHERE x > -90 AND t IS NOT NULL GROUP BY ALL HAVING hi > 10""",
        t=table,
    )
    assert_same_rows(got, want, ["k", "window_start"])


@every_way
@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns"])
def test_timestamps_of_every_unit(unit: str, source: str, workers: int) -> None:
    per_second = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}[unit]
    ticks = np.sort(np.random.default_rng(3).integers(-5000, 5000, 20_000)) * per_second + (per_second > 1)
    table = pa.table({"t": pa.array(ticks).cast(pa.timestamp(unit, "UTC")), "x": ticks % 7, "row": np.arange(20_000)})
    got = _summed(source_of(table, source), si.sliding("t", "90s", every="20s")).collect(workers=workers)
    plain = table.set_column(0, "t", pa.array(ticks))
    want = by_duckdb(_windows(90 * per_second, 20 * per_second, keys=""), t=plain)
    assert got.schema.field("window_start").type == pa.timestamp(unit, "UTC")
    assert_same_rows(got, want, ["window_start"])


def test_these_tests_use_rings_and_give_them_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the runtime decided otherwise, what is above would test something else."""
    results: list[bool] = []
    run = ring.run_ring
    monkeypatch.setattr(ring, "run_ring", lambda *args: [found := run(*args), results.append(found is not None)][0])
    for case in ("in order", "slightly out of order", "huge gaps", "far out of order", "random"):
        _summed(si.from_arrow(_table(case, 2000)), si.sliding("t", 300, every=100), "k").collect(workers=1)
    assert results == [True, True, True, False, False]
