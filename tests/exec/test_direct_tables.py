"""Small key domains: ranges that are left midway, keys at the ends of their types, nulls, times far apart."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pyarrow as pa
import pytest

import scalein as si
from scalein import col
from scalein.exec import direct_addressing, tables
from tests.scale import assert_same_rows, by_duckdb, every_way, source_of

QUERY = "SELECT k, count(*) AS n, sum(x)::BIGINT AS s, min(x) AS lo FROM t GROUP BY k"


def _summed(flow: si.Flow) -> si.Flow:
    return flow.group_by("k").agg(n=si.count(), s=col("x").sum(), lo=col("x").min())


def _table(keys: np.ndarray, nulls_from: float = 1.0, type_: pa.DataType | None = None) -> pa.Table:
    rng = np.random.default_rng(len(keys))
    place = np.arange(len(keys)) / len(keys)
    mask = (place > nulls_from) & (rng.random(len(keys)) < 0.1)
    return pa.table(
        {"k": pa.array(keys, type_, mask=mask if nulls_from < 1 else None), "x": rng.integers(-50, 50, len(keys))}
    )


def _growing(low: int, middle: int, end: int) -> np.ndarray:
    """Few keys for most of the way, then a few more in the middle, and then back: the ends look alike."""
    rng = np.random.default_rng(1)
    return np.concatenate(
        [rng.integers(low, low + 50, 60_000), rng.integers(middle, end, 60_000), rng.integers(low, low + 50, 60_000)]
    )


RANGES = {
    "widened": (0, -100, 300),
    "then hashed": (-20, -100_000, 100_000),
    "then a key far away": (5, 10**15, 10**15 + 3),
    "negative": (-1000, -1200, -900),
}


@every_way
@pytest.mark.parametrize("nulls", [False, True], ids=["", "nulls"])
@pytest.mark.parametrize("case", RANGES)
def test_a_domain_that_is_left_midway(case: str, nulls: bool, source: str, workers: int) -> None:
    table = _table(_growing(*RANGES[case]), 0.5 if nulls else 1.0)
    got = _summed(source_of(table, source)).collect(workers=workers)
    assert_same_rows(got, by_duckdb(QUERY, t=table), ["k"])


@pytest.mark.parametrize(
    "type_", [pa.int8(), pa.uint8(), pa.int16(), pa.uint16(), pa.int32(), pa.uint32(), pa.int64(), pa.uint64()], ids=str
)
@pytest.mark.parametrize("end", ["least", "greatest", "both"])
def test_keys_at_the_ends_of_their_type(end: str, type_: pa.DataType) -> None:
    bits, signed = type_.bit_width, not str(type_).startswith("u")
    low, high = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if signed else (0, 2**bits - 1)
    near = {
        "least": [low, low + 1, low + 90],
        "greatest": [high - 90, high - 2, high],
        "both": [low, low + 3, high - 1, high],
    }[end]
    for null in (None, near[0]):
        keys = [*near, *near[::2], null] * 100
        table = pa.table({"k": pa.array(keys, type_)})
        for source in ("table", "reader"):
            got = source_of(table, source, 90).group_by("k").agg(n=si.count()).collect(workers=2)
            assert dict(zip(got["k"].to_pylist(), got["n"].to_pylist(), strict=True)) == Counter(keys)


@every_way
def test_times_that_leap_out_of_the_domain(source: str, workers: int) -> None:
    steps = np.sort(np.random.default_rng(2).integers(0, 3_000_000, 100_000))
    seconds = np.concatenate([steps, steps + 10**9, steps - 10**10, steps])
    table = pa.table({"t": pa.array(seconds).cast(pa.timestamp("s")), "k": np.arange(len(seconds)) % 3})
    got = source_of(table, source).group_by("k", si.tumbling("t", "1d")).agg(n=si.count()).collect(workers=workers)
    plain = table.set_column(0, "t", pa.array(seconds))
    want = by_duckdb(
        """SELECT k, floor(t / 86400.0)::BIGINT * 86400 AS window_start, window_start + 86400 AS window_end,
        count(*) AS n FROM t GROUP BY ALL""",
        t=plain,
    )
    assert_same_rows(got, want, ["k", "window_start"])


@every_way
def test_several_keys_and_a_joined_one(source: str, workers: int) -> None:
    rng = np.random.default_rng(3)
    rows = 200_000
    color = pa.array(["red", "green", "blue", None])
    ads = pa.table({"ad": np.arange(1000), "campaign": pa.array([f"campaign {n % 17}" for n in range(1000)])})
    table = pa.table(
        {
            "color": color.take(pa.array(rng.integers(0, 4, rows))).dictionary_encode(),
            "even": rng.random(rows) < 0.5,
            "ad": rng.integers(0, 1100, rows),
            "x": rng.integers(0, 100, rows),
        }
    )
    flow = source_of(table, source).join(ads, on="ad", how="left").group_by("color", "even", "campaign")
    got = flow.agg(n=si.count(), m=col("x").mean()).collect(workers=workers)
    want = by_duckdb(
        "SELECT color, even, campaign, count(*) AS n, avg(x) AS m FROM t LEFT JOIN ads USING (ad) GROUP BY ALL",
        t=table,
        ads=ads,
    )
    assert_same_rows(got, want, ["color", "even", "campaign"])


def test_these_tests_reach_direct_tables_that_widen(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the runtime decided otherwise, what is above would test something else."""
    made: list[str] = []
    for kind in (tables.DirectTable, tables.HashTable):
        init = kind.__init__
        monkeypatch.setattr(
            kind, "__init__", lambda self, *args, i=init: (made.append(type(self).__name__), i(self, *args))[1]
        )
    _summed(si.from_arrow(_table(_growing(*RANGES["widened"])))).collect(workers=1)
    assert made.count("DirectTable") == 2
    made.clear()
    _summed(si.from_arrow(_table(_growing(*RANGES["then hashed"])))).collect(workers=1)
    assert made[:2] == ["DirectTable", "HashTable"]
    assert direct_addressing.DIRECT_BYTES < 100_000 * 32  # else the second case would not leave the domain
