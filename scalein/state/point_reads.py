"""PointReads: reads the records of single keys from the runs of all shards, and merges them in a merge table.

Runs are read from the oldest to the newest, those of one age (position in their shard) at once: so the records of every
key come in order. Blocks are read past the page cache; while one buffer of blocks is searched, others are filled, and
the candidate blocks of newer runs are determined.

Invariant: a record is used only after the checksum, the counts and the offsets of its block are verified. Memory is
bounded by the read buffers, however many keys are requested.

Threads: called under the store's lock.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from scalein.memory import address
from scalein.state.run_blocks import HEAD, Origin, RecordShape, check_blocks, unpack
from scalein.state.run_file import RunFile
from scalein.state.run_levels import MergeTable, Run, shard_range
from scalein.storage.aio import BlockReader
from scalein.storage.filesystem import Input

if TYPE_CHECKING:
    from scalein.kernels.store import Functions, StoreKernels


class _BlockRead(NamedTuple):
    """Blocks of runs of one age that fit into a read buffer, and pairs of a block and a hash that it may hold."""

    functions: Functions
    files: list[RunFile]
    input_index: np.ndarray  # of each block, its file
    offsets: np.ndarray
    sizes: np.ndarray
    block: np.ndarray  # of each pair
    hashes: np.ndarray

    @property
    def inputs(self) -> list[Input]:
        return [file.input for file in self.files]

    def between(self, first: int, last: int) -> _BlockRead:
        """The blocks [first, last)."""
        low, high = self.block.searchsorted((first, last)).tolist()
        return self._replace(input_index=self.input_index[first:last], offsets=self.offsets[first:last],
                             sizes=self.sizes[first:last], block=self.block[low:high] - first,
                             hashes=self.hashes[low:high])


class PointReads:
    """Reads records of runs by their hashes, a few buffers of blocks at a time."""

    def __init__(self, kernels: StoreKernels, reader: BlockReader) -> None:
        self._kernels, self._reader = kernels, reader
        self._shape = RecordShape(kernels.record_bytes, kernels.text_cells)

    def read(self, runs: list[tuple[Run, ...]], hashes: np.ndarray, table: MergeTable) -> np.ndarray:
        """Merge all records of some sorted hashes into a table; returns the number of blocks read of each shard."""
        block_counts = np.zeros(len(runs), np.int64)
        for read, area in self._reader.read(self._block_reads(runs, hashes)):
            pointers, _owner = self._matches(read, area)
            table.merge(pointers, read.functions)
            shards = np.array([file.least_hash >> 60 for file in read.files])
            block_counts += np.bincount(shards[read.input_index], minlength=len(block_counts))
        return block_counts

    def _block_reads(self, runs: list[tuple[Run, ...]], hashes: np.ndarray) -> Iterator[_BlockRead]:
        bounds = hashes.searchsorted(np.array([shard_range(shard)[0] for shard in range(len(runs))], np.uint64))
        by_shard = np.split(hashes, bounds[1:])
        for age in range(max(map(len, runs))):
            by_functions: dict[Functions, list[tuple[Run, np.ndarray]]] = {}
            for shard_runs, wanted in zip(runs, by_shard, strict=True):
                if age < len(shard_runs) and len(wanted):
                    run = shard_runs[age]
                    by_functions.setdefault(run.functions, []).append((run, wanted))
            for functions, pairs in by_functions.items():
                yield from self._split(_candidate_blocks(functions, pairs))

    def _split(self, read: _BlockRead) -> Iterator[_BlockRead]:
        """Reads that fit into a buffer; a block that does not fit is read by itself."""
        ends = read.sizes.cumsum()
        first = before = 0
        while first < len(ends):
            last = max(first + 1, int(ends.searchsorted(before + self._reader.buffer_bytes, "right")))
            yield read.between(first, last)
            first, before = last, int(ends[last - 1])

    def _matches(self, read: _BlockRead, area: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Pointers to the requested records, and the array that they point into: the bytes read, or a copy."""
        ids = np.array([file.id for file in read.files], np.uint64)
        origin = Origin(ids[read.input_index], read.offsets, lambda block: read.files[read.input_index[block]].name)
        heads = check_blocks(self._shape, area, read.sizes, origin, self._kernels.checksums)
        records = area
        if self._shape.text_cells:  # strings must point to their bytes before keys can be hashed
            records = unpack(self._shape, area, read.sizes, origin, heads)
            firsts = address(records) + (heads.counts.cumsum() - heads.counts) * self._shape.stride
        else:
            firsts = address(area) + heads.starts + HEAD
        found, counts = self._kernels.seek_hashes(firsts[read.block], heads.counts[read.block], read.hashes)
        found, counts = found[counts > 0], counts[counts > 0]
        if len(found) < int(counts.sum()):  # several keys with one hash
            nth = np.arange(int(counts.sum())) - np.repeat(counts.cumsum() - counts, counts)
            found = np.repeat(found, counts) + (nth * self._shape.stride).astype(np.uint64)
        return found, records


def _candidate_blocks(functions: Functions, pairs: list[tuple[Run, np.ndarray]]) -> _BlockRead:
    """The blocks of runs that may hold the requested hashes of their shards."""
    candidates = [run.file.candidate_blocks(wanted if run.groups is None else wanted[run.owns(wanted)])
                  for run, wanted in pairs]
    counts = np.array([len(one.offsets) for one in candidates])
    before = counts.cumsum() - counts
    return _BlockRead(functions, [run.file for run, _ in pairs], np.repeat(np.arange(len(candidates)), counts),
                      np.concatenate([one.offsets for one in candidates]),
                      np.concatenate([one.sizes for one in candidates]),
                      np.concatenate([one.block + k for one, k in zip(candidates, before.tolist(), strict=True)]),
                      np.concatenate([one.hashes for one in candidates]))
