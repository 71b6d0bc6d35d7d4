"""A costly column is computed in one place of a kernel, however many loops read it."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pytest

import scalein as si
from scalein import col
from scalein.api.flow import Flow
from scalein.ir.stages import FromBatches
from scalein.kernels.kernel_metrics import profiling
from scalein.llvm_backend.stage import lower_stage
from scalein.llvm_backend.target import target_for

TABLE = pa.table({"i": np.arange(3000), "s": [f"name {n % 40}" for n in range(3000)]})
UNIQUE = pa.table({"i": np.arange(0, 3000, 2), "u": np.arange(1500)})
SEVERAL = pa.table({"i": np.arange(3000) // 3, "m": np.arange(3000)})


@si.udf
def rounds(n: int) -> int:
    total = 0
    for k in range(n % 5):
        total += k * n
    return total


@si.udf
def label(s: str, n: int) -> str:
    return s if n % 3 == 0 else "other"


X = si.from_arrow(TABLE).with_columns(x=rounds(col("i")))
TWICE = col("x") * 2

ONE_CALL: dict[str, Callable[[], Flow]] = {
    "one use": lambda: X.select("x"),
    "filter and output": lambda: X.filter(col("x") >= 10).select("x"),
    "filters and columns": lambda: X.filter(col("x") >= 10).filter(TWICE < 900).select("x", a=col("x") + 1, b=TWICE),
    "aggregates of all rows": lambda: X.group_by().agg(a=col("x").max(), b=col("x").min(), c=col("x").sum()),
    "of an expression": lambda: si.from_arrow(TABLE).group_by().agg(
        a=rounds(col("i")).max(), b=rounds(col("i")).min(), c=rounds(col("i")).std()),
    "key and aggregate": lambda: X.group_by(k=col("x") % 7).agg(a=col("x").max(), n=col("x").n_unique()),
    "key of a join": lambda: X.select(i=col("x")).join(UNIQUE, on="i").filter(col("u") > 3),
    "behind a join": lambda: X.join(UNIQUE, on="i").filter(col("x") > col("u")).select("x", "u"),
    "behind a join that multiplies": lambda: X.join(SEVERAL, on="i").filter(col("x") > col("m")).select("x", "m"),
    "a string": lambda: si.from_arrow(TABLE).select(t=label(col("s"), col("i"))),
    "a string in a filter": lambda: si.from_arrow(TABLE).select(t=label(col("s"), col("i"))).filter(col("t") > "nb"),
    "through another name": lambda: X.select(y=col("x")).select(z=col("y"), w=col("y") + 1).filter(col("w") > 3),
    "distinct": lambda: X.distinct("x").select("x", y=TWICE),
}  # fmt: skip


def calls(flow: Flow, safe: bool = False) -> int:
    """How many places of the kernel that reads the input call a udf."""
    with profiling() as profile:
        flow.collect(workers=1)
    stages = [u.stage for u in profile.kernels.values() if isinstance(u.stage.reader, FromBatches)]
    texts = [lower_stage(stage, target_for("native"), safe).text for stage in stages if stage.name != "build"]
    return max(len(re.findall(r'= call [^\n]*@"udf\.', text)) for text in texts)


@pytest.mark.parametrize("name", ONE_CALL)
def test_one_call_in_a_kernel(name: str) -> None:
    assert calls(ONE_CALL[name]()) == 1
    assert calls(ONE_CALL[name](), safe=True) == 1


def test_a_column_over_a_kept_column_is_kept_as_well() -> None:
    flow = X.with_columns(y=rounds(col("x"))).filter(col("y") > 3).filter(col("x") > 3).select("x", "y", z=col("y") + 1)
    assert calls(flow) == 2


def test_behind_a_join_that_multiplies_each_loop_computes() -> None:
    """A row of the block is no longer known by its place."""
    flow = si.from_arrow(TABLE).join(SEVERAL, on="i").with_columns(x=rounds(col("m"))).filter(col("x") > 3).select("x")
    assert calls(flow) == 2


def test_one_loop_needs_no_scratch() -> None:
    with profiling() as profile:
        X.select("x").collect(workers=1)
    (metrics,) = profile.kernels.values()
    assert "kept" not in lower_stage(metrics.stage, target_for("native")).text
