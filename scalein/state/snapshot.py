"""Snapshots: fuzzy copy and undo. The caller stops for microseconds; a thread copies, mends, writes and publishes.

A freeze notes what is in the store (headers, the list of chunks, the runs) and marks the segments that changed since
their last copy as *copying*. From then on a kernel logs a record of such a segment before it changes it. The thread
copies a segment, clears its mark, waits until every kernel has ended the block it was in, and then undoes what the log
has, the newest entry first: the image is the segment as it was at the freeze. Why that is a point in time: FORMAT.md.

Invariant: one snapshot is copied at a time; a second freeze waits for the first one's copy. Snapshots are written in
order. If one fails, the segments that it should have written count as changed again, and the last whole one stays.

Threads: `mark` is called by the store's caller between kernels, `copy_now` by a kernel's thread that has left it,
everything else by the store's snapshot thread.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field

import numpy as np

from scalein.errors import ScaleinError, StoreFailed
from scalein.layout import PAGE_BYTES, RECORD_AT, TEXT_AT, UNDO_BATCH_SHIFT, FrameData
from scalein.memory import address, reserve
from scalein.state.files import Files, aligned
from scalein.state.format import padded
from scalein.state.hot import RECORDS, HotTable
from scalein.state.images import Extent, ImageWriter
from scalein.state.manifest import Json

_LOOK_S = 5e-5  # between looks at a kernel that is in a block


@dataclass(eq=False)
class Frozen:
    """What the store was at a freeze."""

    id: int
    meta: dict[str, Json]
    headers: np.ndarray
    chunks: np.ndarray
    changed: list[int]  # segments to be copied
    used: dict[int, int]  # bytes of them
    files: frozenset[str]  # that it will name, besides images
    tables: dict[str, np.ndarray] = field(default_factory=dict)  # of pieces that were not loaded
    done: threading.Event = field(default_factory=threading.Event)
    error: BaseException | None = None

    def chunk_tables(self, base: int) -> dict[str, np.ndarray]:
        """The chunks in use: group, kind, offset, and how many bytes of each were used."""
        rows = self.chunks[self.chunks[:, 0] >= 0]
        group, kind, offset, size = rows.T
        used = size.copy()
        for at, wanted in ((RECORD_AT, RECORDS), (TEXT_AT, 1 - RECORDS)):
            tail = self.headers[group, at] - base - offset
            is_open = (kind == wanted) & (tail >= 0) & (tail <= size)
            used[is_open] = tail[is_open]
        return {"group": group.astype(np.uint16), "kind": kind.astype(np.uint8), "offset": offset.astype(np.uint64),
                "used": used.astype(np.uint64)}


class Snapshot:
    """A snapshot under way. `id` names it; `wait()` returns when it is on the disk."""

    def __init__(self, frozen: Frozen) -> None:
        self._frozen = frozen

    @property
    def id(self) -> int:
        return self._frozen.id

    @property
    def is_done(self) -> bool:
        return self._frozen.done.is_set()

    def wait(self, timeout_s: float | None = None) -> Snapshot:
        """Wait until a power cut could not lose it; raises if it failed."""
        if not self._frozen.done.wait(timeout_s):
            raise ScaleinError(f"snapshot {self.id} is not written yet", found=f"{timeout_s} s passed")
        if self._frozen.error is not None:
            raise StoreFailed(f"snapshot {self.id} failed; the one before it stays, and the next will hold everything",
                              found=self._frozen.error) from self._frozen.error
        return self

    def __repr__(self) -> str:
        state = "failed" if self._frozen.error else "on disk" if self.is_done else "under way"
        return f"Snapshot({self.id}, {state})"


class Copier:
    """Marks, copies and mends segments."""

    def __init__(self, hot: HotTable, workers: int) -> None:
        self._hot, self._arena = hot, hot.arena
        count = len(self._arena.dirty)
        hot.undo_at = [np.zeros(count, np.int64) for _ in range(workers)]
        hot.undo_end = [np.zeros(count, np.int64) for _ in range(workers)]
        self._starts = [np.zeros(count, np.int64) for _ in range(workers)]
        hot.on_undo_full = self.copy_now
        self._entry = hot.kernels.record_bytes + 8
        self._log_bytes = max(self._arena.segment_bytes // 2, 64 * self._entry) // PAGE_BYTES * PAGE_BYTES
        self._logs = reserve(len(self._arena.memory) // 2 * workers)
        self._logs_begun = 0
        self._free_logs: list[int] = []
        self._lock = threading.Lock()  # over the state of segments under copy
        self._images: dict[int, np.ndarray] = {}  # of segments that were copied and not yet written
        self._spare: list[np.ndarray] = []
        self._copied = threading.Event()
        self._copied.set()
        self._left: set[int] = set()
        self._used: dict[int, int] = {}

    @property
    def memory_bytes(self) -> int:
        """Undo logs and copies, at most."""
        return self._logs_begun * self._log_bytes + (len(self._images) + len(self._spare)) * self._arena.segment_bytes

    def mark(self) -> tuple[list[int], dict[int, int]]:
        """Begin a copy of all segments that changed: their numbers and sizes."""
        self._copied.wait()
        arena, hot = self._arena, self._hot
        changed = np.flatnonzero(arena.dirty[: arena.segments]).tolist()
        self._used = {segment: padded(arena.used(segment)) for segment in changed}
        self._left = set(changed)
        for segment in changed:
            for at, end, start in zip(hot.undo_at, hot.undo_end, self._starts, strict=True):
                at[segment] = start[segment] = self._take_log()
                end[segment] = at[segment] + self._log_bytes
        arena.dirty[changed] = 0
        arena.copying[changed] = 1
        if changed:
            self._copied.clear()
            arena.any_copying[0] = 1
        return changed, dict(self._used)

    def _take_log(self) -> int:
        if self._free_logs:
            return self._free_logs.pop()
        start = self._logs_begun * self._log_bytes
        if start + self._log_bytes > len(self._logs):
            raise ScaleinError("the undo logs of a snapshot need more address space than this process may have")
        self._logs_begun += 1
        return address(self._logs) + start

    def copy_now(self, segment: int) -> None:
        """Copy a segment whose undo log is full; a kernel waits for it."""
        with self._lock:
            self._copy(segment)

    def _copy(self, segment: int) -> None:
        if segment not in self._left:
            return
        image = self._spare.pop() if self._spare else aligned(self._arena.segment_bytes)
        start = self._arena.base + (segment << self._arena.shift)
        self._hot.kernels.copy(address(image), start, self._used[segment])
        self._images[segment] = image
        self._arena.copying[segment] = 0
        self._left.discard(segment)
        if not self._left:
            self._arena.any_copying[0] = 0
            self._copied.set()

    def image(self, segment: int) -> np.ndarray:
        """The segment as it was when it was marked."""
        with self._lock:
            self._copy(segment)
        self._wait_for_blocks()
        image = self._images[segment][: self._used[segment]]
        logs = []
        for at, starts in zip(self._hot.undo_at, self._starts, strict=True):
            start = int(starts[segment])
            logs.append((start, (int(at[segment]) - start) // self._entry))
        first = segment << self._arena.shift
        for start, count in self._in_one(logs):
            self._hot.kernels.restore(address(image), first, start, count)
        return image

    def _in_one(self, logs: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """Logs that have entries. A record may be in several, by different calls: those are put into one, by batch."""
        logs = [(start, count) for start, count in logs if count]
        if len(logs) < 2:
            return logs
        base = address(self._logs)
        entries = np.concatenate([self._logs[s - base : s - base + n * self._entry].reshape(n, self._entry)
                                  for s, n in logs])
        batches = np.ascontiguousarray(entries[:, :8]).view(np.uint64)[:, 0] >> np.uint64(UNDO_BATCH_SHIFT)
        self._joined = np.ascontiguousarray(entries[np.argsort(batches, kind="stable")])
        return [(address(self._joined), len(entries))]

    def _wait_for_blocks(self) -> None:
        """Until every kernel has ended the block that it is in: it may have seen a mark before it was cleared."""
        for worker, frame in list(self._hot.running.items()):
            seen = _progress(frame)
            while self._hot.running.get(worker) is frame and _progress(frame) == seen:
                time.sleep(_LOOK_S)

    def forget(self, segment: int) -> None:
        """The image of a segment has been written, or never will be."""
        with self._lock:
            image = self._images.pop(segment, None)
            if image is not None and len(self._spare) < 2:
                self._spare.append(image)
            self._free_logs += [int(starts[segment]) for starts in self._starts]

    def give_up(self, segments: list[int]) -> None:
        """Nothing of these will be written: they count as changed."""
        with self._lock:
            self._arena.dirty[segments] = 1
            self._arena.copying[segments] = 0
            self._left -= set(segments)
            if not self._left:
                self._arena.any_copying[0] = 0
                self._copied.set()


def _progress(frame: FrameData) -> int:
    return frame.get("progress", 0)


class ImageFiles:
    """Where each segment's last image is."""

    def __init__(self, files: Files, hot: HotTable, copier: Copier) -> None:
        self._files, self._hot, self._copier = files, hot, copier
        self.known: dict[int, tuple[int, Extent]] = {}  # segment -> image file, extent

    def write(self, frozen: Frozen) -> None:
        """Write the images of a frozen state's changed segments."""
        left = list(frozen.changed)
        if not left:
            return
        writer = ImageWriter(self._files, frozen.id, sum(frozen.used.values()) + PAGE_BYTES,
                             checksums=self._hot.kernels.checksums)
        try:
            placed = {}
            while left:
                segment = left[0]
                placed[segment] = writer.add(segment, self._copier.image(segment))
                self._copier.forget(segment)
                left.pop(0)
            writer.finish()
        except BaseException:
            writer.abandon()
            for segment in frozen.changed:
                self.known.pop(segment, None)
            self._copier.give_up(frozen.changed)
            for segment in left:
                self._copier.forget(segment)
            raise
        self.known.update({segment: (frozen.id, extent) for segment, extent in placed.items()})
