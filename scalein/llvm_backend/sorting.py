"""Sorting a run of pairs (key, payload) in place, by key, keeping the order of equal keys; and selecting from one.

Short runs by insertion, which costs nothing where they are sorted already; longer ones by radix, a byte of the key
at a time: no comparisons, no worst case, no recursion, and a byte that all keys share costs no pass. A pair is two
8-byte words; keys are signed.

Where only one place of the order is asked for (a quantile of a long run), `select` looks at the first byte of all keys,
goes on with those that share the place's byte, and so on: two passes over the run, and little more.
"""

from __future__ import annotations

from llvmlite import ir

from scalein.llvm_backend.fn import I64, Fn, const

MAX_INSERTION_SORT = 40  # pairs; with more of them the histograms of a radix sort are cheaper than the moves
BYTES = 8
VALUES = 256
SIGN = 1 << 63


def sort_run(f: Fn, pairs: ir.Value, spare: ir.Value, count: ir.Value) -> None:
    """Sort the `count` pairs at `pairs`; `spare` is memory for as many."""
    with f.when_else(f.b.icmp_signed("<=", count, const(MAX_INSERTION_SORT)), likely=True) as (short, long):
        with short:
            _insert(f, pairs, count)
        with long:
            _radix(f, pairs, spare, count)


def _pair(f: Fn, pairs: ir.Value, i: ir.Value) -> ir.Value:
    return f.at(pairs, f.b.shl(i, const(1)), I64)


def _byte(f: Fn, key: ir.Value, number: ir.Value) -> ir.Value:
    """A byte of a key; the sign is turned, so that negative keys come first."""
    b = f.b
    return b.and_(b.lshr(b.xor(key, const(SIGN)), b.shl(number, const(3))), const(VALUES - 1))


def _move(f: Fn, source: ir.Value, target: ir.Value) -> None:
    pair = ir.VectorType(I64, 2)
    f.store(f.b.load(source, typ=pair, align=8), target, align=8)


def _insert(f: Fn, pairs: ir.Value, count: ir.Value) -> None:
    b = f.b
    with f.loop(count, start=const(1)) as i:
        key, payload = b.load(_pair(f, pairs, i), typ=I64), f.load(_pair(f, pairs, i), const(1), I64)
        j = f.var(I64, i)
        with f.forever() as walk:
            walk.stop_if(b.icmp_signed("<=", j.get(), const(0)))
            before = _pair(f, pairs, b.sub(j.get(), const(1)))
            walk.stop_if(b.icmp_signed("<=", b.load(before, typ=I64), key))
            _move(f, before, _pair(f, pairs, j.get()))
            j.set(b.sub(j.get(), const(1)))
        place = _pair(f, pairs, j.get())
        f.store(key, place)
        f.store(payload, place, const(1))


def _radix(f: Fn, pairs: ir.Value, spare: ir.Value, count: ir.Value) -> None:
    b = f.b
    counts = f.scratch(I64, BYTES * VALUES, "counts")
    with f.loop(const(BYTES * VALUES)) as i:
        f.store(const(0), counts, i)

    def digit(pair: ir.Value, byte: ir.Value) -> ir.Value:
        """Place in `counts` of a key's byte."""
        return b.add(b.mul(byte, const(VALUES)), _byte(f, b.load(pair, typ=I64), byte))

    with f.loop(count) as i:
        for byte in range(BYTES):
            at = digit(_pair(f, pairs, i), const(byte))
            f.store(b.add(f.load(counts, at, I64), const(1)), counts, at)
    source, target = f.var(ir.PointerType(), pairs), f.var(ir.PointerType(), spare)
    with f.loop(const(BYTES)) as byte:
        shared = f.load(counts, digit(source.get(), byte), I64)
        with f.when(b.icmp_signed("<", shared, count)):
            total = f.var(I64, const(0))
            with f.loop(const(VALUES)) as value:
                at = b.add(b.mul(byte, const(VALUES)), value)
                here = f.load(counts, at, I64)
                f.store(total.get(), counts, at)
                total.set(b.add(total.get(), here))
            with f.loop(count) as i:
                pair = _pair(f, source.get(), i)
                at = digit(pair, byte)
                place = f.load(counts, at, I64)
                f.store(b.add(place, const(1)), counts, at)
                _move(f, pair, _pair(f, target.get(), place))
            old = source.get()
            source.set(target.get())
            target.set(old)
    with f.when(b.icmp_unsigned("!=", source.get(), pairs)), f.loop(count) as i:
        _move(f, _pair(f, spare, i), _pair(f, pairs, i))


def select(f: Fn, pairs: ir.Value, spare: ir.Value, count: ir.Value, place: ir.Value) -> tuple[ir.Value, ir.Value]:
    """The key at a position of the order, in which a payload is the number of repetitions of its key; and the position
    after it.

    `pairs` stay as they are; `spare` is memory for as many.
    """
    b = f.b
    counts = f.scratch(I64, VALUES, "counts")
    source, left = f.var(ir.PointerType(), pairs), f.var(I64, count)
    before, after = f.var(I64, const(0)), f.var(I64, const(0))
    with f.loop(const(BYTES)) as step:
        byte = b.sub(const(BYTES - 1), step)
        with f.loop(const(VALUES)) as i:
            f.store(const(0), counts, i)
        with f.loop(left.get()) as i:
            pair = _pair(f, source.get(), i)
            at = _byte(f, b.load(pair, typ=I64), byte)
            f.store(b.add(f.load(counts, at, I64), f.load(pair, const(1), I64)), counts, at)
        value = f.var(I64, const(0))
        with f.forever() as search:
            after.set(b.add(before.get(), f.load(counts, value.get(), I64)))
            search.stop_if(b.icmp_signed(">", after.get(), place))
            search.stop_if(b.icmp_signed(">=", value.get(), const(VALUES - 1)))
            before.set(after.get())
            value.set(b.add(value.get(), const(1)))
        kept = f.var(I64, const(0))
        with f.loop(left.get()) as i:
            pair = _pair(f, source.get(), i)
            is_same = b.icmp_unsigned("==", _byte(f, b.load(pair, typ=I64), byte), value.get())
            _move(f, pair, _pair(f, spare, kept.get()))
            kept.set(b.add(kept.get(), b.zext(is_same, I64)))
        source.set(spare)
        left.set(kept.get())
    return b.load(spare, typ=I64), after.get()


def next_key(f: Fn, pairs: ir.Value, count: ir.Value, key: ir.Value) -> ir.Value:
    """The least key above this one; the greatest of all keys if there is none."""
    b = f.b
    found = f.var(I64, const(2**63 - 1))
    with f.loop(count) as i:
        this = b.load(_pair(f, pairs, i), typ=I64)
        found.set(b.select(b.icmp_signed(">", this, key), f.min(this, found.get()), found.get()))
    return found.get()
