"""What a table's records own beside their fixed fields: bags, logs, and heaps of bytes. See `llvm_backend/sides.py`.

The three belong to one state and go where it goes: they are attached to the same frames, and moved when it is
merged into another.
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
SELDOM = 8  # times later than otherwise
SHORTEN_ALWAYS = 1 << 12  # entries before it is cut although it is complete, because it will be multiplied
SHORTEN_FROM = 1 << 20  # entries of a log before it is first cut to what matters of each group


class Heap:
    """Pieces of memory that bytes are kept in; a piece never moves. Its slots in a frame begin with `prefix`."""

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
        """A new piece, if it was this heap that a kernel found too small."""
        need = frame.get(f"{self._prefix}.need", 0)
        if need > self._left:
            size = max(HEAP_BYTES << min(len(self.pieces), 8), 2 * need)
            self.take(allocate(size), 0)

    def take(self, piece: np.ndarray, used: int) -> None:
        """Go on in this piece, behind its used bytes."""
        self.pieces.append(piece)
        self._at, self._left = address(piece) + used, len(piece) - used

    def clear(self) -> None:
        """Forget every byte; the largest piece is kept to begin with."""
        if self.pieces:
            self.pieces = [max(self.pieces, key=len)]
            self._at, self._left = address(self.pieces[0]), len(self.pieces[0])


class Log:
    """Entries one behind the other, in address space that becomes memory as it is touched."""

    def __init__(self, acc: Acc, prefix: str) -> None:
        self.acc, self.layout, self._prefix = acc, log_layout(acc), prefix
        self._arena = reserve(LOG_SPACE)
        self.used = 0
        self._kept = 0  # entries after the last cut
        self.heap = Heap(f"{prefix}.heap")
        self.kept: list[Heap] = []  # heaps of logs that were merged into this one

    def attach(self, frame: FrameData) -> None:
        frame[f"{self._prefix}.arena"], frame[f"{self._prefix}.arena_size"] = address(self._arena), len(self._arena)
        frame[f"{self._prefix}.used"] = self.used
        self.heap.attach(frame)

    def detach(self, frame: FrameData) -> None:
        self.used = frame.get(f"{self._prefix}.used", self.used)
        self.heap.detach(frame)

    @property
    def memory(self) -> np.ndarray:
        """All that entries may use, as bytes."""
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
        """Whether it is worth shortening: there are twice as many entries as were left the last time."""
        least = SHORTEN_ALWAYS if at_once else max(SHORTEN_FROM, 2 * self._kept)
        return self.acc.kind is not AccKind.LIST and self.count > least

    def keep(self, entries: np.ndarray) -> None:
        """Forget all entries but these."""
        self.used = 0
        self.add(entries)
        self._kept = self.count

    def folded(self, before: int) -> None:
        """Equal values are one entry now. Where most were different, it is not worth trying again soon."""
        self._kept = self.count * (SELDOM if 2 * self.count > before else 1)

    def clear(self) -> None:
        self.used = self._kept = 0
        self.kept = []
        self.heap.clear()


def _too_much(used: int) -> ScaleinError:
    return ScaleinError("the values of this flow's groups need more memory than this process may use",
                        found=f"{used >> 20} MiB", hint="filter or aggregate before grouping")


class Sides:
    """The bags, logs and heap of one state."""

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
        """Give a side the room that a kernel asked for; false if it was not a side that asked."""
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
        """Forget everything, and keep the memory for what comes next."""
        for bag in self.bags:
            bag.clear()
        for log in self.logs:
            log.clear()
        self.heap.clear()
