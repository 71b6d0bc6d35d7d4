"""The finished groups of a table as rows: keys, window and aggregates read from its records.

For a ring, a window is merged from its slices on the way; the slices' byte offsets are in the frame. Partial groups
that are columns (`ir/partials.py`), side by side, are merged in a record that lives in registers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from llvmlite import ir

from scalein.ir.exprs import columns as columns_of
from scalein.ir.exprs import type_of
from scalein.ir.internal_names import internal
from scalein.ir.stages import FromPartials, FromTable, Read, side_column
from scalein.ir.tables import Output, Slicing
from scalein.ir.windows import Session
from scalein.llvm_backend import accumulators
from scalein.llvm_backend.code import Code
from scalein.llvm_backend.fn import I1, I8, I64, PTR, const
from scalein.llvm_backend.functions.arithmetic import floor_divide
from scalein.llvm_backend.hash_index import place_in
from scalein.llvm_backend.readers import field_value
from scalein.llvm_backend.values import Binding, Env, Row, Value, register_type

Place = Callable[[str], ir.Value]


def table_env(code: Code, reader: FromTable, start: ir.Value) -> Env:
    """Bindings of the table's columns, and `?live`: whether any row reached the record."""
    table, layout = reader.table, reader.table.layout

    def record(row: Row) -> ir.Value:
        f = code.f
        number = f.b.add(start, row.offset("in"))
        if reader.picked:
            number = f.load(f.slot("picked", PTR), number, I64)
        return f.byte_at(f.slot("source", PTR), f.b.mul(number, const(layout.size)))

    env: dict[str, Binding] = {}
    for k, key in enumerate(table.keys):
        read = Read(key.name, key.stored, "field", key.nullable, null_bit=k)
        name = internal(f"id.{key.name}") if key.coded else key.name
        env[name] = Binding(partial(_key, code, reader, read, f"key{k}", record))
    if table.window is not None:
        env["window_start"] = Binding(partial(_window, code, reader, record, False))
        env["window_end"] = Binding(partial(_window, code, reader, record, True))
    for output in table.outputs:
        if output.is_list:
            for part, name in (("start", f"acc{output.accs[0]}.start"), ("count", f"acc{output.accs[0]}")):
                env[internal(f"{part}.{output.name}")] = Binding(partial(_word, code, reader, record, name))
            continue
        accs = [(acc.kind, acc.dtype, acc.by is None or type_of(acc.by), repr(acc.params))
                for acc in (table.accs[number] for number in output.accs)]
        shape = output.fn, output.dtype, output.nullable, output.part, tuple(accs)
        names = (*(f"acc{number}" for number in output.accs), f"`{output.name}`")
        env[output.name] = Binding(partial(_output, code, reader, record, output), shape=shape, names=names)
    env["?live"] = Binding(partial(_live, code, reader, record))
    return env


def partials_env(code: Code, reader: FromPartials, columns: Env) -> Env:
    """Bindings of the outputs of partial groups; `columns` are those of all sides."""
    return {output.name: Binding(partial(_merged_sides, code, reader, columns, output))
            for output in reader.table.outputs}


def _merged_sides(code: Code, reader: FromPartials, columns: Env, output: Output, row: Row) -> Value:
    """An output of a group that is in the row once for each side."""
    table = reader.table
    place = place_in(code.f, table, _new_record(code, table.layout.template))
    for side in range(reader.sides):
        for number in output.accs:
            acc = table.accs[number]
            env = {name: columns[side_column(side, name)] for expr in acc.exprs for name in columns_of(expr)}
            accumulators.update(code, number, acc, place, row, env, _no_ordinal)
    return accumulators.finish(code, table, output, place)


def _no_ordinal() -> ir.Value:
    raise AssertionError("partial groups carry the numbers of their rows")


def _new_record(code: Code, template: bytes) -> ir.Value:
    """A record on the stack that no row has reached."""
    f = code.f
    record = f.scratch(I8, len(template), "record")
    f.call("llvm.memcpy.p0.p0.i64", ir.VoidType(), [record, code.text(template), const(len(template)), const(0, I1)])
    return record


def _key(code: Code, reader: FromTable, read: Read, name: str, record: Callable[[Row], ir.Value], row: Row) -> Value:
    f, layout = code.f, reader.table.layout
    base = record(row)
    nulls = f.b.load(f.byte_at(base, layout.offset("nulls")), typ=I64) if read.nulls else None
    return field_value(code, f.byte_at(base, layout.offset(name)), read, nulls)


def _window(code: Code, reader: FromTable, record: Callable[[Row], ir.Value], is_end: bool, row: Row) -> Value:
    f, table = code.f, reader.table
    assert table.window is not None
    if isinstance(table.window, Session):
        name, gap = ("last", table.window.gap) if is_end else ("first", 0)
        moment = f.b.add(f.b.load(f.byte_at(record(row), table.layout.offset(name)), typ=I64), const(gap))
        typ = register_type(type_of(table.window.time))
        return Value(moment if typ == I64 else f.b.trunc(moment, typ))
    if table.slicing is Slicing.RING:
        first = f.slot("window.first")
    else:
        first = f.b.load(f.byte_at(record(row), table.layout.offset("slice")), typ=I64)
    if table.window.cumulates:  # its last slice
        slices = table.window_slices
        first = f.b.add(first, const(1)) if is_end else f.b.mul(floor_divide(f, first, slices), const(slices))
    elif is_end:
        first = f.b.add(first, const(table.window_slices))
    moment = f.b.mul(first, const(table.slice_size))
    if table.window.offset:
        moment = f.b.add(moment, const(table.window.offset))
    typ = register_type(type_of(table.window.time))
    return Value(moment if typ == I64 else f.b.trunc(moment, typ))


def _place(code: Code, reader: FromTable, record: ir.Value, accs: tuple[int, ...]) -> Place:
    """Where the group's accumulators are: in the record, or merged from a window's slices."""
    f, table, layout = code.f, reader.table, reader.table.layout
    if not reader.window_slices:
        return place_in(f, table, record)
    start = layout.ring_start
    merged = _new_record(code, layout.template[start : start + layout.ring_step])

    def into(name: str) -> ir.Value:
        return f.byte_at(merged, f.named_constant(name, lambda field: layout.offset(field) - start))

    for k in range(reader.window_slices):
        other = place_in(f, table, record, f.slot(f"window.slice{k}"))
        for number in accs:
            accumulators.merge(code, number, table.accs[number], into, other)
    return into


def _output(code: Code, reader: FromTable, record: Callable[[Row], ir.Value], output: Output, row: Row) -> Value:
    return accumulators.finish(code, reader.table, output, _place(code, reader, record(row), output.accs))


def _word(code: Code, reader: FromTable, record: Callable[[Row], ir.Value], name: str, row: Row) -> Value:
    """A field of the record as it is."""
    return Value(code.f.b.load(place_in(code.f, reader.table, record(row))(name), typ=I64))


def _live(code: Code, reader: FromTable, record: Callable[[Row], ir.Value], row: Row) -> Value:
    place = _place(code, reader, record(row), (0,))
    return Value(code.f.b.icmp_signed(">", code.f.b.load(place("acc0"), typ=I64), const(0)))
