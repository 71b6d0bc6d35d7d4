"""process in jobs: what a job gives is what objects of the class give in plain Python, whatever batches and schedules,
also after kills, with other numbers of workers, and with state that does not fit into memory.
"""

from __future__ import annotations

import random
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import scalein as si
from scalein.exec import process
from scalein.testing import Stream
from scalein.udf import ProcessClass
from tests.conformance.shapes import Shape, rows
from tests.conformance.ways import by_collect, by_job
from tests.engines import examples

T = pa.timestamp("ms")
SCHEMA = pa.schema([("k", pa.string()), ("t", T), ("x", pa.int64()), ("s", pa.string()), ("n", pa.int64())])
ROWS = st.lists(st.tuples(st.sampled_from(["a", "b", None, "a key that is longer"]),
                          st.one_of(st.integers(0, 60_000), st.just(None)), st.integers(-9, 9),
                          st.sampled_from(["", "x", "a text of some length", None])), max_size=60)  # fmt: skip


@si.process
class Machine:
    """Timers that are set again, cleared and late; text, times and optional fields."""

    total: int = 0
    since: si.Timestamp | None = None
    wait: si.Duration = si.duration("3s")
    text: str = "none"
    fired: int = 0
    recent: si.Ring[int, 3]

    def on_row(self, row: Any) -> Any:
        self.total += row.x
        self.recent.append(row.x)
        if self.since is None:
            self.since = row.t
        if row.x > 6:
            self.clear_timer()
        elif row.x > 0:
            self.set_timer(row.t + row.x * self.wait)
        elif row.x == -5:
            self.set_timer(row.t - si.duration("1s"))
        if row.s is not None and row.x % 2 == 0:
            yield {"n": row.n, "at": row.t, "text": self.text, "age": row.t - self.since}
            self.text = row.s + self.text[:3]
        if row.x == 9:
            self.since = None

    def on_timer(self, at: Any) -> Any:
        self.fired += 1
        last = sum(self.recent) if len(self.recent) > 1 else 0
        yield {"n": self.total + last, "at": at, "text": self.text, "age": None}
        if self.fired % 3:
            self.set_timer(at + self.fired * si.duration("1s"))


def by_python(cls: ProcessClass, rows: list[dict[str, Any]], ttl: timedelta | None = None) -> list[tuple[Any, ...]]:
    """Brute force: each key alone, over its rows in the order of time."""

    class Object(cls.python):  # type: ignore[misc, name-defined]
        timer = None

        def __init__(self) -> None:
            self.recent: si.Ring[int] = si.Ring(3)

        def set_timer(self, at: Any) -> None:
            self.timer = at

        def clear_timer(self) -> None:
            self.timer = None

    found: list[tuple[Any, ...]] = []
    rows = [row for row in rows if row["t"] is not None]
    end = max((row["t"] for row in rows), default=None)
    for key in dict.fromkeys(row["k"] for row in rows):
        state, last = Object(), None

        def emit(made: Any, key: Any = key) -> None:
            found.extend((key, *(each[name] for name in ("n", "at", "text", "age"))) for each in made or ())

        def fire(state: Any, until: Any, most: int = 1 << 30) -> Any:
            at = None
            while state.timer is not None and (until is None or state.timer <= until) and most:
                at, state.timer, most = state.timer, None, most - 1
                emit(state.on_timer(at))
            return at

        for row in sorted((row for row in rows if row["k"] == key), key=lambda row: row["t"]):
            last = fire(state, row["t"]) or last
            if ttl is not None and last is not None and state.timer is None and row["t"] - last >= ttl:
                state = Object()
            emit(state.on_row(SimpleNamespace(**row)))
            last = row["t"]
        fire(state, end)
        fire(state, None, 1)
    return found


def as_table(rows: list[tuple[Any, ...]]) -> pa.Table:
    columns = list(zip(*rows, strict=True)) or [()] * (len(SCHEMA) - 1)
    arrays = [pa.array(column, field.type) for column, field in zip(columns, SCHEMA, strict=False)]
    return pa.table([*arrays, pa.array(range(len(rows)), pa.int64())], schema=SCHEMA)


def tuples(table: pa.Table) -> list[tuple[Any, ...]]:
    found = zip(*(column.to_pylist() for column in table.columns), strict=True)
    return sorted(found, key=lambda row: tuple((value is not None, value) for value in row))


def in_order(rows: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    return sorted(rows, key=lambda row: tuple((value is not None, value) for value in row))


def flow_of(table: pa.Table, size: int, cls: Any = Machine, delay: str = "1h", **more: Any) -> si.Flow:
    flow = si.from_batches(table.to_batches(max_chunksize=size), table.schema)
    return flow.with_watermark("t", delay).group_by("k").process(cls, **more)


def run(flow: si.Flow, **more: Any) -> pa.Table:
    out = si.to_memory()
    flow.start(sink=out, **more).wait()
    return out.table()


PLAIN = si.process(compile=False)(Machine.python)


@examples(30)
@given(ROWS, st.integers(1, 20), st.sampled_from([None, "5s"]), st.booleans())
def test_jobs_and_collect_give_what_the_class_gives(rows: list[tuple[Any, ...]], size: int, ttl: str | None,
                                                    in_time: bool) -> None:  # fmt: skip
    if in_time:  # the watermark moves among the rows
        rows = sorted(rows, key=lambda row: row[1] or 0)
    table = as_table(rows)
    want = in_order(by_python(Machine, table.to_pylist(), None if ttl is None else timedelta(seconds=5)))
    for cls in (Machine, PLAIN):
        flow = si.from_arrow(table).with_watermark("t", "1s").group_by("k").process(cls, ttl=ttl)
        assert tuples(flow.collect()) == want
        got = run(flow_of(table, size, cls, "0s" if in_time else "1h", ttl=ttl), workers=1 + size % 3)
        assert tuples(got) == want


def many(rows: int, keys: int, seed: int) -> pa.Table:
    """Rows out of order by up to a second."""
    made = random.Random(seed)
    times = [k * 7 + made.randrange(1000) for k in range(rows)]
    return as_table([(f"key {made.randrange(keys)}", t, made.randint(-9, 9), made.choice(["x", None, "word " * 5]))
                     for t in times])  # fmt: skip


@pytest.mark.parametrize("ttl", [None, "5s"])
@pytest.mark.parametrize("cls", [Machine, PLAIN], ids=["compiled", "python"])
def test_state_that_does_not_fit_into_memory(cls: Any, ttl: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    table = many(3000, 300, 5)
    want = in_order(by_python(Machine, table.to_pylist(), None if ttl is None else timedelta(seconds=5)))
    monkeypatch.setattr("scalein.exec.process_operator.TABLE_SHARE", 1 << 10)  # of 64 MB: some hundreds of records
    got = run(flow_of(table, 100, cls, "1s", ttl=ttl), memory="64MB")
    assert tuples(got) == want


@pytest.mark.parametrize("ttl", [None, "5s"])
@pytest.mark.parametrize("cls", [Machine, PLAIN], ids=["compiled", "python"])
@pytest.mark.parametrize("least", [240_000, 1], ids=["once", "again and again"])
def test_keys_that_do_not_fit_into_the_memory_of_a_bounded_run(cls: Any, ttl: str | None, least: int,
                                                               monkeypatch: pytest.MonkeyPatch) -> None:
    table = many(3000, 400 if least > 1 else 40, 5)
    want = in_order(by_python(Machine, table.to_pylist(), None if ttl is None else timedelta(seconds=5)))
    monkeypatch.setattr(process, "MIN_TABLE_BYTES", least)
    monkeypatch.setattr(process, "TABLE_SHARE", 1 << 30)
    monkeypatch.setattr(process, "LIMITED_ROWS", 100)
    shifts: list[int] = []
    spilled = process._BoundedRun._spilled

    def spied(self: Any, states: Any, rows: Any, shift: int) -> Any:
        shifts.append(shift)
        return spilled(self, states, rows, shift)

    monkeypatch.setattr(process._BoundedRun, "_spilled", spied)
    flow = si.from_arrow(table).with_watermark("t", "1s").group_by("k").process(cls, ttl=ttl)
    assert tuples(flow.collect(memory="64MB")) == want
    assert max(shifts) == 0 if least > 1 else max(shifts) > 0


@si.process
class Shares:
    n: int = 0

    def on_row(self, row: Any) -> Any:
        self.n += 1
        yield {"n": row.n, "at": row.t, "text": row.s, "share": self.n / row.x}


@pytest.mark.parametrize("cls", [Shares, si.process(compile=False)(Shares.python)], ids=["compiled", "python"])
def test_rows_that_fail_are_dead_letters_and_nothing_of_them_is_stored(cls: Any) -> None:
    table = as_table([("a", 1, 1, "x"), ("a", 2, 0, "bad"), ("b", 3, 0, "worse"), ("a", 4, 4, "y"), ("b", 5, 1, "z")])
    out, bad = si.to_memory(), si.to_memory()
    flow_of(table, 2, cls).start(sink=out, on_error=bad).wait()
    assert out.table()["share"].to_pylist() == [1.0, 0.5, 1.0]
    found = bad.table()
    assert found["s"].to_pylist() == ["bad", "worse"]
    assert found["k"].to_pylist() == ["a", "b"]
    assert all("ivision by zero" in text and "test_process_jobs.py:" in text for text in found["error"].to_pylist())
    with pytest.raises(si.ComputeError, match=r"ivision by zero at test_process_jobs\.py:\d+ in `Shares`"):
        run(flow_of(table, 2, cls))


def test_late_rows_go_to_their_sink_and_rows_without_a_time_are_counted() -> None:
    table = as_table([("a", 5000, 2, "x"), ("a", 9000, 2, "y"), ("a", 1000, 2, "late"), ("a", None, 2, "never"),
                      ("a", 9000, 4, "z")])  # fmt: skip
    out, late = si.to_memory(), si.to_memory()
    job = flow_of(table, 1, delay="1s").start(sink=out, late=late)
    job.wait()
    assert late.table()["s"].to_pylist() == ["late"]
    assert late.table().schema.names == table.schema.names
    assert (job.metrics()["late_rows"], job.metrics()["timeless_rows"]) == (1, 1)
    want = by_python(Machine, [row for row in table.to_pylist() if row["s"] not in ("late", "never")])
    assert tuples(out.table()) == in_order(want)


def test_a_class_with_other_fields_is_refused(tmp_path: Path) -> None:
    batches = as_table([("a", 1, 1, "x"), ("a", 2, 1, "y")]).to_batches(max_chunksize=1)

    def start(cls: Any) -> None:
        source = Stream({"p": batches})
        flow = si.from_source(source).with_watermark("t", "1s").group_by("k").process(cls)
        flow.start(sink=si.to_memory(), checkpoint=tmp_path).wait()

    start(Shares)
    with pytest.raises(si.BadArgument, match=r"Shares\(n: i64\)(?s:.)*Shares\(n: f64, more: bool\)"):
        start(OtherShares)


@si.process
class OtherShares:
    n: float = 0.0
    more: bool = False

    def on_row(self, row: Any) -> Any:
        yield {"n": row.n, "at": row.t, "text": row.s, "share": self.n}


OtherShares.python.__name__ = "Shares"


@si.process
class Counts:
    n: int = 0
    name: str | None = None

    def on_row(self, row: Any) -> Any:
        self.n += 1
        self.name = row.s or self.name
        self.set_timer(row.i + 10)
        yield {"n": self.n, "name": self.name, "at": row.i}

    def on_timer(self, at: Any) -> Any:
        yield {"n": -self.n, "name": self.name, "at": at}
        self.name = None


@pytest.mark.parametrize("keys", [(), ("f",), ("s", "f")], ids=str)
@pytest.mark.parametrize("cls", [Counts, si.process(compile=False)(Counts.python)], ids=["compiled", "python"])
def test_keys_of_all_kinds_and_none_and_times_that_are_numbers(keys: tuple[str, ...], cls: Any) -> None:
    made = random.Random(3)
    rows = [{"s": made.choice(["x", "a text of some length", None]), "f": made.choice([float("nan"), 0.0, -0.0, None]),
             "i": k + made.randrange(8)} for k in range(150)]  # fmt: skip
    table = pa.Table.from_pylist(rows, pa.schema([("s", pa.dictionary(pa.int8(), pa.string())), ("f", pa.float64()),
                                                  ("i", pa.int64())]))

    def build(flow: si.Flow) -> si.Flow:
        return flow.with_watermark("i", 8).group_by(*keys).process(cls)

    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        same = tuple(None if row[key] is None else repr(row[key] or 0.0) for key in keys)
        groups.setdefault(same, []).append(row)
    want = []
    for group in groups.values():
        state, timer = Counts.python(), None
        state.set_timer = lambda at: None
        for row in sorted(group, key=lambda row: row["i"]):
            if timer is not None and timer <= row["i"]:
                want += [list(each.values()) for each in state.on_timer(timer)]
            want += [list(each.values()) for each in state.on_row(SimpleNamespace(**row))]
            timer = row["i"] + 10
        want += [list(each.values()) for each in state.on_timer(timer)]
    order = partial(sorted, key=str)
    assert order(map(list, tuples(build(si.from_arrow(table)).select("n", "name", "at").collect()))) == order(want)
    for memory in (None, "1B"):
        batches = si.from_batches(table.combine_chunks().to_batches(max_chunksize=37), table.schema)
        got = run(build(batches), memory=memory).select(["n", "name", "at"])
        assert order(map(list, tuples(got))) == order(want)


@si.process
class Silences:
    """The rows of a key between two silences of 15 ms; every third silence is answered once more."""

    since: si.Timestamp | None = None
    n: int = 0
    silences: int = 0
    word: str = ""

    def on_row(self, row: Any) -> Any:
        self.n += 1
        if self.since is None:
            self.since = row.t
            yield {"since": row.t, "n": 0, "word": self.word, "took": None}
        self.set_timer(row.t + si.duration("15ms"))
        if row.g is not None:
            self.word = max(self.word, f"a word of {row.g}")

    def on_timer(self, at: Any) -> Any:
        self.silences += 1
        if self.since is not None:
            yield {"since": self.since, "n": self.n, "word": self.word, "took": at - self.since}
        self.since, self.n = None, 0
        if self.silences % 3 == 0:
            self.set_timer(at + si.duration("10ms"))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("seed", [1, 5, 9, 22])  # the memory of some lives has room for all keys, that of others not
def test_lives_that_end_with_crashes_stops_and_rescales(seed: int, tmp_path: Path) -> None:
    shape = Shape("process", lambda s: s.group_by("k").process(Silences, ttl="40ms"))
    by_collect(shape, rows(seed, 60), random.Random(seed), tmp_path)
    by_job(shape, rows(seed, 60), random.Random(f"{seed} x"), tmp_path)
