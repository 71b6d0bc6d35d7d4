"""Worker threads: not bound to the one core their starter was pinned to; errors reach the caller when all ended."""

from __future__ import annotations

import os
import threading

import pytest

from scalein.cancellation import raise_if_cancelled
from scalein.kernels import workers as workers_module
from scalein.kernels.workers import ThreadPool, resident_threads, run_parallel
from scalein.options import STARTUP_CPUS


@pytest.mark.skipif(len(STARTUP_CPUS) < 2, reason="needs two CPUs to tell them apart")
def test_workers_of_a_pinned_caller_are_not_pinned() -> None:
    seen: dict[bool, set[int]] = {}  # by whether it is the caller, which is a worker too

    def caller() -> None:
        os.sched_setaffinity(0, {min(STARTUP_CPUS)})  # this thread only
        run_parallel([lambda: seen.update({threading.current_thread() is thread: os.sched_getaffinity(0)})] * 2)

    thread = threading.Thread(target=caller)
    thread.start()
    thread.join()
    assert seen == {True: {min(STARTUP_CPUS)}, False: set(STARTUP_CPUS)}


def test_the_caller_is_worker_0_of_a_pool() -> None:
    pool, seen = ThreadPool(), dict[int, int]()

    def job(worker: int) -> None:
        seen[worker] = threading.get_ident()

    for workers in (3, 1, 2, 3):
        seen.clear()
        pool.run(job, workers)
        assert sorted(seen) == list(range(workers))
        assert seen[0] == threading.get_ident()


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_an_error_cancels_the_other_workers(failing: int) -> None:
    pool, ended = ThreadPool(), list[int]()

    def job(worker: int) -> None:
        try:
            if worker == failing:
                raise ZeroDivisionError
            while worker:  # the caller itself is not cancelled here
                raise_if_cancelled()
        finally:
            ended.append(worker)

    with pytest.raises(ZeroDivisionError):
        pool.run(job, 3)
    assert sorted(ended) == [0, 1, 2]
    pool.run(ended.append, 3)  # the next call is not affected
    assert len(ended) == 6


def test_a_worker_that_cannot_start_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rows would be missing."""

    def fails(stop: threading.Event, workers: int) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(workers_module, "start_worker", fails)
    with pytest.raises(OSError, match="not implemented"):
        ThreadPool().run(lambda worker: None, 2)


def test_resident_threads_are_reused_and_end_with_their_owner() -> None:
    calls: list[set[threading.Thread]] = []

    def caller() -> None:
        with resident_threads():
            for _ in range(3):
                here, met = set[threading.Thread](), threading.Barrier(3)

                def job(here: set[threading.Thread] = here, met: threading.Barrier = met) -> None:
                    here.add(threading.current_thread())
                    met.wait()

                run_parallel([job] * 3)
                calls.append(here)

    thread = threading.Thread(target=caller)
    thread.start()
    thread.join()
    assert calls[0] == calls[1] == calls[2]
    assert thread in calls[0]
    assert len(calls[0]) == 3
    for other in calls[0]:
        other.join(60)
        assert not other.is_alive()
