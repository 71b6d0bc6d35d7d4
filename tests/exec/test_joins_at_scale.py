"""Joins that expand beyond a block, follow one another, or probe by every kind of key."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

import scalein as si
from scalein import col
from scalein.exec import join_build
from tests.scale import assert_same_rows, by_duckdb, every_way, source_of


def _ints(seed: int, low: int, high: int, rows: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(low, high, rows)


@every_way
@pytest.mark.parametrize("key", ["direct", "hash", "string"])
@pytest.mark.parametrize("how", ["inner", "left"])
def test_one_key_with_thousands_of_matches(how: str, key: str, source: str, workers: int) -> None:
    def keys(numbers: np.ndarray) -> pa.Array:
        if key == "string":
            return pa.array([f"key number {n} of many" for n in numbers])
        return pa.array(numbers * (10**12 if key == "hash" else 1))

    left = pa.table({"k": keys(_ints(1, 0, 40, 300)), "x": np.arange(300)})
    heavy = np.concatenate([np.full(5000, 7), _ints(2, 8, 30, 600), np.arange(50, 60)])
    right = pa.table(
        {"k": keys(heavy), "y": np.arange(len(heavy)), "s": pa.array([f"payload {n}" for n in range(len(heavy))])}
    )
    got = source_of(left, source).join(right, on="k", how=how).collect(workers=workers)
    want = by_duckdb(f"SELECT l.k, x, y, s FROM l {how} JOIN r ON l.k = r.k ORDER BY x, y", l=left, r=right)
    assert want.num_rows > 20_000
    assert_same_rows(got, want)  # matches come in the order of both tables
    counted = source_of(left, source).join(right, on="k", how=how).group_by("s").agg(n=si.count(), t=col("x").sum())
    want = by_duckdb(
        f"SELECT s, count(*) AS n, sum(x)::BIGINT AS t FROM l {how} JOIN r ON l.k = r.k GROUP BY s", l=left, r=right
    )
    assert_same_rows(counted.collect(workers=workers), want, ["s"])


@every_way
@pytest.mark.parametrize("key", ["direct", "hash", "string"])
@pytest.mark.parametrize(("how", "sql"), [("right", "right"), ("outer", "full")])
@pytest.mark.parametrize("repeated", [1, 3])
def test_all_workers_mark_the_rows_that_match(how: str, sql: str, key: str, repeated: int, source: str,
                                              workers: int) -> None:
    def keys(numbers: np.ndarray, holes: int) -> pa.Array:
        mask = np.arange(len(numbers)) % holes == 0
        if key == "string":
            return pa.array([f"key number {n} of many" for n in numbers], mask=mask)
        return pa.array(numbers * (10**12 if key == "hash" else 1), mask=mask)

    left = pa.table({"k": keys(_ints(1, 0, 30_000, 60_000), 97), "x": np.arange(60_000)})
    numbers = np.repeat(_ints(2, 0, 1 << 31, 20_000).argsort(), repeated)
    right = pa.table({"k": keys(numbers + 15_000, 89), "y": np.arange(len(numbers))})
    got = source_of(left, source).filter(col("x") % 7 != 0).join(right, on="k", how=how).collect(workers=workers)
    want = by_duckdb(f"""SELECT coalesce(l.k, r.k) AS k, x, y FROM (SELECT * FROM l WHERE x % 7 <> 0) l {sql} JOIN r
        ON l.k = r.k ORDER BY x NULLS LAST, y""", l=left, r=right)
    assert want["x"].null_count > 5_000
    assert_same_rows(got, want)  # unmatched rows come last, in the table's order


@every_way
def test_a_cross_join_of_many_rows(source: str, workers: int) -> None:
    left, right = pa.table({"x": np.arange(3000)}), pa.table({"y": np.arange(500), "s": [f"s{k}" for k in range(500)]})
    pairs = source_of(left, source).join(right, how="cross")
    got = pairs.filter((col("x") + col("y")) % 5 == 0).collect(workers=workers)
    want = by_duckdb("SELECT x, y, s FROM l, r WHERE (x + y) % 5 = 0 ORDER BY x, y", l=left, r=right)
    assert_same_rows(got, want)
    assert source_of(left, source).join(right, how="cross").count(workers=workers) == 1_500_000


@every_way
def test_two_joins_that_both_expand(source: str, workers: int) -> None:
    left = pa.table(
        {
            "a": _ints(3, 0, 50, 2000),
            "b": pa.array([f"the b named {n}" for n in _ints(4, 0, 40, 2000)]),
            "x": np.arange(2000),
        }
    )
    by_a = pa.table({"a": _ints(5, 0, 60, 400), "p": np.arange(400)})
    by_b = pa.table({"b": pa.array([f"the b named {n}" for n in _ints(6, 0, 60, 300)]), "q": np.arange(300)})
    only = pa.table({"a": np.arange(5, 45)})
    flow = source_of(left, source).join(by_a, on="a").filter(col("p") % 3 != 1).join(by_b, on="b", how="left")
    got = flow.join(only, on="a", how="semi").collect(workers=workers)
    want = by_duckdb(
        """SELECT l.a, l.b, x, p, q FROM l JOIN by_a ON l.a = by_a.a LEFT JOIN by_b ON l.b = by_b.b
        WHERE p % 3 <> 1 AND l.a IN (SELECT a FROM only_) ORDER BY x, p, q""",
        l=left,
        by_a=by_a,
        by_b=by_b,
        only_=only,
    )
    assert want.num_rows > 30_000
    assert_same_rows(got, want)


PAYLOAD = [
    pa.bool_(),
    pa.int8(),
    pa.uint64(),
    pa.float32(),
    pa.float64(),
    pa.string(),
    pa.large_string(),
    pa.date32(),
    pa.timestamp("us"),
    pa.timestamp("ns", "UTC"),
    pa.duration("ms"),
    pa.dictionary(pa.int8(), pa.string()),
]


@pytest.mark.parametrize("sparse", [1, 2, 10**9], ids=["by key", "direct", "hash"])
@pytest.mark.parametrize("nulls", [False, True], ids=["", "nulls"])
def test_payload_of_every_type(nulls: bool, sparse: int) -> None:
    keys = np.arange(0, 3000, 3)
    columns = {}
    for number, type_ in enumerate(PAYLOAD):
        values = _ints(number, 0, 100, len(keys))
        mask = values % 7 == 0 if nulls else np.zeros(len(keys), bool)
        if pa.types.is_dictionary(type_):
            array = pa.array([f"the word {v}" for v in values], pa.string(), mask=mask).dictionary_encode().cast(type_)
        elif pa.types.is_string(type_) or pa.types.is_large_string(type_):
            array = pa.array([f"the word {v}" for v in values], type_, mask=mask)
        elif pa.types.is_boolean(type_):
            array = pa.array(values % 2 == 0, mask=mask)
        else:
            array = pa.array(values.astype(np.int32), pa.int32(), mask=mask)
            array = (array.cast(pa.int64()) if type_ not in (pa.date32(),) else array).cast(type_)
        columns[f"c{number}"] = array
    right = pa.table({"k": keys * sparse, **columns})
    left = pa.table(
        {"k": pa.array(_ints(99, -10, 3010, 5000) * sparse, mask=_ints(98, 0, 9, 5000) == 0), "x": np.arange(5000)}
    )
    place = {key: n for n, key in enumerate((keys * sparse).tolist())}
    rows = pa.array([place.get(k) for k in left["k"].to_pylist()], pa.int64())
    got = si.from_arrow(left).join(right, on="k", how="left").collect()
    for name, column in columns.items():
        want = column.take(rows)
        assert got[name].combine_chunks().equals(want.cast(got[name].type)), name


@pytest.mark.parametrize(
    "type_", [pa.int8(), pa.int16(), pa.uint8(), pa.uint16(), pa.date32(), pa.timestamp("s")], ids=str
)
def test_narrow_keys_with_a_wide_range(type_: pa.DataType) -> None:
    """The distance of two int8 does not fit an int8."""
    low, high = {8: (-100, 100), 16: (-20_000, 20_000)}.get(type_.bit_width, (-50_000, 50_000))
    low = 0 if str(type_).startswith("u") else low
    physical = pa.int32() if type_ == pa.date32() else pa.int64()
    keys = pa.array(np.arange(low, high)).cast(physical).cast(type_)
    right = pa.table({"k": keys, "y": np.arange(len(keys))})
    double = pa.concat_tables([right.slice(0, len(keys) - 1), right])
    assert si.from_arrow(right).join(right, on="k").filter(col("y") != col("y_right")).collect().num_rows == 0
    assert si.from_arrow(right).join(double, on="k").collect().num_rows == 2 * len(keys) - 1
    assert si.from_arrow(double).join(right.slice(3), on="k", how="anti").collect().num_rows == 6


@pytest.mark.parametrize("low", [-(2**63), 2**63 - 1 - 400], ids=["least int64", "greatest int64"])
@pytest.mark.parametrize("step", [1, 2])
def test_keys_at_the_ends_of_int64(low: int, step: int) -> None:
    keys = pa.array([low + step * n for n in range(200)], pa.int64())
    right = pa.table({"k": keys, "y": np.arange(200)})
    probes = pa.table({"k": pa.array([low + n for n in range(0, 400)] + [-(2**63), 2**63 - 1, 0])})
    got = si.from_arrow(probes).join(right, on="k").collect()
    known = dict(zip(keys.to_pylist(), range(200), strict=True))
    assert got["y"].to_pylist() == [known[k] for k in probes["k"].to_pylist() if k in known]


@every_way
@pytest.mark.parametrize("how", ["inner", "left", "semi", "anti"])
def test_two_keys_one_of_them_text_with_nulls(how: str, source: str, workers: int) -> None:
    def table(seed: int, rows: int) -> pa.Table:
        text = pa.array(
            [f"a long enough text {n}" for n in _ints(seed, 0, 300, rows)], mask=_ints(seed + 1, 0, 12, rows) == 0
        )
        return pa.table(
            {
                "a": pa.array(_ints(seed + 2, 0, 50, rows), mask=_ints(seed + 3, 0, 9, rows) == 0),
                "b": text,
                "x": np.arange(rows),
            }
        )

    left, right = table(10, 120_000), table(20, 9000)
    got = source_of(left, source).join(right, on=["a", "b"], how=how).collect(workers=workers)
    on = "ON l.a = r.a AND l.b = r.b"
    columns = "l.a, l.b, l.x" if how in ("semi", "anti") else "l.a, l.b, l.x, r.x AS x_right"
    want = by_duckdb(f"SELECT {columns} FROM l {how} JOIN r {on} ORDER BY ALL", l=left, r=right)
    assert_same_rows(got, want, list(want.column_names))


def test_keys_of_a_dictionary_with_a_null_for_a_word() -> None:
    words = pa.array(["one of the words", None, "another of the words"])
    right = pa.table(
        {"k": pa.DictionaryArray.from_arrays(pa.array([0, 1, 2, None, 0], pa.int8()), words), "y": range(5)}
    )
    left = pa.table({"k": ["one of the words", None, "another of the words", "none of them"]})
    assert si.from_arrow(left).join(right, on="k").collect()["y"].to_pylist() == [0, 4, 2]
    assert si.from_arrow(right).join(left, on="k", how="anti").collect()["y"].to_pylist() == [1, 3]


@pytest.mark.parametrize("how", ["inner", "left", "semi", "anti"])
@pytest.mark.parametrize("key", [pa.int32(), pa.string(), pa.float64()], ids=str)
def test_tables_without_rows(key: pa.DataType, how: str) -> None:
    right = pa.table({"k": pa.array([], key), "y": pa.array([], pa.string())})
    left = pa.table({"k": pa.array(["1", None, "2"]).cast(key)})
    got = si.from_arrow(left).join(right, on="k", how=how).collect()
    assert got.num_rows == (3 if how in ("left", "anti") else 0)
    assert how != "left" or got["y"].null_count == 3
    nobody = si.from_arrow(left.slice(0, 0)).join(left, on="k", how=how)
    assert nobody.collect().num_rows == 0


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("key", ["direct", "hash", "string"])
def test_text_of_tables_that_does_not_repeat(key: str, workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no dictionary; what follows the join reads, groups, sorts and finds it all the same."""
    monkeypatch.setattr(join_build, "ENCODED_SAMPLE", 16)

    def keys(numbers: np.ndarray) -> pa.Array:
        return pa.array([f"key {n}" for n in numbers]) if key == "string" else pa.array(
            numbers * (10**12 if key == "hash" else 1))

    left = pa.table({"k": keys(_ints(3, 0, 700, 5_000)), "x": np.arange(5_000)})
    numbers = np.concatenate([np.arange(600), np.arange(100)])
    texts = [None if n % 13 == 0 else f"{'long ' * (n % 5)}text ü {n}" for n in range(700)]
    right = pa.table({"k": keys(numbers), "y": np.arange(700), "s": texts, "few": [f"f{n % 3}" for n in range(700)]})
    for how, sql in (("inner", "inner"), ("left", "left"), ("right", "right"), ("outer", "full")):
        got = si.from_arrow(left).join(right, on="k", how=how).select("x", "y", "s", "few").collect(workers=workers)
        want = by_duckdb(f"SELECT x, y, s, few FROM l {sql} JOIN r ON l.k = r.k", l=left, r=right)
        assert_same_rows(got, want, ["x", "y"])
    joined = si.from_arrow(left).join(right, on="k", how="left").filter(~col("s").str.ends_with("7"))
    grouped = joined.group_by("s", "few").agg(n=si.count(), t=col("x").sum(), lo=col("s").min())
    want = by_duckdb("""SELECT s, few, count(*) AS n, sum(x)::BIGINT AS t, min(s) AS lo FROM l LEFT JOIN r ON l.k = r.k
        WHERE NOT s LIKE '%7' GROUP BY ALL""", l=left, r=right)
    assert_same_rows(grouped.collect(workers=workers), want, ["s", "few"])


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("key", ["direct", "sparse", "hash"])
@pytest.mark.parametrize("how", ["semi", "anti"])
def test_tables_that_test_presence_have_repeated_keys(how: str, key: str, workers: int) -> None:
    factor = {"direct": 1, "sparse": 3, "hash": 10**12}[key]
    left = pa.table({"k": pa.array(_ints(4, -50, 900, 20_000) * factor, mask=np.arange(20_000) % 11 == 0),
                     "x": np.arange(20_000)})
    right = pa.table({"k": pa.array(_ints(5, 0, 500, 3_000) * factor, mask=np.arange(3_000) % 7 == 0)})
    got = si.from_arrow(left).join(right, on="k", how=how).collect(workers=workers)
    is_in = "" if how == "semi" else "NOT "
    want = by_duckdb(f"SELECT * FROM l WHERE {is_in}EXISTS (SELECT 1 FROM r WHERE r.k = l.k)", l=left, r=right)
    assert_same_rows(got, want, ["x"])
