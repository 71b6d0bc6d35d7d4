"""cast between bools, numbers and times; to and from text as pyarrow does it."""

from __future__ import annotations

from decimal import ROUND_DOWN, Decimal

import pyarrow as pa
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import scalein as si
from scalein import ComputeError, ScaleinError, col
from scalein.api.flow import Flow
from tests import oracle
from tests.engines import Engine, check, each_compiler, every_engine, examples
from tests.strategies import DURATIONS, FIXED, FLOATS, INTS, NAIVE, NUMBERS, STRINGS, ZONED, of_types, tables

NO_VALUES = [("x", pa.int32()), ("300", pa.int8()), ("1,5", pa.float64()), ("", pa.int64()), ("yes", pa.bool_()),
             ("now", pa.timestamp("s"))]  # fmt: skip


@every_engine
@examples(40)
@given(st.data())
def test_between_all_types_without_text(engine: Engine, data: st.DataObject) -> None:
    source, target = data.draw(st.sampled_from(FIXED)), data.draw(st.sampled_from(FIXED))
    table = data.draw(tables(of_types(source), most=64, extreme=data.draw(st.booleans())))
    check(engine, table, _cast(target), ordered=True)


def _cast(target: pa.DataType):  # type: ignore[no-untyped-def]
    def build(flow: Flow) -> Flow:
        try:
            return flow.select(out=col("a").cast(target))
        except ScaleinError:
            assume(False)
            raise

    return build


@every_engine
@examples(20)
@given(st.data())
def test_numbers(engine: Engine, data: st.DataObject) -> None:
    source, target = data.draw(st.sampled_from(NUMBERS)), data.draw(st.sampled_from(NUMBERS))
    table = data.draw(tables(of_types(source), most=64, extreme=data.draw(st.booleans())))
    check(engine, table, _cast(target), ordered=True)


@every_engine
@examples(12)
@given(st.data())
def test_units_and_zones(engine: Engine, data: st.DataObject) -> None:
    times = st.sampled_from(data.draw(st.sampled_from([[*NAIVE, *ZONED, pa.date32()], DURATIONS])))
    source, target = data.draw(times), data.draw(times)
    table = data.draw(tables(of_types(source), most=64, extreme=data.draw(st.booleans())))
    check(engine, table, _cast(target), ordered=True)


@every_engine
@examples(12)
@given(st.data())
def test_to_text_and_back(engine: Engine, data: st.DataObject) -> None:
    source = data.draw(st.sampled_from([pa.bool_(), *INTS, *FLOATS, pa.date32(), *NAIVE]))
    table = data.draw(tables(of_types(source), most=64))
    found = check(engine, table, lambda flow: flow.select("a", out=col("a").cast(pa.string())), ordered=True)
    assert found is not None
    assert found["out"].equals(table["a"].cast(pa.string()))
    back = check(engine, found, lambda flow: flow.select(out=col("out").cast(source)), ordered=True)
    assert back is not None
    assert [str(value) for value in back["out"].to_pylist()] == [str(value) for value in table["a"].to_pylist()]


@every_engine
@examples(6)
@given(st.data())
def test_text_to_text(engine: Engine, data: st.DataObject) -> None:
    source = data.draw(st.sampled_from(STRINGS))
    target = data.draw(st.sampled_from([pa.string(), pa.large_string(), pa.string_view()]))
    check(engine, data.draw(tables(of_types(source), most=64)), _cast(target), ordered=True)


@each_compiler
@pytest.mark.parametrize(("text", "type_"), NO_VALUES)
def test_text_that_is_no_value(engine: Engine, text: str, type_: pa.DataType) -> None:
    table = pa.table({"a": ["1", None, text]})
    assert check(engine, table, lambda flow: flow.select(out=col("a").cast(type_)), ordered=True) is None
    # Not asked for, not failed.
    check(engine, table, lambda flow: flow.filter(col("a") != text).select(out=col("a").cast(pa.int32())), ordered=True)


@given(st.floats(allow_nan=False, allow_infinity=False), st.sampled_from(INTS))
@examples(40)
def test_floats_truncate(value: float, target: pa.DataType) -> None:
    """Against decimals, which have no rounding of their own."""
    flow = si.from_arrow(pa.table({"a": [value]})).select(out=col("a").cast(target))
    whole = int(Decimal(value).to_integral_value(ROUND_DOWN))
    try:
        pa.scalar(whole, target)
    except (OverflowError, pa.ArrowInvalid):
        with pytest.raises(ComputeError, match="overflow"):
            oracle.collect(flow)
    else:
        assert oracle.collect(flow)["out"].to_pylist() == [whole]
