"""Sinks of the state store: rows into stored records, stored records into others, and where a key's record is.

A few rows at a time are found, then protected (`StoreIndex.protect`), then changed. A kernel that leaves before it has
changed anything of them does them again; one that runs out of space for text half-way resumes at that row.
"""

from __future__ import annotations

from llvmlite import ir

from scalein.ir.stages import Read
from scalein.ir.store_kernels import CombineRecords, HashKeys, Lookup, MergeRecords, SeekHashes, Upsert
from scalein.ir.tables import StoredTable
from scalein.layout import ACCESSES_SHIFT, ERROR, FRESH, KEY_NULLS, MAX_ACCESSES, PARTIAL, TOMB, UNCHANGED, VALUE_NULLS
from scalein.llvm_backend.block import PADDED, Block, keep, rows
from scalein.llvm_backend.code import Code
from scalein.llvm_backend.exprs import lower_expr
from scalein.llvm_backend.fn import I1, I64, PTR, const
from scalein.llvm_backend.hash_index import NULL
from scalein.llvm_backend.keys import KeyBlock, array_type, hash_words, key_array, key_block
from scalein.llvm_backend.readers import field_value
from scalein.llvm_backend.sinks.merge import copy_key
from scalein.llvm_backend.store_index import StoreIndex
from scalein.llvm_backend.store_values import ValuePlace, count, is_set, long_bytes, update
from scalein.llvm_backend.values import Env, Row, Str, Value

_FLAGS = (1 << ACCESSES_SHIFT) - 1
_KEYS = ~((1 << KEY_NULLS) - 1) & (1 << 64) - 1  # bits of a record's head that belong to its key

# What a newer record does to an older one's value, and an older one to a newer one's, by what rows did to the newer.
_NEWER = {"count": "sum"}
_OLDER = {"count": "sum", "first": "last", "last": "first", "replace": UNCHANGED, UNCHANGED: "replace"}


def lower_upsert(code: Code, sink: Upsert, block: Block, env: Env, start: ir.Value) -> None:
    f = code.f
    index = StoreIndex(code, sink.table, "table", only_hidden=sink.delete)
    keys = key_block(code, block, env, sink.keys, any(key.nullable for key in sink.keys))
    code.check_errors(ERROR)
    if sink.owned:
        block = keep(code, block, lambda row: _is_mine(code, f.load(keys.hashes, row.k, I64)))
        _pick(code, keys, block)

    def number(k: ir.Value) -> ir.Value:
        return f.b.add(start, block.row(f, k).offset("in"))

    with index.found_rows(keys, block.count, number) as rows:
        index.protect(rows)
        with f.loop(rows.end, start=rows.start) as k:
            record = rows.record(f, k)
            if sink.delete:
                with f.when(f.b.icmp_unsigned("!=", record, NULL)):
                    index.touch(record)
                    head = f.b.and_(f.b.load(record, typ=I64), const(_KEYS))
                    f.store(f.b.or_(head, const(_all_null(sink.table) | TOMB)), record)
            else:
                index.touch(record)
                _merge_row(code, sink, index, block.row(f, k), env, record, f.load(keys.hashes, k, I64), number(k))
    code.check_errors(ERROR)
    _report_progress(code, start)


def _report_progress(code: Code, start: ir.Value) -> None:
    """Announce to the segment copier that a block which began before the copy has ended."""
    code.f.store_now(code.f.b.add(start, const(1)), code.f.slot_ptr("progress"))


def _is_mine(code: Code, h: ir.Value) -> ir.Value:
    """Whether this worker serves the key group of a hash: group * workers // 256 == worker."""
    f = code.f
    share = f.b.lshr(f.b.mul(f.b.lshr(h, const(56)), f.slot("owner.workers")), const(8))
    return f.b.icmp_unsigned("==", share, f.slot("owner.worker"))


def _pick(code: Code, keys: KeyBlock, block: Block) -> None:
    """Move the keys of a block's live rows to the front; row numbers ascend, so none is overwritten before it moved."""
    f, b = code.f, code.f.b
    arrays = [(keys.hashes, I64, 1)] if keys.nulls is None else [(keys.hashes, I64, 1), (keys.nulls, I64, 1)]
    arrays += [(data, array_type(t), 2 if t.is_bytes else 1) for data, t in zip(keys.data, keys.types, strict=True)]
    with rows(code, block) as row:
        source = row.offset("in")
        for array, typ, words in arrays:
            for word in range(words):
                old, new = (b.add(b.mul(k, const(words)), const(word)) for k in (source, row.k))
                f.store(f.load(array, old, typ), array, new)


def _all_null(table: StoredTable) -> int:
    return ((1 << len(table.values)) - 1) << VALUE_NULLS


def _merge_row(code: Code, sink: Upsert, index: StoreIndex, row: Row, env: Env, record: ir.Value, h: ir.Value,
               number: ir.Value) -> None:
    f, b, table = code.f, code.f.b, sink.table
    given = [None if item is None else lower_expr(code, item, env, row) for item in sink.items]
    header = index.header_of(h)
    index.ensure_text(header, h, _text_bytes(code, given), number)
    head = b.load(record, typ=I64)
    gone = is_set(f, head, TOMB)
    head = b.select(gone, b.or_(b.and_(head, const(_KEYS)), const(_all_null(table))), head)
    for k, (function, value) in enumerate(zip(sink.functions, given, strict=True)):
        if function == UNCHANGED:
            continue
        place = _value_place(code, table, k, record, header)
        bit = table.null_bit(k)
        is_null = is_set(f, head, bit)
        if function == "count":
            after = count(place, is_null, None if value is None else value.valid)
        else:
            assert value is not None
            after = update(function, place, is_null, value)
        head = b.or_(b.and_(head, const(~bit)), b.select(after, const(bit), const(0)))
    if all(function == "replace" for function in sink.functions):  # nothing older counts any more
        head = b.and_(head, const(~PARTIAL))
    accesses = b.and_(b.lshr(head, const(ACCESSES_SHIFT)), const(MAX_ACCESSES))
    more = b.select(b.icmp_unsigned("<", accesses, const(MAX_ACCESSES)), const(1 << ACCESSES_SHIFT), const(0))
    f.store(b.add(head, more), record)


def _text_bytes(code: Code, given: list[Value | None]) -> ir.Value:
    """Bytes that values may take outside of their record, at most."""
    f = code.f
    total: ir.Value = const(0)
    for value in given:
        if value is not None and isinstance(value.data, Str):
            total = f.b.add(total, long_bytes(f, value.data.size))
    return total


def lower_lookup(code: Code, sink: Lookup, block: Block, env: Env, start: ir.Value) -> None:
    f = code.f
    index = StoreIndex(code, sink.table, "table")
    keys = key_block(code, block, env, sink.keys, any(key.nullable for key in sink.keys))
    code.check_errors(ERROR)
    records = index.find(keys, block.count, None, insert=False)
    with rows(code, block) as row:
        at = f.b.add(start, row.offset("in"))
        f.store(f.load(records, row.k, PTR), f.slot("found.records", PTR), at)
        f.store(f.load(keys.hashes, row.k, I64), f.slot("found.hashes", PTR), at)


# --- records


def _pointer(code: Code, start: ir.Value, k: ir.Value) -> ir.Value:
    return code.f.load(code.f.slot("pointers", PTR), code.f.b.add(start, k), PTR)


def _keys_of(code: Code, table: StoredTable, block: Block, start: ir.Value) -> KeyBlock:
    """Canonical keys of the records that pointers lead to, and their hashes."""
    f = code.f
    types = tuple(key.dtype for key in table.keys)
    arrays = tuple(key_array(f, k, t) for k, t in enumerate(types))
    nulls = f.scratch(I64, PADDED, "nulls") if any(key.nullable for key in table.keys) else None
    hashes = f.scratch(I64, PADDED, "hashes")
    with f.loop(block.count) as k:
        f.prefetch(_pointer(code, start, k))
    with f.loop(block.count) as k:
        f.store(_take_key(code, table, _pointer(code, start, k), arrays, nulls, k), hashes, k)
    return KeyBlock(types, arrays, nulls, hashes)


def _take_key(code: Code, table: StoredTable, record: ir.Value, arrays: tuple[ir.Value, ...], nulls: ir.Value | None,
              k: ir.Value) -> ir.Value:
    """Put a record's key into the arrays; gives its hash."""
    f, b = code.f, code.f.b
    words = [word for number, key in enumerate(table.keys)
             for word in copy_key(code, f.byte_at(record, table.layout.offset(f"key{number}")), key.dtype,
                                  arrays[number], k)]
    null_bits = None
    if nulls is not None:
        null_bits = b.lshr(b.load(record, typ=I64), const(KEY_NULLS))
        f.store(null_bits, nulls, k)
    return hash_words(f, words, null_bits)


def lower_hash_keys(code: Code, sink: HashKeys, block: Block, start: ir.Value) -> None:
    f = code.f
    keys = _keys_of(code, sink.table, block, start)
    with f.loop(block.count) as k:
        f.store(f.load(keys.hashes, k, I64), f.slot("found.hashes", PTR), f.b.add(start, k))


def lower_seek_hashes(code: Code, sink: SeekHashes, block: Block, start: ir.Value) -> None:
    """Frame, a row each: `pointers` to the first of `counts` records, `hashes`; `found.records`, `found.counts`.

    Whatever order the records are in, nothing but these is looked at.
    """
    f, b, table = code.f, code.f.b, sink.table
    arrays = tuple(key_array(f, k, key.dtype) for k, key in enumerate(table.keys))
    nulls = f.scratch(I64, PADDED, "nulls") if any(key.nullable for key in table.keys) else None
    with f.loop(block.count) as k:
        at = b.add(start, k)
        first, h = _pointer(code, start, k), f.load(f.slot("hashes", PTR), at, I64)
        count = f.load(f.slot("counts", PTR), at, I64)

        def place(number: ir.Value, first: ir.Value = first) -> ir.Value:
            return f.byte_at(first, b.mul(number, const(table.layout.size)))

        low, high = f.var(I64, const(0)), f.var(I64, count)
        with f.forever() as search:
            search.stop_if(b.icmp_unsigned(">=", low.get(), high.get()))
            middle = b.lshr(b.add(low.get(), high.get()), const(1))
            found = _take_key(code, table, place(middle), arrays, nulls, const(0))
            is_less = b.icmp_unsigned("<", found, h)
            low.set(b.select(is_less, b.add(middle, const(1)), low.get()))
            high.set(b.select(is_less, high.get(), middle))
        with f.forever() as same:  # `high` ends after the last
            same.stop_if(b.icmp_unsigned(">=", high.get(), count))
            same.stop_if(b.icmp_unsigned("!=", _take_key(code, table, place(high.get()), arrays, nulls, const(0)), h))
            high.set(b.add(high.get(), const(1)))
        f.store(place(low.get()), f.slot("found.records", PTR), at)
        f.store(b.sub(high.get(), low.get()), f.slot("found.counts", PTR), at)


def lower_merge_records(code: Code, sink: MergeRecords, block: Block, start: ir.Value) -> None:
    f = code.f
    index = StoreIndex(code, sink.table, "table", flags=FRESH)
    keys = _keys_of(code, sink.table, block, start)
    with index.found_rows(keys, block.count, lambda k: f.b.add(start, k)) as rows:
        index.protect(rows)
        with f.loop(rows.end, start=rows.start) as k:
            record = rows.record(f, k)
            index.touch(record)
            _absorb(code, sink, index, record, _pointer(code, start, k),
                    f.load(keys.hashes, k, I64), f.b.add(start, k))
    code.check_errors(ERROR)
    _report_progress(code, start)


def _absorb(code: Code, sink: MergeRecords, index: StoreIndex, record: ir.Value, other: ir.Value, h: ir.Value,
            number: ir.Value) -> None:
    f, b, table = code.f, code.f.b, sink.table
    theirs = b.load(other, typ=I64)
    values = [_stored_value(code, table, k, other, theirs) for k in range(len(table.values))]
    header = index.header_of(h)
    index.ensure_text(header, h, _text_bytes(code, list(values)), number)
    ours = b.load(record, typ=I64)
    fresh, gone = is_set(f, ours, FRESH), is_set(f, ours, TOMB)
    flags = const(_FLAGS & ~FRESH)
    if sink.older:
        takes = fresh
        goes_on = b.and_(is_set(f, ours, PARTIAL), b.not_(fresh))
    else:
        takes = b.or_(fresh, b.or_(gone, b.not_(is_set(f, theirs, PARTIAL))))
        goes_on = b.not_(takes)
    with f.when(takes):
        for k, value in enumerate(values):
            _value_place(code, table, k, record, header).write(value.data)
        # Over a deleted record, what is newer is all there is.
        final = b.and_(theirs, b.select(b.and_(gone, b.not_(fresh)), const(~PARTIAL), const(-1)))
        f.store(b.or_(b.and_(ours, const(_KEYS)), b.and_(final, const(~(_KEYS | FRESH)))), record)
    with f.when(goes_on):
        head = f.var(I64, ours)
        combined = f.var(I1, const(1, I1))
        if sink.older:  # under a partial: a deleted record makes it whole
            combined.set(b.not_(is_set(f, theirs, TOMB)))
            head.set(b.or_(b.and_(ours, b.not_(flags)), b.and_(theirs, const(PARTIAL))))
        with f.when(combined.get()):
            for k, value in enumerate(values):
                function = (_OLDER if sink.older else _NEWER).get(sink.functions[k], sink.functions[k])
                if function == UNCHANGED:
                    continue
                bit = table.null_bit(k)
                place = _value_place(code, table, k, record, header)
                after = update(function, place, is_set(f, head.get(), bit), value)
                head.set(b.or_(b.and_(head.get(), const(~bit)), b.select(after, const(bit), const(0))))
        f.store(head.get(), record)


def lower_combine_records(code: Code, sink: CombineRecords, block: Block, start: ir.Value) -> None:
    """Frame: `pointers` and `hashes`, in order; `out` and `out.hashes`, with room for all; `out.count`.

    Records of one key follow one another, but for others with the same hash between them: so the records written last
    are looked through for as long as their hash is this one's.
    """
    f, b, table, size = code.f, code.f.b, sink.table, sink.table.layout.size
    index = StoreIndex(code, table, "table")
    out, written = f.slot("out", PTR), f.slot("out.hashes", PTR)
    with f.loop(block.count) as k:
        at = b.add(start, k)
        record, h = _pointer(code, start, k), f.load(f.slot("hashes", PTR), at, I64)
        found = f.var(PTR, NULL)
        count = f.get_slot("out.count")
        last = f.var(I64, b.sub(count, const(1)))
        with f.forever() as back:
            back.stop_if(b.icmp_signed("<", last.get(), const(0)))
            back.stop_if(b.icmp_unsigned("!=", f.load(written, last.get(), I64), h))
            other = f.byte_at(out, b.mul(last.get(), const(size)))
            with f.when(_same_keys(code, table, other, record)):
                found.set(other)
                back.stop()
            last.set(b.sub(last.get(), const(1)))
        with f.when_else(b.icmp_unsigned("==", found.get(), NULL)) as (fresh, known):
            with fresh:
                place = f.byte_at(out, b.mul(count, const(size)))
                f.call("llvm.memcpy.p0.p0.i64", ir.VoidType(), [place, record, const(size), const(0, I1)])
                f.store(h, written, count)
                f.set_slot("out.count", b.add(count, const(1)))
            with known:
                _absorb(code, MergeRecords(table, sink.functions), index, found.get(), record, h, at)
    code.check_errors(ERROR)


def _same_keys(code: Code, table: StoredTable, one: ir.Value, other: ir.Value) -> ir.Value:
    f, b = code.f, code.f.b
    heads = [b.lshr(b.load(record, typ=I64), const(KEY_NULLS)) for record in (one, other)]
    tests = [b.icmp_unsigned("==", *heads)]
    for k, key in enumerate(table.keys):
        values = [b.load(f.byte_at(record, table.layout.offset(f"key{k}")), typ=array_type(key.dtype))
                  for record in (one, other)]
        tests.append(b.icmp_unsigned("==", *values))
    same = f.all_of(*tests)
    assert same is not None
    return same


def _value_place(code: Code, table: StoredTable, k: int, record: ir.Value, header: ir.Value) -> ValuePlace:
    value = table.values[k]
    return ValuePlace(code, value.name, code.f.byte_at(record, table.layout.offset(f"value{k}")), value.dtype, header)


def _stored_value(code: Code, table: StoredTable, k: int, record: ir.Value, head: ir.Value) -> Value:
    f, dtype = code.f, table.values[k].dtype
    place = f.byte_at(record, table.layout.offset(f"value{k}"))
    value = field_value(code, place, Read(f"value{k}", dtype, "field", nulls=False), None)
    valid = f.b.not_(is_set(f, head, table.null_bit(k)))
    if isinstance(value.data, Str):  # of a null, the cell holds anything
        return Value(Str(value.data.ptr, f.b.select(valid, value.data.size, const(0))), valid)
    return Value(value.data, valid)
