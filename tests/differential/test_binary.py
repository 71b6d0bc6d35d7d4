"""Binary, in every Arrow form and of fixed width: bytes that compare, group, join and come out as they went in."""

from __future__ import annotations

from collections.abc import Callable

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import scalein as si
from scalein import ScaleinError, col, when
from scalein.api.column import Column
from scalein.dtypes import from_arrow_type
from tests import oracle
from tests.engines import DUCKDB, Engine, check, each_engine, every_engine, examples
from tests.programs import COMPARISONS, predicates
from tests.strategies import BINARIES, ENCODED, of_types, tables, values

LOOSE = [pa.binary(), pa.large_binary(), pa.binary_view(), ENCODED[3]]
WORDS = [b"", b"a", b"ab\0", b"\xff\xfe\xfd", b"abc", b"twelve bytes", b"thirteen byte", b"\0" * 16, b"x" * 40]


@every_engine
@examples(16)
@given(st.data())
def test_columns_come_through(engine: Engine, data: st.DataObject) -> None:
    schema = of_types(data.draw(st.sampled_from([*BINARIES, *LOOSE])), data.draw(st.sampled_from(BINARIES)), pa.int32())
    table, predicate = data.draw(tables(schema)), data.draw(predicates(schema, 2))
    check(engine, table, lambda flow: flow.filter(predicate), ordered=True)
    check(engine, table, lambda flow: flow.filter(col("c") > 0).select("b", "a", x=col("a")), ordered=True)


@every_engine
@examples(16)
@given(st.data())
def test_comparisons_of_two_forms(engine: Engine, data: st.DataObject) -> None:
    forms = st.sampled_from([*BINARIES, *LOOSE])
    table = data.draw(tables(of_types(data.draw(forms), data.draw(forms))))
    made = {f"out{i}": compare(col("a"), col("b")) for i, compare in enumerate(COMPARISONS)}
    some = when(col("a") < col("b")).then(col("a")).otherwise(col("b"))
    made |= {"least": some, "filled": col("a").fill_null(col("b"))}
    check(engine, table, lambda flow: flow.select(**made), ordered=True)


@every_engine
@examples(16)
@given(st.data())
def test_constants(engine: Engine, data: st.DataObject) -> None:
    table = data.draw(tables(of_types(data.draw(st.sampled_from([*BINARIES, *LOOSE])))))
    word = data.draw(st.sampled_from(WORDS))
    listed = data.draw(st.lists(st.none() | st.sampled_from(WORDS), max_size=5))
    many = [*listed, *(number.to_bytes(3, "big") for number in range(40))]
    made = {"eq": col("a") == word, "lt": col("a") < word, "few": col("a").is_in(listed), "many": col("a").is_in(many),
            "some": col("a").fill_null(word)}  # fmt: skip
    check(engine, table, lambda flow: flow.select(**made), ordered=True)


@every_engine
@examples(12)
@given(st.data())
def test_keys_and_aggregates(engine: Engine, data: st.DataObject) -> None:
    forms = st.sampled_from([*BINARIES, *LOOSE])
    table = data.draw(tables(of_types(data.draw(forms), data.draw(forms), pa.int32())))
    b = col("b")
    made = {"n": si.count(), "lo": b.min(), "hi": b.max(), "f": b.first(), "l": b.last(), "u": b.n_unique(),
            "at": b.arg_min("c")}  # fmt: skip
    keys = data.draw(st.sampled_from([[], ["a"], ["a", "c"]]))
    check(engine, table, lambda flow: flow.group_by(*keys).agg(**made), ordered=False)


@every_engine
@pytest.mark.parametrize("how", ["inner", "left", "semi", "anti"])
@examples(4)
@given(st.data())
def test_joins(engine: Engine, how: str, data: st.DataObject) -> None:
    forms = st.sampled_from([*BINARIES, *LOOSE])
    left = data.draw(tables(of_types(data.draw(forms), pa.int8())))
    right = data.draw(tables(of_types(data.draw(forms), data.draw(forms)), most=64))
    other = si.from_arrow(right)
    check(engine, left, lambda flow: flow.join(other, on="a", how=how), ordered=False)


@every_engine
@examples(2)
@given(st.data())
def test_many_rows_and_groups(engine: Engine, data: st.DataObject) -> None:
    table = data.draw(tables(of_types(data.draw(st.sampled_from(BINARIES)), pa.int64()), least=5000, most=5000))
    check(engine, table, lambda flow: flow.group_by("a").agg(n=si.count(), s=col("b").sum()), ordered=False)


@every_engine
@examples(12)
@given(st.data())
def test_casts(engine: Engine, data: st.DataObject) -> None:
    forms = [pa.binary(), pa.large_binary(), pa.binary_view(), pa.binary(3), pa.string(), pa.large_string()]
    source, target = data.draw(st.sampled_from(forms)), data.draw(st.sampled_from(forms))
    table = data.draw(tables(of_types(source), most=32))
    check(engine, table, lambda flow: flow.select(out=col("a").cast(target)), ordered=True)


@each_engine
def test_text_and_its_bytes(engine: Engine) -> None:
    table = pa.table({"s": ["", "é", None, "abc"], "b": pa.array([b"", "é".encode(), None, b"abc"])})
    made = {"out": col("s").cast(pa.binary()), "back": col("b").cast(pa.string()),
            "eq": col("s").cast(pa.binary()) == col("b")}  # fmt: skip
    found = check(engine, table, lambda flow: flow.select(**made), ordered=True)
    assert found is not None
    assert found.to_pydict() == {"out": [b"", "é".encode(), None, b"abc"], "back": ["", "é", None, "abc"],
                                 "eq": [True, True, None, True]}  # fmt: skip
    bad = pa.table({"b": pa.array([b"ok", b"\xff"])})
    assert check(engine, bad, lambda flow: flow.select(x=col("b").cast(pa.string())), ordered=True) is None
    short = pa.table({"b": pa.array([b"abc", b"ab"])})
    assert check(engine, short, lambda flow: flow.select(x=col("b").cast(pa.binary(3))), ordered=True) is None


@pytest.mark.parametrize("width", [0, 1, 12, 13, 100])
def test_every_width(width: int) -> None:
    items = [bytes([number] * width) if number % 5 else None for number in range(50)]
    table = pa.table({"a": pa.array(items, pa.binary(width)), "n": range(50)}).slice(3, 40)
    flow = si.from_arrow(table)
    for made in (flow.filter(col("n") % 2 == 0), flow.group_by("a").agg(n=si.count(), hi=col("a").max())):
        want = oracle.collect(made)
        found = made.collect()
        assert found.schema.field("a").type == pa.binary(width)
        assert sorted(map(str, found.to_pylist())) == sorted(map(str, want.to_pylist()))


def test_only_nulls_and_nothing() -> None:
    for type_ in [*BINARIES, *LOOSE]:
        dtype = from_arrow_type(type_)
        for rows in (0, 5):
            table = pa.table({"a": pa.nulls(rows, type_), "k": pa.nulls(rows, pa.binary(4))})
            for keys in ([], ["k"]):
                made = {"lo": col("a").min(), "f": col("a").first(), "n": si.count()}
                found = check(DUCKDB, table, lambda flow, k=keys, m=made: flow.group_by(*k).agg(**m), ordered=False)
                assert found is not None
                assert found.schema.field("lo").type == dtype.arrow


@every_engine
@examples(4)
@given(st.data())
def test_a_list_drawn_from_the_column(engine: Engine, data: st.DataObject) -> None:
    type_ = data.draw(st.sampled_from(BINARIES))
    table = data.draw(tables(of_types(type_)))
    listed = data.draw(st.lists(values(from_arrow_type(type_), extreme=False), max_size=30))
    check(engine, table, lambda flow: flow.select(out=col("a").is_in(listed)), ordered=True)


@pytest.mark.parametrize(("made", "says"), [
    (lambda: col("b").str.len(), "takes text, not binary"),
    (lambda: col("b") == "text", "cannot compare binary and str"),
    (lambda: col("b") + b"x", "+ does not take binary"),
    (lambda: col("b") < 5, "cannot compare binary and i64"),
    (lambda: col("b").cast(pa.int64()), "cannot cast binary to i64"),
    (lambda: col("i").cast(pa.binary()), "cannot cast i64 to binary"),
    (lambda: -col("b"), "- takes a number or a duration, not binary"),
    (lambda: col("b").is_in(["a"]), "is_in does not take"),
])  # fmt: skip
def test_what_is_refused(made: Callable[[], Column], says: str) -> None:
    table = pa.table({"b": pa.array([b"a"]), "i": [1]})
    with pytest.raises(ScaleinError) as caught:
        si.from_arrow(table).select(x=made())
    assert says in str(caught.value)
    assert "test_binary.py" in str(caught.value)


def test_sums_are_refused() -> None:
    with pytest.raises(ScaleinError, match="sum takes numbers"):
        si.from_arrow(pa.table({"b": pa.array([b"a"])})).group_by().agg(x=col("b").sum())
