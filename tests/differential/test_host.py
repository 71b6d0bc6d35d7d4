"""What pyarrow computes between kernels: anywhere in an expression, and failing only in rows that ask for it."""

from __future__ import annotations

from collections.abc import Callable
from datetime import date, datetime, timedelta

import pyarrow as pa
import pyarrow.compute as pc
import pytest

import scalein as si
from scalein import ComputeError, col, lit, when
from scalein.api.column import Column
from scalein.api.flow import Flow
from tests import oracle
from tests.engines import COLLECTS, COMPILED, check

ZONE = pa.timestamp("us", "Europe/Berlin")
ROWS = 200


def table(nullable: bool = True) -> pa.Table:
    """`ok` says where the columns of text can be read; it is true, or null, also where a text is null."""
    numbers = range(ROWS)
    ok = [None if n % 10 == 0 and nullable else n % 3 != 0 or n % 10 == 0 for n in numbers]
    null = [nullable and n % 7 == 0 for n in numbers]

    def texts(good: Callable[[int], str], bad: str) -> list[str | None]:
        return [None if null[n] else bad if ok[n] is False else good(n) for n in numbers]

    columns = {
        "ok": pa.array(ok),
        "s": pa.array(texts(str, "bad")),
        "day": pa.array(texts(lambda n: str(date(2024, 1, 1) + timedelta(n)), "2024-13-01")),
        "clock": pa.array(texts(lambda n: f"{n % 24:02}:{n % 60:02}", "25:00")),
        "amount": pa.array(texts(lambda n: f"{n}.5", "1e")),
        "raw": pa.array([None if w is None else b"\xff" if w == "bad" else w.encode() for w in texts(str, "bad")]),
        "at": pa.array([None if null[n] else datetime(2024, 3, 31) + timedelta(hours=n) for n in numbers], ZONE),
        "x": pa.array([None if nullable and n % 5 == 0 else n - 50 for n in numbers]),
        "y": pa.array([n % 4 for n in numbers]),
        "n": pa.array(numbers),
    }
    schema = pa.schema([pa.field(name, column.type, nullable) for name, column in columns.items()])
    return pa.table(list(columns.values()), schema=schema)


OK, S, X, Y = col("ok"), col("s"), col("x"), col("y")
NUMBER = S.cast(int)
TEXT = pa.string()


def asked(value: Column) -> Column:
    return when(OK).then(value)


SHAPES: dict[str, Column] = {
    "argument": (X + 1).cast(TEXT),
    "arguments in turn": ((X + 1).cast(TEXT).str.len() * 2).cast(TEXT).str.len() + 1,
    "pyarrow twice": X.cast(TEXT).cast(int) + 1,
    "of a try": (X + 1).cast(TEXT).try_cast(int) + 1,
    "in a try": asked(NUMBER.try_add(2**63 - 60)),
    "try": S.try_cast(int) + 1,
    "then": asked(NUMBER + 1).fill_null(0),
    "then, constant": when(OK).then(NUMBER).otherwise(7),
    "otherwise": when(~OK).then(0).otherwise(NUMBER),
    "second when": when(~OK).then(-1).when(NUMBER > 50).then(NUMBER * 2).otherwise(NUMBER % 7),
    "when in when": when(OK).then(when(Y != 0).then((NUMBER // Y).cast(TEXT)).otherwise(S)),
    "and": OK & (NUMBER > 5),
    "or": ~OK | (NUMBER > 5),
    "several and": OK & (NUMBER > 5) & (col("amount").cast(float) < 150) & (NUMBER < 100),
    "several or": ~OK | (NUMBER < 20) | (NUMBER > 150) | (col("amount").cast(float) == 77.5),
    "and in or": (OK & (NUMBER > 50)) | (X > 100),
    "or in and": (~OK | (NUMBER > 50)) & (~OK | (NUMBER < 100)),
    "guard by pyarrow": when(S.str.matches("^[0-9]+$")).then(NUMBER),
    "guard that can fail": when((Y != 0) & (X // Y > 3)).then(asked(NUMBER)),
    "guard of a failing argument": when(Y != 0).then((X // Y).cast(TEXT)).otherwise(lit("none")),
    "infallible over fallible": asked(S.str.strip().cast(int).cast(TEXT).str.upper().str.len()),
    "date": asked(col("day").cast(pa.date32())),
    "timestamp": asked(col("day").cast(pa.timestamp("ns"))),
    "time": asked(col("clock").cast(pa.time64("us"))),
    "float": asked(col("amount").cast(float) / 2),
    "decimal": asked(col("amount").cast(pa.decimal128(9, 2))),
    "bool": when(OK & (col("n") < 2)).then(S.cast(bool)),
    "of bytes": asked(col("raw").cast(TEXT).str.len()),
    "in a zone": asked(col("at").dt.truncate("1d")),
    "of a constant": when(X > 10**6).then(lit("word").cast(int)).otherwise(1),
}  # fmt: skip

PLACES: dict[str, Callable[[Flow, Column], Flow]] = {
    "select": lambda flow, e: flow.select("n", e=e, again=e),
    "filter": lambda flow, e: flow.filter(e.hash() % 3 != 0),
    "key": lambda flow, e: flow.group_by(e=e).agg(n=si.count(), x=X.sum()),
    "aggregate": lambda flow, e: flow.group_by("y").agg(first=e.first(), last=e.last(), most=e.max(), n=e.count()),
    "all": lambda flow, e: flow.group_by().agg(n=e.n_unique(), least=e.min()),
    "left key": lambda flow, e: flow.join(flow.filter(col("n") > 99).select(k=col("n") - 1),
                                          left_on=e.hash() % 100, right_on="k", how="semi"),
    "right key": lambda flow, e: flow.select("n").join(flow.with_columns(m="n"), left_on="n", right_on=e.hash() % 100),
    "window": lambda flow, e: flow.group_by("y", si.tumbling("x", 10)).agg(first=e.first(), n=e.count()),
    "sort key": lambda flow, e: flow.sort(e, "n", descending=[True, False]),
    "top_k": lambda flow, e: flow.top_k(9, by=[e, "n"]),
    "behind a filter": lambda flow, e: flow.filter(X > 0).with_columns(e=e).filter(col("n") % 2 == 0).select("n", "e"),
}
UNORDERED = ("key", "aggregate", "window")


# In every place; the other shapes are selected only.
EVERYWHERE = ("argument", "in a try", "then, constant", "several and", "guard of a failing argument")


@pytest.mark.parametrize("shape", SHAPES)
def test_a_row_fails_only_where_it_asks(shape: str) -> None:
    for number, place in enumerate(PLACES if shape in EVERYWHERE else ("select",)):
        tables = [table(), table(nullable=False)]
        if place == "select":
            tables += [table().slice(0, 0), table().slice(3, 90)]
        else:  # compiled once for each place and shape; all places and all shapes meet both
            tables = [tables[(number + EVERYWHERE.index(shape)) % 2]]
        for data in tables:
            found = check(COMPILED[2], data, lambda flow, place=place: PLACES[place](flow, SHAPES[shape]),
                          ordered=place not in UNORDERED)
            assert found is not None, "nothing here may fail"


@pytest.mark.parametrize("words", [pa.large_string(), pa.string_view(), pa.dictionary(pa.int8(), pa.string())], ids=str)
def test_text_of_every_form(words: pa.DataType) -> None:
    number = {name: SHAPES[name] for name in ("then", "otherwise", "several and", "when in when", "guard by pyarrow")}
    data = table().slice(0, 120)
    data = data.set_column(1, "s", data["s"].cast(words))
    assert check(COMPILED[0], data, lambda flow: flow.select(**number), ordered=True) is not None


@pytest.mark.parametrize("made", [
    X.fill_null(NUMBER), when(OK).then(X.fill_null(NUMBER)), X.fill_null(when(OK).then(NUMBER)).fill_null(NUMBER),
])  # fmt: skip
def test_what_fills_a_null_is_asked_for_where_there_is_one(made: Column) -> None:
    """In rows that have a value, text that is no number does not matter."""
    data = table().filter(pc.or_(pc.is_valid(table()["x"]), pc.fill_null(table()["ok"], True)))
    plain = data.set_column(1, "s", pc.if_else(pc.equal(data["s"], "bad"), "0", data["s"]))
    found = si.from_arrow(data).select(e=made).collect(workers=1)
    assert found.equals(oracle.collect(si.from_arrow(plain).select(e=made)))


def test_python_is_not_called_where_nobody_asks() -> None:
    @si.udf(compile=False)
    def picky(x: int | None, y: int) -> int:
        if x is None or y == 0:
            raise ValueError("no number")
        return x // y

    asked = when((X + 1).is_not_null() & (Y != 0)).then(picky(X + 1, Y) + 1).otherwise(0)
    assert check(COMPILED[2], table(), lambda flow: flow.select(e=asked), ordered=True) is not None
    with pytest.raises(ComputeError, match=r"no number\) in `picky\(x \+ 1, y\)`"):
        si.from_arrow(table()).select(e=picky(X + 1, Y) + 1).collect(workers=1)


@pytest.mark.parametrize(("made", "named"), [
    (NUMBER + 1, "s.cast(i64)"),
    (OK & (NUMBER > 5) | (NUMBER > 9), "s.cast(i64)"),
    (when(OK | (X > 0)).then(S.str.strip().cast(int) + 1), "s.str.strip().cast(i64)"),
    ((X // Y).cast(TEXT), "x // y"),
    (when(OK).then((X // Y).cast(TEXT).str.len() + 1), "x // y"),
    (X.cast(TEXT).cast(int) * 2**62, "x.cast(str).cast(i64) * 4611686018427387904"),
    ((X * 3).cast(TEXT).cast(pa.int8()), "(x * 3).cast(str).cast(i8)"),
    (when(Y > 0).then((X * 3).cast(TEXT).cast(pa.int8())), "(x * 3).cast(str).cast(i8)"),
    ((X.cast(TEXT).cast(int) - 1).cast(TEXT).cast(pa.int8()), "(x.cast(str).cast(i64) - 1).cast(str).cast(i8)"),
], ids=repr)  # fmt: skip
def test_an_error_names_what_the_user_wrote(made: Column, named: str) -> None:
    flow = si.from_arrow(table()).select(e=made)
    for collect in COLLECTS:
        with pytest.raises(ComputeError) as caught:
            collect(flow)
        assert caught.value.what.endswith(f" in `{named}`")
        assert caught.value.facts["at"].startswith("test_host.py:")


def test_a_column_that_only_a_later_kernel_reads_is_handed_on() -> None:
    """The kernel before pyarrow's step projects `x` too, but computes nothing from it."""
    flow = si.from_arrow(table()).with_columns(same=OK)
    made = flow.group_by().agg(texts=(col("same") & OK).cast(pa.string()).collect(), first=OK.arg_min(X % 2))
    assert made.collect(workers=1).equals(oracle.collect(made))
