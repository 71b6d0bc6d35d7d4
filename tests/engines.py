"""One check for every differential test: compiled = interpreted = DuckDB.

The engine "duckdb" checks the interpreter against DuckDB; the others check compiled code against the interpreter, over
batch sizes, workers and CPUs. SCALEIN_EXAMPLES=10 tries ten times as many.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable
from dataclasses import dataclass

import duckdb
import pyarrow as pa
import pytest
from _pytest.mark import ParameterSet
from hypothesis import HealthCheck, assume, currently_in_test_context, note, settings

import scalein as si
from scalein.api.flow import Flow
from scalein.errors import ComputeError, ScaleinError
from tests import duck
from tests.same import assert_same

EXAMPLES = float(os.environ.get("SCALEIN_EXAMPLES", "0.25"))  # 1 and more for longer runs; the campaign goes deeper

Build = Callable[[Flow], Flow]
Outcome = pa.Table | Exception


@dataclass(frozen=True, slots=True)
class Engine:
    """What is checked against the interpreter, and how the input is cut for it."""

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


def _param(engine: Engine) -> ParameterSet:
    return pytest.param(engine, id=engine.name)


# For tests of generated data: each example meets one of the compiled engines. For tests of examples: two of them.
every_engine = pytest.mark.parametrize("engine", [_param(DUCKDB), _param(VARIED)])
every_compiler = pytest.mark.parametrize("engine", [_param(VARIED)])
each_engine = pytest.mark.parametrize("engine", [_param(one) for one in (DUCKDB, COMPILED[0], COMPILED[3])])


def settled(engine: Engine, table: pa.Table) -> Engine:
    """The engine, or the one that VARIED stands for with this data: the same whenever an example is run again."""
    if engine is not VARIED:
        return engine
    seen = f"{table.num_rows} {table.get_total_buffer_size()} {table.schema}"  # nbytes refuses views in many pyarrows
    return COMPILED[zlib.crc32(seen.encode()) % len(COMPILED)]


def examples(count: int) -> settings:
    """Hypothesis settings of a differential test: `count` examples, times SCALEIN_EXAMPLES."""
    return settings(
        max_examples=max(1, round(count * EXAMPLES)),
        deadline=None,
        derandomize=EXAMPLES <= 1,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
    )


def check(engine: Engine, table: pa.Table, build: Build, *, ordered: bool, tolerance: float = 0.0,
          duck: bool = True, errors_may_vanish: bool = False) -> pa.Table | None:  # fmt: skip
    """The engine gives what the interpreter gives: the same rows, or an error where it has one. None for an error.

    `duck=False` leaves DuckDB out, where the test knows that it means something else. `errors_may_vanish` is for flows
    in which a pass may drop what fails: a column that nobody reads, rows that a later filter drops.
    """
    flow = build(si.from_arrow(table))
    want = _outcome(lambda: flow.collect(engine="interp"))
    if isinstance(want, pa.Table):
        assert want.schema.equals(flow.schema), f"{want.schema} is not {flow.schema}"
    if engine is DUCKDB:
        got = _by_duckdb(flow) if duck else want
    else:
        engine = settled(engine, table)
        if currently_in_test_context():
            note(f"{engine!r}")
        source = si.from_arrow(cut(table, engine.batch_rows))
        got = _outcome(lambda: build(source).collect(workers=engine.workers, cpu=engine.cpu))
        if isinstance(got, pa.Table):
            assert got.schema.equals(flow.schema), f"{got.schema} is not {flow.schema}"
    vanished = errors_may_vanish and isinstance(want, Exception)
    if got is not None and not vanished:
        _assert_same_outcome(got, want, ordered, tolerance)
    return want if isinstance(want, pa.Table) else None


def cut(table: pa.Table, batch_rows: int | None) -> pa.Table:
    """The same rows in batches of at most `batch_rows`."""
    if batch_rows is None:
        return table
    return pa.Table.from_batches(table.to_batches(max_chunksize=batch_rows), table.schema)


def _outcome(collect: Callable[[], pa.Table]) -> Outcome:
    try:
        return collect()
    except ComputeError as error:
        return error


def _by_duckdb(flow: Flow) -> Outcome | None:
    try:
        return duck.run(flow.op)
    except duck.Untranslatable:
        return None
    except (duckdb.OutOfRangeException, duckdb.ConversionException, duckdb.InvalidInputException) as error:
        return error


def _assert_same_outcome(got: Outcome, want: Outcome, ordered: bool, tolerance: float) -> None:
    if isinstance(got, pa.Table) and isinstance(want, pa.Table):
        assert_same(got, want, ordered=ordered, tolerance=tolerance)
    else:
        assert isinstance(got, Exception), f"no error, but the interpreter says {want}"
        assert isinstance(want, Exception), f"an error, but the interpreter has none: {got}"


def or_refused(build: Build) -> Build:
    """The same flow, but an example that has no type, such as uint64 + int64, does not count."""

    def attempt(flow: Flow) -> Flow:
        try:
            return build(flow)
        except ScaleinError:
            assume(False)
            raise

    return attempt
