"""Bags, logs and heaps over hundreds of thousands of rows: partitioned, merged from workers, and grown."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

import scalein as si
from scalein import col
from scalein.exec import aggregate, emit, finalize, side_state
from tests import oracle
from tests.same import assert_same
from tests.scale import assert_same_rows, by_duckdb, every_way, source_of

ROWS = 300_000


def _table(groups: int, values: int) -> pa.Table:
    """Keys, numbers with nulls, and texts short and long whose order is not the order of their rows."""
    rng = np.random.default_rng(groups + values)
    numbers = rng.integers(0, values, ROWS)
    texts = np.where(numbers % 3 == 0, "", "a prefix that all the long ones have ").astype(object)
    return pa.table({
        "k": rng.integers(0, groups, ROWS) * 7919,
        "x": pa.array(numbers / 8, mask=numbers % 10 == 3),
        "s": pa.array([f"{text}{n}" for text, n in zip(texts, rng.permutation(numbers).tolist(), strict=True)]),
        "row": np.arange(ROWS),
    })  # fmt: skip


# Many groups are partitioned first; few are found in a direct table or by hash.
sizes = pytest.mark.parametrize(("groups", "values"), [(200_000, 1000), (3, 100_000), (5000, 20), (1, 7)], ids=str)


@every_way
@sizes
def test_values_are_counted_and_ranked(groups: int, values: int, source: str, workers: int,
                                       monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(side_state, "COMPACT_FROM", 1000)  # so that equal values are folded many times
    table = _table(groups, values)
    flow = source_of(table, source).group_by("k").agg(
        n=col("x").n_unique(), texts=col("s").n_unique(), median=col("x").median(), high=col("x").quantile(0.9))
    expected = by_duckdb("""SELECT k, count(DISTINCT x) AS n, count(DISTINCT s) AS texts,
                            quantile_cont(x, 0.5) AS median, quantile_cont(x, 0.9) AS high
                            FROM t GROUP BY k""", t=table)
    assert_same_rows(flow.collect(workers=workers), expected, by=["k"])


@every_way
@sizes
def test_texts_are_picked(groups: int, values: int, source: str, workers: int) -> None:
    table = _table(groups, values)
    flow = source_of(table, source).group_by("k").agg(
        least=col("s").min(), most=col("s").max(), first=col("s").first(), last=col("s").last(),
        at=col("row").arg_max("s"), of=col("s").arg_min("row"))
    expected = by_duckdb("""SELECT k, min(s) AS least, max(s) AS most, first(s ORDER BY row) AS first,
                            last(s ORDER BY row) AS last, first(row ORDER BY s DESC, row) AS at,
                            first(s ORDER BY row) AS of FROM t GROUP BY k""", t=table)
    assert_same_rows(flow.collect(workers=workers), expected, by=["k"])


@every_way
def test_lists_keep_the_order_of_the_source(source: str, workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(side_state, "COMPACT_FROM", 1000)  # so that logs are cut to the best many times
    table = _table(500, 5000)
    flow = source_of(table, source).group_by("k").agg(all=col("s").collect(), best=col("row").top_k(3, by="x"))
    expected = by_duckdb("""SELECT k, list(s ORDER BY row) AS all,
                            list(row ORDER BY x DESC, row) FILTER (WHERE x IS NOT NULL) AS best
                            FROM t GROUP BY k""", t=table)
    cut = [row[:3] for row in expected["best"].to_pylist()]
    expected = expected.set_column(2, "best", pa.array(cut, pa.list_(pa.int64())))
    result = flow.collect(workers=workers)
    assert result.sort_by("k").to_pylist() == expected.sort_by("k").to_pylist()


def test_a_text_that_grows_and_shrinks_uses_its_piece_of_heap_again() -> None:
    lengths = [n % 1000 for n in range(50_000)]
    table = pa.table({"k": [0] * len(lengths), "s": ["x" * n for n in lengths]})
    result = si.from_arrow(table).group_by("k").agg(last=col("s").last(), most=col("s").max()).collect()
    assert result.to_pylist() == [{"k": 0, "last": "x" * 999, "most": "x" * 999}]


def test_one_text_of_many_megabytes() -> None:
    long = "x" * (40 << 20)
    table = pa.table({"k": [1, 2, 1], "s": pa.array([long, "short", "a" + long], pa.large_string())})
    result = si.from_arrow(table).group_by("k").agg(most=col("s").max(), all=col("s").collect()).collect()
    found = {row["k"]: row for row in result.to_pylist()}
    assert found[1]["most"] == long
    assert found[1]["all"] == [long, "a" + long]
    assert found[2]["all"] == ["short"]


def test_quantiles_of_a_long_run_are_selected_by_radix() -> None:
    rng = np.random.default_rng(3)
    values = rng.normal(size=100_000) * 10.0 ** rng.integers(-300, 300, 100_000)
    table = pa.table({"x": np.concatenate((values, [np.nan, np.inf, -np.inf]))})
    shares = [0.0, 0.25, 0.5, 0.999]
    result = si.from_arrow(table).group_by().agg(**{f"q{k}": col("x").quantile(q) for k, q in enumerate(shares)})
    expected = by_duckdb(f"SELECT {', '.join(f'quantile_cont(x, {q}) AS q{k}' for k, q in enumerate(shares))} FROM t",
                         t=table)
    assert_same_rows(result.collect(), expected)


def test_lists_of_more_text_than_an_array_holds_come_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emit, "MAX_TEXT_BYTES", 1000)
    table = pa.table({"k": [n % 50 for n in range(1000)], "s": [f"some longer text {n}" for n in range(1000)]})
    flow = si.from_arrow(table).group_by("k").agg(all=col("s").collect())
    batches = list(flow.batches())
    assert len(batches) > 10
    assert pa.Table.from_batches(batches).sort_by("k")["all"].to_pylist() == [
        [f"some longer text {n}" for n in range(k, 1000, 50)] for k in range(50)]
    monkeypatch.setattr(emit, "MAX_TEXT_BYTES", 100)
    with pytest.raises(si.ScaleinError, match="a list of 'all' has more text"):
        flow.collect()


def test_the_best_do_not_keep_the_bytes_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(side_state, "COMPACT_FROM", 1000)
    taken: list[int] = []
    take = side_state.Heap.use_piece
    monkeypatch.setattr(side_state.Heap, "use_piece", lambda heap, piece, n: (taken.append(n), take(heap, piece, n)))
    table = pa.table({"s": [f"a text that is too long for a record: {n * 7919 % 10_007}" for n in range(10_000)],
                      "x": [n * 7919 % 10_007 for n in range(10_000)]})
    batches = table.to_batches(max_chunksize=500)
    flow = si.from_batches(lambda: iter(batches), table.schema).group_by().agg(best=col("s").top_k(2, by="x"))
    best = sorted(table["x"].to_pylist())[::-1][:2]
    (found,) = flow.collect(workers=1).to_pylist()
    assert found["best"] == [f"a text that is too long for a record: {n}" for n in best]
    assert max(taken) < 200  # behind a cut there are two texts


@every_way
def test_windows_that_slide_are_made_in_parts(source: str, workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aggregate, "PART_VALUES", 500)
    rng = np.random.default_rng(5)
    table = pa.table({"t": np.sort(rng.integers(-100, 900, 3000)), "k": rng.integers(0, 3, 3000),
                      "x": rng.integers(0, 40, 3000), "s": [f"text number {n}" for n in rng.integers(0, 30, 3000)]})

    def build(flow: si.Flow) -> si.Flow:
        groups = flow.group_by("k", si.sliding("t", 50, every=7)).agg(
            n=col("x").n_unique(), q=col("x").median(), all=col("s").collect(), best=col("s").top_k(2, by="x"))
        return groups.filter(col("n") > 3).distinct("k", "window_start")

    expected = oracle.collect(build(si.from_arrow(table)))
    assert_same(build(source_of(table, source)).collect(workers=workers), expected, ordered=False)


def test_values_are_ranked_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls of kernels are short, so that Ctrl-C does not wait for them; that changes no result."""
    rng = np.random.default_rng(1)
    given = pa.table({"k": rng.integers(0, 50, 5000), "one": np.zeros(5000, int), "v": rng.normal(size=5000),
                      "s": pa.array([str(n) for n in rng.integers(0, 1000, 5000)])})  # fmt: skip
    aggregates = {"q": col("v").quantile(0.3), "m": col("v").quantile(0.9), "l": col("s").collect()}
    for key in ("k", "one"):
        flow = si.from_arrow(given).group_by(key).agg(**aggregates)
        monkeypatch.undo()
        want = flow.collect(workers=1).sort_by(key)
        for size, rows in ((37, 10), (1000, 1 << 30)):
            monkeypatch.setattr(finalize, "CALL_PAIRS", size)
            monkeypatch.setattr(finalize, "DETACHED_ROWS", rows)
            assert flow.collect(workers=2).sort_by(key).equals(want)
