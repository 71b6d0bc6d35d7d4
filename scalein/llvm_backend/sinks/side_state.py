"""What happens to bags and logs when tables are merged and groups are finished.

Finishing ranks: the pairs of a group are written consecutively (`ExpandLog`; where each group's begin is in
its records), then each group's are ranked (`Rank`). From values and their numbers of rows follow the quantiles,
which go into the record; from sorted row numbers the runtime reads the order of a list. A log that has grown long is
folded: its values are written anew, each once.
"""

from __future__ import annotations

from functools import partial

from llvmlite import ir

from scalein.ir.stages import ExpandLog, MergeBag, Rank
from scalein.ir.tables import Acc, AccKind, Table, log_layout
from scalein.layout import BLOCK_ROWS, RecordLayout
from scalein.llvm_backend.block import PADDED, Block, keep
from scalein.llvm_backend.cells import Place
from scalein.llvm_backend.code import Code
from scalein.llvm_backend.fn import F64, I64, PTR, Fn, const
from scalein.llvm_backend.hash_index import place_in
from scalein.llvm_backend.keys import KeyBlock, hash_words, key_array, mix
from scalein.llvm_backend.side_state import add_to_bag, as_float, base_of, side_index
from scalein.llvm_backend.sinks.merge import copy_key
from scalein.llvm_backend.sorting import MAX_INSERTION_SORT, next_key, select, sort_run
from scalein.llvm_backend.values import Row


def _source(f: Fn, layout: RecordLayout, start: ir.Value, row: Row) -> ir.Value:
    number = f.b.add(start, row.offset("in"))
    return f.byte_at(f.slot("source", PTR), f.b.mul(number, const(layout.size)))


def lower_merge_bag(code: Code, sink: MergeBag, block: Block, start: ir.Value) -> None:
    """`owners` is the first address of the table that the bag's records belonged to."""
    f, b, table = code.f, code.f.b, sink.table
    number, side = table.bags[sink.bag]
    layout, dtype = side.layout, side.keys[1].dtype

    def new_owner(row: Row) -> ir.Value:
        old = b.load(f.byte_at(_source(f, layout, start, row), layout.offset("key0")), typ=I64)
        known = b.icmp_signed(">=", old, const(0))
        place = f.byte_at(f.slot("owners", PTR), b.select(known, old, const(0)))
        moved = b.load(f.byte_at(place, table.layout.offset("moved")), typ=I64)
        return b.select(known, moved, const(-1))

    block = keep(code, block, lambda row: b.icmp_signed(">=", new_owner(row), const(0)))
    index = side_index(code, table, sink.bag)
    index.ensure_arena(BLOCK_ROWS)
    owners, values = f.scratch(I64, PADDED, "owners"), key_array(f, 1, dtype)
    hashes = f.scratch(I64, PADDED, "hashes")
    with f.loop(block.count) as k:
        row = block.row(f, k)
        owner = new_owner(row)
        words = copy_key(code, f.byte_at(_source(f, layout, start, row), layout.offset("key1")), dtype, values, k)
        f.store(owner, owners, k)
        f.store(mix(f, hash_words(f, words, None), owner), hashes, k)
    keys = KeyBlock(tuple(key.dtype for key in side.keys), (owners, values), None, hashes)
    records = index.find(keys, block.count, None, insert=True)
    with f.loop(block.count) as k:
        source = _source(f, layout, start, block.row(f, k))
        group = f.byte_at(base_of(f, sink.mode), f.load(owners, k, I64))
        rows = b.load(f.byte_at(source, layout.offset("acc0")), typ=I64)
        add_to_bag(f, f.load(records, k, PTR), layout.offset("acc0"), rows, None,
                   f.byte_at(group, table.layout.offset(f"acc{number}")))


def lower_expand_log(code: Code, sink: ExpandLog, block: Block, start: ir.Value) -> None:
    """A group's `start` is where its next pair goes."""
    f, b, table = code.f, code.f.b, sink.table
    acc = table.accs[sink.acc]
    layout = log_layout(acc)
    with f.loop(block.count) as k:
        row = block.row(f, k)
        entry = _source(f, layout, start, row)
        field = partial(_field, f, layout, entry)
        group = f.byte_at(base_of(f, sink.mode), field("owner"))
        next_ = f.byte_at(group, table.layout.offset(f"acc{sink.acc}.start"))
        place = b.load(next_, typ=I64)
        code.check_within("the pairs of a group", place, lambda: f.slot("pairs.count"))
        f.store(b.add(place, const(1)), next_)
        pair = f.at(f.slot("pairs", PTR), b.shl(place, const(1)), I64)
        match acc.kind:
            case AccKind.VALUES:
                key, payload = field("key"), field("rows")
            case AccKind.LIST:
                key, payload = field("row"), b.add(start, row.offset("in"))
            case _:  # the best first; equal ones stay in the order of the log
                key, payload = b.not_(field("by")), b.add(start, row.offset("in"))
        f.store(key, pair)
        f.store(payload, pair, const(1))


def _field(f: Fn, layout: RecordLayout, entry: ir.Value, name: str) -> ir.Value:
    return f.b.load(f.byte_at(entry, layout.offset(name)), typ=I64)


def lower_rank(code: Code, sink: Rank, block: Block, start: ir.Value) -> None:
    """Behind `ExpandLog`, a group's `start` is the end of its pairs; it becomes their start again."""
    f, b, table = code.f, code.f.b, sink.table
    with f.loop(block.count) as k:
        record = _source(f, table.layout, start, block.row(f, k))
        place = place_in(f, table, record)
        count = b.load(place(f"acc{sink.acc}"), typ=I64)
        first = b.sub(b.load(place(f"acc{sink.acc}.start"), typ=I64), count)
        f.store(first, place(f"acc{sink.acc}.start"))
        pairs = f.at(f.slot("pairs", PTR), b.shl(first, const(1)), I64)
        if sink.fold:
            sort_run(f, pairs, f.slot("spare", PTR), count)
            owner = b.add(b.sub(b.ptrtoint(record, I64), b.ptrtoint(f.slot("source", PTR), I64)), f.slot("base"))
            f.store(_fold(f, table.accs[sink.acc], pairs, count, owner), place(f"acc{sink.acc}"))
        elif table.accs[sink.acc].kind is not AccKind.VALUES:
            sort_run(f, pairs, f.slot("spare", PTR), count)
        else:
            _quantiles(f, table, sink.acc, pairs, count, place)


def _fold(f: Fn, acc: Acc, pairs: ir.Value, count: ir.Value, owner: ir.Value) -> ir.Value:
    """Write a group's entries of the log anew, equal values as one; gives how many there are.

    Nothing is lost: every entry of the log is a pair by now.
    """
    b, layout = f.b, log_layout(acc)
    written = f.var(I64, const(0))
    last = f.var(I64, const(0))
    with f.loop(count) as i:
        pair = f.at(pairs, b.shl(i, const(1)), I64)
        key, rows = b.load(pair, typ=I64), f.load(pair, const(1), I64)
        is_same = b.and_(b.icmp_signed(">", written.get(), const(0)), b.icmp_signed("==", key, last.get()))
        entry = f.byte_at(f.slot("log", PTR), f.get_slot("log.used"))
        with f.when_else(is_same) as (same, new):
            with same:
                total = f.byte_at(entry, layout.offset("rows") - layout.size)
                f.store(b.add(b.load(total, typ=I64), rows), total)
            with new:
                for name, word in (("owner", owner), ("key", key), ("rows", rows)):
                    f.store(word, f.byte_at(entry, layout.offset(name)))
                f.set_slot("log.used", b.add(f.get_slot("log.used"), const(layout.size)))
                written.set(b.add(written.get(), const(1)))
        last.set(key)
    return written.get()


def _quantiles(f: Fn, table: Table, number: int, pairs: ir.Value, count: ir.Value, place: Place) -> None:
    """A short run is sorted; from a long one the few values that are asked for are selected."""
    b = f.b
    rows = f.var(I64, const(0))
    with f.loop(count) as i:
        rows.set(b.add(rows.get(), f.load(pairs, b.add(b.shl(i, const(1)), const(1)), I64)))
    with f.when_else(b.icmp_signed("<=", count, const(MAX_INSERTION_SORT)), likely=True) as (short, long):
        with short:
            sort_run(f, pairs, f.slot("spare", PTR), count)
            for acc, share in table.quantiles_of(table.accs[number]):
                f.store(_walked(f, pairs, count, rows.get(), share), place(f"acc{acc}"))
        with long:
            for acc, share in table.quantiles_of(table.accs[number]):
                f.store(_selected(f, pairs, count, rows.get(), share), place(f"acc{acc}"))


def _between(f: Fn, low: ir.Value, high: ir.Value, share: ir.Value) -> ir.Value:
    """Weighted, and not `low + (high - low) * share`: the difference may be more than a float holds, or infinite."""
    b = f.b
    between = b.fadd(b.fmul(low, b.fsub(const(1.0, F64), share)), b.fmul(high, share))
    return b.select(b.fcmp_ordered("==", low, high), low, between)


def _place(f: Fn, rows: ir.Value, share: float) -> tuple[ir.Value, ir.Value, ir.Value]:
    """The place share * (rows - 1), and the whole numbers next to it."""
    b = f.b
    place = b.fmul(const(share, F64), b.sitofp(b.sub(rows, const(1)), F64))
    return place, *(f.call(f"llvm.{fn}.f64", F64, [place]) for fn in ("floor", "ceil"))


def _selected(f: Fn, pairs: ir.Value, count: ir.Value, rows: ir.Value, share: float) -> ir.Value:
    b = f.b
    place, below, above = _place(f, rows, share)
    key, after = select(f, pairs, f.slot("spare", PTR), count, b.fptosi(below, I64))
    following = f.var(I64, key)
    with f.when(b.icmp_signed(">=", b.fptosi(above, I64), after)):
        following.set(next_key(f, pairs, count, key))
    return _between(f, as_float(f, key), as_float(f, following.get()), b.fsub(place, below))


def _walked(f: Fn, pairs: ir.Value, count: ir.Value, rows: ir.Value, share: float) -> ir.Value:
    b = f.b
    place, below, above = _place(f, rows, share)
    low, high, seen = f.var(F64, const(0.0, F64)), f.var(F64, const(0.0, F64)), f.var(I64, const(0))
    with f.loop(count) as i:
        at = partial(f.load, pairs, typ=I64)
        value = as_float(f, at(b.shl(i, const(1))))
        before = b.sitofp(seen.get(), F64)
        seen.set(b.add(seen.get(), at(b.add(b.shl(i, const(1)), const(1)))))
        low.set(b.select(b.fcmp_ordered(">=", below, before), value, low.get()))
        high.set(b.select(b.fcmp_ordered(">=", above, before), value, high.get()))
    return _between(f, low.get(), high.get(), b.fsub(place, below))
