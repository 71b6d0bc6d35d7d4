"""Unpacking: values of Parquet pages that are numbers of dictionary entries.

A page is, decompressed: levels, if the column may have nulls; a byte with the width of its numbers; the numbers. Both
levels (of one bit, all 1: there are no nulls) and numbers are in runs, Parquet's RLE / bit-packed hybrid. A run begins
with a varint: `count << 1` before one number that repeats `count` times, `groups << 1 | 1` before 8 * `groups` numbers
of `width` bits each, consecutively.

There is a kernel for each size of value, for any width: where in a group of eight numbers each begins is computed once
a run, so that a number is a load, a shift and a mask. (A kernel for each width is hardly faster, and to compile one
takes as long as to read a hundred million values.)

Invariants: no byte outside of a page is read. No width is above `most_width`, and the dictionary buffer has space for
that many values, whatever it holds, so that no number leads out of it; one that is not below `entries` ends the kernel
with ERROR, as does a run that leads out of its page, or a null. Slots `at` to `width` say where the next call goes on.
"""

from __future__ import annotations

from collections.abc import Callable

from llvmlite import ir

from scalein.layout import DONE, ERROR, MAX_BITS, OPEN_WORDS
from scalein.llvm_backend.fn import I1, I8, I64, PTR, Fn, Var, const
from scalein.llvm_backend.stage import Lowered

_LITERAL = -1  # in slot `number`: the run has numbers of its own
_STATE = ("at", "left", "number", "base", "next", "values_left", "page", "width")
_MAX_SHIFT = 35  # bits of a varint


def lower_unpack(value_bytes: int) -> Lowered:
    """The kernel that makes values of the next numbers, until there are `count` or no page is left."""
    f = Fn("unpack")
    b = f.b
    count, entries = f.slot("count"), f.slot("entries")
    out, values = f.slot("out", PTR), f.slot("values", PTR)
    value_type = ir.IntType(8 * value_bytes)
    state = {name: f.var(I64, f.get_slot(name)) for name in _STATE}
    left, number, following, values_left, width = (
        state[name] for name in ("left", "number", "next", "values_left", "width"))
    done, greatest = f.var(I64, f.get_slot("done")), f.var(I64, const(0))
    data, size = f.var(PTR, f.get_slot("data", PTR)), f.var(I64, f.get_slot("size"))
    page = Cursor(f, data, size, state["at"])
    run = _Run(f, page, state["base"], width)

    def value(number: ir.Value) -> ir.Value:
        return f.load_input(f.at(values, number, value_type), value_type)

    def one_by_one(at: Var, end: ir.Value) -> None:
        with f.forever() as slow:
            slow.stop_if(b.icmp_signed(">=", at.get(), end))
            found = run.number(following.get())
            greatest.set(_greater(f, greatest.get(), found))
            f.store(value(found), out, at.get())
            at.set(b.add(at.get(), const(1)))
            following.set(b.add(following.get(), const(1)))

    def by_groups(at: Var, end: ir.Value) -> None:
        whole = b.ashr(b.sub(end, at.get()), const(3))
        groups = f.max(const(0), f.min(whole, run.groups_within(following.get())))
        first_out, first = at.get(), run.place(following.get())
        start, bits, numbers = data.get(), width.get(), run.group()
        with f.loop(groups, rare=True) as group:
            found = numbers(f.byte_at(start, b.add(first, b.mul(group, bits))))
            place = b.add(first_out, b.shl(group, const(3)))
            for k, each in enumerate(found):
                f.store(value(each), out, b.add(place, const(k)))
            while len(found) > 1:  # as a tree: in a row, each would wait for the one before
                found = [_greater(f, x, y) for x, y in zip(found[::2], found[1::2], strict=True)]
            greatest.set(_greater(f, greatest.get(), found[0]))
        passed = b.shl(groups, const(3))
        at.set(b.add(at.get(), passed))
        following.set(b.add(following.get(), passed))

    def begin_page() -> None:
        about = f.at(f.slot("pages", PTR), b.mul(state["page"].get(), const(OPEN_WORDS)), I64)
        data.set(f.load(about, const(0), PTR))
        size.set(f.load(about, const(1), I64))
        state["at"].set(const(0))
        with f.when(b.icmp_signed("!=", f.load(about, const(3), I64), const(0))):
            pass_levels(f, page, f.load(about, const(2), I64), page.number(4))
        found = page.byte()
        values_left.set(f.load(about, const(2), I64))
        with f.when_else(b.icmp_signed("==", found, const(0))) as (constant, others):
            with constant:  # all are the first entry, and nothing follows
                f.leave_if(b.icmp_signed("==", entries, const(0)), ERROR)
                number.set(const(0))
                left.set(values_left.get())
            with others:
                f.leave_if(b.icmp_signed(">", found, f.slot("most_width")), ERROR)
                width.set(found)
                left.set(const(0))
        state["page"].set(b.add(state["page"].get(), const(1)))

    with f.forever() as pages:
        pages.stop_if(b.icmp_signed(">=", done.get(), count))
        with f.when(b.icmp_signed("==", values_left.get(), const(0))):
            with f.when(b.icmp_signed(">=", state["page"].get(), f.slot("pages.count"))):
                pages.stop()
            begin_page()
            pages.again()
        with f.when(b.icmp_signed("==", left.get(), const(0))):
            _begin_run(f, page, state, entries)
        n = f.min(f.min(left.get(), values_left.get()), b.sub(count, done.get()))
        end = b.add(done.get(), n)
        with f.when_else(b.icmp_signed(">=", number.get(), const(0))) as (repeated, literal):
            with repeated:
                same = value(number.get())
                with f.loop(end, done.get()) as i:
                    f.store(same, out, i)
            with literal:
                at = f.var(I64, done.get())
                before_group = b.and_(b.sub(const(0), following.get()), const(7))
                one_by_one(at, f.min(end, b.add(done.get(), before_group)))
                by_groups(at, end)
                one_by_one(at, end)
        left.set(b.sub(left.get(), n))
        values_left.set(b.sub(values_left.get(), n))
        done.set(end)
    f.leave_if(b.icmp_unsigned(">=", greatest.get(), entries), ERROR)
    for name, var in (*state.items(), ("done", done), ("size", size)):
        f.set_slot(name, var.get())
    f.b.store(data.get(), f.slot_ptr("data"))
    b.ret(const(DONE))
    frame = f.finish()
    return Lowered("unpack", f.text(), frame, (), (), ())


def _greater(f: Fn, a: ir.Value, b: ir.Value) -> ir.Value:
    return f.call("llvm.umax.i64", I64, [a, b])


class Cursor:
    """A reader of consecutive bytes; the kernel ends with ERROR past the end."""

    def __init__(self, f: Fn, data: Var, size: Var, at: Var) -> None:
        self._f, self.data, self.size, self.at = f, data, size, at

    def byte(self) -> ir.Value:
        f, b = self._f, self._f.b
        f.leave_if(b.icmp_signed(">=", self.at.get(), self.size.get()), ERROR)
        found = b.zext(f.load_input(f.byte_at(self.data.get(), self.at.get()), I8), I64)
        self.at.set(b.add(self.at.get(), const(1)))
        return found

    def number(self, size: int) -> ir.Value:
        """An integer of that many bytes."""
        b, found = self._f.b, const(0)
        for k in range(size):
            found = b.or_(found, b.shl(self.byte(), const(8 * k)))
        return found

    def varint(self) -> ir.Value:
        f, b = self._f, self._f.b
        head, shift = f.var(I64, const(0)), f.var(I64, const(0))
        with f.forever() as more:
            f.leave_if(b.icmp_signed(">=", shift.get(), const(_MAX_SHIFT)), ERROR)
            found = self.byte()
            head.set(b.or_(head.get(), b.shl(b.and_(found, const(127)), shift.get())))
            shift.set(b.add(shift.get(), const(7)))
            more.stop_if(b.icmp_unsigned("<", found, const(128)))
        return head.get()

    def skip(self, size: ir.Value) -> None:
        f, b = self._f, self._f.b
        f.leave_if(b.icmp_unsigned(">", size, b.sub(self.size.get(), self.at.get())), ERROR)
        self.at.set(b.add(self.at.get(), size))


def pass_levels(f: Fn, page: Cursor, count: ir.Value, size: ir.Value) -> None:
    """Skip the bytes of definition levels, which must be 1 for all values."""
    b = f.b
    end = b.add(page.at.get(), size)
    f.leave_if(b.icmp_signed(">", end, page.size.get()), ERROR)
    left = f.var(I64, count)
    with f.forever() as levels:
        levels.stop_if(b.icmp_signed("<=", left.get(), const(0)))
        head = page.varint()
        length = b.lshr(head, const(1))
        with f.when_else(b.trunc(head, I1)) as (literal, repeated):
            with literal, f.loop(length, rare=True):
                some = f.max(const(0), f.min(const(8), left.get()))
                wanted = b.sub(b.shl(const(1), some), const(1))
                f.leave_if(b.icmp_signed("!=", b.and_(page.byte(), wanted), wanted), ERROR)
                left.set(b.sub(left.get(), some))
            with repeated:
                f.leave_if(b.icmp_signed("!=", page.byte(), const(1)), ERROR)
                left.set(b.sub(left.get(), length))
    page.at.set(end)


def _begin_run(f: Fn, page: Cursor, state: dict[str, Var], entries: ir.Value) -> None:
    """Read how the next run begins. One of no numbers is passed: another begins then."""
    b, width = f.b, state["width"].get()
    head = page.varint()
    length = b.lshr(head, const(1))
    with f.when_else(b.trunc(head, I1)) as (literal, repeated):
        with literal:
            state["number"].set(const(_LITERAL))
            state["base"].set(page.at.get())
            state["next"].set(const(0))
            state["left"].set(b.shl(length, const(3)))
            page.skip(b.mul(length, width))
        with repeated:
            number = f.var(I64, const(0))
            for k in range(MAX_BITS // 8):
                with f.when(b.icmp_unsigned(">", width, const(8 * k))):
                    number.set(b.or_(number.get(), b.shl(page.byte(), const(8 * k))))
            f.leave_if(b.icmp_unsigned(">=", number.get(), entries), ERROR)
            state["number"].set(number.get())
            state["left"].set(length)


class _Run:
    """Numbers of `width` bits, from byte `base` of a page on."""

    def __init__(self, f: Fn, page: Cursor, base: Var, width: Var) -> None:
        self._f, self._page, self._base, self._width = f, page, base, width

    def place(self, following: ir.Value) -> ir.Value:
        """The byte in which a number begins."""
        b = self._f.b
        return b.add(self._base.get(), b.lshr(b.mul(following, self._width.get()), const(3)))

    def groups_within(self, following: ir.Value) -> ir.Value:
        """Of how many groups, from a number on, all words lie within the page; not above 0 if of none."""
        b, width = self._f.b, self._width.get()
        last_word = b.lshr(b.mul(width, const(7)), const(3))
        room = b.sub(b.sub(self._page.size.get(), b.add(last_word, const(8))), self.place(following))
        return b.sdiv(b.add(room, width), width)

    def group(self) -> Callable[[ir.Value], list[ir.Value]]:
        """Gives the eight numbers of the group that begins at a place: a word is loaded for each."""
        f, b, width = self._f, self._f.b, self._width.get()
        mask = b.sub(b.shl(const(1), width), const(1))
        bits = [b.mul(width, const(k)) for k in range(8)]
        bytes_before, bits_before = ([op(each, const(by)) for each in bits] for op, by in ((b.lshr, 3), (b.and_, 7)))

        def numbers(start: ir.Value) -> list[ir.Value]:
            words = [f.load_input(f.byte_at(start, at), I64, align=1) for at in bytes_before]
            return [b.and_(b.lshr(word, skip), mask) for word, skip in zip(words, bits_before, strict=True)]

        return numbers

    def number(self, following: ir.Value) -> ir.Value:
        """One index, byte by byte, without reading past the page."""
        f, b, width = self._f, self._f.b, self._width.get()
        first, last = self.place(following), b.sub(self._page.size.get(), const(1))
        found = const(0)
        for k in range((MAX_BITS + 14) // 8):  # bytes that it may touch
            byte = f.load_input(f.byte_at(self._page.data.get(), f.min(b.add(first, const(k)), last)), I8)
            found = b.or_(found, b.shl(b.zext(byte, I64), const(8 * k)))
        bits = b.and_(b.mul(following, width), const(7))
        return b.and_(b.lshr(found, bits), b.sub(b.shl(const(1), width), const(1)))
