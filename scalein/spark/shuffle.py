"""Shuffle blocks: how rows cross Spark's shuffle, and to which target partition.

Rows do not cross one by one: the rows of one target form a record batch, which is encoded as an Arrow IPC message
without its schema (both sides know it) in one binary value, a shuffle block. So the JVM moves a few blocks of some
hundred kilobytes for each task and target instead of millions of rows. Blocks are not compressed here: Spark compresses
what it shuffles.

The hash of a row is that of its key columns: `Column.hash()` for one key (`scalein.ir.functions.hashing`), mixed for
several, so that it is the same on every machine and in every version. The key group is its top 8 bits; targets are
ranges of key groups. So in a file sorted by hash the rows of a target are one range, whatever the number of targets.

How many targets a batch query has is decided here (`shuffle_partitions`); those of a stream are the `partitions=` of
`streaming/start.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from scalein.arrow_rows import taken
from scalein.compiler import compile_flow
from scalein.dtypes import BOOL, I64
from scalein.exec.bounded import Program
from scalein.ir import ops
from scalein.ir.exprs import Call, Col, Named
from scalein.ir.functions.hashing import P1, P2
from scalein.options import Options
from scalein.state.key_groups import key_groups, partition_of_key_groups

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

BLOCK_BYTES = 384 << 10  # of a block, about: G1 allocates arrays of half a region (512 kB or more) apart
BUFFERED_BYTES = 64 << 20  # of rows buffered until they are blocks, so that few blocks are small
ROUTE_ROWS = 1 << 16  # routed at once: they fit in the CPU's caches
MIN_SLICE_ROWS = 1 << 10  # of a target among them, at least on average: a slice costs some microseconds
SHUFFLE_SCHEMA = pa.schema([pa.field("target", pa.int32(), False), pa.field("kind", pa.int8(), False),
                            pa.field("block", pa.binary(), False)])
SHUFFLE_DDL = "target int, kind tinyint, block binary"  # the same for Spark

Hashes = np.ndarray  # of uint64


def key_hashes(batch: pa.RecordBatch, keys: Sequence[str], options: Options) -> Hashes:
    """The 64-bit hash of each row's keys; keys that are equal in a group_by (NaN, -0.0, null) have equal hashes."""
    columns = list(dict.fromkeys(keys))  # two keys may be the same column
    fields = tuple(batch.schema.field(name) for name in columns)
    found = list(_program(fields).run([batch.select(columns)], options))
    by_key = [np.concatenate([np.asarray(part.column(f"h{columns.index(name)}")).view(np.uint64) for part in found])
              if found else np.zeros(0, np.uint64) for name in keys]
    mixed = by_key[0]
    for other in by_key[1:]:
        mixed = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(P1) + other
    if len(by_key) > 1:
        mixed = (mixed ^ (mixed >> np.uint64(33))) * np.uint64(P2)  # the top bits are the key group
    return mixed


@lru_cache(maxsize=64)
def _program(fields: tuple[pa.Field, ...]) -> Program:
    source = ops.Source("input", pa.schema(fields), tuple(field.name for field in fields))
    columns = [Col(field.name, field.dtype, field.nullable) for field in source.schema]
    items = tuple(Named(f"h{k}", Call("hash", (column,), (), I64, False)) for k, column in enumerate(columns))
    return Program(compile_flow(ops.Project(source, items)))


def route(batches: Iterable[pa.RecordBatch], keys: Sequence[str], targets: int,
          options: Options) -> Iterator[tuple[int, pa.RecordBatch]]:
    """The rows for each target (0 to `targets` - 1), in batches of at most about `BLOCK_BYTES`.

    Without keys all rows are for target 0.
    """
    if not keys or targets == 1:
        for batch in coalesce_batches(batches, BLOCK_BYTES):
            yield from ((0, part) for part in _split_to_blocks(batch))
        return
    buffered: list[list[pa.RecordBatch]] = [[] for _ in range(targets)]
    sizes, buffered_bytes = [0.0] * targets, 0.0
    for batch in coalesce_batches(batches, BUFFERED_BYTES, max(ROUTE_ROWS, targets * MIN_SLICE_ROWS)):
        row_bytes = batch.nbytes / batch.num_rows
        buffered_bytes += batch.nbytes
        for target, rows in _route_batch(batch, keys, targets, options):
            buffered[target].append(rows)
            sizes[target] += row_bytes * rows.num_rows
        for target in range(targets):
            if sizes[target] >= BLOCK_BYTES or (buffered_bytes >= BUFFERED_BYTES and sizes[target]):
                yield from ((target, part) for part in _split_to_blocks(_concat(buffered[target])))
                buffered_bytes -= sizes[target]
                buffered[target], sizes[target] = [], 0.0
    for target in range(targets):
        if buffered[target]:
            yield from ((target, part) for part in _split_to_blocks(_concat(buffered[target])))


def _route_batch(batch: pa.RecordBatch, keys: Sequence[str], targets: int,
                 options: Options) -> Iterator[tuple[int, pa.RecordBatch]]:
    """The rows of a batch for each target that has some."""
    target_of_row = partition_of_key_groups(targets)[key_groups(key_hashes(batch, keys, options))]
    order = pa.array(np.argsort(target_of_row, kind="stable").astype(np.uint32))  # numpy sorts bytes by radix
    ends = np.cumsum(np.bincount(target_of_row, minlength=targets)).tolist()
    batch = pa.RecordBatch.from_arrays([taken(column, order) for column in batch.columns], schema=batch.schema)
    for target, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
        if end > start:
            yield target, batch.slice(start, end - start)


def rows_of_target(batch: pa.RecordBatch, keys: Sequence[str], target: int, targets: int,
                   options: Options) -> pa.RecordBatch:
    """The rows of a batch for one target."""
    if targets == 1:
        return batch
    if len(keys) == 1 and all(pa.types.is_primitive(column.type) for column in batch.columns):
        return _rows_in_hash_range(batch, keys[0], target, targets, options)
    rows = np.flatnonzero((partition_of_key_groups(targets) == target)[key_groups(key_hashes(batch, keys, options))])
    if len(rows) == batch.num_rows:
        return batch
    indices = pa.array(rows)
    return pa.RecordBatch.from_arrays([taken(column, indices) for column in batch.columns], schema=batch.schema)


def _rows_in_hash_range(batch: pa.RecordBatch, key: str, target: int, targets: int, options: Options) -> pa.RecordBatch:
    """`rows_of_target` in one kernel: a target's key groups are a range, and so are its hashes."""
    groups = np.flatnonzero(partition_of_key_groups(targets) == target)
    least, greatest = int(groups[0]) << 56, (int(groups[-1]) + 1 << 56) - 1
    is_split = least < 1 << 63 <= greatest  # hashes are signed here: those with the top bit set are negative
    bounds = [_constant_column(bound - (bound >> 63 << 64), batch.num_rows) for bound in (least, greatest)]
    types = tuple((column.type, field.nullable) for column, field in zip(batch.columns, batch.schema, strict=True))
    given = pa.RecordBatch.from_arrays([*batch.columns, *bounds], schema=_with_bounds(types))
    found = list(_hash_range_program(types, batch.schema.get_field_index(key), is_split).run([given], options))
    return pa.RecordBatch.from_arrays(_concat(found).columns, schema=batch.schema) if found else batch.slice(0, 0)


Types = tuple[tuple[pa.DataType, bool], ...]  # of columns, and whether they are nullable


def _with_bounds(types: Types) -> pa.Schema:
    """Columns named by their numbers, and two with the least and the greatest hash."""
    bounds = [pa.field(name, pa.int64(), False) for name in ("least", "greatest")]
    return pa.schema([*(pa.field(str(k), *about) for k, about in enumerate(types)), *bounds])


@lru_cache(maxsize=64)
def _hash_range_program(types: Types, key: int, is_split: bool) -> Program:
    """Rows whose hash lies within bounds. The bounds are columns, so that all targets share one kernel."""
    schema = _with_bounds(types)
    source = ops.Source("input", schema, tuple(schema.names))
    columns = [Col(field.name, field.dtype, field.nullable) for field in source.schema]
    hash_ = Call("hash", (columns[key],), (), I64, False)
    tests = [Call(fn, (hash_, bound), (), BOOL, False) for fn, bound in zip(("ge", "le"), columns[-2:], strict=True)]
    in_range = ops.Filter(source, Call("or" if is_split else "and", tuple(tests), (), BOOL, False))
    return Program(compile_flow(ops.Project(in_range, tuple(Named(column.name, column) for column in columns[:-2]))))


@lru_cache(maxsize=8)
def _constant(value: int, length: int) -> pa.Array:
    return pa.array(np.full(length, value))


def _constant_column(value: int, rows: int) -> pa.Array:
    """A column of one value, a slice of a cached one."""
    return _constant(value, 1 << rows.bit_length()).slice(0, rows)


def _concat(parts: list[pa.RecordBatch]) -> pa.RecordBatch:
    return parts[0] if len(parts) == 1 else pa.concat_batches(parts)


def _split_to_blocks(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    rows = max(1, int(batch.num_rows * min(1.0, BLOCK_BYTES / max(1, batch.nbytes))))
    for start in range(0, batch.num_rows, rows):
        yield batch.slice(start, rows)


def coalesce_batches(batches: Iterable[pa.RecordBatch], max_bytes: int,
                     max_rows: int = 1 << 31) -> Iterator[pa.RecordBatch]:
    """The same rows in fewer batches, each of about `max_bytes` or `max_rows`; empty batches are dropped."""
    buffered: list[pa.RecordBatch] = []
    rows = size = 0
    for batch in batches:
        if not batch.num_rows:
            continue
        buffered.append(batch)
        rows += batch.num_rows
        size += batch.nbytes
        if rows >= max_rows or size >= max_bytes:
            yield _concat(buffered)
            buffered, rows, size = [], 0, 0
    if buffered:
        yield _concat(buffered)


def encode_block(batch: pa.RecordBatch) -> pa.Buffer:
    """A batch as an IPC message without its schema; of a slice only its own rows."""
    return batch.serialize()


def decode_block(block: pa.Buffer | bytes | pa.BinaryScalar, schema: pa.Schema) -> pa.RecordBatch:
    """The batch of a shuffle block, without a copy: its columns are the block's memory."""
    return pa.ipc.read_record_batch(block.as_buffer() if isinstance(block, pa.Scalar) else block, schema)


def shuffle_blocks(parts: Iterable[tuple[int, pa.RecordBatch]], ids: Sequence[int],
                   kind: int = 0) -> Iterator[pa.RecordBatch]:
    """Rows of `SHUFFLE_SCHEMA` for Spark to move; the column `target` of target t is `ids[t]` (see `target_ids`)."""
    for target, part in parts:
        block = encode_block(part)
        offsets = pa.py_buffer(np.array([0, block.size], np.int32))
        column = pa.BinaryArray.from_buffers(pa.binary(), 1, [None, offsets, block])
        yield pa.RecordBatch.from_arrays([pa.array([ids[target]], pa.int32()), pa.array([kind], pa.int8()), column],
                                         schema=SHUFFLE_SCHEMA)


def decode_blocks(batches: Iterable[pa.RecordBatch], schemas: Sequence[pa.Schema]) -> Iterator[pa.RecordBatch]:
    """The batches of shuffle blocks, in their order, each in the schema of its kind; an empty block has none."""
    for batch in batches:
        for kind, block in zip(batch.column("kind").to_pylist(), batch.column("block"), strict=True):
            buffer = block.as_buffer()
            if buffer.size:
                yield decode_block(buffer, schemas[kind])


# --- Spark's own partitioner


@lru_cache(maxsize=64)
def target_ids(count: int) -> tuple[int, ...]:
    """For each partition of `df.repartition(count, "target")` a value that Spark's partitioner puts there.

    >>> target_ids(4)
    (12, 6, 2, 0)
    """
    found: dict[int, int] = {}
    number = 0
    while len(found) < count:
        found.setdefault(_murmur3(number) % count, number)
        number += 1
    return tuple(found[k] for k in range(count))


def _murmur3(number: int, seed: int = 42) -> int:
    """Spark's hash of a 32-bit integer, which its partitioner takes modulo the number of partitions."""
    k = _rotate_left(number * 0xCC9E2D51, 15) * 0x1B873593
    h = _rotate_left((k & 0xFFFFFFFF) ^ seed, 13) * 5 + 0xE6546B64
    h = (h & 0xFFFFFFFF) ^ 4
    h = (h ^ h >> 16) * 0x85EBCA6B & 0xFFFFFFFF
    h = (h ^ h >> 13) * 0xC2B2AE35 & 0xFFFFFFFF
    h ^= h >> 16
    return h - (1 << 32) if h >> 31 else h


def _rotate_left(number: int, count: int) -> int:
    number &= 0xFFFFFFFF
    return (number << count | number >> 32 - count) & 0xFFFFFFFF


def shuffle_partitions(spark: SparkSession) -> int:
    """How many partitions a shuffle has; some vendors' Spark has "auto"."""
    found = str(spark.conf.get("spark.sql.shuffle.partitions", "200"))
    return int(found) if found.isdigit() else 200
