"""Wide kernels: parts give what one function gives, columns of one shape share a part, and time is linear."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import scalein as si
from scalein import col
from scalein.api.flow import Flow
from scalein.errors import ComputeError
from scalein.llvm_backend import cache, jit, parts

ROWS = 3000
rng = np.random.default_rng(5)


def nulls(values: np.ndarray) -> pa.Array:
    return pa.array(values, mask=rng.random(len(values)) < 0.2)


TABLE = pa.table({
    "k": nulls(rng.integers(0, 40, ROWS)), "key": pa.array(rng.integers(0, 40, ROWS)),
    "i": nulls(rng.integers(-100, 100, ROWS)), "j": pa.array(rng.integers(-100, 100, ROWS)),
    "x": pa.array(rng.random(ROWS)), "y": nulls(rng.random(ROWS)), "z": nulls(rng.random(ROWS).astype(np.float32)),
    "b": nulls(rng.random(ROWS) < 0.5), "c": pa.array(rng.random(ROWS) < 0.5),
    "s": pa.array([f"text number {n % 37}" if n % 3 else None for n in range(ROWS)]),
    "t": pa.array([f"t{n % 11}" for n in range(ROWS)]).dictionary_encode(),
    "u": pa.array([f"u{n % 7}" for n in range(ROWS)]),
    "time": pa.array(np.sort(rng.integers(0, 10**8, ROWS)), pa.timestamp("us")),
})  # fmt: skip
RIGHT = pa.table({"key": range(30), "name": [f"name {n}" for n in range(30)], "w": nulls(np.arange(30.0))})


def flow() -> Flow:
    return si.from_arrow(TABLE)


def aggregated(grouped: object) -> Flow:
    numbers = ["i", "j", "x", "y", "z"]
    return grouped.agg(  # type: ignore[attr-defined, no-any-return]
        n=si.count(), **{f"{fn}_{name}": getattr(col(name), fn)() for name in numbers
                         for fn in ("sum", "min", "max", "mean", "std", "count", "first", "last")},
        best=col("x").arg_max("y"), most=col("s").max(), first=col("s").first(), unique=col("t").n_unique(),
        about=col("i").approx_n_unique(), middle=col("x").median(), product=(col("x") * col("y")).sum(),
        listed=col("j").collect())  # fmt: skip


FLOWS: dict[str, Callable[[], Flow]] = {
    "filter": lambda: flow().filter(col("x") > 0.4),
    "computed": lambda: flow().filter(col("y") > 0.3).with_columns(
        a=col("x") * 2.5, b2=col("y") * 3.5, d=col("x") + col("x"), e=col("y") + col("x"), i2=col("i") + col("j"),
        j2=col("j") * 2, low=col("s").str.slice(0, 4), long=col("u").str.len(), f=~col("b"), g=~col("c")),
    "left join": lambda: flow().join(si.from_arrow(RIGHT), on="key", how="left"),
    "several matches": lambda: flow().select("key", "x", "s").join(si.from_arrow(TABLE.slice(0, 200).select(
        ["key", "y", "b", "u"])), on="key"),
    "distinct": lambda: flow().distinct("k", "t"),
    "all rows": lambda: aggregated(flow().group_by()),
    "direct groups": lambda: aggregated(flow().group_by("key")),
    "hashed groups": lambda: aggregated(flow().group_by("k", "s")),
    "tumbling": lambda: aggregated(flow().group_by("key", si.tumbling("time", "10s"))),
    "sliding": lambda: flow().group_by("key", si.sliding("time", "10s", every="2s")).agg(
        n=si.count(), a=col("x").sum(), b=col("y").sum(), c=col("i").max(), d=col("y").std()),
}  # fmt: skip


@pytest.fixture
def collect(monkeypatch: pytest.MonkeyPatch) -> Callable[..., pa.Table]:
    """Runs a flow with kernels that are compiled now, in parts if they have more than `wide` columns."""

    def run(made: Flow, wide: int, workers: int = 1) -> pa.Table:
        monkeypatch.setattr(parts, "MAX_IN_ONE_FUNCTION", wide)
        monkeypatch.setattr(cache, "_known", OrderedDict())
        monkeypatch.setenv("SCALEIN_CACHE_DIR", "")
        return made.collect(workers=workers)

    return run


def ordered(table: pa.Table) -> pa.Table:
    keys = [(name, "ascending") for name in ("k", "key", "s", "window_start") if name in table.column_names]
    return table.sort_by(keys) if keys else table


def same(a: pa.Table, b: pa.Table) -> None:
    assert a.schema == b.schema
    for name in a.column_names:
        left, right = a[name].combine_chunks(), b[name].combine_chunks()
        if pa.types.is_floating(left.type):
            assert left.is_null().equals(right.is_null())
            np.testing.assert_allclose(left.fill_null(0).to_numpy(), right.fill_null(0).to_numpy(), rtol=1e-12)
        else:
            assert left.equals(right), name


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("name", FLOWS)
def test_parts_give_the_same(collect: Callable[..., pa.Table], name: str, workers: int) -> None:
    whole, split = (collect(FLOWS[name](), wide, workers) for wide in (10**6, 0))
    is_grouped = not ("filter" in name or name in ("computed", "left join", "several matches", "distinct"))
    same(*((ordered(whole), ordered(split)) if is_grouped else (whole, split)))


def test_parts_in_safe_mode(collect: Callable[..., pa.Table], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCALEIN_SAFE", "1")
    same(collect(FLOWS["computed"](), 10**6), collect(FLOWS["computed"](), 0))


def test_a_row_that_fails_in_a_part_names_its_expression(collect: Callable[..., pa.Table]) -> None:
    numbers = {f"c{k}": pa.array([1, 2, 2**62 if k == 77 else 3]) for k in range(100)}
    made = si.from_arrow(pa.table(numbers))
    with pytest.raises(ComputeError, match=r"integer overflow in `c77 \* 4`"):
        collect(made.with_columns(**{f"d{k}": col(f"c{k}") * 4 for k in range(20, 83)}), 8)
    with pytest.raises(ComputeError, match="integer overflow in the sum `s77`"):
        collect(made.union(made).group_by().agg(**{f"s{k}": col(f"c{k}").sum() for k in range(30, 90)}), 8)


def test_columns_of_one_shape_share_a_part(collect: Callable[..., pa.Table], monkeypatch: pytest.MonkeyPatch) -> None:
    texts: list[str] = []
    emit_object = jit.emit

    def emit(text: str, *args: Any) -> bytes:
        texts.append(text)
        return emit_object(text, *args)

    monkeypatch.setattr(jit, "emit", emit)
    wide = pa.table({f"c{k}": rng.random(10) if k % 2 else rng.integers(0, 9, 10) for k in range(200)})
    found = collect(si.from_arrow(wide).filter(col("c0") > 3), parts.MAX_IN_ONE_FUNCTION)
    assert found.equals(wide.filter(pa.compute.greater(wide["c0"], 3)))
    assert texts[0].count("define internal") == 2


@pytest.mark.parametrize(("what", "most_s"), [("filter", 3), ("sums", 3), ("computed", 3)])
def test_wide_kernels_compile_in_linear_time(collect: Callable[..., pa.Table], what: str, most_s: float) -> None:
    """Over 60, 26 and 15 s in one function; the bars leave a busy machine a factor of five."""
    count = {"filter": 2000, "sums": 1000, "computed": 400}[what]
    wide = pa.table({f"c{k}": rng.random(100) for k in range(count)})
    names, source = wide.column_names, si.from_arrow(wide)
    made = {"filter": source.filter(col("c0") > 0.5),
            "sums": source.group_by().agg(**{f"s{name}": col(name).sum() for name in names}),
            "computed": source.select(**{f"d{name}": col(name) * k for k, name in enumerate(names)})}[what]
    started = time.process_time()
    collect(made, parts.MAX_IN_ONE_FUNCTION)
    assert time.process_time() - started < 5 * most_s
