"""What comes out: chunks that fill up, long strings, sizes around a block, order, and when rows arrive."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

import scalein as si
from scalein import col
from scalein.layout import BLOCK_ROWS
from tests.scale import every_way, source_of

SIZES = sorted({n + d for n in (64, BLOCK_ROWS, 2 * BLOCK_ROWS, 1024) for d in (-1, 0, 1)} | {1, 2, 3000})
workers_1_and_3 = pytest.mark.parametrize("workers", [1, 3])


@pytest.mark.parametrize("rows", SIZES)
@pytest.mark.parametrize("cpu", ["native", "x86-64-v3", "x86-64"])
def test_filters_keep_the_right_rows_of_each_block(cpu: str, rows: int) -> None:
    x = np.arange(rows)
    table = pa.table(
        {"x": x, "s": pa.array([f"{n} with some text" for n in x]), "b": x % 3 == 0, "n": pa.array(x, mask=x % 5 == 1)}
    )
    in_block = x % BLOCK_ROWS
    masks = {"all": x >= 0, "none": x < 0, "first": in_block == 0, "last": in_block == BLOCK_ROWS - 1,
             "end": x == rows - 1, "but first": in_block != 0, "but last": in_block != BLOCK_ROWS - 1,
             "odd": x % 2 == 1}  # fmt: skip
    for name, mask in masks.items():
        given = table.append_column("keep", pa.array(mask))
        got = si.from_arrow(given).filter(col("keep")).drop("keep").collect(workers=1, cpu=cpu)
        assert got.equals(table.filter(pa.array(mask))), name
        counted = (
            si.from_arrow(given).filter(col("keep")).group_by().agg(n=si.count(), s=col("x").sum()).collect(cpu=cpu)
        )
        assert counted.to_pylist() == [{"n": int(mask.sum()), "s": int(x[mask].sum()) if mask.any() else None}], name


@every_way
def test_more_rows_than_a_chunk(source: str, workers: int) -> None:
    rows = 2_500_000
    x = np.random.default_rng(1).integers(0, 10**6, rows)
    table = pa.table({"x": x, "f": pa.array(x / 2, mask=x % 100 == 0)})
    got = source_of(table, source).filter(col("x") >= 3).select("f", y=col("x") * 2 + 1).collect(workers=workers)
    keep = pa.array(x >= 3)
    assert got["f"].combine_chunks().equals(table["f"].filter(keep).combine_chunks())
    assert np.array_equal(got["y"].to_numpy(), x[x >= 3] * 2 + 1)


@workers_1_and_3
@pytest.mark.parametrize("type_", [pa.string(), pa.large_string(), pa.string_view()], ids=str)
def test_more_text_than_a_chunk(type_: pa.DataType, workers: int) -> None:
    texts = pa.array([f"{n:07d}" * (n % 40) for n in range(200_000)])
    table = pa.table({"x": np.arange(len(texts)), "s": texts.cast(type_)})
    got = si.from_arrow(table).filter(col("x") != 17).select("s", cut=col("s").str.slice(3)).collect(workers=workers)
    want = texts.filter(pa.array(np.arange(len(texts)) != 17))
    assert got["s"].type == type_
    assert got["s"].cast(pa.string()).combine_chunks().equals(want)
    assert got["cut"].cast(pa.string()).combine_chunks().equals(pc.utf8_slice_codeunits(want, 3))


@pytest.mark.parametrize("type_", [pa.string(), pa.large_string(), pa.string_view()], ids=str)
def test_giant_strings(type_: pa.DataType) -> None:
    giant = "0123456789" * 2_000_000
    texts = ["a", giant, None, "b" * 13, giant[5:], ""] * 2
    table = pa.table({"s": pa.array(texts, type_), "x": range(len(texts))})
    flow = si.from_arrow(table)
    assert flow.filter(col("x") >= 1).collect()["s"].to_pylist() == texts[1:]
    assert flow.select(n=col("s").str.len()).collect()["n"].to_pylist() == [
        None if t is None else len(t) for t in texts
    ]
    found = flow.group_by("s").agg(n=si.count()).collect()
    assert set(found["s"].to_pylist()) == set(texts)
    assert found["n"].to_pylist() == [2] * 6
    joined = flow.join(table.slice(1, 1), on="s", how="semi").collect()
    assert joined["x"].to_pylist() == [1, 7]


def test_text_that_32_bit_offsets_cannot_reach_is_refused() -> None:
    """Views of one string, so that more than 2 GiB of text cost nothing to have."""
    size, rows = 9 << 20, BLOCK_ROWS
    view = np.array([size, int.from_bytes(b"xxxx"), 0, 0], np.int32)
    views = pa.py_buffer(np.tile(view, rows))
    column = pa.Array.from_buffers(pa.string_view(), rows, [None, views, pa.py_buffer(b"x" * size)])
    flow = si.from_arrow(pa.table({"s": column}))
    assert flow.group_by("s").agg(n=si.count()).collect()["n"].to_pylist() == [rows]
    with pytest.raises(si.ScaleinError, match="text"):
        flow.filter(col("s") != "").collect(workers=1)


@every_way
def test_stateless_flows_keep_their_order(source: str, workers: int) -> None:
    rows = 1_500_000
    table = pa.table({"x": np.arange(rows), "k": np.arange(rows) % 1000})
    other = pa.table({"k": np.arange(0, 1000, 3), "y": np.arange(0, 1000, 3) * 2})
    flow = (
        source_of(table, source, 9973).filter(col("x") % 7 != 0).join(other, on="k").with_columns(z=col("x") + col("y"))
    )
    x = np.arange(rows)
    x = x[(x % 7 != 0) & (x % 1000 % 3 == 0)]
    got = flow.collect(workers=workers)
    assert np.array_equal(got["x"].to_numpy(), x)
    assert np.array_equal(got["z"].to_numpy(), x + x % 1000 * 2)


def _endless(seen: list[int]) -> Iterator[pa.RecordBatch]:
    while True:
        seen.append(1)
        yield pa.record_batch({"x": np.arange(1000)})


SCHEMA = pa.schema([("x", pa.int64())])


@workers_1_and_3
def test_limit_stops_reading_the_source(workers: int) -> None:
    seen: list[int] = []
    got = si.from_batches(_endless(seen), SCHEMA).filter(col("x") >= 10).limit(2500).collect(workers=workers)
    assert got.num_rows == 2500
    assert got["x"][990].as_py() == 10
    assert len(seen) <= 3 + 3 * workers


@workers_1_and_3
def test_batches_arrive_while_the_source_goes_on(workers: int) -> None:
    seen: list[int] = []
    flow = si.from_batches(_endless(seen), SCHEMA).with_columns(y=col("x") * 2)
    for number, batch in enumerate(flow.batches(workers=workers)):
        assert batch["y"][999].as_py() == 1998
        assert len(seen) <= number + 3 + 3 * workers
        if number == 20:
            break


@workers_1_and_3
def test_a_run_may_be_left_and_begun_again(workers: int) -> None:
    flow = si.from_arrow(pa.table({"x": np.arange(2_000_000)})).filter(col("x") % 2 == 0)
    first = next(iter(flow.batches(workers=workers)))
    assert first["x"][1].as_py() == 2
    assert flow.collect(workers=workers).num_rows == 1_000_000
    assert flow.union(flow).group_by().agg(n=si.count()).collect(workers=workers)["n"].to_pylist() == [2_000_000]
