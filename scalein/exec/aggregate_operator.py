"""What all aggregations of a job share: the check for late rows, pre-aggregation, and results from partial groups.

Workers aggregate what arrives as `collect` does, into tables that live between two barriers (`exec/preaggregate.py`);
at a barrier the partial groups (`ir/partials.py`) are drained. So the fast path of a job is that of a bounded run, and
a change of workers moves no state.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cached_property

import pyarrow as pa
import pyarrow.compute as pc

from scalein.arrow_rows import as_integers, filtered
from scalein.compiler import compile_flow
from scalein.dtypes import BOOL, Schema
from scalein.errors import ComputeError
from scalein.exec.bounded import PreAggregationProgram, Program
from scalein.exec.error_location import located
from scalein.exec.fragments import Fragment, over, placeholder
from scalein.exec.lateness import Lateness
from scalein.exec.operator import Batches, Context, FragmentRunner, Morsel, reads
from scalein.ir import ops
from scalein.ir.exprs import Call, Lit, Named, type_of
from scalein.ir.internal_names import internal
from scalein.ir.partials import TwoPhase, by_window, finished_rows, two_phase
from scalein.ir.passes.fuse import fuse
from scalein.ir.physical import Host, Limit, Node, Pipeline, Scan, Sort, WindowAggregate, identity
from scalein.ir.printer import show_expr
from scalein.ir.windows import Window
from scalein.storage.checked_json import Json, as_int, as_map

FOREVER = (1 << 63) - 1  # in units of time
MAX_GROUPS = 1 << 20  # in the workers' tables
MIN_GROUPS = 1 << 10  # the same under the smallest memory limit
MANY_SHARE = 0.3  # of the rows, from which on groups are many
ROW = "row"  # in the state of groups that count rows, or whose columns combine only together: the next row's number


class AggregateOperator:
    """What the operators of aggregations share: the check for late rows, and the aggregation of the others."""

    def __init__(self, fragment: Fragment, context: Context) -> None:
        assert isinstance(fragment.state, ops.Aggregate)
        self._fragment, self._context = fragment, context
        self._window, self._at = fragment.state.window, fragment.state.at
        used = fragment.state.state_reads()
        fields = Schema(tuple(field for field in fragment.before.schema if field.name in used)
                        or tuple(fragment.before.schema)[:1])
        self._names = fields.names
        self._late = None if self._window is None else Lateness(
            fragment, self._window, fragment.before.schema.names if context.keeps_late else self._names)
        self._checked_op = over(fragment.op, fragment.before, placeholder(fields))
        # Failing rows are removed before the late-row check and before they reach state.
        self._check = None if context.failed is None else FragmentRunner(
            all_computed(fragment, context.keeps_late), context)
        self._limits = None if context.failed is None or self._window is None else FragmentRunner(
            ops.Project(fragment.before, _limits(self._window)), replace(context, failed=self._beyond_limits))
        self._counted = 0  # rows since partial groups were drained
        self._row = 0  # the number of the next row, if aggregates depend on the order of rows
        self._has_many = False  # groups, compared with rows

    def _reads(self, program: Node) -> list[str]:
        return reads(program) + ([] if self._late is None else reads(self._late.rows.node))

    def _arrived(self, morsels: Iterable[Morsel], checked: Batches) -> Iterator[Morsel]:
        """Rows of the fragment's input that are not late. Rows whose event time is known only after the fragment's ops
        go to `checked`, as rows of the aggregation's input.
        """
        for morsel in self._sound(morsels):
            good, rest = (morsel, None) if self._late is None else self._late.split(morsel)
            if good is not None:
                self._counted += good.batch.num_rows
                yield good
            if self._late is None or rest is None:
                continue
            for found in self._late.split_late(rest, morsel.watermark, self._context.options):
                self._context.timeless(found.timeless)
                if found.late.num_rows:
                    self._context.late(found.late)
                if found.good.num_rows:
                    checked.append(found.good.select(self._names))

    def _sound(self, morsels: Iterable[Morsel]) -> Iterable[Morsel]:
        """Batches without rows that fail, if these have a place to go to."""
        check = self._check
        if check is None:
            return morsels
        return (morsel._replace(batch=batch) for morsel in self._within_limits(morsels)
                for batch in check.passing(morsel.batch))

    def _within_limits(self, morsels: Iterable[Morsel]) -> Iterator[Morsel]:
        """Batches without rows one of whose windows begins or ends outside of what the time's type can hold."""
        for morsel in morsels:
            if self._limits is None or self._is_far(morsel):
                yield morsel
            else:  # the bounds of times may be those of rows that are gone
                yield from (Morsel(batch, morsel.watermark) for batch in self._limits.passing(morsel.batch))

    def _is_far(self, morsel: Morsel) -> bool:
        """Whether the times of a batch are known to be far from the limits of their type."""
        assert self._window is not None
        if self._late is None or not morsel.column or morsel.column != self._late.column:
            return False
        low, high = self._late.dtype.int_range()
        margin = self._window.margin
        return morsel.least >= low + margin and morsel.greatest <= high - margin

    def _beyond_limits(self, batch: pa.RecordBatch, number: int, error: ComputeError) -> None:
        assert self._window is not None
        assert self._context.failed is not None
        if error.what.startswith("integer overflow"):
            error = ComputeError(f"integer overflow in the windows of `{show_expr(self._window.time)}`", at=self._at)
        self._context.failed(batch, number, error)

    @property
    def _counting(self) -> dict[str, Json]:
        """What a checkpoint says of the numbers of rows, where they matter."""
        return {}

    def _count_from(self, state: Json) -> None:
        """Go on counting rows where a checkpoint was."""

    next_end: int | None = None
    due: int | None = None
    is_done = emits_changes = defers_results = False

    def promise(self, watermark: int) -> int | None:
        """No window to come begins before the first one that is open; groups without one come at the end."""
        return None if self._late is None else self._late.least_open(watermark)

    def deferred(self) -> Iterable[pa.RecordBatch]:
        return []

    def close(self) -> None:
        pass


class Partial(AggregateOperator):
    """Rows to partial groups, and those to results."""

    def __init__(self, fragment: Fragment, context: Context, root: Node, is_told: bool = False) -> None:
        """With a changelog, each stored group belongs to one window."""
        super().__init__(fragment, context)
        node = aggregate_node(root)
        self._two = two = by_window(_two_phase(node, context)) if is_told else _two_phase(node, context)
        self._pre_aggregation = PreAggregationProgram(two.partial)
        self._most_groups = most_groups(two.partial.schema.arrow, context.options.memory)
        self._finish = Finalizer(fragment.op, root, node, two.final, context, two)
        self.reads = self._reads(two.partial)

    @property
    def _counting(self) -> dict[str, Json]:
        return {} if self._two.is_by_column else {ROW: self._row}

    def _count_from(self, state: Json) -> None:
        # A state that numbered no rows has no aggregate whose rows have numbers.
        self._row = 0 if self._two.is_by_column else as_int(as_map(state).get(ROW, 0))

    def _partials(self, morsels: Iterable[Morsel]) -> Batches:
        """Partial groups of rows; those of most rows come with `_taken`.

        Rows take one of the two ways: their event time is a column of the source, or is computed by the fragment's ops.
        """
        if self._context.takes_partials:
            return [morsel.batch for morsel in morsels]
        checked: Batches = []
        clean = (morsel.batch for morsel in self._arrived(morsels, checked))
        return [*self._counted_in(clean), *self._of_checked(checked)]

    def _counted_in(self, clean: Iterable[pa.RecordBatch]) -> Batches:
        """Partial groups that do not stay in workers' tables; where memory is short, that is looked at more often."""
        if self._context.options.memory is None:
            return self._added(clean)
        return [out for batch in clean for out in self._added([batch])]

    def _added(self, clean: Iterable[pa.RecordBatch]) -> Batches:
        self._count_in(self._pre_aggregation, clean)
        if self._pre_aggregation.count <= self._most_groups:
            return []
        counted = self._counted
        found = self._taken()  # tables may have room for more groups than there are
        self._has_many |= sum(batch.num_rows for batch in found) > MANY_SHARE * counted
        return found

    def _of_checked(self, rows: Batches) -> Batches:
        """Partial groups of rows of the group's input."""
        if not rows:
            return []
        self._count_in(self._checked_partial, rows)
        return list(self._checked_partial.drain())

    def _count_in(self, program: PreAggregationProgram, rows: Iterable[pa.RecordBatch]) -> None:
        try:
            self._row = program.add(rows, self._context.options, self._row)
        except ComputeError as error:
            raise located(error, self._fragment.op, program.node) from None

    @cached_property
    def _checked_partial(self) -> PreAggregationProgram:
        return PreAggregationProgram(_two_phase(aggregate_node(compile_flow(self._checked_op)), self._context).partial)

    def _taken(self) -> Batches:
        """Partial groups of the rows since the last time."""
        self._counted = 0
        return list(self._pre_aggregation.drain())


class Finalizer:
    """Computes results from partial groups: of all of them, or of the windows that end in a range."""

    def __init__(self, op: ops.Op, root: Node, node: WindowAggregate, final: WindowAggregate, context: Context,
                 two: TwoPhase | None = None) -> None:
        self._whole = FragmentRunner(op, context, Program(replaced(root, node, final)), by_row=False)
        self._windows = FragmentRunner(op, context, Program(final), by_row=False)
        items = None if two is None else finished_rows(two)
        rows = None if items is None else replaced(root, node, Pipeline(final.input, (), items))
        self._rows = None if rows is None else FragmentRunner(op, context, Program(fuse(rows)))
        self._downstream = FragmentRunner(op, context, Program(replaced(root, node, scan_of(node))), by_row=False)

    def all(self, given: Batches) -> Batches:
        """The results of partial groups; a key may have several, which are merged."""
        return self._whole.run(given)

    def each(self, given: Batches) -> Batches:
        """The results of complete groups: no key occurs twice."""
        return (self._whole if self._rows is None else self._rows).run(given)

    @property
    def is_by_row(self) -> bool:
        """Whether whole groups are finished one by one, in their order."""
        return self._rows is not None

    def between(self, given: Batches, after: int, end: int) -> Batches:
        """Windows that end after `after`, up to `end`, of slices some of which others need too."""
        windows = []
        for batch in self._windows.run(given):
            ends = as_integers(batch.column("window_end"))
            windows.append(filtered(batch, pc.and_(pc.greater(ends, after), pc.less_equal(ends, end))))
        return self.downstream(windows)

    def downstream(self, windows: Batches) -> Batches:
        """The results of windows that are finished."""
        return self._downstream.run(windows)


def most_groups(schema: pa.Schema, memory: int | None) -> int:
    """How many groups may stand in workers' tables, which have a third of what the step may keep: a record twice, since
    tables grow by doubling, and some bytes of an index.
    """
    if memory is None:
        return MAX_GROUPS
    sizes = (32 if (bits := _bits(field.type)) is None else (bits + 7) // 8 for field in schema)
    return max(MIN_GROUPS, min(MAX_GROUPS, memory // 3 // (2 * sum(sizes) + 16)))


def _bits(type_: pa.DataType) -> int | None:
    try:
        return int(type_.bit_width)
    except ValueError:  # text
        return None


# --- programs


def _two_phase(node: WindowAggregate, context: Context) -> TwoPhase:
    return two_phase(node, held=context.columns)


def _limits(window: Window) -> tuple[Named, Named]:
    begin, end = window.limits()
    return Named(internal("begin"), begin), Named(internal("end"), end)


def all_computed(fragment: Fragment, keeps_all: bool) -> ops.Op:
    """All that a group computes of a row, as columns. In a row without a time, it computes nothing more."""
    state = fragment.state
    assert isinstance(state, ops.Aggregate)
    found = [expr for expr, _ in state.exprs()]
    time = None if state.window is None else state.window.time
    if time is not None and time.nullable:
        there = Call("is_not_null", (time,), dtype=BOOL, nullable=False)
        found = [Call("if_else", (there, each, Lit(None, type_of(each))), dtype=each.dtype) for each in found]
    whole = tuple(identity(fragment.before.schema)) if keeps_all or not found else ()
    return ops.Project(fragment.before, (*whole, *(Named(internal(f"value{k}"), expr) for k, expr in enumerate(found))))


def aggregate_node(node: Node) -> WindowAggregate:
    """The aggregation of a fragment's program."""
    while not isinstance(node, WindowAggregate):
        assert isinstance(node, Pipeline | Host | Limit | Sort)
        node = node.input
    return node


def replaced(node: Node, old: WindowAggregate, new: Node) -> Node:
    """The program with another node in the place of its aggregation."""
    if node is old:
        return new
    assert isinstance(node, Pipeline | Host | Limit | Sort)
    return replace(node, input=replaced(node.input, old, new))


def scan_of(node: WindowAggregate) -> Scan:
    """A source of what a group gives."""
    return Scan(ops.Source("groups", node.schema.arrow, tuple(node.schema.names)))
