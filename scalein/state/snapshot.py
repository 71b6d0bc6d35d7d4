"""Snapshots by fuzzy copy and undo. The caller is stopped for a fraction of a millisecond; threads copy and write.

A capture records the content of the store (group headers, the list of chunks, the runs) and marks the segments that
changed since their last image as *copying*. From then on a kernel logs a record of such a segment before it changes the
record. A thread copies a segment, clears its mark, waits until every kernel has finished its current block, and then
applies the undo log, newest entry first: the image is the segment as it was at the capture. FORMAT.md has the proof.

Invariant: one snapshot is copied at a time; a second capture waits for the copy of the first. Snapshots are written in
order. If one fails, its segments count as changed again, and the last complete snapshot remains.

Files of old snapshots are removed by `snapshot_writer.py`; `LogStore` is given how many stay (`store.KEEP_SNAPSHOTS`).

Threads: `mark_changed` is called by the store's caller between kernels, `copy_now` by the thread of a kernel that has
returned, `copy` by the thread that copies ahead, everything else by the thread that writes snapshots.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np

from scalein.errors import ScaleinError, StoreFailed, here
from scalein.layout import PAGE_BYTES, RECORD_AT, RECORD_END, TEXT_AT, TEXT_END, UNDO_BATCH_SHIFT, FrameData
from scalein.memory import address, reserve
from scalein.state.format import padded
from scalein.state.memtable import RECORDS, TEXTS, MemTable
from scalein.state.run_file import RunFile
from scalein.state.segment_images import Extent, ImageWriter
from scalein.storage.checked_json import Json
from scalein.storage.filesystem import FileSystem, aligned_buffer

_POLL_S = 5e-5  # between two reads of a running kernel's progress


@dataclass(eq=False)
class Capture:
    """The content of the store at a snapshot."""

    id: int
    image_id: int  # of the file with its images, and of that with the index of its new records
    merged_id: int  # of an index file that others may be merged into, once it is on disk
    meta: dict[str, Json]
    headers: np.ndarray
    chunks: np.ndarray
    copies: SegmentCopies  # of the changed segments
    files: frozenset[str]  # that its manifest will name, besides images
    pin: int  # see `MemTable.pin`
    tables: dict[str, np.ndarray] = field(default_factory=dict)  # of pieces that are not loaded
    runs: list[Future[RunFile]] = field(default_factory=list)  # perhaps still being written
    done: threading.Event = field(default_factory=threading.Event)
    error: BaseException | None = None

    def chunk_tables(self, base: int) -> dict[str, np.ndarray]:
        """The allocated chunks: group, kind, offset, bytes in use, serial number."""
        rows = self.chunks[self.chunks[:, 0] >= 0]
        group, kind, offset, size, serial = rows.T
        used = size.copy()
        for at, end, wanted in ((RECORD_AT, RECORD_END, RECORDS), (TEXT_AT, TEXT_END, TEXTS)):
            # By the end, not by the next record: that of a full chunk may be the start of another chunk of the group.
            is_open = (kind == wanted) & (self.headers[group, end] == base + offset + size)
            used[is_open] = (self.headers[group, at] - base - offset)[is_open]
        return {"group": group.astype(np.uint16), "kind": kind.astype(np.uint8), "offset": offset.astype(np.uint64),
                "used": used.astype(np.uint64), "serial": serial}


class Snapshot:
    """A snapshot that is being written. `id` names it; `wait()` returns when it is on the disk."""

    def __init__(self, capture: Capture) -> None:
        self._capture = capture

    @property
    def id(self) -> int:
        return self._capture.id

    @property
    def is_done(self) -> bool:
        return self._capture.done.is_set()

    def wait(self, timeout_s: float | None = None) -> Snapshot:
        """Wait until it is durable; raises if it failed."""
        if not self._capture.done.wait(timeout_s):
            raise ScaleinError(f"snapshot {self.id} is not written yet", at=here(), found=f"{timeout_s} s passed")
        if self._capture.error is not None:
            raise StoreFailed(f"snapshot {self.id} failed; the one before it remains, and the next will be complete",
                              at=here(), found=self._capture.error) from self._capture.error
        return self

    def __repr__(self) -> str:
        state = "failed" if self._capture.error else "on disk" if self.is_done else "being written"
        return f"Snapshot({self.id}, {state})"


class SegmentCopies:
    """The changed segments of one capture: those to be copied, and the copies to be written."""

    def __init__(self, used: dict[int, int]) -> None:
        self.used = used  # bytes in use of each segment
        self.uncopied = set(used)
        self.being_copied: set[int] = set()
        self.images: dict[int, np.ndarray] = {}
        self.logs: dict[int, list[int]] = {}  # segment -> the start of each worker's undo log
        self.unread_logs = set(used)  # segments whose logs' ends have not been read
        self.is_copied = threading.Event()


class SegmentCopier:
    """Marks and copies segments, and applies their undo logs. At most `max_copies` copies wait to be written.

    The undo logs of a segment have `undo_log_bytes`, or as much as the address space allows, shared by the workers.
    """

    def __init__(self, memtable: MemTable, workers: int, max_copies: int, undo_log_bytes: int) -> None:
        self._memtable, self._arena, self.max_copies = memtable, memtable.arena, max_copies
        count = len(self._arena.dirty)
        memtable.undo_at = [np.zeros(count, np.int64) for _ in range(workers)]
        memtable.undo_end = [np.zeros(count, np.int64) for _ in range(workers)]
        memtable.on_undo_full = self.copy_now
        self._entry = memtable.kernels.record_bytes + 8
        # On small pages: kernels write to many logs at once, and would wait while a huge page is zeroed for each.
        self._log_memory = reserve(count * undo_log_bytes, huge=False)
        per_worker = min(undo_log_bytes, len(self._log_memory) // count) // workers
        self._log_bytes = max(padded(64 * self._entry), per_worker // PAGE_BYTES * PAGE_BYTES)
        self._log_count = 0
        self._free_logs: deque[int] = deque()
        self._free_copies: list[np.ndarray] = []
        self._lock = threading.Condition()  # over the current copies and free memory; notified after each copy
        self._current = SegmentCopies({})
        self._current.is_copied.set()
        self._ends = memtable.headers.T[[RECORD_AT, TEXT_AT]]  # of each group, at the last capture; a copy

    @property
    def memory_bytes(self) -> int:
        """Undo logs and copies, at most."""
        images = len(self._current.images) + len(self._free_copies)
        return self._log_count * self._log_bytes + images * self._arena.segment_bytes

    def mark_changed(self) -> SegmentCopies:
        """Start the copy of all changed segments; waits until the previous capture is copied."""
        self._current.is_copied.wait()
        arena, memtable = self._arena, self._memtable
        self._mark_appended()
        memtable.batch = 0  # batch numbers are compared within the logs of one capture, and have 24 bits
        dirty = np.flatnonzero(arena.dirty[: arena.segments])
        changed = dirty.tolist()
        workers = len(memtable.undo_at)
        copies = SegmentCopies(dict(zip(changed, arena.used(dirty).tolist(), strict=True)))
        with self._lock:
            logs = np.array(self._allocate_logs(len(changed) * workers), np.int64).reshape(-1, workers)
            copies.logs = dict(zip(changed, logs.tolist(), strict=True))
            for at, end, starts in zip(memtable.undo_at, memtable.undo_end, logs.T, strict=True):
                at[changed], end[changed] = starts, starts + self._log_bytes
            self._current = copies
        arena.dirty[changed] = 0
        arena.copying[changed] = 1
        arena.any_copying[0] = bool(changed)
        if not changed:
            copies.is_copied.set()
        return copies

    def _mark_appended(self) -> None:
        """Mark the segments that something was appended to; kernels mark only those of records that they change.

        A text may be in another segment than its record; and a kernel that returned for memory but was not called again
        (Ctrl-C, out of memory) has inserted records that it did not reach. New chunks are marked when they are
        allocated, so what remains are the chunks that were open at the last capture.
        """
        ends = self._memtable.headers.T[[RECORD_AT, TEXT_AT]]
        appended = self._ends[(ends != self._ends) & (self._ends != 0)]
        segments = appended - self._arena.base >> self._arena.shift
        self._arena.dirty[segments[segments < len(self._arena.dirty)]] = 1
        self._ends = ends

    def _allocate_logs(self, count: int) -> list[int]:
        """All or none. Least recently used first: so a segment gets the same ones each time, with their pages."""
        new = range(self._log_count, self._log_count + max(0, count - len(self._free_logs)))
        if new.stop * self._log_bytes > len(self._log_memory):
            raise ScaleinError("the undo logs of a snapshot need more address space than this process may have")
        self._log_count = new.stop
        reused = [self._free_logs.popleft() for _ in range(count - len(new))]
        return reused + [address(self._log_memory) + k * self._log_bytes for k in new]

    def copy_now(self, segment: int) -> None:
        """Copy a segment whose undo log is full; a kernel waits for it."""
        self._copy(self._current, segment)

    def _copy(self, copies: SegmentCopies, segment: int) -> None:
        """Copy a segment, unless that is done. Threads copy different segments concurrently."""
        with self._lock:
            self._lock.wait_for(lambda: segment not in copies.being_copied)
            if segment not in copies.uncopied:
                return
            image = self._free_copies.pop() if self._free_copies else aligned_buffer(self._arena.segment_bytes)
            copies.being_copied.add(segment)
        try:
            start = self._arena.base + (segment << self._arena.shift)
            self._memtable.kernels.copy(address(image), start, copies.used[segment])
            with self._lock:
                copies.images[segment] = image
                self._clear_marks(copies, [segment])
        finally:
            with self._lock:
                copies.being_copied.remove(segment)
                self._lock.notify_all()

    def _clear_marks(self, copies: SegmentCopies, segments: list[int]) -> None:
        self._arena.copying[segments] = 0
        copies.uncopied -= set(segments)
        if not copies.uncopied:
            self._arena.any_copying[0] = 0

    def copy(self, copies: SegmentCopies, segments: list[int]) -> list[np.ndarray]:
        """Segments as they were at the capture."""
        for segment in self._most_changed_first(copies, segments):
            self._copy(copies, segment)
        self._wait_for_blocks()
        ends = [[int(at[segment]) for at in self._memtable.undo_at] for segment in segments]
        copies.unread_logs -= set(segments)
        if not copies.unread_logs:
            copies.is_copied.set()  # from here on the next capture may use the marks and the ends of logs
        return [self._undo_changes(copies, segment, end) for segment, end in zip(segments, ends, strict=True)]

    def _most_changed_first(self, copies: SegmentCopies, segments: list[int]) -> Iterator[int]:
        """Always the segment whose logs have grown most: once it is copied, its changes are no longer logged."""
        left, starts = np.array(segments), np.array([sum(copies.logs[segment]) for segment in segments])
        while len(left):
            grown = sum(at[left] for at in self._memtable.undo_at) - starts
            first = int(np.argmax(grown))
            yield int(left[first])
            left, starts = np.delete(left, first), np.delete(starts, first)

    def _undo_changes(self, copies: SegmentCopies, segment: int, ends: list[int]) -> np.ndarray:
        image = copies.images[segment][: copies.used[segment]]
        logs = [(start, (end - start) // self._entry) for start, end in zip(copies.logs[segment], ends, strict=True)]
        first = segment << self._arena.shift
        for start, count in self._merge_logs(logs):
            self._memtable.kernels.restore(address(image), first, start, count)
        with self._lock:
            self._free_logs += copies.logs.pop(segment)
        return image

    def _merge_logs(self, logs: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """The logs that have entries. A record may be in several, by different calls: these are merged by batch."""
        logs = [(start, count) for start, count in logs if count]
        if len(logs) < 2:
            return logs
        base = address(self._log_memory)
        entries = np.concatenate([self._log_memory[s - base : s - base + n * self._entry].reshape(n, self._entry)
                                  for s, n in logs])
        batches = np.ascontiguousarray(entries[:, :8]).view(np.uint64)[:, 0] >> np.uint64(UNDO_BATCH_SHIFT)
        self._merged_log = np.ascontiguousarray(entries[np.argsort(batches, kind="stable")])
        return [(address(self._merged_log), len(entries))]

    def _wait_for_blocks(self) -> None:
        """Wait until every kernel has finished its current block: it may have read a mark before it was cleared."""
        for worker, frame in list(self._memtable.running.items()):
            seen = _progress(frame)
            while self._memtable.running.get(worker) is frame and _progress(frame) == seen:
                time.sleep(_POLL_S)

    def release(self, copies: SegmentCopies, segment: int) -> None:
        """The copy of a segment has been written."""
        with self._lock:
            image = copies.images.pop(segment)
            if len(self._free_copies) < self.max_copies:
                self._free_copies.append(image)

    def abandon(self, copies: SegmentCopies) -> None:
        """Nothing of a capture will be written: its segments count as changed."""
        segments = list(copies.used)
        with self._lock:
            self._lock.wait_for(lambda: not copies.being_copied)
            self._arena.dirty[segments] = 1
            uncopied = list(copies.uncopied)
            self._arena.copying[uncopied] = 0
        self._wait_for_blocks()  # they may still write to the logs
        with self._lock:
            self._free_logs += [log for logs in copies.logs.values() for log in logs]
            copies.logs.clear()
            copies.images.clear()
            if uncopied:  # otherwise the marks may belong to a later capture
                self._clear_marks(copies, uncopied)
        copies.is_copied.set()


def _progress(frame: FrameData) -> int:
    return frame.get("progress", 0)


class SegmentImages:
    """Writes the images of changed segments, and knows the last image of every segment."""

    def __init__(self, fs: FileSystem, memtable: MemTable, copier: SegmentCopier) -> None:
        self._fs, self._memtable, self._copier = fs, memtable, copier
        self.extents: dict[int, tuple[int, Extent]] = {}  # segment -> id of the image file, extent
        self._copy_ahead = ThreadPoolExecutor(1, "scalein-copy")

    def write(self, capture: Capture) -> None:
        """Write the images of a capture's changed segments."""
        copies = capture.copies
        if not copies.used:
            return
        written: dict[int, tuple[int, Extent]] = {}
        try:
            writer = ImageWriter(self._fs, capture.image_id, sum(copies.used.values()) + PAGE_BYTES,
                                 checksums=self._memtable.kernels.checksums)
            try:
                for segments, images in self._images(copies):
                    for segment, image in zip(segments, images, strict=True):
                        written[segment] = capture.image_id, writer.add(segment, image)
                        self._copier.release(copies, segment)
                writer.finish()
            except BaseException:
                writer.abandon()
                raise
        except BaseException:
            self._copy_ahead.submit(lambda: None).result()  # a copy may be running
            for segment in copies.used:
                self.extents.pop(segment, None)
            self._copier.abandon(copies)
            raise
        self.extents.update(written)

    def _images(self, copies: SegmentCopies) -> Iterator[tuple[list[int], list[np.ndarray]]]:
        """Some segments at a time, and their images; the next ones are copied while these are written."""
        segments, step = list(copies.used), max(1, self._copier.max_copies // 2)
        parts = [segments[start : start + step] for start in range(0, len(segments), step)]
        next_images = self._copy_ahead.submit(self._copier.copy, copies, parts[0])
        for part, following in zip(parts, [*parts[1:], None], strict=True):
            images = next_images.result()
            if following is not None:
                next_images = self._copy_ahead.submit(self._copier.copy, copies, following)
            yield part, images

    def close(self) -> None:
        self._copy_ahead.shutdown(wait=True)
