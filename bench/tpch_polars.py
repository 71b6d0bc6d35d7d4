"""TPC-H's queries for Polars, over lazy frames by table name, with joins in the order that its own users write."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import date

import polars as pl
from polars import col

Frames = Mapping[str, pl.LazyFrame]
Query = Callable[[Frames], pl.LazyFrame]

REVENUE = col("l_extendedprice") * (1 - col("l_discount"))


def q1(t: Frames) -> pl.LazyFrame:
    price = col("l_extendedprice")
    return t["lineitem"].filter(col("l_shipdate") <= date(1998, 9, 2)).group_by("l_returnflag", "l_linestatus").agg(
        col("l_quantity").sum().alias("sum_qty"), price.sum().alias("sum_base_price"),
        REVENUE.sum().alias("sum_disc_price"), (REVENUE * (1 + col("l_tax"))).sum().alias("sum_charge"),
        col("l_quantity").mean().alias("avg_qty"), price.mean().alias("avg_price"),
        col("l_discount").mean().alias("avg_disc"), pl.len().alias("count_order"),
    ).sort("l_returnflag", "l_linestatus")


def q2(t: Frames) -> pl.LazyFrame:
    offers = (t["part"].filter((col("p_size") == 15) & col("p_type").str.ends_with("BRASS"))
              .join(t["partsupp"], left_on="p_partkey", right_on="ps_partkey")
              .join(t["supplier"], left_on="ps_suppkey", right_on="s_suppkey")
              .join(t["nation"], left_on="s_nationkey", right_on="n_nationkey")
              .join(t["region"].filter(col("r_name") == "EUROPE"), left_on="n_regionkey", right_on="r_regionkey"))
    least = offers.group_by("p_partkey").agg(col("ps_supplycost").min())
    return offers.join(least, on=["p_partkey", "ps_supplycost"]).select(
        "s_acctbal", "s_name", "n_name", "p_partkey", "p_mfgr", "s_address", "s_phone", "s_comment",
    ).sort("s_acctbal", "n_name", "s_name", "p_partkey", descending=[True, False, False, False]).head(100)


def q3(t: Frames) -> pl.LazyFrame:
    return (t["customer"].filter(col("c_mktsegment") == "BUILDING")
            .join(t["orders"].filter(col("o_orderdate") < date(1995, 3, 15)), left_on="c_custkey",
                  right_on="o_custkey")
            .join(t["lineitem"].filter(col("l_shipdate") > date(1995, 3, 15)), left_on="o_orderkey",
                  right_on="l_orderkey")
            .group_by("o_orderkey", "o_orderdate", "o_shippriority").agg(REVENUE.sum().alias("revenue"))
            .select(col("o_orderkey").alias("l_orderkey"), "revenue", "o_orderdate", "o_shippriority")
            .sort("revenue", "o_orderdate", descending=[True, False]).head(10))


def q4(t: Frames) -> pl.LazyFrame:
    late = t["lineitem"].filter(col("l_commitdate") < col("l_receiptdate"))
    return (t["orders"].filter((col("o_orderdate") >= date(1993, 7, 1)) & (col("o_orderdate") < date(1993, 10, 1)))
            .join(late, left_on="o_orderkey", right_on="l_orderkey", how="semi")
            .group_by("o_orderpriority").agg(pl.len().alias("order_count")).sort("o_orderpriority"))


def q5(t: Frames) -> pl.LazyFrame:
    orders = t["orders"].filter((col("o_orderdate") >= date(1994, 1, 1)) & (col("o_orderdate") < date(1995, 1, 1)))
    return (t["region"].filter(col("r_name") == "ASIA")
            .join(t["nation"], left_on="r_regionkey", right_on="n_regionkey")
            .join(t["customer"], left_on="n_nationkey", right_on="c_nationkey")
            .join(orders, left_on="c_custkey", right_on="o_custkey")
            .join(t["lineitem"], left_on="o_orderkey", right_on="l_orderkey")
            .join(t["supplier"], left_on=["l_suppkey", "n_nationkey"], right_on=["s_suppkey", "s_nationkey"])
            .group_by("n_name").agg(REVENUE.sum().alias("revenue")).sort("revenue", descending=True))


def q6(t: Frames) -> pl.LazyFrame:
    return t["lineitem"].filter(
        (col("l_shipdate") >= date(1994, 1, 1)) & (col("l_shipdate") < date(1995, 1, 1))
        & col("l_discount").is_between(0.05, 0.07) & (col("l_quantity") < 24),
    ).select((col("l_extendedprice") * col("l_discount")).sum().alias("revenue"))


def q7(t: Frames) -> pl.LazyFrame:
    nations = t["nation"].filter(col("n_name").is_in(["FRANCE", "GERMANY"])).select("n_nationkey", "n_name")
    shipped = t["lineitem"].filter(col("l_shipdate").is_between(date(1995, 1, 1), date(1996, 12, 31)))
    return (t["customer"].join(nations.rename({"n_name": "cust_nation"}), left_on="c_nationkey",
                               right_on="n_nationkey")
            .join(t["orders"], left_on="c_custkey", right_on="o_custkey")
            .join(shipped, left_on="o_orderkey", right_on="l_orderkey")
            .join(t["supplier"], left_on="l_suppkey", right_on="s_suppkey")
            .join(nations.rename({"n_name": "supp_nation"}), left_on="s_nationkey", right_on="n_nationkey")
            .filter(col("cust_nation") != col("supp_nation"))
            .group_by("supp_nation", "cust_nation", col("l_shipdate").dt.year().alias("l_year"))
            .agg(REVENUE.sum().alias("revenue")).sort("supp_nation", "cust_nation", "l_year"))


def q8(t: Frames) -> pl.LazyFrame:
    orders = t["orders"].filter(col("o_orderdate").is_between(date(1995, 1, 1), date(1996, 12, 31)))
    nations = t["nation"].select(col("n_nationkey"), col("n_name").alias("nation"))
    of_brazil = pl.when(col("nation") == "BRAZIL").then(col("volume")).otherwise(0)
    return (t["part"].filter(col("p_type") == "ECONOMY ANODIZED STEEL")
            .join(t["lineitem"], left_on="p_partkey", right_on="l_partkey")
            .join(t["supplier"], left_on="l_suppkey", right_on="s_suppkey")
            .join(orders, left_on="l_orderkey", right_on="o_orderkey")
            .join(t["customer"], left_on="o_custkey", right_on="c_custkey")
            .join(t["nation"].select("n_nationkey", "n_regionkey"), left_on="c_nationkey", right_on="n_nationkey")
            .join(t["region"].filter(col("r_name") == "AMERICA"), left_on="n_regionkey", right_on="r_regionkey")
            .join(nations, left_on="s_nationkey", right_on="n_nationkey")
            .select(col("o_orderdate").dt.year().alias("o_year"), REVENUE.cast(pl.Float64).alias("volume"), "nation")
            .group_by("o_year").agg((of_brazil.sum() / col("volume").sum()).alias("mkt_share")).sort("o_year"))


def q9(t: Frames) -> pl.LazyFrame:
    return (t["part"].filter(col("p_name").str.contains("green", literal=True))
            .join(t["partsupp"], left_on="p_partkey", right_on="ps_partkey")
            .join(t["supplier"], left_on="ps_suppkey", right_on="s_suppkey")
            .join(t["lineitem"], left_on=["p_partkey", "ps_suppkey"], right_on=["l_partkey", "l_suppkey"])
            .join(t["orders"], left_on="l_orderkey", right_on="o_orderkey")
            .join(t["nation"], left_on="s_nationkey", right_on="n_nationkey")
            .select(col("n_name").alias("nation"), col("o_orderdate").dt.year().alias("o_year"),
                    (REVENUE - col("ps_supplycost") * col("l_quantity")).alias("amount"))
            .group_by("nation", "o_year").agg(col("amount").sum().alias("sum_profit"))
            .sort("nation", "o_year", descending=[False, True]))


def q10(t: Frames) -> pl.LazyFrame:
    orders = t["orders"].filter((col("o_orderdate") >= date(1993, 10, 1)) & (col("o_orderdate") < date(1994, 1, 1)))
    return (t["customer"].join(orders, left_on="c_custkey", right_on="o_custkey")
            .join(t["lineitem"].filter(col("l_returnflag") == "R"), left_on="o_orderkey", right_on="l_orderkey")
            .join(t["nation"], left_on="c_nationkey", right_on="n_nationkey")
            .group_by("c_custkey", "c_name", "c_acctbal", "c_phone", "n_name", "c_address", "c_comment")
            .agg(REVENUE.sum().alias("revenue"))
            .select("c_custkey", "c_name", "revenue", "c_acctbal", "n_name", "c_address", "c_phone", "c_comment")
            .sort("revenue", descending=True).head(20))


def q11(t: Frames) -> pl.LazyFrame:
    held = (t["partsupp"].join(t["supplier"], left_on="ps_suppkey", right_on="s_suppkey")
            .join(t["nation"].filter(col("n_name") == "GERMANY"), left_on="s_nationkey", right_on="n_nationkey")
            .select("ps_partkey", (col("ps_supplycost") * col("ps_availqty")).alias("value")))
    least = held.select((col("value").sum().cast(pl.Float64) * 0.0001).alias("least"))
    return (held.group_by("ps_partkey").agg(col("value").sum()).join(least, how="cross")
            .filter(col("value").cast(pl.Float64) > col("least")).select("ps_partkey", "value")
            .sort("value", descending=True))


def q12(t: Frames) -> pl.LazyFrame:
    lines = t["lineitem"].filter(
        col("l_shipmode").is_in(["MAIL", "SHIP"]) & (col("l_commitdate") < col("l_receiptdate"))
        & (col("l_shipdate") < col("l_commitdate")) & (col("l_receiptdate") >= date(1994, 1, 1))
        & (col("l_receiptdate") < date(1995, 1, 1)))
    is_high = col("o_orderpriority").is_in(["1-URGENT", "2-HIGH"])
    return (t["orders"].join(lines, left_on="o_orderkey", right_on="l_orderkey").group_by("l_shipmode")
            .agg(is_high.sum().alias("high_line_count"), (~is_high).sum().alias("low_line_count"))
            .sort("l_shipmode"))


def q13(t: Frames) -> pl.LazyFrame:
    orders = t["orders"].filter(~col("o_comment").str.contains("special.*requests"))
    return (t["customer"].join(orders, left_on="c_custkey", right_on="o_custkey", how="left")
            .group_by("c_custkey").agg(col("o_orderkey").count().alias("c_count"))
            .group_by("c_count").agg(pl.len().alias("custdist"))
            .sort("custdist", "c_count", descending=[True, True]))


def q14(t: Frames) -> pl.LazyFrame:
    promoted = pl.when(col("p_type").str.starts_with("PROMO")).then(REVENUE.cast(pl.Float64)).otherwise(0)
    return (t["lineitem"].filter((col("l_shipdate") >= date(1995, 9, 1)) & (col("l_shipdate") < date(1995, 10, 1)))
            .join(t["part"], left_on="l_partkey", right_on="p_partkey")
            .select((100.0 * promoted.sum() / REVENUE.cast(pl.Float64).sum()).alias("promo_revenue")))


def q15(t: Frames) -> pl.LazyFrame:
    revenue = t["lineitem"].filter(
        (col("l_shipdate") >= date(1996, 1, 1)) & (col("l_shipdate") < date(1996, 4, 1)),
    ).group_by("l_suppkey").agg(REVENUE.sum().alias("total_revenue"))
    best = revenue.select(col("total_revenue").max())
    return (t["supplier"].join(revenue.join(best, on="total_revenue", how="semi"), left_on="s_suppkey",
                               right_on="l_suppkey")
            .select("s_suppkey", "s_name", "s_address", "s_phone", "total_revenue").sort("s_suppkey"))


def q16(t: Frames) -> pl.LazyFrame:
    blamed = t["supplier"].filter(col("s_comment").str.contains("Customer.*Complaints"))
    parts = t["part"].filter(
        (col("p_brand") != "Brand#45") & ~col("p_type").str.starts_with("MEDIUM POLISHED")
        & col("p_size").is_in([49, 14, 23, 45, 19, 3, 36, 9]))
    return (parts.join(t["partsupp"], left_on="p_partkey", right_on="ps_partkey")
            .join(blamed, left_on="ps_suppkey", right_on="s_suppkey", how="anti")
            .group_by("p_brand", "p_type", "p_size").agg(col("ps_suppkey").n_unique().alias("supplier_cnt"))
            .sort("supplier_cnt", "p_brand", "p_type", "p_size", descending=[True, False, False, False]))


def q17(t: Frames) -> pl.LazyFrame:
    lines = t["part"].filter((col("p_brand") == "Brand#23") & (col("p_container") == "MED BOX")).join(
        t["lineitem"], left_on="p_partkey", right_on="l_partkey")
    means = lines.group_by("p_partkey").agg((0.2 * col("l_quantity").cast(pl.Float64).mean()).alias("least"))
    return (lines.join(means, on="p_partkey").filter(col("l_quantity").cast(pl.Float64) < col("least"))
            .select(pl.when(pl.len() > 0)  # the sum of no rows is null in SQL
                    .then(col("l_extendedprice").cast(pl.Float64).sum() / 7.0).alias("avg_yearly")))


def q18(t: Frames) -> pl.LazyFrame:
    large = t["lineitem"].group_by("l_orderkey").agg(col("l_quantity").sum().alias("quantity")).filter(
        col("quantity") > 300)
    return (t["orders"].join(large, left_on="o_orderkey", right_on="l_orderkey")
            .join(t["customer"], left_on="o_custkey", right_on="c_custkey")
            .select("c_name", col("o_custkey").alias("c_custkey"), "o_orderkey", "o_orderdate", "o_totalprice",
                    "quantity")
            .sort("o_totalprice", "o_orderdate", descending=[True, False]).head(100))


def q19(t: Frames) -> pl.LazyFrame:
    def kind(brand: str, size: str, containers: list[str], least: int, largest: int) -> pl.Expr:
        return ((col("p_brand") == brand) & col("p_container").is_in([f"{size} {each}" for each in containers])
                & col("l_quantity").is_between(least, least + 10) & col("p_size").is_between(1, largest))

    lines = t["lineitem"].filter(col("l_shipmode").is_in(["AIR", "AIR REG"])
                                 & (col("l_shipinstruct") == "DELIVER IN PERSON"))
    return t["part"].join(lines, left_on="p_partkey", right_on="l_partkey").filter(
        kind("Brand#12", "SM", ["CASE", "BOX", "PACK", "PKG"], 1, 5)
        | kind("Brand#23", "MED", ["BAG", "BOX", "PKG", "PACK"], 10, 10)
        | kind("Brand#34", "LG", ["CASE", "BOX", "PACK", "PKG"], 20, 15),
    ).select(REVENUE.sum().alias("revenue"))


def q20(t: Frames) -> pl.LazyFrame:
    shipped = t["lineitem"].filter(
        (col("l_shipdate") >= date(1994, 1, 1)) & (col("l_shipdate") < date(1995, 1, 1)),
    ).group_by("l_partkey", "l_suppkey").agg((0.5 * col("l_quantity").cast(pl.Float64).sum()).alias("half"))
    offers = (t["partsupp"].join(t["part"].filter(col("p_name").str.starts_with("forest")), left_on="ps_partkey",
                                 right_on="p_partkey", how="semi")
              .join(shipped, left_on=["ps_partkey", "ps_suppkey"], right_on=["l_partkey", "l_suppkey"])
              .filter(col("ps_availqty") > col("half")))
    return (t["supplier"].join(t["nation"].filter(col("n_name") == "CANADA"), left_on="s_nationkey",
                               right_on="n_nationkey")
            .join(offers, left_on="s_suppkey", right_on="ps_suppkey", how="semi")
            .select("s_name", "s_address").sort("s_name"))


def q21(t: Frames) -> pl.LazyFrame:
    shared = t["lineitem"].group_by("l_orderkey").agg(col("l_suppkey").n_unique().alias("suppliers")).filter(
        col("suppliers") > 1)
    late = t["lineitem"].filter(col("l_receiptdate") > col("l_commitdate")).join(shared, on="l_orderkey", how="semi")
    alone = late.group_by("l_orderkey").agg(col("l_suppkey").n_unique().alias("late")).filter(col("late") == 1)
    return (late.join(alone, on="l_orderkey", how="semi")
            .join(t["supplier"], left_on="l_suppkey", right_on="s_suppkey")
            .join(t["nation"].filter(col("n_name") == "SAUDI ARABIA"), left_on="s_nationkey", right_on="n_nationkey")
            .join(t["orders"].filter(col("o_orderstatus") == "F"), left_on="l_orderkey", right_on="o_orderkey")
            .group_by("s_name").agg(pl.len().alias("numwait"))
            .sort("numwait", "s_name", descending=[True, False]).head(100))


def q22(t: Frames) -> pl.LazyFrame:
    chosen = t["customer"].with_columns(col("c_phone").str.slice(0, 2).alias("cntrycode")).filter(
        col("cntrycode").is_in(["13", "31", "23", "29", "30", "18", "17"]))
    mean = chosen.filter(col("c_acctbal") > 0).select(col("c_acctbal").cast(pl.Float64).mean().alias("mean"))
    return (chosen.join(t["orders"], left_on="c_custkey", right_on="o_custkey", how="anti").join(mean, how="cross")
            .filter(col("c_acctbal").cast(pl.Float64) > col("mean"))
            .group_by("cntrycode").agg(pl.len().alias("numcust"), col("c_acctbal").sum().alias("totacctbal"))
            .sort("cntrycode"))


QUERIES: dict[str, Query] = {each.__name__: each for each in (
    q1, q2, q3, q4, q5, q6, q7, q8, q9, q10, q11, q12, q13, q14, q15, q16, q17, q18, q19, q20, q21, q22)}
