"""Flows that must give the same rows wherever they run, over one table of difficult values."""

from __future__ import annotations

from collections.abc import Callable
from datetime import date
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

import scalein as si
from scalein import Flow, col, when

ROWS = 2500
ADS = pa.table({"k": pa.array([0, 1, 2, 2, 3, None, 77], pa.int64()),
                "name": ["zero", "one", "two", "deux", None, "null", "far"]})  # fmt: skip


def rows(count: int = ROWS, seed: int = 6) -> pa.Table:
    """Nulls, NaN, both zeros, empty and foreign text, times with and without a zone, decimals, lists; one heavy key.

    Floats are multiples of 1/64, so that their sums are exact in any order.
    """
    rng = np.random.default_rng(seed)

    def holes(values: object, arrow: pa.DataType) -> pa.Array:
        return pa.array(values, arrow, mask=rng.random(count) < 0.1)

    x = rng.integers(-1000, 1000, count) / 64.0
    x[rng.random(count) < 0.02] = np.nan
    x[rng.random(count) < 0.05] = -0.0
    words = np.array(["", "a", "b", "Zoë", "日本", "a longer text than sixteen bytes", "A"])
    times = 1_700_000_000_000_000 + np.sort(rng.integers(0, 600_000_000, count))
    decimals = [Decimal(int(v)) / 100 for v in rng.integers(-10**6, 10**6, count)]
    return pa.table({
        "k": holes(np.where(rng.random(count) < 0.6, 2, rng.integers(0, 40, count)), pa.int64()),
        "s": holes(words[rng.integers(0, len(words), count)].tolist(), pa.string()),
        "x": holes(x, pa.float64()),
        "i": holes(rng.integers(-100, 100, count), pa.int32()),
        "d": holes(decimals, pa.decimal128(10, 2)),
        "t": pa.array(times, pa.timestamp("us")),
        "z": pc.cast(holes(times[::-1].copy(), pa.timestamp("us")), pa.timestamp("us", "UTC")),
        "b": holes(rng.random(count) < 0.5, pa.bool_()),
        "day": holes(rng.integers(19000, 19020, count).astype(np.int32), pa.int32()).cast(pa.date32()),
        "tags": pa.array([["p", "q"][:n] if n < 3 else None for n in rng.integers(0, 4, count)],
                         pa.list_(pa.string())),
        "n": pa.array(np.arange(count), pa.int64()),
    })  # fmt: skip


@si.udf
def clipped(value: float, most: float) -> float:
    return most if value > most else value


def _doubled(batch: pa.RecordBatch) -> pa.RecordBatch:
    return pa.record_batch({"k": batch.column("k"), "twice": pc.multiply(batch.column("i"), 2)})


FLOWS: dict[str, Callable[[Flow], Flow]] = {
    # row by row
    "identity": lambda f: f,
    "filter": lambda f: f.filter(col("x") > 1, col("s") != "a").select("n", y=col("x") * 2, s="s"),
    "filter_bool": lambda f: f.filter((col("b") | col("s").is_null()) & ~(col("k") == 2)).select("n"),
    "nan_filter": lambda f: f.filter(col("x") >= 15).select("n", "x"),
    "text": lambda f: f.select("n", l=col("s").str.len(), u=col("s").str.upper(), c=col("s").str.starts_with("a")),
    "made_text": lambda f: f.select("n", c=col("s") + "-" + col("s"), i=si.concat_str("s", "i", separator="/"),
                                    m=col("t").dt.strftime("%Y-%m %H"),
                                    t=col("t").dt.strftime("%F %T").str.strptime(pa.timestamp("us"), "%F %T")),
    "rowwise": lambda f: f.select("n", g=si.max_horizontal("i", "x"), l=si.min_horizontal("i", "x"),
                                  c=si.coalesce("i", "k", -1), d=(col("day") - date(2022, 1, 1)).dt.total_days(),
                                  p=col("i").clip(-10, 10)),
    "structs": lambda f: f.select("n", r=si.struct("k", text="s", at=si.struct(t="t"))),
    "text_key": lambda f: f.group_by(g=col("s") + "#" + col("day").dt.strftime("%j")).agg(
        n=si.count(), m=(col("s") + "!").max()),
    "times": lambda f: f.select("n", h=col("z").dt.hour(), tr=col("t").dt.truncate("1m"), z="z", day="day"),
    "decimals": lambda f: f.select("n", d2=col("d") + col("d"), d="d").filter(col("d2") > 0),
    "choice": lambda f: f.select("n", w=when(col("k") == 2).then(col("x")).otherwise(col("i"))),
    "udf": lambda f: f.filter(col("x").is_not_null()).select("n", c=clipped(col("x"), 2.0)),
    "map_batches": lambda f: f.map_batches(_doubled, {"k": pa.int64(), "twice": pa.int64()}).filter(col("twice") > 5),
    "explode": lambda f: f.explode("tags").select("n", "tags"),
    "explode_count": lambda f: f.explode("tags").group_by("tags").agg(si.count()),
    # joins with static tables
    "join": lambda f: f.join(ADS, on="k").select("n", "k", "name"),
    "join_left": lambda f: f.join(ADS, on="k", how="left").select("n", "name"),
    "join_right": lambda f: f.filter(col("i") > 95).join(ADS, on="k", how="right").select("n", "k", "name", "tags"),
    "join_outer": lambda f: f.join(ADS, on="k", how="outer"),
    "join_outer_group": lambda f: f.join(ADS, on="k", how="outer").group_by("name").agg(si.count(), s=col("i").sum()),
    "join_cross": lambda f: f.filter(col("i") > 90).join(ADS, how="cross").select("n", "k_right", "name"),
    "join_semi": lambda f: f.join(ADS, on="k", how="semi").select("n"),
    "join_anti": lambda f: f.join(ADS, on="k", how="anti").select("n"),
    "join_group": lambda f: f.join(ADS, on="k").group_by("name").agg(si.count(), s=col("x").sum()),
    # groups
    "all": lambda f: f.group_by().agg(si.count(), s=col("i").sum(), m=col("x").max(), d=col("d").sum()),
    "each": lambda f: f.group_by("k").agg(
        n=si.count(), c=col("x").count(), s=col("i").sum(), sx=col("x").sum(), m=col("i").mean(), lo=col("x").min(),
        hi=col("x").max(), ls=col("s").min(), hs=col("s").max(), d=col("d").sum(), t0=col("t").min(), z1=col("z").max(),
        b=col("b").max(), day=col("day").min()),
    "keys": lambda f: f.group_by("s", "b", "day", y=col("i") % 3).agg(n=si.count(), sx=col("x").sum()),
    "float_key": lambda f: f.group_by("x").agg(n=si.count(), s=col("i").sum()),
    "decimal_key": lambda f: f.group_by(d=col("d").round(-3)).agg(n=si.count()),
    "time_key": lambda f: f.group_by(z=col("z").dt.truncate("1m")).agg(n=si.count()),
    "having": lambda f: f.filter(col("x") > 0).group_by("k").agg(n=si.count()).filter(col("n") > 20).select(
        "k", m=col("n") * 10),
    "spread": lambda f: f.filter(~col("x").is_nan()).group_by("k").agg(v=col("x").var(), s=col("i").std()),
    "pairs": lambda f: f.group_by("s").agg(v=si.cov("i", "n"), c=si.corr("i", "n")),
    "expressions": lambda f: f.group_by("k").agg(
        mean=col("i").sum() / si.count(), span=col("i").max() - col("i").min(), share=col("b").mean(), n=si.count(),
        few=si.count().filter(col("i") > 2), some=(col("i") * 2).sum().filter(col("b"))),
    "expressions_all": lambda f: f.group_by().agg(mean=(col("i").sum() / si.count()).round(3), c=si.corr("i", "n")),
    "expressions_unique": lambda f: f.group_by("s").agg(u=col("i").n_unique().filter(col("b")) / si.count()),
    "unique": lambda f: f.group_by("k").agg(u=col("s").n_unique(), a=col("i").approx_n_unique(), n=si.count()),
    "quantile": lambda f: f.group_by("s").agg(q=col("i").quantile(0.5), m=col("x").sum()),
    "best": lambda f: f.group_by("s").agg(last=col("k").arg_max("n"), least=col("i").arg_min("n"),
                                          top=col("i").top_k(3, by="n")),
    "picked": lambda f: f.group_by("k").agg(last=col("s").arg_max("n"), least=col("d").arg_min("n"),
                                            most=(col("i") * 2).arg_max("i"), v=col("i").var()),
    "unique_all": lambda f: f.group_by().agg(u=col("s").n_unique(), q=col("i").quantile(0.9)),
    "distinct": lambda f: f.select("k", "s", "b").distinct(),
    "distinct_float": lambda f: f.select("x").distinct().group_by().agg(n=si.count()),
    # windows
    "tumbling": lambda f: f.group_by("k", si.tumbling("t", "1m")).agg(n=si.count(), s=col("x").sum()),
    "tumbling_zone": lambda f: f.group_by(si.tumbling("z", "90s")).agg(n=si.count(), m=col("i").max()),
    "sliding": lambda f: f.group_by("s", si.sliding("t", "2m", every="45s")).agg(n=si.count(), m=col("x").min()),
    "tumbling_expressions": lambda f: f.with_watermark("t", "1s").group_by("k", si.tumbling("t", "1m")).agg(
        share=si.count().filter(col("b")) / si.count(), c=si.corr("i", "n"), span=col("i").max() - col("i").min()),
    "session": lambda f: f.group_by("k", si.session("t", gap="20s")).agg(n=si.count(), s_=col("i").sum()),
    "session_rows": lambda f: f.group_by("k", si.session("t", gap="20s")).agg(u=col("s").n_unique(), w=col("s").max()),
    "window_rows": lambda f: f.group_by("k", si.tumbling("t", "2m")).agg(u=col("s").n_unique()),
    "watermark": lambda f: f.with_watermark("t", "1s").filter(col("i") > 0).group_by("k", si.tumbling("t", "5m")).agg(
        n=si.count()),
    "integers": lambda f: f.group_by(si.sliding("n", 300, every=100)).agg(n_=si.count(), s=col("i").sum()),
    # other rows
    "over": lambda f: f.select("n", s=col("i").sum().over(col("s").str.upper(), order_by="n", rows=3), before=col(
        "x").lag(2).over(col("s").str.upper(), order_by="n")).filter(col("n") % 2 == 0),
    "overs": lambda f: f.select("n", r=si.rank().over("k", order_by=["d", "b"]), m=col("x").max().over("s"),
                                number=si.row_number().over(order_by="n")),
    "top_of_groups": lambda f: f.with_watermark("t", "1s").group_by("s", si.tumbling("t", "2m")).top_k(2, ["x", "n"]),
    "distinct_within": lambda f: f.with_watermark("n", 10).select("k", "n").distinct("k", within=25),
    # chained
    "chained": lambda f: f.group_by("k", "s").agg(n=si.count()).group_by("s").agg(
        m=col("n").max(), c=si.count()).group_by().agg(t=col("m").sum(), u=col("c").n_unique()),
    "distinct_count": lambda f: f.select("k", "s").distinct().group_by("s").agg(n=si.count()),
    "union": lambda f: f.filter(col("i") > 0).select("k", "i").union(f.filter(col("i") <= 0).select("k", i=-col("i"))),
    "union_group": lambda f: f.select("k", v=col("i").cast(pa.float64())).union(f.select("k", v="x")).group_by("k").agg(
        n=si.count(), m=col("v").max()),
    "union_static": lambda f: f.select("k", name="s").union(si.from_arrow(ADS)).group_by("name").agg(n=si.count()),
    "sorted_then": lambda f: f.sort("x").group_by("k").agg(n=si.count()),
    "empty": lambda f: f.filter(col("n") < 0).group_by("k").agg(n=si.count()),
    "empty_all": lambda f: f.filter(col("n") < 0).group_by().agg(n=si.count(), s=col("i").sum(), u=col("s").n_unique()),
}

ORDERED: dict[str, Callable[[Flow], Flow]] = {
    "sort": lambda f: f.sort("s", "x", "n", descending=[False, True, False]).select("n", "s", "x"),
    "sort_nulls_last": lambda f: f.sort("d", "n", nulls_last=True),
    "sort_expr": lambda f: f.filter(col("i") > 5).sort(col("i") % 7, "n", descending=True).select("n", r=col("i") % 7),
    "sort_limit": lambda f: f.sort("x", "n").limit(20).select("n", "x"),
    "top_k": lambda f: f.top_k(15, ["x", "n"]),
    "bottom_k": lambda f: f.filter(col("k") == 2).bottom_k(5, ["d", "n"]).select("n", "d"),
    "top_groups": lambda f: f.group_by("k").agg(n=si.count()).top_k(4, ["n", "k"]),
}

# The same in Spark SQL, over a view `rows` (and `ads`).
SQL: dict[str, str] = {
    "made_text": "select n, s || '-' || s c, s || '/' || cast(i as string) i, date_format(t, 'yyyy-MM HH') m,"
                 " date_trunc('second', t) t from rows",
    "rowwise": "select n, greatest(cast(i as double), x) g, least(cast(i as double), x) l, coalesce(i, k, -1) c,"
               " cast(datediff(day, date'2022-01-01') as bigint) d, greatest(least(i, 10), -10) + i * 0 p from rows",
    "text_key": "select s || '#' || lpad(dayofyear(day), 3, '0') g, count(*) n, max(s || '!') m from rows group by 1",
    "filter": "select n, x * 2 y, s from rows where x > 1 and s <> 'a'",
    "filter_bool": "select n from rows where (b or s is null) and not (k = 2)",
    "nan_filter": "select n, x from rows where x >= 15",
    "join": "select n, rows.k, name from rows join ads on rows.k = ads.k",
    "join_left": "select n, name from rows left join ads on rows.k = ads.k",
    "join_right": "select n, ads.k, name, tags from (select * from rows where i > 95) r right join ads on r.k = ads.k",
    "join_cross": "select n, ads.k k_right, name from rows cross join ads where i > 90",
    "join_semi": "select n from rows left semi join ads on rows.k = ads.k",
    "join_anti": "select n from rows left anti join ads on rows.k = ads.k",
    "all": "select count(*) count, sum(i) s, max(x) m, cast(sum(d) as decimal(38, 2)) d from rows",
    "each": "select k, count(*) n, count(x) c, sum(i) s, sum(x) sx, avg(i) m, min(x) lo, max(x) hi, min(s) ls,"
            " max(s) hs, cast(sum(d) as decimal(38, 2)) d, min(t) t0, max(z) z1, max(b) b, min(day) day from rows"
            " group by k",
    "float_key": "select x, count(*) n, sum(i) s from rows group by x",
    "spread": "select k, var_samp(x) v, stddev_samp(i) s from rows where x is not null and not isnan(x) group by k",
    "distinct": "select distinct k, s, b from rows",
    "tumbling": "select k, window.start window_start, window.end window_end, count(*) n, sum(x) s from rows"
                " group by k, window(t, '1 minute')",
    "sliding": "select s, window.start window_start, window.end window_end, count(*) n, min(x) m from rows"
               " group by s, window(t, '2 minutes', '45 seconds')",
    "having": "select k, count(*) * 10 m from rows where x > 0 group by k having count(*) > 20",
    "distinct_count": "select s, count(*) n from (select distinct k, s from rows) group by s",
    "explode_count": "select tags, count(*) count from (select explode(tags) tags from rows) group by tags",
}
