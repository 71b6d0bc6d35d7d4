"""try_cast, try_add and friends: the plain function's value, and null where it would fail; arguments fail as ever."""

from __future__ import annotations

from contextlib import suppress

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import scalein as si
from scalein import ComputeError, col, lit, when
from scalein.api.flow import Flow
from tests import oracle
from tests.engines import Engine, check, each_compiler, each_engine, every_compiler, every_engine, examples, or_refused
from tests.strategies import DURATIONS, FIXED, NAIVE, NUMBERS, STRINGS, of_types, schemas, tables

TRIED = ["try_add", "try_sub", "try_mul", "try_floordiv", "try_mod", "try_divide"]
WORDS = ["1", "-1", "+1", "0x1F", "-0x2", "0x", " 1", "1 ", "", "1.5", ".5", "5.", "1e3", "-1E-2", "inf", "-Infinity",
         "nan", "NaN", "true", "False", "TRUE", "t", "0", "yes", "128", "-129", "99999999999999999999", "1" * 41,
         "2024-02-30", "2024-02-29", "2024-02-29 10:11:12", "2024-02-29T10:11:12.5Z", "10:11", "10:11:12.25", "24:00",
         "0001-01-01", "-0001-01-01", "٣", "1_000", "1,5", "--1", "e5", "0b1", "1970-01-01 00:00:00+01:00"]  # fmt: skip


@every_engine
@pytest.mark.parametrize("fn", TRIED)
@examples(8)
@given(st.data())
def test_two_columns_of_any_numbers(engine: Engine, fn: str, data: st.DataObject) -> None:
    table = data.draw(tables(data.draw(schemas(NUMBERS, least=2, most=2)), extreme=data.draw(st.booleans())))
    check(engine, table, or_refused(lambda flow: flow.select(out=getattr(col("a"), fn)(col("b")))), ordered=True)


@every_engine
@pytest.mark.parametrize("fn", TRIED)
@examples(5)
@given(st.data())
def test_a_column_and_a_constant(engine: Engine, fn: str, data: st.DataObject) -> None:
    table = data.draw(tables(data.draw(schemas(NUMBERS, most=1)), extreme=data.draw(st.booleans())))
    number = data.draw(st.sampled_from([0, 1, -1, 2, 3, 0.5, 128, 2**31, 2**40]))
    given_, other = (col("a"), lit(number)) if data.draw(st.booleans()) else (lit(number), col("a"))
    check(engine, table, or_refused(lambda flow: flow.select(out=getattr(given_, fn)(other))), ordered=True)


@every_engine
@examples(8)
@given(st.data())
def test_times(engine: Engine, data: st.DataObject) -> None:
    """Units meet in the finer one; a time that has no place there is null too."""
    schema = of_types(data.draw(st.sampled_from(NAIVE)), data.draw(st.sampled_from(DURATIONS)), pa.int32())
    table = data.draw(tables(schema, extreme=True))
    a, b, c = col("a"), col("b"), col("c")
    made = {"later": a.try_add(b), "earlier": a.try_sub(b), "more": b.try_mul(c)}
    found = check(engine, table, lambda flow: flow.select(**made), ordered=True)
    assert found is not None, "nothing here may fail"


@every_engine
@examples(32)
@given(st.data())
def test_casts_without_text(engine: Engine, data: st.DataObject) -> None:
    source, target = data.draw(st.sampled_from(FIXED)), data.draw(st.sampled_from(FIXED))
    table = data.draw(tables(of_types(source), most=64, extreme=data.draw(st.booleans())))
    found = check(engine, table, or_refused(lambda flow: flow.select(out=col("a").try_cast(target))), ordered=True)
    assert found is not None, "nothing here may fail"


@every_compiler
@examples(16)
@given(st.data())
def test_casts_of_text(engine: Engine, data: st.DataObject) -> None:
    """A word alone says what pyarrow makes of it; among others it must be the same."""
    source = data.draw(st.sampled_from(STRINGS))
    target = data.draw(st.sampled_from([pa.bool_(), *NUMBERS, pa.date32(), *NAIVE]))
    words = data.draw(st.lists(st.none() | st.sampled_from(WORDS) | st.text(max_size=4), max_size=40))
    words = [word if word is None else word.encode("utf-8", "ignore").decode() for word in words]
    table = pa.table({"a": pa.array(words, pa.string()).cast(source)})
    found = check(engine, table, lambda flow: flow.select(out=col("a").try_cast(target)), ordered=True)
    assert found is not None, "nothing here may fail"
    assert list(map(repr, found["out"].to_pylist())) == [repr(_alone(word, target)) for word in words]


def _alone(word: str | None, target: pa.DataType) -> object:
    """What pyarrow makes of a word; one with an offset is a time in UTC, which pyarrow reads as a type with a zone
    only.
    """
    types = [target, pa.timestamp(target.unit, "UTC")] if pa.types.is_timestamp(target) else [target]
    for each in types:
        with suppress(pa.ArrowInvalid):
            return pa.array([word], pa.string()).cast(each).cast(target)[0].as_py()
    return None


@each_engine
def test_only_the_call_itself_is_tried(engine: Engine) -> None:
    table = pa.table({"a": [1, 2**63 - 1], "s": ["1", "x"]})
    for made in ((col("a") + 1).try_mul(2), (col("a") + 1).try_cast(pa.int64()), col("s").cast(int).try_add(1),
                 (col("a") * 2).try_divide(2.0)):  # fmt: skip
        assert check(engine, table, lambda flow, made=made: flow.select(out=made), ordered=True) is None
    both = col("a").try_add(1).try_mul(2)
    found = check(engine, table, lambda flow: flow.select(out=both), ordered=True)
    assert found is not None
    assert found["out"].to_pylist() == [4, None]


@each_engine
def test_meaning_in_examples(engine: Engine) -> None:
    table = pa.table({"a": [7, 7, -(2**63), None], "b": [2, 0, -1, 0], "x": [1.0, 0.0, 1.0, 1.0],
                      "y": [0.0, -0.0, 4.0, None]})  # fmt: skip

    def build(flow: Flow) -> Flow:
        return flow.select(q=col("a").try_floordiv(col("b")), r=col("a").try_mod(col("b")), s=col("a").try_sub(1),
                           d=col("x").try_divide(col("y")), i=col("a").try_divide(col("b")), z=col("a").try_mod(0))

    found = check(engine, table, build, ordered=True)
    assert found is not None
    assert found.to_pydict() == {"q": [3, None, None, None], "r": [1, None, 0, None], "s": [6, 6, None, None],
                                 "d": [None, None, 0.25, None], "i": [3.5, None, 2.0**63, None], "z": [None] * 4}


@each_compiler
def test_in_conditions_and_groups(engine: Engine) -> None:
    table = pa.table({"a": [1, 2**62, 3, 2**62], "s": ["1", "x", None, "3"]})

    def build(flow: Flow) -> Flow:
        kept = flow.filter(col("a").try_mul(4).is_null() | (col("s").try_cast(int) > 0))
        value = when(col("a") > 10).then(col("a").try_add(2**62)).otherwise(col("s").try_cast(int).fill_null(-1))
        return kept.group_by(k=col("s").try_cast(pa.int8())).agg(n=si.count(), m=value.sum())

    check(engine, table, build, ordered=False)


@each_compiler
def test_bytes_and_decimals(engine: Engine) -> None:
    table = pa.table({"b": [b"ok", b"\xff", None, "é".encode()], "s": ["1.5", "x", "1e3", "99999999999"],
                      "d": pa.array([1, 99, None, 0], pa.int64()).cast(pa.decimal128(21, 2))})  # fmt: skip

    def build(flow: Flow) -> Flow:
        return flow.select(text=col("b").try_cast(str), number=col("s").try_cast(pa.decimal128(6, 2)),
                           small=col("d").try_cast(pa.decimal128(3, 2)), square=col("d").try_mul(col("d")))

    found = check(engine, table, build, ordered=True)
    assert found is not None
    assert found["text"].to_pylist() == ["ok", None, None, "é"]
    assert found["number"].cast("string").to_pylist() == ["1.50", None, "1000.00", None]
    assert found["small"].cast("string").to_pylist() == ["1.00", None, None, "0.00"]


def test_constants_fold_to_null_only_where_they_fail() -> None:
    flow = si.from_arrow(pa.table({"a": [1]})).select(
        u=lit(2**62).try_mul(2), v=lit(2**62).try_mul(1), w=lit(1.0).try_divide(0.0), x=lit("q").try_cast(int))
    assert flow.collect().to_pylist() == [{"u": None, "v": 2**62, "w": None, "x": None}]
    assert oracle.collect(flow).to_pylist() == flow.collect().to_pylist()


def test_text_reads_like_python() -> None:
    flow = si.from_arrow(pa.table({"a": [1], "s": ["x"]}))
    text = flow.select(p=col("a").try_mul(col("a")), q=(col("s").try_cast(int) + 1).try_divide(2)).explain()
    assert "p = a.try_mul(a)" in text
    assert "s.try_cast(i64)" in text
    with pytest.raises(ComputeError, match=r"overflow in .?a \* 9223372036854775807"):
        si.from_arrow(pa.table({"a": [2]})).select(p=(col("a") * (2**63 - 1)).try_add(1)).collect()


def test_what_has_no_type_is_refused() -> None:
    flow = si.from_arrow(pa.table({"a": [True], "s": ["x"]}))
    with pytest.raises(si.WrongType, match="bool is not a number"):
        flow.select(x=col("a").try_add(1))
    with pytest.raises(si.WrongType, match="try_mul"):
        flow.select(x=col("s").try_mul(2))


def test_dictionaries_are_tried_row_by_row() -> None:
    """An expression over a dictionary is looked up by code, but a tried one must not be: it has nulls of its own."""
    words = pa.array(["abc", "", None, "abc"]).dictionary_encode()
    flow = si.from_arrow(pa.table({"s": words})).select(
        a=col("s").str.len().try_cast(pa.int8()).try_floordiv(0), b=lit(6).try_floordiv(col("s").str.len()))
    assert flow.collect().to_pydict() == {"a": [None] * 4, "b": [2, None, None, 2]}
