"""Writes the golden store of the current format, which all later versions must read: `python -m tests.state.golden`.

Run it only for a new version of the format, into a new folder; keep the old ones.
"""

from __future__ import annotations

import datetime as dt
import json
import shutil
import tempfile
from decimal import Decimal
from pathlib import Path

import pyarrow as pa

from scalein.state import LogStore, format
from scalein.state.budget import Budget
from scalein.storage.local import LocalFileSystem

FOLDER = Path(__file__).parent / f"golden_v{format.VERSION}"
KEY = pa.schema([("user", pa.string()), ("day", pa.date32()), ("x", pa.float64())])
VALUE = pa.schema([("n", pa.int64()), ("hi", pa.float32()), ("text", pa.string()), ("raw", pa.binary()),
                   ("amount", pa.decimal128(20, 2)), ("flag", pa.bool_()), ("at", pa.timestamp("us"))])  # fmt: skip
FUNCTIONS = {"n": "sum", "hi": "max", "text": "last", "raw": "first", "amount": "sum", "flag": "replace", "at": "min"}


def rows(start: int, count: int) -> pa.Table:
    numbers = range(start, start + count)
    return pa.table({
        "user": [None if k % 17 == 3 else f"user {k}" * (1 + k % 4) for k in numbers],
        "day": pa.array([k % 5 for k in numbers], pa.date32()),
        "x": [float("nan") if k % 19 == 4 else -0.0 if k % 7 == 0 else k / 8 for k in numbers],
        "n": [None if k % 11 == 5 else k - 50 for k in numbers],
        "hi": pa.array([k * 1.5 for k in numbers], pa.float32()),
        "text": [None if k % 13 == 6 else f"text number {k}, of some length" for k in numbers],
        "raw": pa.array([bytes([k % 256]) * (k % 30) for k in numbers], pa.binary()),
        "amount": pa.array([Decimal(k) / 4 for k in numbers], pa.decimal128(20, 2)),
        "flag": [None if k % 9 == 2 else k % 2 == 0 for k in numbers],
        "at": pa.array([dt.datetime(2026, 1, 1) + dt.timedelta(minutes=k) for k in numbers], pa.timestamp("us")),
    })  # fmt: skip


def content(store: LogStore) -> list[str]:
    """Every row as text, sorted."""
    return sorted(json.dumps({name: str(value) for name, value in row.items()}, ensure_ascii=False)
                  for row in store.scan().read_all().to_pylist())


def write() -> None:
    folder = Path(tempfile.mkdtemp())
    budget = Budget(None, 1 << 16, 1 << 12)
    store = LogStore.open_on(LocalFileSystem(folder), key=KEY, value=VALUE, budget=budget, keep=2)
    store.merge(rows(0, 22), **FUNCTIONS)
    tiers = store._tiers
    tiers.use_functions(tuple(FUNCTIONS.values()))
    for shard in range(6):
        tiers._evict(shard, 0.0)
    store.merge(rows(10, 16), **FUNCTIONS)
    store.delete(rows(5, 4).select(KEY.names))
    first = store.snapshot().wait()
    then = content(store)
    store.close()
    with LogStore.open_on(LocalFileSystem(folder), key=KEY, value=VALUE, budget=budget, keep=2) as again:
        again.merge(rows(0, 3), **FUNCTIONS)  # partial records over a piece that is not loaded
        again.snapshot().wait()
    with LogStore.open(folder, readonly=True) as again:
        now = content(again)
    (folder / "LOCK").unlink()
    shutil.rmtree(FOLDER, ignore_errors=True)
    shutil.copytree(folder, FOLDER)
    about = {"snapshot": first.id, "then": then, "now": now}
    (FOLDER / "content.json").write_text(json.dumps(about, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    write()
