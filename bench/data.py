"""Seeded inputs of the benchmarks: the same rows on every machine. Times are integers in milliseconds."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
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


@lru_cache(maxsize=1)
def people_and_auctions(rows: int) -> tuple[pa.Table, pa.Table]:
    """People, and three times as many auctions of theirs: most are of people who came shortly before."""
    rng = np.random.default_rng(SEED + 5)
    people, auctions = rows // 4, rows - rows // 4
    newest = np.arange(auctions, dtype=np.int64) * people // auctions
    back = rng.exponential(people * 0.06, auctions).astype(np.int64)
    return (pa.table({"id": np.arange(people, dtype=np.int64), "ts": times(rng, people)}),
            pa.table({"id": np.maximum(newest - back, 0), "ts": times(rng, auctions)}))


@lru_cache(maxsize=1)
def visits(rows: int) -> pa.Table:
    """Rows of as many users that each has twenty of them, over ten minutes."""
    rng = np.random.default_rng(SEED + 6)
    late = T0_MS + np.arange(rows, dtype=np.int64) * 6 * SPAN_MS // rows + rng.integers(-50, 51, rows, dtype=np.int64)
    return pa.table({"user": rng.integers(0, max(1, rows // 20), rows), "ts": late})


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


# --- state: updates of keys 0 to keys - 1


class Updates:
    """Random updates of `keys` keys: windows at random places of a pool that is made before anything is timed.

    So no two calls bring the same keys in the same order, and none waits for a random generator. Values are multiples
    of 1/64: their sums are exact in any order.
    """

    def __init__(self, keys: int, kind: str, pool_rows: int, seed: int = SEED + 20) -> None:
        self.rng = np.random.default_rng(seed)
        self.keys = keys
        self.pool = self.rng.integers(0, keys, pool_rows) if kind == "uniform" else zipf(self.rng, keys, pool_rows)
        self.values = self.rng.integers(0, 1 << 20, 1 << 20) / 64.0
        self._order = self.rng.permutation(keys)

    def all_keys(self, step: int = 1 << 20) -> Iterator[pa.Table]:
        """Every key once, in random order."""
        for start in range(0, self.keys, step):
            yield self.table(self._order[start : start + step])

    def take(self, rows: int) -> pa.Table:
        start = int(self.rng.integers(0, len(self.pool) - rows + 1))
        return self.table(self.pool[start : start + rows])

    def table(self, keys: Ints) -> pa.Table:
        """Keys with values; sum and max read the same column, as the C yardstick does."""
        values = np.resize(self.values, len(keys)) if len(keys) > len(self.values) else self.values[: len(keys)]
        return pa.table({"k": keys, "s": values, "m": values})


def zipf(rng: np.random.Generator, keys: int, rows: int, theta: float = 0.99) -> Ints:
    """Keys whose n-th most frequent one comes in proportion to n ** -theta, drawn as YCSB does.

    Which key is the n-th is random. The first gets 5 % of all rows of 10 M keys.
    """
    names = rng.permutation(keys)
    zeta = float((1.0 / np.arange(1, keys + 1) ** theta).sum())
    eta = (1 - (2.0 / keys) ** (1 - theta)) / (1 - (1 + 0.5**theta) / zeta)
    drawn = np.empty(rows, np.int64)
    for start in range(0, rows, 1 << 20):
        u = rng.random(min(1 << 20, rows - start))
        rank = (keys * (eta * u - eta + 1) ** (1 / (1 - theta))).astype(np.int64)
        rank[u * zeta < 1 + 0.5**theta] = 1
        rank[u * zeta < 1] = 0
        drawn[start : start + len(u)] = names[np.minimum(rank, keys - 1)]
    return drawn
