"""Stored tables: the index over records that key groups keep in chunks of their own.

A key group's header says where its next record and its next text go (`layout.py`); groups share nothing, so workers
that own different groups run side by side. Records and texts are only appended; a record is changed in place, a text
never: a new one is appended. What is changed while a snapshot copies its segment goes to the undo log first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar

from llvmlite import ir

from scalein.dtypes import DType
from scalein.ir.stages import Read
from scalein.ir.tables import StoredTable
from scalein.layout import (
    ADDRESS_BITS,
    ARENA_FULL,
    ERROR,
    HEAP_FULL,
    INDEX_FULL,
    KEY_NULLS,
    MASK,
    NEW_FLAGS,
    PARTIAL,
    POOLED,
    RECORD_AT,
    RECORD_END,
    ROOM,
    TEXT_AT,
    TEXT_END,
    TOMB,
    UNDO_FULL,
)
from scalein.llvm_backend.code import Code
from scalein.llvm_backend.fn import I1, I8, I64, PTR, Fn, const
from scalein.llvm_backend.hash_index import NULL, Index
from scalein.llvm_backend.keys import KeyBlock, key_at
from scalein.llvm_backend.readers import field_value
from scalein.llvm_backend.store_values import header_word, is_set, long_bytes, store_text
from scalein.llvm_backend.values import Binding, Env, Row, Value

LINE = 64  # bytes of a cache line
FOUND_ROWS = 4  # that are changed together; many at once would leave memory idle meanwhile (32 at once: 8 % slower)
# Rows that a record is fetched before it is changed, its bucket before that, and what overflowed into the next bucket
# after it. Rows in flight are in rings of this many rows: rings as long as a block would push them out of L1.
OVERFLOW_AHEAD, RECORDS_AHEAD, BUCKETS_AHEAD = 12, 24, 48
RING = 64


@dataclass(frozen=True, slots=True)
class FoundRows:
    """Rows [start, end) of a block and the ring with their records; null where there is none."""

    ring: ir.Value
    start: ir.Value
    end: ir.Value

    def record(self, f: Fn, k: ir.Value) -> ir.Value:
        return f.b.load(_in_ring(f, self.ring, k), typ=PTR)


def _in_ring(f: Fn, ring: ir.Value, k: ir.Value) -> ir.Value:
    return f.at(ring, f.b.and_(k, const(RING - 1)), PTR)


@dataclass(frozen=True, slots=True)
class StoreIndex(Index):
    """The index of a stored table. Slots: groups, arena, arena_size, and those of `protect`."""

    header_words: ClassVar[int] = 1  # from a group to the next: see `GROUP_WORDS`
    flags: int | None = None  # of an inserted record; None: as the group's header says
    only_hidden: bool = False  # insert only where older records may lie outside of memory
    first: list[ir.Value] = field(default_factory=list)  # the row that a kernel goes on with if it leaves here

    @property
    def stored(self) -> StoredTable:
        assert isinstance(self.table, StoredTable)
        return self.table

    @contextmanager
    def found_rows(self, keys: KeyBlock, count: ir.Value,
                   number: Callable[[ir.Value], ir.Value]) -> Iterator[FoundRows]:
        """The rows of a block, `FOUND_ROWS` at a time, with their records found or made.

        While their records are changed, those of later ones are on their way from memory, and the buckets of rows
        behind them: neither does memory wait for the CPU, nor the other way round. `number` gives the number of a row
        in the batch; what was done of earlier rows before a kernel leaves stays.
        """
        f, b = self.code.f, self.code.f.b
        records, buckets = f.scratch(PTR, RING, "records"), f.scratch(PTR, RING, "buckets")

        def fetch_buckets(start: ir.Value, size: int) -> None:
            with f.loop(f.min(b.add(start, const(size)), count), start=start) as k:
                h = f.load(keys.hashes, k, I64)
                header = self._header(h)
                bucket = self._bucket(header, self._home(header, self._tag(h)))
                f.prefetch(bucket)
                f.store(bucket, _in_ring(f, buckets, k))

        def fetch_records(start: ir.Value, size: int) -> None:
            with f.loop(f.min(b.add(start, const(size)), count), start=start) as k:
                bucket, h = b.load(_in_ring(f, buckets, k), typ=PTR), f.load(keys.hashes, k, I64)
                none = self._first_candidate(bucket, h, _in_ring(f, records, k))
                with f.when(none, likely=False):  # it is in the next bucket, or will be where the group's next one goes
                    f.prefetch(f.byte_at(bucket, LINE))
                    self._prefetch(b.load(self._word(self._header(h), RECORD_AT), typ=PTR))

        def fetch_overflown(start: ir.Value, size: int) -> None:
            with f.loop(f.min(b.add(start, const(size)), count), start=start) as k:
                place = _in_ring(f, records, k)
                with f.when(b.icmp_unsigned("==", b.load(place, typ=PTR), NULL), likely=False):
                    self._second_candidate(f.load(keys.hashes, k, I64), place)

        fetch_buckets(const(0), BUCKETS_AHEAD)
        fetch_records(const(0), RECORDS_AHEAD)
        fetch_overflown(const(0), OVERFLOW_AHEAD)
        with f.loop(count, step=FOUND_ROWS) as start:
            fetch_buckets(b.add(start, const(BUCKETS_AHEAD)), FOUND_ROWS)
            fetch_records(b.add(start, const(RECORDS_AHEAD)), FOUND_ROWS)
            fetch_overflown(b.add(start, const(OVERFLOW_AHEAD)), FOUND_ROWS)
            end = f.min(b.add(start, const(FOUND_ROWS)), count)
            self.first[:] = [number(start)]
            with f.loop(end, start=start) as k:
                self._confirm_or_search(keys, k, None, _in_ring(f, records, k), insert=True)
            yield FoundRows(records, start, end)
            self.first.clear()

    def _second_candidate(self, h: ir.Value, place: ir.Value) -> None:
        """Where a full bucket has no record for a hash, look into the next one."""
        b = self.code.f.b
        header, tag = self._header(h), self._tag(h)
        number = self._home(header, tag)
        with self.code.f.when(b.icmp_unsigned("==", self._matches(self._bucket(header, number), tag)[1], const(0, I8))):
            following = b.and_(b.add(number, const(1)), b.load(self._word(header, MASK), typ=I64))
            self._first_candidate(self._bucket(header, following), h, place)

    def _word(self, header: ir.Value, number: int) -> ir.Value:
        return header_word(self.code.f, header, number)

    def _prefetch(self, record: ir.Value) -> None:
        f, size = self.code.f, self.table.layout.size
        f.prefetch(record)
        if size > 8:  # records lie at multiples of 8 bytes: most have a part in the next line
            f.prefetch(f.byte_at(record, min(size, LINE) - 8))

    def _end(self) -> ir.Value:
        return self.slot("arena_size", I64)

    def _same_nulls(self, record: ir.Value, keys: KeyBlock, k: ir.Value) -> ir.Value | None:
        """Layouts do not follow the data: a batch without nulls must not find the record of a null."""
        f, b = self.code.f, self.code.f.b
        if not any(key.nullable for key in self.stored.keys):
            return None
        stored = b.lshr(b.load(record, typ=I64), const(KEY_NULLS))
        return b.icmp_unsigned("==", stored, const(0) if keys.nulls is None else f.load(keys.nulls, k, I64))

    def _insert(self, header: ir.Value, word: ir.Value, tag: ir.Value, keys: KeyBlock, k: ir.Value,
                slices: ir.Value | None) -> ir.Value:
        """Append a record that means "no row yet"; leaves the kernel if the group is full."""
        f, b = self.code.f, self.code.f.b
        if not self.only_hidden:
            return self._appended(header, word, tag, keys, k)
        record = f.var(PTR, NULL)
        flags = b.load(self._word(header, NEW_FLAGS), typ=I64)
        with f.when(b.icmp_unsigned("!=", b.and_(flags, const(PARTIAL)), const(0))):
            record.set(self._appended(header, word, tag, keys, k))
        return record.get()

    def _appended(self, header: ir.Value, word: ir.Value, tag: ir.Value, keys: KeyBlock, k: ir.Value) -> ir.Value:
        f, b, layout = self.code.f, self.code.f.b, self.table.layout
        h = f.load(keys.hashes, k, I64)
        room = self._word(header, ROOM)
        free = b.load(room, typ=I64)
        with f.when(b.icmp_signed("<=", free, const(0)), likely=False):
            self._leave_for(h, INDEX_FULL)
        at, record = self.next_record(header, b.lshr(h, const(56)), lambda: self._leave_for(h, ARENA_FULL))
        self._ensure_text(header, h, keys, k)
        template = self.code.text(layout.template)
        f.call("llvm.memcpy.p0.p0.i64", ir.VoidType(), [record, template, const(layout.size), const(0, I1)])
        flags = b.load(self._word(header, NEW_FLAGS), typ=I64) if self.flags is None else const(self.flags)
        head = b.or_(b.load(record, typ=I64), flags)
        if keys.nulls is not None:
            head = b.or_(head, b.shl(f.load(keys.nulls, k, I64), const(KEY_NULLS)))
        f.store(head, record)
        for number in range(len(keys.types)):
            place = f.byte_at(record, layout.offset(f"key{number}"))
            key = key_at(f, keys, number, k)
            if isinstance(key, tuple):
                store_text(f, header, place, *key)
            else:
                f.store(key, place)
        f.store(b.sub(free, const(1)), room)
        offset = b.sub(b.ptrtoint(record, I64), b.ptrtoint(self.slot("arena"), I64))
        f.store(b.or_(b.shl(tag, const(ADDRESS_BITS)), b.lshr(offset, const(3))), word)
        f.store(f.byte_at(record, layout.size), at)
        return record

    def next_record(self, header: ir.Value, group: ir.Value, leave: Callable[[], None]) -> tuple[ir.Value, ir.Value]:
        """Where a group's header says that its next record goes, and that; from the pool if its chunk is full."""
        f, b = self.code.f, self.code.f.b
        at = self._word(header, RECORD_AT)
        end = b.add(b.load(at, typ=I64), const(self.table.layout.size))
        with f.when(b.icmp_unsigned(">", end, b.load(self._word(header, RECORD_END), typ=I64)), likely=False):
            left = f.get_slot("pool.left")
            pooled = b.select(is_set(f, b.load(self._word(header, POOLED), typ=I64), 1), left, const(0))
            with f.when(b.icmp_unsigned("==", pooled, const(0))):
                leave()
            taken = b.sub(left, const(1))
            chunk = f.load(f.slot("pool.chunks", PTR), taken, I64)
            f.store(group, f.slot("pool.groups", PTR), taken)
            f.set_slot("pool.left", taken)
            f.store(chunk, at)
            f.store(b.add(chunk, f.slot("pool.size")), self._word(header, RECORD_END))
        return at, b.load(at, typ=PTR)

    def _ensure_text(self, header: ir.Value, h: ir.Value, keys: KeyBlock, k: ir.Value) -> None:
        """Leave the kernel unless the group has space for all long strings of a row's key."""
        f, b = self.code.f, self.code.f.b
        need: ir.Value = const(0)
        for number in range(len(keys.types)):
            key = key_at(f, keys, number, k)
            if isinstance(key, tuple):
                need = b.add(need, long_bytes(f, b.and_(key[0], const(0xFFFFFFFF))))
        self.ensure_text(header, h, need)

    def ensure_text(self, header: ir.Value, h: ir.Value, need: ir.Value, at: ir.Value | None = None) -> None:
        """Leave the kernel unless the group of hash `h` has space for that many bytes of text; it resumes at row `at`.
        """
        f, b = self.code.f, self.code.f.b
        if isinstance(need, ir.Constant):
            return
        left = b.sub(b.load(self._word(header, TEXT_END), typ=I64), b.load(self._word(header, TEXT_AT), typ=I64))
        with f.when(b.icmp_signed("<", left, need), likely=False):
            f.set_slot("full.need", need)
            f.set_slot("full.group", b.lshr(h, const(56)))
            if at is None:
                self._leave_before_run(HEAP_FULL)
            else:
                self._leave_at(at, HEAP_FULL)

    def header_of(self, h: ir.Value) -> ir.Value:
        return self._header(h)

    def tag_of(self, h: ir.Value) -> ir.Value:
        return self._tag(h)

    def _leave_for(self, h: ir.Value, status: int) -> None:
        self.code.f.set_slot("full.group", self.code.f.b.lshr(h, const(56)))
        self._leave_before_run(status)

    def _leave_before_run(self, status: int) -> None:
        self._leave_at(self.first[0] if self.first else None, status)

    def _leave_at(self, row: ir.Value | None, status: int) -> None:
        """Leave, to go on with a row; unless one before it failed, which no other call would find."""
        self.code.check_errors(ERROR, later=True)
        if row is not None:
            self.code.f.set_slot("row", row)
        self.code.f.leave(status)

    def _place_of(self, record: ir.Value) -> tuple[ir.Value, ir.Value]:
        """A record's offset in the arena, and its segment."""
        f, b = self.code.f, self.code.f.b
        offset = b.sub(b.ptrtoint(record, I64), b.ptrtoint(self.slot("arena"), I64))
        return offset, b.lshr(offset, f.slot("segment.shift"))

    def protect(self, rows: FoundRows) -> None:
        """Before records are changed: keep what segments under copy held.

        Slots: `segment.shift`; `segment.copying`, a word a segment; `copying`, whether any is; `undo.at` and
        `undo.end`, the rest of each segment's undo log; `undo.batch`. An entry is the number of the call and the
        record's place, then its bytes.
        """
        f, b, size = self.code.f, self.code.f.b, self.table.layout.size
        with f.when(b.icmp_unsigned("!=", f.load_now(f.slot("copying", PTR)), const(0)), likely=False):
            with f.loop(rows.end, start=rows.start, rare=True) as k:
                record = rows.record(f, k)
                with f.when(b.icmp_unsigned("!=", record, NULL)):
                    offset, segment = self._place_of(record)
                    copying = f.load_now(f.at(f.slot("segment.copying", PTR), segment, I64))
                    with f.when(b.icmp_unsigned("!=", copying, const(0))):
                        self._log(record, offset, segment, size)
            f.b.fence("release")

    def touch(self, record: ir.Value) -> None:
        """Mark a record's segment as changed; slot `segment.dirty`, a word a segment."""
        f, b = self.code.f, self.code.f.b
        dirty = f.at(f.slot("segment.dirty", PTR), self._place_of(record)[1], I64)
        # Not stored again: workers would take the few lines of these words from each other at every row.
        with f.when(b.icmp_unsigned("==", b.load(dirty, typ=I64), const(0)), likely=False):
            f.store(const(1), dirty)

    def _log(self, record: ir.Value, offset: ir.Value, segment: ir.Value, size: int) -> None:
        f, b = self.code.f, self.code.f.b
        tail = f.at(f.slot("undo.at", PTR), segment, I64)
        at = b.load(tail, typ=PTR)
        after = f.byte_at(at, 8 + size)
        with f.when(b.icmp_unsigned(">", b.ptrtoint(after, I64), f.load(f.slot("undo.end", PTR), segment, I64)),
                    likely=False):
            f.set_slot("full.segment", segment)
            self._leave_before_run(UNDO_FULL)
        f.store(b.or_(offset, f.slot("undo.batch")), at)
        f.call("llvm.memcpy.p0.p0.i64", ir.VoidType(), [f.byte_at(at, 8), record, const(size), const(0, I1)])
        f.store(after, tail)


# --- reading


def stored_env(code: Code, table: StoredTable, start: ir.Value) -> Env:
    """The columns of stored records, by the pointers of slot `pointers`; of a deleted one all values are null."""
    f, b, layout = code.f, code.f.b, table.layout

    def record(row: Row) -> ir.Value:
        return f.load(f.slot("pointers", PTR), b.add(start, row.offset("in")), PTR)

    def column(name: str, dtype: DType, bit: int, hidden: bool, row: Row) -> Value:
        base = record(row)
        head = b.load(base, typ=I64)
        value = field_value(code, f.byte_at(base, layout.offset(name)), Read(name, dtype, "field", nulls=False), None)
        return Value(value.data, b.icmp_unsigned("==", b.and_(head, const(bit | hidden)), const(0)))

    env: dict[str, Binding] = {}
    for k, key in enumerate(table.keys):
        env[key.name] = Binding(partial(column, f"key{k}", key.dtype, table.key_null_bit(k), False))
    for k, value in enumerate(table.values):
        env[value.name] = Binding(partial(column, f"value{k}", value.dtype, table.null_bit(k), bool(TOMB)))
    return env
