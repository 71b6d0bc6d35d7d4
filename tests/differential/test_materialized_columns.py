"""Columns that a udf computes, read by filters, outputs, keys, joins and aggregates at once: engine = oracle."""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal
from typing import Optional

import numpy as np
import pyarrow as pa
import pytest

import scalein as si
from scalein import ComputeError, col, when
from scalein.api.flow import Flow
from tests.engines import COMPILED, Engine, check

ROWS = 1300  # several blocks, and a batch that is not full


@si.udf
def mixed(n: int, by: int) -> int:
    total = 0
    for k in range(n % 7):
        total += k * n - by
    return total


@si.udf
def maybe(n: Optional[int]) -> Optional[int]:  # noqa: UP045  (what users write)
    if n is None:
        return 7
    return None if n % 5 == 0 else n * 3


@si.udf
def share(n: int) -> float:
    return 1000 / n


@si.udf
def is_odd(n: int) -> bool:
    return n % 2 == 1


@si.udf
def longer(a: str, b: str) -> Optional[str]:  # noqa: UP045
    if len(a) == len(b):
        return None
    return a if len(a) > len(b) else b


def data() -> pa.Table:
    rng = np.random.default_rng(11)
    gone = rng.random(ROWS) < 0.2
    words = ["", "a", "two words", "a text of more than twelve bytes", "åäö and the like"]
    return pa.table({
        "i": pa.array(rng.integers(0, 400, ROWS), mask=gone),
        "j": rng.integers(-3, 50, ROWS),
        "s": pa.array([words[k] for k in rng.integers(0, 5, ROWS)], mask=rng.random(ROWS) < 0.1),
        "t": pa.array([words[k] for k in rng.integers(0, 5, ROWS)]).dictionary_encode(),
    })  # fmt: skip


UNIQUE = pa.table({"j": np.arange(0, 50, 2), "u": np.arange(25)})
SEVERAL = pa.table({"j": np.arange(60) % 20, "m": np.arange(60)})


def with_x(flow: Flow) -> Flow:
    return flow.with_columns(x=mixed(col("i"), col("j")))


FLOWS: dict[str, Callable[[Flow], Flow]] = {
    "filter and outputs": lambda f: with_x(f).filter(col("x") > 100).select("j", "x", y=col("x") + 1, z=col("x") * 2),
    "two filters": lambda f: with_x(f).filter(col("x") > 20).filter(col("x") % 3 != 0).select("i", "x"),
    "an earlier filter": lambda f: with_x(f.filter(col("j") > 10)).filter(col("x") < 900).select("x", y=-col("x")),
    "all rows": lambda f: with_x(f).group_by().agg(
        a=col("x").max(), b=col("x").min(), c=col("x").sum(), d=col("x").mean(), n=si.count()),
    "a filter and all rows": lambda f: with_x(f).filter(col("x") > 0).group_by().agg(
        a=col("x").max(), c=col("x").sum()),
    "groups": lambda f: with_x(f).filter(col("x") > 0).group_by(k=col("x") % 13).agg(
        a=col("x").max(), n=col("x").n_unique(), f=col("x").first(), q=col("x").quantile(0.5)),
    "nulls": lambda f: f.select("i", x=maybe(col("i"))).filter(col("x") > 9).select("i", "x", y=col("x").fill_null(0)),
    "nulls in groups": lambda f: f.select(x=maybe(col("i"))).group_by("x").agg(a=col("x").sum(), n=si.count()),
    "bools": lambda f: f.select("i", x=is_odd(col("i"))).filter(col("x")).select("i", "x", y=~col("x")),
    "strings": lambda f: f.select("j", x=longer(col("s"), col("t"))).filter(col("x") > "a").select(
        "x", "j", y=col("x")),
    "strings in groups": lambda f: f.select("j", x=longer(col("s"), col("t"))).group_by("x").agg(
        a=col("x").max(), j=col("j").sum()),
    "strings of all rows": lambda f: f.group_by().agg(
        a=longer(col("s"), col("t")).max(), b=longer(col("s"), col("t")).min()),
    "decimals": lambda f: f.select(x=mixed(col("i"), col("j")).cast(pa.decimal128(30, 2))).filter(
        col("x") > Decimal("10.50")).group_by().agg(a=col("x").sum(), b=col("x").max()),
    "floats": lambda f: f.filter(col("j") > 0).select(x=share(col("j"))).filter(col("x") > 30).select(
        "x", y=col("x") / 2),
    "guarded calls": lambda f: f.group_by().agg(
        a=when(col("j") > 0).then(share(col("j"))).max(), b=when(col("j") > 0).then(share(col("j"))).min()),
    "one call of many": lambda f: f.group_by().agg(
        a=mixed(col("i"), col("j")).max(), b=(mixed(col("i"), col("j")) * 2).sum(), c=mixed(col("i"), col("j")).std()),
    "one over another": lambda f: with_x(f).with_columns(y=maybe(col("x"))).filter(col("y") > 3).select(
        "x", "y", z=when(col("x") > 50).then(col("y")).otherwise(col("x"))),
    "a join": lambda f: with_x(f).join(UNIQUE, on="j").filter(col("x") > col("u")).select(
        "x", "u", y=col("x") - col("u")),
    "a left join": lambda f: with_x(f).join(UNIQUE, on="j", how="left").filter(col("x") > 3).select("x", "u"),
    "a join that multiplies": lambda f: with_x(f).join(SEVERAL, on="j").filter(col("x") > col("m")).select(
        "x", "m", y=col("x") - col("m")),
    "behind such a join": lambda f: with_x(f.join(SEVERAL, on="j")).filter(col("x") > col("m")).select("x", "m"),
    "the key of a join": lambda f: f.select("i", j=mixed(col("i"), col("j")) % 60).join(SEVERAL, on="j").select(
        "i", "j", "m"),
    "distinct": lambda f: with_x(f).distinct("x").select("x", y=col("x") + 1).filter(col("y") > 2),
}  # fmt: skip


@pytest.mark.parametrize("engine", COMPILED, ids=str)
@pytest.mark.parametrize("name", FLOWS)
def test_materialized_columns_give_what_the_oracle_gives(name: str, engine: Engine) -> None:
    table = data() if engine.batch_rows != 1 else data().slice(100, 150)
    assert check(engine, table, FLOWS[name], ordered=False, tolerance=1e-9) is not None


@pytest.mark.parametrize("name", FLOWS)
def test_in_safe_mode(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCALEIN_SAFE", "1")
    check(COMPILED[0], data(), FLOWS[name], ordered=False, tolerance=1e-9)


@pytest.mark.parametrize("workers", [1, 3])
def test_a_row_that_fails(workers: int) -> None:
    """It is an error where the row is there, and none behind a filter that dropped it."""
    zeros = pa.table({"n": [5, 0, 3] * 700})
    flow = si.from_arrow(zeros)

    def build(flow: Flow) -> Flow:
        return flow.with_columns(x=share(col("n"))).filter(col("x") > 1.0).select("x", y=col("x") + 1.0)

    with pytest.raises(ComputeError, match="division by zero"):
        build(flow).collect(workers=workers)
    found = build(flow.filter(col("n") != 0)).collect(workers=workers)
    assert found.num_rows == 1400
    assert set(found["y"].to_pylist()) == {201.0, 1000 / 3 + 1}
