"""Jobs whose flow changes between two starts: aggregates added, dropped, renamed; steps that are named."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, note
from hypothesis import strategies as st

import scalein as si
from scalein import col
from scalein.api.column import Column
from scalein.api.flow import Flow
from scalein.exec import aggregate_operator
from scalein.exec.evolution import folder_name, states_by_folder
from scalein.jobs.checkpoint import RETAINED_EPOCHS, Checkpoint
from scalein.jobs.job import Job
from scalein.testing import Crashed, Stream, crash_at, until
from tests import oracle
from tests.engines import examples
from tests.jobs import golden
from tests.jobs.streams import cut, rows_in
from tests.jobs.test_same_rows import DELAY_MS, tables
from tests.oracle import streams
from tests.oracle.streams import Batch, End
from tests.same import assert_same

pytestmark = pytest.mark.filterwarnings("ignore:the flow has changed:RuntimeWarning")

# Each with the rows that it is over, if these are not all; z is never null.
POOL: dict[str, tuple[Column, Column | None]] = {
    "n": (si.count(), None), "total": (col("x").sum(), None), "m": (col("f").mean(), None),
    "mx": (col("x").mean(), None), "known": (col("x").count(), None), "lo": (col("x").min(), None),
    "hi": (col("f").max(), None), "word": (col("k").max(), None), "share": ((col("x") > 1).mean(), None),
    "few": (si.count(), col("x") > 2), "some": (col("x").sum(), col("f") > 0), "v": (col("x").var(), None),
    "s": (col("f").std(), None), "af": (col("k").arg_min(col("f")), None), "ff": (col("k").first(), None),
    "lf": (col("f").last(), None), "co": (si.cov("x", "g"), None), "fx": (col("k").first(), col("x") > 1),
    "zs": (col("z").sum(), None), "zm": (col("z").mean(), None), "zl": (col("z").min(), None),
    "zf": (col("z").first(), None), "za": (col("z").arg_max("z"), None), "zv": (col("z").var(), None),
    "zt": (col("t").max(), None),
}  # fmt: skip
ENDS: dict[str, tuple[Callable[[Flow], Any], str]] = {
    "running": (lambda s: s.group_by("g"), "final"),
    "no keys": (lambda s: s.group_by(), "final"),
    "running, changes": (lambda s: s.group_by("g"), "changes"),
    "no keys, changes": (lambda s: s.group_by(), "changes"),
    "tumbling": (lambda s: s.group_by("g", si.tumbling("t", "60ms")), "final"),
    "tumbling, changes": (lambda s: s.group_by("g", si.tumbling("t", "60ms")), "changes"),
    "sliding": (lambda s: s.group_by("g", si.sliding("t", "80ms", every="30ms")), "final"),
    "sliding, changes": (lambda s: s.group_by("g", si.sliding("t", "80ms", every="30ms")), "changes"),
}


@dataclass
class Life:
    """A run of a job: its aggregates in their order, how many batches it reads, and how it begins."""

    aggs: list[str]
    suffix: str  # of their names
    batches: int
    from_savepoint: bool

    def items(self, born: dict[str, int]) -> dict[str, Column]:
        """The aggregates over rows of the lives since each was added."""
        found = {}
        for name in self.aggs:
            agg, where = POOL[name]
            if born.get(name):
                since = col("life") >= born[name]
                where = since if where is None else where & since
            found[f"{name}{self.suffix}"] = agg if where is None else agg.filter(where)
        return found


@st.composite
def many_lives(draw: st.DrawFn) -> list[Life]:
    chosen = st.lists(st.sampled_from(sorted(POOL)), min_size=1, max_size=6, unique=True)
    return [Life(draw(chosen), draw(st.sampled_from(["", "_"])), draw(st.integers(0, 4)), draw(st.booleans()))
            for _ in range(draw(st.integers(2, 4)))]


def births(lives: list[Life]) -> list[dict[str, int]]:
    """For each life, since which one each of its aggregates is there."""
    found: list[dict[str, int]] = []
    for number, life in enumerate(lives):
        found.append({name: found[-1].get(name, number) if found else 0 for name in life.aggs})
    return found


def by_key(table: pa.Table) -> dict[Any, dict[str, Any]]:
    """Rows by their keys; of changes the last of each key."""
    return {(row.get("g"), row.get("window_start")): {**row, "op": ""} for row in table.to_pylist()}


@pytest.mark.parametrize("name", ENDS)
@examples(1)
@given(table=tables(), lives=many_lives(), sizes=st.lists(st.integers(1, 15), min_size=1, max_size=3),
       workers=st.integers(1, 3), memory=st.sampled_from([None, "1B", "200MB"]))
def test_aggregates_that_come_and_go(name: str, table: pa.Table, lives: list[Life], sizes: list[int], workers: int,
                                     memory: str | None) -> None:
    """As if each counted the rows since it was added; the oracle filters by the life that a row came in."""
    build, emit = ENDS[name]
    given = table.append_column(pa.field("z", pa.int64(), False), pa.array(range(table.num_rows), pa.int64()))
    batches = cut(given, sizes)
    ends = [min(sum(life.batches for life in lives[: number + 1]), len(batches) - 1) for number in range(len(lives))]
    ends[-1] = len(batches)
    life_of = [next(number for number, end in enumerate(ends) if at < end) for at in range(len(batches))]
    events = [batch.append_column("life", pa.array([life] * batch.num_rows, pa.int64()))
              for batch, life in zip(batches, life_of, strict=True)]
    note(f"{lives} {ends}")

    def flow(source: Flow, life: Life, born: dict[str, int]) -> Flow:
        return build(source.with_watermark("t", f"{DELAY_MS}ms")).agg(**life.items(born))

    with tempfile.TemporaryDirectory() as folder:
        checkpoint, savepoint = Path(folder, "0"), None
        for number, (life, born) in enumerate(zip(lives, births(lives), strict=True)):
            end, is_last, out = ends[number], number == len(lives) - 1, si.to_memory()
            job = flow(si.from_source(Stream({"all": batches}, allowed={"all": end})), life, {}).start(
                sink=out, checkpoint=checkpoint, savepoint=savepoint, emit=emit, evolve=True, workers=workers,
                memory=memory, every="1h")
            if is_last:
                job.wait()
            else:
                wanted = sum(batch.num_rows for batch in batches[:end])
                until(lambda: rows_in(job) >= wanted or not job.is_active, job)  # noqa: B023
                savepoint = job.snapshot("s") if lives[number + 1].from_savepoint and job.is_active else None
                job.stop()
            checkpoint = Path(folder, str(number + 1)) if savepoint is not None else checkpoint
            note(f"life {number}: {out.table().to_pylist()}")
            sofar = pa.Table.from_batches(events[:end], events[0].schema)
            first, asked = 0 if number == 0 else ends[number - 1], flow(si.from_arrow(sofar), life, born)
            if emit == "changes":
                touched = flow(si.from_arrow(pa.Table.from_batches(events[first:end], events[0].schema)), life, born)
                whole, got = by_key(oracle.collect(asked)), by_key(out.table())
                if name == "no keys, changes" and not any(batch.num_rows for batch in events[first:end]):
                    assert set(got) <= set(whole)  # of no row at all, there is a result at the end
                    continue
                want = {key: {**whole[key], "op": ""} for key in by_key(oracle.collect(touched))}
                schema = asked.schema
                assert_same(rows_table(got, schema), rows_table(want, schema), tolerance=1e-9)
                continue
            trace = streams.run(flow(si.flow(events[0].schema), life, born), [*map(Batch, events), End()])
            rows = [row for step in trace.outputs[first: None if is_last else end] for row in step]
            assert_same(out.table().cast(asked.schema), streams.table_of(rows, asked.op.schema), tolerance=1e-9)


def rows_table(rows: dict[Any, dict[str, Any]], schema: pa.Schema) -> pa.Table:
    return pa.Table.from_pylist([{name: row[name] for name in schema.names} for row in rows.values()], schema)


# --- by hand

SCHEMA = pa.schema([pa.field("k", pa.string(), False), pa.field("v", pa.int64(), False), pa.field("t", pa.int64()),
                    pa.field("w", pa.string())])


def rows(*given: tuple[str, int, int]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist([{"k": k, "v": v, "t": t, "w": f"{k}{v}"} for k, v, t in given], SCHEMA)


FIRST = rows(("a", 1, 1), ("b", 2, 2), ("a", 3, 3))
SECOND = rows(("a", 5, 4), ("c", 7, 5))


class Fed:
    """Two batches, the first `count` of which are there now."""

    schema, bounded, name = SCHEMA, False, "fed"

    def __init__(self, count: int) -> None:
        self._count = count

    def partitions(self) -> list[str]:
        return ["all"]

    def until_now(self) -> Fed:
        return self

    def read(self, partition: str, offset: Any) -> Any:
        for number, batch in enumerate([FIRST, SECOND][: self._count]):
            if number >= (offset or 0):
                yield batch, number + 1


class Started:
    """Starts of a job with one checkpoint, each with a sink of its own."""

    def __init__(self, folder: Path, emit: str = "changes") -> None:
        self.folder, self._emit, self._batches = folder, emit, 0

    def __call__(self, build: Callable[[Flow], Flow], *, batches: int, **options: Any) -> list[dict[str, Any]]:
        out = si.to_memory()
        build(si.from_source(Fed(batches))).start(sink=out, checkpoint=self.folder, emit=self._emit, until="now",
                                                  **options).wait()
        return [{name: value for name, value in row.items() if name != "op"} for row in out.table().to_pylist()]


@pytest.fixture
def start(tmp_path: Path) -> Started:
    return Started(tmp_path)


def test_what_an_added_aggregate_shares_with_others_begins_empty_for_it(start: Started) -> None:
    """A mean of a sum that was there would be divided by a count that was not."""
    start(lambda s: s.group_by("k").agg(n=si.count(), total=col("v").sum()), batches=1)
    found = start(lambda s: s.group_by("k").agg(total=col("v").sum(), mean=col("v").mean(), n=si.count(),
                                                m=si.count().filter(col("v") > 0)), batches=2, evolve=True)
    assert {row["k"]: (row["total"], row["mean"], row["n"], row["m"]) for row in found} == {
        "a": (9, 5.0, 3, 1), "c": (7, 7.0, 1, 1)}  # fmt: skip


def test_a_count_that_is_added_begins_at_zero(start: Started) -> None:
    start(lambda s: s.group_by("k").agg(total=col("v").sum()), batches=1)
    with pytest.warns(RuntimeWarning, match=r"count rows from now on: count\(\)$") as warned:
        found = start(lambda s: s.group_by("k").agg(total=col("v").sum(), n=si.count()), batches=2, evolve=True)
    assert len([each for each in warned if "were added" in str(each.message)]) == 1
    assert {row["k"]: (row["total"], row["n"]) for row in found} == {"a": (9, 1), "c": (7, 1)}


def test_what_was_added_begins_anew_when_it_was_dropped(start: Started) -> None:
    def both(s: Flow) -> Flow:
        return s.group_by("k").agg(n=si.count(), total=col("v").sum())

    start(both, batches=1)
    start(lambda s: s.group_by("k").agg(n=si.count()), batches=1)
    found = start(both, batches=2, evolve=True)
    assert {row["k"]: (row["n"], row["total"]) for row in found} == {"a": (3, 5), "c": (1, 7)}


def test_dropping_renaming_and_moving_needs_no_word(start: Started) -> None:
    start(lambda s: s.group_by("k").agg(n=si.count(), total=col("v").sum(), top=col("v").max()), batches=1)
    before = sorted(path.name for path in start.folder.glob("state-*"))
    start(lambda s: s.group_by("k").agg(most=col("v").max(), rows=si.count(), sum=col("v").sum()), batches=1)
    assert sorted(path.name for path in start.folder.glob("state-*")) == before, "nothing is rewritten for that"
    found = start(lambda s: s.group_by("k").agg(most=col("v").max(), rows=si.count()), batches=2)
    assert {row["k"]: (row["most"], row["rows"]) for row in found} == {"a": (5, 3), "c": (7, 1)}


def test_a_group_without_rows_since_is_null_there(tmp_path: Path) -> None:
    """Also in what is computed from it: these columns could not be null."""
    start = Started(tmp_path, "final")

    def windows(*more: Column) -> Callable[[Flow], Flow]:
        return lambda s: s.with_watermark("t", 0).group_by("k", si.tumbling("t", 4)).agg(si.count(), *more)

    assert start(windows(), batches=1) == []
    more = [col("v").sum().alias("s"), col("v").min().alias("lo"), col("v").mean().alias("m"),
            col("w").first().alias("f")]
    found = start(lambda s: windows(*more)(s).with_columns(y=col("s") * 2, missing=col("lo").is_null()), batches=2,
                  evolve=True)  # fmt: skip
    assert [(row["k"], row["count"], row["s"], row["lo"], row["m"], row["f"], row["y"], row["missing"])
            for row in sorted(found, key=str)] == [
        ("a", 2, None, None, None, None, None, True), ("b", 1, None, None, None, None, None, True)]  # fmt: skip


@pytest.mark.parametrize("point", ["open", "batch", "freeze", "publish", "commit"])
@pytest.mark.parametrize("emit", ["final", "changes"])
def test_a_crash_while_a_state_evolves(point: str, emit: str, tmp_path: Path) -> None:
    def flow(*more: Column) -> Callable[[Flow], Flow]:
        return lambda s: s.with_watermark("t", 0).group_by("k", si.tumbling("t", 5)).agg(si.count(), *more)

    def evolved(folder: Path) -> None:
        flow(col("v").sum())(si.from_source(Fed(2))).start(
            sink=si.to_ipc(folder / "out"), checkpoint=folder / "c", emit=emit, until="now", evolve=True).wait()

    whole, folder = tmp_path / "whole", tmp_path / "crashed"
    for each in (whole, folder):
        Started(each / "c", emit)(flow(), batches=1)
    evolved(whole)
    for _ in range(2):
        with crash_at(point), suppress(Crashed):
            evolved(folder)
    evolved(folder)
    assert written(folder / "out") == written(whole / "out") != []
    named = {folder_name(number) for epoch in Checkpoint(folder / "c").kept() for number in states_by_folder(epoch)}
    assert named == {path.name for path in (folder / "c").glob("state-*")}, "what crashed starts left is removed"


def written(folder: Path) -> list[str]:
    parts = (pa.ipc.open_file(part).read_all() for part in sorted(folder.glob("part-*")))
    return sorted(str(row) for part in parts for row in part.to_pylist())


def test_the_old_checkpoint_stays_until_there_is_a_new_one(start: Started) -> None:
    """A start with the new flow that dies leaves one that the old flow goes on from."""
    start(lambda s: s.group_by("k").agg(n=si.count()), batches=1)
    with crash_at("publish"), pytest.raises(Crashed):
        start(lambda s: s.group_by("k").agg(n=si.count(), total=col("v").sum()), batches=2, evolve=True)
    found = start(lambda s: s.group_by("k").agg(n=si.count()), batches=2)
    assert {row["k"]: row["n"] for row in found} == {"a": 3, "c": 1}


def test_folders_of_earlier_flows_go_with_their_epochs(start: Started) -> None:
    for number in range(5):
        aggs = {f"n{k}": si.count().filter(col("v") > k) for k in range(number + 1)}
        start(lambda s, aggs=aggs: s.group_by("k").agg(**aggs), batches=1, evolve=True)  # type: ignore[misc]
    assert len(list(start.folder.glob("state-*"))) == RETAINED_EPOCHS


# --- what is refused


def test_an_added_aggregate_is_refused_with_a_word_that_helps(start: Started) -> None:
    start(lambda s: s.group_by("k").agg(n=si.count()), batches=1)
    with pytest.raises(si.BadArgument, match=r"(?s)does not have.*found .*v\.sum\(\).*checkpoint .*count\(\).*evolve"):
        start(lambda s: s.group_by("k").agg(n=si.count(), total=col("v").sum()), batches=2)


def test_what_ops_downstream_do_not_want_is_not_there(start: Started) -> None:
    def flow(*names: str) -> Callable[[Flow], Flow]:
        return lambda s: s.group_by("k").agg(n=si.count(), total=col("v").sum()).select("k", *names)

    start(flow("n"), batches=1)
    with pytest.raises(si.BadArgument, match=r"(?s)v\.sum\(\).*evolve"):
        start(flow("n", "total"), batches=2)
    found = start(flow("n", "total"), batches=2, evolve=True)
    assert {row["k"]: (row["n"], row["total"]) for row in found} == {"a": (3, 5), "c": (1, 7)}


@pytest.mark.parametrize("change", [
    lambda s: s.group_by("k", "w").agg(n=si.count()),
    lambda s: s.group_by(k=col("k") + "!").agg(n=si.count()),
    lambda s: s.group_by("k", si.tumbling("t", 5)).agg(n=si.count()),
    lambda s: s.cast({"k": pa.large_binary()}).group_by("k").agg(n=si.count()),
    lambda s: s.distinct("k").group_by("k").agg(n=si.count()),
    lambda s: s.distinct("k"),
    lambda s: s,
], ids=["key", "expression", "window", "type", "step before", "other step", "no step"])  # fmt: skip
def test_all_else_is_refused_with_the_difference(change: Callable[[Flow], Flow], start: Started) -> None:
    start(lambda s: s.group_by("k").agg(n=si.count()), batches=1)
    with pytest.raises(si.BadArgument, match=r"(?s)other state.*checkpoint .*Aggregate by k.*flow .*hint"):
        start(change, batches=2, evolve=True)


def test_a_window_of_another_size_or_time_is_refused(tmp_path: Path) -> None:
    start = Started(tmp_path, "final")

    def flow(time: str, size: int) -> Callable[[Flow], Flow]:
        return lambda s: s.with_watermark(time, 9).group_by(si.tumbling(time, size)).agg(n=si.count())

    start(flow("t", 5), batches=1)
    for time, size in (("t", 6), ("v", 5)):
        with pytest.raises(si.BadArgument, match=r"(?s)tumbling\(t, 5\).*flow .*tumbling\((t, 6|v, 5)\)"):
            start(flow(time, size), batches=2, evolve=True)


def test_other_types_are_refused(start: Started) -> None:
    start(lambda s: s.group_by("k").agg(total=col("v").sum()), batches=1)
    with pytest.raises(si.BadArgument, match=r"(?s)other types.*found .*v\.sum\(\).*v: i64.*v: f64"):
        start(lambda s: s.cast({"v": pa.float64()}).group_by("k").agg(total=col("v").sum()), batches=2, evolve=True)


def test_a_checkpoint_of_an_earlier_version_goes_on_unchanged_first(tmp_path: Path) -> None:
    """It does not say which column is whose."""
    shutil.copytree(golden.FOLDER / "running", tmp_path, dirs_exist_ok=True)
    stream = Stream({"all": golden.BATCHES}, allowed={"all": 8})
    source = si.from_source(stream)
    given: dict[str, Any] = {"sink": si.to_ipc(tmp_path / "out"), "late": si.to_ipc(tmp_path / "late"),
                             "checkpoint": tmp_path / "checkpoint", "evolve": True}  # fmt: skip
    with pytest.raises(si.BadArgument, match="other state"):
        source.group_by("k").agg(n=si.count(), total=col("id").sum()).start(**given)
    golden.start("running", tmp_path, stream).stop()
    source.group_by("k").agg(n=si.count(), more=col("id").max()).start(**given).stop()


# --- rows that are held


def test_rows_that_are_held_serve_what_is_added(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    """An aggregate as large as its input has all rows, and so has every other one beside it."""
    start = Started(tmp_path, "final")

    def flow(**aggs: Column) -> Callable[[Flow], Flow]:
        return lambda s: s.with_watermark("t", 0).group_by("k", si.tumbling("t", 5)).agg(**aggs)

    start(flow(n=col("v").n_unique(), f=col("w").first()), batches=1)
    with pytest.raises(si.BadArgument, match="evolve"):
        start(flow(n=col("v").n_unique(), s=col("v").sum()), batches=2)
    found = start(flow(s=col("v").sum(), n=si.count()), batches=2, evolve=True)
    assert {row["k"]: (row["s"], row["n"]) for row in found} == {"a": (9, 3), "b": (2, 1)}
    assert not [each for each in recwarn if "were added" in str(each.message)]
    with pytest.raises(si.BadArgument, match=r"(?s)does not have them.*w: str"):
        start(flow(s=col("v").sum(), f=col("w").first()), batches=2, evolve=True)


def test_groups_have_no_rows_for_what_needs_them(tmp_path: Path) -> None:
    start = Started(tmp_path, "final")

    def flow(**aggs: Column) -> Callable[[Flow], Flow]:
        return lambda s: s.with_watermark("t", 9).group_by("k", si.tumbling("t", 5)).agg(**aggs)

    start(flow(n=si.count()), batches=1)
    with pytest.raises(si.BadArgument, match=r"(?s)needs all rows.*v\.n_unique\(\)"):
        start(flow(n=si.count(), u=col("v").n_unique()), batches=2, evolve=True)


# --- names


def test_steps_with_names_find_their_state(start: Started) -> None:
    def counts(s: Flow) -> Flow:
        return s.group_by("k").agg(n=si.count()).filter(col("n") > 0).named("counts")

    start(lambda s: counts(s.distinct("w").named("words")), batches=1)
    with pytest.raises(si.BadArgument, match=r"(?s)checkpoint *nothing more.*flow *Limit 100.*evolve"):
        start(lambda s: counts(s.distinct("w").named("words").limit(100)), batches=2)
    found = start(lambda s: counts(s.limit(100).distinct("w").named("words")), batches=2, evolve=True)
    assert {row["k"]: row["n"] for row in found} == {"a": 3, "c": 1}
    assert start(lambda s: counts(s), batches=2, evolve=True) == []


def test_steps_with_names_may_change_places(tmp_path: Path) -> None:
    start = Started(tmp_path, "final")
    start(lambda s: s.distinct("v").named("v").distinct("w").named("w"), batches=1)
    assert [row["v"] for row in start(lambda s: s.distinct("w").named("w").distinct("v").named("v"), batches=2)] == [
        5, 7]
    assert start(lambda s: s.distinct("w").named("w").distinct("v").named("v"), batches=2) == []


def test_a_step_may_get_its_name_later(start: Started) -> None:
    start(lambda s: s.group_by("k").agg(n=si.count()), batches=1)
    found = start(lambda s: s.group_by("k").agg(n=si.count()).named("counts"), batches=2)
    assert {row["k"]: row["n"] for row in found} == {"a": 3, "c": 1}


def test_names_are_of_steps_with_state_and_used_once(start: Started) -> None:
    flow = si.from_source(Fed(1))
    with pytest.raises(si.BadArgument, match="needs a step that has state"):
        flow.filter(col("v") > 1).named("rows")
    with pytest.raises(si.BadArgument, match="takes the name"):
        flow.distinct().named("")
    with pytest.raises(si.BadArgument, match=r"the same name(.|\n)*'twice'"):
        start(lambda s: s.distinct("k").named("twice").limit(3).named("twice"), batches=1)


# --- paths of an operator


def test_many_groups_go_straight_to_a_store_that_was_migrated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(aggregate_operator, "MAX_GROUPS", 1 << 6)
    batches = [pa.record_batch({"k": [(n * 100 + i) % 3_000 for i in range(100)], "x": list(range(100))})
               for n in range(60)]  # fmt: skip

    def job(allowed: int, out: Any, **aggs: Column) -> Job:
        flow = si.from_source(Stream({"all": batches}, allowed={"all": allowed})).group_by("k").agg(
            **aggs, unused=col("x").max()).drop("unused")
        return flow.start(sink=out, checkpoint=tmp_path, every="1h", evolve=True)

    first = job(30, si.to_memory(), n=si.count())
    until(lambda: rows_in(first) == 3_000, first)
    first.stop()
    out = si.to_memory()
    job(60, out, s=col("x").sum(), m=si.count().filter(col("x") >= 0), n=si.count()).wait()
    found = {row["k"]: (row["n"], row["m"], row["s"]) for row in out.table().to_pylist()}
    assert found == {k: (2, 1, k % 100) for k in range(3_000)}


def test_an_aggregate_of_an_aggregate_that_began_later(tmp_path: Path) -> None:
    """What may be null in the first one's results may be so in what the second one reads."""
    start = Started(tmp_path, "changes")

    def flow(*more: str) -> Callable[[Flow], Flow]:
        picked = {"s": col("v").sum(), "n": si.count()}

        def build(s: Flow) -> Flow:
            first = s.with_watermark("t", 0).group_by("k", si.tumbling("t", 2)).agg(**{m: picked[m] for m in more})
            return first.group_by("k").agg(**{m: col(m).sum() for m in more})

        return build

    start(flow("n"), batches=1)
    for _ in range(2):
        start(flow("n", "s"), batches=1, evolve=True)
    found = start(flow("n", "s"), batches=2)
    assert {row["k"]: (row["n"], row["s"]) for row in found} == {"a": (2, None), "b": (1, None)}
