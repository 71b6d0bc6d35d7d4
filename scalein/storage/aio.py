"""BlockReader: many concurrent block reads that bypass the page cache, with Linux's native asynchronous I/O.

A disk serves a hundred concurrent reads ten times as fast as sequential ones, and reads that bypass the page cache need
no share of a memory budget. Where the system or the file system has no asynchronous reads, or one fails, the same bytes
are read with `pread`, which reports the error.

Invariant: the memory of a `ReadBuffer` is not freed while the kernel may still write to it: `wait`, `stop` and `close`
wait for the reads in flight.

Threads: a `BlockReader` is used by one thread at a time. It has a thread of its own that submits reads.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
from collections import deque
from collections.abc import Generator, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import NamedTuple, Protocol, TypeVar

import numpy as np

from scalein.memory import address
from scalein.storage.filesystem import Input, aligned_buffer

BUFFERS = 3  # of a reader: one is used while the others are filled
DEPTH = 512  # reads of a buffer in flight at once
# numbers of io_setup, io_destroy, io_submit, io_getevents
_CALLS = {"x86_64": (206, 207, 209, 208), "aarch64": (0, 1, 2, 4)}
_CONTROL = np.dtype([("data", "<u8"), ("key", "<u4"), ("flags", "<u4"), ("opcode", "<u2"), ("priority", "<i2"),
                     ("file", "<u4"), ("into", "<u8"), ("size", "<u8"), ("offset", "<i8"), ("rest", "<u8", 2)])
_EVENT = np.dtype([("data", "<u8"), ("control", "<u8"), ("result", "<i8"), ("more", "<i8")])


class _System:
    """The four system calls; each returns its result, or the negative error number."""

    def __init__(self, calls: tuple[int, int, int, int]) -> None:
        self._setup, self._destroy, self._submit, self._events = calls
        self._call = ctypes.CDLL(None, use_errno=True).syscall
        self._call.restype = ctypes.c_long

    def _result(self, *args: int) -> int:
        found: int = self._call(*map(ctypes.c_long, args))
        return found if found >= 0 else -ctypes.get_errno()

    def setup(self) -> int:
        """A context; 0 if the system has none left."""
        context = np.zeros(1, np.uint64)
        return int(context[0]) if self._result(self._setup, DEPTH, address(context)) >= 0 else 0

    def destroy(self, context: int) -> None:
        """Waits for the reads in flight."""
        self._result(self._destroy, context)

    def submit(self, context: int, controls: np.ndarray) -> int:
        """Start reads, given by the addresses of their control blocks; the number started."""
        return self._result(self._submit, context, len(controls), address(controls))

    def events(self, context: int, least: int, events: np.ndarray) -> int:
        """Wait until at least `least` reads have ended; the number of events filled in."""
        return self._result(self._events, context, least, len(events), address(events), 0)


@cache
def _system() -> _System | None:
    calls = _CALLS.get(platform.machine())
    return None if calls is None else _System(calls)


_free: list[int] = []  # unused contexts: destroying one takes some 20 ms
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_free.clear)  # contexts are not inherited


class ReadBuffer:
    """Memory into which ranges of files are read, contiguously."""

    def __init__(self, size_bytes: int) -> None:
        self._area = aligned_buffer(size_bytes)
        self._system = _system()
        self._context = 0
        if self._system is not None:
            try:
                self._context = _free.pop()
            except IndexError:
                self._context = self._system.setup()
        self._controls = np.zeros(0, _CONTROL)
        self._inputs: Sequence[Input] = ()
        self._ranges = np.zeros((4, 0), np.int64)  # of each range its input, offset, size, and position in the buffer
        self._results = np.zeros(0, np.int64)  # bytes that the kernel read of each range
        self._in_flight = 0

    @property
    def size_bytes(self) -> int:
        return len(self._area)

    def start(self, inputs: Sequence[Input], input_index: np.ndarray, offsets: np.ndarray, sizes: np.ndarray) -> None:
        """Start reading blocks, each given by the index of its input, its offset and its size: whole pages."""
        self.stop()  # an interrupted caller may have left reads in flight
        if int(sizes.sum()) > len(self._area):
            self._area = aligned_buffer(1 << int(sizes.sum() - 1).bit_length())
        is_head = np.ones(len(sizes), bool)  # adjacent blocks are one range
        is_head[1:] = (input_index[1:] != input_index[:-1]) | (offsets[1:] != offsets[:-1] + sizes[:-1])
        heads = np.flatnonzero(is_head)
        lengths = np.add.reduceat(sizes, heads) if len(heads) else sizes
        positions = lengths.cumsum() - lengths
        self._inputs, self._ranges = inputs, np.stack((input_index[heads], offsets[heads], lengths, positions))
        self._results = np.full(len(heads), -1, np.int64)
        descriptors = np.array([one.direct_fd for one in inputs], np.int64)[input_index[heads]]
        if not self._context or (descriptors < 0).any():
            for number in range(len(heads)):
                one, offset, size, _ = self._range(number)
                one.prefetch(offset, size)
            return
        self._controls = controls = np.zeros(len(heads), _CONTROL)
        controls["data"] = np.arange(len(heads))
        controls["file"], controls["offset"], controls["size"] = descriptors, offsets[heads], lengths
        controls["into"] = positions + address(self._area)
        self._submit(address(controls) + np.arange(len(heads), dtype=np.int64) * _CONTROL.itemsize)

    def _submit(self, controls: np.ndarray) -> None:
        """Start as many as the kernel accepts; `wait` reads the others with `pread`."""
        assert self._system is not None
        while len(controls):
            done = self._system.submit(self._context, controls)
            if done > 0:
                self._in_flight += done
                controls = controls[done:]
            elif done == -errno.EAGAIN and self._in_flight:
                self._reap(1)
            elif done != -errno.EINTR:
                return

    def _range(self, number: int) -> tuple[Input, int, int, int]:
        input_index, offset, size, position = self._ranges[:, number].tolist()
        return self._inputs[input_index], offset, size, position

    def wait(self) -> np.ndarray:
        """The bytes read; the next `start` overwrites them."""
        self.stop()
        lengths = self._ranges[2]
        for number in np.flatnonzero(self._results != lengths).tolist():
            one, offset, size, position = self._range(number)
            one.read_into(offset, self._area[position : position + size].data)
            one.drop_cache(offset, size)
        return self._area[: int(lengths.sum())]

    def _reap(self, least: int) -> None:
        """Collect the results of at least `least` reads."""
        assert self._system is not None
        events = np.zeros(self._in_flight, _EVENT)
        try:
            count = self._system.events(self._context, least, events)
        finally:  # Ctrl-C hides how many have ended; waiting for those again would never return
            ended = events[events["control"] != 0]
            self._results[ended["data"].astype(np.int64)] = ended["result"]
            self._in_flight -= len(ended)
        if count < 0 and count != -errno.EINTR:  # results are unknown; destroying the context waits for all reads
            self._system.destroy(self._context)
            self._context = self._in_flight = 0

    def stop(self) -> None:
        """Wait until no read is in flight."""
        while self._in_flight:
            self._reap(self._in_flight)

    def shrink(self, size_bytes: int) -> None:
        """Free memory that a larger request needed."""
        if len(self._area) > size_bytes:
            self.stop()
            self._area = aligned_buffer(size_bytes)

    def close(self) -> None:
        self.stop()
        if self._context:
            _free.append(self._context)
        self._context = 0

    def __del__(self) -> None:
        self.close()


class ReadRequest(Protocol):
    """Blocks of files, read contiguously: of each the index of its input, its offset and its size, in whole pages."""

    @property
    def inputs(self) -> Sequence[Input]: ...

    @property
    def input_index(self) -> np.ndarray: ...

    @property
    def offsets(self) -> np.ndarray: ...

    @property
    def sizes(self) -> np.ndarray: ...


R = TypeVar("R", bound=ReadRequest)


class _PendingRead(NamedTuple):
    buffer: ReadBuffer
    started: Future[None]


class BlockReader:
    """Reads requests in order; while the caller uses the bytes of one, the next ones are in flight."""

    def __init__(self, buffer_bytes: int, buffers: int = BUFFERS) -> None:
        self.buffer_bytes, self._count = buffer_bytes, buffers
        self._buffers: list[ReadBuffer] = []
        self._pending: deque[_PendingRead] = deque()
        self._submitter = ThreadPoolExecutor(1, "scalein-read")  # submitting blocks while the disk's queue is full

    def read(self, requests: Iterable[R]) -> Generator[tuple[R, np.ndarray], None, None]:
        """Each request with its bytes, which the next step may overwrite."""
        self._stop()
        self._buffers = self._buffers or [ReadBuffer(self.buffer_bytes) for _ in range(self._count)]
        free, waiting = list(self._buffers), deque[R]()
        for request in requests:
            if not free:
                yield waiting.popleft(), self._first_result()
                free.append(self._pending.popleft().buffer)
            buffer = free.pop()
            started = self._submitter.submit(buffer.start, request.inputs, request.input_index, request.offsets,
                                             request.sizes)
            self._pending.append(_PendingRead(buffer, started))
            waiting.append(request)
        while waiting:
            yield waiting.popleft(), self._first_result()
            self._pending.popleft()
        for buffer in self._buffers:
            buffer.shrink(self.buffer_bytes)

    def _first_result(self) -> np.ndarray:
        """The bytes of the oldest pending read."""
        buffer, started = self._pending[0]
        started.result()
        return buffer.wait()

    def _stop(self) -> None:
        """Wait for the reads of a caller that did not exhaust `read`."""
        while self._pending:
            self._pending[0].started.exception()
            self._pending.popleft().buffer.stop()

    @property
    def memory_bytes(self) -> int:
        return sum(buffer.size_bytes for buffer in self._buffers)

    def close(self) -> None:
        self._submitter.shutdown(wait=True)
        for buffer in self._buffers:
            buffer.close()