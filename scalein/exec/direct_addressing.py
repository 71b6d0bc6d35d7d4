"""Direct addressing or hashing: whether the groups of a table can be addressed by their keys, and over which ranges.

Ranges come from cheap facts: a join table's columns and a dictionary are known completely; a column of the input is
sampled at both ends of each batch (time mostly grows, keys mostly repeat). On a key outside the range the kernel
returns before it has changed anything, so an estimate may be wrong.
"""

from __future__ import annotations

from collections.abc import Iterable

import pyarrow as pa

from scalein.arrow_rows import as_numpy
from scalein.dtypes import TIMES, DType, Kind
from scalein.exec.tables import Domain
from scalein.ir.exprs import Col, Expr, type_of
from scalein.ir.stages import Probe, ProjectStep, Step
from scalein.ir.tables import Slicing, Table
from scalein.kernels.prepare import Prepared
from scalein.kernels.specialise import CODE, IDS

MAX_SLICE = 1 << 62  # beyond it, arithmetic on slice numbers could overflow 64 bits
DIRECT_BYTES = 1 << 19  # a direct table must fit L2 beside the columns
SAMPLE_ROWS = 1 << 14
TAIL_ROWS = 1 << 10
FEW_VALUES = 1 << 16  # numpy starts sooner, pyarrow needs only one pass
HEADROOM_BYTES = 1 << 16  # of a table that is filled over time, for slices to come


def domain_of(prepared: Prepared, table: Table, keys: tuple[Expr, ...], batches: Iterable[pa.RecordBatch],
              scan_all: bool = False) -> Domain | None:
    """The ranges of keys and slices in these batches, if a direct table over them is small."""
    if table.slicing is Slicing.SESSION:
        return None
    spans = []
    for key in keys:
        found = _key_range(prepared, key, batches, scan_all)
        if found is None:
            return None
        spans.append(found)
    slices = None
    if table.window is not None:
        times = _range(prepared, table.window.time, batches, scan_all)
        if times is None:
            return None
        first, last = map(table.slice_of, times)
        if first < -MAX_SLICE or last > MAX_SLICE:
            return None
        slices = (first - 1, last - first + 3)
    domain = Domain(spans, [k.nullable for k in table.keys], slices)
    return domain if domain.size * table.layout.size <= DIRECT_BYTES else None


def widened(old: Domain, new: Domain) -> Domain:
    """Ranges that cover both, with headroom where the old ones were too narrow."""
    spans = []
    for (least, span), (other, other_span) in zip(old.spans, new.spans, strict=True):
        low, high = min(least, other), max(least + span, other + other_span)
        spans.append((low, high - 1))
    slices = None
    if old.slices is not None and new.slices is not None:
        low = min(old.slices[0], new.slices[0])
        high = max(old.slices[0] + old.slices[1], new.slices[0] + new.slices[1])
        slices = (low, 2 * (high - low))
    return Domain(spans, old.nullable, slices)


def with_headroom(domain: Domain, table: Table) -> Domain:
    """The same ranges with more slices at the end, as long as the table stays small."""
    if domain.slices is None:
        return domain
    first, count = domain.slices
    headroom = HEADROOM_BYTES // (domain.per_slice * table.layout.size)
    spans = [(least, least + span - 1) for least, span in domain.spans]
    return Domain(spans, domain.nullable, (first, max(count, headroom)))


def _key_range(prepared: Prepared, key: Expr, batches: Iterable[pa.RecordBatch],
               scan_all: bool) -> tuple[int, int] | None:
    dtype = type_of(key)
    if dtype.kind is Kind.BOOL:
        return 0, 1
    if dtype.is_float or dtype.is_bytes or dtype.is_decimal:
        return None
    if isinstance(key, Col) and key.name.startswith(IDS):
        interner = prepared.interners.get(key.name.removeprefix(IDS))
        count = max(16, 2 * len(interner)) if interner is not None else 16
        columns = [b.column(key.name.removeprefix(IDS)) for b in batches]
        sizes = [len(c.dictionary) for c in columns if pa.types.is_dictionary(c.type)]
        return 0, max([count, *sizes]) - 1
    if isinstance(key, Col) and key.name.startswith(CODE):
        join, column = key.name.removeprefix(CODE).split(".", 1)
        return 0, max(1, len(prepared.joins[int(join)].columns[column].dictionary)) - 1
    return _range(prepared, key, batches, scan_all)


def _range(prepared: Prepared, expr: Expr, batches: Iterable[pa.RecordBatch], scan_all: bool) -> tuple[int, int] | None:
    """Least and greatest value of a column of the input or of a join table."""
    if not isinstance(expr, Col):
        return None
    origin = _origin(prepared.steps, expr.name)
    if origin is None:
        return None
    probe, name = origin
    if probe is not None:
        return _table_range(prepared.joins[probe.table].columns[name], type_of(expr))
    columns = [batch.column(name) for batch in batches]
    sample = columns if scan_all else [part for column in columns for part in _sampled(column)]
    return _bounds(sample, type_of(expr))


def _origin(steps: tuple[Step, ...], name: str) -> tuple[Probe | None, str] | None:
    """The join (or None: the input) and column that a name at the end of the steps stands for."""
    for step in reversed(steps):
        if isinstance(step, ProjectStep):
            expr = next((i.expr for i in step.items if i.name == name), None)
            if not isinstance(expr, Col):
                return None
            name = expr.name
        elif isinstance(step, Probe):
            for out, column in step.keep:
                if out == name:
                    return step, column
    return None, name


def _table_range(column: pa.Array, dtype: DType) -> tuple[int, int] | None:
    if pa.types.is_dictionary(column.type):
        return 0, max(1, len(column.dictionary)) - 1
    return _bounds([column], dtype) or (0, 0)


def _sampled(column: pa.Array) -> list[pa.Array]:
    """The ends of a column, or all of a short one."""
    if len(column) <= SAMPLE_ROWS + TAIL_ROWS:
        return [column]
    return [column.slice(0, SAMPLE_ROWS), column.slice(len(column) - TAIL_ROWS)]


def _bounds(parts: list[pa.Array], dtype: DType) -> tuple[int, int] | None:
    """The least and the greatest value of some arrays; None if all is null."""
    if dtype.kind in TIMES:
        parts = [part.view(pa.int64() if dtype.bits == 64 else pa.int32()) for part in parts]
    if sum(map(len, parts)) <= FEW_VALUES and not any(part.null_count for part in parts):
        values = [as_numpy(part) for part in parts if len(part)]
        return (min(int(v.min()) for v in values), max(int(v.max()) for v in values)) if values else None
    import pyarrow.compute as pc  # takes 30 ms

    found = pc.min_max(pa.chunked_array(parts))
    low, high = found["min"].as_py(), found["max"].as_py()
    return None if low is None else (int(low), int(high))
