"""Sinks of the way to disk and back: records that leave memory, and blocks of runs that are opened.

Records are evicted in two steps; merges wait for the first one only. It scans the chunks of the groups and copies
retained records to new chunks and into the emptied index. The second step, on the thread that writes the run, walks the
old index. That is ordered by the first bits of its hashes, so evicted records come nearly
sorted: each is moved back past the few with a greater hash that lie in its bucket, or that came from the end of the
index to its beginning. No record is looked for.
"""

from __future__ import annotations

from llvmlite import ir

from scalein.ir.store_kernels import Evict, ReadBlocks, Retain
from scalein.ir.tables import StoredTable
from scalein.layout import (
    ACCESSES_SHIFT,
    ADDRESS_BITS,
    ARENA_FULL,
    BUCKET_WORDS,
    BUCKETS,
    KEY_NULLS,
    MASK,
    MAX_ACCESSES,
    ROOM,
    SHIFT,
)
from scalein.llvm_backend.block import PADDED, Block
from scalein.llvm_backend.code import Code
from scalein.llvm_backend.fn import I1, I32, I64, PTR, const
from scalein.llvm_backend.keys import array_type, halves, hash_words
from scalein.llvm_backend.store_bulk import sum_of
from scalein.llvm_backend.store_index import StoreIndex
from scalein.llvm_backend.store_values import header_word

HEAD = 16  # bytes of a block before its records


def lower_retain(code: Code, sink: Retain, block: Block, start: ir.Value) -> None:
    """Frame: `extents`, where the records of groups are: address and number; `least`, accesses from which on they are
    retained; `drop`, flags of those to discard; `leaving`, to which the number of all others is added. The index of the
    groups is empty.

    The kernel leaves for a chunk before it has done anything with the record that needs it, which is number `done` of
    its extent.
    """
    f, b, size = code.f, code.f.b, sink.table.layout.size
    index = StoreIndex(code, sink.table, "table")
    with f.loop(block.count, rare=True) as k:
        number = b.add(start, k)
        first, count = (f.load(f.slot("extents", PTR), b.add(b.shl(number, const(1)), const(word)), typ)
                        for word, typ in enumerate((PTR, I64)))
        with f.loop(count, start=f.get_slot("done"), rare=True) as i:
            record = f.byte_at(first, b.mul(i, const(size)))
            index._check_record(record)
            head = b.load(record, typ=I64)
            accesses = b.and_(b.lshr(head, const(ACCESSES_SHIFT)), const(MAX_ACCESSES))
            stays = b.icmp_unsigned(">=", accesses, f.slot("least"))
            with f.when(stays):
                _retain(code, sink, index, record, head, number, i)
            leaves = b.and_(b.not_(stays), b.icmp_unsigned("==", b.and_(head, f.slot("drop")), const(0)))
            f.set_slot("leaving", b.add(f.get_slot("leaving"), b.zext(leaves, I64)))
        f.set_slot("done", const(0))


def lower_evict(code: Code, sink: Evict, block: Block, start: ir.Value) -> None:
    """Frame: `words`, the old index words of groups; `least`, accesses from which on records are retained; `drop`,
    flags of those to discard; `out.hashes` and `out.pointers`, with space for all, and `out.count`.
    """
    f, b = code.f, code.f.b
    index = StoreIndex(code, sink.table, "table")
    numbers = f.scratch(I64, PADDED, "numbers")
    used = f.var(I64, const(0))
    with f.loop(block.count, rare=True) as k:
        number = b.add(start, k)
        word = f.load(f.slot("words", PTR), number, I64)
        index._prefetch(index._record(word))
        f.store(number, numbers, used.get())
        used.set(b.add(used.get(), b.zext(b.icmp_unsigned("!=", word, const(0)), I64)))
    with f.loop(used.get(), rare=True) as k:
        record = index._record(f.load(f.slot("words", PTR), f.load(numbers, k, I64), I64))
        index._check_record(record)
        head = b.load(record, typ=I64)
        accesses = b.and_(b.lshr(head, const(ACCESSES_SHIFT)), const(MAX_ACCESSES))
        leaves = b.icmp_unsigned("<", accesses, f.slot("least"))
        with f.when(b.and_(leaves, b.icmp_unsigned("==", b.and_(head, f.slot("drop")), const(0)))):
            _append_sorted(code, _hash(code, sink.table, record), record)


def _hash(code: Code, table: StoredTable, record: ir.Value) -> ir.Value:
    f, b = code.f, code.f.b
    words = [word for k, key in enumerate(table.keys)
             for word in halves(f, b.load(f.byte_at(record, table.layout.offset(f"key{k}")),
                                          typ=array_type(key.dtype)))]  # fmt: skip
    nullable = any(key.nullable for key in table.keys)
    return hash_words(f, words, b.lshr(b.load(record, typ=I64), const(KEY_NULLS)) if nullable else None)


def _append_sorted(code: Code, h: ir.Value, record: ir.Value) -> None:
    f, b = code.f, code.f.b
    hashes, pointers = f.slot("out.hashes", PTR), f.slot("out.pointers", PTR)
    count = f.get_slot("out.count")
    at = f.var(I64, count)
    with f.forever() as back:
        back.stop_if(b.icmp_signed("<=", at.get(), const(0)))
        before = b.sub(at.get(), const(1))
        other = f.load(hashes, before, I64)
        back.stop_if(b.icmp_unsigned("<=", other, h))
        f.store(other, hashes, at.get())
        f.store(f.load(pointers, before, I64), pointers, at.get())
        at.set(before)
    f.store(h, hashes, at.get())
    f.store(record, pointers, at.get())
    f.set_slot("out.count", b.add(count, const(1)))


def _retain(code: Code, sink: Retain, index: StoreIndex, record: ir.Value, head: ir.Value, number: ir.Value,
            done: ir.Value) -> None:
    """Copy a record with half of its accesses, so that one that was hot is not retained for ever."""
    f, b, size = code.f, code.f.b, sink.table.layout.size
    h = _hash(code, sink.table, record)
    header = index.header_of(h)
    group = b.lshr(h, const(56))

    def leave() -> None:
        f.set_slot("full.group", group)
        f.set_slot("row", number)
        f.set_slot("done", done)
        f.leave(ARENA_FULL)

    at, target = index.next_record(header, group, leave)
    f.call("llvm.memcpy.p0.p0.i64", ir.VoidType(), [target, record, const(size), const(0, I1)])
    other_bits = b.and_(head, const(~(MAX_ACCESSES << ACCESSES_SHIFT)))
    halved = b.and_(b.lshr(head, const(1)), const(MAX_ACCESSES >> 1 << ACCESSES_SHIFT))
    f.store(b.or_(other_bits, halved), target)
    f.store(f.byte_at(target, size), at)
    tag = index.tag_of(h)
    buckets = b.load(header_word(f, header, BUCKETS), typ=PTR)
    place = f.var(I64, b.mul(b.lshr(tag, b.load(header_word(f, header, SHIFT), typ=I64)), const(BUCKET_WORDS)))
    last = b.add(b.mul(b.load(header_word(f, header, MASK), typ=I64), const(BUCKET_WORDS)), const(BUCKET_WORDS - 1))
    with f.forever() as probe:
        probe.stop_if(b.icmp_unsigned("==", f.load(buckets, place.get(), I64), const(0)))
        place.set(b.and_(b.add(place.get(), const(1)), last))
    offset = b.sub(b.ptrtoint(target, I64), b.ptrtoint(f.slot("table.arena", PTR), I64))
    f.store(b.or_(b.shl(tag, const(ADDRESS_BITS)), b.lshr(offset, const(3))), buckets, place.get())
    room = header_word(f, header, ROOM)
    f.store(b.sub(b.load(room, typ=I64), const(1)), room)


def lower_read_blocks(code: Code, sink: ReadBlocks, block: Block, start: ir.Value) -> None:
    """Frame: `pieces`, of several runs, with 8 words each: where its blocks lie, their number, the run's id, where in
    it they are from, where hashes and pointers go, how many there are, and whether all is in order, which is written.
    A block has `block` bytes and at most `per` records. Those with hashes from `least` to `greatest` are wanted.
    """
    f, b, size = code.f, code.f.b, sink.table.layout.size
    with f.loop(block.count, rare=True) as k:
        entry = f.at(f.slot("pieces", PTR), b.mul(b.add(start, k), const(8)), I64)
        source, hashes, pointers = (f.load(entry, const(word), PTR) for word in (0, 4, 5))
        blocks, id, offset = (f.load(entry, const(word), I64) for word in (1, 2, 3))
        count = f.var(I64, const(0))
        good = f.var(I1, const(1, I1))
        number = f.var(I64, const(0))
        with f.forever() as each:
            each.stop_if(b.icmp_unsigned(">=", number.get(), blocks))
            before = b.mul(number.get(), f.slot("block"))
            place = f.byte_at(source, before)
            stored = f.load(place, const(1), I64)
            f.store(const(0), place, const(1))
            found = sum_of(code, place, f.slot("block"), b.xor(id, b.add(offset, before)))
            f.store(stored, place, const(1))
            records, text = (b.zext(f.load(place, const(half), I32), I64) for half in range(2))
            good.set(b.and_(b.icmp_unsigned("==", found, stored), b.icmp_unsigned("==", text, const(0))))
            good.set(b.and_(good.get(), b.icmp_unsigned("<", b.sub(records, const(1)), f.slot("per"))))
            each.stop_if(b.not_(good.get()))
            with f.loop(records, rare=True) as i:
                record = f.byte_at(place, b.add(b.mul(i, const(size)), const(HEAD)))
                h = _hash(code, sink.table, record)
                f.store(h, hashes, count.get())
                f.store(record, pointers, count.get())
                wanted = b.and_(b.icmp_unsigned(">=", h, f.slot("least")), b.icmp_unsigned("<=", h, f.slot("greatest")))
                count.set(b.add(count.get(), b.zext(wanted, I64)))
            number.set(b.add(number.get(), const(1)))
        f.store(count.get(), entry, const(6))
        f.store(b.zext(good.get(), I64), entry, const(7))
