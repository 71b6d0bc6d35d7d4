"""Dictionaries that change from batch to batch: other words, nulls among them, codes of every width."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pyarrow as pa
import pytest

import scalein as si
from scalein import col
from scalein.kernels import prepare
from tests.scale import every_way

INT32, TEXT = pa.int32(), pa.string()
WORDS = ["view", "click", "a purchase, at last", "", "straße", "the same beginning 1", "the same beginning 2"]


def _batch(
    words: list[str | None], rows: int, seed: int, index: pa.DataType, values: pa.DataType, nulls: bool
) -> pa.RecordBatch:
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, len(words), rows)
    indices = pa.array(codes, index, mask=rng.random(rows) < 0.2 if nulls else None)
    return pa.record_batch(
        {"d": pa.DictionaryArray.from_arrays(indices, pa.array(words, values)), "x": pa.array(codes % 5)}
    )


def _batches(index: pa.DataType = INT32, values: pa.DataType = TEXT, *, null_words: bool = False,
             words: int = 40) -> list[pa.RecordBatch]:  # fmt: skip
    """Each batch has words of its own, in an order of its own; some have nulls, some have a null for a word."""
    made = []
    for k in range(6):
        mine: list[str | None] = [f"word {n} of a dictionary" for n in range(3 * k, 3 * k + words)][
            :: -1 if k % 2 else 1
        ] + WORDS[k:]
        if null_words and k in (1, 3):
            mine[1] = None
        made.append(_batch(mine, 3000, k, index, values, nulls=k in (3, 4)))
    return made


def _flow(batches: list[pa.RecordBatch], source: str) -> si.Flow:
    if source == "reader":
        return si.from_batches(iter(batches), batches[0].schema)
    return si.from_arrow(pa.Table.from_batches(batches))


def _rows(batches: list[pa.RecordBatch]) -> list[tuple[str | None, int]]:
    return [(d, x) for b in batches for d, x in zip(b["d"].to_pylist(), b["x"].to_pylist(), strict=True)]


@every_way
@pytest.mark.parametrize("null_words", [False, True], ids=["", "null words"])
@pytest.mark.parametrize("values", [pa.string(), pa.large_string()], ids=str)
@pytest.mark.parametrize("index", [pa.int8(), pa.uint32(), pa.int64()], ids=str)
def test_groups_by_word(index: pa.DataType, values: pa.DataType, null_words: bool, source: str, workers: int) -> None:
    batches = _batches(index, values, null_words=null_words)
    found = _flow(batches, source).group_by("d").agg(n=si.count()).collect(workers=workers)
    assert dict(zip(found["d"].to_pylist(), found["n"].to_pylist(), strict=True)) == Counter(
        d for d, _ in _rows(batches)
    )


@every_way
def test_more_words_than_a_direct_table_holds(source: str, workers: int) -> None:
    """Ids that outgrow the table: it widens, then the rest is hashed."""
    batches = [
        _batch([f"{k} {n}" for n in range(8 * 9**k)], 8000, k, pa.int32(), pa.string(), nulls=k == 2) for k in range(5)
    ]
    found = _flow(batches, source).group_by("d", "x").agg(n=si.count()).collect(workers=workers)
    got = {(d, x): n for d, x, n in zip(*(found[c].to_pylist() for c in found.column_names), strict=True)}
    assert got == Counter(_rows(batches))


@every_way
@pytest.mark.parametrize("null_words", [False, True], ids=["", "null words"])
def test_filters_and_new_columns_follow_the_words(null_words: bool, source: str, workers: int) -> None:
    batches = _batches(pa.int16(), null_words=null_words) * 3
    flow = _flow(batches, source).filter(col("d").str.ends_with("y") | (col("d") == "view"))
    found = flow.select("d", "x", n=col("d").str.len(), cut=col("d").str.slice(2, 3)).collect(workers=workers)
    want = [(d, x, len(d), d[2:5]) for d, x in _rows(batches) if d is not None and (d.endswith("y") or d == "view")]
    assert list(zip(*(found[c].to_pylist() for c in found.column_names), strict=True)) == want


@every_way
@pytest.mark.parametrize("null_words", [False, True], ids=["", "null words"])
def test_sums_of_what_is_looked_up(null_words: bool, source: str, workers: int) -> None:
    batches = _batches(null_words=null_words)
    flow = _flow(batches, source).group_by("x").agg(s=col("d").str.len().sum(), n=col("d").count())
    want = {}
    for d, x in _rows(batches):
        total, count = want.get(x, (0, 0))
        want[x] = (total + len(d or ""), count + (d is not None))
    found = flow.collect(workers=workers)
    got = dict(
        zip(found["x"].to_pylist(), zip(found["s"].to_pylist(), found["n"].to_pylist(), strict=True), strict=True)
    )
    assert got == want


def test_codes_below_nulls_may_be_anything() -> None:
    codes = pa.array([0, 1_000_000_000, 1, -5, 0], pa.int32())
    hidden = pa.Array.from_buffers(pa.int32(), 5, [pa.py_buffer(bytes([0b10101])), codes.buffers()[1]])
    column = pa.DictionaryArray.from_arrays(hidden, pa.array(["one", "another one of these"]), safe=False)
    table = pa.table({"d": column})
    assert si.from_arrow(table).select(n=col("d").str.len(), s=col("d").str.slice(0, 3)).collect()["s"].to_pylist() == [
        "one", None, "ano", None, "one"]  # fmt: skip
    found = si.from_arrow(table).group_by("d").agg(n=si.count()).collect()
    assert dict(zip(found["d"].to_pylist(), found["n"].to_pylist(), strict=True)) == {
        "one": 2,
        "another one of these": 1,
        None: 2,
    }


def test_a_dictionary_without_words() -> None:
    column = pa.DictionaryArray.from_arrays(pa.array([None, None], pa.int8()), pa.array([], pa.string()))
    flow = si.from_arrow(pa.table({"d": column}))
    assert flow.group_by("d").agg(n=si.count()).collect().to_pylist() == [{"d": None, "n": 2}]
    assert flow.filter(col("d") == "x").collect().num_rows == 0
    assert flow.select(n=col("d").str.len()).collect()["n"].to_pylist() == [None, None]


_D = col("d")
_CONDITIONS = {
    "equal": _D == "click", "order": _D > "straße", "start": _D.str.starts_with("word 1"), "end": _D.str.ends_with("y"),
    "contains": _D.str.contains("ß"), "slice": _D.str.slice(-3, 2) == "ar", "length": _D.str.len() / 4 > 3.5,
    "in": _D.is_in(["view", "word 7 of a dictionary"]),
    "in many": _D.is_in([f"word {n} of a dictionary" for n in range(40)]),
    "in or null": _D.is_in(["view", None]), "both": (_D > "s") & ~_D.str.contains("2"),
    "either": (_D == "view") | (_D == ""), "cast": _D.str.len().cast(pa.float32()) * 2 > 15,
}  # fmt: skip


@pytest.mark.parametrize("few_words", [0, 1 << 20], ids=["by a kernel", "in Python"])
@pytest.mark.parametrize("name", _CONDITIONS)
def test_a_table_of_values_has_what_text_would_give(name: str, few_words: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """An expression over a dictionary column is computed once a word: as constants are, or by a kernel."""
    monkeypatch.setattr(prepare, "MAX_PYTHON_VALUES", few_words)
    table = pa.Table.from_batches(_batches(null_words=True))
    plain = table.set_column(0, "d", table["d"].cast(pa.string()))
    condition = _CONDITIONS[name]
    flows = [si.from_arrow(each).select("x", is_it=condition) for each in (table, plain)]
    assert flows[0].collect().equals(flows[1].collect())
    assert si.from_arrow(table).filter(condition).collect()["x"].equals(
        si.from_arrow(plain).filter(condition).collect()["x"])


def test_a_table_over_many_words_is_not_made_word_by_word(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(expr: object) -> None:
        raise AssertionError("Python computes each word")

    monkeypatch.setattr(prepare, "python_function", refuse)
    words = pa.array([f"word {n}" for n in range(prepare.MAX_PYTHON_VALUES + 1)])
    codes = pa.array(np.arange(len(words), dtype=np.int32)[::-1])
    flow = si.from_arrow(pa.table({"d": pa.DictionaryArray.from_arrays(codes, words)}))
    assert flow.filter(_D.str.ends_with("99")).group_by().agg(n=si.count()).collect().to_pydict() == {"n": [40]}
