"""Runs a flow in its ways, by the oracle and by DuckDB, and says what is wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import duckdb
import pyarrow as pa

import scalein as si
from scalein.api.flow import Flow
from scalein.errors import ComputeError, ScaleinError
from tests import duck, oracle
from tests.campaign.spec import FlowSpec, build
from tests.campaign.ways import Way, collect, source
from tests.same import assert_same

TOLERANCE = 1e-6  # of floats that were summed


@dataclass(frozen=True, slots=True)
class Problem:
    """What is wrong with a flow: a kind, which shrinking keeps, the ways that show it, and the details."""

    kind: str
    ways: tuple[Way, ...]
    text: str


Outcome = pa.Table | ComputeError


class Refused(Exception):
    """The flow cannot be built: a shrunk one may have lost what it needs."""


@dataclass(slots=True)
class Facts:
    """What became of a checked flow, for statistics."""

    problem: Problem | None = None
    failed: bool = False  # by the oracle, as it may
    by_duck: bool = False


def check(spec: FlowSpec, ways: tuple[Way, ...], *, with_duck: bool = True) -> Facts:
    """Whether the flow gives what the oracle gives, whatever the way, and DuckDB where it means the same."""
    facts = Facts()
    names = spec.names()
    table = names[spec.tables[0].name]
    try:
        flow = build(spec.steps, si.from_arrow(table), names)
    except (ScaleinError, SyntaxError, NameError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise Refused(str(error)) from error
    want = _outcome(lambda: oracle.collect(flow))
    facts.failed = isinstance(want, ComputeError)
    if isinstance(want, Problem):
        facts.problem = Problem(f"the oracle raises {want.kind}", (), want.text)
        return facts
    compiled: list[tuple[Way, Outcome]] = []
    for way in ways:
        start, data = source(table, way, spec.reads_twice)
        made = build(spec.steps, start, names)
        got = _outcome(lambda made=made, data=data, way=way: collect(made, data, way))
        if isinstance(got, Problem):
            facts.problem = Problem(f"raises {got.kind}", (way,), got.text)
            return facts
        compiled.append((way, got))
        facts.problem = _against_oracle(spec, way, got, want, flow)
        if facts.problem is not None:
            return facts
    facts.problem = _against_each_other(spec, compiled)
    if facts.problem is None and with_duck and isinstance(want, pa.Table):
        facts.problem, facts.by_duck = _against_duck(spec, flow, want)
    return facts


def _outcome(run: Callable[[], pa.Table]) -> Outcome | Problem:
    """A table, an error that a row may cause, or a problem: any other exception."""
    try:
        return run()
    except ComputeError as error:
        return error
    except Exception as error:
        import traceback

        lines = traceback.format_exc().splitlines()
        return Problem(type(error).__name__, (), "\n".join(lines[-14:]))


def _against_oracle(spec: FlowSpec, way: Way, got: Outcome, want: Outcome, flow: Flow) -> Problem | None:
    if isinstance(got, ComputeError):
        if isinstance(want, ComputeError):
            return None
        return Problem("an error that the oracle has not", (way,), str(got))
    if not got.schema.equals(flow.schema):
        return Problem("another schema", (way,), f"{got.schema}\nis not\n{flow.schema}")
    if isinstance(want, ComputeError):  # passes may remove an error
        return None
    try:
        got.validate(full=True)
    except pa.ArrowInvalid as error:
        return Problem("damaged Arrow data", (way,), str(error))
    different = _difference(spec, got, want)
    return different and Problem("other rows", (way,), different)


def _difference(spec: FlowSpec, got: pa.Table, want: pa.Table) -> str | None:
    if got.equals(want):
        return None
    try:
        assert_same(got, want, ordered=spec.ordered, tolerance=TOLERANCE if spec.loose else 0.0)
    except AssertionError as error:
        rows = f"\ngot    {got.slice(0, 30).to_pydict()}\nwanted {want.slice(0, 30).to_pydict()}"
        return f"{error}"[:1500] + rows[:3000]
    return None


def _against_each_other(spec: FlowSpec, compiled: list[tuple[Way, Outcome]]) -> Problem | None:
    """Where the oracle fails, the ways must still agree; on errors only where every row is computed."""
    (first, one), *rest = compiled
    for way, other in rest:
        if isinstance(one, pa.Table) and isinstance(other, pa.Table):
            different = _difference(spec, other, one)
            if different:
                return Problem("rows that depend on the way", (first, way), different)
        elif isinstance(one, pa.Table) != isinstance(other, pa.Table) and not spec.may_skip_errors:
            return Problem("an error that depends on the way", (first, way), f"{one}\n{other}")
    return None


def _against_duck(spec: FlowSpec, flow: Flow, want: pa.Table) -> tuple[Problem | None, bool]:
    try:
        found = duck.run(flow.op)
    except (duck.Untranslatable, KeyError):  # KeyError: a type that DuckDB's translation does not have
        return None, False
    except (duckdb.OutOfRangeException, duckdb.ConversionException, duckdb.InvalidInputException):
        return None, False  # it computes constants, and sides of a choice, that no row asks for
    except duckdb.Error as error:
        return Problem("DuckDB fails", (), str(error)[:600]), True
    different = _difference(spec, found, want)
    return (Problem("DuckDB gives other rows", (), different) if different else None), True
