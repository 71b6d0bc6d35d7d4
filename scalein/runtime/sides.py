"""What a table's records own beside their fixed fields: bags, logs, and a heap of bytes. See `llvm_backend/sides.py`.

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
from scalein.runtime.memory import address, allocate, reserve

if TYPE_CHECKING:
    from scalein.runtime.tables import HashTable

HEAP_BYTES = 1 << 16
LOG_SPACE = 1 << 36  # bytes of address space a log may grow to
SELDOM = 8  # times later than otherwise
SHORTEN_FROM = 1 << 20  # entries of a log before it is first cut to what matters of each group


class Heap:
    """Pieces of memory that accumulators keep bytes in; a piece never moves."""

    def __init__(self) -> None:
        self.pieces: list[np.ndarray] = []
        self._at, self._left = 0, 0

    def attach(self, frame: FrameData) -> None:
        frame["heap.at"], frame["heap.left"] = self._at, self._left

    def detach(self, frame: FrameData) -> None:
        self._at, self._left = frame.get("heap.at", self._at), frame.get("heap.left", self._left)

    def make_room(self, need: int) -> None:
        size = max(HEAP_BYTES << min(len(self.pieces), 8), 2 * need)
        self.pieces.append(allocate(size))
        self._at, self._left = address(self.pieces[-1]), size

    def clear(self) -> None:
        """Forget every byte; the largest piece is kept to begin with."""
        if self.pieces:
            self.pieces = [max(self.pieces, key=len)]
            self._at, self._left = address(self.pieces[0]), len(self.pieces[0])


class Log:
    """Entries one behind the other, in address space that becomes memory as it is touched."""

    def __init__(self, acc: Acc) -> None:
        self.acc, self.layout = acc, log_layout(acc)
        self._arena = reserve(LOG_SPACE)
        self.used = 0
        self._kept = self._before = 0  # entries after the last cut, and before it

    def attach(self, frame: FrameData, prefix: str) -> None:
        frame[f"{prefix}.arena"], frame[f"{prefix}.arena_size"] = address(self._arena), len(self._arena)
        frame[f"{prefix}.used"] = self.used

    def detach(self, frame: FrameData, prefix: str) -> None:
        self.used = frame.get(f"{prefix}.used", self.used)

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

    def best(self, k: int) -> np.ndarray:
        """Numbers of the `k` best entries of each group, group by group, the best first."""
        owners = self.column("owner")
        order = np.lexsort((self.column("row"), ~self.column("by"), owners))
        found = owners[order]
        starts = np.flatnonzero(np.r_[True, found[1:] != found[:-1]]) if len(found) else np.zeros(0, np.int64)
        lengths = np.diff(np.r_[starts, len(found)])
        rank = np.arange(len(found)) - np.repeat(starts, lengths)
        return order[rank < k]

    @property
    def is_long(self) -> bool:
        """Whether there are twice as many entries as were left the last time it was shortened."""
        self._before = self.count
        return self.acc.kind is not AccKind.LIST and self.count > max(SHORTEN_FROM, 2 * self._kept)

    def keep(self, entries: np.ndarray) -> None:
        """Forget all entries but these."""
        entries = entries.copy()
        self.used = 0
        self.add(entries)
        self._kept = self.count

    def shortened(self) -> None:
        """Equal values have been folded. Where most were different, it is not worth trying again soon."""
        self._kept = self.count * (SELDOM if 2 * self.count > self._before else 1)


def _too_much(used: int) -> ScaleinError:
    return ScaleinError("the values of this flow's groups need more memory than this process may use",
                        found=f"{used >> 20} MiB", hint="filter or aggregate before grouping")


class Sides:
    """The bags, logs and heap of one state."""

    def __init__(self, table: Table, new_table: Callable[[Table], HashTable]) -> None:
        self.bags = [new_table(side) for _, side in table.bags]
        self.logs = [Log(acc) for _, acc in table.logs]
        self.heap = Heap()
        self.kept: list[Heap] = []  # heaps of states merged into this one, whose bytes logs still point to

    def attach(self, frame: FrameData) -> None:
        for k, bag in enumerate(self.bags):
            bag.attach(frame, f"bag{k}")
        for k, log in enumerate(self.logs):
            log.attach(frame, f"log{k}")
        self.heap.attach(frame)

    def detach(self, frame: FrameData) -> None:
        for k, bag in enumerate(self.bags):
            bag.detach(frame, f"bag{k}")
        for k, log in enumerate(self.logs):
            log.detach(frame, f"log{k}")
        self.heap.detach(frame)

    def make_room(self, status: int, frame: FrameData) -> bool:
        """Give a side the room that a kernel asked for; false if it was not a side that asked."""
        number = frame.get("full", 0) - 1
        if status == HEAP_FULL:
            self.heap.make_room(frame["heap.need"])
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
            log.used = 0
        self.heap.clear()
