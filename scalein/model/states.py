"""What the steps of a flow keep in a job: their distinct keys in a sample, the bytes of each, and how long they stay.

Rows that wait for the watermark stay as long as its delay, those of windows until their window closes; what needs the
end of its input keeps all rows. A limit keeps none.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pyarrow as pa

from scalein.api.column import col, count
from scalein.api.flow import Flow
from scalein.dtypes import UNITS_PER_SECOND, Kind
from scalein.ir import ops
from scalein.ir.exprs import Col, Expr, Named, type_of
from scalein.ir.ops.over import SPACED, WINDOWED
from scalein.ir.ops.stream_join import WINDOW_COLUMNS, StreamJoin
from scalein.ir.passes.aggregate_layout import aggregate_table, distinct_table
from scalein.ir.rewrite import walk_streams
from scalein.layout import size_of
from scalein.model.costs import Groups, Span, StateCost

TEXT_ROWS = 10_000  # of which the length of text is taken
INDEX_BYTES = 16  # of a group: a word of the index, whose tables are half full on average, and a record's head


def states_of(op: ops.Op, rows: int) -> Iterator[StateCost]:
    """The state of a flow's steps, over tables that have `rows` rows together."""
    for step in walk_streams(op):
        match step:
            case ops.Aggregate():
                table = aggregate_table(step.keys, step.window, step.aggs)
                span = None
                if (window := step.window) is not None:
                    length = window.margin if window.is_session else window.margin - window.stride
                    span = _span(step.input, window.time, length, window.slice_size)
                yield _of_keys("group_by", step.input, step.keys, table.layout.size, rows, span)
            case ops.Distinct():
                keys = tuple(Named(name, _column(step.input, name)) for name in step.keys)
                yield _of_keys("distinct", step.input, keys, distinct_table(keys).layout.size, rows, None)
            case ops.Over():
                yield from _of_over(step, rows)
            case ops.Limit():
                pass  # it counts
            case ops.Process():
                fields = sum(size_of(slot.dtype) for slot in step.body.slots)
                yield _of_keys("process", step.input, step.keys, fields, rows, None)
            case StreamJoin():
                if (bound := step.bound) is None:
                    yield from (_of_rows("join", side, rows, None) for side in (step.left, step.right))
                    continue
                longest = max(bound.left_wait, bound.right_wait)
                for side, time in ((step.left, bound.left), (step.right, bound.right)):
                    yield _of_rows("join", side, rows, _span(side, time, longest))
            case ops.Sort(by=(ops.By(Col(name=name)), *_)) if name in WINDOW_COLUMNS and _is_windowed(step.input):
                pass  # windows leave it as they close
            case _ if step.has_state:
                yield _of_rows(type(step).__name__.lower(), step.streams[0], rows, None)


def _is_windowed(below: ops.Op) -> bool:
    """Whether windows of a watermark close below: what comes of them leaves in order."""
    windowed = any(isinstance(each, ops.Aggregate) and each.window is not None for each in walk_streams(below))
    return windowed and any(isinstance(each, ops.Watermark) for each in walk_streams(below))


def _of_over(step: ops.Over, rows: int) -> Iterator[StateCost]:
    """Of values over other rows, as `exec/over_operator.py` keeps them: the rows that wait for the watermark, what is
    remembered of each key, and the rows that frames in time reach back to.
    """
    below = step.input
    keys = tuple(Named(f"k{number}", key) for number, key in enumerate(step.keys))
    if not step.kind:
        yield _of_rows("over", below, rows, None)
        return
    time = _column(below, step.time)
    if step.kind == WINDOWED:
        window = next((each.window for each in walk_streams(below) if isinstance(each, ops.AssignWindows)), None)
        if window is not None:  # else windows that were aggregated leave it as they close
            yield _of_rows("over", below, rows, _span(below, time, window.margin - window.stride))
        return
    width = sum(size_of(type_of(key.expr)) for key in keys) + size_of(type_of(time))
    if step.kind == SPACED:
        within = next(param for call in step.calls for param in call.agg.params if isinstance(param, int))
        yield _of_rows("distinct", below, rows, _span(below, time, 0))
        yield _of_keys("distinct", below, keys, 2 * width, rows, _span(below, time, within))
        return
    yield _of_rows("over", below, rows, _span(below, time, step.length or 0))
    if step.reach or any(call.is_running for call in step.calls):
        values = sum(size_of(type_of(call.agg)) for call in step.calls)
        yield _of_keys("over", below, keys, (1 + step.reach) * (width + values + INDEX_BYTES), rows, None)


def _of_keys(name: str, below: ops.Op, keys: Sequence[Named], size: int, rows: int, span: Span | None) -> StateCost:
    """Of a step that keeps a record of each key."""
    named = tuple(Named(f"k{number}", key.expr) for number, key in enumerate(keys))
    found = _columns(below).count()
    counts = {found: 1} if found else {}
    text = 0.0
    if named:
        flow = Flow(ops.Project(below, named))
        by_count = flow.group_by(*flow.columns).agg(n=count()).group_by("n").agg(keys=count()).collect()
        counts = dict(zip(by_count["n"].to_pylist(), by_count["keys"].to_pylist(), strict=True))
        texts = [key.name for key in named if type_of(key.expr).is_bytes]
        if texts:
            text = flow.select(*texts).limit(TEXT_ROWS).collect().nbytes / max(1, min(found, TEXT_ROWS))
    return StateCost(name, Groups(found, counts), size + INDEX_BYTES + text, found / rows, span)


def _of_rows(name: str, below: ops.Op, rows: int, span: Span | None) -> StateCost:
    """Of a step that keeps rows."""
    flow = _columns(below)
    found = flow.count()
    width = sum(size_of(field.dtype) for field in below.schema)
    if any(field.dtype.is_bytes or field.dtype.is_nested for field in below.schema):
        width = round(flow.limit(TEXT_ROWS).collect().nbytes / max(1, min(found, TEXT_ROWS)))
    groups = Groups(found, {1: found} if found else {})
    return StateCost(name, groups, float(width), found / rows, span, keeps_rows=True)


def _columns(below: ops.Op) -> Flow:
    """The rows of a step under names that a user may give."""
    return Flow(ops.Project(below, tuple(Named(f"c{number}", _column(below, name))
                                         for number, name in enumerate(below.schema.names))))


def _span(below: ops.Op, time: Expr, length: int, slice_size: int | None = None) -> Span:
    """How long what belongs to a time stays: as long as its windows, and the delay of the watermark.

    Groups are kept by slices of time.
    """
    length += max((each.delay for each in walk_streams(below) if isinstance(each, ops.Watermark)), default=0)
    slices = 1.0 if slice_size is None else max(1.0, length / max(1, slice_size))
    dtype = type_of(time)
    if dtype.kind is Kind.TS:
        return Span(slices, seconds=length / UNITS_PER_SECOND[dtype.unit])
    # Integers have no unit: the sample says how many rows there are in such a span.
    flow = Flow(ops.Project(below, (Named("t", time),))).select(t=col("t").cast(pa.int64()))
    found = flow.group_by().agg(n=count(), least=col("t").min(), greatest=col("t").max()).collect().to_pylist()[0]
    whole = 0 if found["least"] is None else found["greatest"] - found["least"] + 1
    return Span(slices, rows=found["n"] * min(1.0, length / whole) if whole else 0.0)


def _column(below: ops.Op, name: str) -> Col:
    known = below.schema[name]
    return Col(name, known.dtype, known.nullable)
