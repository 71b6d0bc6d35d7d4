"""Many small batches: coalesced before a kernel reads them, in the same order; the output has few chunks."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc
import pytest

import scalein as si
from scalein import Flow, col
from scalein.exec.morsels import COALESCED_BYTES, COALESCED_ROWS, SMALL_BYTES, coalesce

ROWS = 100_000
TABLE = pa.table({
    "k": pa.array([k * 7919 % 1000 for k in range(ROWS)], pa.int64()),
    "v": pa.array([None if k % 11 == 0 else k for k in range(ROWS)], pa.int64()),
    "s": pa.array([f"text {k % 37}" for k in range(ROWS)]),
    "t": pa.array(range(ROWS), pa.timestamp("ms")),
})  # fmt: skip
BATCHES = TABLE.to_batches(max_chunksize=100)
MAX_CHUNKS = -(-ROWS // COALESCED_ROWS)


def flows() -> dict[str, Flow]:
    return {"a table of many chunks": si.from_arrow(pa.Table.from_batches(BATCHES)),
            "a list of batches": si.from_batches(BATCHES)}  # fmt: skip


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("given", flows())
def test_a_filter_gives_few_chunks_in_order(given: str, workers: int) -> None:
    flow = flows()[given].filter(col("v") % 2 == 0).select("k", "s", twice=col("v") * 2)
    found = flow.collect(workers=workers)
    wanted = TABLE.filter(pc.equal(pc.bit_wise_and(TABLE["v"], 1), 0))
    assert found["twice"].to_pylist() == [2 * v for v in wanted["v"].to_pylist()]
    assert found["s"].to_pylist() == wanted["s"].to_pylist()
    assert found["k"].num_chunks <= MAX_CHUNKS


@pytest.mark.parametrize("workers", [1, 2])
def test_groups_are_those_of_one_batch(workers: int) -> None:
    for keys in (["k"], ["s"], [si.tumbling("t", "1s")], ["k", si.sliding("t", "10s", every="2s")], []):
        outputs = {"n": si.count(), "v": col("v").sum(), "a": col("v").first(), "z": col("v").last()}
        many, one = (source.group_by(*keys).agg(**outputs).collect(workers=workers)
                     for source in (si.from_batches(BATCHES), si.from_arrow(TABLE)))  # fmt: skip
        order = [(name, "ascending") for name in many.column_names]
        assert many.sort_by(order).to_pydict() == one.sort_by(order).to_pydict()


def test_batches_of_a_generator_come_out_one_by_one() -> None:
    pulled = 0

    def batches() -> object:
        nonlocal pulled
        for batch in BATCHES:
            pulled += 1
            yield batch

    rows = si.from_batches(batches, TABLE.schema).filter(col("k") >= 0).batches(workers=1)
    assert next(rows).num_rows == 100
    assert pulled == 1


def test_dictionaries_stay_apart_and_come_out_right() -> None:
    parts = [batch.set_column(2, "s", batch["s"].dictionary_encode()) for batch in BATCHES[:300]]
    found = si.from_batches(parts).group_by("s").agg(n=si.count()).collect().sort_by("s")
    wanted = TABLE.slice(0, 30_000).group_by("s").aggregate([("s", "count")]).sort_by("s")
    assert found["s"].to_pylist() == wanted["s"].to_pylist()
    assert found["n"].to_pylist() == wanted["s_count"].to_pylist()


def test_text_that_does_not_fit_one_array_stays_in_its_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_long(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
        raise pa.ArrowInvalid("offset overflow while concatenating arrays")

    monkeypatch.setattr(pa, "concat_batches", too_long)
    assert list(coalesce(BATCHES[:5])) == BATCHES[:5]


def test_under_a_limit_few_rows_with_long_text_are_not_coalesced() -> None:
    long, short = pa.record_batch({"s": ["x" * SMALL_BYTES]}), pa.record_batch({"s": ["x" * (SMALL_BYTES // 2)]})
    assert [batch.num_rows for batch in coalesce([long] * 3, is_limited=True)] == [1, 1, 1]
    pieces = [batch.nbytes for batch in coalesce([short] * 100, is_limited=True)]
    assert len(pieces) > 1
    assert max(pieces) <= COALESCED_BYTES + SMALL_BYTES
