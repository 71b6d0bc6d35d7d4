"""Hot loops are vector code: where LLVM gives up on one, the instructions named here are missing."""

from __future__ import annotations

import re
from functools import cache

import numpy as np
import pyarrow as pa
import pytest

import scalein as si
from scalein import col, when
from scalein.ir.stages import Collect, FromBatches, Group, Partition
from scalein.kernels.kernel_metrics import profiling
from scalein.llvm_backend.jit import assembly
from scalein.llvm_backend.stage import lower_stage
from scalein.llvm_backend.target import target_for

ROWS = 5000
NUMBERS = np.arange(ROWS)
TABLE = pa.table(
    {
        "x": NUMBERS,
        "y": NUMBERS % 7,
        "wide": NUMBERS * 10**9,
        "f": NUMBERS / 3,
        "i": NUMBERS.astype(np.int32),
        "n": pa.array(NUMBERS, mask=NUMBERS % 3 == 0),
        "b": NUMBERS % 2 == 0,
    }
)
FLOW = si.from_arrow(TABLE)
ADS = pa.table({"y": np.arange(7), "campaign": np.arange(7) * 3})

# name -> flow, and instructions that its loops must have on 256-bit registers
FLOWS: dict[str, tuple[si.Flow, list[str]]] = {
    "filter": (FLOW.filter(col("x") > 100).select("x"), ["vpcmpgtq"]),
    "filter on floats": (FLOW.filter(col("f") > 100.0).select("f"), [r"vcmp\w*pd"]),
    "two conditions": (FLOW.filter((col("x") > 100) & (col("i") < 3000)).select("f"), ["vpcmpgtq", "vpand"]),
    "is_in": (FLOW.filter(col("x").is_in([1, 5, 9])).select("x"), ["vpcmpeqq", "vpor"]),
    "addition with overflow check": (FLOW.select(z=col("x") + col("y")), ["vpaddq", "vpxor"]),
    "multiplication with overflow check": (FLOW.select(z=col("x") * col("y")), ["vpmuludq"]),
    "narrow multiplication": (FLOW.select(z=col("i") * 3), [r"vp(mul|add|sll)\w+"]),
    "floats": (FLOW.select(z=col("f") * 2.5 + 1), ["vmulpd", "vaddpd"]),
    "nulls": (FLOW.select(z=col("n") + 1), [r"vp(add|sub)q"]),
    "when": (FLOW.select(z=when(col("x") > 3).then(col("f")).otherwise(0.0)), ["vpcmpgtq"]),
    "float to int": (FLOW.select(z=col("f").cast(pa.int32())), ["vcvttpd2dq", r"vcmp\w+pd"]),
    "sum of ints": (FLOW.group_by().agg(s=col("x").sum()), ["vpaddq"]),
    "sum of floats": (FLOW.group_by().agg(s=col("f").sum()), ["vaddpd"]),
    "least and greatest": (FLOW.group_by().agg(a=col("f").min(), b=col("x").max()), ["vminpd", "vpcmpgtq"]),
    "count of a filter": (FLOW.filter(col("x") % 2 == 0).group_by().agg(n=si.count()), [r"vp(add|sub)q"]),
    "sum of a filter": (FLOW.filter(col("x") > 10).group_by().agg(s=col("x").sum()), ["vpcmpgtq", "vpaddq"]),
    "hash of a key": (FLOW.group_by("wide").agg(n=si.count()), ["vpmuludq", "vpsrlq", "vpxor", "vpcmpeqq"]),
    "place of a key": (FLOW.group_by("y").agg(n=si.count()), ["vpsubq"]),
    "direct join": (FLOW.join(ADS, on="y").group_by("campaign").agg(n=si.count()), ["vpsubq"]),
}


@cache
def _asm(name: str, cpu: str) -> str:
    """The kernel that reads the input, for a CPU that this machine need not have."""
    with profiling() as profile:
        FLOWS[name][0].collect(workers=1)
    stages = [
        u.stage for u in profile.kernels.values() if isinstance(u.stage.reader, FromBatches) and u.stage.name != "build"
    ]
    assert len(stages) == 1
    assert isinstance(stages[0].sink, Collect | Group | Partition)
    target = target_for(cpu)
    return assembly(lower_stage(stages[0], target).text, target)


@pytest.mark.parametrize("name", FLOWS)
def test_loops_use_256_bit_vectors(name: str) -> None:
    text = _asm(name, "x86-64-v3")
    for instruction in FLOWS[name][1]:
        assert re.search(rf"^\s+{instruction}\s.*%ymm", text, re.M), f"no {instruction} on ymm in\n{text}"
    assert "%zmm" not in text


@pytest.mark.parametrize("name", ["filter", "hash of a key"])
def test_avx_512_is_used_where_there_is_any(name: str) -> None:
    assert "%zmm" in _asm(name, "x86-64-v4")


def test_filters_compress_with_avx_512() -> None:
    assert "vpcompressd" in _asm("filter", "x86-64-v4")


@pytest.mark.parametrize("name", FLOWS)
def test_plain_x86_64_gets_nothing_newer(name: str) -> None:
    text = _asm(name, "x86-64")
    assert "%ymm" not in text
    assert not re.search(r"^\s+(v\w+|p(min|max)[us]d|pmulld|ptest|pshufb|popcnt\w?|tzcnt\w?|[ps]ext\w)\s", text, re.M)


@pytest.mark.parametrize("name", ["filter", "addition with overflow check", "sum of ints", "hash of a key"])
def test_rows_are_not_taken_one_by_one(name: str) -> None:
    """A call in a row's loop, or a check of every row, would show as a call or as a jump on overflow."""
    text = _asm(name, "x86-64-v3")
    assert not re.search(r"^\s+jn?o\s", text, re.M)
    calls = re.findall(r"^\s+callq?\s+(\S+)", text, re.M)
    assert all(re.search(r"mem(set|cpy|move)", target) for target in calls), calls
