"""Sessions: the intervals of time of each key, as records that accumulators live in.

The index leads to a key's open session, the latest. Most rows join it or begin the next one: then the open session is
copied to the end of the arena, and its record begins anew; so the records that rows meet stay few and in the cache. The
closed sessions of a key are a list, from late to early (`previous`, an address in the arena). A row before the open
session is put into the list, at most `MAX_STEPS` along it. One that is farther back becomes a record outside of any
list, counted in slot `strays`: the table is then merged into a new one in the order of time (`exec/tables.py`), where
none is before another. A session that grows absorbs those that it reaches; their records become free: a list of them,
by `previous` too, from slot `free` on, to which `exec/session_table.py` adds those that were emitted.

All comparisons are of sums with the gap: the end of every session fits the type of time.
"""

from __future__ import annotations

from functools import partial

from llvmlite import ir

from scalein.ir.exprs import type_of
from scalein.ir.tables import Table
from scalein.ir.windows import Session
from scalein.llvm_backend import accumulators
from scalein.llvm_backend.code import Code
from scalein.llvm_backend.fn import I1, I64, PTR, Var, const
from scalein.llvm_backend.hash_index import NULL, Index, place_in
from scalein.llvm_backend.parts import can_outline, is_many

MAX_STEPS = 16


class Sessions:
    """The sessions of a table's keys."""

    def __init__(self, code: Code, table: Table, index: Index) -> None:
        assert isinstance(table.window, Session)
        self._code, self._table, self._index, self._gap = code, table, index, const(table.window.gap)

    # --- fields

    def _at(self, record: ir.Value, name: str) -> ir.Value:
        return self._code.f.byte_at(record, self._table.layout.offset(name))

    def _get(self, record: ir.Value, name: str) -> ir.Value:
        return self._code.f.b.load(self._at(record, name), typ=I64)

    def _set(self, record: ir.Value, name: str, value: ir.Value) -> None:
        self._code.f.store(value, self._at(record, name))

    def _reach(self, time: ir.Value) -> ir.Value:
        """The last time that is near enough."""
        return self._code.f.b.add(time, self._gap)

    def bounds(self, record: ir.Value) -> tuple[ir.Value, ir.Value]:
        return self._get(record, "first"), self._get(record, "last")

    # --- rows

    def find(self, opened: ir.Value, first: ir.Value, last: ir.Value) -> ir.Value:
        """The record of the session that [first, last] belongs to, of a key whose open session is in `opened`."""
        f, b = self._code.f, self._code.f.b
        found = f.var(PTR, opened)
        begin, end = self.bounds(opened)
        is_near = b.and_(b.icmp_signed("<=", first, self._reach(end)), b.icmp_signed("<=", begin, self._reach(last)))
        is_new = b.icmp_signed(">", begin, end)  # no row has reached it
        with f.when_else(b.and_(is_near, b.not_(is_new))) as (joins, apart):
            with joins:
                self._set(opened, "last", f.max(end, last))
                with f.when(b.icmp_signed("<", first, begin), likely=False):
                    self._set(opened, "first", first)
                    self._absorb(opened)
            with apart, f.when_else(b.or_(is_new, b.icmp_signed(">", first, end))) as (after, before):
                with after:
                    with f.when(b.not_(is_new)):
                        self._close(opened)
                    self._set(opened, "first", first)
                    self._set(opened, "last", last)
                with before:
                    self._find_before(opened, first, last, found)
        return found.get()

    def _new(self, like: ir.Value) -> tuple[ir.Value, ir.Value]:
        """A copy of a record, in place of a free one or at the end of the arena, and its address."""
        f, size = self._code.f, self._table.layout.size
        used, free = f.get_slot(f"{self._index.prefix}.used"), f.get_slot("free")
        is_free = f.b.icmp_unsigned("!=", free, const(0))
        place = f.b.select(is_free, free, used)
        record = f.byte_at(self._index.slot("arena"), place)
        with f.when_else(is_free) as (again, anew):
            with again:
                f.set_slot("free", self._get(record, "previous"))
            with anew:
                f.set_slot(f"{self._index.prefix}.used", f.b.add(used, const(size)))
        f.call("llvm.memcpy.p0.p0.i64", ir.VoidType(), [record, like, const(size), const(0, I1)])
        return record, place

    def _clear(self, record: ir.Value) -> None:
        """No row has reached it."""
        f, layout, slots = self._code.f, self._table.layout, self._table.acc_slots
        template = self._code.text(layout.template)
        for name, size in slots:
            at = layout.offset(name)
            f.call("llvm.memcpy.p0.p0.i64", ir.VoidType(),
                   [f.byte_at(record, at), f.byte_at(template, at), const(size), const(0, I1)])

    def _close(self, opened: ir.Value) -> None:
        _, address = self._new(opened)
        self._set(opened, "previous", address)
        self._clear(opened)

    def _record(self, address: ir.Value) -> ir.Value:
        return self._code.f.byte_at(self._index.slot("arena"), address)

    def _absorb(self, record: ir.Value) -> None:
        """Merge the earlier sessions that a session has reached."""
        f, b = self._code.f, self._code.f.b
        with f.forever() as walk:
            address = self._get(record, "previous")
            walk.stop_if(b.icmp_unsigned("==", address, const(0)))
            other = self._record(address)
            (begin, end), (first, last) = self.bounds(other), self.bounds(record)
            walk.stop_if(b.icmp_signed(">", first, self._reach(end)))
            self._set(record, "first", f.min(begin, first))
            self._set(record, "last", f.max(end, last))
            self._set(record, "previous", self._get(other, "previous"))
            self._merge(record, other)
            self._set(other, "acc0", const(0))
            self._set(other, "previous", f.get_slot("free"))
            f.set_slot("free", address)

    def _find_before(self, opened: ir.Value, first: ir.Value, last: ir.Value, found: Var) -> None:
        """The session of an interval before the open one."""
        f, b = self._code.f, self._code.f.b
        after, address = f.var(PTR, opened), f.var(I64, self._get(opened, "previous"))
        steps = f.var(I64, const(0))
        with f.forever() as walk:
            walk.stop_if(b.icmp_unsigned("==", address.get(), const(0)))
            walk.stop_if(b.icmp_signed("<=", self._get(self._record(address.get()), "first"), self._reach(last)))
            steps.set(b.add(steps.get(), const(1)))
            walk.stop_if(b.icmp_unsigned(">", steps.get(), const(MAX_STEPS)))
            after.set(self._record(address.get()))
            address.set(self._get(after.get(), "previous"))
        joined = f.var(PTR, NULL)
        is_far = b.icmp_unsigned(">", steps.get(), const(MAX_STEPS))
        with f.when(b.and_(b.not_(is_far), b.icmp_unsigned("!=", address.get(), const(0)))):
            other = self._record(address.get())
            with f.when(b.icmp_signed("<=", first, self._reach(self._get(other, "last")))):
                joined.set(other)
        with f.when_else(b.icmp_unsigned("!=", joined.get(), NULL)) as (joins, apart):
            with joins:
                begin, end = self.bounds(joined.get())
                self._set(joined.get(), "first", f.min(begin, first))
                self._set(joined.get(), "last", f.max(end, last))
                self._absorb(joined.get())
                found.set(joined.get())
            with apart:
                record, place = self._new(opened)
                self._clear(record)
                self._set(record, "first", first)
                self._set(record, "last", last)
                self._set(record, "previous", address.get())
                with f.when_else(is_far) as (stray, linked):
                    with stray:
                        f.set_slot("strays", b.add(f.get_slot("strays"), const(1)))
                    with linked:
                        self._set(after.get(), "previous", place)
                found.set(record)

    def _merge(self, record: ir.Value, other: ir.Value) -> None:
        into, given = place_in(self._code.f, self._table, record), place_in(self._code.f, self._table, other)
        for number, acc in enumerate(self._table.accs):
            merge = partial(accumulators.merge, self._code, number, acc, into, given)
            if is_many(self._table.accs) and can_outline(acc):
                key = id(record), acc.kind, acc.dtype, acc.by is None or type_of(acc.by), repr(acc.params)
                self._code.part(merge, key, (f"acc{number}",))
            else:
                merge()


