"""Prefetching: several read tasks (files, row groups) run in threads, their items are delivered in order.

Each task has a queue; the consumer drains the oldest one. A thread waits while its queue is full or all queues together
hold too many bytes, and starts no task while there are too many queues: that bounds memory. The oldest queue is always
being filled or complete and may always hold one item, so there is no deadlock. An error is raised in the place of the
item that failed. Closing the iterator ends the threads.

The number of threads is decided in `files.py`; a job reads ahead of its own in `jobs/source_readers.py`.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

Item = TypeVar("Item")
ReadTask = Callable[[], Iterator[Item]]

POLL_S = 0.02  # between two polls for a new task
DEPTH = 2


def read_ahead(tasks: Iterator[ReadTask[Item] | None], threads: int, quiet_s: float, depth: int = DEPTH,
          size_of: Callable[[Item], int] = lambda item: 0, most_bytes: int | None = None,
          tasks_wait: bool = True) -> Iterator[Item | None]:
    """The items of all tasks in order; None whenever there was no item for `quiet_s`. A queue holds `depth` items.

    `tasks` is advanced by one thread at a time; it yields None when there is no task now, but may be one later. Threads
    wait while the queues hold more than `most_bytes` together, by `size_of` each item. With `tasks_wait=False` a task
    never waits for input: one without items is busy, and None comes only while there is no task.
    """
    prefetcher = _Prefetcher(tasks, threads, depth, size_of, most_bytes, tasks_wait)
    try:
        yield from prefetcher.items(quiet_s)
    finally:
        prefetcher.stop()


class _Queue(Generic[Item]):
    __slots__ = ("error", "is_done", "items")

    def __init__(self) -> None:
        self.items: deque[Item] = deque()
        self.is_done = False
        self.error: BaseException | None = None


class _Prefetcher(Generic[Item]):
    """Threads and their queues; every attribute below is guarded by `_turn`."""

    def __init__(self, tasks: Iterator[ReadTask[Item] | None], threads: int, depth: int, size_of: Callable[[Item], int],
                 most_bytes: int | None, tasks_wait: bool) -> None:
        self._tasks, self._depth, self._most_bytes, self._tasks_wait = tasks, depth, most_bytes, tasks_wait
        self._size_of = (lambda item: 0) if most_bytes is None else size_of
        self._bytes = 0  # that queues hold
        self._turn = threading.Condition()
        self._queues: deque[_Queue[Item]] = deque()
        self._max_queues = threads + 2
        self._is_asking = False  # a thread is advancing `tasks`
        self._is_exhausted = False  # there will be no further task
        self._is_stopped = False
        self._threads = [threading.Thread(target=self._work, name=f"scalein-read-{k}", daemon=True)
                         for k in range(threads)]
        for thread in self._threads:
            thread.start()

    def items(self, quiet_s: float) -> Iterator[Item | None]:
        while True:
            with self._turn:
                found = self._next(quiet_s)
            if found is None:
                return
            yield found[0] if found else None

    def _next(self, quiet_s: float) -> tuple[Item, ...] | None:
        """One item, () if there was none in time, None at the end."""
        while True:
            queue = self._queues[0] if self._queues else None
            if queue is None and self._is_exhausted:
                return None
            if queue is not None and queue.items:
                item = queue.items.popleft()
                self._bytes -= self._size_of(item)
                self._turn.notify_all()
                return (item,)
            if queue is not None and queue.error is not None:
                raise queue.error
            if queue is not None and queue.is_done:
                self._queues.popleft()
                self._turn.notify_all()
            elif not self._turn.wait(quiet_s) and (self._tasks_wait or not self._queues):
                return ()

    def stop(self) -> None:
        with self._turn:
            self._is_stopped = True
            self._turn.notify_all()
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        while (taken := self._take()) is not None:
            task, queue = taken
            try:
                items = task()
                for item in items:
                    if not self._put(queue, item):
                        return
                error = None
            except BaseException as raised:  # handed to the consumer, whatever it is
                error = raised
            with self._turn:
                queue.is_done, queue.error = True, error
                self._turn.notify_all()

    def _put(self, queue: _Queue[Item], item: Item) -> bool:
        size = self._size_of(item)
        with self._turn:
            while not self._is_stopped and (len(queue.items) >= self._depth or not self._has_room(queue, size)):
                self._turn.wait()
            queue.items.append(item)
            self._bytes += size
            self._turn.notify_all()
            return not self._is_stopped

    def _has_room(self, queue: _Queue[Item], size: int) -> bool:
        is_needed = queue is self._queues[0] and not queue.items  # the consumer waits for it
        return is_needed or self._most_bytes is None or self._bytes + size <= self._most_bytes

    def _take(self) -> tuple[ReadTask[Item], _Queue[Item]] | None:
        """The next task with its queue, or None when there is nothing left to do."""
        with self._turn:
            while (self._is_asking or len(self._queues) >= self._max_queues) and not self._is_stopped:
                self._turn.wait()
            if self._is_stopped or self._is_exhausted:
                return None
            self._is_asking = True
        task: ReadTask[Item] | None = None
        error: BaseException | None = None
        is_exhausted = False
        while task is None and not is_exhausted:
            try:
                task = next(self._tasks)
            except StopIteration:
                is_exhausted = True
            except BaseException as raised:
                is_exhausted, error = True, raised
            with self._turn:
                if task is None and not is_exhausted:
                    self._turn.wait(POLL_S)
                if self._is_stopped:
                    is_exhausted = True
        with self._turn:
            self._is_asking, self._is_exhausted = False, is_exhausted
            queue: _Queue[Item] = _Queue()
            if task is not None or error is not None:
                queue.is_done, queue.error = error is not None, error
                self._queues.append(queue)
            self._turn.notify_all()
        return None if task is None else (task, queue)
