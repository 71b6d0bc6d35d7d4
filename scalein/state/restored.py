"""Past: the pieces of a reopened store, as far as memory does not have them yet.

Invariant: what is loaded of a group comes from the newest piece that has it, then from the next older one, without
gaps. So whatever memory holds of a group is newer than what pieces still have of it.

Each session that writes leaves a piece. A snapshot that finds too many loads the newest of them (`first_joined`), so
that they go on in the piece that it writes itself.

Threads: everything is called under the store's lock; `files` may be asked for by any thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import Executor
from typing import TYPE_CHECKING

import numpy as np

from scalein.layout import GROUPS
from scalein.state import format
from scalein.state.memtable import HotTable
from scalein.state.piece_lookups import Lookups
from scalein.state.pieces import Images, Piece, group_read, records_in
from scalein.state.run_levels import Scratch
from scalein.storage.aio import BlockReader
from scalein.storage.filesystem import FileSystem

if TYPE_CHECKING:
    from scalein.kernels.store import Functions, StoreKernels

MOST_PIECES = 16  # that a snapshot leaves as they are
READ_COST = 64 << 10  # bytes that could be loaded in the time that each group of each piece takes by itself
JOINED_BYTES = 64 << 20  # of pieces, about, that a snapshot waits for, unless there are more than twice as many


class Past:
    """Pieces, oldest first; their groups are loaded into `hot`, or keys are looked up in them. `closer` closes files,
    which takes long if nobody else has them any more."""

    def __init__(self, fs: FileSystem, kernels: StoreKernels, hot: HotTable, reader: BlockReader,
                 closer: Executor) -> None:
        self._kernels, self._hot, self._reader, self._closer = kernels, hot, reader, closer
        self.pieces: list[Piece] = []
        self.again: list[Piece] | None = None  # of a store that is only read: what memory may forget
        self.images = Images(fs, kernels)
        self._lookups = Lookups(kernels, reader)

    def begin(self, pieces: list[Piece], is_readonly: bool) -> None:
        """Have these pieces; `Damaged` if their files are not there, or too short for them."""
        self.pieces, self.again = pieces, list(pieces) if is_readonly else None
        self.images.may_reopen = not is_readonly
        for piece in pieces:
            self.images.check(piece)

    def forget(self) -> None:
        """Memory has nothing of them any more."""
        assert self.again is not None
        self.pieces = list(self.again)

    def waiting(self) -> set[int]:
        """Groups that pieces have something of."""
        return {group for piece in self.pieces for group in piece.groups}

    def has(self, group: int) -> bool:
        return any(group in piece.groups for piece in self.pieces)

    def files(self) -> set[str]:
        return set[str]().union(*map(piece_files, self.pieces))

    def to_join(self) -> tuple[int, list[int]]:
        """The first piece that should be loaded with all newer ones, and the groups to begin with now."""
        if len(self.pieces) <= MOST_PIECES:
            return len(self.pieces), []
        sizes = [int(piece.group_bytes[list(piece.groups)].sum()) for piece in self.pieces]
        first = first_joined(sizes)
        newest = self.pieces[first:]
        costs = np.zeros(GROUPS)
        for piece in newest:
            costs[list(piece.groups)] += piece.group_bytes[list(piece.groups)] + READ_COST
        groups = np.flatnonzero(costs)
        if len(self.pieces) <= 2 * MOST_PIECES:
            groups = groups[: 1 + int(costs[groups].cumsum().searchsorted(JOINED_BYTES))]
        return first, groups.tolist()

    def first_of(self, some: list[Piece]) -> int:
        """Where the first of these pieces is that is still there, though groups of it may have been loaded."""
        columns = {id(piece.offset) for piece in some}
        return next((k for k, piece in enumerate(self.pieces) if id(piece.offset) in columns), len(self.pieces))

    def load(self, groups: Iterable[int], functions: Functions, first: int = 0) -> Iterator[int]:
        """Bring groups' records back to memory, under those that are newer; gives each group after a piece of it.

        What a piece has of a group comes whole, or not at all. `first`: the oldest piece to load from.
        """
        wanted = (group_read(number, self.pieces[number], group, self.images) for group in groups
                  for number in range(len(self.pieces) - 1, first - 1, -1) if group in self.pieces[number].groups)
        for read, area in self._reader.read(wanted):
            group, piece = read.group, self.pieces[read.number]
            pointers = records_in(read, area, piece, self._kernels)
            self._hot.expect(group, len(pointers))
            self._hot.batch += 1
            self._kernels.merge_records(self._hot, pointers, functions, older=True)
            self.pieces[read.number] = piece.without(group)
            self._hot.settled(group)
            yield group
        staying = [piece for piece in self.pieces if piece.groups]
        if len(staying) < len(self.pieces) and self.again is None:
            for file in self.images.take_unneeded(staying):  # else what is removed takes its room for ever
                self._closer.submit(file.close)
        self.pieces = staying
        self.images.trim()

    def worth_loading(self, keys: np.ndarray, room_bytes: int) -> tuple[list[int], list[int]]:
        """Groups that nobody can look into, and others that should rather be loaded, as far as there is room for them,
        when so many keys of each are asked for."""
        return self._lookups.worth_loading(self.pieces, keys, room_bytes)

    def find(self, hashes: np.ndarray, functions: Functions, scratch: Scratch) -> None:
        """Bring what pieces have of some sorted hashes into a scratch table, as newer than all that is there."""
        for piece in self.pieces:
            self._lookups.find(piece, self.images, hashes, functions, scratch)
            self.images.trim()

    def verify(self) -> None:
        for piece in self.pieces:
            self.images.verify(piece)

    def close(self) -> None:
        self.images.close()


def piece_files(piece: Piece) -> set[str]:
    """The files that a piece is in."""
    return {format.image_name(id) for id in piece.image_ids} | {format.index_name(id) for id in piece.index_ids}


def first_joined(sizes: list[int]) -> int:
    """The first of the pieces, oldest first, that should be loaded with all newer ones.

    The oldest that is no larger than all newer ones together: so what is loaded at least doubles each time, and a large
    old piece waits until as much has come since. If there is none such, they are few, and it is the newest.
    """
    return next((first for first in range(len(sizes) - 1) if sizes[first] <= sum(sizes[first + 1 :])), len(sizes) - 1)
