"""Probing a table: the index of `layout.py` and the records it leads to.

Rows go in runs of 64: bucket addresses and their prefetch, tag compare and prefetch of the record,
key compare; so the misses of a run overlap. Most rows find their record by the first tag that
matches in their home bucket. The rest take the slow path: walk on through the following buckets,
and insert if an empty word comes first.

Inserting only appends a record that means "no row yet". A kernel that must leave (index or arena
full) before it has updated anything can therefore run the same block again. The load factor is
`layout.LOAD_SIXTEENTHS` (a store's is in `state/budget.py`); tables double in `exec/tables.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from llvmlite import ir

from scalein.ir.tables import StoredTable, Table
from scalein.layout import (
    ADDRESS_BITS,
    ADDRESS_UNIT,
    ARENA_FULL,
    BUCKET_WORDS,
    BUCKETS,
    DONE,
    INDEX_FULL,
    INLINE_BYTES,
    MASK,
    ROOM,
    SHIFT,
    TAG_BITS,
)
from scalein.llvm_backend.block import PADDED
from scalein.llvm_backend.code import Code
from scalein.llvm_backend.fn import I1, I8, I64, PTR, Fn, const
from scalein.llvm_backend.keys import KeyBlock, key_at, same_string

if TYPE_CHECKING:
    from scalein.llvm_backend.stage import Lowered

OVERLAPPED_ROWS = 64  # rows whose misses overlap; 32 to 128 are alike, 1,024 a quarter slower
WORDS = ir.VectorType(I64, BUCKET_WORDS)
NULL = ir.Constant(PTR, None)


@dataclass(frozen=True, slots=True)
class Index:
    """Frame slots of one table, by prefix, so that a kernel may probe several."""

    code: Code
    table: Table | StoredTable
    prefix: str
    number: int = 0  # the value of slot `full` when this table must grow
    header_words: ClassVar[int] = 4  # of a key group: buckets, shift, mask, room

    def slot(self, name: str, typ: ir.Type = PTR) -> ir.Value:
        return self.code.f.slot(f"{self.prefix}.{name}", typ)

    # --- hash -> group header, bucket, tag

    def _header(self, h: ir.Value) -> ir.Value:
        f = self.code.f
        group = f.b.lshr(h, const(56))
        return f.at(self.slot("groups"), f.b.mul(group, const(self.header_words)), I64)

    def _tag(self, h: ir.Value) -> ir.Value:
        b = self.code.f.b
        return b.and_(b.lshr(h, const(32)), const((1 << TAG_BITS) - 1))

    def _word(self, header: ir.Value, number: int) -> ir.Value:
        """Where a word of a key group's header is."""
        return self.code.f.at(header, const(number), I64)

    def _bucket(self, header: ir.Value, number: ir.Value) -> ir.Value:
        f = self.code.f
        buckets = f.b.load(self._word(header, BUCKETS), typ=PTR)
        return f.at(buckets, f.b.mul(number, const(BUCKET_WORDS)), I64)

    def _home(self, header: ir.Value, tag: ir.Value) -> ir.Value:
        b = self.code.f.b
        return b.lshr(tag, b.load(self._word(header, SHIFT), typ=I64))

    def _matches(self, bucket: ir.Value, tag: ir.Value) -> tuple[ir.Value, ir.Value]:
        """Bit masks of the words with this tag, and of the empty words."""
        b = self.code.f.b
        words = b.load(bucket, typ=WORDS, align=64)
        tags = b.lshr(words, ir.Constant(WORDS, [ADDRESS_BITS] * BUCKET_WORDS))
        wanted = b.insert_element(ir.Constant(WORDS, ir.Undefined), tag, const(0, ir.IntType(32)))
        wanted = b.shuffle_vector(wanted, ir.Constant(WORDS, ir.Undefined),
                                  ir.Constant(ir.VectorType(ir.IntType(32), BUCKET_WORDS), [0] * BUCKET_WORDS))
        empty = b.icmp_unsigned("==", words, ir.Constant(WORDS, [0] * BUCKET_WORDS))
        hits = b.and_(b.icmp_unsigned("==", tags, wanted), b.not_(empty))
        return b.bitcast(hits, I8), b.bitcast(empty, I8)

    def _record(self, word: ir.Value) -> ir.Value:
        f = self.code.f
        address = f.b.and_(word, const((1 << ADDRESS_BITS) - 1))
        return f.byte_at(self.slot("arena"), f.b.mul(address, const(ADDRESS_UNIT)))

    # --- blocks

    def find(self, keys: KeyBlock, count: ir.Value, slices: ir.Value | None, insert: bool) -> ir.Value:
        """Pointers to the rows' records: scratch of PADDED pointers; null where there is none."""
        f, b = self.code.f, self.code.f.b
        records = f.scratch(PTR, PADDED, "records")
        buckets = f.scratch(PTR, OVERLAPPED_ROWS, "buckets")
        with f.loop(count, step=OVERLAPPED_ROWS) as start:
            size = f.min(b.sub(count, start), const(OVERLAPPED_ROWS))
            with f.loop(size) as i:
                h = f.load(keys.hashes, b.add(start, i), I64)
                header = self._header(h)
                bucket = self._bucket(header, self._home(header, self._tag(h)))
                f.prefetch(bucket, is_near=True)
                f.store(bucket, buckets, i)
            with f.loop(size) as i:
                k = b.add(start, i)
                self._first_candidate(f.load(buckets, i, PTR), f.load(keys.hashes, k, I64), f.at(records, k, PTR))
            with f.loop(size) as i:
                k = b.add(start, i)
                self._confirm_or_search(keys, k, slices, f.at(records, k, PTR), insert)
        return records

    def _first_candidate(self, bucket: ir.Value, h: ir.Value, place: ir.Value) -> ir.Value:
        """Put the first record of a bucket that a hash may mean into `place`, or null; gives whether there is none."""
        f, b = self.code.f, self.code.f.b
        hits, _ = self._matches(bucket, self._tag(h))
        position = b.and_(b.zext(b.cttz(hits, const(0, I1)), I64), const(BUCKET_WORDS - 1))
        record = self._record(f.load(bucket, position, I64))
        none = b.icmp_unsigned("==", hits, const(0, I8))
        self._prefetch(record)  # of an empty bucket: the arena's start, which costs nothing
        f.store(b.select(none, NULL, record), place)
        return none

    def _prefetch(self, record: ir.Value) -> None:
        self.code.f.prefetch(record, is_near=True)

    def _check_record(self, record: ir.Value) -> None:
        """Safe mode: the record lies in the arena."""
        f, b = self.code.f, self.code.f.b
        if f.safe:
            offset = b.sub(b.ptrtoint(record, I64), b.ptrtoint(self.slot("arena"), I64))
            end = b.add(offset, const(self.table.layout.size))
            self.code.check(f"a record of {self.prefix}", b.icmp_signed(">=", offset, const(0)),
                            b.icmp_signed("<=", end, self._end()))

    def _end(self) -> ir.Value:
        """Where the arena's records end."""
        return self.code.f.get_slot(f"{self.prefix}.used")

    def _confirm_or_search(self, keys: KeyBlock, k: ir.Value, slices: ir.Value | None, place: ir.Value,
                           insert: bool) -> None:
        """Keep the candidate in `place` if its key is the row's, else look on."""
        f, b = self.code.f, self.code.f.b
        record = b.load(place, typ=PTR)
        good = f.var(I1, b.icmp_unsigned("!=", record, NULL))
        with f.when(good.get()):
            self._check_record(record)
            good.set(self._same_key(record, keys, k, slices))
        with f.when(b.not_(good.get()), likely=False):
            f.store(self._search(keys, k, slices, insert), place)

    def _same_key(self, record: ir.Value, keys: KeyBlock, k: ir.Value, slices: ir.Value | None) -> ir.Value:
        f, b, layout = self.code.f, self.code.f.b, self.table.layout
        tests: list[ir.Value | None] = [self._same_nulls(record, keys, k)]
        if slices is not None:
            stored = b.load(f.byte_at(record, layout.offset("slice")), typ=I64)
            tests.append(b.icmp_unsigned("==", stored, f.load(slices, k, I64)))
        for number in range(len(keys.types)):
            place = f.byte_at(record, layout.offset(f"key{number}"))
            key = key_at(f, keys, number, k)
            if isinstance(key, tuple):
                tests.append(same_string(self.code, place, *key))
            else:
                tests.append(b.icmp_unsigned("==", b.load(place, typ=key.type), key))
        return f.all_of(*tests) or const(1, I1)

    def _same_nulls(self, record: ir.Value, keys: KeyBlock, k: ir.Value) -> ir.Value | None:
        f, b = self.code.f, self.code.f.b
        if keys.nulls is None:
            return None
        stored = b.load(f.byte_at(record, self.table.layout.offset("nulls")), typ=I64)
        return b.icmp_unsigned("==", stored, f.load(keys.nulls, k, I64))

    def _search(self, keys: KeyBlock, k: ir.Value, slices: ir.Value | None, insert: bool) -> ir.Value:
        """Walk the buckets from the key's home until its record or an empty word."""
        f, b = self.code.f, self.code.f.b
        h = f.load(keys.hashes, k, I64)
        header, tag = self._header(h), self._tag(h)
        number = f.var(I64, self._home(header, tag))
        found = f.var(PTR, NULL)
        with f.forever() as walk:
            bucket = self._bucket(header, number.get())
            hits, empty = self._matches(bucket, tag)
            left = f.var(I8, hits)
            with f.forever() as candidates:
                candidates.stop_if(b.icmp_unsigned("==", left.get(), const(0, I8)))
                position = b.zext(b.cttz(left.get(), const(0, I1)), I64)
                record = self._record(f.load(bucket, position, I64))
                self._check_record(record)
                with f.when(self._same_key(record, keys, k, slices)):
                    found.set(record)
                    left.set(const(0, I8))
                with f.when(b.icmp_unsigned("!=", left.get(), const(0, I8))):
                    left.set(b.and_(left.get(), b.sub(left.get(), const(1, I8))))
            walk.stop_if(b.icmp_unsigned("!=", found.get(), NULL))
            with f.when(b.icmp_unsigned("!=", empty, const(0, I8))):
                if insert:
                    position = b.zext(b.cttz(empty, const(0, I1)), I64)
                    found.set(self._insert(header, f.at(bucket, position, I64), tag, keys, k, slices))
                walk.stop()
            number.set(b.and_(b.add(number.get(), const(1)), b.load(self._word(header, MASK), typ=I64)))
        return found.get()

    def _insert(self, header: ir.Value, word: ir.Value, tag: ir.Value, keys: KeyBlock, k: ir.Value,
                slices: ir.Value | None) -> ir.Value:
        """Append a new record; leaves the kernel if its key group's table is full."""
        f, b, layout = self.code.f, self.code.f.b, self.table.layout
        room = self._word(header, ROOM)
        free = b.load(room, typ=I64)
        with f.when(b.icmp_signed("<=", free, const(0)), likely=False):
            self._leave(INDEX_FULL)
        if any(dtype.is_bytes for dtype in keys.types):
            self._ensure_heap(keys, k)
        used = f.get_slot(f"{self.prefix}.used")
        record = f.byte_at(self.slot("arena"), used)
        template = self.code.text(layout.template)
        f.call("llvm.memcpy.p0.p0.i64", ir.VoidType(), [record, template, const(layout.size), const(0, I1)])
        f.store(f.load(keys.hashes, k, I64), f.byte_at(record, layout.offset("hash")))
        if keys.nulls is not None:
            f.store(f.load(keys.nulls, k, I64), f.byte_at(record, layout.offset("nulls")))
        if slices is not None:
            f.store(f.load(slices, k, I64), f.byte_at(record, layout.offset("slice")))
        for number in range(len(keys.types)):
            place = f.byte_at(record, layout.offset(f"key{number}"))
            key = key_at(f, keys, number, k)
            if isinstance(key, tuple):
                self._store_string(place, *key)
            else:
                f.store(key, place)
        f.store(b.sub(free, const(1)), room)
        f.store(b.or_(b.shl(tag, const(ADDRESS_BITS)), b.lshr(used, const(3))), word)
        f.set_slot(f"{self.prefix}.used", b.add(used, const(layout.size)))
        return record

    def _ensure_heap(self, keys: KeyBlock, k: ir.Value) -> None:
        """Leave the kernel unless the heap has space for all long strings of a row's key."""
        f, b = self.code.f, self.code.f.b
        need: ir.Value = const(0)
        for number in range(len(keys.types)):
            key = key_at(f, keys, number, k)
            if isinstance(key, tuple):
                size = b.and_(key[0], const(0xFFFFFFFF))
                is_long = b.icmp_unsigned(">", size, const(INLINE_BYTES))
                need = b.add(need, b.select(is_long, size, const(0)))
        with f.when(b.icmp_signed("<", f.get_slot(f"{self.prefix}.heap_left"), need), likely=False):
            f.set_slot(f"{self.prefix}.heap_need", need)
            self._leave(ARENA_FULL)

    def _store_string(self, place: ir.Value, first: ir.Value, second: ir.Value) -> None:
        """A short string as it is; a long one is copied to the heap first."""
        f, b = self.code.f, self.code.f.b
        f.store(first, place)
        f.store(second, f.byte_at(place, 8))
        size = b.and_(first, const(0xFFFFFFFF))
        with f.when(b.icmp_unsigned(">", size, const(INLINE_BYTES))):
            target = f.get_slot(f"{self.prefix}.heap", PTR)
            source = b.load(f.byte_at(place, 8), typ=PTR)
            f.call("llvm.memcpy.p0.p0.i64", ir.VoidType(), [target, source, size, const(0, I1)])
            f.store(target, f.byte_at(place, 8))
            f.set_slot(f"{self.prefix}.heap", f.byte_at(target, size))
            f.set_slot(f"{self.prefix}.heap_left", b.sub(f.get_slot(f"{self.prefix}.heap_left"), size))

    def ensure_arena(self, rows: int) -> None:
        """Leave the kernel unless the arena has space for that many new records."""
        f = self.code.f
        used = f.get_slot(f"{self.prefix}.used")
        end = f.b.add(used, const(rows * self.table.layout.size))
        with f.when(f.b.icmp_signed(">", end, self.slot("arena_size", I64)), likely=False):
            self._leave(ARENA_FULL)

    def _leave(self, status: int) -> None:
        self.code.f.set_slot("full", const(self.number))
        self.code.f.leave(status)


def place_in(f: Fn, table: Table, record: ir.Value, ring: ir.Value | None = None) -> Callable[[str], ir.Value]:
    """Addresses of a record's fields; `ring` is the byte offset of the slice that accumulators mean."""
    layout = table.layout

    def place(name: str) -> ir.Value:
        base = record
        if ring is not None and name.startswith("acc"):
            base = f.byte_at(record, ring)
        return f.byte_at(base, f.named_constant(name, layout.offset))

    return place


def lower_doubling() -> Lowered:
    """Kernel `grow`: tables of key groups into ones of twice the size, a row of slot `moves` each: the old table, how
    many buckets it has, the new table, its shift and mask.

    Every word goes to one of two buckets by its tag's next bit; no record is looked at. Words keep their order within a
    bucket; where a bucket overflows, the word goes on to the next one, as it did before.
    """
    from scalein.llvm_backend.stage import Lowered

    f = Fn("grow")
    b = f.b
    moves = f.slot("moves", PTR)
    with f.loop(f.slot("count"), rare=True) as k:
        row = b.mul(k, const(5))
        old, new = (f.load(moves, b.add(row, const(at)), PTR) for at in (0, 2))
        buckets, shift, mask = (f.load(moves, b.add(row, const(at)), I64) for at in (1, 3, 4))
        last = b.add(b.mul(mask, const(BUCKET_WORDS)), const(BUCKET_WORDS - 1))
        with f.loop(b.mul(buckets, const(BUCKET_WORDS)), rare=True) as i:
            word = f.load(old, i, I64)
            with f.when(b.icmp_unsigned("!=", word, const(0))):
                tag = b.lshr(word, const(ADDRESS_BITS))
                place = f.var(I64, b.mul(b.lshr(tag, shift), const(BUCKET_WORDS)))
                with f.forever() as probe:
                    probe.stop_if(b.icmp_unsigned("==", f.load(new, place.get(), I64), const(0)))
                    following = b.add(place.get(), const(1))
                    place.set(b.select(b.icmp_signed(">", following, last), const(0), following))
                f.store(word, new, place.get())
    b.ret(const(DONE))
    frame = f.finish()
    return Lowered("grow", f.text(), frame, (), (), ())
