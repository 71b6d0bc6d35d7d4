"""Values over other rows in bounded runs: partitions, their orders and frames. Rows come out in the order of the input.

Rows get *places*, sorted by partition and order, with a radix sort of machine code; one pass over them computes an
aggregate for every row (`llvm_backend/frames.py`). Keys of one integer column are sorted as they are; others are
numbered first. Values in their order (min, max) are compared as integers, and the row that has the value is taken. What
no such kernel knows (quantiles, lists, classes of the user's) is aggregated over all rows of each frame, by the kernels
of `group_by`: its time grows with the length of frames.

Under a memory limit, rows that do not fit are partitioned by the hash of their keys and spilled; one partition after
the other is computed in memory, and rows come out by partition.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from scalein.arrow_rows import as_numpy, from_numpy, taken
from scalein.cancellation import raise_if_cancelled
from scalein.compiler import compile_flow
from scalein.dtypes import I64, Field, Schema
from scalein.errors import ComputeError
from scalein.exec.bounded import Program
from scalein.exec.node_cut import scan_of_rows
from scalein.exec.pipeline import run_pipeline
from scalein.exec.sort import RESULT_ROWS, argsort, comparable, integers_of, is_in_order, storage_type
from scalein.exec.spill_file import SpillFile
from scalein.exec.spill_partitions import SpillPartition, SpillPartitions, hash_items, read_within
from scalein.ir import ops
from scalein.ir.exprs import Agg, Col, NamedAgg, type_of
from scalein.ir.internal_names import internal
from scalein.ir.over import Frame, OverCall
from scalein.ir.physical import Over, Pipeline, identity
from scalein.ir.printer import show_agg
from scalein.kernels.bind import conformed
from scalein.kernels.frames import FramesOverflow, aggregate, partition, spaced
from scalein.memory import MemoryAccount
from scalein.options import Options

WORKING_FACTOR = 6  # bytes needed for each byte of the rows: their places, stacks of aggregates, results
PAIR_ROWS = 1 << 20  # rows of frames that are aggregated at once
WORD_BITS = 64
_FRAME = internal("frame")  # the number of a frame

Results = dict[str, pa.Array]


def run_over(node: Over, batches: Iterator[pa.RecordBatch], options: Options,
             account: MemoryAccount) -> Iterator[pa.RecordBatch]:
    """The rows, and what their frames aggregate to."""
    given = node.input.schema.arrow
    rows = (conformed(batch, given) for batch in batches if batch.num_rows)
    if account.limit is None or not node.keys:
        yield from _with_results(node, list(rows), options)
        return
    own = account.child()
    try:
        parts, is_all = read_within(own, rows, WORKING_FACTOR)
        if is_all:
            yield from _with_results(node, parts, options)
        else:
            yield from _spilled(node, parts, rows, options, own)
    finally:
        own.release()


def _with_results(node: Over, parts: list[pa.RecordBatch], options: Options) -> Iterator[pa.RecordBatch]:
    table = pa.Table.from_batches(parts, node.input.schema.arrow)
    if not table.num_rows:
        return
    schema = node.schema.arrow
    found = results(node, table, options)
    whole = pa.Table.from_arrays([*table.columns, *(found[call.name] for call in node.calls)], schema=schema)
    yield from whole.to_batches(max_chunksize=RESULT_ROWS)


def _spilled(node: Over, first: list[pa.RecordBatch], rest: Iterator[pa.RecordBatch], options: Options,
             account: MemoryAccount) -> Iterator[pa.RecordBatch]:
    """The same, one partition of the keys' hashes after the other."""
    assert account.limit is not None
    schema = node.input.schema
    keys = [Col(name, schema[name].dtype, schema[name].nullable) for name in node.keys]
    hashes = hash_items(keys)
    hashed = Pipeline(scan_of_rows(schema), (), (*identity(schema), *hashes), name="partition")

    def all_rows() -> Iterator[pa.RecordBatch]:
        while first:
            yield first.pop(0)
        account.release()
        yield from rest

    file = SpillFile()
    try:
        partitions = SpillPartitions(file, hashed.schema.arrow, account.limit)
        for batch in run_pipeline(hashed, all_rows(), {}, options, None):
            partitions.add(batch)
        partitions.flush()
        for part in _small_parts(partitions):
            yield from _with_results(node, [batch.select(schema.names) for batch in part], options)
    finally:
        file.close()


def _small_parts(partitions: SpillPartitions) -> Iterator[SpillPartition]:
    for part in partitions.parts:
        if partitions.must_divide(part, WORKING_FACTOR):
            yield from _small_parts(partitions.divided(part))
        elif part.rows:
            yield part


@dataclass
class _Ordered:
    """Rows of a table in the order of their partitions."""

    places: np.ndarray
    row_bits: int
    count: int
    known: dict[str, np.ndarray] = field(default_factory=dict)

    @property
    def rows(self) -> np.ndarray:
        """The numbers of rows, by place."""
        if "rows" not in self.known:
            self.known["rows"] = (self.places & np.uint64((1 << self.row_bits) - 1)).view(np.int64)
        return self.known["rows"]

    @property
    def is_first(self) -> np.ndarray:
        """Whether a partition begins at each place."""
        if "first" not in self.known:
            own = self.places >> np.uint64(self.row_bits)
            self.known["first"] = np.concatenate((np.ones(1, bool), own[1:] != own[:-1]))
        return self.known["first"]

    @property
    def starts(self) -> np.ndarray:
        """The place at which the partition of each place begins."""
        if "starts" not in self.known:
            self.known["starts"] = np.maximum.accumulate(np.where(self.is_first, np.arange(self.count), 0))
        return self.known["starts"]

    def by_row(self, values: np.ndarray) -> np.ndarray:
        """Values by place as values by row."""
        found = np.empty_like(values)
        found[self.rows] = values
        return found


def results(node: Over, table: pa.Table, options: Options) -> Results:
    """The columns of the calls, for the rows of a table that is not empty."""
    columns: dict[str, pa.Array] = {}

    def column(name: str) -> pa.Array:
        if name not in columns:
            raise_if_cancelled()
            chunks = table.column(name)
            chunks = chunks.cast(storage_type(chunks.type))
            columns[name] = chunks.chunk(0) if chunks.num_chunks == 1 else chunks.combine_chunks()
            if isinstance(columns[name], pa.ChunkedArray):  # text of more than 2 GiB
                columns[name] = chunks.cast(pa.large_string() if pa.types.is_string(chunks.type)
                                            else pa.large_binary()).combine_chunks()
        return columns[name]

    frames = _Frames(node, column, table.num_rows, options)
    return {call.name: frames.result(call) for call in node.calls}


class _Frames:
    """The calls of a node over some rows."""

    def __init__(self, node: Over, column: Callable[[str], pa.Array], count: int, options: Options) -> None:
        self._node, self.column, self._count, self._options = node, column, count, options
        keys = [self.column(name) for name in node.keys]
        rows = self._order()
        is_timed = any(call.frame.within is not None for call in node.calls)
        time = self.column(node.by[0][0]) if is_timed else None
        if time is not None and time.null_count:  # rows without a time are frames of their own
            keys.append(time.is_null())
        self._rows = _ordered(keys, rows, count, options)
        self._ties: np.ndarray | None = None
        self._times: np.ndarray | None = None

    def _order(self) -> np.ndarray | None:
        by = [(comparable(self.column(name)), descending) for name, descending in self._node.by]
        if not by or (len(by) == 1 and is_in_order(*by[0])):
            return None
        return argsort(by, self._node.nulls_last)

    # --- what kernels read

    def _times_of(self) -> np.ndarray:
        """The time of each place."""
        if self._times is None:
            name, _ = self._node.by[0]
            found = integers_of(self.column(name))
            assert found is not None
            self._times = found.astype(np.int64, copy=False)[self._rows.rows]
            if self.column(name).null_count:
                self._times = np.where(np.asarray(self.column(name).is_valid())[self._rows.rows], self._times, 0)
        return self._times

    def _ties_of(self) -> np.ndarray:
        """By place, 1 where a row is equal in the order to the one before it."""
        if self._ties is None:
            rows = self._rows.rows
            same = ~self._rows.is_first
            for name, _ in self._node.by:
                numbers = _ranks(comparable(self.column(name)))[rows]
                same[1:] &= numbers[1:] == numbers[:-1]
                if self.column(name).null_count:
                    valid = np.asarray(self.column(name).is_valid())[rows]
                    same[1:] &= valid[1:] == valid[:-1]
            self._ties = same.astype(np.uint8)
        return self._ties

    # --- calls

    def result(self, call: OverCall) -> pa.Array:
        raise_if_cancelled()
        kind = type_of(call.agg).arrow
        found = self._result(call)
        return found if found.type == kind else found.cast(kind)

    def _result(self, call: OverCall) -> pa.Array:
        agg, rows = call.agg, self._rows
        match agg.fn:
            case "row_number":
                return from_numpy(rows.by_row(np.arange(1, self._count + 1) - rows.starts))
            case "rank":
                same = self._ties_of().astype(bool)
                first = np.maximum.accumulate(np.where(same, 0, np.arange(self._count)))
                return from_numpy(rows.by_row(first - rows.starts + 1))
            case "dense_rank":
                steps = np.cumsum(~self._ties_of().astype(bool))
                return from_numpy(rows.by_row(steps - steps[rows.starts] + 1))
            case "lag" | "lead":
                return self._shifted(agg)
            case "spaced" | "after_quiet":
                (apart,) = agg.params
                assert isinstance(apart, int)
                return from_numpy(spaced(rows.places, rows.row_bits, self._times_of(), apart, agg.fn == "after_quiet",
                                         self._options))
        if call.frame.rows is not None and call.frame.rows >= self._count:
            call = replace(call, frame=Frame())
        arg = agg.args[0] if agg.args else None
        dtype = None if arg is None else type_of(arg)
        if agg.fn in ("count", "count_valid"):
            return from_numpy(self._kernel(call, "count", None, self._valid(arg))[0])
        if agg.fn in ("first", "last"):
            where = agg.args[1] if len(agg.args) > 1 else None
            return self._picked(call, agg.fn, None, None if where is None else self._is_true(where))
        if agg.fn in ("min", "max", "arg_min", "arg_max") and not type_of(agg.args[-1]).is_nested:
            by = self._arg(agg.args[-1])
            which = agg.fn.removeprefix("arg_")
            return self._picked(call, which, _ranks(comparable(by)), self._valid(agg.args[-1]))
        if agg.fn in ("sum", "mean", "var", "std") and dtype is not None and not dtype.is_decimal:
            return self._number(call, self._arg(agg.args[0]))
        is_running = call.frame.rows is None and call.frame.within is None and not call.frame.is_whole
        if agg.fn == "n_unique" and is_running and not type_of(agg.args[0]).is_nested:
            return from_numpy(self._kernel(call, "count", None, self._is_new(agg.args[0]))[0])
        sums = self._decimal_sum(call, self._arg(agg.args[0])) if agg.fn == "sum" else None
        if sums is not None:
            return sums
        return self._aggregated(call)

    def _arg(self, arg: object) -> pa.Array:
        assert isinstance(arg, Col)
        return self.column(arg.name)

    def _valid(self, arg: object) -> np.ndarray | None:
        """The rows where an argument is not null, as bytes; None: all."""
        if arg is None:
            return None
        found = self._arg(arg)
        return None if not found.null_count else as_numpy(found.is_valid().cast(pa.uint8()))

    def _is_new(self, arg: object) -> np.ndarray:
        """The rows that have the first of equal values of their partition, as bytes; no nulls."""
        numbers, _, _ = _numbers_of(self._arg(arg), WORD_BITS)  # null has one of its own
        part, value = np.cumsum(self._rows.is_first), numbers[self._rows.rows]
        order = np.lexsort((value, part))
        part, value = part[order], value[order]
        is_new = np.ones(self._count, np.uint8)
        is_new[order[1:]] = (part[1:] != part[:-1]) | (value[1:] != value[:-1])
        found, valid = self._rows.by_row(is_new), self._valid(arg)
        return found if valid is None else found & valid

    def _is_true(self, arg: object) -> np.ndarray:
        return as_numpy(pc.fill_null(self._arg(arg), False).cast(pa.uint8()))

    def _shifted(self, agg: Agg) -> pa.Array:
        """The value of another row of the partition, `steps` places away."""
        (steps,) = agg.params
        assert isinstance(steps, int)
        rows, count = self._rows.rows, self._count
        steps = steps if agg.fn == "lag" else -steps
        source = np.full(count, -1, np.int64)
        if abs(steps) < count:
            there, here = slice(max(0, -steps), count - max(0, steps)), slice(max(0, steps), count - max(0, -steps))
            same = self._rows.starts[there] == self._rows.starts[here]
            source[here] = np.where(same, rows[there], -1)
        return _taken_or_null(self._arg(agg.args[0]), self._rows.by_row(source))

    def _kernel(self, call: OverCall, what: str, values: np.ndarray | None,
                valid: np.ndarray | None) -> tuple[np.ndarray, np.ndarray | None]:
        try:
            return self._aggregate(call, what, values, valid)
        except FramesOverflow:
            raise ComputeError(f"integer overflow in `{show_agg(call.agg)}`", at=call.agg.at) from None

    def _aggregate(self, call: OverCall, what: str, values: np.ndarray | None,
                   valid: np.ndarray | None) -> tuple[np.ndarray, np.ndarray | None]:
        frame = call.frame
        kind = "rows" if frame.rows is not None else "within" if frame.within is not None else "all"
        until = "partition" if frame.is_whole else "equal" if frame.with_peers else "row"
        width = frame.rows if frame.rows is not None else frame.within or 0
        return aggregate(what, kind, until, self._rows.places, self._rows.row_bits, width=width, values=values,
                         valid=valid, times=self._times_of() if kind == "within" else None,
                         ties=self._ties_of() if until == "equal" else None, options=self._options)

    def _picked(self, call: OverCall, which: str, values: np.ndarray | None, valid: np.ndarray | None) -> pa.Array:
        """The value of the row of each frame that has the least or greatest one, or is the first or last."""
        found, _ = self._kernel(call, which, values, valid)
        return _taken_or_null(self._arg(call.agg.args[0]), found)

    def _number(self, call: OverCall, arg: pa.Array) -> pa.Array:
        valid = self._valid(call.agg.args[0])
        arg = arg.cast(pa.uint8()) if pa.types.is_boolean(arg.type) else arg
        filled = arg.fill_null(0) if arg.null_count and not pa.types.is_duration(arg.type) else arg
        if call.agg.fn in ("var", "std"):
            what, values = call.agg.fn, as_numpy(filled)
        elif pa.types.is_floating(arg.type):
            what, values = f"float_{call.agg.fn}", as_numpy(filled).astype(np.float64, copy=False)
        else:
            found = integers_of(filled)
            assert found is not None
            sign = "unsigned" if pa.types.is_unsigned_integer(arg.type) else "signed"
            what, values = f"{sign}_{call.agg.fn}", found.astype(np.int64, copy=False)
        numbers, there = self._kernel(call, what, values, valid)
        if what == "unsigned_sum":
            numbers = numbers.view(np.uint64)
        array = from_numpy(numbers)
        if pa.types.is_duration(type_of(call.agg).arrow):
            array = array.view(type_of(call.agg).arrow)
        return array if there is None else _with_nulls(array, there)

    def _decimal_sum(self, call: OverCall, arg: pa.Array) -> pa.Array | None:
        """The sums of decimals, as integers of 64 bits; None if a value or a sum has more digits than these."""
        if not len(arg) or not pa.types.is_decimal128(arg.type):
            return None
        words = np.frombuffer(arg.buffers()[1], np.int64).reshape(-1, 2)[arg.offset : arg.offset + len(arg)]
        valid, low = self._valid(call.agg.args[0]), np.ascontiguousarray(words[:, 0])
        is_wide = words[:, 1] != low >> 63
        if (is_wide if valid is None else is_wide & (valid > 0)).any():
            return None
        try:
            sums, there = self._aggregate(call, "signed_sum", low, valid)
        except FramesOverflow:
            return None
        kind = pa.decimal128(38, arg.type.scale)
        found = pa.Array.from_buffers(kind, len(sums), [None, pa.py_buffer(np.column_stack((sums, sums >> 63)).copy())])
        return found if there is None else _with_nulls(found, there)

    # --- any other aggregate, over all rows of each frame

    def _aggregated(self, call: OverCall) -> pa.Array:
        bounds, _ = self._kernel(call, "bounds", None, None)
        firsts = np.arange(self._count)
        if call.frame.is_whole:  # once for each partition
            firsts = np.flatnonzero(self._rows.is_first)
        program, schema = _aggregation(call)
        sizes = (bounds[:, 1] - bounds[:, 0])[firsts]
        ends = np.cumsum(sizes)
        parts: list[pa.Array] = []
        start = 0
        while start < len(firsts):
            raise_if_cancelled()
            most = PAIR_ROWS + (int(ends[start - 1]) if start else 0)
            stop = max(start + 1, int(np.searchsorted(ends, most, side="right")))
            parts.append(self._frames_of(call, program, schema, bounds[firsts[start:stop], 0], sizes[start:stop]))
            start = stop
        found = parts[0] if len(parts) == 1 else pa.concat_arrays(parts)
        by_place = np.arange(self._count) if not call.frame.is_whole else np.cumsum(self._rows.is_first) - 1
        return found.take(from_numpy(self._rows.by_row(by_place)))

    def _frames_of(self, call: OverCall, program: Program, schema: pa.Schema, starts: np.ndarray,
                   sizes: np.ndarray) -> pa.Array:
        """The aggregates of some frames."""
        total = int(sizes.sum())
        inside = np.arange(total) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        rows = from_numpy(self._rows.rows[np.repeat(starts, sizes) + inside])
        numbers = from_numpy(np.repeat(np.arange(len(sizes)), sizes))
        batch = pa.RecordBatch.from_arrays(
            [numbers, *(taken(self.column(name), rows) for name in schema.names[1:])], schema=schema)
        found = pa.Table.from_batches(list(program.run([batch], replace(self._options, workers=1))))
        order = np.argsort(as_numpy(found.column(_FRAME).combine_chunks()))
        return found.column(call.name).combine_chunks().take(from_numpy(order))


def _aggregation(call: OverCall) -> tuple[Program, pa.Schema]:
    """The aggregate by the number of a frame, and the schema of its input."""
    args = {arg.name: Field(arg.name, type_of(arg), arg.nullable) for arg in call.agg.args if isinstance(arg, Col)}
    schema = Schema((Field(_FRAME, I64, False), *args.values()))
    source = ops.Source("frames", schema.arrow, tuple(schema.names))
    key = identity(Schema((schema[_FRAME],)))
    aggregated = ops.Aggregate(source, key, None, (NamedAgg(call.name, call.agg),))
    return Program(compile_flow(aggregated)), schema.arrow


# --- partitions


def _ordered(keys: Sequence[pa.Array], rows: np.ndarray | None, count: int, options: Options) -> _Ordered:
    """The rows by partition, inside of one in their order."""
    row_bits = max(1, (count - 1).bit_length())
    if not keys:
        places = np.arange(count, dtype=np.uint64) if rows is None else rows.astype(np.uint64)
        return _Ordered(places, row_bits, count)
    numbers, base, bits = _numbered(keys, WORD_BITS - row_bits)
    return _Ordered(partition(numbers, base, bits, rows, row_bits, options), row_bits, count)


def _numbered(keys: Sequence[pa.Array], most_bits: int) -> tuple[np.ndarray, int, int]:
    """Keys as integers that are equal where they are, the least of them, and how many bits they differ in."""
    whole, base, bits = _numbers_of(keys[0], most_bits)
    for key in keys[1:]:
        more, least, width = _numbers_of(key, most_bits)
        if bits + width > most_bits:  # there are less than 2^32 different pairs of what are both dense numbers
            whole, base, bits = _dense(from_numpy(whole))
            more, least, width = _dense(from_numpy(more))
        whole = (whole - base << width) | (more - least)
        base, bits = 0, bits + width
        if bits > most_bits:
            whole, base, bits = _dense(from_numpy(whole))
    return whole, base, bits


def _numbers_of(key: pa.Array, most_bits: int) -> tuple[np.ndarray, int, int]:
    if pa.types.is_floating(key.type):
        found = integers_of(key)
        assert found is not None
        plain = from_numpy(found)
        return _dense(plain if not key.null_count else pc.if_else(key.is_valid(), plain, None))
    is_number = pa.types.is_integer(key.type) or pa.types.is_temporal(key.type) or pa.types.is_boolean(key.type)
    if not is_number or key.null_count:
        return _dense(comparable(key))
    values = integers_of(key)
    assert values is not None
    numbers = values.astype(np.int64, copy=False)
    base = int(numbers.min())
    bits = (int(numbers.max()) - base).bit_length()
    return (numbers, base, bits) if bits <= most_bits else _dense(from_numpy(numbers))


def _dense(key: pa.Array) -> tuple[np.ndarray, int, int]:
    """Numbers of different values, from 0 on; null is one of them."""
    coded = key.dictionary_encode(null_encoding="encode")
    coded = coded.combine_chunks() if isinstance(coded, pa.ChunkedArray) else coded
    return as_numpy(coded.indices).astype(np.int64), 0, max(1, len(coded.dictionary).bit_length())


def _ranks(column: pa.Array) -> np.ndarray:
    """64-bit integers in the order of a column, equal where its values are; anything for nulls."""
    found = integers_of(column)
    if found is not None:
        if found.dtype == np.uint64:
            return (found ^ np.uint64(1 << 63)).view(np.int64)
        wide = found.astype(np.int64, copy=False)
        return wide if not column.null_count else np.where(np.asarray(column.is_valid()), wide, np.iinfo(np.int64).min)
    order = argsort([(column, False)], False)
    sorted_ = taken(column, from_numpy(order))
    steps = np.zeros(len(column), np.int64)
    if len(column) > 1:
        steps[1:] = np.cumsum(np.asarray(pc.fill_null(pc.not_equal(sorted_[1:], sorted_[:-1]), True)))
    if column.null_count:
        steps[: column.null_count] = -1  # nulls come first, and are equal
    ranks = np.empty(len(column), np.int64)
    ranks[order] = steps
    return ranks


def _taken_or_null(column: pa.Array, rows: np.ndarray) -> pa.Array:
    """The rows of a column, null where a number is negative."""
    missing = rows < 0
    if not missing.any():
        return taken(column, from_numpy(rows))
    numbers = _with_nulls(from_numpy(np.where(missing, 0, rows)), ~missing)
    return taken(column, numbers)


def _with_nulls(array: pa.Array, there: np.ndarray) -> pa.Array:
    """The array, null where there is none."""
    bits = np.packbits(there.astype(bool), bitorder="little")
    return pa.Array.from_buffers(array.type, len(array), [pa.py_buffer(bits), array.buffers()[1]])
