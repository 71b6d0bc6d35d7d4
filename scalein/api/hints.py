"""What users of PySpark, pandas, Polars, Flink and Bytewax write first, and what it is called here: hints for names
that are missing.

A name that is missing is an `AttributeError`, as Python's protocols (`hasattr`, pickle, copy, notebooks) expect.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

_ALONE = "a row does not see the others; group_by(...).agg(...) does"
_CHOICE = "begin with when(...).then(...)"


def missing(what: str, name: str, table: Mapping[str, str], obj: object = None) -> AttributeError:
    """The error for a name that is not there, with a hint if another library has it."""
    hint = f"; {table[name]}" if name in table else ""
    return AttributeError(f"{what} has no {name!r}{hint}", name=name, obj=obj)


class ForeignNames:
    """The base of what users meet: names from elsewhere are answered with the name here."""

    __slots__ = ()
    _called: ClassVar[str]
    _elsewhere: ClassVar[Mapping[str, str]]

    if not TYPE_CHECKING:  # a type checker should go on reporting names that are not there

        def __getattr__(self, name: str) -> object:
            raise missing(self._called, name, self._elsewhere, self)


def subscript(key: object) -> str:
    """What to write for `flow[key]`."""
    match key:
        case str():
            return f"col({key!r}) is the column, and flow.select({key!r}) the flow of it alone"
        case list() | tuple() if key and all(isinstance(each, str) for each in key):
            return f"use flow.select({', '.join(map(repr, key))})"
        case slice() | int():
            return "use flow.limit(n), or collect() and slice its table"
        case _:
            return "use flow.filter(condition), or flow.select(...)"


FLOW = {
    "where": "use filter", "query": "use filter", "groupBy": "use group_by", "groupby": "use group_by",
    "withColumn": "use with_columns", "with_column": "use with_columns", "withColumns": "use with_columns",
    "assign": "use with_columns", "withColumnRenamed": "use rename", "selectExpr": "use select with expressions",
    "take": "use limit", "first": "use limit(1)", "tail": "use collect() and slice its table",
    **dict.fromkeys(("show", "print", "inspect"), "use print(flow.head().collect())"),
    **dict.fromkeys(("toPandas", "to_pandas"), "use collect().to_pandas()"), "to_polars": "use pl.DataFrame(flow)",
    **dict.fromkeys(("to_arrow", "toArrow", "to_table"), "use collect()"), "to_batches": "use batches",
    **dict.fromkeys(("to_dicts", "to_pylist", "rows", "iter_rows", "itertuples"), "use collect().to_pylist()"),
    **dict.fromkeys(("to_dict", "to_pydict"), "use collect().to_pydict()"),
    "execute": "use collect(), or start(sink=...)",
    **dict.fromkeys(("height", "shape", "len", "size"), "use count()"), "width": "flow.columns has the names",
    **dict.fromkeys(("write", "writeStream", "sink_to", "sinkTo", "add_sink", "addSink"),
                    "use write_parquet(path), or start(sink=si.to_parquet(folder)) for a job"),
    **{f"{verb}_{kind}": f"use write_{kind}(path), or start(sink=si.to_{kind}(folder)) for a job"
       for verb in ("to", "sink") for kind in ("parquet", "csv", "ipc", "json")},
    **dict.fromkeys(("write_ndjson", "sink_ndjson"), "use write_json"), "to_feather": "use write_ipc",
    "merge": "use join", **dict.fromkeys(("crossJoin", "cross_join"), 'use join(other, how="cross")'),
    **dict.fromkeys(("agg", "aggregate", "reduce"), "use group_by().agg(...)"),
    **dict.fromkeys(("key_by", "keyBy"), "use group_by(key, window).agg(...)"), "key_on": "use group_by(key).agg(...)",
    **dict.fromkeys(("window_all", "windowAll", "window", "group_by_dynamic", "resample", "rolling"),
                    'group_by takes windows: group_by(si.tumbling("t", "10s")).agg(...)'),
    **dict.fromkeys(("count_window", "collect_window", "fold_window", "reduce_window"),
                    'group_by takes windows: group_by("k", si.tumbling("t", "10s")).agg(...)'),
    **dict.fromkeys(("assign_timestamps_and_watermarks", "assignTimestampsAndWatermarks"), "use with_watermark"),
    **dict.fromkeys(("map", "map_rows", "map_elements", "map_value", "applymap"),
                    "use select or with_columns, with @si.udf for a function of Python"),
    **dict.fromkeys(("flat_map", "flatMap", "flat_map_batch"), "use explode, or map_batches"),
    "filter_map": "use filter", "pipe": "call the function with the flow", "iterrows": "use batches",
    "mapInArrow": "use map_batches", "mapInPandas": "use map_batches", "apply": "use map_batches, or si.udf",
    "orderBy": "use sort", "order_by": "use sort", "sort_values": "use sort", "sort_by": "use sort",
    "sortWithinPartitions": "use sort", "dropDuplicates": "use distinct", "drop_duplicates": "use distinct",
    "unique": "use distinct", "nlargest": "use top_k", "nsmallest": "use bottom_k", "unionAll": "use union",
    "unionByName": "use union; bring the columns into one order with select", "concat": "use union",
    "flatten": "use explode", "drop_nulls": 'use filter(col("x").is_not_null())',
    "dropna": 'use filter(col("x").is_not_null())', "fillna": 'use with_columns(col("x").fill_null(...))',
    "fill_null": 'use with_columns(col("x").fill_null(...))', "printSchema": "use schema", "dtypes": "use schema",
    "subtract": 'use join(..., how="anti")', "intersect": 'use join(..., how="semi")',
    "withWatermark": "use with_watermark", "lazy": "a flow is lazy already", "summary": "use describe",
    "connect": "use union or join", "filterNot": "use filter(~condition)", "fetch": "use head(n).collect()",
    **dict.fromkeys(("cache", "persist"), "collect() it once, and go on with from_arrow"),
    **{name: f'use group_by().agg(col("x").{name}())' for name in (
        "sum", "mean", "min", "max", "median", "std", "var")},
}  # fmt: skip

COLUMN = {
    "isin": "use is_in", "isNull": "use is_null", "isnull": "use is_null", "isna": "use is_null",
    "isNotNull": "use is_not_null", "notnull": "use is_not_null", "notna": "use is_not_null", "isNaN": "use is_nan",
    "isnan": "use is_nan", "is_not_nan": "use ~column.is_nan()", "fillna": "use fill_null",
    "coalesce": "use si.coalesce(...)",
    "is_between": "use between", "astype": "use cast", "avg": "use mean", "average": "use mean", "stddev": "use std",
    "stddev_samp": "use std", "variance": "use var", "var_samp": "use var", "nunique": "use n_unique",
    "count_distinct": "use n_unique", "countDistinct": "use n_unique", "approx_count_distinct": "use approx_n_unique",
    "percentile": "use quantile, which takes a share: 0.95", "approx_percentile": "use approx_quantile",
    "percentile_approx": "use approx_quantile", "collect_list": "use collect", "implode": "use collect",
    "collect_set": "use collect, behind a distinct() of the flow", "max_by": "use arg_max", "min_by": "use arg_min",
    "bottom_k": "use top_k(k, by=-column)", "len": "use count(), or si.count() for rows", "size": "use .list.len()",
    "desc": "use flow.sort(column, descending=True)", "asc": "use flow.sort(column)",
    **dict.fromkeys(("desc_nulls_last", "asc_nulls_last"), "use flow.sort(column, descending=..., nulls_last=True)"),
    **dict.fromkeys(("desc_nulls_first", "asc_nulls_first"), "use flow.sort(column, descending=...)"),
    "getField": "use .struct.field(name)", "getItem": "use .list.get(i), or .struct.field(name)", "arr": "use .list",
    **dict.fromkeys(("clip_lower", "clip_upper", "clip_min", "clip_max"), "use clip(low, high)"),
    "replace": "use when(column == old).then(new).otherwise(column), or .str.replace", "when": _CHOICE,
    "otherwise": _CHOICE, "over": "aggregate with group_by, and join the result", "explode": "use flow.explode(name)",
    "unique": "use flow.distinct(name)", "drop_nulls": "use flow.filter(column.is_not_null())",
    "value_counts": "use flow.group_by(name).agg(si.count())", "dtype": "flow.schema has the types",
    "like": "use .str.contains, .str.starts_with or .str.matches", "rlike": "use .str.matches",
    "contains": "use .str.contains", "startswith": "use .str.starts_with", "endswith": "use .str.ends_with",
    "substr": "use .str.slice, which counts from 0", "concat": "use +, or si.concat_str(...)",
    "try_div": "use try_divide",
    "log10": "use log() / math.log(10)", "log2": "use log() / math.log(2)", "xxhash64": "use hash", "eq": "use ==",
    "ne": "use !=", "and_": "use &", "or_": "use |", "not_": "use ~",
    **dict.fromkeys(("map", "apply", "map_elements"), "call a function under @si.udf with the column"),
    **dict.fromkeys(("shift", "diff", "lag", "lead", "rank", "cum_sum", "cumsum", "rolling_mean"), _ALONE),
}  # fmt: skip

STR = {
    "strip_chars": "use strip", "strip_chars_start": "use lstrip", "strip_chars_end": "use rstrip",
    "trim": "use strip", "ltrim": "use lstrip", "rtrim": "use rstrip", "len_chars": "use len", "length": "use len",
    "to_lowercase": "use lower", "to_uppercase": "use upper", "replace_all": "use replace, which replaces all",
    "regexp_replace": "there is only replace, of plain text", "split": "use split_part, which gives one part",
    "startswith": "use starts_with", "endswith": "use ends_with", "substr": "use slice, which counts from 0",
    "substring": "use slice, which counts from 0", "head": "use slice(0, n)", "tail": "use slice(-n)",
    "get": "use slice(i, 1)", "match": "use matches", "rlike": "use matches", "regexp_like": "use matches",
    "regexp_extract": "use extract", "extract_all": "extract gives the first match",
    "find": "contains says whether it is there", "to_integer": "use .cast(pa.int64()) of the column",
    "to_date": "use strptime(pa.date32(), format)", "to_time": 'use .cast(pa.time64("us")) of the column',
    **dict.fromkeys(("to_datetime", "to_timestamp", "parse"), 'use strptime(pa.timestamp("us"), format)'),
    **dict.fromkeys(("concat", "cat", "join"), "use + of columns, or si.concat_str(...)"),
}  # fmt: skip

DT = {
    **dict.fromkeys(("dayofweek", "day_of_week"), "use weekday: Monday is 1"),
    **dict.fromkeys(("dayofyear", "day_of_year"), "use ordinal_day"),
    **dict.fromkeys(("floor", "trunc", "date_trunc"), "use truncate"), "dayofmonth": "use day",
    "timestamp": "use epoch", "date": "use .cast(pa.date32()) of the column",
    "time": 'use .cast(pa.time64("us")) of the column', "offset_by": "add a timedelta to the column",
    **dict.fromkeys(("to_string", "format", "date_format"), "use strftime(format)"),
    **dict.fromkeys(("convert_time_zone", "tz_convert"), 'use .cast(pa.timestamp("us", zone)) of the column'),
    "days": "use total_days", "seconds": "use total_seconds", "microseconds": "use total_microseconds",
}  # fmt: skip

LIST = {
    **dict.fromkeys(("length", "lengths", "size"), "use len"), "first": "use get(0)", "last": "use get(-1)",
    **dict.fromkeys(("element_at", "item", "getItem"), "use get, which counts from 0"),
    "explode": "use flow.explode(name)",
    **dict.fromkeys(("sum", "mean", "min", "max", "contains", "join", "sort", "unique", "n_unique", "eval"),
                    "make rows of it with flow.explode(name)"),
}  # fmt: skip

STRUCT = {
    **dict.fromkeys(("getField", "get_field", "get", "getItem"), "use field"),
    "unnest": "use flow.unnest(name)", "fields": "use field(name) for each, or flow.unnest(name)",
}  # fmt: skip

GROUP_BY = {
    **dict.fromkeys(("count", "len", "size"), "use .agg(si.count())"),
    **{name: f'use .agg(col("x").{name}())' for name in (
        "sum", "mean", "min", "max", "first", "last", "median", "std", "var", "n_unique")},
    "avg": 'use .agg(col("x").mean())', "nunique": 'use .agg(col("x").n_unique())',
    "quantile": 'use .agg(col("x").quantile(q))', "aggregate": "use agg", "all": 'use .agg(col("x").collect())',
    **dict.fromkeys(("head", "tail", "nlargest"), 'use .agg(col("x").top_k(k, by=...))'),
    **dict.fromkeys(("filter", "having"), "use it behind .agg(...)"),
    **dict.fromkeys(("window", "rolling", "time_window", "count_window"),
                    'give the window with the keys: group_by("k", si.tumbling("t", "10s"))'),
    **dict.fromkeys(("collect", "select", "sort", "limit", "explain"), "call .agg(...) first"),
    **dict.fromkeys(("apply", "map_groups", "applyInPandas", "pivot"), "there is only .agg(...)"),
}  # fmt: skip

MODULE = {
    "concat": "use flow.union(other)", "union": "use flow.union(other)",
    **dict.fromkeys(("concat_ws", "format"), "use concat_str(..., separator=...)"), "greatest": "use max_horizontal",
    "least": "use min_horizontal", "ifnull": "use coalesce", "nvl": "use coalesce", "named_struct": "use struct",
    **{name: f'use col("x").{name}()' for name in (
        "sum", "mean", "min", "max", "first", "last", "median", "std", "var", "n_unique", "collect", "abs", "round",
        "floor", "ceil", "sqrt", "exp", "log", "hash")},
    **{name: f'use col("x").str.{name}()' for name in ("lower", "upper")}, "avg": 'use col("x").mean()',
    **dict.fromkeys(("count_distinct", "countDistinct"), 'use col("x").n_unique()'),
    "approx_count_distinct": 'use col("x").approx_n_unique()', "collect_list": 'use col("x").collect()',
    "quantile": 'use col("x").quantile(q)', "max_by": 'use col("x").arg_max(by)', "min_by": 'use col("x").arg_min(by)',
    "len": "use count()", "date_trunc": 'use col("x").dt.truncate(every)', "xxhash64": 'use col("x").hash()',
    "explode": "use flow.explode(name)", "desc": "use flow.sort(column, descending=True)",
    "window": "use tumbling or sliding", "session_window": "there are tumbling and sliding windows",
    **dict.fromkeys(("tumble", "TumblingWindower", "TumblingEventTimeWindows", "Tumble"), 'use tumbling("t", "10s")'),
    **dict.fromkeys(("hopping", "hop", "Slide", "SlidingWindower", "SlidingEventTimeWindows"),
                    'use sliding("t", "10s", every="2s")'),
    **dict.fromkeys(("window_all", "windowAll"), "use flow.group_by(si.tumbling(...)), without keys"),
    **dict.fromkeys(("key_by", "keyBy", "key_on"), "use flow.group_by(...)"),
    **dict.fromkeys(("WatermarkStrategy", "EventClock"), "use flow.with_watermark(time, delay)"),
    **dict.fromkeys(("StreamExecutionEnvironment", "TableEnvironment", "Dataflow", "SparkSession"),
                    "use from_arrow, read_parquet or another source to begin a flow"),
    "scan_parquet": "use read_parquet", "scan_csv": "use read_csv", "scan_ipc": "use read_ipc",
    **dict.fromkeys(("scan_ndjson", "read_ndjson"), "use read_json"),
    "readStream": "use read_parquet(..., follow=True)",
    **dict.fromkeys(("DataFrame", "LazyFrame", "createDataFrame", "from_pandas", "from_polars"), "use from_arrow"),
    **dict.fromkeys(("from_dict", "from_pydict", "from_dicts", "from_pylist"), "use from_arrow(data)"),
}  # fmt: skip

# Functions of numpy that have no equal as one function here.
NO_NUMPY = "use the column's operators and methods; @si.udf compiles a Python function, map_batches runs any on batches"
NUMPY = {
    **dict.fromkeys(("maximum", "fmax"), "use si.max_horizontal(a, b)"),
    **dict.fromkeys(("minimum", "fmin"), "use si.min_horizontal(a, b)"),
    "log10": "use col(...).log() / math.log(10)", "log2": "use col(...).log() / math.log(2)",
    "log1p": "use (col(...) + 1).log()", "expm1": "use col(...).exp() - 1", "square": "use col(...) ** 2",
    "cbrt": "use col(...) ** (1 / 3)", "positive": "leave the + out", "rint": "use col(...).round()",
    "isfinite": "use col(...).is_nan() and comparisons", "where": "use when(...).then(...).otherwise(...)",
    "clip": "use col(...).clip(low, high)", **dict.fromkeys(("round", "around"), "use col(...).round(digits)"),
    "select": "use when(...).then(...).when(...).then(...)", "isin": "use col(...).is_in([...])",
    "nan_to_num": "use when(col(...).is_nan()).then(0.0).otherwise(col(...))",
    "concatenate": "use flow.union(other) for rows, si.concat_str(...) for text",
    **{name: f"use col(...).{name}() in group_by(...).agg(...)" for name in (
        "sum", "mean", "min", "max", "median", "std", "var", "quantile")},
    "average": "use col(...).mean() in group_by(...).agg(...)", "unique": "use flow.distinct(name)",
    **dict.fromkeys(("amax", "amin"), "use col(...).max() or .min() in group_by(...).agg(...)"),
}  # fmt: skip
