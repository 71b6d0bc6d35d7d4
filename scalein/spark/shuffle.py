"""Blobs: how rows cross Spark's shuffle, and which rows go where.

Rows do not cross one by one: those for one target are a record batch, encoded as an Arrow IPC message without its
schema (both sides know it) in one binary cell. So the JVM moves a few cells of some hundred kilobytes a task and
target, not millions of rows. Cells are not compressed here: Spark compresses what it shuffles.

A row's hash is that of its key columns: `Column.hash()` for one key (`scalein.ir.functions.hashing`), mixed for
several, so that it is the same on every machine and in every version. The key group is its top 8 bits; targets are
ranges of key groups, so a range of a file that is sorted by hash is a target's, whatever the number of targets.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache

import numpy as np
import pyarrow as pa

from scalein.arrow_functions import taken
from scalein.compiler import compile_flow
from scalein.dtypes import BOOL, I64
from scalein.exec.bounded import Program
from scalein.ir import ops
from scalein.ir.exprs import Call, Col, Named
from scalein.ir.functions.hashing import P1, P2
from scalein.options import Options

KEY_GROUPS = 256
BLOB_BYTES = 384 << 10  # of a cell, about: from half a region on (512 kB at least), G1 treats arrays apart
ROUTED_BYTES = 64 << 20  # held until they are cells, so that few cells are small
ROUTED_ROWS = 1 << 16  # looked at at once: they stay in the caches
PIECE_ROWS = 1 << 10  # of a target among them, at least: a slice costs some microseconds
CELLS = pa.schema([pa.field("target", pa.int32(), False), pa.field("kind", pa.int8(), False),
                   pa.field("blob", pa.binary(), False)])
CELL_COLUMNS = "target int, kind tinyint, blob binary"  # the same in Spark's words

Hashes = np.ndarray  # of uint64


def hashes(batch: pa.RecordBatch, keys: Sequence[str], options: Options) -> Hashes:
    """The hash of each row's keys, 64 bits of any value; equal keys have equal ones, as in groups: NaN, -0.0, null."""
    columns = list(dict.fromkeys(keys))  # two keys may be one column
    fields = tuple(batch.schema.field(name) for name in columns)
    found = list(_program(fields).run([batch.select(columns)], options))
    each = [np.concatenate([np.asarray(part.column(f"h{columns.index(name)}")).view(np.uint64) for part in found])
            if found else np.zeros(0, np.uint64) for name in keys]
    mixed = each[0]
    for other in each[1:]:
        mixed = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(P1) + other
    if len(each) > 1:
        mixed = (mixed ^ (mixed >> np.uint64(33))) * np.uint64(P2)  # the top bits decide
    return mixed


@lru_cache(maxsize=64)
def _program(fields: tuple[pa.Field, ...]) -> Program:
    source = ops.Source("input", pa.schema(fields), tuple(field.name for field in fields))
    columns = [Col(field.name, field.dtype, field.nullable) for field in source.schema]
    items = tuple(Named(f"h{k}", Call("hash", (column,), (), I64, False)) for k, column in enumerate(columns))
    return Program(compile_flow(ops.Project(source, items)))


def key_groups(of: Hashes) -> np.ndarray:
    """The key group of each row, 0 to 255."""
    return (of >> np.uint64(56)).astype(np.uint8)


def target_of_groups(targets: int) -> np.ndarray:
    """For each of the 256 key groups, which target has it: ranges of (nearly) equal size.

    >>> target_of_groups(3)[[0, 85, 86, 255]].tolist()
    [0, 0, 1, 2]
    """
    return (np.arange(KEY_GROUPS) * targets // KEY_GROUPS).astype(np.uint8)


def routed(batches: Iterable[pa.RecordBatch], keys: Sequence[str], targets: int,
           options: Options) -> Iterator[tuple[int, pa.RecordBatch]]:
    """The rows for each target (0 to `targets` - 1), in batches of at most about `BLOB_BYTES`.

    Without keys all rows are for target 0.
    """
    if not keys or targets == 1:
        for batch in joined(batches, BLOB_BYTES):
            yield from ((0, part) for part in _cut(batch))
        return
    waiting: list[list[pa.RecordBatch]] = [[] for _ in range(targets)]
    sizes, held = [0.0] * targets, 0.0
    for batch in joined(batches, ROUTED_BYTES, max(ROUTED_ROWS, targets * PIECE_ROWS)):
        row_bytes = batch.nbytes / batch.num_rows
        held += batch.nbytes
        for target, piece in _pieces(batch, keys, targets, options):
            waiting[target].append(piece)
            sizes[target] += row_bytes * piece.num_rows
        for target in range(targets):
            if sizes[target] >= BLOB_BYTES or (held >= ROUTED_BYTES and sizes[target]):
                yield from ((target, part) for part in _cut(_one(waiting[target])))
                held -= sizes[target]
                waiting[target], sizes[target] = [], 0.0
    for target in range(targets):
        if waiting[target]:
            yield from ((target, part) for part in _cut(_one(waiting[target])))


def _pieces(batch: pa.RecordBatch, keys: Sequence[str], targets: int,
            options: Options) -> Iterator[tuple[int, pa.RecordBatch]]:
    """The rows of a batch for each target that has some."""
    to = target_of_groups(targets)[key_groups(hashes(batch, keys, options))]
    order = pa.array(np.argsort(to, kind="stable").astype(np.uint32))  # a radix sort: these are bytes
    ends = np.cumsum(np.bincount(to, minlength=targets)).tolist()
    batch = pa.RecordBatch.from_arrays([taken(column, order) for column in batch.columns], schema=batch.schema)
    for target, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
        if end > start:
            yield target, batch.slice(start, end - start)


def own_rows(batch: pa.RecordBatch, keys: Sequence[str], target: int, targets: int, options: Options) -> pa.RecordBatch:
    """The rows of a batch for one target."""
    if targets == 1:
        return batch
    if len(keys) == 1 and all(pa.types.is_primitive(column.type) for column in batch.columns):
        return _own_range(batch, keys[0], target, targets, options)
    rows = np.flatnonzero((target_of_groups(targets) == target)[key_groups(hashes(batch, keys, options))])
    if len(rows) == batch.num_rows:
        return batch
    at = pa.array(rows)
    return pa.RecordBatch.from_arrays([taken(column, at) for column in batch.columns], schema=batch.schema)


def _own_range(batch: pa.RecordBatch, key: str, target: int, targets: int, options: Options) -> pa.RecordBatch:
    """`own_rows` in one kernel: a target's key groups are a range, and so are its hashes."""
    groups = np.flatnonzero(target_of_groups(targets) == target)
    least, greatest = int(groups[0]) << 56, (int(groups[-1]) + 1 << 56) - 1
    is_split = least < 1 << 63 <= greatest  # hashes have a sign here: the greater half is below the other
    bounds = [_repeated(bound - (bound >> 63 << 64), batch.num_rows) for bound in (least, greatest)]
    types = tuple((column.type, field.nullable) for column, field in zip(batch.columns, batch.schema, strict=True))
    given = pa.RecordBatch.from_arrays([*batch.columns, *bounds], schema=_with_bounds(types))
    found = list(_range_program(types, batch.schema.get_field_index(key), is_split).run([given], options))
    return pa.RecordBatch.from_arrays(_one(found).columns, schema=batch.schema) if found else batch.slice(0, 0)


Types = tuple[tuple[pa.DataType, bool], ...]  # of columns, and whether these may have nulls


def _with_bounds(types: Types) -> pa.Schema:
    """Columns by number, and two that say from which hash to which."""
    bounds = [pa.field(name, pa.int64(), False) for name in ("least", "greatest")]
    return pa.schema([*(pa.field(str(k), *about) for k, about in enumerate(types)), *bounds])


@lru_cache(maxsize=64)
def _range_program(types: Types, key: int, is_split: bool) -> Program:
    """Rows whose hash lies within bounds; these are columns, since a new kernel for each target costs more."""
    schema = _with_bounds(types)
    source = ops.Source("input", schema, tuple(schema.names))
    columns = [Col(field.name, field.dtype, field.nullable) for field in source.schema]
    hashed = Call("hash", (columns[key],), (), I64, False)
    tests = [Call(fn, (hashed, bound), (), BOOL, False) for fn, bound in zip(("ge", "le"), columns[-2:], strict=True)]
    kept = ops.Filter(source, Call("or" if is_split else "and", tuple(tests), (), BOOL, False))
    return Program(compile_flow(ops.Project(kept, tuple(Named(column.name, column) for column in columns[:-2]))))


@lru_cache(maxsize=8)
def _constant(value: int, length: int) -> pa.Array:
    return pa.array(np.full(length, value))


def _repeated(value: int, rows: int) -> pa.Array:
    """A column of one value; of a longer one that is there."""
    return _constant(value, 1 << rows.bit_length()).slice(0, rows)


def _one(parts: list[pa.RecordBatch]) -> pa.RecordBatch:
    return parts[0] if len(parts) == 1 else pa.concat_batches(parts)


def _cut(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    rows = max(1, int(batch.num_rows * min(1.0, BLOB_BYTES / max(1, batch.nbytes))))
    for start in range(0, batch.num_rows, rows):
        yield batch.slice(start, rows)


def joined(batches: Iterable[pa.RecordBatch], most_bytes: int, most_rows: int = 1 << 31) -> Iterator[pa.RecordBatch]:
    """The same rows in fewer batches: of one or more of those given, up to about so many rows and bytes."""
    waiting: list[pa.RecordBatch] = []
    rows = size = 0
    for batch in batches:
        if not batch.num_rows:
            continue
        waiting.append(batch)
        rows += batch.num_rows
        size += batch.nbytes
        if rows >= most_rows or size >= most_bytes:
            yield _one(waiting)
            waiting, rows, size = [], 0, 0
    if waiting:
        yield _one(waiting)


def encoded(batch: pa.RecordBatch) -> pa.Buffer:
    """A batch as a message without its schema; of a slice only its own rows."""
    return batch.serialize()


def decoded(blob: pa.Buffer | bytes | pa.BinaryScalar, schema: pa.Schema) -> pa.RecordBatch:
    """The batch that a blob holds, without a copy: the blob's own memory."""
    return pa.ipc.read_record_batch(blob.as_buffer() if isinstance(blob, pa.Scalar) else blob, schema)


def cells(parts: Iterable[tuple[int, pa.RecordBatch]], places: Sequence[int],
          kind: int = 0) -> Iterator[pa.RecordBatch]:
    """Rows of `CELLS` for Spark to move: for target t the number is `places[t]` (see `placed`)."""
    for target, part in parts:
        blob = encoded(part)
        offsets = pa.py_buffer(np.array([0, blob.size], np.int32))
        column = pa.BinaryArray.from_buffers(pa.binary(), 1, [None, offsets, blob])
        yield pa.RecordBatch.from_arrays([pa.array([places[target]], pa.int32()), pa.array([kind], pa.int8()), column],
                                         schema=CELLS)


def opened(batches: Iterable[pa.RecordBatch], schemas: Sequence[pa.Schema]) -> Iterator[pa.RecordBatch]:
    """What the cells of some tasks hold, one after the other, each by its kind; an empty cell holds nothing."""
    for batch in batches:
        for kind, blob in zip(batch.column("kind").to_pylist(), batch.column("blob"), strict=True):
            buffer = blob.as_buffer()
            if buffer.size:
                yield decoded(buffer, schemas[kind])


# --- Spark's own partitioning


@lru_cache(maxsize=64)
def placed(count: int) -> tuple[int, ...]:
    """For each partition of `df.repartition(count, "target")` a number that Spark puts exactly there.

    >>> placed(4)
    (12, 6, 2, 0)
    """
    found: dict[int, int] = {}
    number = 0
    while len(found) < count:
        found.setdefault(_murmur3(number) % count, number)
        number += 1
    return tuple(found[k] for k in range(count))


def _murmur3(number: int, seed: int = 42) -> int:
    """Spark's hash of a 32-bit integer, which its partitioning takes modulo the number of partitions."""
    k = _rotated(number * 0xCC9E2D51, 15) * 0x1B873593
    h = _rotated((k & 0xFFFFFFFF) ^ seed, 13) * 5 + 0xE6546B64
    h = (h & 0xFFFFFFFF) ^ 4
    h = (h ^ h >> 16) * 0x85EBCA6B & 0xFFFFFFFF
    h = (h ^ h >> 13) * 0xC2B2AE35 & 0xFFFFFFFF
    h ^= h >> 16
    return h - (1 << 32) if h >> 31 else h


def _rotated(number: int, by: int) -> int:
    number &= 0xFFFFFFFF
    return (number << by | number >> 32 - by) & 0xFFFFFFFF
