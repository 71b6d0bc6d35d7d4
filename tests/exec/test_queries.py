"""A flow is planned once, its kernels are found again, and no data of a run outlives it."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pytest

import scalein as si
from scalein import ComputeError, Flow, col, compiler
from scalein.exec.bounded import Program
from scalein.options import Options
from tests import oracle

SCHEMA = pa.schema({"k": pa.int64(), "v": pa.float64(), "t": pa.int64()})
NAMES = pa.table({"k": [0, 1, 2], "name": ["zero", "one", "two"]})
PLANS: dict[str, Callable[[Flow], Flow]] = {
    "rows": lambda flow: flow.filter(col("v") > 1).select("k", twice=col("v") * 2),
    "columns as they are": lambda flow: flow.select("v", "k"),
    "one group": lambda flow: flow.group_by().agg(s=col("v").sum()),
    "groups": lambda flow: flow.group_by("k").agg(s=col("v").sum(), n=si.count()),
    "groups of floats": lambda flow: flow.group_by("v").agg(n=si.count()),
    "lists": lambda flow: flow.group_by("k").agg(q=col("v").quantile(0.5), c=col("v").n_unique()),
    "tumbling": lambda flow: flow.group_by("k", si.tumbling("t", 10)).agg(n=si.count()).filter(col("n") > 0),
    "sliding": lambda flow: flow.group_by("k", si.sliding("t", 10, every=5)).agg(n=si.count()),
    "join": lambda flow: flow.join(NAMES, on="k").group_by("name").agg(s=col("v").sum()),
    "join of rows": lambda flow: flow.join(NAMES, on="k", how="left").select("name", "v"),
    "distinct": lambda flow: flow.distinct("k"),
    "sort": lambda flow: flow.sort("v", descending=True).limit(3),
    "union": lambda flow: flow.union(flow).group_by("k").agg(n=si.count()),
}


def data(seed: int, rows: int = 20, nulls: bool = False) -> tuple[pa.Table, list[weakref.ref[np.ndarray]]]:
    """A table over arrays of numpy, and how to know that these are gone."""
    rng = np.random.default_rng(seed)
    arrays = [rng.integers(0, 4, rows), rng.integers(0, 50, rows) / 4, np.sort(rng.integers(0, 100, rows))]
    table = pa.table([pa.array(array) for array in arrays], schema=SCHEMA)
    held = [weakref.ref(array) for array in arrays]
    if nulls:
        v = pa.array([None if k % 3 == 0 else float(x) for k, x in enumerate(arrays[1])])
        table = table.set_column(1, "v", v)
    return table, held


def rows_of(table: pa.Table) -> list[dict[str, object]]:
    return sorted(table.to_pylist(), key=repr)


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("plan", PLANS)
def test_every_run_is_as_the_first(plan: str, workers: int) -> None:
    """Other values, nulls, sizes, none at all, a dictionary, and back."""
    unbound = PLANS[plan](si.flow(SCHEMA))
    for seed, rows, nulls in [(1, 20, False), (2, 20, True), (3, 1, False), (4, 0, False), (5, 3000, True),
                              (6, 20, False), (2, 20, True)]:  # fmt: skip
        table, _ = data(seed, rows, nulls)
        bound = PLANS[plan](si.from_arrow(table))
        wanted = rows_of(oracle.collect(bound))
        found = unbound.collect(table, workers=workers)
        if plan != "sort":
            assert rows_of(found) == wanted
        assert found.equals(bound.collect(workers=workers))
        assert found.equals(bound.collect(workers=workers))


def test_text_in_other_forms() -> None:
    unbound = si.flow({"s": str, "x": int}).group_by("s").agg(n=col("x").sum())
    plain = pa.table({"s": ["a", "b", None, "a"], "x": [1, 2, 3, 4]})
    coded = plain.set_column(0, "s", plain["s"].dictionary_encode())
    other = coded.slice(1).set_column(0, "s", pa.array(["c", "b", "c"]).dictionary_encode())
    for table in (plain, coded, other, plain, coded, other.slice(0, 1)):
        wanted = oracle.collect(si.from_arrow(table).group_by("s").agg(n=col("x").sum()))
        assert rows_of(unbound.collect(table)) == rows_of(wanted)


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("plan", PLANS)
def test_data_that_was_given_is_not_held(plan: str, workers: int) -> None:
    flow = PLANS[plan](si.flow(SCHEMA))
    table, held = data(7, 3000)
    flow.collect(table, workers=workers)
    flow.collect(table, workers=workers)
    del table
    gc.collect()
    assert [each() for each in held] == [None] * 3


@pytest.mark.parametrize("plan", PLANS)
def test_data_of_a_flow_ends_with_it(plan: str) -> None:
    table, held = data(8, 3000)
    flow = PLANS[plan](si.from_arrow(table))
    flow.collect()
    del table, flow
    gc.collect()
    assert [each() for each in held] == [None] * 3


def test_the_table_of_a_join_ends_with_its_flow() -> None:
    keys = np.arange(4)
    held = weakref.ref(keys)
    flow = si.flow(SCHEMA).join(pa.table({"k": pa.array(keys), "w": [1, 2, 3, 4]}), on="k").select("w", "v")
    del keys
    assert flow.collect(data(9)[0]).num_rows == 20
    assert held() is not None
    del flow
    gc.collect()
    assert held() is None


def test_a_given_table_may_be_the_one_that_is_joined() -> None:
    flow = si.from_arrow(NAMES).join(si.flow({"k": int, "v": int}), on="k").select("name", "v")
    for k in range(3):
        assert flow.collect(pa.table({"k": [k], "v": [10 * k]})).to_pylist() == [
            {"name": NAMES["name"][k].as_py(), "v": 10 * k}]


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Plans that were made."""
    found: list[object] = []
    original = compiler.compile_flow

    def counted(op: object) -> object:
        found.append(op)
        return original(op)  # type: ignore[arg-type]

    monkeypatch.setattr(compiler, "compile_flow", counted)
    return found


def test_a_plan_is_made_once(planned: list[object]) -> None:
    def flow(table: pa.Table) -> Flow:
        return si.from_arrow(table).filter(col("v") > 3.0625).group_by("k").agg(n=si.count())

    for seed in range(3):
        table, _ = data(seed)
        flow(table).collect()
        made = flow(table)
        made.collect()
        made.collect()
    assert len(planned) == 1


def test_no_more_plans_than_a_few_are_held(planned: list[object]) -> None:
    table, _ = data(1)
    for k in range(80):
        si.from_arrow(table).filter(col("v") > 1000 + k).collect()
    assert len(compiler._plans) <= 64
    before = len(planned)
    si.from_arrow(table).filter(col("v") > 1079).collect()
    assert len(planned) == before


def test_functions_of_python_are_not_confused() -> None:
    table, _ = data(1)

    def flow(number: int) -> Flow:
        def add(batch: pa.RecordBatch) -> pa.RecordBatch:
            return pa.RecordBatch.from_arrays([pa.array([number] * batch.num_rows)], ["n"])

        return si.from_arrow(table).map_batches(add, {"n": int})

    for number in range(3):
        assert set(flow(number).collect()["n"].to_pylist()) == {number}


def test_what_a_function_of_python_holds_ends_with_its_flow() -> None:
    def flow(held: np.ndarray) -> Flow:
        return si.from_arrow(NAMES).map_batches(lambda batch: batch.slice(len(held)), NAMES.schema)

    given = np.arange(3)
    gone = weakref.ref(given)
    assert flow(given).collect().num_rows == 0
    del given
    gc.collect()
    assert gone() is None


def test_a_shared_source_is_not_an_equal_one() -> None:
    one, other = si.from_arrow(pa.table({"x": [1]})), si.from_arrow(pa.table({"x": [2]}))
    flows = [one.union(one, other), one.union(other, one), one.union(other, other), one.union(one, one)]
    assert [flow.collect()["x"].to_pylist() for flow in flows] == [[1, 1, 2], [1, 2, 1], [1, 2, 2], [1, 1, 1]]


def test_an_error_names_the_line_of_its_own_flow() -> None:
    table = pa.table({"x": [1, 0]})
    one = si.from_arrow(table).select(y=7 % col("x"))
    other = si.from_arrow(table).select(y=7 % col("x"))
    lines = []
    for flow in (one, other):
        with pytest.raises(ComputeError) as caught:
            flow.collect()
        lines.append(int(str(caught.value.facts["at"]).rpartition(":")[2]))
    assert lines[1] == lines[0] + 1


def test_one_flow_in_several_threads() -> None:
    flow = PLANS["join"](si.flow(SCHEMA))
    tables = [data(seed, 500)[0] for seed in range(8)]
    wanted = [rows_of(PLANS["join"](si.from_arrow(table)).collect()) for table in tables]
    found: list[object] = [None] * 8

    def work(number: int) -> None:
        for _ in range(20):
            found[number] = rows_of(flow.collect(tables[number]))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == wanted


def test_a_run_that_is_left_or_fails_does_not_harm_the_next() -> None:
    flow = si.flow({"x": int, "k": int}).group_by("k").agg(y=(100 // col("x")).sum())
    good, bad = pa.table({"x": [1, 2], "k": [1, 1]}), pa.table({"x": [1, 0], "k": [1, 1]})
    for _ in range(2):
        assert flow.collect(good).to_pylist() == [{"k": 1, "y": 150}]
        with pytest.raises(ComputeError):
            flow.collect(bad)
        rows = flow.batches(good)
        next(rows)
        rows.close()


def test_a_program_sees_nulls_that_its_first_batches_did_not_have() -> None:
    program = Program(compiler.compile_flow(si.flow({"x": int}).select(y=col("x").fill_null(7)).op))
    options = Options.make(workers=1)
    for values, want in (([1], [1]), ([None, 2], [7, 2]), ([3], [3])):
        batch = pa.record_batch([pa.array(values, pa.int64())], names=["x"])
        assert [row["y"] for out in program.run([batch], options) for row in out.to_pylist()] == want
