"""explain: what a user sees of a flow, at every level, after every pass, and of a run."""

from __future__ import annotations

import re
from collections.abc import Callable

import pyarrow as pa
import pytest

import scalein as si
from scalein import col
from scalein.api.flow import Flow
from tests.conftest import Golden

EVENTS = pa.table({
    "user": pa.array(["ann", "bob", None, "ann"]).dictionary_encode(),
    "price": [1.5, 2.0, None, 4.0],
    "qty": [1, 2, 3, 4],
})  # fmt: skip
USERS = pa.table({"user": ["ann", "bob"], "city": ["Oslo", "Rome"]})


@pytest.fixture
def flow() -> Flow:
    return (
        si.from_arrow(EVENTS)
        .filter(col("qty") * 1 > 0)
        .join(USERS, on="user")
        .with_columns(cost=col("price") * col("qty"))
        .group_by("city")
        .agg(cost=col("cost").sum(), n=si.count())
    )


def measured(text: str) -> str:
    """The text with everything that a clock, a machine or a cache decides taken out."""
    text = re.sub(r"(compiled|read from the cache folder) in [\d.,]+ ms|in memory from an earlier run", "LOADED", text)
    text = re.sub(r"[\d.,]+ ms", "TIME", text)
    text = re.sub(r"\d+% of", "SHARE of", text)
    text = re.sub(r"[\d,]+ million rows/s", "RATE", text)
    return re.sub(r"with \d+ workers?", "with WORKERS", text)


@pytest.mark.parametrize("level", ["logical", "fused"])
def test_after_every_pass(flow: Flow, level: str, golden: Golden) -> None:
    assert flow.explain(level, verbose=True) == golden


@pytest.mark.parametrize("level", ["logical", "fused"])
def test_the_last_pass_is_the_plan(flow: Flow, level: str) -> None:
    last = flow.explain(level, verbose=True).split("\n\n")[-1].split("\n", 1)[1]
    assert last in ("unchanged", flow.explain(level))


def test_a_run(monkeypatch: pytest.MonkeyPatch, flow: Flow, golden: Golden) -> None:
    monkeypatch.setenv("SCALEIN_WORKERS", "1")
    assert measured(flow.explain(analyze=True)) == golden


def test_a_run_tells_what_was_copied(monkeypatch: pytest.MonkeyPatch, golden: Golden) -> None:
    monkeypatch.setenv("SCALEIN_WORKERS", "1")
    events = si.from_arrow(EVENTS)
    flows = [
        events.with_columns(twice=col("qty") * 2),  # two columns are handed on
        events.filter(col("qty") > 1).select("price", "qty"),
        events.select("qty", "price"),  # no kernel at all
    ]
    assert "\n\n\n".join(measured(flow.explain(analyze=True)) for flow in flows) == golden


@pytest.mark.parametrize("workers", ["1", "3"])
def test_rows_are_counted_over_all_workers(monkeypatch: pytest.MonkeyPatch, workers: str) -> None:
    monkeypatch.setenv("SCALEIN_WORKERS", workers)
    rows = 2_000_000
    text = si.from_arrow(pa.table({"x": range(rows)})).filter(col("x") % 2 == 0).explain(analyze=True)
    assert f"{rows // 2:,} rows in" in text
    assert re.search(rf"rows    {rows:,} in \d+ calls?, {rows // 2:,} written", text)
    assert re.search(r"memory  16.0 MB read, 8.0 MB written: \d+% of one core's copy bandwidth", text)


def test_a_kernel_is_loaded_once(flow: Flow) -> None:
    flow.explain(analyze=True)
    assert flow.explain(analyze=True).count("in memory from an earlier run") >= 2


@pytest.mark.parametrize(("level", "sign"), [("llvm", "define i64"), ("asm", "ret")])
def test_code_comes_with_the_stage_it_is_of(flow: Flow, level: str, sign: str) -> None:
    text = flow.explain(level)
    assert "; kernel group\n;   read " in text
    assert sign in text


def test_code_after_every_pass(flow: Flow) -> None:
    text = flow.explain("llvm", verbose=True)
    assert "; -- resolve\n" in text
    assert "; -- fuse\n" in text
    assert "define i64" in text


def test_code_needs_no_data_and_calls_no_function() -> None:
    def never(batch: pa.RecordBatch) -> pa.RecordBatch:
        raise AssertionError("explain called the function of map_batches")

    schema = pa.schema([("s", pa.string_view()), ("d", pa.dictionary(pa.int8(), pa.string())), ("b", pa.bool_()),
                        ("t", pa.timestamp("us", "UTC")), ("x", pa.int16())])  # fmt: skip
    flow = si.flow(schema).map_batches(never, schema).group_by("s", "d", "b", "t").agg(x=col("x").max())
    assert "define i64" in flow.explain("llvm")


def test_nothing_to_compile() -> None:
    assert si.from_arrow(EVENTS).select("qty").explain("llvm").startswith("; nothing to compile")


def test_a_sample_with_a_row_that_fails_is_explained() -> None:
    assert "define i64" in si.from_arrow(EVENTS).select(x=col("qty") // (col("qty") - 1)).explain("llvm")


def test_aggregates_read_as_they_were_written() -> None:
    price = col("price")
    text = si.from_arrow(EVENTS).group_by("qty").agg(
        n=price.approx_n_unique(), q=price.approx_quantile(0.5), m=(price * 2).hash().approx_n_unique(),
    ).explain("fused")  # fmt: skip
    assert "n = approx_n_unique(price), q = approx_quantile(price, 0.5)" in text
    assert "m = approx_n_unique((price * 2.0).hash())" in text
    assert "coarse" not in text


def test_who_computes_what_no_kernel_does() -> None:
    @si.udf(compile=False)
    def grossed(x: float) -> float:
        return x * 1.2

    text = si.from_arrow(EVENTS).select(g=grossed(col("price")), u=col("user").str.split_part("n", 1)).explain("fused")
    who = re.findall(r"(\w+) computes #:host\d = ([\w.]+)", text)
    assert who == [("pyarrow", "user.str.split_part"), ("Python", "grossed")]


def test_an_order_does_not_say_who_makes_it() -> None:
    assert si.from_arrow(EVENTS).sort("qty").explain("fused").startswith("sort by qty\n")


def test_plans_show_the_aggregates_of_an_expression_and_no_internal_columns() -> None:
    flow = si.from_arrow(pa.table({"k": [1, 2], "x": [1, 2]}))
    by_key = flow.group_by("k").agg(share=col("x").sum() / si.count())
    both = by_key.filter(col("share") > 1).group_by().agg(spread=col("share").max() - col("share").min())
    for text in (repr(both), both.explain(), both.explain(verbose=True), str(both.graph())):
        assert "#:" not in text
        for part in ("x.sum().cast(f64) / count().cast(f64)", "share.max() - share.min()"):
            assert part in text.replace("<br/>", " ")


@pytest.mark.parametrize(("make", "lines"), [
    (lambda a, b: a.join(b, on="k", between=("-5s", "3s"), how="left"), [
        "left: rows are retained until the watermark has passed them by 3s, as rows of the right match them so much "
        "later",
        "right: rows are retained until the watermark has passed them by 5s, as rows of the left match them so much "
        "later; 3s more, as rows of the left wait for a match"]),
    (lambda a, b: a.join(b, on="k", keep="forever"), [
        "left and right: all rows are retained for ever, since no time bounds the join"]),
    (lambda a, b: a.join(b, on="k", within=si.tumbling("t", "5s")), [
        "left and right: rows are retained until their window closes"]),
    (lambda a, b: a.join_asof(b, on="t", by="k"), [
        "left: rows are retained until the watermark has passed them",
        "right: the last row of each key is retained for ever: no tolerance bounds it"]),
])  # fmt: skip
def test_what_the_sides_of_a_join_retain_and_why(make: Callable[[Flow, Flow], Flow], lines: list[str]) -> None:
    sides = (si.flow({"k": pa.int64(), "t": pa.timestamp("ms")}).with_watermark("t", "1s") for _ in range(2))
    found = make(*sides).explain().splitlines()
    assert [line.removeprefix("  | ") for line in found if line.startswith("  | ")] == lines
