"""hash(): the engine and the oracle agree with each other, with Spark's xxhash64, and with their past."""

from __future__ import annotations

from decimal import Decimal

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import scalein as si
from scalein import WrongType, col
from scalein.ir.functions.hashing import signed, xxh64
from tests.engines import Engine, check, each_compiler, every_compiler, examples
from tests.strategies import ALL, STRINGS, of_types, schemas, tables

# Never change these: results that users stored depend on them.
GOLDEN: list[tuple[pa.DataType, object, int]] = [
    (pa.null(), None, 42),
    (pa.bool_(), True, -6698625589789238999),
    (pa.int8(), -1, 2017008487422258757),
    (pa.int32(), 1, -6698625589789238999),  # Spark: xxhash64(1)
    (pa.int64(), 1, -7001672635703045582),  # Spark: xxhash64(1L)
    (pa.uint8(), 255, -6852806132354826186),
    (pa.uint64(), 2**63, -8619748838626508300),
    (pa.float32(), 1.5, 6163473420726370430),
    (pa.float64(), 0.0, -5252525462095825812),
    (pa.float64(), float("nan"), -3127944061524951246),
    (pa.string(), "", -7444071767201028348),  # Spark: xxhash64('')
    (pa.string(), "Spark", -4294468057691064905),
    (pa.string(), "x" * 31, -1716462135722163746),
    (pa.string(), "y" * 100, 5011348227102350976),
    (pa.binary(), b"Spark", -4294468057691064905),
    (pa.date32(), 1, -6698625589789238999),
    (pa.timestamp("us"), 1, -7001672635703045582),
    (pa.decimal128(18, 2), Decimal("0.01"), -7001672635703045582),
    (pa.decimal128(38, 2), Decimal("0.01"), -2693948257994132642),
    (pa.decimal128(38, 2), Decimal("-0.01"), -8690740447264083704),
    (pa.time32("ms"), 5, 504019808641096632),
    (pa.time64("us"), 5, 6251837290343458373),
    (pa.duration("ns"), -1, 3858142552250413010),
    (pa.int16(), 300, 4595878464234128934),
    (pa.uint32(), 2**32 - 1, 2017008487422258757),
    (pa.float32(), float("nan"), 2692338816207849720),
]


@each_compiler
@pytest.mark.parametrize(("type_", "value", "want"), GOLDEN, ids=lambda each: str(each)[:20])
def test_golden(engine: Engine, type_: pa.DataType, value: object, want: int) -> None:
    if pa.types.is_null(type_):
        type_ = pa.int16()
    table = pa.table({"a": pa.array([None, value], type_)})
    found = check(engine, table, lambda flow: flow.select(out=col("a").hash()), ordered=True)
    assert found is not None
    assert found["out"].to_pylist() == [42, want]
    assert found.schema.field("out").nullable is False


def test_the_algorithm_is_xxh64() -> None:
    """Examples of its authors', and the one in Spark's manual: xxhash64('Spark', array(123), 2)."""
    assert xxh64(b"", 0) == 0xEF46DB3751D8E999
    assert xxh64(b"abc", 0) == 0x44BC2CF5AD770999
    assert xxh64(b"Nobody inspects the spammish repetition", 0) == 0xFBCEA83C8A378BF1
    chained = xxh64((2).to_bytes(4, "little"), xxh64((123).to_bytes(4, "little"), xxh64(b"Spark")))
    assert signed(chained) == 5602566077635097486


@every_compiler
@examples(24)
@given(st.data())
def test_any_type(engine: Engine, data: st.DataObject) -> None:
    table = data.draw(tables(data.draw(schemas(ALL, most=3)), extreme=data.draw(st.booleans())))
    made = {name: col(name).hash() for name in table.column_names}
    check(engine, table, lambda flow: flow.select(**made).filter(col("a") % 3 != 0), ordered=True)


@every_compiler
@examples(10)
@given(st.data())
def test_text_of_every_length_and_form(engine: Engine, data: st.DataObject) -> None:
    words = data.draw(st.lists(st.none() | st.binary(max_size=100).map(lambda some: some.hex()), max_size=20))
    plain = pa.table({"a": pa.array(words, pa.string())})
    stored = pa.table({"a": pa.array(words, pa.string()).cast(data.draw(st.sampled_from(STRINGS)))})
    want = check(engine, plain, lambda flow: flow.select(out=col("a").hash()), ordered=True)
    found = check(engine, stored, lambda flow: flow.select(out=col("a").hash()), ordered=True)
    assert want is not None
    assert want.equals(found)


@every_compiler
@examples(4)
@given(tables(of_types(pa.string(), pa.float64())))
def test_as_a_key(engine: Engine, table: pa.Table) -> None:
    build = lambda flow: flow.group_by(k=col("a").hash() % 8, z=col("b").hash()).agg(n=si.count())  # noqa: E731
    check(engine, table, build, ordered=False)


def test_lists_have_none() -> None:
    with pytest.raises(WrongType, match=r"hash does not take list<.*\n(.*\n)*.*unpacked"):
        si.from_arrow(pa.table({"a": [[1]]})).select(h=col("a").hash())
