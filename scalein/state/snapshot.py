"""Snapshots: fuzzy copy and undo. The caller stops for a fraction of a millisecond; threads copy, mend and write.

A freeze notes what is in the store (headers, the list of chunks, the runs) and marks the segments that changed since
their last copy as *copying*. From then on a kernel logs a record of such a segment before it changes it. The thread
copies a segment, clears its mark, waits until every kernel has ended the block it was in, and then undoes what the log
has, the newest entry first: the image is the segment as it was at the freeze. Why that is a point in time: FORMAT.md.

Invariant: one snapshot is copied at a time; a second freeze waits for the first one's copy. Snapshots are written in
order. If one fails, the segments that it should have written count as changed again, and the last whole one stays.

Threads: `mark` is called by the store's caller between kernels, `copy_now` by a kernel's thread that has left it,
`copy` by a thread that copies ahead, everything else by the store's snapshot thread.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np

from scalein.errors import ScaleinError, StoreFailed
from scalein.layout import PAGE_BYTES, RECORD_AT, RECORD_END, TEXT_AT, TEXT_END, UNDO_BATCH_SHIFT, FrameData
from scalein.memory import address, reserve
from scalein.state.format import padded
from scalein.state.manifest import Json
from scalein.state.memtable import RECORDS, TEXTS, HotTable
from scalein.state.run_file import Run
from scalein.state.segment_images import Extent, ImageWriter
from scalein.storage.filesystem import FileSystem, aligned_buffer

_LOOK_S = 5e-5  # between looks at a kernel that is in a block


@dataclass(eq=False)
class Frozen:
    """What the store was at a freeze."""

    id: int
    image_id: int  # of the file that its images are in, and of that with the index of its new records
    merged_id: int  # of an index file that others may be merged into, once it is on disk
    meta: dict[str, Json]
    headers: np.ndarray
    chunks: np.ndarray
    copy: Copy  # of the segments that changed
    files: frozenset[str]  # that it will name, besides images
    pin: int  # see `HotTable.pin`
    tables: dict[str, np.ndarray] = field(default_factory=dict)  # of pieces that were not loaded
    waits: list[Future[Run]] = field(default_factory=list)  # for runs that were being written
    done: threading.Event = field(default_factory=threading.Event)
    error: BaseException | None = None

    def chunk_tables(self, base: int) -> dict[str, np.ndarray]:
        """The chunks in use: group, kind, offset, how many bytes of each were used, and their serial numbers."""
        rows = self.chunks[self.chunks[:, 0] >= 0]
        group, kind, offset, size, serial = rows.T
        used = size.copy()
        for at, end, wanted in ((RECORD_AT, RECORD_END, RECORDS), (TEXT_AT, TEXT_END, TEXTS)):
            # Not by where the next record goes: behind a chunk that is just full, another one of the group may begin.
            is_open = (kind == wanted) & (self.headers[group, end] == base + offset + size)
            used[is_open] = (self.headers[group, at] - base - offset)[is_open]
        return {"group": group.astype(np.uint16), "kind": kind.astype(np.uint8), "offset": offset.astype(np.uint64),
                "used": used.astype(np.uint64), "serial": serial}


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


class Copy:
    """The segments of one freeze on their way to a file: what is left to copy, and the copies that wait."""

    def __init__(self, used: dict[int, int]) -> None:
        self.used = used  # bytes of each segment
        self.left = set(used)
        self.busy: set[int] = set()  # segments that some thread copies right now
        self.images: dict[int, np.ndarray] = {}
        self.logs: dict[int, list[int]] = {}  # segment -> where each worker's undo log begins
        self.unread = set(used)  # segments whose logs' ends have not been read
        self.is_copied = threading.Event()


class Copier:
    """Marks, copies and mends segments. At most `at_once` copies of a freeze wait to be written.

    The undo logs of a segment have `log_bytes`, or what address space there is, shared by the workers.
    """

    def __init__(self, hot: HotTable, workers: int, at_once: int, log_bytes: int) -> None:
        self._hot, self._arena, self.at_once = hot, hot.arena, at_once
        count = len(self._arena.dirty)
        hot.undo_at = [np.zeros(count, np.int64) for _ in range(workers)]
        hot.undo_end = [np.zeros(count, np.int64) for _ in range(workers)]
        hot.on_undo_full = self.copy_now
        self._entry = hot.kernels.record_bytes + 8
        # On small pages: kernels write to many logs at once, and would wait for a huge page of each.
        self._log_memory = reserve(count * log_bytes, huge=False)
        room = min(log_bytes, len(self._log_memory) // count) // workers
        self._log_bytes = max(padded(64 * self._entry), room // PAGE_BYTES * PAGE_BYTES)
        self._logs_begun = 0
        self._free_logs: deque[int] = deque()
        self._spare: list[np.ndarray] = []
        self._lock = threading.Condition()  # over the current copy, free logs and spare memory; told of each copy
        self._current = Copy({})
        self._current.is_copied.set()
        self._ends = hot.headers.T[[RECORD_AT, TEXT_AT]]  # of each group, at the last freeze; a copy

    @property
    def memory_bytes(self) -> int:
        """Undo logs and copies, at most."""
        images = len(self._current.images) + len(self._spare)
        return self._logs_begun * self._log_bytes + images * self._arena.segment_bytes

    def mark(self) -> Copy:
        """Begin a copy of all segments that changed; waits until the one before has copied all of its own."""
        self._current.is_copied.wait()
        arena, hot = self._arena, self._hot
        self._note_ends()
        hot.batch = 0  # numbers are compared within the logs of one freeze, and have 24 bits
        dirty = np.flatnonzero(arena.dirty[: arena.segments])
        changed = dirty.tolist()
        copy = Copy(dict(zip(changed, arena.used(dirty).tolist(), strict=True)))
        with self._lock:
            logs = np.array(self._take_logs(len(changed) * len(hot.undo_at)), np.int64).reshape(-1, len(hot.undo_at))
            copy.logs = dict(zip(changed, logs.tolist(), strict=True))
            for at, end, starts in zip(hot.undo_at, hot.undo_end, logs.T, strict=True):
                at[changed], end[changed] = starts, starts + self._log_bytes
            self._current = copy
        arena.dirty[changed] = 0
        arena.copying[changed] = 1
        arena.any_copying[0] = bool(changed)
        if not changed:
            copy.is_copied.set()
        return copy

    def _note_ends(self) -> None:
        """Mark the segments that something was appended to: kernels mark those of the records that they change.

        A text may lie in another one; and a kernel that left for room, but was not called again (Ctrl-C, no memory),
        has made records that it did not come to. New chunks are marked when they are made, so what is left is the
        chunks that were open at the last freeze.
        """
        ends = self._hot.headers.T[[RECORD_AT, TEXT_AT]]
        places = self._ends[(ends != self._ends) & (self._ends != 0)]
        segments = places - self._arena.base >> self._arena.shift
        self._arena.dirty[segments[segments < len(self._arena.dirty)]] = 1
        self._ends = ends

    def _take_logs(self, count: int) -> list[int]:
        """All or none. The oldest first: so a segment has the same ones each time, with as many pages as it needs."""
        new = range(self._logs_begun, self._logs_begun + max(0, count - len(self._free_logs)))
        if new.stop * self._log_bytes > len(self._log_memory):
            raise ScaleinError("the undo logs of a snapshot need more address space than this process may have")
        self._logs_begun = new.stop
        taken = [self._free_logs.popleft() for _ in range(count - len(new))]
        return taken + [address(self._log_memory) + k * self._log_bytes for k in new]

    def copy_now(self, segment: int) -> None:
        """Copy a segment whose undo log is full; a kernel waits for it."""
        self._copy(self._current, segment)

    def _copy(self, copy: Copy, segment: int) -> None:
        """Copy a segment, unless that is done; side by side with whoever copies another, after who copies this one."""
        with self._lock:
            self._lock.wait_for(lambda: segment not in copy.busy)
            if segment not in copy.left:
                return
            image = self._spare.pop() if self._spare else aligned_buffer(self._arena.segment_bytes)
            copy.busy.add(segment)
        try:
            start = self._arena.base + (segment << self._arena.shift)
            self._hot.kernels.copy(address(image), start, copy.used[segment])
            with self._lock:
                copy.images[segment] = image
                self._clear(copy, [segment])
        finally:
            with self._lock:
                copy.busy.remove(segment)
                self._lock.notify_all()

    def _clear(self, copy: Copy, segments: list[int]) -> None:
        self._arena.copying[segments] = 0
        copy.left -= set(segments)
        if not copy.left:
            self._arena.any_copying[0] = 0

    def copy(self, copy: Copy, segments: list[int]) -> list[np.ndarray]:
        """Segments as they were when they were marked."""
        for segment in self._busiest_first(copy, segments):
            self._copy(copy, segment)
        self._wait_for_blocks()
        ends = [[int(at[segment]) for at in self._hot.undo_at] for segment in segments]
        copy.unread -= set(segments)
        if not copy.unread:
            copy.is_copied.set()  # from here on the next freeze may have the marks and ends of logs
        return [self._mended(copy, segment, end) for segment, end in zip(segments, ends, strict=True)]

    def _busiest_first(self, copy: Copy, segments: list[int]) -> Iterator[int]:
        """Always the segment whose logs have grown most: once it is copied, nothing more is logged of it."""
        left, starts = np.array(segments), np.array([sum(copy.logs[segment]) for segment in segments])
        while len(left):
            grown = sum(at[left] for at in self._hot.undo_at) - starts
            first = int(np.argmax(grown))
            yield int(left[first])
            left, starts = np.delete(left, first), np.delete(starts, first)

    def _mended(self, copy: Copy, segment: int, ends: list[int]) -> np.ndarray:
        image = copy.images[segment][: copy.used[segment]]
        logs = [(start, (end - start) // self._entry) for start, end in zip(copy.logs[segment], ends, strict=True)]
        first = segment << self._arena.shift
        for start, count in self._in_one(logs):
            self._hot.kernels.restore(address(image), first, start, count)
        with self._lock:
            self._free_logs += copy.logs.pop(segment)
        return image

    def _in_one(self, logs: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """Logs that have entries. A record may be in several, by different calls: those are put into one, by batch."""
        logs = [(start, count) for start, count in logs if count]
        if len(logs) < 2:
            return logs
        base = address(self._log_memory)
        entries = np.concatenate([self._log_memory[s - base : s - base + n * self._entry].reshape(n, self._entry)
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

    def forget(self, copy: Copy, segment: int) -> None:
        """The copy of a segment has been written."""
        with self._lock:
            image = copy.images.pop(segment)
            if len(self._spare) < self.at_once:
                self._spare.append(image)

    def give_up(self, copy: Copy) -> None:
        """Nothing of a freeze will be written: its segments count as changed."""
        segments = list(copy.used)
        with self._lock:
            self._lock.wait_for(lambda: not copy.busy)
            self._arena.dirty[segments] = 1
            left = list(copy.left)
            self._arena.copying[left] = 0
        self._wait_for_blocks()  # they may still write to the logs
        with self._lock:
            self._free_logs += [log for logs in copy.logs.values() for log in logs]
            copy.logs.clear()
            copy.images.clear()
            if left:  # else a later freeze may have the marks
                self._clear(copy, left)
        copy.is_copied.set()


def _progress(frame: FrameData) -> int:
    return frame.get("progress", 0)


class ImageFiles:
    """Where each segment's last image is."""

    def __init__(self, fs: FileSystem, hot: HotTable, copier: Copier) -> None:
        self._fs, self._hot, self._copier = fs, hot, copier
        self.known: dict[int, tuple[int, Extent]] = {}  # segment -> image file, extent
        self._ahead = ThreadPoolExecutor(1, "scalein-copy")

    def write(self, frozen: Frozen) -> None:
        """Write the images of a frozen state's changed segments."""
        copy = frozen.copy
        if not copy.used:
            return
        placed: dict[int, tuple[int, Extent]] = {}
        try:
            writer = ImageWriter(self._fs, frozen.image_id, sum(copy.used.values()) + PAGE_BYTES,
                                 checksums=self._hot.kernels.checksums)
            try:
                for some, images in self._copies(frozen):
                    for segment, image in zip(some, images, strict=True):
                        placed[segment] = frozen.image_id, writer.add(segment, image)
                        self._copier.forget(copy, segment)
                writer.finish()
            except BaseException:
                writer.abandon()
                raise
        except BaseException:
            self._ahead.submit(lambda: None).result()  # a copy may be under way
            for segment in copy.used:
                self.known.pop(segment, None)
            self._copier.give_up(copy)
            raise
        self.known.update(placed)

    def _copies(self, frozen: Frozen) -> Iterator[tuple[list[int], list[np.ndarray]]]:
        """Some segments after others, and their copies; the next ones are copied while these are written."""
        segments, step = list(frozen.copy.used), max(1, self._copier.at_once // 2)
        parts = [segments[start : start + step] for start in range(0, len(segments), step)]
        following = self._ahead.submit(self._copier.copy, frozen.copy, parts[0])
        for part, after in zip(parts, [*parts[1:], None], strict=True):
            images = following.result()
            if after is not None:
                following = self._ahead.submit(self._copier.copy, frozen.copy, after)
            yield part, images

    def close(self) -> None:
        self._ahead.shutdown(wait=True)
