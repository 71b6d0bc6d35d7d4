"""Every row of every type belongs to exactly one target, by its hash, in both ways of selecting it."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from scalein.options import Options
from scalein.spark import shuffle
from scalein.spark.shuffle import key_hashes, rows_of_target
from scalein.state.key_groups import key_groups, partition_of_key_groups

KEYS = {
    "int": pa.array([None, *range(-500, 500)], pa.int64()),
    "float": pa.array([None, float("nan"), -0.0, 0.0, *np.linspace(-9, 9, 997)], pa.float32()),
    "time": pa.array([None, *range(1000)], pa.timestamp("us", "UTC")),
    "bool": pa.array([None, True, False] * 333 + [True, False]),
    "text": pa.array([None, *map(str, range(1000))]),  # without a kernel of its own
}


@pytest.mark.parametrize("targets", [1, 2, 3, 5, 8, 256])
@pytest.mark.parametrize("key", KEYS)
def test_rows_of_a_target(key: str, targets: int) -> None:
    options = Options.make(workers=1)
    batch = pa.record_batch({"v": pa.array([*range(1000), None], pa.int16()), key: KEYS[key]})
    target_of_row = partition_of_key_groups(targets)[key_groups(key_hashes(batch, [key], options))]
    for target in range(targets):
        own = rows_of_target(batch, [key], target, targets, options)
        want = batch.filter(pa.array(target_of_row == target))
        assert own.schema.equals(batch.schema)
        assert own.column("v").equals(want.column("v"))
        assert repr(own.column(key).to_pylist()) == repr(want.column(key).to_pylist())  # NaN and -0.0 too


def test_targets_share_kernels() -> None:
    """Two at most: one for ranges of hashes that include the change of sign."""
    options = Options.make(workers=1)
    batch = pa.record_batch({"key": pa.array(range(1000), pa.int32()), "v": pa.array(range(1000), pa.uint16())})
    before = shuffle._hash_range_program.cache_info().misses
    for targets in (2, 3, 7, 16):
        for target in range(targets):
            rows_of_target(batch, ["key"], target, targets, options)
    assert shuffle._hash_range_program.cache_info().misses - before == 2
