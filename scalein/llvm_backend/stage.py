"""lower_stage(): one kernel for one stage. The row loop over blocks is opened here and nowhere else.

A kernel runs over rows [row, end) of its frame, cut into blocks, and passes each through the steps
into the sink. `row` in the frame is the first row of the block under way: whatever status a kernel
leaves with, calling it again goes on there. Partition rows come in pieces; then `row` counts within
the piece under way.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from llvmlite import ir

from scalein.ir.exprs import Col, Expr, columns
from scalein.ir.internal_names import is_internal
from scalein.ir.passes.pass_through import ROW
from scalein.ir.stages import (
    FLOW_SINKS,
    ORDINAL,
    Collect,
    DedupStep,
    ExpandLog,
    FilterStep,
    FromBatches,
    FromPartials,
    FromPointers,
    FromRecords,
    FromRows,
    FromTable,
    Group,
    Merge,
    MergeBag,
    Partition,
    Probe,
    Process,
    ProjectStep,
    Rank,
    Read,
    Stage,
    Step,
)
from scalein.layout import BLOCK_ROWS, COLUMN, DONE, ERROR, PROBING_BLOCK_ROWS, Frame, size_of
from scalein.llvm_backend.block import Block, keep
from scalein.llvm_backend.code import Code
from scalein.llvm_backend.dedup import lower_dedup
from scalein.llvm_backend.exprs import lower_expr
from scalein.llvm_backend.fn import I64, PTR, Fn, const
from scalein.llvm_backend.group_reader import partials_env, table_env
from scalein.llvm_backend.materialize import (
    bind,
    find_materialized,
    hoist_costly,
    materialize_needed,
    multiplies,
    sink_exprs,
)
from scalein.llvm_backend.parts import columns_outside_parts, is_wide
from scalein.llvm_backend.probe import lower_probe
from scalein.llvm_backend.readers import ArrowColumn, field_value
from scalein.llvm_backend.sinks.collect import lower_collect
from scalein.llvm_backend.sinks.group import Rows, lower_group, time_bounds
from scalein.llvm_backend.sinks.merge import lower_merge
from scalein.llvm_backend.sinks.partition import lower_partition
from scalein.llvm_backend.sinks.side_state import lower_expand_log, lower_merge_bag, lower_rank
from scalein.llvm_backend.target import Target
from scalein.llvm_backend.text_arena import begin_block, forgets_text
from scalein.llvm_backend.values import Binding, Env, Row, Value


@dataclass(frozen=True, slots=True)
class Lowered:
    """LLVM text of a kernel, the frame it expects, and the texts of its error bits."""

    name: str
    text: str
    frame: Frame
    errors: tuple[str, ...]
    never_null: tuple[bool, ...]  # of the collected columns
    checks: tuple[str, ...]  # of safe mode


def lower_stage(stage: Stage, target: Target, safe: bool = False) -> Lowered:
    """The kernel of a specialised stage."""
    stage = hoist_costly(stage)
    f = Fn(stage.name, safe=safe, features="compress" if target.has_compress else "")
    code = Code(f)
    code.failed, code.rounds = f.var(I64, const(0)), f.var(I64, const(0))
    reads = stage.reader.reads if isinstance(stage.reader, FromBatches) else ()
    columns = [ArrowColumn(code, read) for read in reads]
    materialized = find_materialized(stage)
    eager = columns_outside_parts(stage, materialized) if is_wide(stage) else None
    is_plain = isinstance(stage.sink, Collect) and not any(isinstance(s, Probe | DedupStep) for s in stage.steps)
    step = BLOCK_ROWS if is_plain or _takes_large_blocks(stage) else PROBING_BLOCK_ROWS

    is_forgetful = forgets_text(stage, sink_exprs(stage.sink)) or (
        isinstance(stage.sink, Process) and stage.sink.makes_text)

    def lower_block(source: ir.Value | None, start: ir.Value, count: ir.Value, end: ir.Value) -> None:
        if is_forgetful:
            begin_block(code)
        for column, read in zip(columns, reads, strict=True):
            column.open_block(start, count, only_parts=eager is not None and read.name not in eager)
        block = Block(count, {"in": None})
        env = _read(code, stage, columns, source, start)
        bounds = _watch(code, stage, env, count)
        if isinstance(stage.reader, FromTable) and stage.reader.sparse:
            block = keep(code, block, lambda row: row.get(env["?live"]).data)
        low = _Lowering(code, stage, start, count, end, step, materialized, bounds)
        _steps(low, stage.steps, block, env)

    if isinstance(stage.reader, FromRows):
        with _pieces(f) as (source, end), _blocks(f, end, step) as (start, count):
            lower_block(source, start, count, end)
    else:
        with _blocks(f, f.slot("end"), step) as (start, count):
            lower_block(None, start, count, f.slot("end"))
    f.b.ret(const(DONE))
    frame = f.finish()
    return Lowered(stage.name, f.text(), frame, tuple(code.errors), tuple(code.never_null), tuple(code.checks))


@contextmanager
def _pieces(f: Fn) -> Iterator[tuple[ir.Value, ir.Value]]:
    """The loop over pieces of rows: address and row count of each. `row` counts within `piece`."""
    piece = f.var(I64, f.get_slot("piece"))
    with f.forever() as pieces:
        f.set_slot("piece", piece.get())
        pieces.stop_if(f.b.icmp_signed(">=", piece.get(), f.slot("piece.count")))
        place = f.at(f.slot("pieces", PTR), f.b.shl(piece.get(), const(1)), I64)
        yield f.b.load(place, typ=PTR), f.load(place, const(1), I64)
        f.set_slot("row", const(0))
        piece.set(f.b.add(piece.get(), const(1)))


@contextmanager
def _blocks(f: Fn, end: ir.Value, step: int) -> Iterator[tuple[ir.Value, ir.Value]]:
    """The loop over blocks of `step` rows: first row and row count of each."""
    row = f.var(I64, f.get_slot("row"))
    with f.forever() as blocks:
        f.set_slot("row", row.get())
        blocks.stop_if(f.b.icmp_signed(">=", row.get(), end))
        start = row.get()
        count = f.min(f.b.sub(end, start), const(step))
        yield start, count
        row.set(f.b.add(start, count))


def _takes_large_blocks(stage: Stage) -> bool:
    if isinstance(stage.sink, FLOW_SINKS):
        return False
    from scalein.llvm_backend.store_sinks import takes_large_blocks

    return takes_large_blocks(stage.sink)


def _read(code: Code, stage: Stage, columns: list[ArrowColumn], source: ir.Value | None, start: ir.Value) -> Env:
    match stage.reader:
        case FromPartials(reads) as reader:
            given = {read.name: column.binding(start) for read, column in zip(reads, columns, strict=True)}
            return partials_env(code, reader, given)
        case FromBatches(reads):
            number = Binding(lambda row: Value(code.f.b.add(start, row.offset("in"))))
            bindings = {read.name: column.binding(start) for read, column in zip(reads, columns, strict=True)}
            return {ROW: number, **bindings}
        case FromRows(reads) as reader:
            return {read.name: Binding(partial(_row_field, code, reader, read, source, start)) for read in reads}
        case FromTable():
            return table_env(code, stage.reader, start)
        case FromRecords():
            return {}
        case FromPointers(table):
            from scalein.llvm_backend.store_index import stored_env

            return stored_env(code, table, start)


def _row_field(code: Code, reader: FromRows, read: Read, source: ir.Value, start: ir.Value, row: Row) -> Value:
    f = code.f
    number = f.b.add(start, row.offset("in"))
    base = f.byte_at(source, f.b.mul(number, const(reader.stride)))
    nulls = f.b.load(f.byte_at(base, reader.null_offset), typ=I64, align=8) if read.nulls else None
    return field_value(code, f.byte_at(base, read.offset), read, nulls)


@dataclass(frozen=True, slots=True)
class _Lowering:
    """What stays the same on a block's way through the steps."""

    code: Code
    stage: Stage
    start: ir.Value
    count: ir.Value
    end: ir.Value
    step: int
    materialized: frozenset[tuple[int, str]]  # columns: position of the `ProjectStep` among the steps, name
    bounds: tuple[ir.Value, ir.Value] | None  # of the times of all rows, if they are watched


def _steps(low: _Lowering, steps: tuple[Step, ...], block: Block, env: Env) -> None:
    """The rest of the stage for a block; a join that multiplies rows runs it once a round."""
    code = low.code
    for number, step in enumerate(steps):
        at = len(low.stage.steps) - len(steps) + number
        match step:
            case FilterStep(predicate):
                materialize_needed(block, env, [predicate])
                block = keep(code, block, partial(_is_true, code, predicate, env))
                code.check_errors(ERROR)
                if at == 0 and not is_wide(low.stage):
                    _fetch_ahead(low, block, columns(predicate))
            case ProjectStep(items):
                # Bound lazily: a column is computed in the loop that needs it, under the rows live there.
                ours = {name: binding for name, binding in env.items() if is_internal(name)}
                env = {**ours, **{i.name: bind(code, i.expr, env, (at, i.name) in low.materialized) for i in items}}
            case Probe() | DedupStep():
                materialize_needed(block, env, step.exprs if isinstance(step, Probe) else step.keys)
                if multiplies(step):  # after it, a row's columns would be computed for each of its matches
                    materialize_needed(block, env, [Col(name) for name in env])
                then = partial(_steps, low, steps[number + 1 :])
                if isinstance(step, Probe):
                    lower_probe(code, step, block, env, then)
                else:
                    lower_dedup(code, step, block, env, then)
                return
    materialize_needed(block, env, sink_exprs(low.stage.sink))
    _sink(low, block, env)


FETCH_SHARE = 8  # of a block's rows; with fewer live ones most lines would be fetched for nothing


def _fetch_ahead(low: _Lowering, block: Block, seen: set[str]) -> None:
    """Prefetch the next block of the columns that are read row by row after a filter.

    The hardware follows a column that is read straight through; one that is picked from it does not follow.
    """
    f, b, reader = low.code.f, low.code.f.b, low.stage.reader
    if not isinstance(reader, FromBatches):
        return
    picked = [r for r in reader.reads if r.form == "fixed" and r.name not in seen]
    if not picked:
        return
    following = b.add(low.start, low.count)
    rows = f.min(b.sub(low.end, following), const(low.step))
    with f.when(b.icmp_signed(">", b.mul(block.count, const(FETCH_SHARE)), low.count)):
        for read in picked:
            size = size_of(read.dtype)
            first = f.byte_at(f.slot(f"{COLUMN}{read.name}.data", PTR), b.mul(following, const(size)))
            with f.loop(b.mul(rows, const(size)), step=64) as offset:
                f.prefetch(f.byte_at(first, offset))


def _is_true(code: Code, predicate: Expr, env: Env, row: Row) -> ir.Value:
    value = lower_expr(code, predicate, env, row)
    holds = code.f.all_of(value.data, value.valid)
    assert holds is not None
    return holds


def _sink(low: _Lowering, block: Block, env: Env) -> None:
    code, f, start, stage = low.code, low.code.f, low.start, low.stage

    def ordinal(row: Row) -> ir.Value:
        """The row's number in the source."""
        if ORDINAL in env:  # carried through a partition
            return row.get(env[ORDINAL]).data
        return f.b.add(f.b.add(f.slot("first_row"), start), row.offset("in"))

    match stage.sink:
        case Collect():
            lower_collect(code, stage.sink, block, env)
        case Group():
            lower_group(stage.sink, Rows(code, block, env, ordinal, _whole(low, stage.sink), low.bounds))
            code.check_errors(ERROR)
        case Merge():
            lower_merge(code, stage.sink, block, start)
        case MergeBag():
            lower_merge_bag(code, stage.sink, block, start)
        case ExpandLog():
            lower_expand_log(code, stage.sink, block, start)
        case Rank():
            lower_rank(code, stage.sink, block, start)
        case Process():
            from scalein.llvm_backend.sinks.process import lower_process  # few flows have one

            lower_process(code, stage.sink, block, env, start)
        case Partition():
            lower_partition(code, stage.sink, block, env, ordinal)
        case _:
            from scalein.llvm_backend.store_sinks import lower_store_sink

            lower_store_sink(code, stage.sink, block, env, start)


def _whole(low: _Lowering, sink: Group) -> Block | None:
    """The block as it was read, if a filter thinned it out and the time is a column of the batch."""
    return Block(low.count, {"in": None}) if low.stage.steps and _has_times(low.stage, sink) else None


def _has_times(stage: Stage, sink: Group) -> bool:
    """Whether the time is computed from columns of the batch alone."""
    window = sink.table.window
    if window is None or not isinstance(stage.reader, FromBatches):
        return False
    given = {name for step in stage.steps if isinstance(step, Probe) for name, _ in step.keep}
    return not any(isinstance(step, ProjectStep) for step in stage.steps) and not columns(window.time) & given


def _watch(code: Code, stage: Stage, env: Env, count: ir.Value) -> tuple[ir.Value, ir.Value] | None:
    """The least and the greatest time of a block as it was read, which also go to slots; None if they are not watched,
    or they are not there to be read.
    """
    f, sink = code.f, stage.sink
    if not isinstance(sink, Group) or not sink.watched or not _has_times(stage, sink):
        return None
    assert sink.table.window is not None and isinstance(stage.reader, FromBatches)  # noqa: PT018
    time = sink.table.window.time
    if not any(isinstance(time, Col) and r.name == time.name and r.form == "fixed" and not r.nulls
               for r in stage.reader.reads):  # fmt: skip
        return None
    least, greatest = time_bounds(code, env, time, Block(count, {"in": None}))
    f.set_slot("time.least", f.min(f.get_slot("time.least"), least))
    f.set_slot("time.greatest", f.max(f.get_slot("time.greatest"), greatest))
    return least, greatest
