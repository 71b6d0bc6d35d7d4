"""DuckDB as a second opinion: `run(op)` translates a flow to SQL and runs it.

Times cross over as integers (a timestamp is its count of units), so DuckDB checks arithmetic, windows and groups on
them; its own calendar is asked only for parts of dates. Each relation carries `__row`, a list that sorts like the
source, for whatever follows the source's order.

Not translated, because DuckDB means something else (`Untranslatable` says which):
- text from and to anything but integers and bools: DuckDB parses more (' 1', '1e3') and writes floats differently;
- parts of times in zones other than UTC, which need an extension that may be missing; Python's zoneinfo checks those;
- `round` of float32, which DuckDB computes in double precision;
- `fill_null` with a fallback that can fail: COALESCE is lazy, fill_null is not;
- `limit` behind an aggregate or another op without order, and `map_batches`, which is Python.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Any

import duckdb
import pyarrow as pa

from scalein.dtypes import UNITS_PER_SECOND, DType, Kind, Schema
from scalein.interp.values import from_arrow
from scalein.ir import functions, ops
from scalein.ir.exprs import Agg, Call, Col, Expr, Lit, type_of


class Untranslatable(Exception):
    """DuckDB cannot mean the same; the text says what."""


_TYPES = {
    Kind.BOOL: "BOOLEAN", Kind.I8: "TINYINT", Kind.I16: "SMALLINT", Kind.I32: "INTEGER", Kind.I64: "BIGINT",
    Kind.U8: "UTINYINT", Kind.U16: "USMALLINT", Kind.U32: "UINTEGER", Kind.U64: "UBIGINT",
    Kind.F32: "FLOAT", Kind.F64: "DOUBLE", Kind.STR: "VARCHAR",
    Kind.DATE: "INTEGER", Kind.TS: "BIGINT", Kind.DUR: "BIGINT",
}  # fmt: skip


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
    connection.execute("SET threads = 1")
    return connection


def _restored(table: pa.Table, schema: Schema) -> pa.Table:
    """Integers back to times, and strings to the form they should have."""
    columns = [table.column(i).cast(_plain(field.dtype)).cast(field.dtype.arrow) for i, field in enumerate(schema)]
    return pa.table(columns, names=schema.names)


def _plain(dtype: DType) -> pa.DataType:
    match dtype.kind:
        case Kind.TS | Kind.DUR:
            return pa.int64()
        case Kind.DATE:
            return pa.int32()
        case Kind.STR:
            return pa.string()
        case _:
            return dtype.arrow


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
            case ops.Union():
                parts = [self._branch(part, number) for number, part in enumerate(op.inputs)]
                return " UNION ALL BY NAME ".join(parts)
            case ops.Join():
                return self._join(op)
            case ops.Aggregate():
                return self._aggregate(op)
            case ops.Watermark():
                return self.relation(op.input)
            case ops.MapBatches():
                raise Untranslatable("map_batches")

    def _source(self, op: ops.Source) -> str:
        data: Any = op.data
        table = pa.Table.from_batches(data.read(), op.arrow)
        fields = op.schema
        columns = [pa.array(from_arrow(table.column(f.name)), _plain(f.dtype)) for f in fields]
        name = f"source_{len(self.tables)}"
        self.tables[name] = pa.table([*columns, pa.array(range(table.num_rows), pa.int64())], [*fields.names, "__at"])
        return f"SELECT * EXCLUDE __at, [__at] AS __row FROM {name}"

    def _branch(self, op: ops.Op, number: int) -> str:
        columns = ", ".join(_name(name) for name in op.schema.names)
        return f"SELECT {columns}, list_prepend({number}::BIGINT, __row) AS __row FROM ({self.relation(op)})"

    def _join(self, op: ops.Join) -> str:
        left = f"SELECT *, {_keys(op.left_keys)} FROM ({self.relation(op.left)})"
        right = f"SELECT *, {_keys(op.right_keys)} FROM ({self.relation(op.right)})"
        on = " AND ".join(f"l.__key{i} = r.__key{i}" for i in range(len(op.left_keys)))
        columns = [f"l.{_name(name)}" for name in op.left.schema.names]
        if op.how in ("semi", "anti"):
            return f"SELECT {', '.join(columns)}, l.__row FROM ({left}) l {op.how.upper()} JOIN ({right}) r ON {on}"
        columns += [f"r.{_name(column)} AS {_name(name)}" for name, column in op.keep]
        row = "list_concat(l.__row, coalesce(r.__row, [])) AS __row"
        return f"SELECT {', '.join(columns)}, {row} FROM ({left}) l {op.how.upper()} JOIN ({right}) r ON {on}"

    def _aggregate(self, op: ops.Aggregate) -> str:
        source = self.relation(op.input)
        keys = [f"{sql(key.expr)} AS {_name(key.name)}" for key in op.keys]
        shown = [_name(key.name) for key in op.keys]
        args = [f"{sql(arg)} AS __arg{i}_{k}" for i, item in enumerate(op.aggs) for k, arg in enumerate(item.agg.args)]
        if op.window is not None:
            source = _in_windows(op.window, source)
            keys += ["__start", "__start + __size AS __end"]
            kind = _TYPES[type_of(op.window.time).kind]
            shown += [f"CAST(__start AS {kind}) AS window_start", f"CAST(__end AS {kind}) AS window_end"]
        groups = [str(i + 1) for i in range(len(shown))]
        aggs = [f"{_aggregate(item.agg, i)} AS {_name(item.name)}" for i, item in enumerate(op.aggs)]
        inner = f"SELECT {', '.join([*keys, *args, '__row AS __order'])} FROM ({source})"
        grouped = f"GROUP BY {', '.join(groups)}" if groups else ""
        return f"SELECT {', '.join([*shown, *aggs, '[0::BIGINT] AS __row'])} FROM ({inner}) {grouped}"


def _keys(exprs: tuple[Expr, ...]) -> str:
    return ", ".join(f"{sql(expr)} AS __key{i}" for i, expr in enumerate(exprs))


def _is_ordered(op: ops.Op) -> bool:
    if isinstance(op, ops.Aggregate | ops.Join):
        return False
    return all(map(_is_ordered, ops.inputs(op)))


def _in_windows(window: ops.Window, source: str) -> str:
    """Every row once for each window that holds it."""
    timed = f"SELECT *, CAST({sql(window.time)} AS HUGEINT) AS __time FROM ({source})"
    first = f"CAST({_floordiv(f'(__time - {window.size})', str(window.every))} + 1 AS BIGINT)"
    last = f"CAST({_floordiv('__time', str(window.every))} AS BIGINT)"
    numbered = f"SELECT *, unnest(range({first}, {last} + 1)) AS __k FROM ({timed}) WHERE __time IS NOT NULL"
    return f"SELECT *, __k::HUGEINT * {window.every} AS __start, {window.size} AS __size FROM ({numbered})"


def _aggregate(agg: Agg, number: int) -> str:
    x, by = f"__arg{number}_0", f"__arg{number}_1"
    kind = _TYPES[type_of(agg).kind]
    match agg.fn:
        case "count":
            return "count(*)"
        case "count_valid":
            return f"count({x})"
        case "sum":
            whole = f"CAST({x} AS INTEGER)" if type_of(agg.args[0]).kind is Kind.BOOL else x
            return f"CAST(sum({whole}) AS {kind})"
        case "mean":
            return f"avg({x})"
        case "var" | "std":
            return f"{'var_samp' if agg.fn == 'var' else 'stddev_samp'}({x})"
        case "min" | "max":
            return f"{agg.fn}({x})"
        case "first" | "last":
            return f"{agg.fn}({x} ORDER BY __order)"
        case "arg_min":
            return f"first({x} ORDER BY {by}, __order) FILTER (WHERE {by} IS NOT NULL)"
        case "arg_max":
            return f"first({x} ORDER BY {by} DESC, __order) FILTER (WHERE {by} IS NOT NULL)"
        case _:
            raise Untranslatable(f"the aggregate {agg.fn}")


# --- expressions --------------------------------------------------------------------------------


def sql(expr: Expr) -> str:
    """SQL of a typed expression over physical columns."""
    match expr:
        case Col():
            return _name(expr.name)
        case Lit():
            return literal(expr.value, type_of(expr))
        case Call():
            return f"CAST({_call(expr)} AS {_TYPES[type_of(expr).kind]})"


def literal(value: object, dtype: DType) -> str:
    """SQL of a physical value."""
    if value is None:
        text = "NULL"
    elif isinstance(value, bool | int):
        text = str(value)
    elif isinstance(value, float):
        text = f"CAST('{value!r}' AS DOUBLE)"
    else:
        text = "'" + str(value).replace("'", "''") + "'"
    return f"CAST({text} AS {_TYPES[dtype.kind]})"


_OPERATORS = {"add": "+", "sub": "-", "mul": "*", "div": "/",
              "eq": "=", "ne": "<>", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}  # fmt: skip
_PLAIN = {"floor": "floor", "ceil": "ceil", "sqrt": "sqrt", "exp": "exp", "log": "ln", "pow": "pow", "abs": "abs",
          "is_nan": "isnan", "lower": "lower", "upper": "upper", "str_len": "length"}  # fmt: skip
_MATCHES = {"starts_with": "starts_with", "ends_with": "suffix", "contains": "contains"}


def _call(call: Call) -> str:
    args = [sql(arg) for arg in call.args]
    dtype = type_of(call)
    if call.fn in _OPERATORS:
        return f"({args[0]} {_OPERATORS[call.fn]} {args[1]})"
    if call.fn in _PLAIN:
        return f"{_PLAIN[call.fn]}({', '.join(args)})"
    if call.fn in _MATCHES:
        return f"{_MATCHES[call.fn]}({args[0]}, {literal(call.params[0], type_of(call.args[0]))})"
    if call.fn.startswith("dt_"):
        return _time_part(call, args[0])
    match call.fn:
        case "floordiv" | "mod":
            return _division(call.fn, args[0], args[1], dtype)
        case "neg":
            return f"(-{args[0]})"
        case "not":
            return f"(NOT {args[0]})"
        case "and" | "or":
            return _connect(call, args)
        case "is_null":
            return f"({args[0]} IS NULL)"
        case "is_not_null":
            return f"({args[0]} IS NOT NULL)"
        case "fill_null":
            if functions.can_fail(call.args[1]):
                raise Untranslatable("fill_null with a fallback that can fail")
            return f"coalesce({args[0]}, {args[1]})"
        case "if_else":
            return f"CASE WHEN {args[0]} THEN {args[1]} ELSE {args[2]} END"
        case "divisible":
            return f"({args[0]}::HUGEINT % {call.params[0]} = 0)"
        case "round":
            return _round(call, args[0])
        case "is_in":
            return _is_in(call, args[0])
        case "str_slice":
            return _slice(call, args[0])
        case "cast":
            return _cast(args[0], type_of(call.args[0]), dtype)
        case _:
            raise Untranslatable(f"the function {call.fn}")


def _connect(call: Call, args: list[str]) -> str:
    """AND and OR; where the right side can fail, CASE keeps DuckDB from computing it needlessly."""
    word = call.fn.upper()
    if functions.can_fail(call.args[1]):
        decided = "FALSE" if call.fn == "and" else "TRUE"
        return f"CASE WHEN {args[0]} IS {decided} THEN {decided} ELSE ({args[0]} {word} {args[1]}) END"
    return f"({args[0]} {word} {args[1]})"


def _floordiv(a: str, b: str) -> str:
    """Floored quotient of whole numbers; DuckDB's // truncates and its % has the sign of the dividend."""
    mixed = f"({a}::HUGEINT % {b}::HUGEINT <> 0 AND ({a} < 0) <> ({b} < 0))"
    return f"({a}::HUGEINT // {b}::HUGEINT - CASE WHEN {mixed} THEN 1 ELSE 0 END)"


def _division(fn: str, a: str, b: str, dtype: DType) -> str:
    if dtype.is_float:
        if fn == "floordiv":
            return f"floor({a} / {b})"
        floored = f"CAST(floor({a} / {b}) AS {_TYPES[dtype.kind]})"
        return f"CASE WHEN {b} = 0 AND {a} IS NOT NULL THEN 'nan'::DOUBLE ELSE {a} - {floored} * {b} END"
    whole = _floordiv(a, b)
    found = whole if fn == "floordiv" else f"({a}::HUGEINT - {whole} * {b}::HUGEINT)"
    # A null dividend has no value and so cannot fail, whatever the divisor.
    return f"CASE WHEN {a} IS NULL THEN NULL WHEN {b} = 0 THEN error('division by zero') ELSE {found} END"


def _round(call: Call, x: str) -> str:
    dtype = type_of(call)
    if dtype.kind is Kind.F32:
        raise Untranslatable("round of float32")
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


F32_LIMIT = 3.4028235677973366e38  # halfway behind the greatest float32: from here on it rounds to inf


def _cast(x: str, source: DType, target: DType) -> str:
    if source.is_string or target.is_string:
        if source.is_string != target.is_string and not (source.is_int or source.kind is Kind.BOOL):
            raise Untranslatable(f"cast from {source!r} to {target!r}")
        return x
    if target.kind is Kind.BOOL:
        return f"({x} <> 0)"
    if target.kind is Kind.F32 and source.kind is Kind.F64:
        return f"CASE WHEN isfinite({x}) AND abs({x}) >= {F32_LIMIT!r} THEN sign({x}) * 'inf'::DOUBLE ELSE {x} END"
    if target.is_float:
        return x
    if source.is_float:
        return f"trunc({x})"
    times = (Kind.TS, Kind.DATE, Kind.DUR)
    if source.kind in times and target.kind in times:
        return _floordiv(f"({x}::HUGEINT * {_ticks_per_day(target)})", str(_ticks_per_day(source)))
    return x


def _ticks_per_day(dtype: DType) -> int:
    return 1 if dtype.kind is Kind.DATE else 86_400 * UNITS_PER_SECOND[dtype.unit]


_PARTS = {"dt_year": "year", "dt_quarter": "quarter", "dt_month": "month", "dt_day": "day", "dt_weekday": "isodow",
          "dt_ordinal_day": "dayofyear", "dt_hour": "hour", "dt_minute": "minute"}  # fmt: skip
_FRACTIONS = {"dt_millisecond": 10**3, "dt_microsecond": 10**6, "dt_nanosecond": 10**9}


def _time_part(call: Call, x: str) -> str:
    dtype = type_of(call.args[0])
    if functions.is_host(call):
        raise Untranslatable(f"{call.fn} in the zone {dtype.tz}")
    per_day = _ticks_per_day(dtype)
    match call.fn:
        case "dt_truncate":
            return f"({_floordiv(x, str(call.params[0]))} * {call.params[0]})"
        case "dt_epoch":
            return _floordiv(f"({x}::HUGEINT * {86_400 * UNITS_PER_SECOND[str(call.params[0])]})", str(per_day))
        case "dt_second":
            return f"({_floordiv(x, str(per_day // 86_400))} - 60 * {_floordiv(x, str(per_day // 1440))})"
    if call.fn in _FRACTIONS:
        second, parts = per_day // 86_400, _FRACTIONS[call.fn]
        return f"(({x}::HUGEINT - {_floordiv(x, str(second))} * {second}) * {parts} // {second})"
    microseconds = _floordiv(f"({x}::HUGEINT * {86_400 * 10**6})", str(per_day))
    return f"{_PARTS[call.fn]}(make_timestamp(CAST({microseconds} AS BIGINT)))"
