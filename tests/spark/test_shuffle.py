"""Which rows are a target's: every row of every type is exactly one's, by its hash, whichever way it is found."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from scalein.options import Options
from scalein.spark import shuffle
from scalein.spark.shuffle import hashes, key_groups, own_rows, target_of_groups

KEYS = {
    "int": pa.array([None, *range(-500, 500)], pa.int64()),
    "float": pa.array([None, float("nan"), -0.0, 0.0, *np.linspace(-9, 9, 997)], pa.float32()),
    "time": pa.array([None, *range(1000)], pa.timestamp("us", "UTC")),
    "bool": pa.array([None, True, False] * 333 + [True, False]),
    "text": pa.array([None, *map(str, range(1000))]),  # not by a kernel of its own
}


@pytest.mark.parametrize("targets", [1, 2, 3, 5, 8, 256])
@pytest.mark.parametrize("key", KEYS)
def test_own_rows_are_those_of_a_target(key: str, targets: int) -> None:
    options = Options.make(workers=1)
    batch = pa.record_batch({"v": pa.array([*range(1000), None], pa.int16()), key: KEYS[key]})
    to = target_of_groups(targets)[key_groups(hashes(batch, [key], options))]
    for target in range(targets):
        own = own_rows(batch, [key], target, targets, options)
        want = batch.filter(pa.array(to == target))
        assert own.schema.equals(batch.schema)
        assert own.column("v").equals(want.column("v"))
        assert repr(own.column(key).to_pylist()) == repr(want.column(key).to_pylist())  # NaN and -0.0 too


def test_targets_share_kernels() -> None:
    """Two at most: a range of hashes may go over their sign."""
    options = Options.make(workers=1)
    batch = pa.record_batch({"key": pa.array(range(1000), pa.int32()), "v": pa.array(range(1000), pa.uint16())})
    before = shuffle._range_program.cache_info().misses
    for targets in (2, 3, 7, 16):
        for target in range(targets):
            own_rows(batch, ["key"], target, targets, options)
    assert shuffle._range_program.cache_info().misses - before == 2
