"""Worker threads: not bound to the one core their starter was pinned to."""

from __future__ import annotations

import os
import threading

import pytest

from scalein.options import STARTUP_CPUS
from scalein.runtime.workers import side_by_side


@pytest.mark.skipif(len(STARTUP_CPUS) < 2, reason="needs two CPUs to tell them apart")
def test_workers_of_a_pinned_caller_are_not_pinned() -> None:
    seen: list[set[int]] = []

    def caller() -> None:
        os.sched_setaffinity(0, {min(STARTUP_CPUS)})  # this thread only
        side_by_side([lambda: seen.append(os.sched_getaffinity(0)) for _ in range(2)])

    thread = threading.Thread(target=caller)
    thread.start()
    thread.join()
    assert seen == [set(STARTUP_CPUS)] * 2
