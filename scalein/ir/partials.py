"""Aggregation in two phases: rows into partial groups, partial groups into finished ones.

A partial group is a row of plain columns: the keys, the start of its slice of time if there are windows, and one or
more columns for each accumulator. Any number of them are finished by the same engine that made them, and so are some
put together into one (`combine`); a state store can keep them, and other machines can make them.

    group(k, sum(x), mean(x))  ->  partial: k, #acc0 = rows, #acc1 = sum(x), #acc2 = valid(x)
                                   final:   sum(#acc1), sum(#acc1) / sum(#acc2)
    group(k, var(x))           ->  partial: k, #acc0 = rows, #acc1_n, #acc1_mean, #acc1_m2
    group(k, corr(x, y))       ->  partial: k, #acc0 = rows, #acc1_n, #acc1_mean, #acc1_m2, and #acc1_by_mean,
                                   #acc1_by_m2, #acc1_co
    group(k, last(x))          ->  partial: k, #acc0 = rows, #acc1_row = its number in the source, #acc1_value
    group(k, arg_min(x, y))    ->  partial: k, #acc0 = rows, #acc1_row, #acc1_by = the least y, #acc1_value
    group(k, MyMean(x))        ->  partial: k, #acc0 = rows, #acc1_s0, #acc1_s1, ...: the slots of its state

An accumulator of one column combines by a function of that column alone (`functions`); the columns of others mean
something only together, so only `combine` knows how. Moments are merged by Chan's formula. Rows are identified by their
number in the source, which continues over all partial groups: first, last and ties follow it.

An aggregate that was added to a job (`exec/evolution.py`) has columns of its own, which began empty: accumulators that
count the same rows from now on have several groups of columns (`StateColumns`), and one in workers' tables.

Accumulators of any size (distinct values, lists, sketches) have no columns: see `fits`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import pyarrow as pa

from scalein.dtypes import BOOL, F64, I64, DType, Field, Kind, Schema
from scalein.errors import InternalError
from scalein.ir import ops
from scalein.ir.exprs import Call, Col, Expr, Lit, Named, type_of
from scalein.ir.physical import Node, Scan, WindowAggregate
from scalein.ir.tables import COMOMENTS, Acc, AccKind, Output, Table, extreme
from scalein.ir.windows import Session

_FUNCTIONS = {AccKind.ROWS: "sum", AccKind.VALID: "sum", AccKind.ISUM: "sum", AccKind.FSUM: "sum",
              AccKind.MIN: "min", AccKind.MAX: "max"}  # fmt: skip
_PARTS = {AccKind.MOMENTS: ("n", "mean", "m2"), AccKind.COMOMENTS: COMOMENTS,
          AccKind.FIRST: ("row", "value"), AccKind.LAST: ("row", "value"),
          AccKind.ARG_MIN: ("row", "by", "value"), AccKind.ARG_MAX: ("row", "by", "value")}  # fmt: skip


@dataclass(frozen=True, slots=True)
class StateColumns:
    """The groups of columns `#acc0`, `#acc1`, ... of partial groups, where these are more than the accumulators."""

    accs: tuple[int, ...]  # the number of the accumulator that each holds; the first counts all rows
    outputs: Mapping[str, tuple[int, ...]]  # output -> the groups of columns that it is finished from

    @staticmethod
    def of(table: Table) -> StateColumns:
        """One for each accumulator."""
        return StateColumns(tuple(range(len(table.accs))), {output.name: output.accs for output in table.outputs})


@dataclass(frozen=True, slots=True)
class TwoPhase:
    """The phases of one aggregation, and how partial groups of one key combine."""

    partial: WindowAggregate
    combine: WindowAggregate  # partial groups into fewer of them
    final: WindowAggregate
    functions: dict[str, str]  # column of a partial group -> sum, min or max; not of those that combine together

    @property
    def keys(self) -> Schema:
        """What identifies a partial group: the keys, and the start of the slice."""
        window = self.partial.table.window
        names = [] if window is None else ["window_start", *(["window_end"] if window.is_session else [])]
        time = [Field(name, type_of(window.time), False) for name in names if window is not None]
        return Schema((*(Field(k.name, k.dtype, k.nullable) for k in self.partial.table.keys), *time))

    @property
    def values(self) -> Schema:
        return Schema(tuple(Field(o.name, o.dtype, o.nullable) for o in self.partial.table.outputs))

    @property
    def is_by_column(self) -> bool:
        """Whether each column combines on its own."""
        return len(self.functions) == len(self.partial.table.outputs)


def is_mergeable(acc: Acc) -> bool:
    """Whether an accumulator has columns, and partial groups merge by them."""
    return acc.kind in _FUNCTIONS or bool(_parts(acc))


def _parts(acc: Acc) -> tuple[str, ...]:
    """The names of columns that mean something only together; none for an accumulator of one column."""
    if acc.kind is AccKind.EXPR:
        return tuple(part for part, _ in acc.expr.parts)
    return _PARTS.get(acc.kind, ())


def fits(table: Table) -> bool:
    """Whether all accumulators of a table have columns."""
    return all(map(is_mergeable, table.accs))


def has_parts(table: Table) -> bool:
    """Whether some have columns that combine only together."""
    return any(_parts(acc) for acc in table.accs)


def width(table: Table, held: StateColumns | None = None) -> int:
    """The number of columns of all accumulators."""
    held = held or StateColumns.of(table)
    return sum(len(_parts(table.accs[number]) or ("",)) for number in held.accs)


def two_phase(node: WindowAggregate, partials: str = "partials", held: StateColumns | None = None) -> TwoPhase:
    """group(k, window, ...) -> a group by k and slice, and one over its rows, by k and window."""
    table = node.table
    for acc in table.accs:
        if not is_mergeable(acc):
            raise InternalError(f"partial groups of the accumulator {acc.kind.value!r} cannot be merged")
    held = held or StateColumns.of(table)
    column_accs = [table.accs[number] for number in held.accs]
    each = [columns_of(table, held, k) for k in range(len(column_accs))]
    columns = tuple(column for some in each for column in some)
    slices = None if table.window is None else table.window.sliced(table.slice_size)
    partial = replace(node, table=replace(table, outputs=columns, window=slices))
    has_slices = table.window is not None and not table.window.is_session  # which have no end of their own
    fields = Schema(tuple(f for f in partial.schema if not has_slices or f.name != "window_end"))
    source: Node = Scan(ops.Source(partials, fields.arrow, tuple(fields.names)))
    window = None
    if table.window is not None:
        start = Col("window_start", type_of(table.window.time), False)
        window = replace(table.window, time=start)
        if isinstance(window, Session):
            window = replace(window, end=Col("window_end", type_of(table.window.time), False))
    accs = (Acc(AccKind.ROWS), *(_again(acc, some) for acc, some in zip(column_accs, each, strict=True)))
    outputs = tuple(replace(o, fn="sum" if o.fn in ("count", "count_valid") else o.fn,
                            accs=tuple(k + 1 for k in held.outputs[o.name])) for o in table.outputs)
    keys: tuple[Expr, ...] = tuple(Col(k.name, k.dtype, k.nullable) for k in table.keys)
    final = WindowAggregate(source, (), replace(table, accs=accs, outputs=outputs, window=window), keys)
    functions = {some[0].name: _FUNCTIONS[acc.kind] for acc, some in zip(column_accs, each, strict=True)
                 if acc.kind in _FUNCTIONS}
    combined = tuple(replace(column, fn=functions.get(column.name, "raw"), accs=(k + 1,))
                     for k, some in enumerate(each) for column in some)
    slices = None if window is None else window.sliced(table.slice_size)
    combine = WindowAggregate(source, (), replace(final.table, outputs=combined, window=slices), keys)
    return TwoPhase(partial, combine, final, functions)


def by_window(two: TwoPhase) -> TwoPhase:
    """The same, where each partial group is of one window, which `window_start` is the start of, and not of a slice."""
    window = two.final.table.window
    if window is None:
        return two
    whole = replace(two.final.table, window=window.apart())  # starts stay multiples of a slice
    return replace(two, final=replace(two.final, table=whole))


def row_values(table: Table) -> tuple[tuple[Expr | None, str], ...]:
    """For each accumulator's column, what a single row brings to it, and by which function: count, sum, min, max.

    For tables without accumulators of several columns.
    """
    return tuple(_row_value(acc) for acc in table.accs)


def _row_value(acc: Acc) -> tuple[Expr | None, str]:
    if acc.arg is None:
        return None, "count"
    if acc.kind is AccKind.VALID:
        is_there = Call("is_not_null", (acc.arg,), (), BOOL, False)
        return Call("if_else", (is_there, Lit(1, I64), Lit(None, I64)), (), I64), "count"
    dtype = _type(acc)
    is_it = type_of(acc.arg) == dtype
    return acc.arg if is_it else Call("cast", (acc.arg,), (), dtype, acc.arg.nullable), _FUNCTIONS[acc.kind]


def finished_rows(two: TwoPhase) -> tuple[Named, ...] | None:
    """The results of partial groups that are whole, each a row of its own; None where machine code must finish them.

    It checks sums, and computes from comoments and the slots of expressions.
    """
    table = two.partial.table
    by_kernel = (AccKind.ISUM, AccKind.COMOMENTS, AccKind.EXPR)
    if any(acc.kind in by_kernel for acc in table.accs) or table.window is not None:
        return None
    keys = [Named(key.name, Col(key.name, key.dtype, key.nullable)) for key in table.keys]
    first = {output.name.partition("_")[0]: table.accs[output.accs[0]] for output in table.outputs}
    accs = tuple(first.values())  # by groups of columns
    return (*keys, *(Named(output.name, _finished(output, accs)) for output in two.final.table.outputs))


def _finished(output: Output, accs: tuple[Acc, ...]) -> Expr:
    """An output over the columns of its accumulators, which the second phase counts from 1."""
    first, *counts = (k - 1 for k in output.accs)
    if accs[first].kind is AccKind.MOMENTS:
        return _spread(output, *(Col(f"#acc{first}_{part}", F64, False) for part in ("n", "m2")))
    if accs[first].kind in _PARTS:
        return Col(f"#acc{first}_value", output.dtype, output.nullable)
    value: Expr = Col(f"#acc{first}", _type(accs[first]), output.nullable)
    if not counts:
        return value
    seen = Col(f"#acc{counts[0]}", I64, False)
    if output.fn == "mean":
        value = Call("div", (value, Call("cast", (seen,), (), F64, False)), (), F64, output.nullable)
    if not output.nullable:
        return value
    is_any = Call("gt", (seen, Lit(0, I64)), (), BOOL, False)
    return Call("if_else", (is_any, value, Lit(None, output.dtype)), (), output.dtype)


def _spread(output: Output, n: Expr, m2: Expr) -> Expr:
    """Variance or standard deviation, of at least two values."""
    value: Expr = Call("div", (m2, Call("sub", (n, Lit(1.0, F64)), (), F64, False)), (), F64, False)
    if output.fn == "std":
        value = Call("sqrt", (value,), (), F64, False)
    is_there = Call("ge", (n, Lit(2.0, F64)), (), BOOL, False)
    return Call("if_else", (is_there, value, Lit(None, F64)), (), F64)


def columns_of(table: Table, held: StateColumns, group: int) -> tuple[Output, ...]:
    """A group of columns of an accumulator: one, or one for each of its parts."""
    name, number = f"#acc{group}", held.accs[group]
    acc = table.accs[number]
    if acc.kind in _FUNCTIONS:
        return (Output(name, "raw", _type(acc), _has_nulls(acc), (number,)),)
    if acc.kind is AccKind.EXPR:
        return tuple(Output(f"{name}_{part}", "raw", slot.dtype, slot.nullable, (number,), part)
                     for part, slot in acc.expr.parts)
    by = I64 if acc.by is None else type_of(acc.by)
    types = {**dict.fromkeys(COMOMENTS, F64), "row": I64, "by": by, "value": acc.dtype}
    return tuple(Output(f"{name}_{part}", "raw", types[part], part in ("by", "value"), (number,), part)
                 for part in _PARTS[acc.kind])


def empty_value(acc: Acc, column: Output) -> pa.Scalar:
    """What a column of an accumulator has before a row is counted, as in a partial group without one."""
    arrow = column.dtype.arrow
    if acc.kind is AccKind.EXPR:
        return pa.scalar(dict(acc.expr.parts)[column.part].init, arrow)
    if column.part in ("by", "value") or (acc.kind in (AccKind.MIN, AccKind.MAX) and acc.dtype.is_bytes):
        return pa.scalar(None, arrow)
    if acc.kind in (AccKind.MIN, AccKind.MAX):
        least = extreme(acc.dtype, least=acc.kind is AccKind.MAX)
        return pa.Array.from_buffers(arrow, 1, [None, pa.py_buffer(least)])[0]
    if column.part == "row":
        return pa.scalar(2**63 - 1 if acc.kind is AccKind.FIRST else -1, arrow)
    return pa.scalar(0, arrow)


def by_records(node: WindowAggregate) -> WindowAggregate:
    """Partial groups into groups whose records have the layout of those of rows: both can be in one table."""
    two = two_phase(node)
    columns = iter(two.partial.table.outputs)
    each = [[next(columns) for _ in _parts(acc) or ("",)] for acc in node.table.accs]
    accs = tuple(_beside(acc, tuple(some)) for acc, some in zip(node.table.accs, each, strict=True))
    return replace(two.combine, table=replace(two.combine.table, accs=accs, outputs=()))


def _beside(acc: Acc, columns: tuple[Output, ...]) -> Acc:
    if acc.kind not in (AccKind.ROWS, AccKind.VALID, AccKind.ISUM):
        return _again(acc, columns)
    (column,) = columns
    arg = None if acc.arg is None else Lit(None, acc.dtype)
    return Acc(acc.kind, arg, parts=(Col(column.name, column.dtype, column.nullable),))


def _type(acc: Acc) -> DType:
    """The type of an accumulator's one column. Sums of integers are as wide as they are in a record."""
    match acc.kind:
        case AccKind.ROWS | AccKind.VALID:
            return I64
        case AccKind.FSUM:
            return F64
        case AccKind.ISUM:
            return DType(Kind.DEC, precision=38, scale=acc.dtype.scale)
        case _:
            return acc.dtype


def _has_nulls(acc: Acc) -> bool:
    """No row yet is a value of most accumulators: 0, or the extreme of the other end. There is no greatest text."""
    return acc.kind in (AccKind.MIN, AccKind.MAX) and acc.dtype.is_bytes


def _again(acc: Acc, columns: tuple[Output, ...]) -> Acc:
    """What the second phase does with an accumulator's columns."""
    # Stored columns may be null where no row had a value, whatever the accumulator does.
    given = {column.part: Col(column.name, column.dtype, nullable=True) for column in columns}
    match acc.kind:
        case AccKind.ROWS | AccKind.VALID:
            return Acc(AccKind.ISUM, given[""])
        case AccKind.MOMENTS:
            return Acc(acc.kind, given["mean"], parts=(given["n"], given["m2"]))
        case AccKind.COMOMENTS:
            parts = tuple(given[part] for part in COMOMENTS if part not in ("mean", "by_mean"))
            return Acc(acc.kind, given["mean"], given["by_mean"], parts=parts)
        case AccKind.FIRST | AccKind.LAST | AccKind.ARG_MIN | AccKind.ARG_MAX:
            return Acc(acc.kind, given["value"], given.get("by"), parts=(given["row"],))
        case AccKind.ISUM | AccKind.FSUM | AccKind.MIN | AccKind.MAX:
            return Acc(acc.kind, given[""])
        case AccKind.EXPR:
            return Acc(acc.kind, params=(acc.expr, "merge"), parts=tuple(given.values()))
    raise AssertionError(acc.kind)
