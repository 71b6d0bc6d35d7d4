"""Host steps: the user's map_batches, explode, and expressions that pyarrow computes between kernels."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa

from scalein.dtypes import as_plain
from scalein.errors import BadData, ScaleinError
from scalein.exec.array_limits import is_too_long, too_long
from scalein.exec.explode import explode
from scalein.interp import evaluate
from scalein.ir import ops
from scalein.ir.exprs import Col
from scalein.ir.physical import Host
from scalein.ir.printer import show_expr
from scalein.kernels.bind import conformed


def run_host(host: Host, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    if isinstance(host.op, ops.Explode):
        return explode(host.op, batches)
    if host.op is not None:
        return _map_batches(host.op, batches)
    return _project(host, batches)


def _project(host: Host, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    schema = host.schema.arrow
    for batch in batches:
        waiting = [batch]
        while waiting:
            rows = waiting.pop()
            columns = _columns(host, schema, rows)
            if columns is not None:
                yield pa.RecordBatch.from_arrays(columns, schema=schema)
            else:
                half = rows.num_rows // 2
                waiting += [rows.slice(half), rows.slice(0, half)]


def _columns(host: Host, schema: pa.Schema, batch: pa.RecordBatch) -> list[pa.Array] | None:
    """The columns of some rows; None if one of them is too much for an array, and would be less for fewer rows."""
    columns = []
    for item, field in zip(host.items, schema, strict=True):
        try:
            column = batch.column(item.expr.name) if isinstance(item.expr, Col) else evaluate(item.expr, batch)
            column = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
            columns.append(column if column.type == field.type else column.cast(field.type))
        except (pa.ArrowInvalid, pa.ArrowCapacityError) as error:
            if not is_too_long(error):
                raise
            if batch.num_rows > 1:
                return None
            raise too_long(f"a value of `{show_expr(host.origin(item))}`", error) from error
    return columns


def _map_batches(op: ops.MapBatches, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The user's function on each batch; what it gives back is checked, what it raises is named."""
    name = getattr(op.fn, "__name__", repr(op.fn))
    schema = op.input.schema.arrow  # what the user's function is promised, however the source stores it
    for number, batch in enumerate(batches):
        try:
            given = op.fn(conformed(batch, schema))
        except ScaleinError:
            raise
        except Exception as error:
            raise BadData(f"the function {name!r} of map_batches raised {type(error).__name__} on batch {number}",
                          at=op.at, found=error) from error
        if not isinstance(given, pa.RecordBatch):
            raise BadData(f"the function {name!r} of map_batches gave no pyarrow.RecordBatch for batch {number}",
                          at=op.at, found=type(given).__name__)
        given = as_plain(given)
        if given.schema.names != op.arrow.names or given.schema.types != op.arrow.types:
            raise BadData(f"the function {name!r} of map_batches gave batch {number} another schema than it declares",
                          at=op.at, found=", ".join(f"{f.name}: {f.type}" for f in given.schema),
                          wanted=", ".join(f"{f.name}: {f.type}" for f in op.arrow))
        yield given
