"""process: what collect and jobs give is what the class itself yields in plain Python, key by key."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import scalein as si
from scalein import col
from scalein.errors import CannotCompile
from scalein.udf import ProcessClass
from tests.engines import examples

NULLABLE = st.one_of(st.none(), st.integers(-9, 9))
ROWS = st.lists(st.tuples(st.sampled_from(["a", "b", None, "a key that is longer"]), st.integers(0, 30),
                          st.integers(-9, 9), NULLABLE, st.sampled_from(["", "x", "a text of some length"])),
                max_size=50)  # fmt: skip
TYPES = {"k": pa.string(), "t": pa.timestamp("ms"), "x": pa.int64(), "y": pa.int16(), "s": pa.string()}


@si.process
class Rule:
    """All that a class can do: optional fields, loops, early returns, several rows for one."""

    total: float = 0.0
    n: int = 0
    last: int | None = None
    is_odd: bool = False

    def on_row(self, row: Any) -> Any:
        self.n += 1
        self.is_odd = not self.is_odd
        if row.y is None:
            self.last = None
            return
        if self.last is not None and row.y > self.last:
            yield {"why": "risen", "s": row.s, "by": row.y - self.last, "mean": self.total / self.n}
        for i in range(row.x):
            if i == 4:
                break
            self.total += i / 2
            if self.is_odd and i % 2 == 0:
                yield {"s": row.s[1:], "why": "odd", "by": None, "mean": self.total}
        self.last = row.y


def by_python(cls: ProcessClass, rows: list[dict[str, Any]], names: list[str]) -> list[tuple[Any, ...]]:
    """The rows that objects of the class itself yield, one a key."""

    class Given:
        def __init__(self, row: dict[str, Any]) -> None:
            self.__dict__.update(row)

    states: dict[Any, Any] = {}
    found = []
    for row in rows:
        state = states.setdefault(row["k"], cls.python())
        found += [(row["k"], *(made[name] for name in names)) for made in state.on_row(Given(row))]
    return found


def as_table(rows: list[tuple[Any, ...]]) -> pa.Table:
    columns = list(zip(*rows, strict=True)) or [()] * len(TYPES)
    arrays = [pa.array(column, dtype) for column, dtype in zip(columns, TYPES.values(), strict=True)]
    return pa.table(arrays, list(TYPES))


def tuples(table: pa.Table) -> list[tuple[Any, ...]]:
    return list(zip(*(column.to_pylist() for column in table.columns), strict=True))


@examples(10)
@given(ROWS, st.booleans(), st.integers(1, 20))
def test_rows_are_what_the_class_yields(rows: list[tuple[Any, ...]], has_time: bool, size: int) -> None:
    table = as_table(rows)

    def build(flow: si.Flow) -> si.Flow:
        timed = flow.with_watermark("t", "1s") if has_time else flow
        return timed.group_by("k").process(Rule)

    given = [dict(zip(TYPES, row, strict=True)) for row in rows]
    want = by_python(Rule, sorted(given, key=lambda row: row["t"]) if has_time else given, ["why", "s", "by", "mean"])
    flow = build(si.from_arrow(table))
    assert flow.schema.names == ["k", "why", "s", "by", "mean"]
    assert tuples(flow.collect()) == want
    batches = si.from_batches(table.to_batches(max_chunksize=size), table.schema)
    out = si.to_memory()
    build(batches).start(sink=out).wait()
    assert tuples(out.table()) == want


def test_a_row_may_yield_more_rows_than_a_chunk_holds() -> None:
    @si.process
    class Many:
        n: int = 0

        def on_row(self, row: Any) -> Any:
            for _ in range(row.x):
                yield {"n": self.n, "s": row.s}
                self.n += 1

    table = pa.table({"k": [1, 2, 1], "x": [200_000, 1, 3], "s": ["word", "", "other"]})
    found = si.from_arrow(table).group_by("k").process(Many).collect()
    assert found.column("n").to_pylist() == [*range(200_000), 0, *range(200_000, 200_003)]
    assert found.column("s").to_pylist() == ["word"] * 200_000 + [""] + ["other"] * 3


def test_many_keys_and_what_follows() -> None:
    @si.process
    class Sum:
        total: int = 0

        def on_row(self, row: Any) -> Any:
            self.total += row.x
            yield {"total": self.total}

    rows = 50_000
    table = pa.table({"k": [i * 7919 % 20_011 for i in range(rows)], "x": list(range(rows))})
    found = si.from_arrow(table).group_by("k").process(Sum).group_by("k").agg(m=col("total").max()).collect()
    want: dict[int, int] = {}
    for key, x in zip(table["k"].to_pylist(), table["x"].to_pylist(), strict=True):
        want[key] = want.get(key, 0) + x
    assert dict(tuples(found)) == want


def test_failures_name_the_line_and_the_column() -> None:
    @si.process
    class Shares:
        n: int = 0

        def on_row(self, row: Any) -> Any:
            yield {"share": row.x / row.y}

    def run(x: list[int | None], y: list[int]) -> None:
        si.from_arrow(pa.table({"k": [1] * len(x), "x": x, "y": y})).group_by("k").process(Shares).collect()

    with pytest.raises(si.ComputeError, match=r"division by zero at test_process\.py:\d+ in `Shares`"):
        run([1, 2], [1, 0])
    with pytest.raises(si.ComputeError, match=r"null in row\.x of `Shares`"):
        run([1, None], [1, 1])


def _opens(self: Any, row: Any) -> Any:
    yield {"n": len(open("x").read())}  # noqa: SIM115


def _wrong_column(self: Any, row: Any) -> Any:
    yield {"n": row.price}


def _other_names(self: Any, row: Any) -> Any:
    yield {"n": 1}
    yield {"m": 1}


def _no_rows(self: Any, row: Any) -> Any:
    self.n += 1


def _no_dict(self: Any, row: Any) -> Any:
    yield row.x


def _key(self: Any, row: Any) -> Any:
    yield {"k": row.x}


def _timer(self: Any, row: Any) -> Any:
    self.set_timer(row.t)
    yield {"n": 1}


def _compared(self: Any, row: Any) -> Any:
    yield {"n": row.t > row.x}


def _added(self: Any, row: Any) -> Any:
    yield {"n": row.t + row.t}


def _only_none(self: Any, row: Any) -> Any:
    yield {"n": None}


CASES = [(_timer, "no method on_timer"), (_compared, "si.Timestamp and int cannot be compared"),
         (_added, "no such operator"), (_only_none, "is None in all rows"),
         (_opens, "open"), (_wrong_column, r"row\.price is no column"), (_other_names, "different names"),
         (_no_rows, "yields no row"), (_no_dict, "something else than a row")]  # fmt: skip


@pytest.mark.parametrize(("on_row", "reason"), CASES, ids=lambda value: getattr(value, "__name__", ""))
def test_what_cannot_be_compiled_is_refused_with_its_line(on_row: Any, reason: str) -> None:
    cls = type("Refused", (), {"__annotations__": {"n": int}, "n": 0, "on_row": on_row})
    with pytest.raises(CannotCompile, match=rf"(?s)the process 'Refused' cannot be.*{reason}.*test_process\.py"):
        si.from_arrow(as_table([])).group_by("k").process(cls)  # type: ignore[arg-type]


@si.process
class Times:
    """What is computed with times."""

    first: si.Timestamp | None = None
    longest: si.Duration = si.duration("0s")

    def on_row(self, row: Any) -> Any:
        self.first = self.first or row.t
        age = row.t - self.first
        self.longest = max(self.longest, age, MINUTE // 20)
        if age > 2 * MINUTE - si.duration("90s") or age // MINUTE >= 1 or not self.longest:
            yield {"age": age % si.duration("7s"), "share": age / MINUTE, "seconds": (-age).total_seconds(),
                   "at": self.first + self.longest * 2, "is_first": row.t == self.first, "longest": self.longest}


MINUTE = si.duration("1m")


@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns"])
@pytest.mark.parametrize("tz", [None, "Europe/Zurich"])
def test_times_are_those_of_python(unit: str, tz: str | None) -> None:
    times = pa.array([0, 31, 62, 200, 200, 100_000, 3], pa.timestamp("s", tz)).cast(pa.timestamp(unit, tz))
    flow = si.from_arrow(pa.table({"k": [1] * 7, "t": times})).group_by("k")
    got = flow.process(Times).collect()
    assert got.schema.field("at").type == times.type
    assert got.schema.field("longest").type == pa.duration(unit)
    plain = flow.process(si.process(compile=False)(Times.python)).collect()
    assert got.schema == plain.schema
    assert tuples(got) == tuples(plain)
    assert got.num_rows > 2


def test_a_unit_that_is_too_coarse_is_refused() -> None:
    class Fine:
        at: si.Timestamp | None = None

        def on_row(self, row: Any) -> Any:
            yield {"at": row.t + si.duration("1ms")}

    with pytest.raises(CannotCompile, match=r"no whole number of the class's units of time \(s\)"):
        si.from_arrow(pa.table({"k": [1], "t": pa.array([0], pa.timestamp("s"))})).group_by("k").process(Fine)


def test_names_windows_and_ttl_without_time_are_refused() -> None:
    flow = si.from_arrow(as_table([]))
    with pytest.raises(si.BadName, match="k"):
        flow.group_by("k").process(type("Key", (), {"__annotations__": {"n": int}, "n": 0, "on_row": _key}))  # type: ignore[arg-type]
    with pytest.raises(si.BadArgument, match="no window"):
        flow.group_by("k", si.tumbling("t", "1s")).process(Rule)
    with pytest.raises(si.BadArgument, match="the flow has none"):
        flow.group_by("k").process(Rule, ttl="7d")
