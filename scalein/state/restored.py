"""RestoredState: the pieces of a reopened store, as far as they are not loaded into memory yet.

Invariant: a group is loaded from the newest piece that has it first, then from the next older one, without gaps. So all
records of a group in memory are newer than those that pieces still hold of it.

Each session that writes leaves a piece. A snapshot that finds too many loads the newest of them (`first_to_load`), so
that their records become part of the piece that it writes itself.

Threads: everything is called under the store's lock, except `file_names`, which any thread may call.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import Executor
from typing import TYPE_CHECKING

import numpy as np

from scalein.layout import GROUPS
from scalein.state.memtable import MemTable
from scalein.state.piece_lookups import PieceLookups
from scalein.state.pieces import PieceFiles, RestoredPiece, group_records, group_request
from scalein.state.run_levels import MergeTable
from scalein.storage.aio import BlockReader
from scalein.storage.filesystem import FileSystem

if TYPE_CHECKING:
    from scalein.kernels.store import Functions, StoreKernels

MAX_PIECES = 16  # that a snapshot leaves alone
READ_COST = 64 << 10  # bytes that could be loaded in the fixed time of loading a group of a piece
MAX_LOAD_BYTES = 64 << 20  # of pieces, about, that one snapshot loads, unless there are more than twice as many


class RestoredState:
    """Pieces, oldest first: their groups are loaded into the memtable, or single keys are looked up in them.

    `closer` closes files: freeing one that was removed takes long.
    """

    def __init__(self, fs: FileSystem, kernels: StoreKernels, memtable: MemTable, reader: BlockReader,
                 closer: Executor) -> None:
        self._kernels, self._memtable, self._reader, self._closer = kernels, memtable, reader, closer
        self.pieces: list[RestoredPiece] = []
        self._all_pieces: list[RestoredPiece] | None = None  # of a read-only store, before any group was loaded
        self.files = PieceFiles(fs, kernels)
        self._lookups = PieceLookups(kernels, reader)

    @property
    def is_readonly(self) -> bool:
        """Whether the memtable is only a cache of pieces: nothing in it is newer, and it may be cleared."""
        return self._all_pieces is not None

    def install(self, pieces: list[RestoredPiece], is_readonly: bool) -> None:
        """Use these pieces; `Damaged` if their files are missing or too short."""
        self.pieces, self._all_pieces = pieces, list(pieces) if is_readonly else None
        self.files.may_reopen = not is_readonly
        for piece in pieces:
            self.files.check(piece)

    def reset(self) -> None:
        """The memtable of a read-only store was cleared: no group is loaded any more."""
        assert self._all_pieces is not None
        self.pieces = list(self._all_pieces)

    def unloaded_groups(self) -> set[int]:
        """Groups of which pieces still hold records."""
        return {group for piece in self.pieces for group in piece.groups}

    def has(self, group: int) -> bool:
        return any(group in piece.groups for piece in self.pieces)

    def file_names(self) -> set[str]:
        return set[str]().union(*(piece.file_names for piece in self.pieces))

    def groups_to_merge(self) -> tuple[int, list[int]]:
        """If there are too many pieces: the first one to load with all newer ones, and the groups to load now."""
        if len(self.pieces) <= MAX_PIECES:
            return len(self.pieces), []
        sizes = [int(piece.group_bytes[list(piece.groups)].sum()) for piece in self.pieces]
        first = first_to_load(sizes)
        costs = np.zeros(GROUPS)
        for piece in self.pieces[first:]:
            costs[list(piece.groups)] += piece.group_bytes[list(piece.groups)] + READ_COST
        groups = np.flatnonzero(costs)
        if len(self.pieces) <= 2 * MAX_PIECES:
            groups = groups[: 1 + int(costs[groups].cumsum().searchsorted(MAX_LOAD_BYTES))]
        return first, groups.tolist()

    def position_of(self, pieces: list[RestoredPiece]) -> int:
        """The position of the first of these pieces that still exists, though groups of it may have been loaded."""
        columns = {id(piece.offset) for piece in pieces}
        return next((k for k, piece in enumerate(self.pieces) if id(piece.offset) in columns), len(self.pieces))

    def load(self, groups: Iterable[int], functions: Functions, first: int = 0) -> Iterator[int]:
        """Load groups into the memtable, under newer records; yields a group after each piece of it.

        The records of a group in a piece are loaded completely or not at all. `first`: the oldest piece to load from.
        """
        requests = (group_request(number, self.pieces[number], group, self.files) for group in groups
                    for number in range(len(self.pieces) - 1, first - 1, -1) if group in self.pieces[number].groups)
        for read, area in self._reader.read(requests):
            group, piece = read.group, self.pieces[read.number]
            pointers = group_records(read, area, piece, self._kernels)
            self._memtable.reserve(group, len(pointers))
            self._memtable.batch += 1
            self._kernels.merge_records(self._memtable, pointers, functions, older=True)
            self.pieces[read.number] = piece.without(group)
            self._memtable.mark_collected(group)
            yield group
        remaining = [piece for piece in self.pieces if piece.groups]
        if len(remaining) < len(self.pieces) and not self.is_readonly:
            for file in self.files.take_unneeded(remaining):  # an open file keeps its disk space after it is removed
                self._closer.submit(file.close)
        self.pieces = remaining
        self.files.trim()

    def groups_to_load(self, keys: np.ndarray, free_bytes: int) -> tuple[list[int], list[int]]:
        """Groups that must be loaded, and those that are better loaded than looked up (see `PieceLookups`)."""
        return self._lookups.groups_to_load(self.pieces, keys, free_bytes)

    def read(self, hashes: np.ndarray, functions: Functions, table: MergeTable) -> None:
        """Merge the records of some sorted hashes into a table, as newer than all that it holds."""
        for piece in self.pieces:
            self._lookups.read(piece, self.files, hashes, functions, table)
            self.files.trim()

    def verify(self) -> None:
        for piece in self.pieces:
            self.files.verify(piece)

    def close(self) -> None:
        self.files.close()


def first_to_load(sizes: list[int]) -> int:
    """The first of the pieces, oldest first, to load with all newer ones.

    The oldest that is no larger than all newer ones together: so the loaded size at least doubles each time, and a
    large old piece is loaded only once as much was written since. If there is none, it is the newest.
    """
    return next((first for first in range(len(sizes) - 1) if sizes[first] <= sum(sizes[first + 1 :])), len(sizes) - 1)
