"""DuckDB as a second opinion: `run(op)` translates a flow to SQL and runs it.

Times cross over as integers (a timestamp is its count of units), so DuckDB checks arithmetic, windows and groups on
them; its own calendar is asked only for parts of dates. Each relation carries `__row`, a list that sorts like the
source, for whatever follows the source's order.

Not translated, because DuckDB means something else (`Untranslatable` says which):
- text from and to anything but integers and bools: DuckDB parses more (' 1', '1e3') and writes floats differently;
- parts of times in zones other than UTC, which need an extension that may be missing; Python's zoneinfo checks those;
- `round` of float32, which DuckDB computes in double precision;
- `limit`, `distinct` by some columns and ties of `top_k` behind an aggregate or another op without order;
- `map_batches`, which is Python.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Any

import duckdb
import pyarrow as pa

from scalein.dtypes import UNITS_PER_SECOND, DType, Kind, Schema, ticks_per_day
from scalein.ir import ops
from scalein.ir.aggregates import AGGREGATES
from scalein.ir.exprs import Agg, Call, Col, Expr, Lit, type_of
from scalein.ir.functions.registry import REGISTRY, can_fail, is_host
from scalein.ir.over import SPACING, WINDOW_FUNCTIONS
from scalein.ir.windows import Cumulate, Session, Window
from tests.duck_types import Untranslatable, cast, crossed, floordiv, literal, restored, sql_type

# Functions and aggregates that DuckDB has not.
UNTRANSLATED = ("udf", "hash", "approx_n_unique", "approx_quantile", "udaf", "dt_local")
MAX_DIGITS_SUMMED = 30  # DuckDB sums decimals in 128 bits: a few values of 38 digits overflow them on the way

def run(op: ops.Op) -> pa.Table:
    """The result of a flow by DuckDB, in the op's schema; in source order if there is one."""
    query = Query()
    select = query.relation(op)
    connection = _connection()
    for name, table in query.tables.items():
        connection.register(name, table)
    columns = ", ".join(_name(name) for name in op.schema.names)
    found = connection.sql(f"SELECT {columns} FROM ({select}) ORDER BY __row").to_arrow_table()
    return _restored(found, op.schema)


@cache
def _connection() -> duckdb.DuckDBPyConnection:
    connection = duckdb.connect()
    # DuckDB 2.0.0 rewrites `nan < -b` to `b < -nan`, which is true: NaN is the greatest on either side.
    connection.execute("SET disabled_optimizers = 'expression_rewriter'")
    connection.execute("SET threads = 1")
    return connection


def _restored(table: pa.Table, schema: Schema) -> pa.Table:
    """Integers back to times, and strings to the form they should have."""
    columns = [restored(table.column(i), field.dtype) for i, field in enumerate(schema)]
    return pa.table(columns, names=schema.names)


def _name(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


@dataclass
class Query:
    """Collects the source tables while ops turn into SELECTs with a column `__row`."""

    tables: dict[str, pa.Table] = field(default_factory=dict)

    def relation(self, op: ops.Op) -> str:
        match op:
            case ops.Source():
                return self._source(op)
            case ops.Filter():
                # CASE keeps DuckDB from reordering what can fail.
                keep = f"CASE WHEN {sql(op.predicate)} THEN TRUE ELSE FALSE END"
                return f"SELECT * FROM ({self.relation(op.input)}) WHERE {keep}"
            case ops.Project():
                items = ", ".join(f"{sql(item.expr)} AS {_name(item.name)}" for item in op.items)
                return f"SELECT {items}, __row FROM ({self.relation(op.input)})"
            case ops.Limit():
                if not _is_ordered(op.input):
                    raise Untranslatable("limit of rows without order")
                return f"SELECT * FROM ({self.relation(op.input)}) ORDER BY __row LIMIT {op.count}"
            case ops.Distinct():
                if not _is_ordered(op.input) and set(op.keys) != set(op.schema.names):
                    raise Untranslatable("first rows where there is no order")
                keys = ", ".join(map(_name, op.keys))
                numbered = f"row_number() OVER (PARTITION BY {keys} ORDER BY __row) AS __nth"
                inner = f"SELECT *, {numbered} FROM ({self.relation(op.input)})"
                return f"SELECT * EXCLUDE __nth FROM ({inner}) WHERE __nth = 1"
            case ops.Sort():
                return self._sort(op)
            case ops.Union():
                parts = [self._branch(part, number) for number, part in enumerate(op.inputs)]
                return " UNION ALL BY NAME ".join(parts)
            case ops.Join():
                return self._join(op)
            case ops.StreamJoin():
                return self._stream_join(op)
            case ops.Over():
                return self._over(op)
            case ops.AssignWindows():
                return self._assign_windows(op)
            case ops.Aggregate():
                return self._aggregate(op)
            case ops.Watermark():
                return self.relation(op.input)
            case ops.Explode():
                columns = list(map(_name, op.lists))
                lengths = [f"coalesce(len({column}), 0)" for column in columns]
                alike = " AND ".join(f"{lengths[0]} = {each}" for each in lengths)
                size = f"CASE WHEN {alike} THEN {lengths[0]} ELSE error('lists of different lengths') END"
                numbered = f"SELECT *, unnest(range({size})) AS __nth FROM ({self.relation(op.input)})"
                made = ", ".join(f"{column}[__nth + 1] AS {column}" for column in columns)
                return f"SELECT * EXCLUDE __nth REPLACE ({made}, list_append(__row, __nth) AS __row) FROM ({numbered})"
            case ops.MapBatches() | ops.Process():
                raise Untranslatable("map_batches")

    def _sort(self, op: ops.Sort) -> str:
        if op.count is not None and not _is_ordered(op.input):
            raise Untranslatable("ties between rows without order")
        nulls = "LAST" if op.nulls_last else "FIRST"
        keys = ", ".join(f"{sql(by.expr)} AS __by{k}" for k, by in enumerate(op.by))
        by = ", ".join(f"__by{k} {'DESC' if by.descending else 'ASC'} NULLS {nulls}" for k, by in enumerate(op.by))
        keyed = f"SELECT *, {keys} FROM ({self.relation(op.input)})"
        numbered = f"SELECT *, row_number() OVER (ORDER BY {by}, __row) AS __place FROM ({keyed})"
        few = "" if op.count is None else f" WHERE __place <= {op.count}"
        columns = ", ".join(map(_name, op.schema.names))
        return f"SELECT {columns}, [__place] AS __row FROM ({numbered}){few}"

    def _assign_windows(self, op: ops.AssignWindows) -> str:
        kind = sql_type(type_of(op.window.time))
        columns = ", ".join(map(_name, op.input.schema.names))
        bounds = f"CAST(__start AS {kind}) AS window_start, CAST(__start + __size AS {kind}) AS window_end"
        inner = _in_windows(op.window, self.relation(op.input))
        last = f"__start + __size = max(__start + __size) OVER (PARTITION BY __row) AS {_name(op.schema.names[-1])}"
        row = "list_append(__row, CAST(__start AS BIGINT)) AS __row"
        return f"SELECT {columns}, {bounds}, {last}, {row} FROM ({inner})"

    def _over(self, op: ops.Over) -> str:
        if not _is_ordered(op.input):
            raise Untranslatable("ties between rows without order")
        nulls = "LAST" if op.nulls_last else "FIRST"
        exprs = [f"{sql(key)} AS __key{k}" for k, key in enumerate(op.keys)]
        exprs += [f"{sql(by.expr)} AS __by{k}" for k, by in enumerate(op.by)]
        exprs += [f"{sql(arg)} AS __arg{i}_{k}" for i, call in enumerate(op.calls)
                  for k, arg in enumerate(call.agg.args)]
        by = [f"__by{k} {'DESC' if by.descending else 'ASC'} NULLS {nulls}" for k, by in enumerate(op.by)]
        keys = ", ".join(f"__key{k}" for k in range(len(op.keys)))
        partition = f"PARTITION BY {keys} " if keys else ""
        found = []
        for i, call in enumerate(op.calls):
            order, frame = [*by, "__row"], "ROWS UNBOUNDED PRECEDING"
            if call.agg.fn in SPACING:
                raise Untranslatable("rows that depend on those that were kept")
            if call.agg.fn in WINDOW_FUNCTIONS:
                args = [f"__arg{i}_{k}" for k in range(len(call.agg.args))]
                value, frame = WINDOW_FUNCTIONS[call.agg.fn].duckdb.format(*args, params=call.agg.params), ""
                order = by if call.agg.fn.endswith("rank") else order
            else:
                if "{order}" in AGGREGATES[call.agg.fn].duckdb:
                    raise Untranslatable("an order inside of a frame")
                value = _aggregate(call.agg, i)
                if not value.startswith(("count(", "CAST(sum(", "avg(", "min(", "max(", "var_samp(", "stddev_samp(")):
                    raise Untranslatable(f"{call.agg.fn} over a frame")
                if call.frame.is_whole:
                    frame = "ROWS BETWEEN UNBOUNDED PRECEDING AND UNBOUNDED FOLLOWING"
                elif call.frame.rows is not None:
                    frame = f"ROWS {call.frame.rows - 1} PRECEDING"
                elif call.frame.within is not None:
                    order, frame = [f"CAST(__by0 AS HUGEINT) ASC NULLS {nulls}"], f"RANGE {call.frame.within} PRECEDING"
                elif call.frame.with_peers:
                    order, frame = by, "RANGE UNBOUNDED PRECEDING"
            window = f" OVER ({partition}ORDER BY {', '.join(order)} {frame})"
            if value.startswith("CAST(sum("):
                inner, _, kind = value.removeprefix("CAST(").rpartition(" AS ")
                value = f"CAST({inner}{window} AS {kind}"
            else:
                value += window
            found.append(f"{value} AS {_name(call.name)}")
        inner = f"SELECT *, {', '.join(exprs)} FROM ({self.relation(op.input)})" if exprs else self.relation(op.input)
        columns = ", ".join(map(_name, op.input.schema.names))
        return f"SELECT {columns}, __row, {', '.join(found)} FROM ({inner})"

    def _source(self, op: ops.Source) -> str:
        data: Any = op.data
        table = pa.Table.from_batches(data.read(), op.arrow)
        fields = op.schema
        columns = [crossed(table.column(f.name), f.dtype) for f in fields]
        name = f"source_{len(self.tables)}"
        self.tables[name] = pa.table([*columns, pa.array(range(table.num_rows), pa.int64())], [*fields.names, "__at"])
        return f"SELECT * EXCLUDE __at, [__at] AS __row FROM {name}"

    def _branch(self, op: ops.Op, number: int) -> str:
        columns = ", ".join(_name(name) for name in op.schema.names)
        return f"SELECT {columns}, list_prepend({number}::BIGINT, __row) AS __row FROM ({self.relation(op)})"

    def _join(self, op: ops.Join) -> str:
        left = f"SELECT *{_keys(op.left_keys)} FROM ({self.relation(op.left)})"
        right = f"SELECT *{_keys(op.right_keys)} FROM ({self.relation(op.right)})"
        on = " AND ".join(f"l.__key{i} = r.__key{i}" for i in range(len(op.left_keys)))
        columns = [f"l.{_name(name)}" for name in op.left.schema.names]
        if op.how in ("semi", "anti"):
            return f"SELECT {', '.join(columns)}, l.__row FROM ({left}) l {op.how.upper()} JOIN ({right}) r ON {on}"
        if isinstance(op, ops.OuterJoin):
            keys = {key.name: k for k, key in enumerate(op.left_keys) if isinstance(key, Col)}
            columns = [f"coalesce(l.{_name(name)}, r.__key{keys[name]}) AS {_name(name)}" if name in keys else
                       f"l.{_name(name)}" for name in op.left.schema.names]  # fmt: skip
        columns += [f"r.{_name(column)} AS {_name(name)}" for name, column in op.keep]
        row = f"list_concat(coalesce(l.__row, [{2**62}]), coalesce(r.__row, [])) AS __row"
        how = {"outer": "FULL"}.get(op.how, op.how.upper())
        condition = f" ON {on}" if on else ""
        return f"SELECT {', '.join(columns)}, {row} FROM ({left}) l {how} JOIN ({right}) r{condition}"

    def _stream_join(self, op: ops.StreamJoin) -> str:
        """A join with the bound as one more condition; of as-of joins DuckDB takes any of equal times."""
        bound = op.bound
        if bound is None:
            kind = ops.OuterJoin if op.how in ("right", "outer") else ops.Join
            return self._join(kind(op.left, op.right, op.left_keys, op.right_keys, op.how, op.keep))
        if bound.pick != "all":
            raise Untranslatable("the last of equal times")
        sides = []
        for side, keys, time in ((op.left, op.left_keys, bound.left), (op.right, op.right_keys, bound.right)):
            timed = f"SELECT *{_keys(keys)}, CAST({sql(time)} AS HUGEINT) AS __t FROM ({self.relation(side)})"
            sides.append(f"SELECT * FROM ({timed}) WHERE __t IS NOT NULL")
        on = " AND ".join(f"l.__key{i} = r.__key{i}" for i in range(len(op.left_keys)))
        window = ""
        if bound.size:
            size, kind = str(bound.size), sql_type(type_of(bound.left))
            time = "l.__t" if op.how in ("semi", "anti") else "coalesce(l.__t, r.__t)"
            on += f" AND {floordiv('l.__t', size)} = {floordiv('r.__t', size)}"
            window = "".join(f", CAST({floordiv(time, size)} * {size} + {more} AS {kind}) AS {name}"
                             for name, more in (("window_start", 0), ("window_end", bound.size)))
        else:
            on += f" AND r.__t - l.__t BETWEEN {bound.low} AND {bound.high}"
        columns = [f"l.{_name(name)}" for name in op.left.schema.names]
        if op.how in ("semi", "anti"):
            return (f"SELECT {', '.join(columns)}{window}, l.__row "
                    f"FROM ({sides[0]}) l {op.how.upper()} JOIN ({sides[1]}) r ON {on}")
        if op.how in ("right", "outer"):
            keys = {key.name: k for k, key in enumerate(op.left_keys) if isinstance(key, Col)}
            columns = [f"coalesce(l.{_name(name)}, r.__key{keys[name]}) AS {_name(name)}" if name in keys else
                       f"l.{_name(name)}" for name in op.left.schema.names]  # fmt: skip
        columns += [f"r.{_name(column)} AS {_name(name)}" for name, column in op.keep]
        row = f"list_concat(coalesce(l.__row, [{2**62}]), coalesce(r.__row, [])) AS __row"
        how = {"outer": "FULL"}.get(op.how, op.how.upper())
        return (f"SELECT {', '.join(columns)}{window}, {row} "
                f"FROM ({sides[0]}) l {how} JOIN ({sides[1]}) r ON {on}")

    def _aggregate(self, op: ops.Aggregate) -> str:
        source = self.relation(op.input)
        keys = [f"{sql(key.expr)} AS {_name(key.name)}" for key in op.keys]
        shown = [_name(key.name) for key in op.keys]
        args = [f"{sql(arg)} AS __arg{i}_{k}" for i, item in enumerate(op.aggs) for k, arg in enumerate(item.agg.args)]
        if op.window is not None:
            source = (_in_sessions(op.window, [sql(key.expr) for key in op.keys], source)
                      if isinstance(op.window, Session) else _in_windows(op.window, source))
            keys += ["__start", "__start + __size AS __end"]
            kind = sql_type(type_of(op.window.time))
            shown += [f"CAST(__start AS {kind}) AS window_start", f"CAST(__end AS {kind}) AS window_end"]
        groups = [str(i + 1) for i in range(len(shown))]
        aggs = [f"{_aggregate(item.agg, i)} AS {_name(item.name)}" for i, item in enumerate(op.aggs)]
        inner = f"SELECT {', '.join([*keys, *args, '__row AS __order'])} FROM ({source})"
        grouped = f"GROUP BY {', '.join(groups)}" if groups else ""
        return f"SELECT {', '.join([*shown, *aggs, '[0::BIGINT] AS __row'])} FROM ({inner}) {grouped}"


def _keys(exprs: tuple[Expr, ...]) -> str:
    return "".join(f", {sql(expr)} AS __key{i}" for i, expr in enumerate(exprs))


def _is_ordered(op: ops.Op) -> bool:
    if isinstance(op, ops.Aggregate | ops.Join):
        return False
    return all(map(_is_ordered, op.inputs))


def _in_sessions(window: Session, keys: list[str], source: str) -> str:
    """Every row with its session: as many have begun as there were gaps before it."""
    timed = f"SELECT * FROM (SELECT *, CAST({sql(window.time)} AS HUGEINT) AS __time FROM ({source}))"
    timed = f"SELECT {', '.join(['*', *(f'{key} AS __by{k}' for k, key in enumerate(keys))])} FROM ({timed})"
    timed += " WHERE __time IS NOT NULL"
    by = f"PARTITION BY {', '.join([*(f'__by{k}' for k in range(len(keys))), '1'])}"
    new = f"CASE WHEN __time - lag(__time) OVER ({by} ORDER BY __time, __row) <= {window.gap} THEN 0 ELSE 1 END"
    begun = f"SELECT *, sum(__new) OVER ({by} ORDER BY __time, __row ROWS UNBOUNDED PRECEDING) AS __session FROM ("
    begun += f"SELECT *, {new} AS __new FROM ({timed}))"
    start, end = (f"{fn}(__time) OVER ({by}, __session)" for fn in ("min", "max"))
    return f"SELECT *, {start} AS __start, {end} - {start} + {window.gap} AS __size FROM ({begun})"


def _in_windows(window: Window, source: str) -> str:
    """Every row once for each window that holds it."""
    timed = f"SELECT *, CAST({sql(window.time)} AS HUGEINT) AS __time FROM ({source})"
    time = f"(__time - {window.offset})"
    if isinstance(window, Cumulate):  # numbers of steps; a window ends with the step
        first = f"CAST({floordiv(time, str(window.every))} AS BIGINT)"
        last = f"CAST(({floordiv(time, str(window.size))} + 1) * {window.size // window.every} - 1 AS BIGINT)"
    else:
        first = f"CAST({floordiv(f'({time} - {window.size})', str(window.every))} + 1 AS BIGINT)"
        last = f"CAST({floordiv(time, str(window.every))} AS BIGINT)"
    numbered = f"SELECT *, unnest(range({first}, {last} + 1)) AS __k FROM ({timed}) WHERE __time IS NOT NULL"
    start, size = f"__k::HUGEINT * {window.every}", str(window.size)
    if isinstance(window, Cumulate):
        end, start = f"{start} + {window.every}", f"{floordiv(start, size)}::HUGEINT * {size}"
        size = f"{end} - {start}"
    return f"SELECT *, {start} + {window.offset} AS __start, {size} AS __size FROM ({numbered})"


def _aggregate(agg: Agg, number: int) -> str:
    """The SQL that the aggregate declares, where DuckDB means the same."""
    declared = AGGREGATES[agg.fn]
    if not declared.duckdb:
        raise Untranslatable(f"the aggregate {agg.fn}")
    args = [f"__arg{number}_{k}" for k in range(len(agg.args))]
    if agg.fn in ("sum", "mean") and type_of(agg.args[0]).precision > MAX_DIGITS_SUMMED:
        raise Untranslatable("sums that 128 bits may not hold on the way")
    if agg.fn in ("sum", "mean") and type_of(agg.args[0]).kind is Kind.BOOL:
        args = [f"CAST({args[0]} AS INTEGER)"]
    found = declared.duckdb.format(*args, order="__order", params=agg.params)
    if len(args) > declared.arity:  # whether a first or last row counts
        found = f"{found} FILTER (WHERE {args[-1]})"
    return f"CAST({found} AS {sql_type(type_of(agg))})" if agg.fn == "sum" else found


# --- expressions --------------------------------------------------------------------------------


def sql(expr: Expr) -> str:
    """SQL of a typed expression over physical columns."""
    match expr:
        case Col():
            return _name(expr.name)
        case Lit():
            return literal(expr.value, type_of(expr))
        case Call() if type_of(expr).is_nested:
            return _call(expr)
        case Call():
            return f"CAST({_call(expr)} AS {sql_type(type_of(expr))})"


def _call(call: Call) -> str:
    """The SQL that the function declares; here is what depends on types, or means something else."""
    if call.fn == "try":
        return _try(call)
    args = [sql(arg) for arg in call.args]
    dtype = type_of(call)
    if call.fn.startswith("dt_"):
        return _time_part(call, args[0])
    match call.fn:
        case "mul" if dtype.is_decimal:  # two narrow decimals: DuckDB cuts the product to 18 digits
            left = type_of(call.args[0])
            return f"(CAST({args[0]} AS DECIMAL({max(19, left.precision)}, {left.scale})) * {args[1]})"
        case "floordiv" | "mod":
            return _division(call.fn, args[0], args[1], dtype)
        case "and" | "or" if can_fail(call.args[1]):  # CASE keeps DuckDB from computing the right side needlessly
            decided = "FALSE" if call.fn == "and" else "TRUE"
            return f"CASE WHEN {args[0]} IS {decided} THEN {decided} ELSE {_declared(call, args)} END"
        case "round":
            return _round(call, args[0])
        case "is_in":
            return _is_in(call, args[0])
        case "str_slice":
            return _slice(call, args[0])
        case "str_strip" | "str_lstrip" | "str_rstrip" if not call.params[0]:
            raise Untranslatable("trim of whitespace: DuckDB's is the space alone; or of nothing")
        case "list_get":
            number = int(str(call.params[0]))
            return f"{args[0]}[{number + 1 if number >= 0 else number}]"
        case "str_strptime":
            return _strptime(call, args[0])
        case "cast":
            return cast(args[0], type_of(call.args[0]), dtype)
    return _declared(call, args)


def _declared(call: Call, args: list[str]) -> str:
    template = REGISTRY[call.fn].duckdb
    if not template:
        raise Untranslatable(f"the function {call.fn}")
    params = [str(p) if isinstance(p, int) else literal(p, DType(Kind.STR)) for p in call.params]
    fields = ", ".join(f"{_name(str(name))} := {arg}" for name, arg in zip(call.params, args, strict=False))
    return template.format(*args, args=", ".join(args), params=params, fields=fields)


def _try(call: Call) -> str:
    """The call in 128 bits, and null where its type does not hold that; TRY would hide its arguments' errors."""
    (tried,) = call.args
    assert isinstance(tried, Call)
    dtype, args = type_of(tried), [sql(arg) for arg in tried.args]
    if dtype.is_float and tried.fn != "cast":
        return _call(tried)
    match tried.fn:
        case "add" | "sub" | "mul" if dtype.is_decimal:
            raise Untranslatable("try of decimals: there is no wider one")
        case "add" | "sub" | "mul":
            found = _declared(tried, [f"{arg}::HUGEINT" for arg in args])
        case "floordiv" | "mod":
            whole = floordiv(args[0], f"nullif({args[1]}, 0)")
            found = whole if tried.fn == "floordiv" else f"({args[0]}::HUGEINT - {whole} * {args[1]}::HUGEINT)"
        case "cast" if dtype.kind in (Kind.TIME, Kind.DATE64) or dtype.form == "fixed":
            raise Untranslatable("a range of values that DuckDB's type does not have")
        case "cast":
            found = cast(args[0], type_of(tried.args[0]), dtype)
        case _:
            raise Untranslatable(f"try of {tried.fn}")
    return f"TRY_CAST({found} AS {sql_type(dtype)})"


def _division(fn: str, a: str, b: str, dtype: DType) -> str:
    if dtype.is_float:
        if fn == "floordiv":
            return f"floor({a} / {b})"
        floored = f"CAST(floor({a} / {b}) AS {sql_type(dtype)})"
        return f"CASE WHEN {b} = 0 AND {a} IS NOT NULL THEN 'nan'::DOUBLE ELSE {a} - {floored} * {b} END"
    whole = floordiv(a, b)
    found = whole if fn == "floordiv" else f"({a}::HUGEINT - {whole} * {b}::HUGEINT)"
    # A null dividend has no value and so cannot fail, whatever the divisor.
    return f"CASE WHEN {a} IS NULL THEN NULL WHEN {b} = 0 THEN error('division by zero') ELSE {found} END"


def _round(call: Call, x: str) -> str:
    dtype = type_of(call)
    if dtype.kind is Kind.F32:
        raise Untranslatable("round of float32")
    if dtype.is_decimal:  # with more digits than there are, DuckDB rounds null to 0
        return f"CASE WHEN {x} IS NOT NULL THEN round({x}, {call.params[0]}) END"
    return f"round({x}, {call.params[0]})" if dtype.is_float else x


def _is_in(call: Call, x: str) -> str:
    values, has_null = call.params
    assert isinstance(values, tuple)
    listed = [literal(value, type_of(call.args[0])) for value in values] + (["NULL"] if has_null else [])
    return f"({x} IN ({', '.join(listed)}))" if listed else f"CASE WHEN {x} IS NOT NULL THEN FALSE END"


def _slice(call: Call, x: str) -> str:
    offset, length = call.params
    start = str(offset) if isinstance(offset, int) and offset >= 0 else f"(length({x}) + {offset})"
    begin = f"greatest({start}, 0)"
    if length is None:
        return f"substring({x}, {begin} + 1)"
    return f"substring({x}, {begin} + 1, greatest(greatest({start} + {length}, 0) - {begin}, 0))"


def _strptime(call: Call, x: str) -> str:
    dtype = type_of(call)
    if dtype.kind is Kind.TIME:
        raise Untranslatable("a time of the day of a text")
    found = f"epoch_us(strptime({x}, {literal(call.params[0], DType(Kind.STR))}))"
    return floordiv(f"({found}::HUGEINT * {ticks_per_day(dtype)})", str(86_400 * 10**6))


_TOTALS = {"dt_total_days": 1, "dt_total_hours": 24, "dt_total_minutes": 1440, "dt_total_seconds": 86_400,
           **{f"dt_total_{unit}": 86_400 * 10**digits for unit, digits in (
               ("milliseconds", 3), ("microseconds", 6), ("nanoseconds", 9))}}  # fmt: skip
_FRACTIONS = {"dt_millisecond": 10**3, "dt_microsecond": 10**6, "dt_nanosecond": 10**9}


def _time_part(call: Call, x: str) -> str:
    dtype = type_of(call.args[0])
    if is_host(call):
        raise Untranslatable(f"{call.fn} in the zone {dtype.tz}")
    per_day = ticks_per_day(dtype)
    match call.fn:
        case "dt_truncate":
            return f"({floordiv(x, str(call.params[0]))} * {call.params[0]})"
        case fn if fn.startswith("dt_total_"):  # towards zero
            return f"({x}::HUGEINT * {_TOTALS[fn]} // {per_day})"
        case "dt_epoch":
            return floordiv(f"({x}::HUGEINT * {86_400 * UNITS_PER_SECOND[str(call.params[0])]})", str(per_day))
        case "dt_second":
            return f"({floordiv(x, str(per_day // 86_400))} - 60 * {floordiv(x, str(per_day // 1440))})"
    if call.fn in _FRACTIONS:
        second, parts = per_day // 86_400, _FRACTIONS[call.fn]
        return f"(({x}::HUGEINT - {floordiv(x, str(second))} * {second}) * {parts} // {second})"
    microseconds = floordiv(f"({x}::HUGEINT * {86_400 * 10**6})", str(per_day))
    return _declared(call, [f"make_timestamp(CAST({microseconds} AS BIGINT))"])
