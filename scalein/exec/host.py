"""Host steps: the user's map_batches, explode, and expressions that pyarrow computes between kernels."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa

from scalein.arrow_functions import evaluate
from scalein.arrow_rows import Extents, as_integers, as_type, extents, filtered, from_numpy, taken
from scalein.cancellation import raise_if_cancelled
from scalein.dtypes import as_plain
from scalein.errors import BadData, ComputeError, ScaleinError
from scalein.exec import arrow_offset_limits
from scalein.exec.arrow_offset_limits import is_too_long, too_long
from scalein.ir import ops
from scalein.ir.exprs import Call, Col, Expr, walk
from scalein.ir.exprs import columns as columns_of
from scalein.ir.functions.registry import can_fail
from scalein.ir.physical import Host
from scalein.ir.printer import show_expr
from scalein.kernels.bind import conformed

PIECE_ROWS = 1 << 18  # of a call of pyarrow, so that Ctrl-C takes effect soon; of an exploded batch


def run_host(host: Host, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    if isinstance(host.op, ops.Explode):
        return explode(host.op, batches)
    if isinstance(host.op, ops.AssignWindows):
        return _in_windows(host.op, batches)
    if host.op is not None:
        return _map_batches(host.op, batches)
    return _project(host, batches)


def _project(host: Host, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    schema = host.schema.arrow
    for batch in batches:
        waiting = [batch.slice(start, PIECE_ROWS) for start in range(0, max(1, batch.num_rows), PIECE_ROWS)][::-1]
        while waiting:
            raise_if_cancelled()
            rows = waiting.pop()
            columns = _columns(host, schema, rows)
            if columns is not None:
                yield pa.RecordBatch.from_arrays(columns, schema=schema)
            else:
                half = rows.num_rows // 2
                waiting += [rows.slice(half), rows.slice(0, half)]


def _columns(host: Host, schema: pa.Schema, batch: pa.RecordBatch) -> list[pa.Array] | None:
    """The columns of some rows; None if one of them is too long for an array, and fewer rows may fit."""
    columns = []
    texts = _RepeatedTexts(host, batch)
    for item, field in zip(host.items, schema, strict=True):
        try:
            column = batch.column(item.expr.name) if isinstance(item.expr, Col) else texts.evaluate(item.expr)
            column = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
            columns.append(as_type(column, field.type))
        except (pa.ArrowInvalid, pa.ArrowCapacityError) as error:
            if not is_too_long(error):
                raise
            if batch.num_rows > 1:
                return None
            raise too_long(f"a value of `{show_expr(host.origin(item))}`", error) from error
    return columns


def _in_windows(op: ops.AssignWindows, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Each row once for every window that holds it."""
    schema, window = op.schema.arrow, op.window
    assert isinstance(window.time, Col)
    kind = schema.field("window_start").type
    step = max(1, PIECE_ROWS // window.windows_per_row)
    for batch in batches:
        for start in range(0, batch.num_rows, step):
            raise_if_cancelled()
            rows = batch.slice(start, step)
            column = rows.column(window.time.name)
            if column.null_count:
                rows = filtered(rows, column.is_valid())
            times = np.asarray(as_integers(rows.column(window.time.name)))
            found = list(window.bounds_of(times))[::-1]
            holds = np.stack([each for _, _, each in found], axis=1).ravel()
            parents = np.repeat(np.arange(len(times)), len(found))[holds]
            starts, ends = (np.stack([each[side] for each in found], axis=1).ravel()[holds] for side in (0, 1))
            is_last = from_numpy(ends == window.last_ends(times)[parents])
            places = from_numpy(parents)
            columns = [taken(rows.column(name), places) for name in schema.names[:-3]]
            try:
                bounds = [from_numpy(each).view(kind) if pa.types.is_timestamp(kind) else from_numpy(each).cast(kind)
                          for each in (starts, ends)]
            except pa.ArrowInvalid as error:
                raise ComputeError(f"integer overflow in the windows of `{show_expr(window.time)}`", at=op.at,
                                   found=error) from None
            yield pa.RecordBatch.from_arrays([
                each if each.type == field.type else each.cast(field.type)
                for each, field in zip((*columns, *bounds, is_last), schema, strict=True)], schema=schema)


# Nanoseconds a row of pyarrow's functions of text: 60 bytes, a processor of 2024. Others are cheaper than a dictionary.
_TEXT_NS = {"str_extract": 1400, "str_matches": 400, "str_split_part": 140, "str_replace": 100, "str_strip": 40,
            "str_lstrip": 40, "str_rstrip": 40, "lower": 20, "upper": 20}
_DICTIONARY_NS = 100  # to find the distinct texts of a column, and to take the results for the rows
_SAMPLED = 1 / 16  # of the rows, to see whether texts repeat
_MIN_SAMPLED = 256


class _RepeatedTexts:
    """Expressions over one column of text, computed once for each of its texts where these repeat.

    Only functions that cannot fail, so that an error is that of a row.
    """

    def __init__(self, host: Host, batch: pa.RecordBatch) -> None:
        self._batch = batch
        costs: dict[str, int] = {}
        for item in host.items:
            name = _only_text(item.expr, batch)
            if name is not None:
                costs[name] = costs.get(name, 0) + _cost_ns(item.expr)
        self._worthwhile = {name for name, cost_ns in costs.items() if cost_ns > _DICTIONARY_NS}
        self._coded: dict[str, pa.DictionaryArray | None] = {}

    def evaluate(self, expr: Expr) -> pa.Array | pa.ChunkedArray:
        name = _only_text(expr, self._batch)
        coded = self._dictionary(name) if name in self._worthwhile else None
        if name is None or coded is None:
            return evaluate(expr, self._batch)
        found = evaluate(expr, pa.RecordBatch.from_arrays([coded.dictionary], names=[name]))
        return found.take(coded.indices)

    def _dictionary(self, name: str) -> pa.DictionaryArray | None:
        """The column as numbers of its texts, a null being one of them; None if most rows have a text of their own."""
        if name not in self._coded:
            column = self._batch.column(name)
            sample = column.slice(0, max(_MIN_SAMPLED, int(len(column) * _SAMPLED)))
            repeats = len(sample.unique()) <= len(sample) // 2
            self._coded[name] = column.dictionary_encode(null_encoding="encode") if repeats else None
        return self._coded[name]


def _only_text(expr: Expr, batch: pa.RecordBatch) -> str | None:
    """The column of plain text that an expression over nothing else reads, if it cannot fail."""
    names = columns_of(expr)
    is_python = any(isinstance(node, Call) and node.fn == "udf" for node in walk(expr))  # may be no function at all
    if len(names) != 1 or is_python or can_fail(expr) or _cost_ns(expr) == 0:
        return None
    (name,) = names
    kind = batch.schema.field(name).type
    return name if pa.types.is_string(kind) or pa.types.is_large_string(kind) else None


def _cost_ns(expr: Expr) -> int:
    return sum(_TEXT_NS.get(node.fn, 0) for node in walk(expr) if isinstance(node, Call))


def _map_batches(op: ops.MapBatches, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The user's function on each batch; its result is checked, and its errors name it."""
    name = getattr(op.fn, "__name__", repr(op.fn))
    schema = op.input.schema.arrow  # the declared types, whatever encoding the source has
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


# explode: one row for each element of a list, by pyarrow; the other columns repeat.
#
# Output batches have bounded numbers of rows and bytes, for any length of the lists and any columns repeated beside
# them. Elements of consecutive lists, as they are in most arrays, are not copied.

MAX_SHOWN = 200  # characters of a row in an error


def explode(op: ops.Explode, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The rows of each batch, once for each element of their lists."""
    schema = op.schema.arrow
    for batch in batches:
        lists = {name: extents(batch.column(name)) for name in op.lists}
        first = lists[op.lists[0]]
        _check_sizes(op, lists, batch)
        others = [arrow_offset_limits.weights(batch.column(name)) for name in schema.names if name not in lists]
        for rows, offsets, sizes in _pieces(first, arrow_offset_limits.total_weights(others)):
            parents = from_numpy(np.repeat(rows, sizes))
            elements = {name: _elements(each.values, each.starts[rows] + offsets, sizes)
                        for name, each in lists.items()}
            columns = [elements[name] if name in lists else taken(batch.column(name), parents) for name in schema.names]
            columns = [as_type(c, f.type) for c, f in zip(columns, schema, strict=True)]
            yield pa.RecordBatch.from_arrays(columns, schema=schema)


def _check_sizes(op: ops.Explode, lists: dict[str, Extents], batch: pa.RecordBatch) -> None:
    """The lists of a row must have one length; null counts as empty."""
    first = lists[op.lists[0]].sizes
    for other in op.lists[1:]:
        differs = np.flatnonzero(lists[other].sizes != first)
        if len(differs):
            row = int(differs[0])
            lengths = ", ".join(f"{name}: {found.sizes[row]}" for name, found in lists.items())
            raise ComputeError(f"lists of different lengths in `explode({', '.join(op.lists)})`", at=op.at,
                               found=lengths, row=_shown_row(batch.slice(row, 1)),
                               hint="explode them one after the other for every pair of elements")


def _shown_row(row: pa.RecordBatch) -> str:
    text = ", ".join(f"{name}: {value!r}" for name, value in row.to_pylist()[0].items())
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]} ..."


def _pieces(lists: Extents, weights: np.ndarray | None) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Rows with elements, and of each how many are skipped and taken, cut so that no piece has too many elements or
    repeats too much.
    """
    rows = np.flatnonzero(lists.sizes)
    sizes = lists.sizes[rows]
    ends = np.cumsum(sizes)
    first, count = 0, int(ends[-1]) if len(ends) else 0
    while first < count:
        low = int(np.searchsorted(ends, first, side="right"))
        last = min(count, first + PIECE_ROWS)
        high = int(np.searchsorted(ends, last, side="left")) + 1
        if weights is not None:
            ours = slice(low, high)
            last = min(last, _lightest(ends[ours], sizes[ours], weights[rows[ours]], first))
            high = int(np.searchsorted(ends, last, side="left")) + 1
        ours = slice(low, high)
        # The first and the last list may be split between pieces.
        before = np.maximum(first - (ends[ours] - sizes[ours]), 0)
        beyond = np.maximum(ends[ours] - last, 0)
        yield rows[ours], before, sizes[ours] - before - beyond
        first = last


def _lightest(ends: np.ndarray, sizes: np.ndarray, weights: np.ndarray, first: int) -> int:
    """The end of the elements from `first` on whose repeated rows stay below the limit; at least one element."""
    repeats = np.minimum(sizes, ends - first)  # of the first list, what is left
    totals = np.cumsum(repeats * weights)
    k = int(np.searchsorted(totals, arrow_offset_limits.MAX_WEIGHT, side="right"))
    if k == len(totals):
        return int(ends[-1])
    room = arrow_offset_limits.MAX_WEIGHT - int(totals[k] - repeats[k] * weights[k])
    return max(first + 1, int(ends[k] - repeats[k]) + room // int(weights[k]))


def _elements(values: pa.Array, starts: np.ndarray, sizes: np.ndarray) -> pa.Array:
    if bool((starts[1:] == starts[:-1] + sizes[:-1]).all()):
        return values.slice(int(starts[0]), int(sizes.sum()))
    shifts = starts - (np.cumsum(sizes) - sizes)
    return taken(values, from_numpy(np.repeat(shifts, sizes) + np.arange(int(sizes.sum()))))
