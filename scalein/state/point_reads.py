"""Point reads: what the runs of all bundles have of some keys, read by blocks and brought together in a scratch table.

Runs are asked from the oldest to the newest, those of one age together: so every key's records come in order. Blocks
are read by windows, past the page cache; while one window is looked through, others are being read, and the blocks of
younger runs are looked up.

Invariant: a record is looked at only after the checksum, the counts and the places of its block were verified. Memory
is that of the windows, however many keys are asked for.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from scalein.memory import address
from scalein.state.run_blocks import HEAD, Origin, Shape, checked, unpack
from scalein.state.run_file import Run
from scalein.state.run_levels import ColdRun, Scratch, bundle_range
from scalein.storage.aio import BlockReader
from scalein.storage.filesystem import Input

if TYPE_CHECKING:
    from scalein.kernels.store import Functions, StoreKernels


class _Part(NamedTuple):
    """Blocks of runs of one age that fit into a window, and pairs of a block and a hash that it may hold."""

    functions: Functions
    runs: list[Run]
    input_index: np.ndarray  # of each block, its run
    offsets: np.ndarray
    sizes: np.ndarray
    block: np.ndarray  # of each pair
    hashes: np.ndarray

    @property
    def inputs(self) -> list[Input]:
        return [run.input for run in self.runs]

    def between(self, first: int, last: int) -> _Part:
        """Some of the blocks."""
        low, high = self.block.searchsorted((first, last)).tolist()
        return self._replace(input_index=self.input_index[first:last], offsets=self.offsets[first:last],
                             sizes=self.sizes[first:last], block=self.block[low:high] - first,
                             hashes=self.hashes[low:high])


class Points:
    """Reads blocks of runs, a few windows at a time."""

    def __init__(self, kernels: StoreKernels, reader: BlockReader) -> None:
        self._kernels, self._reader = kernels, reader
        self._shape = Shape(kernels.record_bytes, kernels.text_cells)

    def find(self, runs: list[tuple[ColdRun, ...]], hashes: np.ndarray, scratch: Scratch) -> np.ndarray:
        """Bring everything that the bundles' runs have of some sorted hashes together; blocks read of each bundle."""
        read = np.zeros(len(runs), np.int64)
        for part, area in self._reader.read(self._parts(runs, hashes)):
            found, _kept = self._found(part, area)
            scratch.absorb(found, part.functions)
            shards = np.array([run.least_hash >> 60 for run in part.runs])
            read += np.bincount(shards[part.input_index], minlength=len(read))
        return read

    def _parts(self, runs: list[tuple[ColdRun, ...]], hashes: np.ndarray) -> Iterator[_Part]:
        borders = hashes.searchsorted(np.array([bundle_range(bundle)[0] for bundle in range(len(runs))], np.uint64))
        inside = np.split(hashes, borders[1:])
        for age in range(max(map(len, runs))):
            alike: dict[Functions, list[tuple[ColdRun, np.ndarray]]] = {}
            for some, asked in zip(runs, inside, strict=True):
                if age < len(some) and len(asked):
                    alike.setdefault(some[age].functions, []).append((some[age], asked))
            for functions, pairs in alike.items():
                yield from self._cut(_together(functions, pairs))

    def _cut(self, part: _Part) -> Iterator[_Part]:
        """Parts that fit into a window; a block that does not has one of its own."""
        ends = part.sizes.cumsum()
        first = before = 0
        while first < len(ends):
            last = max(first + 1, int(ends.searchsorted(before + self._reader.buffer_bytes, "right")))
            yield part.between(first, last)
            first, before = last, int(ends[last - 1])

    def _found(self, part: _Part, area: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Pointers to the records of a part that are asked for, and where they are: beside its bytes, or in them."""
        ids = np.array([run.id for run in part.runs], np.uint64)
        origin = Origin(ids[part.input_index], part.offsets, lambda block: part.runs[int(part.input_index[block])].name)
        heads = checked(self._shape, area, part.sizes, origin, self._kernels.checksums)
        records = area
        if self._shape.text_cells:  # strings must lead to their bytes before keys can be hashed
            records = unpack(self._shape, area, part.sizes, origin, heads)
            firsts = address(records) + (heads.counts.cumsum() - heads.counts) * self._shape.stride
        else:
            firsts = address(area) + heads.starts + HEAD
        found, many = self._kernels.seek_hashes(firsts[part.block], heads.counts[part.block], part.hashes)
        found, many = found[many > 0], many[many > 0]
        if len(found) < int(many.sum()):  # several keys with one hash
            nth = np.arange(int(many.sum())) - np.repeat(many.cumsum() - many, many)
            found = np.repeat(found, many) + (nth * self._shape.stride).astype(np.uint64)
        return found, records


def _together(functions: Functions, pairs: list[tuple[ColdRun, np.ndarray]]) -> _Part:
    """What some runs may have of their bundles' hashes."""
    places = [cold.run.places(asked if cold.groups is None else asked[cold.counting(asked)]) for cold, asked in pairs]
    counts = np.array([len(one.offsets) for one in places])
    before = counts.cumsum() - counts
    return _Part(functions, [cold.run for cold, _ in pairs], np.repeat(np.arange(len(places)), counts),
                 np.concatenate([one.offsets for one in places]), np.concatenate([one.sizes for one in places]),
                 np.concatenate([one.block + k for one, k in zip(places, before.tolist(), strict=True)]),
                 np.concatenate([one.hashes for one in places]))
