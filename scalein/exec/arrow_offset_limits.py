"""Limits of Arrow arrays: batches are cut so that they stay below them, and errors where they cannot.

`string`, `binary` and `list` have 32-bit offsets: one array holds at most 2 GiB of text or 2^31 elements. pyarrow
notices only after the work. Here rows are weighed before: a row's weight is what it adds to such offsets at any depth.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa

from scalein.arrow_rows import extents, from_numpy, taken
from scalein.errors import ScaleinError

MAX_WEIGHT = 1 << 30  # of an array that is made here: half of what fits, so that weights need not be exact
_SIGNS = ("overflow", "too large", "exceed", "capacity", "2gb", "cannot contain more than")  # in errors of pyarrow


def weights(array: pa.Array) -> np.ndarray | None:
    """The weight of each row, None if no row has any: bytes of text, elements of lists and what those weigh."""
    kind = array.type
    if pa.types.is_dictionary(kind):
        words = weights(array.dictionary) if len(array.dictionary) else None
        return None if words is None else words[np.asarray(array.indices.fill_null(0))]
    if any(is_kind(kind) for is_kind in _TEXTS):
        width = np.dtype(np.int64 if kind in (pa.large_string(), pa.large_binary()) else np.int32)
        if not len(array):
            return np.zeros(0, np.int64)
        offsets = np.frombuffer(array.buffers()[1], width)[array.offset : array.offset + len(array) + 1]
        return np.diff(offsets).astype(np.int64)
    if pa.types.is_string_view(kind) or pa.types.is_binary_view(kind):
        cells = np.frombuffer(array.buffers()[1] or b"", np.int32).reshape(-1, 4)
        sizes = cells[array.offset : array.offset + len(array), 0].astype(np.int64)
        return np.where(np.asarray(array.is_valid()), sizes, 0)
    if pa.types.is_struct(kind):
        return total_weights([weights(array.field(k)) for k in range(kind.num_fields)])
    if pa.types.is_union(kind) or pa.types.is_run_end_encoded(kind):  # an estimate
        return np.full(len(array), array.nbytes // max(1, len(array)) + 1)
    return _weights_of_lists(array) if any(is_kind(kind) for is_kind in _LISTS) else None


_TEXTS = (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_large_binary)
_LISTS = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list, pa.types.is_list_view,
          pa.types.is_large_list_view, pa.types.is_map)


def _weights_of_lists(array: pa.Array) -> np.ndarray:
    lists = extents(array)
    there = lists.sizes > 0
    if not there.any():
        return np.zeros(len(array), np.int64)
    first, last = int(lists.starts[there].min()), int((lists.starts + lists.sizes)[there].max())
    inner = weights(lists.values.slice(first, last - first))  # only the elements of these lists
    if inner is None:
        return lists.sizes.astype(np.int64)
    before = np.concatenate(([0], np.cumsum(inner)))
    starts = np.where(there, lists.starts - first, 0)
    found: np.ndarray = lists.sizes + before[starts + lists.sizes] - before[starts]
    return found


def total_weights(columns: Sequence[np.ndarray | None]) -> np.ndarray | None:
    """The weight of each row over some columns."""
    known = [column for column in columns if column is not None]
    return np.sum(known, axis=0) if known else None


def cut_points(count: int, most_rows: int, row_weights: np.ndarray | None) -> Iterator[tuple[int, int]]:
    """Ranges of rows so that none has too many, and none of more than one row weighs too much."""
    ends = None if row_weights is None else np.cumsum(row_weights)
    start = 0
    while start < count:
        stop = min(count, start + most_rows)
        if ends is not None:
            most = MAX_WEIGHT + (int(ends[start - 1]) if start else 0)
            stop = max(start + 1, min(stop, int(np.searchsorted(ends, most, side="right"))))
        yield start, stop
        start = stop


def split_heavy(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """The batch, cut where the text of its dictionaries, decoded, would be too much for one array."""
    coded = [column for column in batch.columns if pa.types.is_dictionary(column.type)]
    if not coded:
        yield batch
        return
    for start, stop in cut_points(batch.num_rows, batch.num_rows, total_weights([weights(column) for column in coded])):
        yield batch.slice(start, stop - start)


class WholeColumn:
    """A whole column to take rows from: one array if it fits, else large text, or as few arrays as possible."""

    def __init__(self, column: pa.ChunkedArray) -> None:
        self.weights: np.ndarray | None = None  # only of a column that may exceed the limit
        chunks = column.chunks or [pa.nulls(0, column.type)]
        if column.nbytes > MAX_WEIGHT:  # counts the bytes of each chunk, even where chunks share a buffer
            each = [weights(chunk) for chunk in chunks]
            self.weights = np.concatenate([w for w in each if w is not None]) if each[0] is not None else None
        if self.weights is None:
            self.arrays = [_one(chunks)]
        elif pa.types.is_string(column.type) or pa.types.is_binary(column.type):
            wide = pa.large_string() if pa.types.is_string(column.type) else pa.large_binary()
            self.arrays = [_one([chunk.cast(wide) for chunk in chunks])]
        elif any(is_kind(column.type) for is_kind in _TEXTS):
            self.arrays = [_one(chunks)]
        else:
            totals = np.array([int(w.sum()) for w in each if w is not None])
            self.arrays = [_one(chunks[first:last]) for first, last in cut_points(len(chunks), len(chunks), totals)]
        self._starts = np.cumsum([0, *map(len, self.arrays)])[:-1]

    def take(self, rows: np.ndarray) -> pa.Array:
        """The rows with these numbers; their total weight must be within the limit."""
        if len(self.arrays) == 1:
            (array,) = self.arrays
            # No slice of long text, even for adjacent rows: its offsets would not fit 32 bits in a cast.
            numbers = from_numpy(rows)
            return taken(array, numbers) if self.weights is None else array.take(numbers)
        which = np.searchsorted(self._starts, rows, side="right") - 1
        order = np.argsort(which, kind="stable")
        parts = [taken(self.arrays[k], from_numpy(rows[which == k] - self._starts[k])) for k in np.unique(which)]
        back = np.empty_like(order)
        back[order] = np.arange(len(order))
        return taken(_one(parts), from_numpy(back))


def _one(arrays: list[pa.Array]) -> pa.Array:
    return arrays[0] if len(arrays) == 1 else pa.concat_arrays(arrays)


def too_long(what: str, error: BaseException | None = None) -> ScaleinError:
    """The error for text that one array cannot hold."""
    return ScaleinError(f"{what} is too long: one Arrow `string` array holds at most 2 GiB", found=error,
                        hint="make it `.cast(pa.large_string())` before this step, or give smaller batches")


def is_too_long(error: BaseException) -> bool:
    """Whether an error of pyarrow reports the capacity of an array; fewer rows may fit."""
    return isinstance(error, pa.ArrowCapacityError) or any(sign in str(error).lower() for sign in _SIGNS)


def with_limit_errors(step: str, rows: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The batches of a step; an error about a limit of Arrow or of memory becomes ours, and names the step."""
    try:
        yield from rows
    except (pa.ArrowInvalid, pa.ArrowCapacityError, MemoryError, OSError, RuntimeError) as error:
        ours = limit_error(step, error)
        if ours is None:
            raise
        raise ours from error


def limit_error(step: str, error: BaseException) -> ScaleinError | None:
    """Our error for an error of pyarrow or the system in a step; None if it is not about a limit."""
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return ScaleinError(f"{step} needs more memory than this process may use", found=error,
                            hint="filter or aggregate before it, or give smaller batches")
    if isinstance(error, RuntimeError) and "start new thread" in str(error):
        return ScaleinError(f"{step} needs more threads than this process may start", found=error,
                            hint="give it fewer workers, as in .collect(workers=1), or raise the limit (ulimit -v, -u)")
    if isinstance(error, OSError | RuntimeError):
        return None
    if is_too_long(error):
        return too_long(f"a column of {step}", error)
    return ScaleinError(f"pyarrow cannot do what {step} needs", found=error)
