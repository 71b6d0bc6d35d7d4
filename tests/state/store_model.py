"""A model of LogStore, a dict, and tables of random rows for both."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import date, timedelta
from decimal import Context, Decimal
from random import Random

import pyarrow as pa

from scalein.layout import UNCHANGED

Key = tuple[object, ...]
Content = dict[Key, tuple[object, ...]]
Maker = Callable[[Random], object]


class Overflow(Exception):
    """A sum that its column cannot hold."""


def plain(value: object) -> object:
    """A value that equals itself: NaN as text, -0.0 as 0.0."""
    if isinstance(value, float):
        return "NaN" if math.isnan(value) else value + 0.0
    return value


def rank(value: object) -> tuple[int, object]:
    """The sort key of a value: NaN is the greatest; text is compared by its bytes."""
    if isinstance(value, str) and value != "NaN":
        return 0, value.encode()
    return (1, 0) if value == "NaN" else (0, value)


def _fits(value: object, kind: pa.DataType) -> bool:
    if pa.types.is_integer(kind):
        least = -(1 << kind.bit_width - 1) if pa.types.is_signed_integer(kind) else 0
        assert isinstance(value, int)
        return least <= value < least + (1 << kind.bit_width)
    if pa.types.is_decimal(kind):
        assert isinstance(value, Decimal)
        return abs(value.scaleb(kind.scale, Context(prec=80))) < 10**kind.precision
    return True


def _added(old: object, new: object) -> object:
    if isinstance(old, Decimal) and isinstance(new, Decimal):
        return Context(prec=80).add(old, new)
    return old + new  # type: ignore[operator]


def combined(function: str, old: object, new: object, kind: pa.DataType, counts: bool) -> object:
    """The new value after a row is merged. `counts`: whether `count` counts the row."""
    if function == UNCHANGED:
        return old
    if function == "count":
        found: object = (0 if old is None else old) + (1 if counts else 0)  # type: ignore[operator]
    elif function == "replace":
        return new
    elif new is None:
        return old
    elif old is None or function == "last":
        return new
    elif function == "first":
        return old
    elif function == "sum":
        found = "NaN" if "NaN" in (old, new) else plain(_added(old, new))
    else:
        return (min if function == "min" else max)(old, new, key=rank)
    if not _fits(found, kind):
        raise Overflow
    return found


class Model:
    """Keys with their values."""

    def __init__(self, key: pa.Schema, value: pa.Schema, content: Content | None = None) -> None:
        self.key, self.value = key, value
        self.content: Content = dict(content or {})

    def copy(self) -> Model:
        return Model(self.key, self.value, self.content)

    def merge(self, table: pa.Table, functions: dict[str, str]) -> None:
        """Merge all rows, or none if one overflows."""
        after: Content = {}
        nothing = (None,) * len(self.value)
        chosen = [functions.get(name, UNCHANGED) for name in self.value.names]
        kinds = [field.type for field in self.value]
        given = [table[name].to_pylist() if name in table.column_names else None for name in self.value.names]
        for k, key in enumerate(keys_in(table, self.key)):
            old = after.get(key, self.content.get(key, nothing))
            new = [None if column is None else plain(column[k]) for column in given]
            after[key] = tuple(combined(function, a, b, kind, column is None or b is not None)
                               for function, a, b, kind, column in zip(chosen, old, new, kinds, given, strict=True))
        self.content |= after

    def upsert(self, table: pa.Table) -> None:
        self.merge(table, dict.fromkeys(self.value.names, "replace"))

    def delete(self, table: pa.Table) -> None:
        for key in keys_in(table, self.key):
            self.content.pop(key, None)

    def get(self, table: pa.Table) -> list[tuple[object, ...]]:
        return [self.content.get(key, (None,) * len(self.value)) for key in keys_in(table, self.key)]


def keys_in(table: pa.Table, key: pa.Schema) -> list[Key]:
    return list(rows_of(table.select(key.names)))


def rows_of(table: pa.Table) -> Sequence[tuple[object, ...]]:
    columns = [[plain(value) for value in column.to_pylist()] for column in table.columns]
    return list(zip(*columns, strict=True)) if columns else [()] * table.num_rows


def content_of(table: pa.Table, key: pa.Schema) -> Content:
    """The result of a scan as a dict; fails on a duplicate key."""
    rows = rows_of(table)
    found = {row[: len(key)]: row[len(key) :] for row in rows}
    assert len(found) == len(rows), "duplicate key"
    return found


# --- rows


@dataclass(frozen=True)
class Kind:
    """The columns of a store, a generator of values for each, and the merge functions that tests use."""

    name: str
    key: pa.Schema
    value: pa.Schema
    make_key: Callable[[int], Key]  # from the number of a key
    make: dict[str, Maker]
    merges: list[dict[str, str]]
    keys: int = 3000
    overflows: bool = field(default=False)

    def key_table(self, random: Random, count: int) -> pa.Table:
        return self._table(random, count, ())

    def table(self, random: Random, count: int, names: Sequence[str], odd: bool = True) -> pa.Table:
        """Rows with some value columns; some tables are sliced and have several chunks."""
        table = self._table(random, count, names)
        if odd and count > 3 and random.random() < 0.5:
            first = random.randrange(count // 2)
            table = pa.concat_tables([table.slice(first, count // 3), table.slice(first + count // 3)])
        return table

    def _table(self, random: Random, count: int, names: Sequence[str]) -> pa.Table:
        spread = random.choice([5, self.keys, self.keys])
        keys = [self.make_key(random.randrange(spread)) for _ in range(count)]
        columns = [pa.array([key[k] for key in keys], field.type) for k, field in enumerate(self.key)]
        columns += [pa.array([self.make[name](random) for _ in range(count)], self.value.field(name).type)
                    for name in names]
        fields = [*self.key, *(self.value.field(name) for name in names)]
        return pa.Table.from_arrays(columns, schema=pa.schema(fields))


def _or_null(make: Maker, share: float = 0.15) -> Maker:
    return lambda random: None if random.random() < share else make(random)


_TEXTS = ["", "a", "twelve bytes", "thirteen byte", "Zürich an der Limmat", "日本", "\x00", "long " * 30,
          "long " * 30 + "x", "\U0001d518" * 5]  # fmt: skip


def _text(random: Random) -> str:
    return random.choice(_TEXTS) + (str(random.randrange(50)) if random.random() < 0.5 else "")


def _bytes(random: Random) -> bytes:
    return random.choice([b"", b"\xff" * 13, b"\x00\x01", b"q" * 12, random.randbytes(random.randrange(40))])


def _exact(random: Random) -> float:
    """Floats whose sums do not depend on the order of the rows."""
    return random.choice([0.0, -0.0, 0.5, -1.5, 3.0, 1024.25, math.nan, math.inf, random.randrange(99) / 4])


def _small(random: Random) -> int:
    return random.randrange(-1000, 1000)


def _extreme(random: Random) -> int:
    return random.choice([0, 1, -1, (1 << 63) - 1, -(1 << 63), 1 << 62, random.randrange(99)])


def _cents(random: Random) -> Decimal:
    return Decimal(random.randrange(-99999, 99999)).scaleb(-2)


def _much(random: Random) -> Decimal:
    return random.choice([Decimal(10**38 - 1), Decimal(-5 * 10**37 - 3), Decimal(7)])


def _float_key(number: int) -> Key:
    return ([math.nan, -0.0, 0.0, math.inf, -math.inf, 5e-324][number] if number < 6 else number * 0.37,)


def _text_key(number: int) -> Key:
    text = _TEXTS[number % len(_TEXTS)] + (f" {number}" if number >= len(_TEXTS) else "")
    return text, date(2026, 1, 1) + timedelta(days=number % 3)


def _nullable_key(number: int) -> Key:
    return (None if number % 5 == 0 else number // 7, None if number % 3 == 0 else f"the long name of {number // 9}",
            [None, True, False][number % 3])  # fmt: skip


KINDS = {
    kind.name: kind
    for kind in [
        Kind("int", pa.schema({"k": pa.int64()}), pa.schema({"n": pa.int64(), "x": pa.float64(), "hi": pa.int32()}),
             lambda number: (number * 7919 - (1 << 40) if number else -(1 << 63),),
             {"n": _or_null(_small), "x": _or_null(_exact), "hi": _or_null(_small)},
             [{"n": "sum", "x": "sum", "hi": "max"}, {"n": "count", "x": "min", "hi": "min"}, {"n": "sum"},
              {"n": "replace", "x": "last"}, {"x": "max", "hi": "first"}]),
        Kind("text", pa.schema({"user": pa.string(), "day": pa.date32()}),
             pa.schema({"n": pa.int64(), "seen": pa.string(), "raw": pa.binary()}), _text_key,
             {"n": _or_null(_small), "seen": _or_null(_text), "raw": _or_null(_bytes)},
             [{"n": "sum", "seen": "max", "raw": "min"}, {"n": "count", "seen": "last", "raw": "replace"},
              {"seen": "first", "raw": "max"}, {"seen": "min"}, {"n": "max", "seen": "replace"}]),
        Kind("float", pa.schema({"f": pa.float64()}), pa.schema({"x": pa.float32(), "ok": pa.bool_()}), _float_key,
             {"x": _or_null(_exact), "ok": _or_null(lambda random: random.random() < 0.5)},
             [{"x": "sum", "ok": "last"}, {"x": "min", "ok": "max"}, {"ok": "replace"}]),
        Kind("nullable", pa.schema({"a": pa.int16(), "b": pa.large_string(), "c": pa.bool_()}),
             pa.schema({"total": pa.decimal128(20, 2), "day": pa.date32(), "small": pa.uint8()}), _nullable_key,
             {"total": _or_null(_cents), "day": _or_null(lambda random: date(2026, 1, 1 + random.randrange(28))),
              "small": _or_null(lambda random: random.randrange(256))},
             [{"total": "sum", "day": "max", "small": "min"}, {"total": "first", "day": "last"},
              {"total": "max", "small": "replace"}]),
        Kind("binary", pa.schema({"key": pa.binary()}), pa.schema({"n": pa.int64()}),
             lambda number: (number.to_bytes(2, "big") * (number % 9 + 1) if number else b"",),
             {"n": _or_null(_extreme)}, [{"n": "sum"}, {"n": "min"}, {"n": "last"}, {"n": "count"}], overflows=True),
        Kind("decimal", pa.schema({"price": pa.decimal128(38, 3), "at": pa.timestamp("us", "UTC")}),
             pa.schema({"n": pa.int8(), "much": pa.decimal128(38, 0)}),
             lambda number: (Decimal(number - 1500).scaleb(30) / 1000, None if number % 11 == 0 else number % 4),
             {"n": _or_null(lambda random: random.randrange(-128, 128)),
              "much": _or_null(_much)},
             [{"n": "sum", "much": "sum"}, {"n": "max", "much": "min"}, {"much": "sum"}], overflows=True),
    ]
}  # fmt: skip
