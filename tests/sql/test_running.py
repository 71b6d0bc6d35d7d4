"""Flows of SQL are flows like any other: inputs of all kinds, jobs, windows, Spark."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from random import Random
from typing import Any

import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import scalein as si
from scalein import nexmark
from scalein.ir.ops import Join, Over, StreamJoin
from scalein.ir.rewrite import walk_ops
from scalein.nexmark.texts import FLINK
from scalein.sql.session import Inserts, Session
from tests.same import assert_same

BIDS = pa.table({"auction": [1, 1, 2, 1, 2, 1], "price": [3, 5, 2, 9, 9, 1],
                 "t": pa.array([1, 8, 9, 12, 25, 31], pa.timestamp("s"))})
SIZES = [2, 1, 3]


def stream() -> si.Flow:
    batches = [BIDS.slice(sum(SIZES[:k]), size).to_batches()[0] for k, size in enumerate(SIZES)]
    return si.from_batches(batches, BIDS.schema).with_watermark("t", "1s")


def test_inputs_of_all_kinds(tmp_path: Path) -> None:
    pq.write_table(BIDS, tmp_path / "bids.parquet")
    local = pl.DataFrame({"auction": [1], "kind": ["a"]})
    frame = pd.DataFrame({"auction": [2], "kind": ["b"]})
    path = tmp_path / "bids.parquet"
    assert local.height == frame.shape[0]
    query = f"""
        with kinds as (select * from local union all select * from frame)
        select kind, sum(price) as total from '{path}' join kinds using (auction) group by kind order by kind"""
    assert si.sql(query).collect().to_pydict() == {"kind": ["a", "b"], "total": [18, 11]}
    assert si.sql("select count(*) as n from b", b=str(path)).collect().to_pydict() == {"n": [6]}
    assert si.sql("select count(*) as n from read_parquet('" + str(path) + "')").collect().to_pydict() == {"n": [6]}


def test_outputs_without_a_name_are_called_by_their_text() -> None:
    found = si.sql("select max(price), -auction  + 1, count( * ), (select min(price) from b), t.auction, "
                   "auction is distinct from 2, extract(year from min(t)) from b t group by auction", b=BIDS)
    assert found.columns == ["max(price)", "-auction + 1", "count( * )", "(select min(price) from b)", "auction",
                             "auction is distinct from 2", "extract(year from min(t))"]
    found = si.sql('select "max(price)" as m from (select max(price) from b)', b=BIDS)
    assert found.collect().to_pydict() == {"m": [9]}


def test_statements_of_scripts(tmp_path: Path) -> None:
    """What `scalein run` executes goes before a query, too."""
    pq.write_table(BIDS, tmp_path / "bids.parquet")
    table = f"""create table bids (auction bigint, price bigint, t timestamp(0),
                                   watermark for t as t - interval '1' second)
                with ('connector' = 'filesystem', 'path' = 'file://{tmp_path}/bids.parquet', 'format' = 'parquet');"""
    assert si.sql(table + "select max(price) as m from bids").collect().to_pydict() == {"m": [9]}
    views = "create view dear (which, cost) as select auction, price from b where price > 4; "
    assert si.sql(views + "select which, sum(cost) as s from dear group by which order by which", b=BIDS).collect(
        ).to_pydict() == {"which": [1, 2], "s": [14, 9]}
    twice = ("create temporary view v as select 1 as x; create view if not exists v as select 2 as x; "
             "select x from v")
    assert si.sql(twice).collect().to_pydict() == {"x": [1]}
    (text,) = si.sql("explain select auction from b where price > 4", b=BIDS).collect()["text"].to_pylist()
    assert "Filter" in text


def test_published_texts_of_nexmark() -> None:
    """q12 and q13 with PROCTIME(), q14 with the function that it brings, and q10 with a path of Flink's."""
    data = nexmark.tables(events=3_000, seed=5)
    flows = nexmark.Streams(*(si.from_arrow(each).with_watermark("dateTime", nexmark.DELAY) for each in data))
    inputs: dict[str, Any] = dict(flows._asdict(), side_input=nexmark.side_input())
    texts = {
        "q12": """CREATE VIEW B AS SELECT *, PROCTIME() as p_time FROM bid;
            SELECT bidder, COUNT(*) AS bid_count, window_start AS starttime, window_end AS endtime
            FROM TABLE(TUMBLE(TABLE B, DESCRIPTOR(p_time), INTERVAL '10' SECOND))
            GROUP BY bidder, window_start, window_end""",
        "q13": """SELECT B.auction, B.bidder, B.price, B.`dateTime`, S.`value`
            FROM (SELECT *, PROCTIME() as p_time FROM bid) B
            JOIN side_input FOR SYSTEM_TIME AS OF B.p_time AS S ON MOD(B.auction, 10000) = S.key""",
        "q14": "CREATE FUNCTION count_char AS 'com.github.nexmark.flink.udf.CountChar';" + FLINK["q14"].replace(
            "CHAR_LENGTH(extra) - CHAR_LENGTH(REPLACE(extra, 'c', ''))", "count_char(extra, 'c')"),
    }
    for name, text in texts.items():
        with pytest.warns(RuntimeWarning, match="read as the event time") if name != "q14" else nullcontext():
            flow = si.sql(text, **inputs)
        got, want = flow.collect(), nexmark.flow(name, data).collect()  # in SQL 0.908 is a decimal
        assert got.num_rows > 0
        assert_same(got.cast(want.schema.remove_metadata()), want, tolerance=1e-9)
    session = Session(inputs)
    script = """CREATE TABLE nexmark_q10 (auction BIGINT, dt STRING, hm STRING) PARTITIONED BY (dt, hm) WITH (
            'connector' = 'filesystem', 'path' = 'file:///data/output/bid/', 'format' = 'csv',
            'sink.partition-commit.trigger' = 'partition-time', 'sink.rolling-policy.rollover-interval' = '1min');
        INSERT INTO nexmark_q10 SELECT auction, DATE_FORMAT(`dateTime`, 'yyyy-MM-dd'), DATE_FORMAT(`dateTime`, 'HH:mm')
        FROM bid"""
    _, inserts = session.steps(script)
    assert isinstance(inserts, Inserts)
    (insert,) = inserts.inserts
    assert (insert.table.path, insert.table.partitions) == ("/data/output/bid/", ("dt", "hm"))
    assert insert.flow.columns == ["auction", "dt", "hm"]


def test_functions_of_flink() -> None:
    times = pa.table({"t": pa.array([0, 1_234, 86_400_000], pa.timestamp("ms")), "n": [1, 2, 3]})
    found = si.sql("""select date_format(t, 'yyyy-MM-dd HH:mm:ss.SSS') as a, date_format(t, 'SSS') as b,
                      timestampdiff(hour, t, timestamp '1970-01-02 12:30:00') as c, timestampadd(minute, n, t) as d,
                      timestampadd(day, 2, t) as e from x""", x=times).collect()
    assert found.to_pydict() == {
        "a": ["1970-01-01 00:00:00.000", "1970-01-01 00:00:01.234", "1970-01-02 00:00:00.000"],
        "b": ["000", "234", "000"], "c": [36, 36, 12],
        "d": [t + timedelta(minutes=n) for t, n in zip(times["t"].to_pylist(), (1, 2, 3), strict=True)],
        "e": [t + timedelta(days=2) for t in times["t"].to_pylist()]}


def test_long_chains() -> None:
    """As many operands as one likes: planning does not recurse."""
    flow = si.sql("select " + " + ".join(["price"] * 1500) + " as p from b", b=BIDS)
    assert flow.columns == ["p"]


def test_views() -> None:
    found = si.sql("create view dear as select * from b where price > 4; select count(*) as n from dear", b=BIDS)
    assert found.collect().to_pydict() == {"n": [3]}


def test_names_of_tables_may_be_those_of_columns() -> None:
    """The columns of bid are auction and price; the table auction has a name of its own."""
    auctions = pa.table({"id": [1, 2], "price": [7, 8]})
    query = "select auction.id, bid.price from auction {} join bid on auction.id = bid.auction"
    want = {"id": [1, 1, 1, 1, 2, 2], "price": [1, 3, 5, 9, 2, 9]}
    for kind in ("", "left", "full"):
        flow = si.sql(query.format(kind) + " order by 1, 2", auction=auctions, bid=BIDS)
        assert flow.collect().to_pydict() == want
        assert not any(op.how == "cross" for op in walk_ops(flow.op) if isinstance(op, Join))
    query = ("select id from auction where exists "
             "(select 1 from bid where bid.auction = auction.id and price > auction.price)")
    assert si.sql(query, auction=auctions, bid=BIDS).collect().to_pydict() == {"id": [1, 2]}
    nested = si.from_arrow({"s": [{"x": 1}], "k": [2]})
    found = si.sql("select s.x, n.s.x as y, n.k from n", n=nested).collect()
    assert found.to_pydict() == {"x": [1], "y": [1], "k": [2]}


def test_insert_lists_columns(tmp_path: Path) -> None:
    session = Session({"b": BIDS})
    script = f"""
        create table made (x bigint, y bigint, z varchar) with ('connector' = 'filesystem', 'path' = '{tmp_path}/made',
                                                                'format' = 'parquet');
        insert into made (y, x) select price, auction from b"""
    _, inserts = session.steps(script)
    assert isinstance(inserts, Inserts)
    (insert,) = inserts.inserts
    found = insert.flow.collect().to_pydict()
    assert found == {"x": BIDS["auction"].to_pylist(), "y": BIDS["price"].to_pylist(), "z": [None] * 6}
    for columns, says in (("(y, w)", "has no column 'w'"), ("(y, y)", "'y' is listed twice"), ("(y)", "1 are listed")):
        with pytest.raises(si.BadSql, match=says):
            list(session.steps(f"insert into made {columns} select price, auction from b"))


def test_the_spellings_of_windows_are_one() -> None:
    start = "SELECT auction, window_start, window_end, COUNT(*) AS n FROM "
    end = " GROUP BY auction, window_start, window_end"
    found = [si.sql(query, bid=BIDS).op for query in (
        start + "TABLE(TUMBLE(TABLE bid, DESCRIPTOR(t), INTERVAL '10' SECOND))" + end,
        start + "TABLE(TUMBLE(DATA => TABLE bid, TIMECOL => DESCRIPTOR(t), SIZE => INTERVAL '10' SECONDS))" + end,
        start + "tumble(bid, t, interval '10' second)" + end)]
    assert found[0] == found[1] == found[2]
    want = si.from_arrow(BIDS).group_by("auction", si.tumbling("t", "10s")).agg(n=si.count()).collect()
    assert_same(si.sql(start + "tumble(bid, t, interval '10' second)" + end, bid=BIDS).collect(), want)
    old = ("SELECT auction, TUMBLE_START(t, INTERVAL '10' SECOND) AS window_start, "
           "TUMBLE_END(t, INTERVAL '10' SECOND) AS window_end, COUNT(*) AS n FROM bid "
           "GROUP BY auction, TUMBLE(t, INTERVAL '10' SECOND)")
    spark = ("SELECT auction, window.start AS window_start, window.end AS window_end, COUNT(*) AS n FROM bid "
             "GROUP BY auction, window(t, '10 seconds')")
    for query in (old, spark):
        assert_same(si.sql(query, bid=BIDS).collect(), want)


def test_rows_get_the_windows_that_they_are_in() -> None:
    """Rows with their windows, grouped by hand, are what grouping by the windows gives."""
    for call in ("hop(bid, t, interval '4' second, interval '10' second)",
                 "cumulate(bid, t, interval '5' second, interval '20' second)"):
        rows = f"select window_start as a, window_end as b, price from {call}"
        grouped = si.sql(f"select a, b, sum(price) as s from ({rows}) group by a, b", bid=BIDS).collect()
        want = si.sql(f"select window_start as a, window_end as b, sum(price) as s from {call} "
                      "group by window_start, window_end", bid=BIDS).collect()
        assert_same(grouped, want)


def test_queries_run_as_jobs() -> None:
    """Among them a join of two streams by an interval, and one of windows."""
    for query in (
        "SELECT auction, window_start, MAX(price) AS most FROM TABLE(TUMBLE(TABLE bid, DESCRIPTOR(t), "
        "INTERVAL '10' SECOND)) GROUP BY auction, window_start, window_end",
        "SELECT a.auction, a.price, b.price AS other FROM bid a JOIN bid2 b ON a.auction = b.auction "
        "AND b.t BETWEEN a.t - INTERVAL '8' SECOND AND a.t",
        FLINK["q5"].replace("`dateTime`", "t"),
    ):
        want = si.sql(query, bid=BIDS, bid2=BIDS).collect()
        assert want.num_rows > 0
        out = si.to_memory()
        si.sql(query, bid=stream(), bid2=stream()).start(sink=out).wait()
        assert_same(out.table(), want)


def test_joins_of_streams_are_recognised() -> None:
    query = ("SELECT a.price FROM bid a LEFT JOIN bid2 b ON a.auction = b.auction AND b.t >= a.t "
             "AND b.t < a.t + INTERVAL '10' SECOND")
    (join,) = [op for op in walk_ops(si.sql(query, bid=stream(), bid2=stream()).op) if isinstance(op, StreamJoin)]
    assert join.bound is not None
    assert (join.bound.low, join.bound.high, join.how) == (0, 9, "left")
    query = "SELECT a.price FROM bid a JOIN bid2 b ON a.auction = b.auction"
    (join,) = [op for op in walk_ops(si.sql(query, bid=stream(), bid2=stream()).op) if isinstance(op, StreamJoin)]
    assert join.bound is None
    assert not any(isinstance(op, StreamJoin) for op in walk_ops(si.sql(query, bid=stream(), bid2=BIDS).op))


def test_top_rows_of_groups() -> None:
    query = ("SELECT auction, price FROM (SELECT *, ROW_NUMBER() OVER (PARTITION BY auction ORDER BY price DESC) AS r "
             "FROM bid) WHERE r <= 1 ORDER BY auction")
    flow = si.sql(query, bid=BIDS)
    assert flow.collect().to_pydict() == {"auction": [1, 2], "price": [9, 9]}
    assert any(isinstance(op, Over) for op in walk_ops(flow.op))


class Patient:
    """A source that never ends, as far as a plan knows; before its last batch it waits until rows have come out."""

    bounded, replays = False, True

    def __init__(self, table: pa.Table) -> None:
        self.schema, self.batches = table.schema, table.to_batches(max_chunksize=5)
        self.has_rows = threading.Event()

    def partitions(self) -> list[str]:
        return ["all"]

    def read(self, partition: str, offset: Any) -> Iterator[tuple[pa.RecordBatch, int]]:
        for number, batch in enumerate(self.batches):
            if number == len(self.batches) - 1:
                assert self.has_rows.wait(60), "no rows came before the end"
            yield batch, number + 1


WINDOWED = "FROM TABLE({}(TABLE bid, DESCRIPTOR(t), INTERVAL '4' SECOND{}))"
TUMBLED, HOPPED = WINDOWED.format("TUMBLE", ""), WINDOWED.format("HOP", ", INTERVAL '12' SECOND")
COUNTED = "(SELECT auction, COUNT(*) AS n, window_start, window_end {} GROUP BY auction, window_start, window_end)"
TUMBLED_COUNT, HOPPED_COUNT = COUNTED.format(TUMBLED), COUNTED.format(HOPPED)


@pytest.mark.parametrize("query", [
    "SELECT auction, SUM(price) OVER (PARTITION BY auction ORDER BY t) AS s, t FROM bid",
    "SELECT auction, t, LAG(price) OVER w AS l, COUNT(*) OVER w AS n FROM bid "
    "WINDOW w AS (PARTITION BY auction ORDER BY t)",
    "SELECT t, AVG(price) OVER (PARTITION BY auction ORDER BY t ROWS BETWEEN 2 PRECEDING AND CURRENT ROW) a FROM bid",
    "SELECT t, MAX(price) OVER (ORDER BY t RANGE BETWEEN INTERVAL '3' SECOND PRECEDING AND CURRENT ROW) AS m FROM bid",
    "SELECT * FROM (SELECT *, ROW_NUMBER() OVER (PARTITION BY auction ORDER BY t) AS r FROM bid) WHERE r <= 1",
    f"SELECT auction, price, window_end {TUMBLED} QUALIFY ROW_NUMBER() OVER "
    "(PARTITION BY window_start, window_end ORDER BY price DESC, auction, t) <= 2",
    "SELECT * FROM (SELECT *, ROW_NUMBER() OVER (PARTITION BY window_start, window_end, auction ORDER BY price, t) "
    f"AS r {HOPPED}) WHERE r <= 1",
    f"SELECT *, RANK() OVER (PARTITION BY window_start, window_end ORDER BY n DESC) AS r FROM {HOPPED_COUNT}",
    f"SELECT MAX(n) AS m, window_start, window_end FROM {TUMBLED_COUNT} GROUP BY window_start, window_end",
    f"SELECT MAX(n) AS m, n % 2 AS p, window_end FROM {HOPPED_COUNT} GROUP BY window_start, window_end, n % 2",
    f"SELECT a.n, b.n AS m, a.window_end FROM {HOPPED_COUNT} a JOIN {HOPPED_COUNT} b "
    "ON a.window_start = b.window_start AND a.window_end = b.window_end AND a.auction < b.auction",
    "SELECT DATE_TRUNC('minute', t) AS m, auction, COUNT(DISTINCT price) AS n FROM bid GROUP BY 1, 2",
    "SELECT DATE_FORMAT(t, 'yyyy-MM-dd HH:mm') AS m, MAX(price) AS p FROM bid GROUP BY DATE_FORMAT(t, "
    "'yyyy-MM-dd HH:mm')",
])
def test_rows_of_endless_streams_come_with_time(query: str) -> None:
    """By event time, by windows, and by periods of event time: before the end of the input, and those of `collect`."""
    random = Random(3)
    times = sorted(random.randrange(150) for _ in range(60))
    table = pa.table({"auction": [random.randint(1, 3) for _ in times], "price": [random.randint(1, 9) for _ in times],
                      "t": pa.array([time + random.choice((0, 0, -2)) for time in times], pa.timestamp("s"))})
    source, found = Patient(table), []

    def arrived(batch: pa.RecordBatch) -> None:
        found.append(batch)
        source.has_rows.set()

    flow = si.sql(query, bid=si.from_source(source).with_watermark("t", "2s"))
    job = flow.start(sink=si.to_callback(arrived))
    job.wait(timeout=120)
    assert job.metrics()["late_rows"] == 0
    assert_same(pa.Table.from_batches(found), si.sql(query, bid=table).collect(), tolerance=1e-9)


def test_nexmark_in_flinks_words() -> None:
    """The texts plan to the rows of the flows written by hand."""
    data = nexmark.tables(events=3_000, seed=5)
    inputs = dict(zip(data._fields, data, strict=True), side_input=nexmark.side_input())
    for name in ("q3", "q8", "q18", "q21"):
        got = si.sql(FLINK[name], **inputs).collect()
        assert got.num_rows > 0
        if name in nexmark.QUERIES:
            assert_same(got, nexmark.flow(name, data).collect(), tolerance=1e-9)


def test_a_flow_of_sql_is_pickled() -> None:
    flow = si.sql("SELECT auction, price + 1 AS p FROM bid", bid=si.flow(BIDS.schema))
    assert pickle.loads(pickle.dumps(flow)).collect(BIDS).num_rows == 6
