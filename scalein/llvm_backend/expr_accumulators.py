"""Accumulators made of expressions (`ir/accumulators.py`): their slots are fields of a record.

An update computes all new values before it stores the first; a method of the user's is written in place, with its
fields in registers until it ends.
"""

from __future__ import annotations

from collections.abc import Mapping

from llvmlite import ir

from scalein.ir.accumulators import Assign, ExprAcc, Slot, argument
from scalein.ir.exprs import type_of
from scalein.ir.tables import Acc
from scalein.llvm_backend.cells import Place, read_cell, write_cell
from scalein.llvm_backend.code import Code
from scalein.llvm_backend.exprs import lower_expr, lower_literal
from scalein.llvm_backend.fn import I1, I8, Fn, const
from scalein.llvm_backend.values import Binding, Env, Row, Str, Value, memory_type


def update(code: Code, number: int, acc: Acc, place: Place, row: Row, env: Env) -> None:
    """Count a row in, or a partial group, whose columns are the parts."""
    given = [lower_expr(code, part, env, row) for part in acc.parts]
    if len(acc.params) > 1:
        others = {slot.name: _or_first(code, value, slot) for value, slot in zip(given, acc.expr.slots, strict=True)}
        _change(code, number, acc.expr, place, {slot.other.name: others[slot.name] for slot in acc.expr.slots}, True)
        return
    by = None if acc.by is None else lower_expr(code, acc.by, env, row)
    strict = (value.valid for value, is_strict in zip(given, acc.expr.strict, strict=True) if is_strict)
    counted = code.f.all_of(row.live, *strict, *(() if by is None else (by.number, by.valid)))
    args = {argument(k, type_of(part)).name: value
            for k, (part, value) in enumerate(zip(acc.parts, given, strict=True))}
    if counted is None:
        _change(code, number, acc.expr, place, args, False)
    else:
        with code.f.when(counted):
            _change(code, number, acc.expr, place, args, False)


def merge(code: Code, number: int, acc: Acc, place: Place, other: Place) -> None:
    """Count another group's rows in."""
    given = {slot.other.name: read_slot(code.f, other, f"acc{number}.{part}", slot) for part, slot in acc.expr.parts}
    _change(code, number, acc.expr, place, given, True)


def finish(code: Code, name: str, acc: Acc, place: Place, seen: ir.Value | None) -> Value:
    """The aggregate's value; null where no row was counted, if `seen` says so."""
    env = _bound({slot.own.name: read_slot(code.f, place, f"{name}.{part}", slot) for part, slot in acc.expr.parts})
    value = lower_expr(code, acc.expr.finish, env, Row(code.f, const(0), {}), seen)
    return Value(value.data, code.f.all_of(seen, value.valid))


def read_slot(f: Fn, place: Place, name: str, slot: Slot) -> Value:
    """A slot's value in a record."""
    if slot.ring is not None:
        return Value(Str(place(name), const(slot.dtype.width)))
    data = read_cell(f, place(name), slot.dtype)
    if not slot.nullable:
        return Value(data)
    return Value(data, f.b.icmp_unsigned("!=", f.b.load(place(f"{name}.ok"), typ=I8), const(0, I8)))


def write_slot(code: Code, place: Place, name: str, slot: Slot, value: Value) -> None:
    """Store a value; a text that is null is empty."""
    f, data = code.f, value.data
    if slot.ring is not None:
        assert isinstance(data, Str)
        with f.when(f.b.icmp_unsigned("==", data.size, const(slot.dtype.width))):
            f.call("llvm.memcpy.p0.p0.i64", ir.VoidType(), [place(name), data.ptr, data.size, const(0, I1)])
        return
    if isinstance(data, Str) and value.valid is not None:
        data = Str(data.ptr, f.b.select(value.valid, data.size, const(0)))
    write_cell(code, place, name, data)
    if slot.nullable:
        f.store(const(1, I8) if value.valid is None else f.b.zext(value.valid, I8), place(f"{name}.ok"))


def new_group(code: Code, number: int, acc: Acc) -> Place:
    """A group in registers, without rows; its slots are numbers."""
    f = code.f
    places: dict[str, ir.Value] = {}
    for part, slot in acc.expr.parts:
        name = f"acc{number}.{part}"
        places[name] = f.scratch(memory_type(slot.dtype), 1)
        if slot.nullable:
            places[f"{name}.ok"] = f.scratch(I8, 1)
        reset_slot(code, places.__getitem__, name, slot)
    return places.__getitem__


def reset_slot(code: Code, place: Place, name: str, slot: Slot) -> None:
    """As in a new record."""
    if slot.ring is not None:
        code.f.store(const(0), place(name))  # it has no values
        return
    write_slot(code, place, name, slot, lower_literal(code, slot.init, slot.dtype))


def _change(code: Code, number: int, acc: ExprAcc, place: Place, given: Mapping[str, Value], is_merge: bool) -> None:
    own = {slot.own.name: read_slot(code.f, place, f"acc{number}.{part}", slot) for part, slot in acc.parts}
    changes = acc.merge if is_merge else acc.update
    if isinstance(changes, Assign):
        env, row = _bound({**own, **given}), Row(code.f, const(0), {})
        found = {named.name: lower_expr(code, named.expr, env, row) for named in changes.values}
    else:
        from scalein.llvm_backend.functions.udf import InlineMethod  # most kernels have none

        found = InlineMethod(code, changes, acc.name).run([*own.values(), *given.values()])
    for part, slot in acc.parts:
        if slot.name in found:
            write_slot(code, place, f"acc{number}.{part}", slot, found[slot.name])


def _bound(values: Mapping[str, Value]) -> Env:
    return {name: Binding(lambda row, value=value: value) for name, value in values.items()}  # type: ignore[misc]


def _or_first(code: Code, value: Value, slot: Slot) -> Value:
    """A stored slot is null in groups that began before it, as if no row had been counted."""
    if slot.nullable or value.valid is None:
        return value
    first = lower_literal(code, slot.init, slot.dtype)
    return Value(code.f.b.select(value.valid, value.number, first.number))
