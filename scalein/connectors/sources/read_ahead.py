"""Reading ahead: several units of work (files, row groups) decoded at once on own threads, delivered in order.

Each unit fills a lane of its own; the consumer empties the oldest lane. A thread waits when its lane is full, or all
lanes together hold too many bytes, and takes no new unit while `lanes` are there: that bounds what is held. The oldest
lane is always being worked on or complete, and may always hold an item, so nothing waits for ever. An error is raised
where its item would have come. Closing the iterator ends the threads.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

Item = TypeVar("Item")
Unit = Callable[[], Iterator[Item]]

POLL_S = 0.02  # between two questions whether there is a new unit
DEPTH = 2


def ahead(units: Iterator[Unit[Item] | None], threads: int, quiet_s: float, depth: int = DEPTH,
          size_of: Callable[[Item], int] = lambda item: 0, most_bytes: int | None = None,
          units_wait: bool = True) -> Iterator[Item | None]:
    """The items of all units in order; None whenever there was no item for `quiet_s`. A lane holds `depth` items.

    `units` is asked by one thread at a time; it gives None when there is no unit now, but may be one later. Lanes
    wait while they hold more than `most_bytes` together, by `size_of` each item. If units do not wait for anybody, one
    that has given no item for long is at work, and None comes only while there is no unit.
    """
    crew = _Crew(units, threads, depth, size_of, most_bytes, units_wait)
    try:
        yield from crew.items(quiet_s)
    finally:
        crew.stop()


class _Lane(Generic[Item]):
    __slots__ = ("error", "is_done", "items")

    def __init__(self) -> None:
        self.items: deque[Item] = deque()
        self.is_done = False
        self.error: BaseException | None = None


class _Crew(Generic[Item]):
    """Threads and their lanes; every attribute below belongs to whoever holds `_turn`."""

    def __init__(self, units: Iterator[Unit[Item] | None], threads: int, depth: int, size_of: Callable[[Item], int],
                 most_bytes: int | None, units_wait: bool) -> None:
        self._units, self._depth, self._most_bytes, self._units_wait = units, depth, most_bytes, units_wait
        self._size_of = (lambda item: 0) if most_bytes is None else size_of
        self._bytes = 0  # that lanes hold
        self._turn = threading.Condition()
        self._lanes: deque[_Lane[Item]] = deque()
        self._most_lanes = threads + 2
        self._is_asking = False  # one thread is in `units`
        self._is_dry = False  # no unit will come
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
            lane = self._lanes[0] if self._lanes else None
            if lane is None and self._is_dry:
                return None
            if lane is not None and lane.items:
                item = lane.items.popleft()
                self._bytes -= self._size_of(item)
                self._turn.notify_all()
                return (item,)
            if lane is not None and lane.error is not None:
                raise lane.error
            if lane is not None and lane.is_done:
                self._lanes.popleft()
                self._turn.notify_all()
            elif not self._turn.wait(quiet_s) and (self._units_wait or not self._lanes):
                return ()

    def stop(self) -> None:
        with self._turn:
            self._is_stopped = True
            self._turn.notify_all()
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        while (taken := self._take()) is not None:
            unit, lane = taken
            try:
                items = unit()
                for item in items:
                    if not self._put(lane, item):
                        return
                error = None
            except BaseException as raised:  # handed to the consumer, whatever it is
                error = raised
            with self._turn:
                lane.is_done, lane.error = True, error
                self._turn.notify_all()

    def _put(self, lane: _Lane[Item], item: Item) -> bool:
        size = self._size_of(item)
        with self._turn:
            while not self._is_stopped and (len(lane.items) >= self._depth or not self._has_room(lane, size)):
                self._turn.wait()
            lane.items.append(item)
            self._bytes += size
            self._turn.notify_all()
            return not self._is_stopped

    def _has_room(self, lane: _Lane[Item], size: int) -> bool:
        is_needed = lane is self._lanes[0] and not lane.items  # the consumer waits for it
        return is_needed or self._most_bytes is None or self._bytes + size <= self._most_bytes

    def _take(self) -> tuple[Unit[Item], _Lane[Item]] | None:
        """The next unit with its lane, or None when there is nothing left to do."""
        with self._turn:
            while (self._is_asking or len(self._lanes) >= self._most_lanes) and not self._is_stopped:
                self._turn.wait()
            if self._is_stopped or self._is_dry:
                return None
            self._is_asking = True
        unit: Unit[Item] | None = None
        error: BaseException | None = None
        is_dry = False
        while unit is None and not is_dry:
            try:
                unit = next(self._units)
            except StopIteration:
                is_dry = True
            except BaseException as raised:
                is_dry, error = True, raised
            with self._turn:
                if unit is None and not is_dry:
                    self._turn.wait(POLL_S)
                if self._is_stopped:
                    is_dry = True
        with self._turn:
            self._is_asking, self._is_dry = False, is_dry
            lane: _Lane[Item] = _Lane()
            if unit is not None or error is not None:
                lane.is_done, lane.error = error is not None, error
                self._lanes.append(lane)
            self._turn.notify_all()
        return None if unit is None else (unit, lane)
