"""The order of joins: the least cost against all orders, estimates against what is there, results against DuckDB."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from random import Random

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import scalein as si
from scalein.ir.ops import Reordered
from scalein.ir.rewrite import walk_ops
from scalein.sql.cardinality import Cardinalities
from scalein.sql.join_order import EXACT, Graph, Tree, as_written, cheapest, cost, relations_of
from tests.sql.test_queries import rows as rows_of

# --- the search


def random_graph(random: Random, count: int) -> Graph:
    """Relations that hang together, with some more equalities, classes of three, and other conditions."""
    rows = [float(10 ** random.randint(0, 5)) for _ in range(count)]
    equal = []
    for k in range(1, count):
        members = {k, random.randrange(k)} | ({random.randrange(count)} if random.random() < 0.3 else set())
        equal.append({each: max(1.0, rows[each] / 10 ** random.randint(0, 3)) for each in sorted(members)})
    others = [(frozenset(random.sample(range(count), 2)), 0.3) for _ in range(random.randint(0, 1)) if count > 1]
    return Graph(rows, equal, others)


def every_tree(subset: frozenset[int], graph: Graph) -> Iterator[Tree]:
    """All trees over some relations that have no cross join, if there is such a tree."""
    if len(subset) == 1:
        yield from subset
        return
    cuts = [(frozenset(part), subset - frozenset(part)) for size in range(1, len(subset))
            for part in combinations(sorted(subset), size)]
    bits = [(sum(1 << k for k in one), sum(1 << k for k in other)) for one, other in cuts]
    connected = [cut for cut, pair in zip(cuts, bits, strict=True) if graph.are_connected(*pair)]
    for one, other in connected or cuts:
        for left in every_tree(one, graph):
            for right in every_tree(other, graph):
                yield left, right


@pytest.mark.parametrize("seed", range(30))
def test_the_cheapest_order_costs_least(seed: int) -> None:
    random = Random(seed)
    graph = random_graph(random, random.randint(2, 5))
    trees = list(every_tree(frozenset(range(len(graph.rows))), graph))
    least = min(cost(tree, graph) for tree in trees)
    assert cost(cheapest(graph), graph) == pytest.approx(least)
    assert cheapest(graph) == cheapest(graph)


@pytest.mark.parametrize("count", [1, 2, EXACT, EXACT + 1, 20])
def test_every_relation_is_joined_once(count: int) -> None:
    graph = random_graph(Random(count), count)
    tree = cheapest(graph)
    assert sorted(leaves(tree)) == list(range(count))
    assert relations_of(tree) == (1 << count) - 1


def leaves(tree: Tree) -> list[int]:
    return [tree] if isinstance(tree, int) else [*leaves(tree[0]), *leaves(tree[1])]


def test_the_smaller_side_is_the_table() -> None:
    assert cheapest(Graph([10.0, 1e6], [{0: 10.0, 1: 10.0}])) == (1, 0)
    assert cheapest(Graph([1e6, 10.0], [{0: 10.0, 1: 10.0}])) == (0, 1)


def test_two_keys_together_are_no_more_than_rows() -> None:
    graph = Graph([800_000.0, 6_000_000.0], [{0: 200_000.0, 1: 200_000.0}, {0: 10_000.0, 1: 10_000.0}])
    assert graph.joined_rows(3) == pytest.approx(6_000_000)


def test_the_order_as_written_joins_connected_relations_first() -> None:
    connected = {(0, 2), (2, 0), (1, 2), (2, 1)}
    assert as_written(3, lambda a, b: (a, b) in connected) == ((0, 2), 1)


# --- estimates

N = 200_000
ROWS = np.random.default_rng(7)
FACTS = pa.table({
    "id": np.arange(N), "clustered": np.arange(N) // 4, "few": ROWS.integers(0, 30, N),
    "many": ROWS.integers(0, 20_000, N), "x": ROWS.random(N),
    "name": pa.array([f"name {k % 100}" for k in range(N)])})


def estimate(query: str, **tables: object) -> float:
    return Cardinalities().rows(si.sql(query, **tables).op)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("facts") / "facts.parquet"
    pq.write_table(FACTS, path, row_group_size=N // 8)
    return path


@pytest.mark.parametrize("query", [
    "SELECT * FROM t", "SELECT * FROM t WHERE x < 0.25", "SELECT * FROM t WHERE few IN (1, 2, 3) AND x > 0.5",
    "SELECT * FROM t WHERE name LIKE '%7' OR name = 'name 3'", "SELECT few, count(*) FROM t GROUP BY few",
    "SELECT DISTINCT clustered FROM t", "SELECT DISTINCT many FROM t", "SELECT DISTINCT id FROM t",
    "SELECT * FROM t JOIN t AS u ON t.id = u.clustered", "SELECT * FROM t WHERE id IN (SELECT clustered FROM t)",
    "SELECT * FROM (SELECT many * 2 AS m FROM t) WHERE m < 4000", "SELECT * FROM t LIMIT 10"])
def test_estimates_are_near(query: str, file: Path) -> None:
    true = duckdb.connect().register("t", FACTS).sql(f"SELECT count(*) FROM ({query})").fetchall()[0][0]
    for source in (FACTS, str(file)):
        found = estimate(query, t=source if isinstance(source, pa.Table) else si.read_parquet(source))
        assert true / 2.5 <= found <= true * 2.5, (query, true, found)


def test_a_sample_is_taken_once_and_reads_little(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from scalein.sql import statistics

    flow = si.read_parquet(file)
    first = statistics.statistics_of(flow.op.data)
    assert first is statistics.statistics_of(si.read_parquet(file).op.data)
    assert first is not None and sum(map(len, first.runs("id"))) <= 4096  # noqa: PT018


# --- results

SIZES = {"a": 3000, "b": 40, "c": 700, "d": 5, "e": 0}


def random_tables(random: Random) -> dict[str, pa.Table]:
    """Tables with keys that several of them have, null now and then, of text and of numbers."""
    found = {}
    for name, size in SIZES.items():
        keys = {f"{name}{k}": pa.array([None if random.random() < 0.1 else random.randrange(top) for _ in range(size)],
                                       kind) for k, (top, kind) in enumerate(
                                           [(30, pa.int64()), (4, pa.int64()), (12, pa.int32())])}
        text = pa.array([None if random.random() < 0.1 else "xyz"[random.randrange(3)] for _ in range(size)],
                        pa.string())
        found[name] = pa.table({**keys, f"{name}x": text, "v": pa.array([random.randrange(100) for _ in range(size)],
                                                                        pa.int64())})
    return found


def random_join(random: Random) -> str:
    """A query that joins some tables in a random order, by random columns, with conditions, as one row."""
    names = random.sample(sorted(SIZES), random.randint(2, 4))
    if random.random() < 0.85:
        names = [name for name in names if name != "e"] or ["a"]
    conditions = []
    for k, name in enumerate(names[1:], 1):
        other = random.choice(names[:k])
        if name == "a" or other == "a" or random.random() < 0.9:
            conditions.append(f"{name}0 = {other}0")
        if random.random() < 0.3:
            conditions.append(f"{other}{random.randint(1, 2)} = {name}{random.randint(1, 2)}")
        if random.random() < 0.2:
            conditions.append(f"{other}x = {name}x")
    for name in names:
        if random.random() < 0.4:
            conditions.append(random.choice((f"{name}0 < 12", f"{name}1 = 2", f"{name}x IN ('x', 'y')",
                                             f"{name}.v % 3 = 1", f"{name}2 IS NOT NULL", f"{name}0 = 5")))
    if len(names) > 1 and random.random() < 0.3:
        one, other = random.sample(names, 2)
        conditions.append(random.choice((f"{one}1 < {other}1", f"({one}1 = 1 AND {other}1 = 2 OR {one}1 = 3)",
                                         f"({one}x = 'x' AND {other}x = 'y' OR {one}x = 'z' AND {other}x = 'x')")))
    where = f" WHERE {' AND '.join(conditions)}" if conditions else ""
    sums = ", ".join(f"sum({name}.v) AS {name}_v, count({name}0) AS {name}_n, max({name}x) AS {name}_s"
                     for name in names)
    return f"SELECT count(*) AS n, {sums} FROM {', '.join(names)}{where}"


@pytest.mark.parametrize("seed", range(4))
def test_random_joins_are_duckdbs(seed: int) -> None:
    random = Random(seed)
    tables = random_tables(random)
    connection = duckdb.connect(config={"threads": 1})
    for name, table in tables.items():
        connection.register(name, table)
    for _ in range(6):
        query = random_join(random)
        want = connection.sql(query).to_arrow_table()
        assert rows_of(si.sql(query, **tables).collect(workers=1)) == rows_of(want), query


def test_conditions_follow_from_equalities_and_branches() -> None:
    other = pa.table({"key": np.arange(5000), "label": [f"l{k % 40}" for k in range(5000)]})
    text = si.sql("SELECT count(*) FROM t, other WHERE id = key AND id < 100", t=FACTS, other=other).explain("logical")
    assert "key < 100" in text
    text = si.sql("SELECT count(*) FROM t, other WHERE id = key AND ((label = 'l1' AND few = 2) OR (label = 'l7' AND "
                  "few = 3 AND x < 0.1))", t=FACTS, other=other).explain("logical")
    assert "Filter (label == 'l1') | (label == 'l7')" in text
    assert "Filter (few == 2) | (few == 3) & (x < 0.1)" in text


def test_a_condition_that_can_fail_meets_no_other_rows() -> None:
    one, other = pa.table({"k": [0, 5], "x": [1, 2]}), pa.table({"j": [0, 5], "y": [9, 2]})
    query = "SELECT k FROM one, other WHERE k = j AND ((y = 2 AND x // k = 0) OR (y = 7 AND x = 3))"
    assert si.sql(query, one=one, other=other).collect().to_pydict() == {"k": [5]}


SMALL = pa.table({"k": [1, 2, 3], "w": ["x", "y", "z"]})
QUERY = "SELECT * FROM small, t WHERE few = k AND x < 0.5"


def reordered(flow: si.Flow) -> list[Reordered]:
    return [op for op in walk_ops(flow.op) if isinstance(op, Reordered)]


def test_columns_come_in_the_order_of_from() -> None:
    flow = si.sql(QUERY, small=SMALL, t=FACTS)
    assert reordered(flow)
    assert flow.columns == ["k", "w", *FACTS.column_names]
    got = flow.collect()
    assert set(got["k"].to_pylist()) == {1, 2, 3}
    assert got["k"].to_pylist() == got["few"].to_pylist()


def test_a_condition_on_several_tables_that_can_fail_keeps_the_order() -> None:
    """In the order as written `z // y` meets only rows whose `k` is in `one`; the cheapest order would meet all."""
    one = pa.table({"k": [5] * 50, "x": [1] * 50})
    two = pa.table({"k": [5, *range(10, 30)], "m": [1] * 21, "y": [1] + [0] * 20})
    three = pa.table({"m": [1], "z": [1]})
    query = "SELECT count(*) AS n FROM one, two, three WHERE one.k = two.k AND two.m = three.m AND z // y {} 1"
    flow = si.sql(query.format("="), one=one, two=two, three=three)
    assert not reordered(flow)
    assert flow.collect().to_pydict() == {"n": [50]}
    total = "SELECT count(*) AS n FROM one, two, three WHERE one.k = two.k AND two.m = three.m"
    assert reordered(si.sql(total, one=one, two=two, three=three))


def test_explain_shows_the_order_with_estimated_rows() -> None:
    text = si.sql(QUERY, small=SMALL, t=FACTS).explain("logical")
    line = next(line for line in text.splitlines() if "Reordered" in line)
    assert "JOIN small 3" in line


def test_a_job_joins_as_written() -> None:
    flow = si.sql(QUERY, small=SMALL, t=FACTS)
    sink = si.to_memory()
    job = flow.start(sink=sink)
    assert job.wait()
    assert rows_of(sink.table().select(["id", "w"])) == rows_of(flow.collect().select(["id", "w"]))


def test_streams_and_unbound_inputs_are_joined_as_written() -> None:
    stream = si.from_arrow(FACTS.append_column("ts", pa.array(range(N), pa.timestamp("s")))).with_watermark("ts", "1s")
    assert not reordered(si.sql(QUERY, small=SMALL, t=stream))
    assert not reordered(si.sql(QUERY, small=SMALL, t=si.flow(FACTS.schema)))


def test_semi_joins_are_computed_below_other_joins() -> None:
    """At the table, by a key that is equal to the one in the condition; anti joins, and those of links, as well."""
    labels = pa.table({"key": np.arange(5000), "label": [f"l{k % 40}" for k in range(5000)]})
    few = pa.table({"n": [3, 14, 15, 15, None]})
    conditions = {
        "id IN (SELECT n FROM few_rows)": True, "key IN (SELECT n FROM few_rows)": True,
        "NOT EXISTS (SELECT 1 FROM few_rows WHERE n = t.id)": True,
        "few IN (SELECT n FROM few_rows)": False,  # of many more rows than the join has
        "EXISTS (SELECT 1 FROM few_rows WHERE n = key) AND EXISTS (SELECT 1 FROM few_rows WHERE n = few)": True}
    for condition, is_below in conditions.items():
        query = ("SELECT count(*) AS n, sum(id) AS i, sum(key) AS k, max(label) AS l FROM t, labels "
                 f"WHERE id = key AND {condition}")
        flow = si.sql(query, t=FACTS, labels=labels, few_rows=few)
        lines = [line.strip() for line in flow.explain("logical").splitlines()]
        tests = [k for k, line in enumerate(lines) if line.startswith(("Join semi", "Join anti"))]
        assert (tests[-1] > next(k for k, line in enumerate(lines) if line.startswith("Join inner"))) == is_below
        connection = duckdb.connect()
        for name, table in {"t": FACTS, "labels": labels, "few_rows": few}.items():
            connection.register(name, table)
        assert rows_of(flow.collect(workers=1)) == rows_of(connection.sql(query).to_arrow_table()), condition
