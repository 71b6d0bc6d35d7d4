"""Merge: the records of one table into another of the same layout, by key.

With `slide`, each record of a slice goes into one of the windows that the slice belongs to: the one
`slide.back` steps before its newest. The runtime runs it once for each step.
"""

from __future__ import annotations

from functools import partial

from llvmlite import ir

from scalein.dtypes import DType
from scalein.ir.exprs import type_of
from scalein.ir.stages import GroupMode, Merge
from scalein.ir.tables import Slicing, Table
from scalein.layout import BLOCK_ROWS
from scalein.llvm_backend import accumulators
from scalein.llvm_backend.block import PADDED, Block, keep
from scalein.llvm_backend.cells import leave_without_room, needed
from scalein.llvm_backend.code import Code
from scalein.llvm_backend.fn import I64, PTR, const
from scalein.llvm_backend.functions.arithmetic import floor_divide
from scalein.llvm_backend.hash_index import Index, place_in
from scalein.llvm_backend.keys import KeyBlock, array_type, first_bytes, halves, hash_string, hash_words, key_array, mix
from scalein.llvm_backend.parts import can_outline, is_many
from scalein.llvm_backend.readers import stored_string
from scalein.llvm_backend.sessions import Sessions
from scalein.llvm_backend.side_state import base_of, owner_of
from scalein.llvm_backend.values import Row


def lower_merge(code: Code, sink: Merge, block: Block, start: ir.Value) -> None:
    f, table = code.f, sink.table
    source = f.slot("source", PTR)
    block = keep(code, block, lambda row: _is_live(code, sink, _record(code, table, source, start, row)))
    base = base_of(f, sink.mode)
    records = None
    if sink.mode is GroupMode.HASH:
        index = Index(code, table, "table")
        index.ensure_arena(BLOCK_ROWS)
        keys, slices = _keys(code, sink, block, source, start)
        records = index.find(keys, block.count, slices, insert=True)
    sessions = Sessions(code, table, index) if table.slicing is Slicing.SESSION else None
    _ensure_heap(code, table, block, source, start)
    with f.loop(block.count) as k:
        record = _record(code, table, source, start, block.row(f, k))
        if records is not None:
            target = f.load(records, k, PTR)
            if sessions is not None:
                target = sessions.find(target, *sessions.bounds(record))
        elif sink.mode is GroupMode.DIRECT:  # tables over one domain: a key has the same place in both
            target = _record(code, table, base, start, block.row(f, k))
        else:
            target = base
        if table.has_sides:
            f.store(owner_of(f, base, target), f.byte_at(record, table.layout.offset("moved")))
        _merge_into(code, table, target, record)


def _record(code: Code, table: Table, source: ir.Value, start: ir.Value, row: Row) -> ir.Value:
    f = code.f
    number = f.b.add(start, row.offset("in"))
    return f.byte_at(source, f.b.mul(number, const(table.layout.size)))


def _merge_into(code: Code, table: Table, target: ir.Value, record: ir.Value) -> None:
    into, other = place_in(code.f, table, target), place_in(code.f, table, record)
    is_wide = is_many(table.accs)
    for number, acc in enumerate(table.accs):
        if is_wide and can_outline(acc):
            key = "merge", acc.kind, acc.dtype, acc.by is None or type_of(acc.by), repr(acc.params)
            code.part(partial(accumulators.merge, code, number, acc, into, other), key, (f"acc{number}",))
        else:
            accumulators.merge(code, number, acc, into, other)


def _ensure_heap(code: Code, table: Table, block: Block, source: ir.Value, start: ir.Value) -> None:
    """Room for all bytes that this block's records may bring."""
    if not table.heap_cells:
        return
    f = code.f
    need = f.var(I64, const(0))
    with f.loop(block.count) as k:
        record = _record(code, table, source, start, block.row(f, k))
        kept = [stored_string(f, f.byte_at(record, table.layout.offset(name))) for name in table.heap_cells]
        need.set(f.b.add(need.get(), needed(f, kept)))
    leave_without_room(f, need.get())


def _is_live(code: Code, sink: Merge, record: ir.Value) -> ir.Value:
    """A record that some row reached, and whose window (when sliding) covers its slice.

    Its slice, or window, lies between the slots `range.first` and `range.last`.
    """
    f, b, table = code.f, code.f.b, sink.table
    live = b.icmp_signed(">", b.load(f.byte_at(record, table.layout.offset("acc0")), typ=I64), const(0))
    if table.slicing is not Slicing.KEY:
        return live
    assert table.window is not None
    slice_ = start = b.load(f.byte_at(record, table.layout.offset("slice")), typ=I64)
    if sink.slide:
        start = _window_of(code, table, slice_)
        live = b.and_(live, _holds(code, table, start, slice_))
    inside = b.and_(b.icmp_signed(">=", start, f.slot("range.first")), b.icmp_signed("<=", start, f.slot("range.last")))
    return b.and_(live, inside)


def _window_of(code: Code, table: Table, slice_: ir.Value) -> ir.Value:
    """The first slice of the window `slide.back` steps before the newest that may hold `slice_`; of windows that
    cumulate, the last slice of the one as many steps after the first.
    """
    f, b = code.f, code.f.b
    assert table.window is not None
    if table.window.cumulates:
        return b.add(slice_, f.slot("slide.back"))
    newest = floor_divide(f, slice_, table.window_step)
    return b.mul(b.sub(newest, f.slot("slide.back")), const(table.window_step))


def _holds(code: Code, table: Table, window: ir.Value, slice_: ir.Value) -> ir.Value:
    f, b = code.f, code.f.b
    assert table.window is not None
    if table.window.cumulates:
        first = b.mul(floor_divide(f, slice_, table.window_slices), const(table.window_slices))
        return b.icmp_signed("<", window, b.add(first, const(table.window_slices)))
    return b.icmp_signed(">", b.add(window, const(table.window_slices)), slice_)


def _keys(code: Code, sink: Merge, block: Block, source: ir.Value, start: ir.Value) -> tuple[KeyBlock, ir.Value | None]:
    """Canonical keys copied from the records, and their hashes (a direct table's records have none)."""
    f, b, table, layout = code.f, code.f.b, sink.table, sink.table.layout
    types = tuple(key.stored for key in table.keys)
    arrays = tuple(key_array(f, k, t) for k, t in enumerate(types))
    nulls = f.scratch(I64, PADDED, "nulls") if table.has_nulls else None
    hashes = f.scratch(I64, PADDED, "hashes")
    slices = f.scratch(I64, PADDED, "slices") if table.slicing is Slicing.KEY else None
    with f.loop(block.count) as k:
        record = _record(code, table, source, start, block.row(f, k))
        words = [word for number, dtype in enumerate(types)
                 for word in copy_key(code, f.byte_at(record, layout.offset(f"key{number}")), dtype, arrays[number], k)]
        null_bits = None
        if nulls is not None:
            null_bits = b.load(f.byte_at(record, layout.offset("nulls")), typ=I64)
            f.store(null_bits, nulls, k)
        h = hash_words(f, words, null_bits)
        if slices is not None:
            slice_ = b.load(f.byte_at(record, layout.offset("slice")), typ=I64)
            slice_ = _window_of(code, table, slice_) if sink.slide else slice_
            h = mix(f, h, slice_)
            f.store(slice_, slices, k)
        f.store(h, hashes, k)
    return KeyBlock(types, arrays, nulls, hashes), slices


def copy_key(code: Code, place: ir.Value, dtype: DType, array: ir.Value, k: ir.Value) -> list[ir.Value]:
    """Copy a record's key into scratch; gives the words that are hashed for it."""
    f, b = code.f, code.f.b
    if not dtype.is_bytes:
        plain = b.load(place, typ=array_type(dtype))
        f.store(plain, array, k)
        return halves(f, plain)
    twice = b.shl(k, const(1))
    f.store(b.load(place, typ=I64), array, twice)
    f.store(b.load(f.byte_at(place, 8), typ=I64), array, b.add(twice, const(1)))
    text = stored_string(f, place)
    return [hash_string(code, text, *first_bytes(code, text))]
