"""Threads that take units until there are none. Kernels release the GIL, so they run side by side.

Threads live here and in `pipe.py`. The units' iterator is the user's source: it is advanced under a
lock, by whichever worker comes next. The first error stops everyone and is raised in the caller.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from functools import partial
from typing import Protocol, TypeVar

from scalein.options import STARTUP_CPUS
from scalein.runtime.stopping import heed

Work = TypeVar("Work", contravariant=True)


class Does(Protocol[Work]):
    def do(self, unit: Work, /) -> None: ...


def each_worker(workers: Sequence[Does[Work]], work: Iterator[Work]) -> None:
    """Run all units, each on one of the workers."""
    if len(workers) == 1:
        for unit in work:
            workers[0].do(unit)
        return
    lock, stop = threading.Lock(), threading.Event()

    def loop(worker: Does[Work]) -> None:
        while not stop.is_set():
            with lock:
                unit = next(work, None)
            if unit is None:
                return
            worker.do(unit)

    side_by_side([partial(loop, worker) for worker in workers], stop)


def begin(stop: threading.Event, workers: int) -> None:
    """What a worker's thread does first: heed `stop`, and leave a core that all would have to share.

    A thread inherits the affinity of whoever starts it. A caller that was pinned to one core, as native
    libraries do to the threads they are called on, would have all workers share that core.
    """
    heed(stop)
    if STARTUP_CPUS and len(os.sched_getaffinity(0)) < min(workers, len(STARTUP_CPUS)):
        with suppress(OSError):  # the CPUs may be gone by now
            os.sched_setaffinity(0, STARTUP_CPUS)


def side_by_side(jobs: Sequence[Callable[[], None]], stop: threading.Event | None = None) -> None:
    """Run functions in threads of their own; an error, or Ctrl-C, sets `stop` and is raised here."""
    if len(jobs) == 1:
        jobs[0]()
        return
    stop = stop or threading.Event()
    errors: list[BaseException] = []

    ended: list[Callable[[], None]] = []
    all_ended = threading.Event()

    def guarded(job: Callable[[], None]) -> None:
        begin(stop, len(jobs))
        try:
            job()
        except BaseException as error:
            errors.append(error)
            stop.set()
        finally:
            ended.append(job)
            if len(ended) == len(jobs):
                all_ended.set()

    threads = [threading.Thread(target=guarded, args=(job,), name=f"scalein-{k}", daemon=True)
               for k, job in enumerate(jobs)]
    try:
        for thread in threads:
            thread.start()
    except RuntimeError:  # a limit of the process
        stop.set()
        for thread in threads:
            if thread.ident is not None:  # started
                thread.join()
        raise
    try:
        all_ended.wait()  # not `join`: interrupted once, it takes the thread for ended
    except BaseException:
        stop.set()
        all_ended.wait()
        raise
    if errors:
        raise errors[0]


class Crew:
    """Workers that stay for the next call, for jobs of a millisecond: the caller is the first, others have threads.

    Callers may come at once: then they share the threads.
    """

    def __init__(self, workers: int) -> None:
        self._others = ThreadPoolExecutor(max(1, workers - 1), "scalein-crew")  # starts threads when they are needed

    def run(self, job: Callable[[int], None], workers: int) -> None:
        """Call `job` with the numbers of so many workers, side by side; the first error is raised when all have ended.

        An error, or Ctrl-C, stops the others.
        """
        stop, errors = threading.Event(), list[BaseException]()

        def guarded(worker: int) -> None:
            try:
                begin(stop, workers)
                job(worker)
            except BaseException as error:
                errors.append(error)
                stop.set()

        others: list[Future[None]] = []
        try:
            for worker in range(1, workers):
                others.append(self._others.submit(guarded, worker))
            job(0)
            wait(others)
        except BaseException:
            stop.set()
            wait(others)
            raise
        if errors:
            raise errors[0]
