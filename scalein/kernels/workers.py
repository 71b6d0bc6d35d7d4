"""Threads that take units until there are none. Kernels release the GIL, so they run side by side.

Threads live here and in `pipe.py`. The units' iterator is the user's source: it is advanced under a
lock, by whichever worker comes next. The first error stops everyone and is raised in the caller.
"""

from __future__ import annotations

import os
import signal
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from queue import SimpleQueue
from typing import Protocol, TypeVar

from scalein.kernels import kernel_metrics
from scalein.options import STARTUP_CPUS

Work = TypeVar("Work", contravariant=True)
_thread = threading.local()


class Does(Protocol[Work]):
    def do(self, unit: Work, /) -> None: ...


def each_worker(workers: Sequence[Does[Work]], work: Iterator[Work], deal: Callable[[int], int] | None = None) -> None:
    """Run all units, each on one of the workers: the first that is free, or the one that `deal` gives it to."""
    if len(workers) == 1:
        for unit in work:
            workers[0].do(unit)
        return
    lock, stop = threading.Lock(), threading.Event()
    dealt: list[deque[Work]] = [deque() for _ in workers]  # units that `deal` gave to workers which are busy

    def loop(number: int, worker: Does[Work]) -> None:
        while not stop.is_set():
            with lock:
                while deal is not None and not dealt[number] and (unit := next(work, None)) is not None:
                    dealt[deal(len(workers))].append(unit)
                unit = next(work, None) if deal is None else dealt[number].popleft() if dealt[number] else None
            if unit is None:
                return
            worker.do(unit)

    side_by_side([partial(loop, number, worker) for number, worker in enumerate(workers)], stop)


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
    """Run functions in threads of their own, or on workers that stay; an error, or Ctrl-C, sets `stop` and is raised
    here.
    """
    if len(jobs) == 1:
        jobs[0]()
        return
    crew: Crew | None = getattr(_thread, "crew", None)
    if crew is not None:
        crew.share(jobs, stop)
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

    Callers may come at once: each has threads of its own then. They end when the crew is gone.
    """

    def __init__(self) -> None:
        self._idle: list[_Tasks] = []  # of threads that have nothing to do
        weakref.finalize(self, _dismiss, self._idle)

    def run(self, job: Callable[[int], None], workers: int) -> None:
        """Call `job` with the numbers of so many workers, side by side."""
        if workers == 1:
            job(0)
            return
        self.share([partial(job, worker) for worker in range(workers)])

    def share(self, jobs: Sequence[Callable[[], None]], stop: threading.Event | None = None) -> None:
        """Run functions side by side; the first error is raised when all have ended.

        An error, or Ctrl-C, sets `stop`, which the others heed.
        """
        first, *others = jobs
        stop, errors, idle = stop or threading.Event(), list[BaseException](), self._idle
        counted = kernel_metrics.current()
        ends = [0.0] * len(jobs)
        begun, ended = 0, list[_Tasks]()
        one_ended = SimpleQueue[None]()

        def guarded(job: Callable[[], None], worker: int, own: _Tasks) -> None:
            try:
                begin(stop, len(jobs))
                with kernel_metrics.counting(counted, worker):
                    job()
                ends[worker] = time.perf_counter()
            except BaseException as error:
                errors.append(error)
                stop.set()
            finally:
                idle.append(own)  # before the caller knows: its next call finds this thread
                ended.append(own)
                one_ended.put(None)

        try:
            for job in others:
                tasks = _free(idle)
                tasks.put(partial(guarded, job, begun + 1, tasks))
                begun += 1
            first()
            ends[0] = time.perf_counter()
            while len(ended) < begun:
                one_ended.get()
        except BaseException:
            stop.set()
            while len(ended) < begun:  # counted by `ended`: Ctrl-C may come behind a `get`
                one_ended.get()
            raise
        if errors:
            raise errors[0]
        if counted is not None:
            for worker, end in enumerate(ends):
                counted.of(worker).wait_s += max(ends) - end


_Tasks = SimpleQueue[Callable[[], None] | None]  # of a thread of a crew; None ends it


def _free(idle: list[_Tasks]) -> _Tasks:
    """A thread that has nothing to do, else a new one."""
    with suppress(IndexError):  # not looked at before: another caller may take the last
        return idle.pop()
    tasks: _Tasks = SimpleQueue()
    threading.Thread(target=_work, args=(tasks,), name="scalein-crew", daemon=True).start()
    return tasks


def _work(tasks: _Tasks) -> None:
    while (task := tasks.get()) is not None:
        task()
        del task  # what it holds is the caller's


def _dismiss(idle: list[_Tasks]) -> None:
    for tasks in idle:
        tasks.put(None)


@contextmanager
def staying() -> Iterator[None]:
    """Within, the workers of this thread stay between one call and the next."""
    _thread.crew = Crew()
    try:
        yield
    finally:
        del _thread.crew


# Stopping: a thread whose run has ended elsewhere (error, Ctrl-C, abandoned iterator) leaves at its next pause.

_stop_thread = threading.local()


class Stopped(BaseException):
    """Ends a thread's work; nobody sees it, since the run has an error of its own or no reader any more."""


def heed(stop: threading.Event) -> None:
    """From now on this thread ends when `stop` is set."""
    _stop_thread.stop = stop


def leave_if_stopped() -> None:
    stop: threading.Event | None = getattr(_stop_thread, "stop", None)
    if stop is not None and stop.is_set():
        raise Stopped


@contextmanager
def leaving_on_sigterm() -> Iterator[None]:
    """Let SIGTERM end the process as `sys.exit` would, so that what waits can clean up; only the main thread may."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before if before is not None else signal.SIG_DFL)
