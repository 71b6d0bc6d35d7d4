"""One check for every differential test: engine = oracle and, apart from that, oracle = DuckDB.

The engine "duckdb" checks the oracle against DuckDB, wherever the plan can be translated; the others check compiled
code against the oracle, over batch sizes, workers, CPUs and random schedules. What was compared is counted: a test that
compared nothing fails (`tests/differential/conftest.py`). Examples are random; pytest prints their seed, and
`--hypothesis-seed` repeats them. SCALEIN_EXAMPLES=10 tries ten times as many.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import reduce

import duckdb
import pyarrow as pa
import pytest
from _pytest.mark import ParameterSet
from hypothesis import HealthCheck, assume, core, currently_in_test_context, note, settings

import scalein as si
from scalein.api.flow import Flow
from scalein.errors import ComputeError, ScaleinError
from scalein.exec.schedule import Schedule, using
from scalein.ir.ops import Op
from scalein.ir.passes import OP_PASSES
from tests import duck, oracle
from tests.comparisons import COMPARISONS
from tests.oracle import relations
from tests.same import assert_same
from tests.schedules import RandomSchedule

EXAMPLES = float(os.environ.get("SCALEIN_EXAMPLES", "1"))  # the campaign goes deeper

Build = Callable[[Flow], Flow]
Collect = Callable[[Flow], pa.Table]
COLLECTS: tuple[Collect, ...] = (Flow.collect, oracle.collect)


@dataclass(frozen=True, slots=True)
class Engine:
    """What is checked, and how the input is cut for it."""

    name: str
    batch_rows: int | None = None
    workers: int = 1
    cpu: str = "native"

    def __str__(self) -> str:
        return self.name


DUCKDB = Engine("duckdb")
VARIED = Engine("llvm")  # stands for one of COMPILED, chosen by the data
COMPILED = [
    Engine("llvm-native"),
    Engine("llvm-native-1row-w4", 1, workers=4),
    Engine("llvm-v3-7rows-w2", 7, workers=2, cpu="x86-64-v3"),
    Engine("llvm-sse2-1000rows-w3", 1000, workers=3, cpu="x86-64"),
    Engine("llvm-sse2", cpu="x86-64"),
    Engine("llvm-v3-64rows-w3", 64, workers=3, cpu="x86-64-v3"),
]
CPUS = ("native", "x86-64-v3", "x86-64")


def _param(engine: Engine) -> ParameterSet:
    return pytest.param(engine, id=engine.name)


# For tests of generated data: each example meets one of the compiled engines. For tests of examples: two of them.
# The compilers are for what cannot be translated for DuckDB.
every_engine = pytest.mark.parametrize("engine", [_param(DUCKDB), _param(VARIED)])
every_compiler = pytest.mark.parametrize("engine", [_param(VARIED)])
each_engine = pytest.mark.parametrize("engine", [_param(one) for one in (DUCKDB, COMPILED[0], COMPILED[3])])
each_compiler = pytest.mark.parametrize("engine", [_param(one) for one in (COMPILED[0], COMPILED[3])])


def engines_and(name: str, values: Sequence[object], *, untranslated: Sequence[object]) -> pytest.MarkDecorator:
    """Every engine with each value of a parameter, but not DuckDB with what it cannot mean."""
    pairs = [(engine, value) for engine in (DUCKDB, VARIED) for value in values
             if engine is not DUCKDB or value not in untranslated]  # fmt: skip
    return pytest.mark.parametrize(("engine", name), pairs, ids=[f"{value}-{engine}" for engine, value in pairs])


def settled(engine: Engine, table: pa.Table) -> Engine:
    """The engine, or the one that VARIED stands for with this data: the same whenever an example is run again.

    All examples of a test are compiled for one CPU, so that equal kernels are compiled once; other seeds, other CPUs.
    """
    if engine is not VARIED:
        return engine
    test = os.environ["PYTEST_CURRENT_TEST"].partition("[")[0]
    cpu = CPUS[zlib.crc32(f"{core.global_force_seed} {test}".encode()) % len(CPUS)]
    return replace(COMPILED[_digest(table) % len(COMPILED)], cpu=cpu)


def _digest(table: pa.Table) -> int:
    """A number that is the same whenever an example is run again."""
    seen = f"{table.num_rows} {table.get_total_buffer_size()} {table.schema}"  # nbytes refuses views in many pyarrows
    return zlib.crc32(seen.encode())


def examples(count: int) -> settings:
    """Hypothesis settings of a differential test: `count` examples, times SCALEIN_EXAMPLES."""
    return settings(
        max_examples=max(1, round(count * EXAMPLES)),
        deadline=None,
        derandomize=False,
        print_blob=True,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
    )


@dataclass(frozen=True, slots=True)
class Outcome:
    """What `by` gives: a table, or the errors that it may report."""

    by: str
    table: pa.Table | None
    errors: tuple[Exception, ...] = ()
    op: Op | None = None


def check(engine: Engine, table: pa.Table, build: Build, *, ordered: bool, tolerance: float = 0.0,
          errors_may_vanish: bool = False) -> pa.Table | None:  # fmt: skip
    """The engine gives what the oracle gives: the same rows, or one of its errors. None for an error.

    `errors_may_vanish` is for flows in which a pass may drop what fails: a column that nobody reads, rows that a later
    filter drops.
    """
    flow = build(si.from_arrow(table))
    want = by_oracle(flow.op)
    if engine is DUCKDB:
        compare_with_duckdb(want, flow, ordered=ordered, tolerance=tolerance, errors_may_vanish=errors_may_vanish)
        return want.table
    engine = settled(engine, table)
    plan = RandomSchedule(_digest(table)) if engine.workers > 1 else Schedule()
    if currently_in_test_context():
        note(f"{engine!r}, {plan!r}")
    source = si.from_arrow(cut(table, engine.batch_rows))
    with using(plan):
        got = by_engine(build(source), workers=engine.workers, cpu=engine.cpu)
    compare(got, want, ordered=ordered, tolerance=tolerance, errors_may_vanish=errors_may_vanish)
    return want.table


def by_oracle(op: Op) -> Outcome:
    """What a plan means."""
    table, failures = relations.attempt(op)
    return Outcome("oracle", table, tuple(failures.errors), op)


def optimised(op: Op) -> Op:
    """A plan after all passes over logical operators."""
    return reduce(lambda op, change: change(op), OP_PASSES, op)


def by_engine(flow: Flow, *, workers: int | None = None, cpu: str | None = None) -> Outcome:
    """What compiled code gives."""
    try:
        found = flow.collect(workers=workers, cpu=cpu)
    except ComputeError as error:
        return Outcome("engine", None, (error,))
    assert found.schema.equals(flow.schema), f"{found.schema} is not {flow.schema}"
    return Outcome("engine", found)


def compare_with_duckdb(want: Outcome, flow: Flow, *, ordered: bool, tolerance: float = 0.0,
                        errors_may_vanish: bool = False) -> bool:  # fmt: skip
    """DuckDB gives what the oracle gives; whether it could be asked."""
    try:
        got = Outcome("duckdb", duck.run(flow.op))
    except duck.Untranslatable:
        COMPARISONS.count["untranslated"] += 1
        return False
    except (duckdb.OutOfRangeException, duckdb.ConversionException, duckdb.InvalidInputException) as error:
        got = Outcome("duckdb", None, (error,))
    compare(got, want, ordered=ordered, tolerance=tolerance, errors_may_vanish=errors_may_vanish)
    return True


def compare(got: Outcome, want: Outcome, *, ordered: bool = False, tolerance: float = 0.0,
            errors_may_vanish: bool = False) -> None:  # fmt: skip
    """Two different engines give the same rows; or both an error, ours of one class and about one expression."""
    assert (got.by, want.by) in (("engine", "oracle"), ("duckdb", "oracle")), "nothing is compared with itself"
    if errors_may_vanish and want.table is None and got.table is not None:
        return
    if got.table is None or want.table is None:
        assert got.table is None, f"no error, but the oracle says {want.errors[0]}"
        assert want.table is None, f"an error, but the oracle has none: {got.errors[0]}"
        if got.by == "engine":
            known = {about(error) for error in want.errors}
            if about(got.errors[0]) not in known and want.op is not None:  # it may be named as the passes leave it
                known |= {about(error) for error in by_oracle(optimised(want.op)).errors}
            assert about(got.errors[0]) in known, f"{about(got.errors[0])} is none of {known}"
    else:
        assert_same(got.table, want.table, ordered=ordered, tolerance=tolerance)
    COMPARISONS.count["oracle" if got.by == "engine" else "duckdb"] += 1


def about(error: Exception) -> tuple[type, str]:
    """The class of an error, and the text of the expression that it names."""
    assert isinstance(error, ScaleinError)
    return type(error), error.what[error.what.find("`") :]


def cut(table: pa.Table, batch_rows: int | None) -> pa.Table:
    """The same rows in batches of at most `batch_rows`."""
    if batch_rows is None:
        return table
    return pa.Table.from_batches(table.to_batches(max_chunksize=batch_rows), table.schema)


def or_refused(build: Build) -> Build:
    """The same flow, but an example that has no type, such as uint64 + int64, does not count."""

    def attempt(flow: Flow) -> Flow:
        try:
            return build(flow)
        except ScaleinError:
            assume(False)
            raise

    return attempt
