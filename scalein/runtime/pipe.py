"""Pipes: batches through a kernel that collects, or a table's groups through one.

Columns that a pipe hands on untouched are not copied: they are the input's own. Rows keep their
order whatever the number of workers: units of work are handed out and given back in order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pyarrow as pa

from scalein.ir.exprs import Col, Named
from scalein.ir.stages import Collect, Let, Pipe
from scalein.layout import DONE, FrameData
from scalein.llvm_backend.cache import Compiled
from scalein.options import Options
from scalein.runtime.call import call
from scalein.runtime.joins import Built
from scalein.runtime.output import CHUNK_ROWS, TEXT_BYTES, Chunk
from scalein.runtime.specialise import Specialiser
from scalein.runtime.stages import Prepared

UNIT_ROWS = 1 << 19  # rows a worker takes at once: about a millisecond


def run_pipe(pipe: Pipe, batches: Iterator[pa.RecordBatch], joins: dict[int, Built], options: Options,
             table: pa.Table | None) -> Iterator[pa.RecordBatch]:
    """The pipe's output for each input batch, in order."""
    passed, computed = split_items(pipe)
    schema = pipe.schema.arrow
    prepared = Prepared(pipe.name, pipe.input.schema, pipe.steps, lambda special: _collect(computed, special),
                        tuple(i.expr for i in computed), joins, options)
    prepared.assume(table)

    def run(batch: pa.RecordBatch, compiled: Compiled | None) -> list[pa.RecordBatch]:
        return _run_batch(pipe, prepared, compiled, batch, passed, computed, schema)

    if options.workers == 1:
        for batch in batches:
            if batch.num_rows:
                yield from run(batch, _ready(prepared, batch, computed))
        return
    with ThreadPoolExecutor(options.workers, thread_name_prefix="scalein") as pool:
        under_way: deque[Future[list[pa.RecordBatch]]] = deque()
        for batch in batches:
            for start in range(0, batch.num_rows, UNIT_ROWS):
                unit = batch.slice(start, UNIT_ROWS)
                compiled = _ready(prepared, unit, computed)
                under_way.append(pool.submit(_bound_run, run, unit, compiled))
                while len(under_way) > 2 * options.workers:
                    yield from under_way.popleft().result()
        while under_way:
            yield from under_way.popleft().result()


def _bound_run(run, unit: pa.RecordBatch, compiled: Compiled | None) -> list[pa.RecordBatch]:  # type: ignore[no-untyped-def]
    result: list[pa.RecordBatch] = run(unit, compiled)
    return result


def _ready(prepared: Prepared, batch: pa.RecordBatch, computed: tuple[Named, ...]) -> Compiled | None:
    """The kernel for a batch; None if there is nothing to compute."""
    if not computed and not prepared.steps:
        return None
    return prepared.compile() if prepared.learn(batch) else prepared.compiled


def split_items(pipe: Pipe) -> tuple[dict[int, str], tuple[Named, ...]]:
    """Columns handed on as they are (by position), and those a kernel must write."""
    if all(isinstance(step, Let) for step in pipe.steps):
        names = {i: _origin(pipe, item) for i, item in enumerate(pipe.items)}
        passed = {i: name for i, name in names.items() if name is not None}
    else:
        passed = {}
    return passed, tuple(item for i, item in enumerate(pipe.items) if i not in passed)


def _origin(pipe: Pipe, item: Named) -> str | None:
    """The input column that an item is, through renaming steps."""
    expr = item.expr
    for step in reversed(pipe.steps):
        if isinstance(expr, Col) and isinstance(step, Let):
            expr = next(i.expr for i in step.items if i.name == expr.name)
    return expr.name if isinstance(expr, Col) else None


def _collect(items: tuple[Named, ...], special: Specialiser) -> Collect:
    return Collect(tuple(Named(i.name, special.expr(i.expr)) for i in items))


def _run_batch(pipe: Pipe, prepared: Prepared, compiled: Compiled | None, batch: pa.RecordBatch, passed: dict[int, str],
               computed: tuple[Named, ...], schema: pa.Schema) -> list[pa.RecordBatch]:
    if compiled is None:
        return [_assemble(schema, batch, passed, [])]
    frame = compiled.kernel.frame.new()
    prepared.bind(frame, batch)
    prepared.attach_joins(frame)
    frame["row"], frame["end"] = 0, batch.num_rows
    if not passed:
        return [pa.RecordBatch.from_arrays(arrays, schema=schema)
                for arrays in collected(compiled, frame, computed, batch.num_rows) if len(arrays[0])]
    parts = list(collected(compiled, frame, computed, batch.num_rows))
    result, start = [], 0
    for arrays in parts:
        result.append(_assemble(schema, batch.slice(start, len(arrays[0])), passed, arrays))
        start += len(arrays[0])
    return result


def _assemble(schema: pa.Schema, batch: pa.RecordBatch, passed: dict[int, str], arrays: list[pa.Array]) -> pa.RecordBatch:
    rest = iter(arrays)
    columns = [batch.column(passed[i]) if i in passed else next(rest) for i in range(len(schema))]
    columns = [c if c.type == f.type else c.cast(f.type) for c, f in zip(columns, schema, strict=True)]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def collected(compiled: Compiled, frame: FrameData, items: tuple[Named, ...], rows: int) -> Iterator[list[pa.Array]]:
    """Run a collecting kernel to its end; chunks of columns as they fill up, the last even if it is empty."""
    collector = Collector(compiled, frame, items, rows)
    yield from collector.run()
    yield collector.finish()


class Collector:
    """A collecting kernel with its output chunk, over one or more calls' worth of input."""

    def __init__(self, compiled: Compiled, frame: FrameData, items: tuple[Named, ...], rows: int) -> None:
        self._compiled, self.frame, self._items = compiled, frame, items
        self._rows, self._text = min(max(rows, 1), CHUNK_ROWS), TEXT_BYTES
        self._renew()

    def _renew(self) -> None:
        self._chunk = Chunk(self._items, self._compiled.never_null, self._rows, self._text)
        self._chunk.attach(self.frame)

    def run(self) -> Iterator[list[pa.Array]]:
        """Rows [row, end) of the frame's input; gives the chunks that became full."""
        while call(self._compiled, self.frame) != DONE:
            count = self.frame["out.count"]
            if count:
                yield self._chunk.take(count)
            else:  # one block's strings alone are more than a chunk holds
                self._text *= 4
            self._renew()

    def finish(self) -> list[pa.Array]:
        """What is left in the last chunk."""
        return self._chunk.take(self.frame["out.count"])
