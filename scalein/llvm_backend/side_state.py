"""Side state: what groups hold outside of their records, because it has no fixed size.

A bag is a table of its own: (record of the group, value) -> number of rows. A value that is new to its group is
counted in the group's record, so `n_unique` is read from there like any count. A log is a row of entries: (record
of the group, number of the row, value) for `collect` and `top_k`, (record, value, rows) for quantiles. Appending
takes no probe; the runtime folds equal values of a long log into one entry now and then, so it does not grow with rows
that say nothing new.

A record is named by its place: the bytes between it and the first address of its table. A null belongs to no
group: its owner is -1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from llvmlite import ir

from scalein.dtypes import DType
from scalein.ir.exprs import Expr, type_of
from scalein.ir.stages import GroupMode
from scalein.ir.tables import Acc, AccKind, Table, log_layout
from scalein.layout import ARENA_FULL, BLOCK_ROWS, COARSE_BITS
from scalein.llvm_backend.block import PADDED, Block, rows
from scalein.llvm_backend.cells import CELLS, Place, append_cell, leave_without_room, needed
from scalein.llvm_backend.code import Code
from scalein.llvm_backend.exprs import lower_expr
from scalein.llvm_backend.fn import I64, PTR, Fn, const
from scalein.llvm_backend.hash_index import Index
from scalein.llvm_backend.keys import KeyBlock, key_array, mix, row_key
from scalein.llvm_backend.values import Env, Row, Value, canonical

NO_OWNER = -1
NO_LIMIT = -(2**63)


def base_of(f: Fn, mode: GroupMode) -> ir.Value:
    """The address that owners are counted from."""
    return f.slot({GroupMode.ONE: "one", GroupMode.DIRECT: "direct.arena", GroupMode.HASH: "table.arena"}[mode], PTR)


def owner_of(f: Fn, base: ir.Value, record: ir.Value) -> ir.Value:
    return f.b.sub(f.b.ptrtoint(record, I64), f.b.ptrtoint(base, I64))


def side_index(code: Code, table: Table, position: int) -> Index:
    """The index of a table's side table."""
    return Index(code, table.bags[position][1], f"bag{position}", position + 1)


@dataclass(frozen=True, slots=True)
class Found:
    """A block's records in one bag, and their owners."""

    owners: ir.Value
    records: ir.Value


@dataclass(frozen=True, slots=True)
class Sides:
    """A block's rows in all sides of their table, found before anything is counted in."""

    code: Code
    table: Table
    env: Env
    found: dict[int, Found]

    def count_in(self, number: int, acc: Acc, place: Place, row: Row, owner: Callable[[], ir.Value],
                 ordinal: Callable[[], ir.Value]) -> None:
        """Count a row in whose record is at `owner`."""
        if acc.kind is AccKind.DISTINCT:
            found, f = self.found[number], self.code.f
            known = f.b.icmp_signed(">=", f.load(found.owners, row.k, I64), const(0))
            add_to_bag(f, f.load(found.records, row.k, PTR), _bag_rows(self.table, number), const(1), known,
                       place(f"acc{number}"))
        else:
            self._append(number, acc, place, row, owner(), ordinal)

    def _append(self, number: int, acc: Acc, place: Place, row: Row, owner: ir.Value,
                ordinal: Callable[[], ir.Value]) -> None:
        """One more entry of a log, unless something about it is null."""
        code, f, b = self.code, self.code.f, self.code.f.b
        assert acc.arg is not None
        value = lower_expr(code, acc.arg, self.env, row)
        by = lower_expr(code, acc.by, self.env, row) if acc.by is not None else None
        counted = f.all_of(value.valid, by.valid if by is not None else None)
        word = None
        if by is not None and acc.by is not None:
            word = orderable(f, canonical(f, by, type_of(acc.by)).number, type_of(acc.by))
            limit = b.load(place(f"acc{number}.limit"), typ=I64)
            no_limit = b.icmp_signed("==", limit, const(NO_LIMIT))
            counted = f.all_of(counted, b.or_(no_limit, b.icmp_signed(">", word, limit)))
        prefix = log_prefix(self.table, number)
        layout = log_layout(acc)
        used = f.get_slot(f"{prefix}.used")
        entry = f.byte_at(f.slot(f"{prefix}.arena", PTR), used)
        # Always written, and retained only by moving the end: no branch unless there are bytes to copy.
        f.store(owner, f.byte_at(entry, layout.offset("owner")))
        if acc.kind is AccKind.VALUES:
            plain = canonical(f, value, acc.dtype).number
            key = orderable(f, coarse(f, plain) if acc.params else plain, acc.dtype)
            f.store(key, f.byte_at(entry, layout.offset("key")))
            f.store(const(1), f.byte_at(entry, layout.offset("rows")))
        else:
            self._write_value(number, entry, value, word, counted, ordinal())
        one = const(1) if counted is None else b.zext(counted, I64)
        f.set_slot(f"{prefix}.used", b.add(used, b.mul(one, const(layout.size))))
        f.store(b.add(b.load(place(f"acc{number}"), typ=I64), one), place(f"acc{number}"))

    def _write_value(self, number: int, entry: ir.Value, value: Value, by: ir.Value | None, counted: ir.Value | None,
                     ordinal: ir.Value) -> None:
        code, f, acc = self.code, self.code.f, self.table.accs[number]
        layout, heap = log_layout(acc), f"{log_prefix(self.table, number)}.heap"
        f.store(ordinal, f.byte_at(entry, layout.offset("row")))
        if by is not None:
            f.store(by, f.byte_at(entry, layout.offset("by")))
        if acc.dtype.is_bytes and counted is not None:
            with f.when(counted):
                append_cell(code, f.byte_at(entry, layout.offset("value")), value.data, heap)
        else:
            append_cell(code, f.byte_at(entry, layout.offset("value")), value.data, heap)


def log_prefix(table: Table, number: int) -> str:
    return f"log{[k for k, _ in table.logs].index(number)}"


def _bag_rows(table: Table, number: int) -> int:
    """Where a bag's record counts its rows."""
    return dict(table.bags)[number].layout.offset("acc0")


def find_sides(code: Code, table: Table, block: Block, env: Env, owner: Callable[[Row], ir.Value]) -> Sides:
    """Find or insert the side state that a block's rows will change; leaves the kernel if memory must grow."""
    f, b = code.f, code.f.b
    found = {}
    for position, (number, side) in enumerate(table.bags):
        arg = table.accs[number].arg
        assert arg is not None
        index = side_index(code, table, position)
        index.ensure_arena(BLOCK_ROWS)
        owners, values = f.scratch(I64, PADDED, "owners"), key_array(f, 1, type_of(arg))
        hashes = f.scratch(I64, PADDED, "hashes")
        with rows(code, block) as row:
            _, h = row_key(code, row, env, [arg], False, [values])
            valid = lower_expr(code, arg, env, row).valid
            at = owner(row) if valid is None else b.select(valid, owner(row), const(NO_OWNER))
            f.store(at, owners, row.k)
            f.store(mix(f, h, at), hashes, row.k)
        keys = KeyBlock(tuple(key.dtype for key in side.keys), (owners, values), None, hashes)
        found[number] = Found(owners, index.find(keys, block.count, None, insert=True))
    for position, (_, acc) in enumerate(table.logs):
        used, size = f.get_slot(f"log{position}.used"), const(BLOCK_ROWS * log_layout(acc).size)
        with f.when(b.icmp_signed(">", b.add(used, size), f.slot(f"log{position}.arena_size")), likely=False):
            f.set_slot("full", const(1 + len(table.bags) + position))
            f.leave(ARENA_FULL)
    kept = [e for acc in table.accs if acc.has_heap and not acc.has_side for e in (acc.arg, acc.by)]
    _ensure_heap(code, block, env, kept, CELLS)
    for position, (_, acc) in enumerate(table.logs):
        if acc.kind is not AccKind.VALUES:
            _ensure_heap(code, block, env, [acc.arg], f"log{position}.heap")
    return Sides(code, table, env, found)


def _ensure_heap(code: Code, block: Block, env: Env, exprs: Iterable[Expr | None], heap: str) -> None:
    """Room in a heap for the bytes that a block's rows may leave there."""
    kept = [e for e in exprs if e is not None and type_of(e).is_bytes]
    if not kept:
        return
    f = code.f
    need = f.var(I64, const(0))
    with rows(code, block) as row:
        need.set(f.b.add(need.get(), needed(f, [lower_expr(code, expr, env, row).data for expr in kept])))
    leave_without_room(f, need.get(), heap)


def add_to_bag(f: Fn, record: ir.Value, at: int, by: ir.Value, known: ir.Value | None, distinct: ir.Value) -> None:
    """More rows of a value; the first of them is a new value of its group."""
    b = f.b
    count = f.byte_at(record, at)
    before = b.load(count, typ=I64)
    f.store(b.add(before, by), count)
    fresh = f.all_of(b.icmp_signed("==", before, const(0)), known)
    f.store(b.add(b.load(distinct, typ=I64), b.zext(fresh, I64)), distinct)


def orderable(f: Fn, word: ir.Value, dtype: DType) -> ir.Value:
    """A canonical value as a signed 64-bit integer of the same order; NaN is the greatest."""
    b = f.b
    if dtype.is_float:
        wide = word if word.type == I64 else b.sext(word, I64)
        low = (1 << (word.type.width - 1)) - 1
        return b.xor(wide, b.and_(b.ashr(wide, const(63)), const(low)))
    if dtype.is_signed:
        return word if word.type == I64 else b.sext(word, I64)
    return b.xor(word, const(1 << 63)) if word.type == I64 else b.zext(word, I64)


def coarse(f: Fn, word: ir.Value) -> ir.Value:
    """A float's bits rounded to the nearest with few of them; infinities and NaN stay, and nothing becomes one."""
    b = f.b
    infinity, mask = const(0x7FF << 52), const(-(1 << COARSE_BITS))
    size = b.and_(word, const((1 << 63) - 1))
    nearest = b.and_(b.add(size, const(1 << (COARSE_BITS - 1))), mask)
    rounded = b.select(b.icmp_unsigned("<", nearest, infinity), nearest, b.and_(size, mask))
    rounded = b.select(b.icmp_unsigned("<", size, infinity), rounded, size)
    return b.or_(rounded, b.and_(word, const(1 << 63)))


def as_float(f: Fn, word: ir.Value) -> ir.Value:
    """The float whose `orderable` a word is."""
    b = f.b
    return b.bitcast(b.xor(word, b.and_(b.ashr(word, const(63)), const((1 << 63) - 1))), ir.DoubleType())
