"""A short slice of the campaign, and tests of the campaign itself."""

from __future__ import annotations

import typing
from pathlib import Path

import pyarrow as pa
import pytest

import scalein as si
from scalein.ir import ops
from scalein.ir.aggregates import AGGREGATES
from scalein.ir.functions.registry import REGISTRY
from scalein.ir.rewrite import walk_ops
from scalein.llvm_backend import cache, jit
from tests import oracle
from tests.campaign import ways
from tests.campaign.check import check
from tests.campaign.child import has_problem
from tests.campaign.flows import flow_of, maker_of
from tests.campaign.maker import Maker
from tests.campaign.run import Campaign, campaign, lots_of
from tests.campaign.shrink import shrink
from tests.campaign.spec import FlowSpec, build, reproducer
from tests.campaign.ways import Way
from tests.engines import EXAMPLES
from tests.oracle import functions
from tests.oracle.values import order_key


@pytest.fixture
def _raw_kernels(monkeypatch: pytest.MonkeyPatch) -> typing.Iterator[None]:
    monkeypatch.setenv("SCALEIN_CACHE_DIR", "")
    monkeypatch.setenv("SCALEIN_SAFE", "0")
    monkeypatch.setattr(jit, "emit", ways.emitted)
    cache._known.clear()
    yield
    cache._known.clear()


def test_a_slice_of_the_campaign_finds_nothing(tmp_path: Path) -> None:
    made = campaign(1, round(50 * EXAMPLES), round(5 * EXAMPLES), 2, tmp_path / "findings.jsonl", quiet=True)
    assert made.counts["flows"] == round(50 * EXAMPLES)
    assert made.findings == [], "\n\n".join(f"{f['kind']} {f['flow']}\n{f['reproducer']}" for f in made.findings)


@pytest.mark.usefixtures("_raw_kernels")
def test_a_planted_bug_is_found_and_shrunk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(functions.FUNCTIONS, "lt", lambda call, a, b: order_key(a) <= order_key(b))
    way = (Way(workers=2, batches=(7,)),)
    wrong = ((spec, facts.problem) for spec in map(flow_of, range(1000))
             if " < " in spec.text() and (facts := check(spec, way, with_duck=False)).problem is not None)
    spec, problem = next(wrong)
    assert problem is not None
    small, ways_left = shrink(spec, way, lambda s, w: has_problem(problem.kind, s, w))
    assert len(small.steps) == 1
    assert sum(table.count for table in small.tables) == 1
    assert len(small.text()) < 150
    assert ways_left == (Way(),)
    text = reproducer(small, ways_left[0].text(), problem.text)
    space: dict[str, object] = {}
    exec(compile(text, "reproducer", "exec"), space)
    assert oracle.collect(space["flow"]).num_rows >= 0


def test_a_crash_is_told_with_its_flow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CAMPAIGN_KILL", "3")
    monkeypatch.setattr("tests.campaign.run.shrink", lambda spec, ways, *_, **__: (spec, ways))
    made = campaign(1, 6, 0, 1, tmp_path / "findings.jsonl", quiet=True)
    assert [(f["kind"], f["flow"]) for f in made.findings] == [("crash (SIGSEGV)", "--seed 1 --only 3")]
    assert made.counts["flows"] >= 2
    assert "crash (SIGSEGV)" in made.summary()


@pytest.fixture(scope="module")
def makers() -> list[Maker]:
    return [maker_of(seed) for seed in range(2000)]


def test_every_function_and_aggregate_is_generated(makers: list[Maker]) -> None:
    used = {node.fn for maker in makers for step in maker.steps for node in step.nodes()}
    typed = {name for name, function in REGISTRY.items() if not function.spelled_out}
    assert sorted((typed | AGGREGATES.keys()) - used) == []


def test_every_operator_is_generated(makers: list[Maker]) -> None:
    flows = (_built(maker.spec()) for maker in makers[:700])
    others = {ops.BufferedJoin, ops.JoinSides, ops.Process, ops.Reordered}  # of jobs; tests/test_process.py; of SQL
    known = {vars(ops)[name] for name in ops.__all__ if isinstance(vars(ops)[name], type)} - {ops.Op, ops.By} - others
    assert {type(op) for flow in flows for op in walk_ops(flow.op)} == known


def test_few_steps_are_refused(makers: list[Maker]) -> None:
    assert sum(len(maker.refused) for maker in makers) < 0.03 * sum(len(maker.steps) for maker in makers)


def test_a_flow_is_the_same_whenever_it_is_made() -> None:
    assert flow_of(5) == flow_of(5)
    assert ways.ways_of(5) == ways.ways_of(5)


def test_lots_cover_every_flow_once() -> None:
    lots = lots_of(2500, 10, 2)
    assert [number for lot in lots if lot.what == "flow" for number in range(lot.first, lot.stop)] == list(range(2500))
    assert sum(lot.stop - lot.first for lot in lots if lot.what == "udf") == 10


def test_reproducers_make_the_same_tables() -> None:
    for seed in range(60):
        spec = flow_of(seed)
        space: dict[str, typing.Any] = {}
        exec(compile(reproducer(spec, "", ""), "reproducer", "exec"), space)
        for table in spec.tables:
            assert _printed(space[table.name]) == _printed(table.table())


def _printed(table: pa.Table) -> str:
    columns = [column.combine_chunks().to_string(window=1 << 20) for column in table.columns]  # of any year
    return f"{table.schema} {columns}"


def _built(spec: FlowSpec) -> si.Flow:
    return build(spec.steps, si.from_arrow(spec.tables[0].table()), spec.names())


def test_the_summary_counts_kinds(tmp_path: Path) -> None:
    made = Campaign(1, [], tmp_path / "findings.jsonl")
    made.add({"kind": "other rows", "flow": "--seed 1 --only 2", "reproducer": ""})
    assert "1 other rows" in made.summary()
