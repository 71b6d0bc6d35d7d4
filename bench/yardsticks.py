"""The hand-written C of `bench/c`, compiled for this machine, as calls from Arrow tables to fresh arrays.

A yardstick gives a function that runs it; that gives another one which names its result columns. So what is timed is
what the C does, outputs allocated and filled; what only comparing needs is apart.
"""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from bench.data import ADS, CAMPAIGNS

HERE = Path(__file__).parent
WINDOW_MS, SLICE_MS, SLICES = 10_000, 2_000, 5

Array = npt.NDArray[Any]
Columns = dict[str, Array]
Yardstick = Callable[[], Callable[[], Columns]]


def compile_yardsticks(folder: Path, compiler: str) -> ctypes.CDLL:
    """All of `bench/c/*.c` in one library."""
    library = folder / "yardsticks.so"
    sources = sorted(str(path) for path in (HERE / "c").glob("*.c"))
    subprocess.run([compiler, "-O3", "-march=native", "-Wall", "-shared", "-fPIC", "-pthread", "-o", str(library),
                    *sources], check=True)
    loaded = ctypes.CDLL(str(library))
    loaded.filter_project.restype = loaded.filter_sum.restype = ctypes.c_int64
    loaded.state_rows.restype = loaded.cached_bytes.restype = ctypes.c_int64
    loaded.state_new.restype = ctypes.c_void_p
    loaded.window_join.restype = loaded.sessions.restype = ctypes.c_int64
    return loaded


def filter_project(c: ctypes.CDLL, bids: pa.Table) -> Yardstick:
    """auction and price * 0.908 where auction % 123 == 0."""
    auction, price = _arrays(bids, "auction", "price")

    def run() -> Callable[[], Columns]:
        out_auction, out_price = np.empty(len(auction), np.int64), np.empty(len(auction), np.float64)
        rows = c.filter_project(_p(auction), _p(price), _i(len(auction)), _p(out_auction), _p(out_price))
        return lambda: {"auction": out_auction[:rows], "price": out_price[:rows]}

    return run


def score(c: ctypes.CDLL, orders: pa.Table) -> Yardstick:
    """The function of `bench_udf.py` for each row."""
    price, qty = _arrays(orders, "price", "qty")

    def run() -> Callable[[], Columns]:
        out = np.empty(len(price), np.float64)
        c.udf_score(_p(price), _p(qty), _i(len(price)), _p(out))
        return lambda: {"score": out}

    return run


def filter_sum(c: ctypes.CDLL, trades: pa.Table, least: int) -> Yardstick:
    """The sum of price where qty > least."""
    qty, price = _arrays(trades, "qty", "price")

    def run() -> Callable[[], Columns]:
        total = c.filter_sum(_p(qty), _p(price), _i(len(qty)), _i(least))
        return lambda: {"total": np.array([total])}

    return run


def group_few(c: ctypes.CDLL, table: pa.Table, keys: int) -> Yardstick:
    """Count and sum per key of an int32 column with values 0 to keys - 1."""
    key, value = _arrays(table, "key", "value")

    def run() -> Callable[[], Columns]:
        counts, sums = np.zeros(keys, np.int64), np.zeros(keys, np.float64)
        c.group_few(_p(key), _p(value), _i(len(key)), _i(keys), _p(counts), _p(sums))
        used = counts > 0
        return lambda: {"key": np.flatnonzero(used), "n": counts[used], "s": sums[used]}

    return run


def group_many(c: ctypes.CDLL, table: pa.Table, workers: int) -> Yardstick:
    """Sum, count, min and max per key of an int64 column."""
    key, value = _arrays(table, "key", "value")
    n = len(key)

    def run() -> Callable[[], Columns]:
        keys, counts = np.empty(n, np.int64), np.empty(n, np.int64)
        sums, least, most = (np.empty(n, np.float64) for _ in range(3))
        starts, rows = np.zeros(workers, np.int64), np.zeros(workers, np.int64)
        c.group_many(_p(key), _p(value), _i(n), *map(_p, (keys, counts, sums, least, most, starts, rows)), workers)

        def columns() -> Columns:
            used = _ranges(starts, rows)
            return {"key": keys[used], "s": sums[used], "n": counts[used], "lo": least[used], "hi": most[used]}

        return columns

    return run


def sliding_count(c: ctypes.CDLL, bids: pa.Table, workers: int) -> Yardstick:
    """Bids per auction in windows of 10 s, every 2 s."""
    auction, time = _arrays(bids, "auction", "ts")
    base, windows = _windows(time)
    room = workers * (len(np.unique(auction)) * windows * SLICES + 1)

    def run() -> Callable[[], Columns]:
        keys, starts, counts = (np.empty(room, np.int64) for _ in range(3))
        rows = np.zeros(workers, np.int64)
        c.sliding_count(_p(auction), _p(time), _i(len(time)), _i(base), _p(keys), _p(starts), _p(counts), _i(room),
                        _p(rows), workers)

        def columns() -> Columns:
            used = _ranges(np.arange(workers) * (room // workers), rows)
            return {"auction": keys[used], "window_start": starts[used], "n": counts[used]}

        return columns

    return run


def window_join(c: ctypes.CDLL, left: pa.Table, right: pa.Table) -> Yardstick:
    """The number of pairs with one id in one window of 10 s."""
    (a, a_time), (b, b_time) = _arrays(left, "id", "ts"), _arrays(right, "id", "ts")
    base, windows = _windows(np.concatenate([a_time, b_time]))

    def run() -> Callable[[], Columns]:
        pairs = c.window_join(_p(a), _p(a_time), _i(len(a)), _p(b), _p(b_time), _i(len(b)), _i(base), _i(windows))
        return lambda: {"n": np.array([pairs])}

    return run


def sessions(c: ctypes.CDLL, visits: pa.Table, gap_ms: int) -> Yardstick:
    """Sessions of users, with the number of their rows."""
    user, time = _arrays(visits, "user", "ts")
    users = int(user.max(initial=0)) + 1

    def run() -> Callable[[], Columns]:
        out = [np.empty(len(user), np.int64) for _ in range(4)]
        rows = c.sessions(_p(user), _p(time), _i(len(user)), _i(users), _i(gap_ms), *map(_p, out))
        names = ("user", "window_start", "window_end", "n")
        return lambda: {name: each[:rows] for name, each in zip(names, out, strict=True)}

    return run


def yahoo(c: ctypes.CDLL, events: pa.Table, campaigns: pa.Table, workers: int) -> Yardstick:
    """Views per campaign in windows of 10 s, everything an integer."""
    time, ad, kind = _arrays(events, "event_time", "ad_id", "event_type")
    base, windows = _windows(time)
    campaign_of = np.empty(ADS, np.int32)
    campaign_of[campaigns["ad_id"].to_numpy()] = campaigns["campaign_id"].to_numpy()

    def run() -> Callable[[], Columns]:
        out = np.zeros((windows, CAMPAIGNS), np.int64)
        c.yahoo(_p(time), _p(ad), _p(kind), _i(len(time)), _p(campaign_of), _i(base), _i(windows), _p(out), workers)

        def columns() -> Columns:
            window, campaign = np.nonzero(out)
            return {"campaign_id": campaign, "window_start": base + window * WINDOW_MS, "n": out[window, campaign]}

        return columns

    return run


class StateTable:
    """Sum, count and max of values by key, in a table made for `keys` keys that lives on from call to call."""

    def __init__(self, c: ctypes.CDLL, keys: int, workers: int = 1) -> None:
        self._c, self._keys = c, keys
        self._table = ctypes.c_void_p(c.state_new(_i(keys), workers))

    def merge(self, key: Array, value: Array) -> None:
        self._c.state_merge(self._table, _p(key), _p(value), _i(len(key)))

    def columns(self) -> Columns:
        keys, counts = np.empty(self._keys, np.int64), np.empty(self._keys, np.int64)
        sums, most = np.empty(self._keys, np.float64), np.empty(self._keys, np.float64)
        n = self._c.state_rows(self._table, *map(_p, (keys, counts, sums, most)))
        return {"k": keys[:n], "s": sums[:n], "n": counts[:n], "m": most[:n]}

    def free(self) -> None:
        self._c.state_free(self._table)


def cached_bytes(c: ctypes.CDLL, folder: Path) -> int:
    """Bytes of a folder's files that are in the page cache."""
    return sum(c.cached_bytes(str(path).encode()) for path in folder.rglob("*") if path.is_file())


def _windows(time: Array) -> tuple[int, int]:
    """The start of a window before all rows, and the number of windows up to the last row."""
    base = int(time.min()) // WINDOW_MS * WINDOW_MS - WINDOW_MS
    return base, (int(time.max()) - base) // WINDOW_MS + 1


def _ranges(starts: Array, lengths: Array) -> Array:
    return np.concatenate([np.arange(a, a + n) for a, n in zip(starts, lengths, strict=True)])


def _arrays(table: pa.Table, *names: str) -> list[Array]:
    return [np.ascontiguousarray(table[name].to_numpy()) for name in names]


def _p(array: Array) -> ctypes.c_void_p:
    return array.ctypes.data_as(ctypes.c_void_p)


def _i(number: int) -> ctypes.c_int64:
    return ctypes.c_int64(number)
