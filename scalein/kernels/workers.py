"""Worker threads that pull tasks, mostly morsels, until none are left; how many there are: `options.granted_cores`.

Kernels release the GIL, so they run in parallel. Threads are started here and in `exec/pipeline.py`. The iterator of
the tasks may be the user's source: it is advanced under a lock, by the next free worker. The first error cancels all
workers and is raised in the caller.
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
from queue import Empty, SimpleQueue
from typing import Protocol, TypeVar

from scalein.cancellation import POLL_S, cancel_on, raise_if_cancelled
from scalein.kernels import kernel_metrics
from scalein.options import STARTUP_CPUS

Task = TypeVar("Task", contravariant=True)
_thread = threading.local()


class Worker(Protocol[Task]):
    def process(self, task: Task, /) -> None: ...


def run_workers(workers: Sequence[Worker[Task]], tasks: Iterator[Task],
                assign: Callable[[int], int] | None = None) -> None:
    """Process all tasks, each on one of the workers: the next that is free, or the one that `assign` chooses."""
    if len(workers) == 1:
        for task in tasks:
            workers[0].process(task)
        return
    lock, stop = threading.Lock(), threading.Event()
    assigned: list[deque[Task]] = [deque() for _ in workers]  # tasks of workers that are still busy

    def loop(number: int, worker: Worker[Task]) -> None:
        while not stop.is_set():
            with lock:
                while assign is not None and not assigned[number] and (task := next(tasks, None)) is not None:
                    assigned[assign(len(workers))].append(task)
                task = next(tasks, None) if assign is None else assigned[number].popleft() if assigned[number] else None
            if task is None:
                return
            worker.process(task)

    run_parallel([partial(loop, number, worker) for number, worker in enumerate(workers)], stop)


def start_worker(stop: threading.Event, workers: int) -> None:
    """Set up the thread of a worker: `stop` cancels it, and it may run on all cores of the process.

    A thread inherits the CPU affinity of the thread that starts it. With a caller that is pinned to one core, as native
    libraries pin the threads of their callbacks, all workers would share that core.
    """
    cancel_on(stop)
    if STARTUP_CPUS and len(os.sched_getaffinity(0)) < min(workers, len(STARTUP_CPUS)):
        with suppress(OSError):  # the CPUs may be gone by now
            os.sched_setaffinity(0, STARTUP_CPUS)


def run_parallel(functions: Sequence[Callable[[], None]], stop: threading.Event | None = None) -> None:
    """Run functions in parallel, in this thread and in new ones or the resident ones; an error, or Ctrl-C, sets `stop`
    and is raised here.
    """
    if len(functions) == 1:
        functions[0]()
        return
    pool: ThreadPool | None = getattr(_thread, "pool", None)
    if pool is not None:
        pool.run_all(functions, stop)
        return
    pool = ThreadPool()
    try:
        pool.run_all(functions, stop)
    finally:
        pool.close()


class ThreadPool:
    """Threads that are reused by the next call, for functions that take a millisecond. The caller is worker 0.

    Concurrent callers get distinct threads. The threads end when the pool is collected.
    """

    def __init__(self) -> None:
        self._idle: list[_Tasks] = []  # queues of the idle threads
        weakref.finalize(self, _end_threads, self._idle)

    def close(self) -> None:
        """End the idle threads now: the traceback of an error may keep the pool from being collected."""
        _end_threads(self._idle)
        self._idle.clear()

    def run(self, function: Callable[[int], None], workers: int) -> None:
        """Call `function` with the number of each of `workers` workers, in parallel."""
        if workers == 1:
            function(0)
            return
        self.run_all([partial(function, worker) for worker in range(workers)])

    def run_all(self, functions: Sequence[Callable[[], None]], stop: threading.Event | None = None) -> None:
        """Run functions in parallel; the first error is raised when all have ended.

        An error, or Ctrl-C, sets `stop`, which cancels the others.
        """
        first, *others = functions
        stop, errors, idle = stop or threading.Event(), list[BaseException](), self._idle
        metrics = kernel_metrics.current_metrics()
        ends = [0.0] * len(functions)
        started, ended = 0, list[_Tasks]()
        one_ended = SimpleQueue[None]()

        def guarded(function: Callable[[], None], worker: int, own: _Tasks) -> None:
            try:
                start_worker(stop, len(functions))
                with kernel_metrics.recording(metrics, worker):
                    function()
                ends[worker] = time.perf_counter()
            except BaseException as error:
                errors.append(error)
                stop.set()
            finally:
                idle.append(own)  # before the caller is notified, so that its next call finds this thread
                ended.append(own)
                one_ended.put(None)

        try:
            for function in others:
                tasks = _idle_thread(idle)
                tasks.put(partial(guarded, function, started + 1, tasks))
                started += 1
            first()
            ends[0] = time.perf_counter()
            while len(ended) < started:
                with suppress(Empty):
                    one_ended.get(timeout=POLL_S)
                raise_if_cancelled()
        except BaseException:
            stop.set()
            while len(ended) < started:  # counted by `ended`: Ctrl-C may come right after a `get`
                one_ended.get()
            raise
        if errors:
            raise errors[0]
        if metrics is not None:
            for worker, end in enumerate(ends):
                metrics.of(worker).wait_s += max(ends) - end


_Tasks = SimpleQueue[Callable[[], None] | None]  # of one thread of a pool; None ends it


def _idle_thread(idle: list[_Tasks]) -> _Tasks:
    """The queue of an idle thread, else of a new one."""
    with suppress(IndexError):  # without a check before it: another caller may take the last
        return idle.pop()
    tasks: _Tasks = SimpleQueue()
    threading.Thread(target=_run_tasks, args=(tasks,), name="scalein-pool", daemon=True).start()
    return tasks


def _run_tasks(tasks: _Tasks) -> None:
    while (task := tasks.get()) is not None:
        task()
        del task  # it holds references of the caller


def _end_threads(idle: list[_Tasks]) -> None:
    for tasks in idle:
        tasks.put(None)


@contextmanager
def resident_threads() -> Iterator[None]:
    """Within, `run_parallel` in this thread reuses its threads from call to call."""
    _thread.pool = ThreadPool()
    try:
        yield
    finally:
        del _thread.pool


@contextmanager
def exit_on_sigterm() -> Iterator[None]:
    """Let SIGTERM end the process as `sys.exit` does, so that `finally` blocks run; only in the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def exit_(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, exit_)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before if before is not None else signal.SIG_DFL)
