"""The build side of joins, always the right one (`Join.physical`): static tables, read completely, indexed by key.

One integer-like key over a small range gives a direct table; if every key has one row, the payload itself is laid out
by key. All others have a hash index whose records hold the first row of their key; further rows are chained in the
table's order. Rows with a null key match nothing and are left out. String columns whose values repeat are
dictionary-encoded, so that grouping by one groups by codes.

A table with a `time` is ordered by key and time, so that the rows of a key follow one another; a key leads to the first
of them (`llvm_backend/probe.py`). Ties have the table's order.

The table of a right or outer join also keeps its rows as they are, and a run marks those that match: a byte a row,
which all workers may set. The payload is never laid out by key then, so that a match is a row's number.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import pyarrow as pa

from scalein.arrow_rows import as_type, from_numpy, gathered, taken
from scalein.cancellation import DETACHED_ROWS, raise_if_cancelled, run_detached
from scalein.dtypes import I32, I64, DType, Kind
from scalein.exec.arrow_offset_limits import cut_points, total_weights
from scalein.exec.arrow_offset_limits import weights as weights_of
from scalein.exec.tables import HashTable, handle_full
from scalein.ir.exprs import Col, Expr, type_of
from scalein.ir.passes.pass_through import PLACE
from scalein.ir.physical import JoinBuild
from scalein.ir.stages import FromBatches, Group, Read, Stage
from scalein.ir.tables import Acc, AccKind, Key, Table
from scalein.kernels.bind import addressable, bind, form_of
from scalein.kernels.call import call, kernel
from scalein.layout import DONE, FrameData
from scalein.options import Options

# A direct table may be this many times larger than its rows, and this large at most.
SPARSE_FACTOR = 4
DIRECT_POSITIONS = 1 << 24
DIRECT_ALWAYS = 1 << 12
ENCODED_SAMPLE = 1 << 12  # rows of text that decide whether a dictionary is worth it; fewer always have one
UNMATCHED_ROWS = 1 << 18  # of a batch


@dataclass(frozen=True, slots=True)
class TableRows:
    """The rows of an outer join's table: columns as they were read, and which rows a probe can match, by number."""

    columns: dict[str, pa.Array]
    keyed: np.ndarray


@dataclass(slots=True)
class JoinTable:
    """A join table in memory, and the variant of the probe that it needs."""

    direct: bool
    unique: bool
    dense: bool
    payload: tuple[Read, ...]
    columns: dict[str, pa.Array]
    build: Table | None = None
    text_keys: pa.Array | None = None  # the key column, if it is the only one and a string
    hash_table: HashTable | None = None
    least: int = 0
    span: int = 0
    rows: np.ndarray = field(default_factory=lambda: np.zeros(1, np.int32))
    flags: dict[tuple[str, str], np.ndarray] = field(default_factory=dict)
    distinct_keys: tuple[pa.Array, np.ndarray] | None = None  # distinct text keys, and the first row of each
    chain: np.ndarray = field(default_factory=lambda: np.zeros(1, np.int32))
    nested: dict[str, pa.Array] = field(default_factory=dict)  # columns that kernels do not read, by row of the table
    table: TableRows | None = None  # of an outer join
    marks: np.ndarray | None = None  # 1 after a match, by the row's number + 1
    times: np.ndarray | None = None  # of its rows, where these are ordered by key and time
    ends: np.ndarray | None = None  # for the first row of each key, the row after its last one

    @property
    def memory_bytes(self) -> int:
        """What it takes beside the rows that it was built of."""
        arrays = (self.rows, self.chain, *(() if self.times is None or self.ends is None else (self.times, self.ends)))
        index = 0 if self.hash_table is None else self.hash_table.bytes
        ordered = () if self.times is None else (*self.columns.values(), *self.nested.values())
        return int(index + sum(array.nbytes for array in arrays) + sum(column.nbytes for column in ordered))

    def with_marks(self) -> JoinTable:
        """The same table for one run, which marks the rows that match."""
        assert self.table is not None
        return replace(self, marks=np.zeros(len(self.table.keyed) + 1, np.uint8))

    def unmatched(self, columns: Sequence[str | None], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        """The rows without a match, in the table's order, as some columns; those that the table lacks are null."""
        assert self.table is not None and self.marks is not None  # noqa: PT018
        arrays = [None if name is None else self.table.columns[name] for name in columns]
        is_left = np.ones(len(next(iter(self.table.columns.values()))), np.bool_)
        is_left[self.table.keyed[self.marks[1:] != 0]] = False
        rows = np.flatnonzero(is_left)
        weights = total_weights([weights_of(array) for array in arrays if array is not None])
        for start, stop in cut_points(len(rows), UNMATCHED_ROWS, None if weights is None else weights[rows]):
            these = from_numpy(rows[start:stop])
            found = [pa.nulls(len(these), field.type) if array is None else taken(array, these)
                     for array, field in zip(arrays, schema, strict=True)]
            found = [as_type(c, field.type) for c, field in zip(found, schema, strict=True)]
            yield pa.RecordBatch.from_arrays(found, schema=schema)

    def nulls(self, how: str) -> dict[str, bool]:
        """By column: whether the probe's output may be null."""
        return {r.name: r.nulls or how == "left" for r in self.payload}

    def rows_of(self, values: pa.Array) -> np.ndarray:
        """For each string, the first row whose key it is, or -1."""
        if self.distinct_keys is None:
            assert self.text_keys is not None
            distinct = self.text_keys.dictionary_encode()
            first = np.full(max(1, len(distinct.dictionary)), -1, np.int32)
            codes = np.asarray(distinct.indices)
            first[codes[::-1]] = np.arange(len(codes), dtype=np.int32)[::-1]
            self.distinct_keys = (distinct.dictionary, first)
        import pyarrow.compute as pc

        keys, first = self.distinct_keys
        found = pc.index_in(values, value_set=keys)
        missing = np.asarray(found.is_null())
        return np.where(missing, np.int32(-1), first[np.asarray(found.fill_null(0))]).astype(np.int32)

    def is_coded(self, column: str) -> bool:
        return bool(pa.types.is_dictionary(self.columns[column].type))

    def attach(self, frame: FrameData, number: int) -> None:
        """Make a kernel probe this table as join `number`."""
        name = f"join{number}"
        frame[f"{name}.least"], frame[f"{name}.span"] = self.least, self.span
        frame.point(f"{name}.rows", self.rows)
        frame.point(f"{name}.next", self.chain)
        frame[f"{name}.at"], frame[f"{name}.cursor"] = 0, -2
        if self.marks is not None:
            frame.point(f"{name}.marks", self.marks)
            frame[f"{name}.mark_count"] = len(self.marks)
        if self.times is not None and self.ends is not None:
            frame.point(f"{name}.times", self.times)
            frame.point(f"{name}.ends", self.ends)
            frame[f"{name}.time_count"] = len(self.times)
        if self.hash_table is not None:
            self.hash_table.attach(frame, name)
        for read in self.payload:
            array = self.columns[read.name]
            if read.form == "fixed" and read.dtype.kind is Kind.BOOL:
                frame.point(f"{name}.{read.name}.data", self._flags(read.name, "set"))
            else:
                bind(frame, array, Read(read.name, read.dtype, read.form, nulls=False), f"{name}.")
            frame[f"{name}.{read.name}.rows"] = max(1, len(array))
            if read.nulls:
                frame.point(f"{name}.{read.name}.known", self._flags(read.name, "valid"))

    def _flags(self, column: str, what: str) -> np.ndarray:
        """A column's bools ("set") or validity ("valid") as bytes, made once for all frames."""
        found = self.flags.get((column, what))
        if found is None:
            array = self.columns[column]
            flags = array.fill_null(False) if what == "set" else array.is_valid()
            found = self.flags[column, what] = _bytes(flags)
        return found


def _bytes(flags: pa.Array) -> np.ndarray:
    """Flags as bytes, at least one."""
    found = np.asarray(flags.cast(pa.uint8()))
    return found if len(found) else np.zeros(1, np.uint8)


def build(table: JoinBuild, batches: Iterator[pa.RecordBatch], options: Options) -> JoinTable:
    """Read the build side of a join to its end, and index it."""
    schema = table.input.schema.arrow
    empty = pa.RecordBatch.from_arrays([pa.nulls(0, field.type) for field in schema], schema.names)
    parts = [_plain(batch) for batch in batches] or [_plain(empty)]
    if sum(part.num_rows for part in parts) > DETACHED_ROWS:
        return run_detached(partial(_indexed, table, parts, options))
    return _indexed(table, parts, options)


def _indexed(table: JoinBuild, parts: list[pa.RecordBatch], options: Options) -> JoinTable:
    """The table of some rows; empties the list."""
    import pyarrow.compute as pc  # takes 30 ms, and most flows have no join

    whole = pa.Table.from_batches(parts)
    parts.clear()
    fields = table.input.schema
    nested = {name: _one(whole[name]) for name in table.columns if fields[name].dtype.is_nested}
    whole = whole.select([field.name for field in fields if not field.dtype.is_nested]).combine_chunks()
    kept = None
    if table.is_outer:
        names = dict.fromkeys([*table.columns, *(key.name for key in table.keys)])
        kept = TableRows({name: nested[name] if name in nested else _one(whole[name]) for name in names},
                         np.arange(whole.num_rows))
    keys = [addressable(_one(whole[key.name])) for key in table.keys]
    valid = None
    for key in keys:
        if key.null_count:
            mask = key.is_valid()
            valid = mask if valid is None else pc.and_(valid, mask)
    if valid is not None:
        whole = whole.filter(valid).combine_chunks()
        keys = [key.filter(valid) for key in keys]
        kept = None if kept is None else replace(kept, keyed=np.flatnonzero(np.asarray(valid)))
        nested = {name: taken(column, pc.indices_nonzero(valid)) for name, column in nested.items()}
    times: np.ndarray | None = None
    if table.time:
        times = _integers(addressable(_one(whole[table.time])), I64)
        order = _by_key_and_time(table, keys, times, options)
        if order is not None:
            rows = from_numpy(order)
            ordered = {name: gathered(_one(whole[name]), rows) for name in table.columns if name not in nested}
            whole = pa.table(ordered) if ordered else whole
            keys, times = [gathered(key, rows) for key in keys], times[order]
            nested = {name: gathered(column, rows) for name, column in nested.items()}
            kept = None if kept is None else replace(kept, keyed=kept.keyed[order])
    columns = {name: _encoded(_one(whole[name])) for name in table.columns if name not in nested}
    payload = [_payload_read(name, columns[name], fields[name].dtype) for name in columns]
    if nested:  # a probe returns their row number
        columns[PLACE] = from_numpy(np.arange(whole.num_rows, dtype=np.int32))
        payload.append(Read(PLACE, I32, nulls=False))
    found = _direct(keys[0], type_of(table.keys[0])) if len(keys) == 1 else None
    if found is not None and times is not None:
        built = _build_ranges(keys[0], type_of(table.keys[0]), found, columns, tuple(payload))
    elif found is not None:
        built = _build_direct(keys[0], type_of(table.keys[0]), found, columns, tuple(payload), table)
    else:
        built = _build_hash(table.keys, keys, columns, tuple(payload), options)
    if times is not None:
        built.times = times if len(times) else np.zeros(1, np.int64)
        if built.ends is None:
            built.ends = _ends(built.chain, len(times))
    built.nested, built.table = nested, kept
    return built


def _plain(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Views as plain strings and binaries: most functions of pyarrow do not support views."""
    plain = {pa.string_view(): pa.string(), pa.binary_view(): pa.binary()}
    columns = [c.cast(plain[c.type]) if c.type in plain else c for c in batch.columns]
    return pa.RecordBatch.from_arrays(columns, names=batch.schema.names)


def _one(column: pa.ChunkedArray | pa.Array) -> pa.Array:
    if isinstance(column, pa.Array):
        return column
    if column.num_chunks == 1:
        return column.chunk(0)
    return pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)


def _encoded(array: pa.Array) -> pa.Array:
    """Strings as dictionary codes if they repeat, else as they are; nulls stay in the codes."""
    raise_if_cancelled()
    if pa.types.is_string(array.type) or pa.types.is_large_string(array.type):
        array = array.cast(pa.string())
        if _repeats(array):
            array = array.dictionary_encode()
    return addressable(array)


def _repeats(array: pa.Array) -> bool:
    """Whether there are about twice as many rows as values, by some rows from all over the array."""
    step = max(1, len(array) // ENCODED_SAMPLE)
    sample = gathered(array, from_numpy(np.arange(0, len(array), step)))
    return len(array) <= ENCODED_SAMPLE or 2 * len(sample.unique()) <= len(sample)


def _payload_read(name: str, array: pa.Array, dtype: DType) -> Read:
    form = form_of(array.type)
    return Read(name, dtype, "fixed" if form == "bits" else form, nulls=array.null_count > 0)


# --- direct


def _direct(keys: pa.Array, dtype: DType) -> tuple[int, int] | None:
    """Least key and number of positions, if a direct table of that size is allowed."""
    if not _is_integer(dtype) or not len(keys):
        return None
    numbers = _integers(keys, dtype)
    least, greatest = int(numbers.min()), int(numbers.max())
    span = greatest - least + 1
    if span <= DIRECT_ALWAYS or (span <= SPARSE_FACTOR * len(keys) and span <= DIRECT_POSITIONS):
        return least, span
    return None


def _is_integer(dtype: DType) -> bool:
    """Whether keys of a type are integers, at most 64 bits wide."""
    return not (dtype.is_float or dtype.is_bytes or dtype.is_decimal or dtype.kind is Kind.BOOL)


def _integers(keys: pa.Array, dtype: DType) -> np.ndarray:
    kind = f"{'i' if dtype.is_signed else 'u'}{dtype.bits // 8}"
    data = keys.buffers()[1]
    start = keys.offset
    return np.frombuffer(data, kind)[start : start + len(keys)]


def _build_direct(keys: pa.Array, dtype: DType, domain: tuple[int, int], columns: dict[str, pa.Array],
                  payload: tuple[Read, ...], table: JoinBuild) -> JoinTable:
    least, span = domain
    numbers = _integers(keys, dtype)
    # Unsigned of the same width: the distance of two int8 may be 255.
    places = (numbers - numbers.dtype.type(least)).view(f"u{numbers.itemsize}").astype(np.int64)
    rows = np.full(span, -1, np.int32)
    if table.tests_presence:
        rows[places] = 0
        return JoinTable(True, True, False, payload, columns, least=least, span=span, rows=rows)
    order = np.arange(len(places), dtype=np.int32)
    rows[places[::-1]] = order[::-1]  # the first row of each key
    unique = np.count_nonzero(rows >= 0) == len(places)
    if unique and span <= 2 * len(places) and not table.is_outer:
        # The payload is laid out by key: a match is one load.
        where = from_numpy(np.maximum(rows, 0))
        spread = {name: _take(column, where) for name, column in columns.items()}
        is_dense = len(places) == span
        present = np.where(rows >= 0, np.arange(span, dtype=np.int32), np.int32(-1))
        return JoinTable(True, True, is_dense, payload, spread, least=least, span=span, rows=present)
    chain = np.full(max(1, len(places)), -1, np.int32)
    if not unique:
        by_key = _by_place(places, span)
        same = places[by_key[1:]] == places[by_key[:-1]]
        chain[by_key[:-1][same]] = by_key[1:][same]
    return JoinTable(True, unique, False, payload, columns, least=least, span=span, rows=rows, chain=chain)


def _by_place(places: np.ndarray, span: int) -> np.ndarray:
    """The numbers of rows by their places; equal ones in their order. Words of both are what numpy sorts fastest."""
    row_bits = len(places).bit_length()
    assert span.bit_length() + row_bits <= 64  # a direct table is small, and rows are numbered in 31 bits
    words = places.astype(np.uint64) << np.uint64(row_bits) | np.arange(len(places), dtype=np.uint64)
    words.sort()
    return (words & np.uint64((1 << row_bits) - 1)).astype(np.int32)


def _build_ranges(keys: pa.Array, dtype: DType, domain: tuple[int, int], columns: dict[str, pa.Array],
                  payload: tuple[Read, ...]) -> JoinTable:
    """A direct table of rows in the order of their keys."""
    least, span = domain
    numbers = _integers(keys, dtype)
    starts = np.flatnonzero(np.concatenate(([True], numbers[1:] != numbers[:-1]))).astype(np.int32)
    first = numbers[starts]
    rows = np.full(span, -1, np.int32)
    rows[(first - first.dtype.type(least)).view(f"u{first.itemsize}").astype(np.int64)] = starts
    ends = np.zeros(len(numbers), np.int32)
    ends[starts] = np.append(starts[1:], np.int32(len(numbers)))
    return JoinTable(True, len(starts) == len(numbers), False, payload, columns, least=least, span=span, rows=rows,
                     ends=ends)


def _ends(chain: np.ndarray, count: int) -> np.ndarray:
    """The row after the last one of the key that each row begins; chains go from row to row."""
    last = np.flatnonzero(chain[:count] < 0).astype(np.int32)
    ends = np.zeros(max(1, count), np.int32)
    ends[np.append(np.int32(0), last[:-1] + 1)[: len(last)]] = last + 1
    return ends


def _by_key_and_time(table: JoinBuild, keys: list[pa.Array], times: np.ndarray,
                     options: Options) -> np.ndarray | None:
    """The order of rows by key and time; None if they are in it."""
    from scalein.exec.sort import argsort, comparable

    if len(keys) == 1 and _is_integer(dtype := type_of(table.keys[0])):
        numbers = _integers(keys[0], dtype)
        is_later = (numbers[1:] > numbers[:-1]) | ((numbers[1:] == numbers[:-1]) & (times[1:] >= times[:-1]))
        if is_later.all():
            return None
        if (order := _order(numbers, times, options)) is not None:
            return order
    values = (key.dictionary_decode() if pa.types.is_dictionary(key.type) else key for key in keys)
    return argsort([*((comparable(each), False) for each in values), (from_numpy(times), False)], nulls_last=False)


def _order(numbers: np.ndarray, times: np.ndarray, options: Options) -> np.ndarray | None:
    """The stable order of rows by two columns; None if one of them is too wide for a word with the number of a row.

    They are sorted by digits: by time, unless they are in its order, as rows of streams mostly are, and then by number.
    """
    from scalein.kernels.frames import partition

    row_bits = max(1, (len(numbers) - 1).bit_length())
    widths = [(int(column.max()) - int(column.min())).bit_length() for column in (numbers, times)]
    if max(widths) + row_bits > 64:
        return None
    rows: np.ndarray | None = None
    for column, bits in zip((times, numbers.astype(np.int64, copy=False)), reversed(widths), strict=True):
        if column is times and bool((times[1:] >= times[:-1]).all()):
            continue
        words = partition(column, int(column.min()), bits, rows, row_bits, options)
        words &= np.uint64((1 << row_bits) - 1)
        rows = words.view(np.int64)
    return rows


def _take(column: pa.Array, rows: pa.Array) -> pa.Array:
    if pa.types.is_dictionary(column.type):
        return pa.DictionaryArray.from_arrays(column.indices.take(rows), column.dictionary)
    return column.take(rows)


# --- hash


def _build_hash(exprs: tuple[Expr, ...], keys: list[pa.Array], columns: dict[str, pa.Array],
                payload: tuple[Read, ...], options: Options) -> JoinTable:
    names = [f"key{k}" for k in range(len(keys))]
    types = [type_of(e) for e in exprs]
    table = Table(
        keys=tuple(Key(n, t, nullable=False) for n, t in zip(names, types, strict=True)),
        accs=(Acc(AccKind.ROWS), Acc(AccKind.CHAIN)),
        outputs=(),
    )
    reads = tuple(Read(n, t, form_of(key.type), nulls=False) for n, t, key in zip(names, types, keys, strict=True))
    given = tuple(Col(n, t, False) for n, t in zip(names, types, strict=True))
    stage = Stage("build", FromBatches(reads), (), Group(table, given))
    compiled = kernel(stage, options)
    frame = compiled.kernel.frame.new()
    for read, key in zip(reads, keys, strict=True):
        bind(frame, key, read)
    rows = len(keys[0])
    chain = np.full(max(1, rows), -1, np.int32)
    frame.point("chain.next", chain)
    frame["row"], frame["end"] = 0, rows
    hashed = HashTable(table, options)
    while True:
        hashed.attach(frame)
        status = call(compiled, frame)
        hashed.detach(frame)
        if status == DONE:
            break
        handle_full(hashed, status, frame)
    unique = frame["chain.longer"] == 0
    text = keys[0].cast(pa.string()) if len(keys) == 1 and types[0].is_string else None
    return JoinTable(False, unique, False, payload, columns, build=table, text_keys=text, hash_table=hashed,
                     chain=chain)
