"""Seeded inputs of the benchmarks: the same rows on every machine. Times are integers in milliseconds."""

from __future__ import annotations

import uuid
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import pyarrow as pa

T0_MS, SPAN_MS, SEED = 1_700_000_005_000, 100_000, 20_261_116
ADS, CAMPAIGNS, AUCTIONS, KEYS = 1_000, 100, 100_000, 10_000_000
EVENT_TYPES = ["view", "click", "purchase"]

Ints = npt.NDArray[np.int64]


def times(rng: np.random.Generator, rows: int) -> Ints:
    """Rising times with 50 ms of disorder to either side."""
    return T0_MS + np.arange(rows, dtype=np.int64) * SPAN_MS // rows + rng.integers(-50, 51, rows, dtype=np.int64)


@lru_cache(maxsize=1)
def ad_events(rows: int) -> pa.Table:
    """Yahoo benchmark, everything an integer: 13 bytes a row are needed, 21 are there."""
    rng = np.random.default_rng(SEED + 1)
    return pa.table({
        "event_time": times(rng, rows),
        "ad_id": rng.integers(0, ADS, rows, dtype=np.int32),
        "event_type": rng.integers(0, len(EVENT_TYPES), rows, dtype=np.int8),
        "user_id": rng.integers(0, 1 << 40, rows),
    })


def campaigns() -> pa.Table:
    """Static table: each ad's campaign, ten ads a campaign."""
    campaign = np.random.default_rng(SEED).permutation(ADS).astype(np.int32) // (ADS // CAMPAIGNS)
    return pa.table({"ad_id": np.arange(ADS, dtype=np.int32), "campaign_id": campaign})


def with_strings(table: pa.Table, *, as_dictionary: bool) -> pa.Table:
    """`ad_events` or `campaigns` with ids as 36 letters and event types as words, as the Yahoo benchmark has them."""
    words = {"ad_id": _ids("ad", ADS), "campaign_id": _ids("campaign", CAMPAIGNS), "event_type": EVENT_TYPES}
    for at, name in enumerate(table.column_names):
        if name in words:
            codes = table[name].combine_chunks()
            coded = pa.DictionaryArray.from_arrays(codes, pa.array(words[name]))
            table = table.set_column(at, name, coded if as_dictionary else coded.dictionary_decode())
    return table


def _ids(kind: str, count: int) -> list[str]:
    return [str(uuid.uuid5(uuid.NAMESPACE_OID, f"{kind}-{i}")) for i in range(count)]


@lru_cache(maxsize=1)
def bids(rows: int) -> pa.Table:
    """Bids on 100,000 auctions, Zipf-distributed: the first gets 8 % of all rows."""
    rng = np.random.default_rng(SEED + 2)
    weight = 1.0 / np.arange(1, AUCTIONS + 1)
    rank = np.minimum(np.searchsorted(np.cumsum(weight / weight.sum()), rng.random(rows)), AUCTIONS - 1)
    names = 1000 + rng.permutation(AUCTIONS).astype(np.int64)
    return pa.table({"auction": names[rank], "price": rng.integers(100, 10_000_000, rows), "ts": times(rng, rows)})


@lru_cache(maxsize=2)
def keyed_values(rows: int, keys: int = KEYS, heavy: float = 0.0) -> pa.Table:
    """`rows` values under `keys` keys; a share of `heavy` of all rows has one and the same key.

    Values are multiples of 1/64: their sums are exact in any order.
    """
    rng = np.random.default_rng(SEED + 3)
    key = rng.integers(0, keys, rows)
    if heavy:
        key[rng.random(rows) < heavy] = keys // 2
    return pa.table({"key": key, "value": rng.integers(0, 1 << 20, rows) / 64.0})


@lru_cache(maxsize=1)
def trades(rows: int) -> pa.Table:
    """Quantities 0 to 99 and prices."""
    rng = np.random.default_rng(SEED + 4)
    return pa.table({"qty": rng.integers(0, 100, rows), "price": rng.integers(1, 1_000_000, rows)})
