"""Unpacking: values of Parquet pages that are numbers of dictionary entries.

A page is, decompressed: levels, if the column may have nulls; a byte with the width of its numbers; the numbers. Both
levels (of one bit, all 1: there are no nulls) and numbers are in runs, Parquet's RLE / bit-packed hybrid. A run begins
with a varint: `count << 1` before one number that repeats `count` times, `groups << 1 | 1` before 8 * `groups` numbers
of `width` bits each, one behind the other.

There is a kernel for each width and size of value: with a known width, the eight numbers of a group are shifts of a few
words. It goes on from page to page, and stops with OTHER_WIDTH at one that wants another kernel.

Invariants: no byte outside of a page is read. The dictionary has room for 2^width values, whatever it holds, so that no
number leads out of it; one that is not below `entries` ends the kernel with ERROR, as does a run that leads out of its
page, or a null. Slots `at` to `page` say where the next call goes on.
"""

from __future__ import annotations

from llvmlite import ir

from scalein.layout import DONE, ERROR, OTHER_WIDTH, PAGE_WORDS
from scalein.llvm_backend.fn import I1, I8, I64, PTR, Fn, Var, const
from scalein.llvm_backend.stage import Lowered

_LITERAL = -1  # in slot `number`: the run has numbers of its own
_STATE = ("at", "left", "number", "base", "next", "values_left", "page")
_MOST_SHIFT = 35  # bits of a varint


def lower_unpack(width: int, value_bytes: int) -> Lowered:
    """The kernel that makes values of the next numbers, until there are `count` or no page is left."""
    f = Fn("unpack")
    b = f.b
    count, entries = f.slot("count"), f.slot("entries")
    out, values = f.slot("out", PTR), f.slot("values", PTR)
    value_type = ir.IntType(8 * value_bytes)
    state = {name: f.var(I64, f.get_slot(name)) for name in _STATE}
    left, number, following, values_left = (state[name] for name in ("left", "number", "next", "values_left"))
    done, greatest = f.var(I64, f.get_slot("done")), f.var(I64, const(0))
    data, size = f.var(PTR, f.get_slot("data", PTR)), f.var(I64, f.get_slot("size"))
    page = Cursor(f, data, size, state["at"])
    run = _Run(f, width, page, state["base"])

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
        start = data.get()
        with f.loop(groups, rare=True) as group:
            found = run.group(start, b.add(first, b.mul(group, const(width))))
            place = b.add(first_out, b.shl(group, const(3)))
            for k, each in enumerate(found):
                f.store(value(each), out, b.add(place, const(k)))
            while len(found) > 1:  # as a tree: in a row, each would wait for the one before
                found = [_greater(f, x, y) for x, y in zip(found[::2], found[1::2], strict=True)]
            greatest.set(_greater(f, greatest.get(), found[0]))
        passed = b.shl(groups, const(3))
        at.set(b.add(at.get(), passed))
        following.set(b.add(following.get(), passed))

    def save() -> None:
        for name, var in (*state.items(), ("done", done), ("size", size)):
            f.set_slot(name, var.get())
        f.b.store(data.get(), f.slot_ptr("data"))

    def begin_page() -> None:
        about = f.at(f.slot("pages", PTR), b.mul(state["page"].get(), const(PAGE_WORDS)), I64)
        data.set(f.load(about, const(0), PTR))
        size.set(f.load(about, const(1), I64))
        state["at"].set(const(0))
        with f.when(b.icmp_signed("!=", f.load(about, const(3), I64), const(0))):
            _pass_levels(f, page, f.load(about, const(2), I64))
        found = page.byte()
        values_left.set(f.load(about, const(2), I64))
        with f.when_else(b.icmp_signed("==", found, const(0))) as (constant, others):
            with constant:  # all are the first entry, and nothing follows
                f.leave_if(b.icmp_signed("==", entries, const(0)), ERROR)
                number.set(const(0))
                left.set(values_left.get())
            with others:
                with f.when(b.icmp_signed("!=", found, const(width))):
                    f.leave_if(b.icmp_unsigned(">=", greatest.get(), entries), ERROR)
                    f.set_slot("width", found)
                    values_left.set(const(0))
                    save()
                    f.leave(OTHER_WIDTH)
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
            _begin_run(f, width, page, state, entries)
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
    save()
    b.ret(const(DONE))
    frame = f.finish()
    return Lowered("unpack", f.text(), frame, (), (), ())


def _greater(f: Fn, a: ir.Value, b: ir.Value) -> ir.Value:
    return f.call("llvm.umax.i64", I64, [a, b])


class Cursor:
    """Bytes that are read one behind the other; the kernel ends with ERROR where there is none."""

    def __init__(self, f: Fn, data: Var, size: Var, at: Var) -> None:
        self._f, self.data, self.size, self.at = f, data, size, at

    def byte(self) -> ir.Value:
        f, b = self._f, self._f.b
        f.leave_if(b.icmp_signed(">=", self.at.get(), self.size.get()), ERROR)
        found = b.zext(f.load_input(f.byte_at(self.data.get(), self.at.get()), I8), I64)
        self.at.set(b.add(self.at.get(), const(1)))
        return found

    def number(self, size: int) -> ir.Value:
        """A number of so many bytes."""
        b, found = self._f.b, const(0)
        for k in range(size):
            found = b.or_(found, b.shl(self.byte(), const(8 * k)))
        return found

    def varint(self) -> ir.Value:
        f, b = self._f, self._f.b
        head, shift = f.var(I64, const(0)), f.var(I64, const(0))
        with f.forever() as more:
            f.leave_if(b.icmp_signed(">=", shift.get(), const(_MOST_SHIFT)), ERROR)
            found = self.byte()
            head.set(b.or_(head.get(), b.shl(b.and_(found, const(127)), shift.get())))
            shift.set(b.add(shift.get(), const(7)))
            more.stop_if(b.icmp_unsigned("<", found, const(128)))
        return head.get()

    def skip(self, size: ir.Value) -> None:
        f, b = self._f, self._f.b
        f.leave_if(b.icmp_unsigned(">", size, b.sub(self.size.get(), self.at.get())), ERROR)
        self.at.set(b.add(self.at.get(), size))


def _pass_levels(f: Fn, page: Cursor, count: ir.Value) -> None:
    """Leave levels behind, which have to be 1 for all values."""
    b = f.b
    size = page.number(4)
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


def _begin_run(f: Fn, width: int, page: Cursor, state: dict[str, Var], entries: ir.Value) -> None:
    """Read how the next run begins. One of no numbers is passed: another begins then."""
    b = f.b
    head = page.varint()
    length = b.lshr(head, const(1))
    with f.when_else(b.trunc(head, I1)) as (literal, repeated):
        with literal:
            state["number"].set(const(_LITERAL))
            state["base"].set(page.at.get())
            state["next"].set(const(0))
            state["left"].set(b.shl(length, const(3)))
            page.skip(b.mul(length, const(width)))
        with repeated:
            number = page.number((width + 7) // 8)
            f.leave_if(b.icmp_unsigned(">=", number, entries), ERROR)
            state["number"].set(number)
            state["left"].set(length)


class _Run:
    """Numbers of `width` bits, from byte `base` of a page on."""

    def __init__(self, f: Fn, width: int, page: Cursor, base: Var) -> None:
        self._f, self._width, self._page, self._base = f, width, page, base
        self._mask = const((1 << width) - 1)
        # Bytes of a group at which a word is loaded; and of each number its word, and the bits before it there.
        self._words: list[int] = []
        self._parts: list[tuple[int, int]] = []
        for bit in range(0, 8 * width, width):
            if not self._words or bit + width > 8 * self._words[-1] + 64:
                self._words.append(bit // 8)
            self._parts.append((len(self._words) - 1, bit - 8 * self._words[-1]))

    def place(self, following: ir.Value) -> ir.Value:
        """The byte in which a number begins."""
        b = self._f.b
        return b.add(self._base.get(), b.lshr(b.mul(following, const(self._width)), const(3)))

    def groups_within(self, following: ir.Value) -> ir.Value:
        """Of how many groups, from a number on, all words lie within the page; not above 0 if of none."""
        b = self._f.b
        after_first = self._words[-1] + 8 - self._width
        room = b.sub(b.sub(self._page.size.get(), const(after_first)), self.place(following))
        return b.sdiv(room, const(self._width))

    def group(self, data: ir.Value, first: ir.Value) -> list[ir.Value]:
        """The eight numbers of the group that begins at a byte."""
        f, b = self._f, self._f.b
        words = [f.load_input(f.byte_at(data, b.add(first, const(at))), I64, align=1) for at in self._words]
        return [b.and_(b.lshr(words[word], const(bits)), self._mask) for word, bits in self._parts]

    def number(self, following: ir.Value) -> ir.Value:
        """One number, byte by byte, none behind the page."""
        f, b = self._f, self._f.b
        first, last = self.place(following), b.sub(self._page.size.get(), const(1))
        found = const(0)
        for k in range((self._width + 14) // 8):  # bytes that it may touch
            byte = f.load_input(f.byte_at(self._page.data.get(), f.min(b.add(first, const(k)), last)), I8)
            found = b.or_(found, b.shl(b.zext(byte, I64), const(8 * k)))
        bits = b.and_(b.mul(following, const(self._width)), const(7))
        return b.and_(b.lshr(found, bits), self._mask)
