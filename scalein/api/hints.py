"""What users of PySpark, pandas, Polars, Flink and Bytewax write first, and what it is called here: hints for names
and arguments that are missing.

A name that is missing is an `AttributeError`, as Python's protocols (`hasattr`, pickle, copy, notebooks) expect, and a
call with other arguments than a function has is a `TypeError`.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Mapping
from types import FunctionType
from typing import TYPE_CHECKING, ClassVar, ParamSpec, TypeVar

_CHOICE = "begin with when(...).then(...)"


def missing(what: str, name: str, table: Mapping[str, str], obj: object = None) -> AttributeError:
    """The error for a name that is not there, with a hint if another library has it."""
    hint = f"; {table[name]}" if name in table else ""
    return AttributeError(f"{what} has no {name!r}{hint}", name=name, obj=obj)


class ForeignNames:
    """The base of what users meet: names and arguments from elsewhere are answered with those here."""

    __slots__ = ()
    _called: ClassVar[str]
    _elsewhere: ClassVar[Mapping[str, str]]

    def __init_subclass__(cls) -> None:
        for name, method in list(vars(cls).items()):
            if f"{cls.__name__}.{name}" in ARGUMENTS:
                setattr(cls, name, with_argument_hints(method))

    if not TYPE_CHECKING:  # a type checker should go on reporting names that are not there

        def __getattr__(self, name: str) -> object:
            raise missing(self._called, name, self._elsewhere, self)


P = ParamSpec("P")
R = TypeVar("R")


def with_argument_hints(fn: Callable[P, R]) -> Callable[P, R]:
    """The function; a call with arguments that it does not have gets the hint of `ARGUMENTS`, or its parameters."""
    answer = functools.partial(_answer, fn)

    def call(*args: P.args, **named: P.kwargs) -> R:
        try:
            return fn(*args, **named)
        except TypeError as error:
            if error.__traceback__ is None or error.__traceback__.tb_next is not None:  # raised inside
                raise
            raise TypeError(answer(str(error))) from None

    assert isinstance(call, FunctionType)
    # Doctests are collected of functions whose globals are those of the module that they are in.
    globals_of = getattr(fn, "__globals__", call.__globals__)
    same = FunctionType(call.__code__, globals_of, call.__name__, None, call.__closure__)
    return functools.wraps(fn)(same)


def _answer(fn: Callable[..., object], error: str) -> str:
    table = ARGUMENTS[fn.__qualname__]
    unknown = re.search(r"unexpected keyword argument '(\w+)'", error)
    parameters = [str(each.replace(annotation=each.empty)) for name, each in inspect.signature(fn).parameters.items()
                  if name != "self"]
    written = f"it is {fn.__name__}({', '.join(parameters)})"
    return f"{error}; {table.get(unknown[1] if unknown else '', table.get('', written))}"


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
    "count_window": 'use group_by("k", si.count_window(100)).agg(...)',
    **dict.fromkeys(("collect_window", "fold_window", "reduce_window"),
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
    "sample": 'use filter(col("x").hash() % 100 == 0)',
    "pivot": 'use group_by(...).agg(a=col("x").sum().filter(col("k") == "a"))',
    **dict.fromkeys(("melt", "unpivot"), "use select(...).union(...)"), "is_empty": "use count() == 0",
    **dict.fromkeys(("with_row_index", "with_row_count"), "rows have no numbers; sort puts them into an order"),
    "to_df": "use collect().to_pandas()", **dict.fromkeys(("iloc", "loc"), "use limit(n), or filter(condition)"),
    "info": "use schema, or describe()", "save": "use write_parquet(path)", "append": "use union",
    "null_count": "use describe()", "value_counts": "use group_by(name).agg(si.count())",
    **dict.fromkeys(("corr", "cov"), "use group_by().agg(si.corr(x, y)), or si.cov"),
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
    "otherwise": _CHOICE, "explode": "use flow.explode(name)",
    "unique": "use flow.distinct(name)", "drop_nulls": "use flow.filter(column.is_not_null())",
    "value_counts": "use flow.group_by(name).agg(si.count())", "dtype": "flow.schema has the types",
    "like": "use .str.contains, .str.starts_with or .str.matches", "rlike": "use .str.matches",
    "contains": "use .str.contains", "startswith": "use .str.starts_with", "endswith": "use .str.ends_with",
    "substr": "use .str.slice, which counts from 0", "concat": "use +, or si.concat_str(...)",
    **dict.fromkeys(("cut", "bin"), "use when(column < 10).then(0).when(column < 20).then(1).otherwise(2)"),
    "try_div": "use try_divide", "corr": "use si.corr(x, y)", "cov": "use si.cov(x, y)",
    "null_count": "use si.count().filter(column.is_null())",
    "log10": "use log() / math.log(10)", "log2": "use log() / math.log(2)", "xxhash64": "use hash", "eq": "use ==",
    "ne": "use !=", "and_": "use &", "or_": "use |", "not_": "use ~",
    **dict.fromkeys(("map", "apply", "map_elements"), "call a function under @si.udf with the column"),
    "shift": 'use .lag(n).over("key", order_by="time")', "rank": "use si.rank().over(...)",
    "diff": 'write column - column.lag().over("key", order_by="time")',
    **dict.fromkeys(("cum_sum", "cumsum"), 'use .sum().over("key", order_by="time")'),
    **{f"rolling_{fn}": f'use .{fn}().over("key", order_by="time", rows=10)' for fn in (
        "mean", "sum", "min", "max", "std", "var", "quantile")},
}  # fmt: skip

WHEN = dict.fromkeys(("otherwise", "alias", "cast", "when", "end"), "use then(value) first")

STR = {
    "strip_chars": "use strip", "strip_chars_start": "use lstrip", "strip_chars_end": "use rstrip",
    "trim": "use strip", "ltrim": "use lstrip", "rtrim": "use rstrip", "len_chars": "use len", "length": "use len",
    "to_lowercase": "use lower", "to_uppercase": "use upper", "replace_all": "use replace, which replaces all",
    "regexp_replace": "there is only replace, of plain text", "split": "use split_part, which gives one part",
    "startswith": "use starts_with", "endswith": "use ends_with", "substr": "use slice, which counts from 0",
    "substring": "use slice, which counts from 0", "head": "use slice(0, n)", "tail": "use slice(-n)",
    "get": "use slice(i, 1)", "match": "use matches", "rlike": "use matches", "regexp_like": "use matches",
    "regexp_extract": "use extract", "extract_all": "extract gives the first match",
    **dict.fromkeys(("zfill", "rjust", "pad_start", "lpad"),
                    'use (si.lit("00000") + column).str.slice(-5) for a width of 5'),
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
    **dict.fromkeys(("day_name", "weekday_name"), 'use strftime("%A")'), "month_name": 'use strftime("%B")',
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
    "nlargest": "use top_k(k, by=...)", "nsmallest": "use bottom_k(k, by=...)",
    **dict.fromkeys(("head", "tail"), "use top_k or bottom_k(k, by=...): a group has no order of its own"),
    **dict.fromkeys(("filter", "having"), "use it behind .agg(...)"),
    "count_window": 'give it with the keys: group_by("k", si.count_window(100))',
    **dict.fromkeys(("window", "rolling", "time_window"),
                    'give the window with the keys: group_by("k", si.tumbling("t", "10s"))'),
    **dict.fromkeys(("collect", "select", "sort", "limit", "explain"), "call .agg(...) first"),
    **dict.fromkeys(("apply", "map_groups", "applyInPandas", "pivot"), "there is only .agg(...)"),
}  # fmt: skip

# Options of other libraries' group_by, which would be keys here.
NO_KEYS = {
    "as_index": "keys are columns: leave it out", "maintain_order": "groups have no order: sort(...) after agg",
    "sort": "groups have no order: sort(...) after agg", "dropna": "null is a key like others: filter it before",
    "observed": "groups are those that have rows: leave it out", "group_keys": "keys are columns: leave it out",
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
    **dict.fromkeys(("datetime", "date", "time", "timestamp"),
                    "use Python's datetime, date and time: col(\"t\") > datetime(2024, 5, 1)"),
    **dict.fromkeys(("timedelta", "interval"), "use Python's timedelta(days=1)"),
    **dict.fromkeys(("now", "current_timestamp"), "use lit(datetime.now()), which is the time of the plan"),
    **dict.fromkeys(("to_date", "to_timestamp", "to_datetime"),
                    'use col("x").str.strptime(pa.timestamp("us"), format)'),
    **dict.fromkeys(("Int8", "Int16", "Int32", "Int64", "UInt8", "UInt16", "UInt32", "UInt64", "Float32", "Float64",
                     "Utf8", "String", "Boolean", "Date", "Datetime", "Decimal", "IntegerType", "LongType",
                     "DoubleType", "StringType"), 'use a type of pyarrow or its name: pa.int64(), "int64"'),
    **dict.fromkeys(("lag", "lead"), 'use col("x").lag(n).over("key", order_by="time")'),
    "Series": "use from_arrow({...})",
    **dict.fromkeys(("read_sql", "read_database", "read_excel", "read_delta"),
                    "read it with its own library, and begin with from_arrow(table)"),
    **dict.fromkeys(("functions", "F"), "functions are methods of col(...)"),
    "all": "use flow.columns, which has the names", "exclude": "use flow.drop(name)",
    "expr": "write the expression with col(...)", "len": "use count()",
    "date_trunc": 'use col("x").dt.truncate(every)', "xxhash64": 'use col("x").hash()',
    "explode": "use flow.explode(name)", "desc": "use flow.sort(column, descending=True)",
    "window": "use tumbling or sliding", "session_window": 'use session("t", gap="30s")',
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

# Arguments by function: of a keyword that it does not have, or of any other call that does not fit ("").
_SELECTED = dict.fromkeys(("columns", "usecols"), "use .select(...) of the flow, which reads only these")
_TYPES = dict.fromkeys(("dtype", "dtypes", "types", "schema_overrides"),
                       "use schema=, with all columns and their types")
_PARTITIONED = dict.fromkeys(("partition_by", "partitionBy", "partition_cols"), "one file is written here; "
                             'flow.start(sink=si.to_parquet(folder, partition_by="x")).wait() writes a folder')
_WRITTEN = {
    **_PARTITIONED, **dict.fromkeys(("index", "row_index"), "a flow has no index: there is nothing to leave out"),
    **dict.fromkeys(("mode", "overwrite"), "a file of that name is replaced when the new one is complete"),
}  # fmt: skip
_DIRECTORY = dict.fromkeys(("partitionBy", "partition_cols", "partitioning"), "use partition_by=")
_SUFFIX = ("suffix", "suffixes", "lsuffix", "rsuffix")
_STRPTIME = ('it takes the type, then the format: strptime(pa.timestamp("us"), "%Y-%m-%d"); '
             '.cast(pa.timestamp("us")) reads ISO times')
ARGUMENTS: dict[str, dict[str, str]] = {
    "Flow.filter": {"": 'write conditions: filter(col("x") == 1)'},
    "Flow.drop": {**dict.fromkeys(("columns", "labels", "axis"), 'give only the names: drop("x", "y")')},
    "Flow.rename": {"": 'use rename({"old": "new"})'},
    "Flow.cast": {"": 'use cast({"x": "float64"})'},
    "Flow.distinct": {"subset": 'give only the names: distinct("x", "y")',
                      "keep": "the first row of each is taken; sort before it to choose another"},
    "Flow.sort": {"ascending": "use descending=True, or a list with one for each column",
                  "reverse": "use descending=True", "by": 'give only the columns: sort("x", "y")',
                  **dict.fromkeys(("na_position", "nulls_first"), "nulls come first, unless nulls_last=True")},
    "Flow.top_k": {"": 'use top_k(10, "x")'}, "Flow.bottom_k": {"": 'use bottom_k(10, "x")'},
    "Flow.join": {"": 'use join(other, on="x", how="left")',
                  **dict.fromkeys(_SUFFIX, "a name that both sides have gets _right; rename() gives it another"),
                  **dict.fromkeys(("left_index", "right_index"), "a flow has no index; use on="),
                  "validate": "a group_by of the table's keys shows whether they are unique"},
    "Flow.with_watermark": {"": 'use with_watermark("time", "10s")'},
    "Flow.collect": {"streaming": "it computes in batches; memory= limits what it holds"},
    "Flow.describe": {"percentiles": 'use group_by().agg(col("x").quantile(q))'},
    "Flow.start": {"": "use start(sink=si.to_parquet(folder))",
                   "deterministic": "collect has it; the rounds of a job depend on time, and so do its float sums"},
    **{f"Flow.write_{kind}": _WRITTEN for kind in ("parquet", "ipc", "json")},
    "Flow.write_csv": {**_WRITTEN,
                       **dict.fromkeys(("sep", "separator", "delimiter"), "fields are separated by commas")},
    "Column.is_in": {"": "give one list: is_in([1, 2, 3])"},
    "Column.round": {**dict.fromkeys(("decimals", "ndigits"), "use digits=")},
    "Aggregates.std": {"ddof": "it is the sample's standard deviation (ddof 1)"},
    "Aggregates.var": {"ddof": "it is the sample's variance (ddof 1)"},
    "Aggregates.quantile": {"": "use quantile(0.95)",
                            "interpolation": "it interpolates between the two nearest values"},
    "StrMethods.contains": {**dict.fromkeys(("regex", "literal", "case"), "contains looks for plain text; "
                            "use matches(pattern) for a regular expression")},
    "StrMethods.strptime": {"": _STRPTIME, "strict": "use try_strptime, which gives null"},
    "StrMethods.try_strptime": {"": _STRPTIME},
    "When.then": {"": "it takes one value: when(condition).then(value).otherwise(other)"},
    "when": {"": "use when(condition).then(value).otherwise(other)"},
    "col": {"": "it takes one name; select and group_by take several"},
    "count": {"": 'it counts rows; col("x").count() counts values'},
    "concat_str": {**dict.fromkeys(("sep", "delimiter"), "use separator=")},
    "tumbling": {"": 'use tumbling("time", "10s")',
                 "every": 'use sliding("time", "10s", every="2s") for windows that overlap'},
    "sliding": {"": 'use sliding("time", "10s", every="2s")'},
    "cumulate": {"": 'use cumulate("time", "1d", step="1h")', "every": "use step="},
    "read_csv": {**_SELECTED, **_TYPES, **dict.fromkeys(("sep", "separator"), "use delimiter="),
                 **dict.fromkeys(("header", "has_header", "names"), "the first line has the names")},
    "read_json": {**_SELECTED, **_TYPES, "lines": "it always reads one JSON object a line"},
    **{f"read_{kind}": {**_SELECTED, **_TYPES, "filters": "use .filter(...) of the flow, which skips what it can"}
       for kind in ("parquet", "ipc")},
    **{f"to_{kind}": _DIRECTORY for kind in ("parquet", "csv", "json", "ipc")},
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
