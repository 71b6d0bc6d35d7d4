"""Group: find each row's record, then count the row in.

HASH goes through the index. DIRECT computes the position: every key (and the slice) has a small
range given in the frame, and a key outside it makes the kernel leave before it has changed anything, so
that the runtime can widen the range or go over to HASH. Records are the same in all modes; a direct
table is an arena whose records already have their keys.

Windows: a row's slice is floor(time / slice size). A block's least and greatest time tell whether
all its rows fall in one slice; then no row pays for the division.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from llvmlite import ir

from scalein.ir.exprs import Col, Expr, type_of
from scalein.ir.printer import show_expr
from scalein.ir.stages import Group, GroupMode
from scalein.ir.tables import Acc, Slicing, Table
from scalein.ir.windows import Session
from scalein.layout import BLOCK_ROWS, ERROR, OUT_OF_DOMAIN, RING_ADVANCE
from scalein.llvm_backend import accumulators, reduce
from scalein.llvm_backend.block import PADDED, Block, keep, rows
from scalein.llvm_backend.code import Code
from scalein.llvm_backend.exprs import lower_expr
from scalein.llvm_backend.fn import I32, I64, I128, PTR, Fn, const
from scalein.llvm_backend.functions.arithmetic import floor_divide
from scalein.llvm_backend.hash_index import Index, place_in
from scalein.llvm_backend.keys import key_block, row_key
from scalein.llvm_backend.parts import acc_shape, can_outline, is_many
from scalein.llvm_backend.sessions import Sessions
from scalein.llvm_backend.side_state import Sides, base_of, find_sides, owner_of
from scalein.llvm_backend.values import Env, Row, Value, canonical


@dataclass(frozen=True, slots=True)
class Rows:
    """A block on its way into a group sink: live rows, their columns, their numbers in the source.

    `whole` is the block before any row was dropped, if its columns can still be read that way; `bounds` are the least
    and the greatest time in it, if they are known.
    """

    code: Code
    block: Block
    env: Env
    ordinal: Callable[[Row], ir.Value]
    whole: Block | None = None
    bounds: tuple[ir.Value, ir.Value] | None = None


def lower_group(sink: Group, given: Rows) -> None:
    code, table = given.code, sink.table
    given = _drop_null_times(given, table)
    if sink.owned:
        given = _keep_owned(given, sink)
    match sink.mode:
        case GroupMode.ONE:
            reduce.lower_reduce(code, table, given.block, given.env, given.ordinal, code.f.slot("one", PTR))
        case GroupMode.DIRECT:
            _lower_direct(sink, given)
        case GroupMode.HASH:
            _lower_hash(sink, given)


def _drop_null_times(given: Rows, table: Table) -> Rows:
    """A row without a time belongs to no window."""
    if table.window is None:
        return given
    time, code = table.window.time, given.code
    if not _may_be_null(given, time):
        return given

    def known(row: Row) -> ir.Value:
        value = lower_expr(code, time, given.env, row)
        assert value.valid is not None
        return value.valid

    return replace(given, block=keep(code, given.block, known), whole=None)


def _may_be_null(given: Rows, expr: Expr) -> bool:
    """Whether this kernel's variant can see a null: lower the expression on the side and look."""
    f = given.code.f
    here, dead = f.b.block, f.b.append_basic_block("probe")
    f.b.position_at_end(dead)
    errors = list(given.code.errors)
    valid = lower_expr(given.code, expr, given.env, given.block.row(f, const(0))).valid
    f.b.unreachable()
    given.code.errors[:] = errors
    f.b.position_at_end(here)
    return valid is not None


def _keep_owned(given: Rows, sink: Group) -> Rows:
    """Only rows whose key group this worker serves: group * workers // 256 == worker."""
    code, f = given.code, given.code.f

    def mine(row: Row) -> ir.Value:
        _, h = row_key(code, row, given.env, sink.keys, sink.table.has_nulls)
        share = f.b.lshr(f.b.mul(f.b.lshr(h, const(56)), f.slot("owner.workers")), const(8))
        return f.b.icmp_unsigned("==", share, f.slot("owner.worker"))

    return replace(given, block=keep(code, given.block, mine))


# --- slices


@dataclass(frozen=True, slots=True)
class Slices:
    """The slice of each row (its number), and the least and greatest of the block."""

    numbers: ir.Value
    least: ir.Value
    greatest: ir.Value


def _slices(given: Rows, table: Table) -> Slices | None:
    if table.window is None or table.slicing is Slicing.SESSION:
        return None
    code, f, b = given.code, given.code.f, given.code.f.b
    time = table.window.time

    def of(row: Row) -> ir.Value:
        return _moment(code, given.env, time, row)

    def bounds(block: Block, rare: bool = False) -> tuple[ir.Value, ir.Value]:
        return numbers_of(*time_bounds(code, given.env, time, block, rare))

    def numbers_of(low: ir.Value, high: ir.Value) -> tuple[ir.Value, ir.Value]:
        return slice_of(f, table, low), slice_of(f, table, high)

    if given.bounds is not None and given.block.vectors["in"] is None:
        least, greatest = numbers_of(*given.bounds)
    elif given.whole is None or not isinstance(time, Col):
        least, greatest = bounds(given.block)
    else:
        # Reading the column straight through is faster than picking the live rows out of it. Only if
        # that meets several slices do the live rows have to be looked at.
        first, last = bounds(given.whole) if given.bounds is None else numbers_of(*given.bounds)
        least_, greatest_ = f.var(I64, first), f.var(I64, last)
        with f.when(b.icmp_signed("!=", first, last)):
            first, last = bounds(given.block, rare=True)
            least_.set(first)
            greatest_.set(last)
        least, greatest = least_.get(), greatest_.get()
    numbers = f.scratch(I64, PADDED, "slices")
    with f.when_else(b.icmp_signed("==", least, greatest), likely=True) as (same, mixed):
        with same, f.loop(given.block.count) as k:
            f.store(least, numbers, k)
        with mixed, rows(code, given.block, rare=True) as row:
            f.store(slice_of(f, table, of(row)), numbers, row.k)
    _check_limits(given, table, Slices(numbers, least, greatest))
    return Slices(numbers, least, greatest)


def slice_of(f: Fn, table: Table, time: ir.Value) -> ir.Value:
    """The number of a time's slice; the time minus the offset could overflow."""
    assert table.window is not None
    number = floor_divide(f, time, table.slice_size)
    whole, rest = divmod(table.window.offset, table.slice_size)
    if rest:
        into = f.b.sub(time, f.b.mul(number, const(table.slice_size)))
        number = f.b.sub(number, f.b.zext(f.b.icmp_signed("<", into, const(rest)), I64))
    return f.b.sub(number, const(whole)) if whole else number


def _moment(code: Code, env: Env, time: Expr, row: Row) -> ir.Value:
    value, b = lower_expr(code, time, env, row).number, code.f.b
    return value if value.type == I64 else b.sext(value, I64) if type_of(time).is_signed else b.zext(value, I64)


def time_bounds(code: Code, env: Env, time: Expr, block: Block, rare: bool = False) -> tuple[ir.Value, ir.Value]:
    """The least and the greatest time of a block's rows, of which there are some."""
    f = code.f
    low, high = f.var(I64, const(2**63 - 1)), f.var(I64, const(-(2**63)))
    with rows(code, block, rare) as row:
        moment = _moment(code, env, time, row)
        low.set(f.min(low.get(), moment))
        high.set(f.max(high.get(), moment))
    return low.get(), high.get()


def _check_limits(given: Rows, table: Table, slices: Slices) -> None:
    """Fail rows one of whose windows begins or ends outside of what the time's type can hold."""
    code, f, b = given.code, given.code.f, given.code.f.b
    assert table.window is not None
    low, high = type_of(table.window.time).int_range()
    size, step = table.window_slices, table.window_step
    margin = size + step + -(-table.window.offset // table.slice_size)
    near = b.or_(b.icmp_signed("<", slices.least, const(low // table.slice_size + margin)),
                 b.icmp_signed(">", slices.greatest, const(high // table.slice_size - margin)))
    with f.when(near, likely=False):
        with f.loop(given.block.count, rare=True) as k:
            number = b.sext(f.load(slices.numbers, k, I64), I128)
            newest = b.mul(b.sext(floor_divide(f, f.load(slices.numbers, k, I64), step), I128), const(step, I128))
            oldest = b.sub(newest, const((-(-size // step) - 1) * step, I128))
            misses = b.icmp_signed("<=", b.add(oldest, const(size, I128)), number)
            oldest = b.select(misses, b.add(oldest, const(step, I128)), oldest)
            offset = const(table.window.offset, I128)
            start = b.add(b.mul(oldest, const(table.slice_size, I128)), offset)
            end = b.add(b.mul(b.add(newest, const(size, I128)), const(table.slice_size, I128)), offset)
            outside = b.or_(b.icmp_signed("<", start, const(low, I128)), b.icmp_signed(">", end, const(high, I128)))
            code.fail(f"integer overflow in the windows of `{show_expr(table.window.time)}`", outside)
        code.check_errors(ERROR)


def _check_ends(given: Rows, table: Table) -> None:
    """Fail rows whose session would end outside of what the time's type can hold."""
    code, f, b = given.code, given.code.f, given.code.f.b
    window = table.window
    assert isinstance(window, Session)
    if window.end is not None:
        return
    last = const(type_of(window.time).int_range()[1] - window.gap)
    _, greatest = time_bounds(code, given.env, window.time, given.block)
    with f.when(b.icmp_signed(">", greatest, last), likely=False):
        with rows(code, given.block, rare=True) as row:
            is_late = b.icmp_signed(">", _moment(code, given.env, window.time, row), last)
            code.fail(f"integer overflow in the windows of `{show_expr(window.time)}`", is_late)
        code.check_errors(ERROR)


def _interval(given: Rows, table: Table, row: Row) -> tuple[ir.Value, ir.Value]:
    """The first and the last time of a row: of one that is a session, both differ."""
    window = table.window
    assert isinstance(window, Session)
    first = _moment(given.code, given.env, window.time, row)
    if window.end is None:
        return first, first
    return first, given.code.f.b.sub(_moment(given.code, given.env, window.end, row), const(window.gap))


# --- HASH


def _lower_hash(sink: Group, given: Rows) -> None:
    code, f, b, table = given.code, given.code.f, given.code.f.b, sink.table
    index = Index(code, table, "table")
    index.ensure_arena(BLOCK_ROWS)
    with f.when(b.icmp_signed(">", given.block.count, const(0))):
        if table.slicing is Slicing.SESSION:
            _check_ends(given, table)
        slices = _slices(given, table)
        as_key = slices.numbers if slices is not None and table.slicing is Slicing.KEY else None
        if slices is not None and table.slicing is Slicing.RING:
            _check_ring(code, slices)
        keys = key_block(code, given.block, given.env, sink.keys, table.has_nulls, as_key)
        code.check_errors(ERROR)
        records = index.find(keys, given.block.count, as_key, insert=True)
        base = base_of(f, GroupMode.HASH)
        sides = find_sides(code, table, given.block, given.env,
                           lambda row: owner_of(f, base, f.load(records, row.k, PTR)))

        sessions = Sessions(code, table, index) if table.slicing is Slicing.SESSION else None

        def find(row: Row) -> Found:
            record = f.load(records, row.k, PTR)
            if sessions is not None:
                found = sessions.find(record, *_interval(given, table, row))
                return Found(found, None, lambda: owner_of(f, base, record))
            ring = None
            if slices is not None and table.slicing is Slicing.RING:
                slot = f.b.and_(f.load(slices.numbers, row.k, I64), const(table.ring - 1))
                ring = f.b.mul(slot, const(table.layout.ring_step))
            return Found(record, ring, lambda: owner_of(f, base, record))

        _count_in(given, sides, find)


def _check_ring(code: Code, slices: Slices) -> None:
    """Leave unless every slice of the block lies in the ring's open part."""
    f, b = code.f, code.f.b
    outside = b.or_(b.icmp_signed(">=", slices.greatest, f.slot("ring.limit")),
                    b.icmp_signed("<", slices.least, f.slot("ring.open")))
    with f.when(outside, likely=False):
        f.set_slot("ring.least", slices.least)
        f.set_slot("ring.greatest", slices.greatest)
        f.leave(RING_ADVANCE)


@dataclass(frozen=True, slots=True)
class Found:
    """A row's record, the offset of its slice in the record's ring, and what its side state knows it by."""

    record: ir.Value
    ring: ir.Value | None
    owner: Callable[[], ir.Value]


def _count_in(given: Rows, sides: Sides, find: Callable[[Row], Found]) -> None:
    """Update the records of all rows: in one loop, or where accumulators are many in one for each of them."""
    code, accs = given.code, list(enumerate(sides.table.accs))
    apart = [(number, acc) for number, acc in accs if can_outline(acc)] if is_many(accs) else []

    def update(accs: Sequence[tuple[int, Acc]]) -> None:
        with rows(code, given.block) as row:
            found = find(row)
            place = place_in(code.f, sides.table, found.record, found.ring)
            for number, acc in accs:
                if acc.has_side:
                    sides.count_in(number, acc, place, row, found.owner, lambda: given.ordinal(row))
                else:
                    accumulators.update(code, number, acc, place, row, given.env, lambda: given.ordinal(row))

    if apart and sides.table.slicing is Slicing.SESSION:  # a row changes which record is that of the next one
        with rows(code, given.block) as row:
            place = place_in(code.f, sides.table, find(row).record)
            for number, acc in accs:
                shape = acc_shape(number, acc, given.env)
                code.part(partial(accumulators.update, code, number, acc, place, row, given.env,
                                  lambda: given.ordinal(row)), *(("session", shape[0]), shape[1]) if shape else ())
        return
    if len(apart) < len(accs):
        update([(number, acc) for number, acc in accs if not apart or not can_outline(acc)])
    for number, acc in apart:
        shape = acc_shape(number, acc, given.env)
        code.part(partial(update, [(number, acc)]), *(("update", shape[0]), shape[1]) if shape else ())


# --- DIRECT


def _lower_direct(sink: Group, given: Rows) -> None:
    """Position = sum over keys of (key - least) * stride, + (slice - first) * stride of slices."""
    code, f, b, table = given.code, given.code.f, given.code.f.b, sink.table
    with f.when(b.icmp_signed(">", given.block.count, const(0))):
        slices = _slices(given, table)
        start: ir.Value = const(0)
        if slices is not None:
            first, span = f.slot("direct.first_slice"), f.slot("direct.slices")
            outside = b.or_(b.icmp_signed("<", slices.least, first),
                            b.icmp_signed(">=", slices.greatest, b.add(first, span)))
            f.leave_if(outside, OUT_OF_DOMAIN)
            start = first
        positions = f.scratch(I32, PADDED, "positions")
        bad = f.var(I64, const(0))
        with rows(code, given.block) as row:
            position: ir.Value = const(0)
            for number, key in enumerate(sink.keys):
                code_, outside = _key_code(given, number, key, row)
                bad.set(b.or_(bad.get(), b.zext(outside, I64)))
                position = b.add(position, b.mul(code_, f.slot(f"direct.stride{number}")))
            if slices is not None:
                step = b.sub(f.load(slices.numbers, row.k, I64), start)
                position = b.add(position, b.mul(step, f.slot("direct.slice_stride")))
            f.store(b.trunc(position, I32), positions, row.k)
        code.check_errors(ERROR)
        f.leave_if(b.icmp_unsigned("!=", bad.get(), const(0)), OUT_OF_DOMAIN)
        arena = base_of(f, GroupMode.DIRECT)

        def owner(row: Row) -> ir.Value:
            position = f.b.zext(f.load(positions, row.k, I32), I64)
            code.check_within("a record of the direct table", position, lambda: f.slot("direct.size"))
            return f.b.mul(position, const(table.layout.size))

        sides = find_sides(code, table, given.block, given.env, owner)

        def find(row: Row) -> Found:
            place = owner(row)
            return Found(f.byte_at(arena, place), None, lambda: place)

        _count_in(given, sides, find)


def _key_code(given: Rows, number: int, key: Expr, row: Row) -> tuple[ir.Value, ir.Value]:
    """A key's position in its range, and whether it lies outside. A null has the position after the last."""
    f, b = given.code.f, given.code.f.b
    dtype = type_of(key)
    value = lower_expr(given.code, key, given.env, row)
    plain = canonical(f, Value(value.data), dtype).number
    wide = plain if plain.type == I64 else (b.sext if dtype.is_signed else b.zext)(plain, I64)
    span = f.slot(f"direct.span{number}")
    place = b.sub(wide, f.slot(f"direct.least{number}"))
    outside = b.icmp_unsigned(">=", place, span)
    if value.valid is not None:
        outside = b.and_(outside, value.valid)
        place = b.select(value.valid, place, span)
    return place, outside
