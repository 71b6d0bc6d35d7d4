"""The queries of Nexmark, q0 to q22, as flows: each is a function of the flows person, auction and bid.

They are those of the published suite for Flink SQL. Where that needs what scalein has not (processing time, a lookup
in another system), a query is the nearest one that gives the same rows whenever it runs; `Query.differs` says how.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import pyarrow as pa

import scalein as si
from scalein import col, lit, when
from scalein.api.column import Column
from scalein.api.flow import Flow
from scalein.nexmark.generator import AUCTION, BID
from scalein.nexmark.texts import DUCKDB, FLINK

SIDE_ROWS = 10_000
EURO = 0.908  # of a dollar
CHANNEL_ID = "(&|^)channel_id=([^&]*)"
HOT = ["apple", "google", "facebook", "baidu"]
TEN_S = si.tumbling("dateTime", "10s")

Make = Callable[[Flow, Flow, Flow], Flow]


@dataclass(frozen=True)
class Query:
    """A query of the benchmark: what it asks, as a flow, in Flink's SQL, and in DuckDB's.

    `inputs` are the streams it reads, `order` the columns that order its rows in one way, if there are such columns.
    """

    name: str
    asks: str
    make: Make
    inputs: tuple[str, ...]
    differs: str | None = None

    @property
    def sql(self) -> str:
        """The query in Flink's SQL, over the tables person, auction and bid; of q13 also side_input."""
        return FLINK[self.name].strip()

    @property
    def duckdb(self) -> str:
        """The same result in DuckDB's SQL, over the same tables at rest."""
        return DUCKDB[self.name].strip()


QUERIES: dict[str, Query] = {}


def _query(asks: str, *inputs: str, differs: str | None = None) -> Callable[[Make], Make]:
    """Makes a function the query of its name."""

    def register(make: Make) -> Make:
        QUERIES[make.__name__] = Query(make.__name__, asks, make, inputs, differs)
        return make

    return register


@lru_cache(maxsize=1)
def side_input() -> pa.Table:
    """The table that q13 joins: a text for each number below 10,000."""
    return pa.table({"key": list(range(SIDE_ROWS)), "value": [f"side {n}" for n in range(SIDE_ROWS)]})


@si.udf
def count_c(text: str) -> int:
    """How often the letter c is in a text."""
    return len(text) - len(text.replace("c", ""))


def bids_in_time(auction: Flow, bid: Flow) -> Flow:
    """Bids with their auctions, if these were open: the columns of the bid, then those of the auction."""
    bids = bid.select("auction", "bidder", "price", bid_dateTime="dateTime", bid_extra="extra")
    return (bids.join(auction.with_columns(auction="id"), on="auction", keep="forever")
            .filter(col("bid_dateTime").between(col("dateTime"), col("expires"))))


def winning(auction: Flow, bid: Flow) -> Flow:
    """The winning bid of each auction, which is the highest one, and of several the first."""
    place = si.row_number().over("id", order_by=["price", "bid_dateTime", "bidder"], descending=[True, False, False])
    return bids_in_time(auction, bid).filter(place == 1).select(
        *AUCTION.names, "auction", "bidder", "price", "bid_dateTime", "bid_extra")


def ranks() -> dict[str, Column]:
    """Counts of all bids, and of those of three ranges of prices."""
    return {f"{rank}_bids": count for rank, count in _by_rank(si.count()).items()}


def uniques() -> dict[str, Column]:
    """Counts of bidders and of auctions, for all bids and for those of three ranges of prices."""
    return {f"{rank}_{name}s": count for name in ("bidder", "auction")
            for rank, count in _by_rank(col(name).n_unique()).items()}


def _by_rank(count: Column) -> dict[str, Column]:
    price = col("price")
    return {"total": count, "rank1": count.filter(price < 10_000),
            "rank2": count.filter((price >= 10_000) & (price < 1_000_000)), "rank3": count.filter(price >= 1_000_000)}


def day() -> Column:
    return col("dateTime").dt.strftime("%Y-%m-%d")


@_query("all bids as they are", "bid")
def q0(person: Flow, auction: Flow, bid: Flow) -> Flow:
    return bid.select("auction", "bidder", "price", "dateTime", "extra")


@_query("prices in euro", "bid")
def q1(person: Flow, auction: Flow, bid: Flow) -> Flow:
    return bid.select("auction", "bidder", "dateTime", "extra", price=EURO * col("price")).select(
        "auction", "bidder", "price", "dateTime", "extra")


@_query("the prices of bids on some auctions", "bid")
def q2(person: Flow, auction: Flow, bid: Flow) -> Flow:
    return bid.filter(col("auction") % 123 == 0).select("auction", "price")


@_query("who sells in three states and one category", "person", "auction")
def q3(person: Flow, auction: Flow, bid: Flow) -> Flow:
    near = person.filter(col("state").is_in(["OR", "ID", "CA"])).select("name", "city", "state", seller="id")
    sold = auction.filter(col("category") == 10).select("id", "seller")
    return sold.join(near, on="seller", keep="forever").select("name", "city", "state", "id")


@_query("the average winning price of each category", "auction", "bid")
def q4(person: Flow, auction: Flow, bid: Flow) -> Flow:
    final = bids_in_time(auction, bid).group_by("id", "category").agg(final=col("price").max())
    return final.group_by("category").agg(average=col("final").mean())


@_query("the auctions with the most bids in the last 10 s, every 2 s", "bid")
def q5(person: Flow, auction: Flow, bid: Flow) -> Flow:
    counts = bid.group_by("auction", si.sliding("dateTime", "10s", every="2s")).agg(num=si.count())
    most = counts.group_by("window_start", "window_end").agg(num=col("num").max())
    return counts.join(most, on=["window_start", "window_end", "num"], keep="forever").select("auction", "num")


@_query("the average price of the last ten auctions of each seller, and of the one that closes", "auction", "bid",
        differs="each auction counts once, with its winning bid; the published query averages rows that are revised "
                "later, which Flink refuses")
def q6(person: Flow, auction: Flow, bid: Flow) -> Flow:
    won = winning(auction, bid).select("id", "seller", "price", "bid_dateTime")
    return won.select("seller", average=col("price").mean().over("seller", order_by=["bid_dateTime", "id"], rows=11))


@_query("the highest bids of every 10 s", "bid")
def q7(person: Flow, auction: Flow, bid: Flow) -> Flow:
    highest = bid.group_by(TEN_S).agg(price=col("price").max())
    return (bid.join(highest, on="price", keep="forever")
            .filter(col("dateTime").between(col("window_start"), col("window_end")))
            .select("auction", "price", "bidder", "dateTime", "extra"))


@_query("persons who opened an auction within the 10 s in which they came", "person", "auction")
def q8(person: Flow, auction: Flow, bid: Flow) -> Flow:
    sellers = auction.select("dateTime", id="seller")
    return (person.join(sellers, on="id", how="semi", within=TEN_S).select("id", "name", "window_start"))


@_query("the winning bid of each auction", "auction", "bid")
def q9(person: Flow, auction: Flow, bid: Flow) -> Flow:
    return winning(auction, bid)


@_query("all bids, by day and minute, for a partitioned sink", "bid",
        differs='the rows are those of the sink; write them with si.to_parquet(path, partition_by=["dt", "hm"])')
def q10(person: Flow, auction: Flow, bid: Flow) -> Flow:
    return bid.select("auction", "bidder", "price", "dateTime", "extra", dt=day(),
                      hm=col("dateTime").dt.strftime("%H:%M"))


@_query("the bids of each bidder in a session, which 10 s without a bid end", "bid")
def q11(person: Flow, auction: Flow, bid: Flow) -> Flow:
    return bid.group_by("bidder", si.session("dateTime", gap="10s")).agg(bid_count=si.count()).select(
        "bidder", "bid_count", starttime="window_start", endtime="window_end")


@_query("the bids of each bidder in every 10 s", "bid",
        differs="windows are of event time; the published query takes the time of the clock")
def q12(person: Flow, auction: Flow, bid: Flow) -> Flow:
    return bid.group_by("bidder", TEN_S).agg(bid_count=si.count()).select(
        "bidder", "bid_count", starttime="window_start", endtime="window_end")


@_query("bids with a text of a side table", "bid",
        differs="the table is joined as it is at the start; the published query looks it up at the time of the clock")
def q13(person: Flow, auction: Flow, bid: Flow) -> Flow:
    bids = bid.select("auction", "bidder", "price", "dateTime", key=col("auction") % SIDE_ROWS)
    return bids.join(side_input(), on="key").drop("key")


@_query("some bids with the part of the day, and with a count of letters by a function of the user", "bid")
def q14(person: Flow, auction: Flow, bid: Flow) -> Flow:
    hour, price = col("dateTime").dt.hour(), EURO * col("price")
    part = when((hour >= 8) & (hour <= 18)).then(lit("dayTime")).when((hour <= 6) | (hour >= 20)).then(
        lit("nightTime")).otherwise(lit("otherTime"))
    return bid.filter((price > 1_000_000) & (price < 50_000_000)).select(
        "auction", "bidder", price.alias("price"), part.alias("bidTimeType"), "dateTime", "extra",
        c_counts=count_c(col("extra")))


@_query("a report of bids for each day", "bid")
def q15(person: Flow, auction: Flow, bid: Flow) -> Flow:
    return bid.group_by(day=day()).agg(**ranks(), **uniques())


@_query("a report of bids for each channel and day", "bid")
def q16(person: Flow, auction: Flow, bid: Flow) -> Flow:
    return bid.group_by("channel", day=day()).agg(
        minute=col("dateTime").dt.strftime("%H:%M").max(), **ranks(), **uniques())


@_query("a report of bids for each auction and day", "bid")
def q17(person: Flow, auction: Flow, bid: Flow) -> Flow:
    price = col("price")
    return bid.group_by("auction", day=day()).agg(**ranks(), min_price=price.min(), max_price=price.max(),
                                                  avg_price=price.mean(), sum_price=price.sum())


@_query("the last bid of each bidder on each auction", "bid")
def q18(person: Flow, auction: Flow, bid: Flow) -> Flow:
    place = si.row_number().over("bidder", "auction", order_by=["dateTime", "extra"], descending=True)
    return bid.filter(place == 1).select(*BID.names)


@_query("the ten highest bids of each auction", "bid")
def q19(person: Flow, auction: Flow, bid: Flow) -> Flow:
    place = si.row_number().over("auction", order_by=["price", "extra"], descending=True)
    return bid.filter(place <= 10).select(*BID.names)


@_query("bids with the auctions of one category", "auction", "bid")
def q20(person: Flow, auction: Flow, bid: Flow) -> Flow:
    bids = bid.rename({"dateTime": "bid_dateTime", "extra": "bid_extra"})
    auctions = auction.filter(col("category") == 10).rename({"dateTime": "auction_dateTime", "extra": "auction_extra",
                                                             "id": "auction"})
    return bids.join(auctions, on="auction", keep="forever")


@_query("bids with the number of their channel", "bid")
def q21(person: Flow, auction: Flow, bid: Flow) -> Flow:
    bids = bid.with_columns(name=col("channel").str.lower(), number=col("url").str.extract(CHANNEL_ID, 2))
    name, number = col("name"), col("number")
    known = when(name == "apple").then(lit("0")).when(name == "google").then(lit("1")).when(name == "facebook").then(
        lit("2")).when(name == "baidu").then(lit("3"))
    return bids.filter(number.is_not_null() | name.is_in(HOT)).select(
        "auction", "bidder", "price", "channel", channel_id=known.otherwise(number))


@_query("bids with the folders of their address", "bid")
def q22(person: Flow, auction: Flow, bid: Flow) -> Flow:
    folders = {f"dir{n}": col("url").str.split_part("/", n + 3) for n in (1, 2, 3)}
    return bid.select("auction", "bidder", "price", "channel", **folders)
