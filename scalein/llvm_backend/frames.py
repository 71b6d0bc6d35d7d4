"""Kernels of values over frames: rows put in the order of their partitions, and aggregates of each row's frame.

A *place* is a word with a partition in its upper bits and the number of a row in its lower ones; places are in the
order of partitions and, inside of these, of rows. `lower_partition` sorts them by a digit of the partition at a time.

`lower_frames` passes over the places once. The frame of a row begins where that of the row before began, or later, so
it is a queue, of which rows leave one by one: two stacks. The front one holds, for each of its rows, what it and all
later rows of that stack aggregate to; the back one is a single aggregate. Where the front is empty, the rows of the
back are stacked again from the last to the first. So each row is combined three times, however long the frame is;
nothing is ever subtracted, so float sums do not drift, and an infinity leaves no trace.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from llvmlite import ir

from scalein.layout import DONE, ERROR
from scalein.llvm_backend.accumulators import as_float
from scalein.llvm_backend.fn import F64, I8, I64, I128, PTR, Fn, Var, const
from scalein.llvm_backend.stage import Lowered

DIGIT_BITS = 11  # sorted by one pass over a partition: the pages of 2,048 streams written at once stay in the TLB
AHEAD = 48  # places that a row's values are prefetched before it
Parts = tuple[ir.Value, ...]


def lower_partition(from_keys: bool, has_rows: bool) -> Lowered:
    """A pass of the radix sort: `count` places from `in` to `out`, by the digit at `shift`, keeping their order.

    `from_keys`: the places are made of keys, 64-bit integers at `in`, less `base`; of the rows at `rows` in their
    order, if it `has_rows`. `bits` is how many bits a row's number has.
    """
    f = Fn("partition")
    b = f.b
    count, shift, bits = f.slot("count"), f.slot("shift"), f.slot("bits")
    given, out, rows = f.slot("in", PTR), f.slot("out", PTR), f.slot("rows", PTR) if has_rows else None
    counts = f.scratch(I64, 1 << DIGIT_BITS, "counts")
    with f.loop(const(1 << DIGIT_BITS)) as i:
        f.store(const(0), counts, i)

    def place(i: ir.Value) -> ir.Value:
        if not from_keys:
            return f.load(given, i, I64)
        row = i if rows is None else f.load(rows, i, I64)
        if rows is not None:
            f.prefetch(f.at(given, f.load(rows, f.min(b.add(i, const(AHEAD)), b.sub(count, const(1))), I64), I64))
        return b.or_(b.shl(b.sub(f.load(given, row, I64), f.slot("base")), bits), row)

    def digit(word: ir.Value) -> ir.Value:
        return b.and_(b.lshr(word, shift), const((1 << DIGIT_BITS) - 1))

    with f.loop(count) as i:
        at = digit(place(i))
        f.store(b.add(f.load(counts, at, I64), const(1)), counts, at)
    total = f.var(I64, const(0))
    with f.loop(const(1 << DIGIT_BITS), rare=True) as i:
        here = f.load(counts, i, I64)
        f.store(total.get(), counts, i)
        total.set(b.add(total.get(), here))
    with f.loop(count) as i:
        word = place(i)
        at = digit(word)
        target = f.load(counts, at, I64)
        f.store(b.add(target, const(1)), counts, at)
        f.store(word, out, target)
    return _finished(f)


def lower_spaced(from_any: bool) -> Lowered:
    """The kernel that marks rows at `out`: the first of each partition, and each that is at least `width` later, by the
    `times` of places, than the last one before it that is marked, or `from_any`: than the one before it.
    """
    f = Fn("spaced")
    b = f.b
    places, times, out = f.slot("places", PTR), f.slot("times", PTR), f.slot("out", PTR)
    partition, last = f.var(I64, const(-1)), f.var(I64, const(0))
    with f.loop(f.slot("count"), rare=True) as i:
        place, now = f.load(places, i, I64), f.load(times, i, I64)
        own = b.lshr(place, f.slot("bits"))
        is_first = b.icmp_unsigned("!=", own, partition.get())
        is_marked = b.or_(is_first, b.icmp_unsigned(">=", b.sub(now, last.get()), f.slot("width")))
        partition.set(own)
        last.set(now if from_any else b.select(is_marked, now, last.get()))
        f.store(b.zext(is_marked, I8), out, b.and_(place, f.slot("mask")))
    return _finished(f)


def _finished(f: Fn) -> Lowered:
    f.b.ret(const(DONE))
    frame = f.finish()
    return Lowered(f.fn.name, f.text(), frame, (), (), ())


class Monoid(ABC):
    """What rows aggregate to: words in memory, combined from left to right."""

    types: tuple[ir.Type, ...]
    reads: bool = True  # values

    @abstractmethod
    def none(self) -> Parts:
        """The aggregate of no row."""

    @abstractmethod
    def one(self, f: Fn, row: ir.Value, there: ir.Value | None) -> Parts:
        """That of one row; `there` says whether its value is not null, None: it is."""

    @abstractmethod
    def joined(self, f: Fn, a: Parts, b: Parts) -> Parts:
        """That of rows and the rows after them."""

    @abstractmethod
    def finished(self, f: Fn, parts: Parts) -> tuple[ir.Value, ir.Value | None, ir.Value | None]:
        """The value, whether it is not null (None: never), and whether it is an error."""


def _counted(there: ir.Value | None, f: Fn) -> ir.Value:
    return const(1) if there is None else f.b.zext(there, I64)


class _Count(Monoid):
    types, reads = (I64,), False

    def none(self) -> Parts:
        return (const(0),)

    def one(self, f: Fn, row: ir.Value, there: ir.Value | None) -> Parts:
        return (_counted(there, f),)

    def joined(self, f: Fn, a: Parts, b: Parts) -> Parts:
        return (f.b.add(a[0], b[0]),)

    def finished(self, f: Fn, parts: Parts) -> tuple[ir.Value, ir.Value | None, ir.Value | None]:
        return parts[0], None, None


class _FloatSum(Monoid):
    """A sum of doubles, and how many there are."""

    def __init__(self, is_mean: bool, nullable: bool) -> None:
        self._is_mean, self._nullable = is_mean, nullable
        self.types = (F64, I64) if is_mean or nullable else (F64,)

    def none(self) -> Parts:
        return (const(-0.0, F64), const(0))[: len(self.types)]

    def one(self, f: Fn, row: ir.Value, there: ir.Value | None) -> Parts:
        value = f.load_input(f.at(f.slot("values", PTR), row, F64), F64)
        if there is not None:
            value = f.b.select(there, value, const(-0.0, F64))
        return (value, _counted(there, f))[: len(self.types)]

    def joined(self, f: Fn, a: Parts, b: Parts) -> Parts:
        return (f.b.fadd(a[0], b[0]), *map(f.b.add, a[1:], b[1:]))

    def finished(self, f: Fn, parts: Parts) -> tuple[ir.Value, ir.Value | None, ir.Value | None]:
        valid = f.b.icmp_signed(">", parts[1], const(0)) if self._nullable else None
        total = f.b.fadd(parts[0], const(0.0, F64))  # of none, and of negative zeros: 0.0
        return f.b.fdiv(total, f.b.sitofp(parts[1], F64)) if self._is_mean else total, valid, None


class _IntegerSum(Monoid):
    """A sum in 128 bits, and how many values there are."""

    types = (I128, I64)

    def __init__(self, is_signed: bool, is_mean: bool, nullable: bool) -> None:
        self._is_signed, self._is_mean, self._nullable = is_signed, is_mean, nullable

    def none(self) -> Parts:
        return const(0, I128), const(0)

    def one(self, f: Fn, row: ir.Value, there: ir.Value | None) -> Parts:
        value = f.load_input(f.at(f.slot("values", PTR), row, I64), I64)
        if there is not None:
            value = f.b.select(there, value, const(0))
        return (f.b.sext if self._is_signed else f.b.zext)(value, I128), _counted(there, f)

    def joined(self, f: Fn, a: Parts, b: Parts) -> Parts:
        return f.b.add(a[0], b[0]), f.b.add(a[1], b[1])

    def finished(self, f: Fn, parts: Parts) -> tuple[ir.Value, ir.Value | None, ir.Value | None]:
        b, (total, count) = f.b, parts
        valid = b.icmp_signed(">", count, const(0)) if self._nullable else None
        low, high = b.trunc(total, I64), b.trunc(b.lshr(total, const(64, I128)), I64)
        if self._is_mean:
            return b.fdiv(as_float(f, low, high, self._is_signed), b.sitofp(count, F64)), valid, None
        sign = b.ashr(low, const(63)) if self._is_signed else const(0)
        return low, valid, b.icmp_unsigned("!=", high, sign)


class _Moments(Monoid):
    """How many values there are, their mean, and the sum of their squared distances from it; joined as Chan does."""

    types = (F64, F64, F64)

    def __init__(self, is_root: bool) -> None:
        self._is_root = is_root

    def none(self) -> Parts:
        return const(0.0, F64), const(0.0, F64), const(0.0, F64)

    def one(self, f: Fn, row: ir.Value, there: ir.Value | None) -> Parts:
        value = f.load_input(f.at(f.slot("values", PTR), row, F64), F64)
        if there is None:
            return const(1.0, F64), value, f.b.fsub(value, value)  # NaN of what is not finite
        zero = const(0.0, F64)
        return (f.b.select(there, const(1.0, F64), zero), f.b.select(there, value, zero),
                f.b.select(there, f.b.fsub(value, value), zero))

    def joined(self, f: Fn, a: Parts, b: Parts) -> Parts:
        x, (n, mean, m2), (k, other, k2) = f.b, a, b
        count = x.fadd(n, k)
        share = x.fdiv(k, x.select(x.fcmp_ordered(">", count, const(0.0, F64)), count, const(1.0, F64)))
        apart = x.fsub(other, mean)
        both = x.and_(x.fcmp_ordered(">", n, const(0.0, F64)), x.fcmp_ordered(">", k, const(0.0, F64)))
        middle = x.fadd(mean, x.fmul(apart, share))
        squares = x.fadd(x.fadd(m2, k2), x.fmul(x.fmul(x.fmul(apart, apart), n), share))
        has_a = x.fcmp_ordered(">", n, const(0.0, F64))
        return (count, x.select(both, middle, x.select(has_a, mean, other)),
                x.select(both, squares, x.select(has_a, m2, k2)))

    def finished(self, f: Fn, parts: Parts) -> tuple[ir.Value, ir.Value | None, ir.Value | None]:
        n, _, m2 = parts
        value = f.b.fdiv(m2, f.b.fsub(n, const(1.0, F64)))
        if self._is_root:
            value = f.call("llvm.sqrt.f64", F64, [value])
        return value, f.b.fcmp_ordered(">=", n, const(2.0, F64)), None


class _Pick(Monoid):
    """The number of a row: with the least or greatest value, the first of equal ones, or the first or last one."""

    def __init__(self, which: str) -> None:
        self._which = which
        self.reads = which in ("min", "max")
        self.types = (I64, I64) if self.reads else (I64,)  # its value and its number, negative if there is none

    def none(self) -> Parts:
        return (const(0), const(-1))[-len(self.types) :]

    def one(self, f: Fn, row: ir.Value, there: ir.Value | None) -> Parts:
        number = row if there is None else f.b.select(there, row, const(-1))
        return (f.load_input(f.at(f.slot("values", PTR), row, I64), I64), number) if self.reads else (number,)

    def joined(self, f: Fn, a: Parts, b: Parts) -> Parts:
        x = f.b
        kept, other = (b, a) if self._which == "last" else (a, b)
        chosen = x.icmp_signed(">=", kept[-1], const(0))
        if self.reads:
            sign = "<=" if self._which == "min" else ">="
            is_better = x.icmp_signed(sign, kept[0], other[0])
            chosen = x.and_(chosen, x.or_(is_better, x.icmp_signed("<", other[-1], const(0))))
        return tuple(x.select(chosen, this, that) for this, that in zip(kept, other, strict=True))

    def finished(self, f: Fn, parts: Parts) -> tuple[ir.Value, ir.Value | None, ir.Value | None]:
        return parts[-1], None, None


class _Bounds(Monoid):
    """Nothing: the kernel reports where the frames of rows begin and end among the places."""

    types, reads = (), False

    def none(self) -> Parts:
        return ()

    def one(self, f: Fn, row: ir.Value, there: ir.Value | None) -> Parts:
        return ()

    def joined(self, f: Fn, a: Parts, b: Parts) -> Parts:
        return ()

    def finished(self, f: Fn, parts: Parts) -> tuple[ir.Value, ir.Value | None, ir.Value | None]:
        raise AssertionError("bounds are written, not finished")


MONOIDS: dict[str, Callable[[bool], Monoid]] = {  # of whether there are nulls
    "count": lambda nullable: _Count(),
    "float_sum": lambda nullable: _FloatSum(False, nullable),
    "float_mean": lambda nullable: _FloatSum(True, nullable),
    "signed_sum": lambda nullable: _IntegerSum(True, False, nullable),
    "unsigned_sum": lambda nullable: _IntegerSum(False, False, nullable),
    "signed_mean": lambda nullable: _IntegerSum(True, True, nullable),
    "unsigned_mean": lambda nullable: _IntegerSum(False, True, nullable),
    "var": lambda nullable: _Moments(False),
    "std": lambda nullable: _Moments(True),
    "min": lambda nullable: _Pick("min"),
    "max": lambda nullable: _Pick("max"),
    "first": lambda nullable: _Pick("first"),
    "last": lambda nullable: _Pick("last"),
    "bounds": lambda nullable: _Bounds(),
}  # fmt: skip


def lower_frames(what: str, frame: str, until: str, nullable: bool) -> Lowered:
    """The kernel of one aggregate over all places.

    `frame` is rows (at most `width` of them), within (`times`, by place, at most `width` earlier) or all. The value of
    a row is that of its frame `until` the row, its last equal (`ties`, by place, are 1 where a row equals the one
    before it) or the end of its partition. Values and `valid` (bytes, if `nullable`) are by row, and so are results.
    """
    f = Fn("frames")
    b = f.b
    monoid = MONOIDS[what](nullable)
    count, bits, mask = f.slot("count"), f.slot("bits"), f.slot("mask")
    places, out = f.slot("places", PTR), f.slot("out", PTR)
    is_queue = frame != "all"
    stack = [f.slot(f"stack{k}", PTR) for k in range(len(monoid.types))] if is_queue else []
    back: list[Var] = [f.var(typ, value) for typ, value in zip(monoid.types, monoid.none(), strict=True)]
    low, front_end, done = (f.var(I64, const(0)) for _ in range(3))
    partition = f.var(I64, const(-1))
    one_per_row = until == "row"

    def load(at: ir.Value) -> Parts:
        return tuple(b.load(f.at(each, at, typ), typ=typ, align=8)
                     for each, typ in zip(stack, monoid.types, strict=True))

    def store(parts: Sequence[ir.Value], at: ir.Value) -> None:
        for each, part in zip(stack, parts, strict=True):
            b.store(part, f.at(each, at, part.type), align=8)

    def restack(end: ir.Value) -> None:
        """Make rows [low, end) the front, and the back empty."""
        whole = [f.var(typ, value) for typ, value in zip(monoid.types, monoid.none(), strict=True)]
        with f.loop(b.sub(end, low.get()), rare=True) as back_by:
            at = b.sub(b.sub(end, const(1)), back_by)
            now = monoid.joined(f, load(at), tuple(each.get() for each in whole))
            for var, part in zip(whole, now, strict=True):
                var.set(part)
            store(now, at)
        front_end.set(end)
        for var, part in zip(back, monoid.none(), strict=True):
            var.set(part)

    def emit(end: ir.Value) -> None:
        """Write the value of the frame [low, end) for the rows whose turn it is."""
        if what == "bounds":
            with f.loop(end, done.get(), rare=True) as at:
                f.store(low.get(), out, b.shl(at, const(1)))
                f.store(end, out, b.add(b.shl(at, const(1)), const(1)))
            done.set(end)
            return
        parts = tuple(var.get() for var in back)
        if is_queue:
            has_front = b.icmp_signed("<", low.get(), front_end.get())
            at = b.select(has_front, low.get(), const(0))
            front = tuple(b.select(has_front, part, none)
                          for part, none in zip(load(at), monoid.none(), strict=True))
            parts = monoid.joined(f, front, parts)
        value, valid, wrong = monoid.finished(f, parts)

        def write(row: ir.Value) -> None:
            f.store(value, out, row)
            if valid is not None:
                f.store(b.zext(valid, I8), f.slot("out.valid", PTR), row)

        if wrong is not None:
            f.leave_if(wrong if valid is None else b.and_(wrong, valid), ERROR)
        if one_per_row:
            write(b.and_(f.load(places, b.sub(end, const(1)), I64), mask))
            return
        with f.loop(end, done.get(), rare=True) as at:
            write(b.and_(f.load(places, at, I64), mask))
        done.set(end)

    last = b.sub(count, const(1))
    with f.loop(count, rare=True) as i:
        place = f.load(places, i, I64)
        row = b.and_(place, mask)
        ahead = b.and_(f.load(places, f.min(b.add(i, const(AHEAD)), last), I64), mask)
        if monoid.reads:
            f.prefetch(f.at(f.slot("values", PTR), ahead, I64))
        if one_per_row and what != "bounds":
            f.prefetch(f.at(out, ahead, I64))
        own = b.lshr(place, bits)
        with f.when(b.icmp_unsigned("!=", own, partition.get())):
            partition.set(own)
            low.set(i)
            front_end.set(i)
            for var, part in zip(back, monoid.none(), strict=True):
                var.set(part)
        there = None
        if nullable:
            there = b.icmp_unsigned("!=", f.load_input(f.at(f.slot("valid", PTR), row, I8), I8), const(0, I8))
        value = monoid.one(f, row, there)
        if is_queue:
            store(value, i)
        for var, part in zip(back, monoid.joined(f, tuple(v.get() for v in back), value), strict=True):
            var.set(part)
        if frame == "rows":
            with f.when(b.icmp_signed(">=", b.sub(i, low.get()), f.slot("width"))):
                low.set(b.add(low.get(), const(1)))
                if monoid.types:
                    with f.when(b.icmp_signed(">", low.get(), front_end.get())):
                        restack(b.add(i, const(1)))
        elif frame == "within":
            times = f.slot("times", PTR)
            now = f.load(times, i, I64)
            with f.forever() as leaving:
                past = b.sub(now, f.load(times, low.get(), I64))
                leaving.stop_if(b.icmp_unsigned("<=", past, f.slot("width")))
                low.set(b.add(low.get(), const(1)))
            if monoid.types:
                with f.when(b.icmp_signed(">", low.get(), front_end.get())):
                    restack(b.add(i, const(1)))
        following = b.add(i, const(1))
        if until == "row":
            emit(following)
        else:
            at = f.min(following, last)
            ends = b.icmp_signed("==", i, last)
            ends = b.or_(ends, b.icmp_unsigned("!=", b.lshr(f.load(places, at, I64), bits), own))
            if until == "equal":
                ends = b.or_(ends, b.icmp_unsigned("==", f.load(f.slot("ties", PTR), at, I8), const(0, I8)))
            with f.when(ends):
                emit(following)
    return _finished(f)
