"""The kernel library of the state store: the loops of one stored table, and the split of a hash index.

`scalein.state` imports it inside functions, as it loads LLVM.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import pyarrow as pa

from scalein.dtypes import Field, from_arrow_type
from scalein.ir.exprs import Col, Expr, Named
from scalein.ir.stages import Collect, FromPointers, FromRecords, Sink, Stage
from scalein.ir.store_kernels import (
    BulkOp,
    CombineRecords,
    Evict,
    HashKeys,
    Lookup,
    MergeRecords,
    ReadBlocks,
    Retain,
    SeekHashes,
    Upsert,
)
from scalein.ir.tables import StoredTable
from scalein.kernels.call import call, kernel
from scalein.kernels.output import collect_chunks
from scalein.kernels.prepare import Prepared
from scalein.kernels.specialise import Specialiser
from scalein.kernels.workers import ThreadPool
from scalein.layout import DONE, PAGE_BYTES, UNCHANGED, FrameData, SortedRecords
from scalein.llvm_backend.cache import Compiled, load_lowered
from scalein.llvm_backend.object_loader import Kernel
from scalein.llvm_backend.target import Target as CpuTarget
from scalein.memory import address
from scalein.options import Options

if TYPE_CHECKING:
    from scalein.llvm_backend.stage import Lowered

WORKER_ROWS = 4096  # minimum for each worker of a call

Functions = tuple[str, ...]  # the merge function of each value; "" leaves it unchanged
Allocate = Callable[[int], np.ndarray]  # allocates a number of 64-bit words


def new_buffer(count: int) -> np.ndarray:
    return np.empty(count, np.uint64)


class TargetTable(Protocol):
    """A table that kernels work on."""

    def attach(self, frame: FrameData, worker: int) -> None:
        """Point the frame at the table; a kernel is about to run."""

    def detach(self, worker: int) -> None:
        """The kernel has returned."""

    def serve(self, status: int, frame: FrameData, worker: int) -> None:
        """Provide what the kernel returned for: a larger index, another arena chunk."""


class StoreKernels:
    """The loops of one stored table. Thread-safe; a table is changed by one caller at a time."""

    def __init__(self, key: pa.Schema, value: pa.Schema, options: Options) -> None:
        self._options = options
        self._table = table = StoredTable(_fields(key), _fields(value))
        self.record_bytes = table.layout.size
        self.template = table.layout.template
        self.text_cells = table.text_cells
        self._keys = tuple(_column(field) for field in table.keys)
        self._prepared: dict[tuple[object, ...], Prepared] = {}
        self._compiled: dict[Stage, Compiled] = {}
        self._grow: Grow | None = None
        self._lock = threading.Lock()
        self._threads = ThreadPool()

    # --- rows

    def upsert(self, target: TargetTable, batch: pa.RecordBatch, functions: Functions, workers: int) -> None:
        """Merge rows into the records of their keys."""
        workers = _worker_count(workers, batch)
        items = tuple(_column(value) if function != UNCHANGED and value.name in batch.schema.names else None
                      for value, function in zip(self._table.values, functions, strict=True))

        def sink(special: Specialiser) -> Upsert:
            given = tuple(None if item is None else special.expr(item) for item in items)
            return Upsert(self._table, self._special_keys(special), functions, given, owned=workers > 1)

        self._run_rows(("upsert", functions, items, workers > 1), sink, items, target, batch, workers)

    def delete(self, target: TargetTable, batch: pa.RecordBatch, workers: int) -> None:
        """Mark the records of keys as deleted."""
        workers = _worker_count(workers, batch)

        def sink(special: Specialiser) -> Upsert:
            return Upsert(self._table, self._special_keys(special), delete=True, owned=workers > 1)

        self._run_rows(("delete", workers > 1), sink, (), target, batch, workers)

    def lookup(self, target: TargetTable, batch: pa.RecordBatch) -> tuple[np.ndarray, np.ndarray]:
        """Pointers to the records of keys (0: none) and the keys' hashes."""
        records, hashes = np.zeros(batch.num_rows, np.uint64), np.zeros(batch.num_rows, np.uint64)
        out = {"found.records": records, "found.hashes": hashes}

        def sink(special: Specialiser) -> Lookup:
            return Lookup(self._table, self._special_keys(special))

        self._run_rows(("lookup",), sink, (), target, batch, 1, out)
        return records, hashes

    def _special_keys(self, special: Specialiser) -> tuple[Expr, ...]:
        return tuple(special.expr(key) for key in self._keys)

    def _run_rows(self, name: tuple[object, ...], sink: Callable[[Specialiser], Sink], items: Sequence[Expr | None],
                  target: TargetTable, batch: pa.RecordBatch, workers: int,
                  out: dict[str, np.ndarray] | None = None) -> None:
        if not batch.num_rows:
            return
        with self._lock:
            prepared = self._prepared.get(name)
            if prepared is None:
                exprs = (*self._keys, *(item for item in items if item is not None))
                prepared = self._prepared[name] = Prepared(
                    str(name[0]), self._table.schema, (), sink, exprs, {}, self._options)
            if prepared.observe(batch) or prepared.compiled is None:
                prepared.compile()
            compiled = prepared.compiled
            assert compiled is not None
            frames = [compiled.kernel.frame.new() for _ in range(workers)]
            for worker, frame in enumerate(frames):
                prepared.bind(frame, batch)
                frame["row"], frame["end"] = 0, batch.num_rows
                frame["owner.worker"], frame["owner.workers"] = worker, workers
                for slot, array in (out or {}).items():
                    frame.point(slot, array)
        self._threads.run(lambda worker: _run(compiled, frames[worker], target, worker), workers)

    # --- records

    def merge_records(self, target: TargetTable, pointers: np.ndarray, functions: Functions, older: bool) -> None:
        """Merge records into a table, as newer than its own or as older."""
        if len(pointers):
            sink = MergeRecords(self._table, functions, older)
            compiled, frame = self._ready(Stage("merge_records", FromRecords(), (), sink))
            frame.point("pointers", pointers)
            frame["end"] = len(pointers)
            _run(compiled, frame, target, 0)

    def combine_records(self, pointers: np.ndarray, hashes: np.ndarray, functions: Functions,
             allocate: Allocate = new_buffer) -> tuple[np.ndarray, np.ndarray]:
        """Records without text, sorted by hash and then by age, each key once; and their hashes."""
        size = self.record_bytes
        records, found = allocate(len(pointers) * size // 8).view(np.uint8).reshape(-1, size), allocate(len(pointers))
        sink = CombineRecords(self._table, functions)
        compiled, frame = self._ready(Stage("combine_records", FromRecords(), (), sink))
        for slot, array in (("pointers", pointers), ("hashes", hashes), ("out", records), ("out.hashes", found)):
            frame.point(slot, array)
        frame["end"] = len(pointers)
        call(compiled, frame)
        return records[: frame["out.count"]], found[: frame["out.count"]]

    def retain(self, target: TargetTable, extents: np.ndarray, least_accesses: int, drop: int) -> int:
        """Copy the records of some key groups that have at least `least_accesses` to new chunks, halve their access
        counts, and insert them into the groups' empty index. Returns the number of the others, without those with a
        flag of `drop`. `extents`: addresses and lengths of runs of contiguous records. Tables without text only.
        """
        compiled, frame = self._ready(Stage("retain", FromRecords(), (), Retain(self._table)))
        frame.point("extents", extents)
        frame["end"], frame["least"], frame["drop"] = len(extents), least_accesses, drop
        _run(compiled, frame, target, 0)
        return frame["leaving"]

    def evict(self, base: int, size: int, entries: np.ndarray, least_accesses: int, drop: int,
              into: SortedRecords) -> SortedRecords:
        """The other records, sorted by hash, in `into`, which has space for all of them. `entries` were in the index of
        the key groups, whose arena has `size` bytes at `base`.
        """
        compiled, frame = self._ready(Stage("evict", FromRecords(), (), Evict(self._table)))
        for slot, array in (("words", entries), ("out.hashes", into.hashes), ("out.pointers", into.pointers)):
            frame.point(slot, array)
        frame["end"], frame["least"], frame["drop"] = len(entries), least_accesses, drop
        frame["table.arena"], frame["table.arena_size"] = base, size
        call(compiled, frame)
        count = frame["out.count"]
        return SortedRecords(into.hashes[:count], into.pointers[:count])

    def merge_sorted(self, lists: Sequence[SortedRecords], allocate: Allocate = new_buffer) -> SortedRecords:
        """Merges lists, at least one, the oldest first; of equal hashes the older records come first."""
        count = sum(len(one.hashes) for one in lists)
        spare: list[SortedRecords] = []
        while len(lists) > 1:  # adjacent pairs, so that ages stay in order
            out = spare.pop(0) if len(spare) == 2 else SortedRecords(allocate(count), allocate(count))
            spare.append(out)
            pairs = np.zeros((-(-len(lists) // 2), 8), np.uint64)
            merged, at = [], 0
            for row, k in zip(pairs, range(0, len(lists), 2), strict=True):
                size = sum(len(one.hashes) for one in lists[k : k + 2])
                into = SortedRecords(out.hashes[at : at + size], out.pointers[at : at + size])
                second = lists[k + 1] if k + 1 < len(lists) else into
                for place, one in enumerate((lists[k], second, into)):
                    row[2 * place : 2 * place + 2] = address(one.hashes), address(one.pointers)
                row[6], row[7] = len(lists[k].hashes), size - len(lists[k].hashes)
                merged.append(into)
                at += size
            self._bulk("merge", len(pairs), lists=address(pairs))
            lists = merged
        return lists[0]

    def read_blocks(self, area: np.ndarray, pieces: np.ndarray, per_block: int, block_bytes: int, least: int,
                    greatest: int, allocate: Allocate = new_buffer) -> list[SortedRecords | None]:
        """The records with hashes in a range, of consecutive blocks of several runs; tables without text only.

        `pieces`: number of blocks, id of their run, offset in the run. None for a piece with a wrong checksum.
        """
        blocks = pieces[:, 0].astype(np.int64)
        before, records = blocks.cumsum() - blocks, int(blocks.sum()) * per_block
        compiled, frame = self._ready(Stage("read_blocks", FromRecords(), (), ReadBlocks(self._table)))
        hashes, pointers = allocate(records), allocate(records)
        requests = np.zeros((len(pieces), 8), np.uint64)
        requests[:, 0], requests[:, 1:4] = address(area) + before * block_bytes, pieces
        requests[:, 4], requests[:, 5] = (address(array) + 8 * before * per_block for array in (hashes, pointers))
        frame.point("pieces", requests)
        frame["end"], frame["per"], frame["block"] = len(requests), per_block, block_bytes
        frame["least"], frame["greatest"] = least, greatest
        call(compiled, frame)
        firsts, counts = (before * per_block).tolist(), requests[:, 6].tolist()
        return [SortedRecords(hashes[first : first + count], pointers[first : first + count]) if is_right else None
                for first, count, is_right in zip(firsts, counts, requests[:, 7].tolist(), strict=True)]

    def hash_keys(self, pointers: np.ndarray) -> np.ndarray:
        """The hashes of records' keys."""
        found = np.empty(len(pointers), np.uint64)
        compiled, frame = self._ready(Stage("hash_keys", FromRecords(), (), HashKeys(self._table)))
        frame.point("pointers", pointers)
        frame.point("found.hashes", found)
        frame["end"] = len(pointers)
        call(compiled, frame)
        return found

    def seek_hashes(self, firsts: np.ndarray, counts: np.ndarray, hashes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """In arrays of `counts` consecutive records sorted by hash: the first record of a hash, and how many have it.
        """
        records, many = np.empty(len(hashes), np.uint64), np.empty(len(hashes), np.int64)
        compiled, frame = self._ready(Stage("seek_hashes", FromRecords(), (), SeekHashes(self._table)))
        for slot, array in (("pointers", firsts), ("counts", counts), ("hashes", hashes), ("found.records", records),
                            ("found.counts", many)):
            frame.point(slot, array)
        frame["end"] = len(hashes)
        call(compiled, frame)
        return records, many

    def rows(self, pointers: np.ndarray, names: Sequence[str]) -> list[pa.RecordBatch]:
        """Columns of records."""
        columns = {field.name: field for field in self._table.schema}
        items = tuple(Named(name, _column(columns[name])) for name in names)
        compiled, frame = self._ready(Stage("rows", FromPointers(self._table), (), Collect(items)))
        frame.point("pointers", pointers)
        frame["end"] = len(pointers)
        parts = collect_chunks(compiled, frame, items, len(pointers))
        return [pa.RecordBatch.from_arrays(arrays, names=list(names)) for arrays in parts if len(arrays[0])]

    def gather(self, pointers: np.ndarray, allocate: Allocate = new_buffer) -> np.ndarray:
        """The records as one contiguous array: (count, record bytes)."""
        records = allocate(len(pointers) * self.record_bytes // 8).view(np.uint8).reshape(-1, self.record_bytes)
        self._bulk("gather", len(pointers), target=address(records), size=self.record_bytes,
                   pointers=address(pointers))
        return records

    # --- bytes

    def copy(self, target: int, source: int, size: int) -> None:
        """Copy pages that other threads may change concurrently."""
        self._bulk("copy", size // PAGE_BYTES, target=target, source=source)

    def restore(self, image: int, first: int, log: int, count: int) -> None:
        """Undo `count` changes, the newest first, in the image of the segment at offset `first`."""
        self._bulk("restore", count, target=image, source=log, first=first, size=self.record_bytes + 8)

    def pack(self, area: np.ndarray, records: np.ndarray, per_block: int, block_bytes: int, id: int,
             offset: int) -> None:
        """The blocks of a run that will be written at `offset` of the file; tables without text only."""
        self._bulk("pack", len(area) // block_bytes, target=address(area), source=address(records),
                   size=self.record_bytes, per=per_block, block=block_bytes, count=len(records), id=id, offset=offset)

    def set_filter_bits(self, filter: np.ndarray, hashes: np.ndarray, shift: int) -> None:
        """Set the bits of hashes in a run's filter."""
        self._bulk("mark", len(hashes), target=address(filter), source=address(hashes), shift=shift)

    def checksums(self, blocks: np.ndarray, seeds: np.ndarray) -> np.ndarray:
        """The checksum of each row of bytes."""
        found = np.empty(len(blocks), np.uint64)
        self._bulk("checksum", len(blocks), target=address(found), source=address(blocks), seeds=address(seeds),
                   size=blocks.shape[1] if len(blocks) else 0)
        return found

    def clear(self, moves: np.ndarray) -> None:
        """Copy bytes and zero the source; a row each: target, source, size."""
        self._bulk("clear", len(moves), lists=address(moves))

    def split(self, old: int, old_buckets: int, new: int, shift: int, mask: int) -> None:
        """Move the entries of an index into one of twice the size."""
        if self._grow is None:
            self._grow = grow_kernel(self._options)
        self._grow.split(np.array([[old, old_buckets, new, shift, mask]]))

    def _bulk(self, what: str, rows: int, **slots: int) -> None:
        """The caller owns the memory that the slots point to, and keeps it alive."""
        compiled, frame = self._ready(Stage(what, FromRecords(), (), BulkOp(what)))
        frame["end"] = rows
        for name, value in slots.items():
            frame[name] = value
        call(compiled, frame)

    def _ready(self, stage: Stage) -> tuple[Compiled, FrameData]:
        compiled = self._compiled.get(stage)
        if compiled is None:
            compiled = self._compiled[stage] = kernel(stage, self._options)
        return compiled, compiled.kernel.frame.new()


def _worker_count(workers: int, batch: pa.RecordBatch) -> int:
    """Workers that a batch is worth: waking one takes as long as merging a few thousand rows."""
    return max(1, min(workers, int(batch.num_rows) // WORKER_ROWS))


def _run(compiled: Compiled, frame: FrameData, target: TargetTable, worker: int) -> None:
    while True:
        target.attach(frame, worker)
        try:
            status = call(compiled, frame)
        finally:
            target.detach(worker)
        if status == DONE:
            return
        target.serve(status, frame, worker)


def _fields(schema: pa.Schema) -> tuple[Field, ...]:
    return tuple(Field(f.name, from_arrow_type(f.type, f.name), f.nullable) for f in schema)


def _column(field: Field) -> Col:
    return Col(field.name, field.dtype, field.nullable)


# The kernel that doubles the index of a hash table, of the store and of `exec`: `llvm_backend/hash_index.py`.

@dataclass(frozen=True, slots=True)
class Grow:
    """The compiled loop; the same for all tables."""

    kernel: Kernel

    def split(self, moves: np.ndarray) -> None:
        """Move all entries of some indexes into zeroed buckets. A row each: old buckets, their number, new buckets,
        shift, mask.
        """
        moves = np.ascontiguousarray(moves, np.int64)
        frame: FrameData = self.kernel.frame.new()
        frame["moves"], frame["count"] = address(moves), len(moves)
        self.kernel.call(frame.address)


def grow_kernel(options: Options) -> Grow:
    return Grow(load_lowered("grow", _lower_split, options).kernel)


def _lower_split(target: CpuTarget) -> Lowered:
    from scalein.llvm_backend.hash_index import lower_doubling  # LLVM's builder: only a compiling process needs it

    return lower_doubling()
