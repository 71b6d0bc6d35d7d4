"""Side state: what a table's records own beside their fixed fields: value bags, logs, and heaps of bytes.

All three belong to one table: they are attached to the same frames, and moved when the table is merged into another.
Kernels: `llvm_backend/side_state.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from scalein.errors import ScaleinError
from scalein.ir.tables import Acc, AccKind, Table, log_layout
from scalein.layout import ARENA_FULL, HEAP_FULL, INDEX_FULL, FrameData
from scalein.memory import address, allocate, reserve

if TYPE_CHECKING:
    from scalein.exec.tables import HashTable

HEAP_BYTES = 1 << 16
LOG_SPACE = 1 << 36  # bytes of address space a log may grow to
RETRY_FACTOR = 8  # a log that did not get shorter is compacted this much later
COMPACT_ALWAYS = 1 << 12  # entries of a complete log that is about to be copied into several windows
COMPACT_FROM = 1 << 20  # entries of a log before it is first compacted


class Heap:
    """Pieces of memory that hold bytes; a piece never moves. Its slots in a frame begin with `prefix`."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self.pieces: list[np.ndarray] = []
        self._at, self._left = 0, 0

    def attach(self, frame: FrameData) -> None:
        frame[f"{self._prefix}.at"], frame[f"{self._prefix}.left"] = self._at, self._left

    def detach(self, frame: FrameData) -> None:
        self._at = frame.get(f"{self._prefix}.at", self._at)
        self._left = frame.get(f"{self._prefix}.left", self._left)

    def make_room(self, frame: FrameData) -> None:
        """Allocate a new piece, if it was this heap that was full."""
        need = frame.get(f"{self._prefix}.need", 0)
        if need > self._left:
            size = max(HEAP_BYTES << min(len(self.pieces), 8), 2 * need)
            self.use_piece(allocate(size), 0)

    def use_piece(self, piece: np.ndarray, used: int) -> None:
        """Allocate from this piece, after its used bytes."""
        self.pieces.append(piece)
        self._at, self._left = address(piece) + used, len(piece) - used

    def clear(self) -> None:
        """Drop all bytes; the largest piece is retained for reuse."""
        if self.pieces:
            self.pieces = [max(self.pieces, key=len)]
            self._at, self._left = address(self.pieces[0]), len(self.pieces[0])


class Log:
    """Consecutive entries, in reserved address space that becomes memory when it is touched."""

    def __init__(self, acc: Acc, prefix: str) -> None:
        self.acc, self.layout, self._prefix = acc, log_layout(acc), prefix
        self._arena = reserve(LOG_SPACE)
        self.used = 0
        self._compacted_count = 0  # entries after the last compaction
        self.heap = Heap(f"{prefix}.heap")
        self.merged_heaps: list[Heap] = []  # heaps of logs that were merged into this one

    def attach(self, frame: FrameData) -> None:
        frame[f"{self._prefix}.arena"], frame[f"{self._prefix}.arena_size"] = address(self._arena), len(self._arena)
        frame[f"{self._prefix}.used"] = self.used
        self.heap.attach(frame)

    def detach(self, frame: FrameData) -> None:
        self.used = frame.get(f"{self._prefix}.used", self.used)
        self.heap.detach(frame)

    @property
    def memory(self) -> np.ndarray:
        """The whole reserved space, as bytes."""
        return self._arena

    @property
    def first(self) -> int:
        return address(self._arena)

    @property
    def count(self) -> int:
        return self.used // self.layout.size

    @property
    def entries(self) -> np.ndarray:
        """All entries as rows of 8-byte words."""
        return self._arena[: self.used].view(np.int64).reshape(-1, self.layout.size // 8)

    def column(self, name: str) -> np.ndarray:
        """A field of 8 bytes of every entry."""
        return self.entries[:, self.layout.offset(name) // 8]

    def add(self, entries: np.ndarray) -> None:
        start, self.used = self.used, self.used + entries.nbytes
        if self.used > len(self._arena):
            raise _too_much(start)
        self.entries[start // self.layout.size :] = entries

    def is_long(self, *, at_once: bool = False) -> bool:
        """Whether compaction is worthwhile: there are twice as many entries as after the last one."""
        least = COMPACT_ALWAYS if at_once else max(COMPACT_FROM, 2 * self._compacted_count)
        return self.acc.kind is not AccKind.LIST and self.count > least

    def retain(self, entries: np.ndarray) -> None:
        """Drop all entries but these."""
        self.used = 0
        self.add(entries)
        self._compacted_count = self.count

    def folded(self, before: int) -> None:
        """Note that equal values were folded. Where most were different, the next attempt is postponed."""
        self._compacted_count = self.count * (RETRY_FACTOR if 2 * self.count > before else 1)

    def clear(self) -> None:
        self.used = self._compacted_count = 0
        self.merged_heaps = []
        self.heap.clear()


def _too_much(used: int) -> ScaleinError:
    return ScaleinError("the values of this flow's groups need more memory than this process may use",
                        found=f"{used >> 20} MiB", hint="filter or aggregate before grouping")


class SideState:
    """The bags, logs and heap of one table."""

    def __init__(self, table: Table, new_table: Callable[[Table], HashTable]) -> None:
        self.bags = [new_table(side) for _, side in table.bags]
        self.logs = [Log(acc, f"log{k}") for k, (_, acc) in enumerate(table.logs)]
        self.heap = Heap("heap")

    def attach(self, frame: FrameData) -> None:
        for k, bag in enumerate(self.bags):
            bag.attach(frame, f"bag{k}")
        for log in self.logs:
            log.attach(frame)
        self.heap.attach(frame)

    def detach(self, frame: FrameData) -> None:
        for k, bag in enumerate(self.bags):
            bag.detach(frame, f"bag{k}")
        for log in self.logs:
            log.detach(frame)
        self.heap.detach(frame)

    def make_room(self, status: int, frame: FrameData) -> bool:
        """Allocate the space that a kernel ran out of; false if the side state was not full."""
        number = frame.get("full", 0) - 1
        if status == HEAP_FULL:
            for heap in (self.heap, *(log.heap for log in self.logs)):
                heap.make_room(frame)
        elif number < 0:
            return False
        elif number >= len(self.bags):
            raise _too_much(self.logs[number - len(self.bags)].used)
        elif status == INDEX_FULL:
            self.bags[number].grow()
        else:
            assert status == ARENA_FULL, status
            self.bags[number].make_room(frame, f"bag{number}")
        return True

    def clear(self) -> None:
        """Drop all content, and retain the memory for reuse."""
        for bag in self.bags:
            bag.clear()
        for log in self.logs:
            log.clear()
        self.heap.clear()
