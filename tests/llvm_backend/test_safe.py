"""SCALEIN_SAFE=1: kernels that check every access, and say which one went wrong instead of crashing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.ipc
import pytest

import scalein as si
from scalein import col
from tests import oracle


@pytest.fixture(autouse=True)
def _safe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCALEIN_SAFE", "1")


def damaged_strings() -> pa.Array:
    """The second offset leads far behind the six bytes there are; Arrow's quick check does not see it."""
    offsets = pa.py_buffer(np.array([0, 900, 2, 6], np.int32))
    return pa.Array.from_buffers(pa.string(), 3, [None, offsets, pa.py_buffer(b"abcdef")])


def damaged_codes() -> pa.Array:
    return pa.DictionaryArray.from_arrays(pa.array([0, 7], pa.int32()), pa.array(["a", "b"]), safe=False)


def damaged_views() -> pa.Array:
    """A view of 20 bytes into a buffer of 4."""
    view = np.array([20, 0, 0, 0], np.uint32).tobytes()
    return pa.Array.from_buffers(pa.string_view(), 1, [None, pa.py_buffer(view), pa.py_buffer(b"abcd")])


@pytest.mark.parametrize(("make", "what"), [
    (damaged_strings, "the bytes of column 's'"),
    (damaged_codes, "dictionary code"),
    (damaged_views, "the bytes of column 's'"),
])
def test_an_access_outside_is_an_error_that_names_the_column(make: object, what: str) -> None:
    table = pa.table({"s": make()})  # type: ignore[operator]
    with pytest.raises(si.InternalError, match=what) as caught:
        si.from_arrow(table).filter(col("s") > "x").collect(workers=1)
    replay = Path(caught.value.facts["replay"])
    try:
        assert replay.stat().st_size > 0
    finally:
        replay.unlink()


def test_safe_kernels_give_the_same_result() -> None:
    rng = np.random.default_rng(5)
    table = pa.table({
        "k": rng.integers(0, 10_000, 20_000),
        "s": pa.array([f"name {i % 700} of many" if i % 11 else None for i in range(20_000)]),
        "v": rng.normal(size=20_000),
        "t": np.sort(rng.integers(0, 5_000, 20_000)),
    })
    names = pa.table({"s": [f"name {i} of many" for i in range(0, 700, 3)] * 2, "n": range(468)})
    flow = si.from_arrow(table)
    for q in (
        flow.filter(col("v") > 0).select("s", w=col("v") * 2),
        flow.group_by("k").agg(n=si.count(), s=col("v").sum()),
        flow.group_by("s", si.sliding("t", 100, every=20)).agg(n=si.count()),
        flow.join(names, on="s", how="left").select("k", "n"),
    ):
        got = q.collect(workers=2)
        want = oracle.collect(q)
        order = [(name, "ascending") for name in want.column_names]
        a, b = got.sort_by(order).to_pandas(), want.sort_by(order).to_pandas()
        assert a.shape == b.shape
        for name in a.columns:
            if a[name].dtype.kind == "f":
                np.testing.assert_allclose(a[name], b[name], rtol=1e-9)
            else:
                assert a[name].equals(b[name]), name
