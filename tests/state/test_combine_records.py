"""combine_records: records of equal keys are combined, and keys of equal hashes are not."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from scalein.kernels.store import StoreKernels
from scalein.options import Options
from scalein.state.arena import Arena
from scalein.state.memtable import MemTable
from scalein.state.run_levels import pointers_to

KEY, VALUE = pa.schema([("a", pa.int32()), ("b", pa.int64())]), pa.schema([("n", pa.int64()), ("hi", pa.float64())])
FUNCTIONS = ("sum", "max")


@pytest.mark.parametrize("hashes_of_all", [1, 3, 1 << 40])
def test_records_of_several_runs_are_combined_by_key(hashes_of_all: int) -> None:
    rng = np.random.default_rng(hashes_of_all)
    kernels = StoreKernels(KEY, VALUE, Options.make(workers=1))
    wanted: dict[tuple[int | None, int], tuple[int, float]] = {}
    pointers, tables = [], []
    for age in range(5):
        table = MemTable(kernels, Arena(1 << 16, 1 << 26))
        if age:
            for group in range(256):
                table.set_flags(group, 2)  # PARTIAL
        a, b = rng.integers(0, 6, 200), rng.integers(0, 9, 200)
        values = rng.integers(0, 100, 200)
        rows = {"a": pa.array(a.astype(np.int32), mask=a == 5), "b": b, "n": values, "hi": values / 2}
        kernels.upsert(table, pa.record_batch(rows), FUNCTIONS, 1)
        for key_a, key_b, value in zip(rows["a"].to_pylist(), b.tolist(), values.tolist(), strict=True):
            n, hi = wanted.get((key_a, key_b), (0, -1.0))
            wanted[key_a, key_b] = n + value, max(hi, value / 2)
        pointers.append(np.concatenate([table.pointers(group) for group in range(256)]))
        tables.append(table)
    every = np.concatenate(pointers)
    hashes = kernels.hash_keys(every) % np.uint64(hashes_of_all)
    order = np.argsort(hashes, kind="stable")
    records, found = kernels.combine_records(np.ascontiguousarray(every[order]), hashes[order], FUNCTIONS)
    assert len(records) == len(wanted)
    assert (np.diff(found.astype(np.int64)) >= 0).all()
    rows_found = pa.Table.from_batches(kernels.rows(pointers_to(records), ["a", "b", "n", "hi"])).to_pylist()
    assert {(row["a"], row["b"]): (row["n"], row["hi"]) for row in rows_found} == wanted
