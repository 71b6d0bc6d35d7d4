"""Deep expressions and chains of columns: lowered without Python's stack, in code that grows as they do."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

import scalein as si
from scalein import col
from scalein.api.flow import Flow
from scalein.dtypes import F64
from scalein.ir.exprs import Call, Col, Lit, Named
from scalein.ir.stages import Collect, FromBatches, ProjectStep, Read, Stage
from scalein.kernels.specialise import Specialiser
from scalein.llvm_backend.materialize import MAX_MATERIALIZED, find_materialized
from scalein.llvm_backend.stage import lower_stage
from scalein.llvm_backend.target import target_for

NUMBERS = pa.table({"c0": np.random.default_rng(3).integers(0, 3000, 5000)})


def chained(levels: int) -> Stage:
    """c1 = c0 * 1.01 + 0.5, c2 = c1 * 1.01 + 0.5, ...: every column is collected."""

    def next_of(k: int) -> Call:
        product = Call("mul", (Col(f"c{k}", F64, False), Lit(1.01, F64)), (), F64, False)
        return Call("add", (product, Lit(0.5, F64)), (), F64, False)

    steps = tuple(ProjectStep((*(Named(f"c{n}", Col(f"c{n}", F64, False)) for n in range(k + 1)),
                               Named(f"c{k + 1}", next_of(k)))) for k in range(levels))  # fmt: skip
    items = tuple(Named(f"c{k}", Col(f"c{k}", F64, False)) for k in range(1, levels + 1))
    return Stage("chain", FromBatches((Read("c0", F64, nulls=False),)), steps, Collect(items))


def test_a_when_of_many_branches_runs() -> None:
    choice = si.when(col("c0") == 0).then(0)
    for k in range(1, 2000):
        choice = choice.when(col("c0") == k).then(3 * k)
    found = si.from_arrow(NUMBERS).select(x=choice.otherwise(-1)).collect(workers=1)
    values = NUMBERS["c0"].to_numpy()
    assert found["x"].to_numpy().tolist() == np.where(values < 2000, 3 * values, -1).tolist()


def test_an_expression_of_any_depth_is_specialised_and_lowered() -> None:
    deep: Call | Col = Col("c0", F64, False)
    for k in range(20_000):
        deep = Call("add", (deep, Lit(float(k), F64)), (), F64, False)
    special = Specialiser({"c0": False}, {}, {}, lambda number, column: False)
    stage = Stage("deep", FromBatches((Read("c0", F64, nulls=False),)), (), Collect((Named("x", special.expr(deep)),)))
    assert lower_stage(stage, target_for("native")).text.count("fadd double") == 20_000


def test_code_of_a_chain_grows_as_the_chain() -> None:
    """Each column once in each loop that reads it would be 50 * 50 / 2 products, and four times as many for 100."""
    short, long = (lower_stage(chained(levels), target_for("native")).text.count("fmul") for levels in (50, 100))
    assert long < 2.6 * short
    assert long < 100 * 10


@pytest.mark.parametrize("levels", [7, 100, 700])
def test_some_columns_of_a_chain_are_materialized(levels: int) -> None:
    found = find_materialized(chained(levels))
    assert {7: 0, 100: 10, 700: 30}[levels] <= len(found) <= {7: 0, 100: 20, 700: MAX_MATERIALIZED}[levels]


@pytest.mark.parametrize("levels", [48, 52, 100, 300])
def test_chains_give_what_they_should(levels: int) -> None:
    table = pa.table({"c0": np.random.default_rng(4).random(3000)})
    flow: Flow = si.from_arrow(table)
    expected = [table["c0"].to_numpy()]
    for k in range(levels):
        flow = flow.with_columns(**{f"c{k + 1}": col(f"c{k}") * 1.01 + 0.5})
        expected.append(expected[-1] * 1.01 + 0.5)
    found = flow.filter(col("c0") > 0.2).collect(workers=1)
    for k, values in enumerate(expected):
        np.testing.assert_allclose(found[f"c{k}"].to_numpy(), values[expected[0] > 0.2], rtol=1e-12)


@pytest.mark.parametrize("nullable", [False, True])
def test_a_predicate_of_many_terms_runs(nullable: bool) -> None:
    terms = 1500 if nullable else 5000
    values = [None, *NUMBERS["c0"].to_pylist()] if nullable else NUMBERS["c0"].to_pylist()
    predicate = col("c0") == 0
    for k in range(1, terms):
        predicate = predicate | (col("c0") == 2 * k)
    found = si.from_arrow(pa.table({"c0": pa.array(values, pa.int64())})).filter(predicate).collect(workers=1)
    assert found["c0"].to_pylist() == [v for v in values if v is not None and v % 2 == 0 and v < 2 * terms]
