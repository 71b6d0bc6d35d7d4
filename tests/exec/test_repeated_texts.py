"""What pyarrow computes of texts that repeat is computed once for each text: the rows are the same."""

from __future__ import annotations

from random import Random

import pyarrow as pa
import pytest

import scalein as si
from scalein import col
from scalein.exec import host
from tests import oracle
from tests.same import assert_same

PATHS = [None, "", "a/b/c", "/", "x=1/ÄÖ/z", "key=7", "no", "a//b", "key=19/ q "]


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())])
@pytest.mark.parametrize("repeats", [True, False])
def test_texts_that_repeat_give_the_same_rows(repeats: bool, kind: pa.DataType) -> None:
    random = Random(f"{repeats} {kind}")
    texts = [random.choice(PATHS) if repeats else f"{random.choice(PATHS)}/{n}" for n in range(1000)]
    table = pa.table({"n": list(range(1000)), "t": pa.array(texts, kind)})
    text = col("t").str
    flow = si.from_arrow(table).select(
        "n", number=text.extract("(key|x)=([0-9]*)", 2), second=text.split_part("/", 2),
        has=text.matches("^[a-z]").fill_null(True), last=text.split_part("/", -1).str.upper(),
        filled=text.replace("/", "-").fill_null("none"), size=text.strip().str.len())
    assert_same(flow.collect(), oracle.collect(flow), ordered=True)


def test_they_are_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[int] = []
    compute = host.evaluate

    def counted(expr: object, batch: pa.RecordBatch) -> pa.Array:
        rows.append(batch.num_rows)
        return compute(expr, batch)  # type: ignore[arg-type]

    monkeypatch.setattr(host, "evaluate", counted)
    flow = si.from_arrow(pa.table({"t": ["a/1", "b/2", None] * 1000}))
    flow.select(p=col("t").str.split_part("/", 1), q=col("t").str.split_part("/", 2)).collect()
    assert rows == [3, 3]
    rows.clear()
    flow.select(p=col("t").str.lower()).collect()  # as cheap as finding the texts
    assert rows == [3000]
