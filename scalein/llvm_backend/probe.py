"""Probe: look rows' keys up in a static table and go on with the matches.

A direct table is addressed by key - least; its payload lies in that order, so a match costs one
load. Otherwise the keys go through a hash index whose records hold the first row of their chain. Where
a key may have several rows, matches are written out in rounds of at most one block; the rest of
the stage runs once a round, and a kernel that leaves in between goes on at the same round.

Where matches have a range of times, the rows of a key follow one another in the table, in the order of time (`times`):
what the key leads to is its first row, `ends` has the row after its last one, and a binary search finds the range.
The lines that it begins in are prefetched for a run of rows, so that their misses overlap.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from llvmlite import ir

from scalein.dtypes import DType, Kind
from scalein.ir.exprs import type_of
from scalein.ir.stages import FOREVER, Probe, Read, TimeRange
from scalein.layout import BLOCK_ROWS, PAUSED
from scalein.llvm_backend.block import PADDED, Block, keep, rows
from scalein.llvm_backend.code import Code
from scalein.llvm_backend.exprs import lower_expr
from scalein.llvm_backend.fn import I8, I32, I64, PTR, const
from scalein.llvm_backend.hash_index import OVERLAPPED_ROWS, Index, place_in
from scalein.llvm_backend.keys import key_block
from scalein.llvm_backend.readers import load_column
from scalein.llvm_backend.values import Binding, Env, Row, Value, canonical

Then = Callable[[Block, Env], None]

# Few rows may have any number of matches: after some million rows the kernel pauses, so that Ctrl-C is seen.
ROUNDS_A_CALL = 1 << 14


def lower_probe(code: Code, step: Probe, block: Block, env: Env, then: Then) -> None:
    f, b = code.f, code.f.b
    name = f"join{step.table}"
    match = _coded(code, step, env) if step.by_code else (
        _direct(code, step, env) if step.direct else _hashed(code, step, block, env))
    ranges = None if step.times is None else _Ranges(code, step, step.times, block, env, match)
    match = match if ranges is None else ranges.first
    matches = f.scratch(I32, PADDED, "matches")
    found = Block(block.count, {**block.vectors, name: matches})

    def hit(row: Row) -> ir.Value:
        number = match(row)
        f.store(number, matches, row.k)
        if step.marks and step.unique:
            _mark(code, name, number)
        return b.icmp_signed(">=", number, const(0, I32))

    if step.how == "semi":
        then(_without(keep(code, found, hit), name), env)
        return
    if step.how == "anti":
        then(_without(keep(code, found, lambda row: b.not_(hit(row))), name), env)
        return
    columns = {**env, **{out: _payload(code, step, name, column) for out, column in step.keep},
               **{out: _payload(code, step, name, column, as_code=True) for out, column in step.codes}}
    if step.unique and step.how == "inner":
        then(keep(code, found, hit), columns)
        return
    with rows(code, block) as row:
        hit(row)
    if step.unique:
        then(found, columns)
    else:
        _expand(code, step, found, name, ranges, lambda each: then(each, columns))


def _mark(code: Code, name: str, number: ir.Value) -> None:
    """Mark a row of the table, or nothing for -1. Several workers may mark the same one: each stores a 1."""
    f = code.f
    place = f.b.sext(f.b.add(number, const(1, I32)), I64)
    code.check_within(f"a row of {name} that is marked", place, lambda: f.slot(f"{name}.mark_count"))
    f.store(const(1, I8), f.slot(f"{name}.marks", PTR), place)


def _without(block: Block, name: str) -> Block:
    return Block(block.count, {k: v for k, v in block.vectors.items() if k != name})


def _coded(code: Code, step: Probe, env: Env) -> Callable[[Row], ir.Value]:
    """A row's match is what its dictionary code was looked up to."""

    def match(row: Row) -> ir.Value:
        value = lower_expr(code, step.keys[0], env, row)
        number = value.number
        return number if value.valid is None else code.f.b.select(value.valid, number, const(-1, I32))

    return match


def _direct(code: Code, step: Probe, env: Env) -> Callable[[Row], ir.Value]:
    """A row's match by arithmetic; -1 where the key lies outside or has no row."""
    f, b = code.f, code.f.b
    prefix, key = f"join{step.table}", step.keys[0]

    def match(row: Row) -> ir.Value:
        value = lower_expr(code, key, env, row)
        plain = canonical(f, Value(value.data), type_of(key)).number
        wide = plain if plain.type == I64 else (b.sext if type_of(key).is_signed else b.zext)(plain, I64)
        place = b.sub(wide, f.slot(f"{prefix}.least"))
        inside = f.all_of(b.icmp_unsigned("<", place, f.slot(f"{prefix}.span")), value.valid)
        if step.dense:
            number = b.trunc(place, I32)
        else:
            safe = b.select(inside, place, const(0))
            number = f.load_input(f.at(f.slot(f"{prefix}.rows", PTR), safe, I32), I32)
        return b.select(inside, number, const(-1, I32))

    return match


def _hashed(code: Code, step: Probe, block: Block, env: Env) -> Callable[[Row], ir.Value]:
    """A row's match through the index, which is probed for the whole block first."""
    f, b = code.f, code.f.b
    assert step.build is not None
    table = step.build
    index = Index(code, table, f"join{step.table}")
    keys = key_block(code, block, env, step.keys, has_nulls=False)
    records = index.find(keys, block.count, None, insert=False)

    def match(row: Row) -> ir.Value:
        record = f.load(records, row.k, PTR)
        known = f.all_of(b.icmp_unsigned("!=", record, ir.Constant(PTR, None)),
                         *(lower_expr(code, key, env, row).valid for key in step.keys))
        # A row without a match reads the arena's first bytes, which hold no record.
        record = b.select(known, record, index.slot("arena"))
        head = b.trunc(b.load(place_in(f, table, record)("acc1.head"), typ=I64), I32)
        return b.select(known, head, const(-1, I32))

    return match


def _payload(code: Code, step: Probe, source: str, column: str, as_code: bool = False) -> Binding:
    """A column of the table (or its dictionary code), null where a left join found no row."""
    f = code.f
    read = next(r for r in step.payload if r.name == column)
    if as_code:
        read = replace(read, dtype=DType(Kind.I32), form="code")

    def value(row: Row) -> Value:
        number = row.offset(source)
        valid = None
        if step.how == "left":
            valid = f.b.icmp_signed(">=", number, const(0))
            number = f.max(number, const(0))
        return _table_value(code, f"{source}.{column}", read, number, valid)

    return Binding(value)


def _table_value(code: Code, name: str, read: Read, number: ir.Value, valid: ir.Value | None) -> Value:
    f = code.f

    def slot(part: str, typ: ir.Type = PTR) -> ir.Value:
        return f.slot(f"{name}.{part}", typ)

    code.check_within(f"a row of the table's column {name}", number, lambda: slot("rows", I64))
    if read.nulls:
        known = f.load_input(f.at(slot("known"), number, I8), I8)
        valid = f.all_of(valid, f.b.icmp_unsigned("!=", known, const(0, I8)))
    if read.form == "code":
        return Value(f.load_input(f.at(slot("codes"), number, I32), I32), valid)
    return load_column(code, read, number, valid, slot)


class _Ranges:
    """The matches of a block's rows where these have a range of times: the first of each row, and its last."""

    def __init__(self, code: Code, step: Probe, times: TimeRange, block: Block, env: Env,
                 match: Callable[[Row], ir.Value]) -> None:
        self._code, self._f, self._b = code, code.f, code.f.b
        f, b = self._f, self._b
        name = f"join{step.table}"
        self._times, self._ends = f.slot(f"{name}.times", PTR), f.slot(f"{name}.ends", PTR)
        self._table = name
        self._firsts, self.lasts = f.scratch(I32, PADDED, "firsts"), f.scratch(I32, PADDED, "lasts")
        with f.loop(block.count, step=OVERLAPPED_ROWS) as start:
            size = f.min(b.sub(block.count, start), const(OVERLAPPED_ROWS))
            with f.loop(size) as i:
                row = block.row(f, b.add(start, i))
                head = match(row)
                f.store(head, self._firsts, row.k)
                place = f.max(b.sext(head, I64), const(0))
                f.prefetch(f.at(self._ends, place, I32))
                f.prefetch(f.at(self._times, place, I64))
            with f.loop(size) as i:
                row = block.row(f, b.add(start, i))
                low_of, high_of = (lower_expr(code, each, env, row) for each in (times.low_of, times.high_of))
                head = b.sext(f.load(self._firsts, row.k, I32), I64)
                known = f.all_of(b.icmp_signed(">=", head, const(0)), low_of.valid, high_of.valid)
                head = f.max(head, const(0))
                end = b.select(known, b.sext(f.load_input(f.at(self._ends, head, I32), I32), I64), head)
                low, high = self._sum(low_of.number, times.low), self._sum(high_of.number, times.high)
                first, last = self._found(times.pick, head, end, low, high, low_of.number)
                f.store(b.trunc(b.select(b.icmp_signed("<=", first, last), first, const(-1)), I32),
                        self._firsts, row.k)
                f.store(b.trunc(last, I32), self.lasts, row.k)

    def first(self, row: Row) -> ir.Value:
        """A row's first match, or -1."""
        return self._f.load(self._firsts, row.k, I32)

    def _sum(self, time: ir.Value, more: int) -> ir.Value:
        if abs(more) >= FOREVER:
            return const(FOREVER if more > 0 else -FOREVER - 1)
        return self._f.call("llvm.sadd.sat.i64", I64, [time, const(more)]) if more else time

    def _time(self, number: ir.Value) -> ir.Value:
        f = self._f
        self._code.check_within(f"a time of {self._table}", number, lambda: f.slot(f"{self._table}.time_count"))
        return f.load_input(f.at(self._times, number, I64), I64)

    def _found(self, pick: str, head: ir.Value, end: ir.Value, low: ir.Value, high: ir.Value,
               at: ir.Value) -> tuple[ir.Value, ir.Value]:
        """The first and the last match in [head, end); none if the last is before the first."""
        f, b = self._f, self._b
        if pick == "all":
            first = self._search(head, end, low, "<")
            return first, b.sub(self._search(first, end, high, "<="), const(1))
        if pick == "backward":
            last = b.sub(self._search(head, end, high, "<="), const(1))
            first = self._search(head, end, low, "<")
            return b.select(b.icmp_signed("<=", first, last), last, end), last
        if pick == "forward":
            return self._following(self._search(head, end, low, "<"), end, high)
        middle = self._search(head, end, at, "<=")
        before = b.sub(middle, const(1))
        first = self._search(head, end, low, "<")
        after, last = self._following(middle, end, high)
        is_before, is_after = b.icmp_signed("<=", first, before), b.icmp_signed("<=", after, last)
        back = b.sub(at, self._time(f.max(before, const(0))))
        ahead = b.sub(self._time(f.min(f.max(middle, const(0)), f.max(b.sub(end, const(1)), const(0)))), at)
        is_nearer = b.icmp_unsigned("<=", back, ahead)
        takes_before = b.and_(is_before, b.or_(b.not_(is_after), is_nearer))
        found = b.select(takes_before, before, after)
        return found, b.select(takes_before, before, last)

    def _following(self, first: ir.Value, end: ir.Value, high: ir.Value) -> tuple[ir.Value, ir.Value]:
        """The last row of the time that the row `first` has; none if that is after `high`."""
        f, b = self._f, self._b
        time = self._time(f.min(first, f.max(b.sub(end, const(1)), const(0))))
        last = b.sub(self._search(first, end, time, "<="), const(1))
        good = b.and_(b.icmp_signed("<", first, end), b.icmp_signed("<=", time, high))
        return b.select(good, last, const(1)), b.select(good, last, const(0))

    def _search(self, start: ir.Value, end: ir.Value, limit: ir.Value, compare: str) -> ir.Value:
        """The first row of [start, end) whose time is not `compare` the limit, or `end`."""
        f, b = self._f, self._b
        at, count = f.var(I64, start), f.var(I64, b.sub(end, start))
        with f.forever() as halving:
            halving.stop_if(b.icmp_signed("<=", count.get(), const(0)))
            half = b.lshr(count.get(), const(1))
            middle = b.add(at.get(), half)
            is_before = b.icmp_signed(compare, self._time(middle), limit)
            at.set(b.select(is_before, b.add(middle, const(1)), at.get()))
            count.set(b.select(is_before, b.sub(b.sub(count.get(), half), const(1)), half))
        return at.get()


def _expand(code: Code, step: Probe, block: Block, name: str, ranges: _Ranges | None,
            then: Callable[[Block], None]) -> None:
    """One row for each match, in rounds. `at` and `cursor` (a table row, or -2: the row's first) say
    where a round starts; they are in the frame, so that the same round can be run again."""
    f, b = code.f, code.f.b
    assert code.rounds is not None
    matches = block.vectors[name]
    vectors = {source: f.scratch(I32, PADDED, f"each.{source}") for source in block.vectors}
    at, cursor = f.var(I64, f.get_slot(f"{name}.at")), f.var(I32, b.trunc(f.get_slot(f"{name}.cursor"), I32))
    with f.forever() as rounds:
        f.set_slot(f"{name}.at", at.get())
        f.set_slot(f"{name}.cursor", b.sext(cursor.get(), I64))
        f.leave_if(b.icmp_signed(">=", code.rounds.get(), const(ROUNDS_A_CALL)), PAUSED)
        code.rounds.set(b.add(code.rounds.get(), const(1)))
        filled = f.var(I64, const(0))
        with f.forever() as fill:
            fill.stop_if(b.or_(b.icmp_signed(">=", at.get(), block.count),
                               b.icmp_signed(">=", filled.get(), const(BLOCK_ROWS))))
            k = at.get()
            fresh = b.icmp_signed("==", cursor.get(), const(-2, I32))
            this = b.select(fresh, f.load(matches, k, I32), cursor.get())
            has = b.icmp_signed(">=", this, const(0, I32))
            if step.marks:
                _mark(code, name, this)
            for source, old in block.vectors.items():
                number = b.trunc(k, I32) if old is None else f.load(old, k, I32)
                f.store(this if source == name else number, vectors[source], filled.get())
            emitted = const(1) if step.how == "left" else b.zext(has, I64)
            filled.set(b.add(filled.get(), emitted))
            if ranges is None:
                safe = b.select(has, b.sext(this, I64), const(0))
                more = b.select(has, f.load_input(f.at(f.slot(f"{name}.next", PTR), safe, I32), I32), const(-1, I32))
            else:
                is_last = b.icmp_signed("==", this, f.load(ranges.lasts, k, I32))
                more = b.select(b.and_(has, b.not_(is_last)), b.add(this, const(1, I32)), const(-1, I32))
            ended = b.icmp_signed("<", more, const(0, I32))
            cursor.set(b.select(ended, const(-2, I32), more))
            at.set(b.add(k, b.zext(ended, I64)))
        then(Block(filled.get(), dict(vectors)))
        rounds.stop_if(b.icmp_signed(">=", at.get(), block.count))
    f.set_slot(f"{name}.at", const(0))
    f.set_slot(f"{name}.cursor", const(-2))
