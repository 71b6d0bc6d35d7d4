"""Many reads at once past the page cache, by the kernel's asynchronous I/O: a part of the seam to the operating system.

A disk serves a hundred reads at once ten times as fast as one after the other, and what leaves no trace in the page
cache needs no room in a budget. Where the system or the file system has none of it, or a read fails, the same bytes are
read the plain way, which tells what is wrong.

Invariant: the memory of a `Window` is not given back while the kernel may still write to it: `wait`, `stop` and `close`
see to that.

Threads: a `Reader` is used by one at a time. It has a thread of its own that starts reads.
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
from scalein.storage.local import Input, aligned

WINDOWS = 3
DEPTH = 512  # reads of a window that are under way at once
# setup, destroy, submit, getevents
_CALLS = {"x86_64": (206, 207, 209, 208), "aarch64": (0, 1, 2, 4)}
_CONTROL = np.dtype([("data", "<u8"), ("key", "<u4"), ("flags", "<u4"), ("opcode", "<u2"), ("priority", "<i2"),
                     ("file", "<u4"), ("into", "<u8"), ("size", "<u8"), ("offset", "<i8"), ("rest", "<u8", 2)])
_EVENT = np.dtype([("data", "<u8"), ("control", "<u8"), ("result", "<i8"), ("more", "<i8")])


class _System:
    """The four system calls; each gives its result, or minus the error's number."""

    def __init__(self, calls: tuple[int, int, int, int]) -> None:
        self._setup, self._destroy, self._submit, self._events = calls
        self._call = ctypes.CDLL(None, use_errno=True).syscall
        self._call.restype = ctypes.c_long

    def _result(self, *args: int) -> int:
        found: int = self._call(*map(ctypes.c_long, args))
        return found if found >= 0 else -ctypes.get_errno()

    def setup(self) -> int:
        """A context; 0 if there is none to be had."""
        context = np.zeros(1, np.uint64)
        return int(context[0]) if self._result(self._setup, DEPTH, address(context)) >= 0 else 0

    def destroy(self, context: int) -> None:
        """Waits for what is under way."""
        self._result(self._destroy, context)

    def submit(self, context: int, controls: np.ndarray) -> int:
        """Start reads, given by the addresses of their controls; how many were started."""
        return self._result(self._submit, context, len(controls), address(controls))

    def events(self, context: int, least: int, events: np.ndarray) -> int:
        """Wait until so many reads have ended; how many did, as far as there is room for them."""
        return self._result(self._events, context, least, len(events), address(events), 0)


@cache
def _system() -> _System | None:
    calls = _CALLS.get(platform.machine())
    return None if calls is None else _System(calls)


_free: list[int] = []  # contexts that nobody uses: to give one back to the system takes some 20 ms
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_free.clear)  # a child has none of its parent's


class Window:
    """Memory that pieces of files are read into, one behind the other."""

    def __init__(self, size_bytes: int) -> None:
        self._area = aligned(size_bytes)
        self._system = _system()
        self._context = 0
        if self._system is not None:
            try:
                self._context = _free.pop()
            except IndexError:
                self._context = self._system.setup()
        self._controls = np.zeros(0, _CONTROL)
        self._inputs: Sequence[Input] = ()
        self._pieces = np.zeros((4, 0), np.int64)  # of each piece its input, offset, bytes, and place in the window
        self._results = np.zeros(0, np.int64)  # bytes that the kernel read of each
        self._under_way = 0

    @property
    def size_bytes(self) -> int:
        return len(self._area)

    def start(self, inputs: Sequence[Input], which: np.ndarray, offsets: np.ndarray, sizes: np.ndarray) -> None:
        """Begin to read blocks: `which` of the inputs, where, and how much: whole pages."""
        self.stop()  # what a caller left behind that was interrupted
        if int(sizes.sum()) > len(self._area):
            self._area = aligned(1 << int(sizes.sum() - 1).bit_length())
        is_head = np.ones(len(sizes), bool)  # neighbours are one piece
        is_head[1:] = (which[1:] != which[:-1]) | (offsets[1:] != offsets[:-1] + sizes[:-1])
        heads = np.flatnonzero(is_head)
        lengths = np.add.reduceat(sizes, heads) if len(heads) else sizes
        places = lengths.cumsum() - lengths
        self._inputs, self._pieces = inputs, np.stack((which[heads], offsets[heads], lengths, places))
        self._results = np.full(len(heads), -1, np.int64)
        descriptors = np.array([one.direct for one in inputs], np.int64)[which[heads]]
        if not self._context or (descriptors < 0).any():
            for number in range(len(heads)):
                one, offset, size, _ = self._piece(number)
                one.will_need(offset, size)
            return
        self._controls = controls = np.zeros(len(heads), _CONTROL)
        controls["data"] = np.arange(len(heads))
        controls["file"], controls["offset"], controls["size"] = descriptors, offsets[heads], lengths
        controls["into"] = places + address(self._area)
        self._submit(address(controls) + np.arange(len(heads), dtype=np.int64) * _CONTROL.itemsize)

    def _submit(self, controls: np.ndarray) -> None:
        """Start as many as the kernel takes; the others are read the plain way."""
        assert self._system is not None
        while len(controls):
            done = self._system.submit(self._context, controls)
            if done > 0:
                self._under_way += done
                controls = controls[done:]
            elif done == -errno.EAGAIN and self._under_way:
                self._reap(1)
            elif done != -errno.EINTR:
                return

    def _piece(self, number: int) -> tuple[Input, int, int, int]:
        which, offset, size, place = self._pieces[:, number].tolist()
        return self._inputs[which], offset, size, place

    def wait(self) -> np.ndarray:
        """What was read; the next `start` overwrites it."""
        self.stop()
        lengths = self._pieces[2]
        for number in np.flatnonzero(self._results != lengths).tolist():
            one, offset, size, place = self._piece(number)
            one.read_into(offset, self._area[place : place + size].data)
            one.forget(offset, size)
        return self._area[: int(lengths.sum())]

    def _reap(self, least: int) -> None:
        """Note the results of at least so many reads."""
        assert self._system is not None
        events = np.zeros(self._under_way, _EVENT)
        try:
            count = self._system.events(self._context, least, events)
        finally:  # Ctrl-C hides how many have ended, and who waited for those once more would wait for ever
            ended = events[events["control"] != 0]
            self._results[ended["data"].astype(np.int64)] = ended["result"]
            self._under_way -= len(ended)
        if count < 0 and count != -errno.EINTR:  # nothing is known, but nothing is under way any more either
            self._system.destroy(self._context)
            self._context = self._under_way = 0

    def stop(self) -> None:
        """Wait until the kernel writes nothing any more."""
        while self._under_way:
            self._reap(self._under_way)

    def shrink(self, size_bytes: int) -> None:
        """Give memory back that a larger part needed."""
        if len(self._area) > size_bytes:
            self.stop()
            self._area = aligned(size_bytes)

    def close(self) -> None:
        self.stop()
        if self._context:
            _free.append(self._context)
        self._context = 0

    def __del__(self) -> None:
        self.close()


class Wanted(Protocol):
    """Blocks of files, read one behind the other: `which` of the inputs, where, and how much: whole pages."""

    @property
    def inputs(self) -> Sequence[Input]: ...

    @property
    def which(self) -> np.ndarray: ...

    @property
    def offsets(self) -> np.ndarray: ...

    @property
    def sizes(self) -> np.ndarray: ...


W = TypeVar("W", bound=Wanted)


class _Reading(NamedTuple):
    window: Window
    started: Future[None]


class Reader:
    """Reads what is wanted, part by part; while one part is looked at, the next ones are being read."""

    def __init__(self, window_bytes: int, windows: int = WINDOWS) -> None:
        self.window_bytes, self._count = window_bytes, windows
        self._windows: list[Window] = []
        self._reading: deque[_Reading] = deque()
        self._starter = ThreadPoolExecutor(1, "scalein-read")  # to start a read waits where the disk's queue is full

    def read(self, parts: Iterable[W]) -> Generator[tuple[W, np.ndarray], None, None]:
        """Each part with its bytes, which the next step may overwrite."""
        self._stop()
        self._windows = self._windows or [Window(self.window_bytes) for _ in range(self._count)]
        free, wanted = list(self._windows), deque[W]()
        for part in parts:
            if not free:
                yield wanted.popleft(), self._bytes()
                free.append(self._reading.popleft().window)
            window = free.pop()
            started = self._starter.submit(window.start, part.inputs, part.which, part.offsets, part.sizes)
            self._reading.append(_Reading(window, started))
            wanted.append(part)
        while wanted:
            yield wanted.popleft(), self._bytes()
            self._reading.popleft()
        for window in self._windows:
            window.shrink(self.window_bytes)

    def _bytes(self) -> np.ndarray:
        """Those of the part that was started first."""
        window, started = self._reading[0]
        started.result()
        return window.wait()

    def _stop(self) -> None:
        """Wait for what a caller left behind that failed half-way."""
        while self._reading:
            self._reading[0].started.exception()
            self._reading.popleft().window.stop()

    @property
    def memory_bytes(self) -> int:
        return sum(window.size_bytes for window in self._windows)

    def close(self) -> None:
        self._starter.shutdown(wait=True)
        for window in self._windows:
            window.close()
