"""@si.udaf: what collect and jobs give is what the class itself gives in plain Python, group by group."""

from __future__ import annotations

import pickle
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import scalein as si
from scalein import col
from scalein.errors import CannotCompile
from tests.conformance.shapes import Mean
from tests.engines import examples
from tests.examples import Spread

ROWS = st.lists(st.tuples(st.integers(0, 3), st.one_of(st.none(), st.integers(-50, 50)),
                          st.one_of(st.none(), st.integers(0, 9)), st.integers(0, 90)), max_size=60)  # fmt: skip


def by_python(aggregate: Any, rows: list[tuple[Any, ...]]) -> Any:
    """What the class gives, for the arguments of rows in which the first is not null; null of none."""
    state = aggregate.python()
    counted = [row for row in rows if row[0] is not None]
    for row in counted:
        state.update(*row)
    return state.finish() if counted else None


def as_table(rows: list[tuple[Any, ...]]) -> pa.Table:
    columns = list(zip(*rows, strict=True)) or [()] * 4
    types = (pa.int64(), pa.int64(), pa.int64(), pa.timestamp("ms"))
    return pa.table({name: pa.array(column, dtype) for name, column, dtype in zip("kxyt", columns, types, strict=True)})


@examples(30)
@given(ROWS)
def test_groups_are_what_the_class_gives(rows: list[tuple[Any, ...]]) -> None:
    flow = si.from_arrow(as_table(rows)).group_by("k").agg(
        s=Spread(col("x"), col("y")), few=Spread(col("x"), col("y")).filter(col("y") > 4), m=Mean("x"))
    want = {}
    for key in {row[0] for row in rows}:
        own = [row for row in rows if row[0] == key]
        few = [row for row in own if row[2] is not None and row[2] > 4]
        want[key] = (by_python(Spread, [row[1:3] for row in own]), by_python(Spread, [row[1:3] for row in few]),
                     by_python(Mean, [row[1:2] for row in own]))  # fmt: skip
    found = flow.collect()
    assert {row["k"]: (row["s"], row["few"], row["m"]) for row in found.to_pylist()} == want


@examples(8)
@given(ROWS, st.integers(1, 20))
def test_windows_of_a_job_are_those_of_collect(rows: list[tuple[Any, ...]], size: int) -> None:
    rows = sorted(rows, key=lambda row: row[3])
    table = as_table(rows)

    def build(flow: si.Flow) -> si.Flow:
        window = si.sliding("t", "20ms", every="10ms")
        return flow.with_watermark("t", "0s").group_by("k", window).agg(s=Spread(col("x"), col("y")), n=si.count())

    out = si.to_memory()
    build(si.from_batches(table.to_batches(max_chunksize=size), table.schema)).start(sink=out).wait()
    order = [("k", "ascending"), ("window_start", "ascending")]
    want = [(row["k"], row["n"], row["s"]) for row in build(si.from_arrow(table)).collect().sort_by(order).to_pylist()]
    assert [(row["k"], row["n"], row["s"]) for row in out.table().sort_by(order).to_pylist()] == want
    starts = range(-10, 100, 10)
    by_hand = [(key, len(own), by_python(Spread, [row[1:3] for row in own])) for key in range(4) for start in starts
               if (own := [row for row in rows if row[0] == key and start <= row[3] < start + 20])]
    assert want == by_hand


@si.udaf
class Ups:
    """Counts up and down, a sum that may overflow, the greatest value, and values above a limit."""

    n: int = 3
    downs: int = 0
    total: int = 0
    high: float | None = None

    def update(self, x: int, y: float | None) -> None:
        self.n += 2
        if y is None or x < 0:
            self.downs -= 1
            return
        self.total += x
        if self.high is None or y > self.high:
            self.high = y

    def merge(self, other: Any) -> None:
        self.n += other.n - 3
        self.downs += other.downs
        self.total += other.total
        if self.high is None or (other.high is not None and other.high > self.high):
            self.high = other.high

    def finish(self) -> float:
        return self.n * 1000 + self.downs * 10 + self.total % 97 + (0.0 if self.high is None else self.high)


@examples(20)
@given(st.lists(st.tuples(st.one_of(st.none(), st.integers(-3, 9)), st.one_of(st.none(), st.integers(-9, 9))),
                max_size=40), st.sampled_from([1, 7, 60]), st.integers(1, 900))  # fmt: skip
def test_without_keys(rows: list[tuple[Any, Any]], times: int, size: int) -> None:
    """Rows are counted in several groups at once, which are merged."""
    rows = rows * times
    table = pa.table({"x": pa.array([x for x, _ in rows], pa.int64()),
                      "y": pa.array([y for _, y in rows], pa.float64())})  # fmt: skip
    flow = si.from_batches(table.to_batches(max_chunksize=size), table.schema)
    found = flow.group_by().agg(u=Ups(col("x"), col("y")), few=Ups(col("x"), col("y")).filter(col("x") != 5),
                                m=Mean(col("y").cast(pa.int64()))).collect().to_pylist()[0]  # fmt: skip
    assert found["u"] == by_python(Ups, rows)
    assert found["few"] == by_python(Ups, [row for row in rows if row[0] not in (None, 5)])
    assert found["m"] == by_python(Mean, [(y,) for _, y in rows])


@pytest.mark.parametrize("place", [0, 9, 63, 64])
def test_a_sum_that_overflows_fails_without_keys(place: int) -> None:
    values = [2**62 if k == place else 2**62 - 1 if k == 65 else 1 for k in range(66)]
    table = pa.table({"x": values, "y": [0.0] * 66})
    with pytest.raises(si.ComputeError, match=r"integer overflow at test_udaf\.py"):
        si.from_arrow(table).group_by().agg(u=Ups(col("x"), col("y"))).collect()
    assert si.from_arrow(table.slice(0, 65)).group_by().agg(u=Ups(col("x"), col("y"))).collect().num_rows == 1


def test_no_row_gives_null() -> None:
    empty = si.from_arrow(pa.table({"x": pa.array([], pa.float64())})).group_by().agg(m=Mean(col("x")))
    assert empty.collect().to_pydict() == {"m": [None]}
    missing = si.from_arrow(pa.table({"k": [1], "x": pa.array([None], pa.float64())})).group_by("k").agg(m=Mean("x"))
    assert missing.collect().to_pydict() == {"k": [1], "m": [None]}


def test_it_is_shown_pickled_and_called_with_columns() -> None:
    flow = si.from_arrow(pa.table({"k": [1], "x": [1.0]})).group_by("k").agg(m=Mean(col("x")) * 2)
    assert "Mean(x)" in flow.explain()
    assert pickle.loads(pickle.dumps(Mean)) is Mean
    with pytest.raises(si.BadArgument, match="Mean takes 1 columns"):
        Mean("x", "y")
    with pytest.raises(si.WrongType, match="Mean takes float as 'x'"):
        si.from_arrow(pa.table({"s": ["a"]})).group_by().agg(m=Mean("s"))


def test_a_failing_row_names_its_line() -> None:
    @si.udaf
    class Inverse:
        total: float = 0.0

        def update(self, x: float) -> None:
            self.total += 1 / x

        def merge(self, other: Inverse) -> None:
            self.total += other.total

        def finish(self) -> float:
            return self.total

    with pytest.raises(si.ComputeError, match=r"division by zero at test_udaf\.py:\d+ in `Inverse`"):
        si.from_arrow(pa.table({"x": [1.0, 0.0]})).group_by().agg(i=Inverse("x")).collect()


# --- refused, with the line and the reason


class Base:
    n: int = 0

    def update(self, x: int) -> None:
        self.n += x

    def merge(self, other: Any) -> None:
        self.n += other.n

    def finish(self) -> int:
        return self.n


def made(**changes: Any) -> type:
    body = {name: value for name, value in vars(Base).items() if name in ("update", "merge", "finish", "n")}
    annotations = changes.pop("annotations", {"n": int})
    return type("Changed", (), {**body, "__annotations__": annotations, **changes})


CASES: list[tuple[dict[str, Any], str]] = [
    ({"annotations": {}}, "no typed fields"),
    ({"annotations": {"n": list}}, "type that is not supported"),
    ({"annotations": {"n": str}}, "type that is not supported"),
    ({"n": "zero"}, "default of 'n' is not int"),
    ({"n": 0.5}, "default of 'n' is not int"),
    ({"annotations": {"m": "int", "n": int}}, "'m' has no default"),
]


@pytest.mark.parametrize(("changes", "reason"), CASES, ids=lambda value: "" if isinstance(value, dict) else value)
def test_a_wrong_class_is_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(CannotCompile, match=reason):
        si.udaf(made(**changes))


def test_what_cannot_be_compiled_is_refused_with_its_line() -> None:
    with pytest.raises(CannotCompile, match=r"(?s)open.*test_udaf\.py:\d+"):

        @si.udaf
        class Opens(Base):
            n: int = 0

            def update(self, x: int) -> None:
                self.n += len(open("x").read())  # noqa: SIM115

            def merge(self, other: Opens) -> None:
                pass

            def finish(self) -> int:
                return self.n

    with pytest.raises(CannotCompile, match=r"self\.m is no field"):

        @si.udaf
        class Unknown:
            n: int = 0

            def update(self, x: int) -> None:
                self.m = x
    with pytest.raises(CannotCompile, match="it returns a value"):

        @si.udaf
        class Returns:
            n: int = 0

            def update(self, x: int) -> int:
                return x
