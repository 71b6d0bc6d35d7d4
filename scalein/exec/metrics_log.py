"""The log of a job, or of a stream on Spark: its figures as a line of JSON every second, which `scalein top` shows."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Mapping
from typing import Protocol

from scalein.errors import StoreFailed, here, warn


class Logged(Protocol):
    """What has figures, among them `rows_in`."""

    @property
    def status(self) -> str: ...

    def metrics(self) -> Mapping[str, object]: ...

    def await_end(self, timeout: float) -> bool: ...


def log_lines(job: Logged, path: str | os.PathLike[str], every_s: float = 1.0) -> threading.Thread:
    """Append a line of figures to a file every so often, and one at the end."""
    at = here()
    try:
        file = open(path, "a", encoding="utf-8")  # noqa: SIM115 (the thread closes it)
    except OSError as error:
        raise StoreFailed("cannot write the log of a job", at=at, file=path, found=error) from error

    def write() -> None:
        try:
            lines()
        except OSError as error:  # a full disk is no reason to end the job
            warn(f"the log of a job ends here: {path}: {error}", at)

    def lines() -> None:
        with file:
            before, then = int(str(job.metrics()["rows_in"])), time.monotonic()
            while True:
                job.await_end(every_s)
                status, found = job.status, job.metrics()  # in this order: figures beside "finished" are the last ones
                now, rows = time.monotonic(), int(str(found["rows_in"]))
                rate = round((rows - before) / max(now - then, 1e-9))
                before, then = rows, now
                line = {"time": round(time.time(), 3), "status": status, "rows_per_s": rate, **found}
                file.write(json.dumps(line, default=str) + "\n")
                file.flush()
                if status != "running":
                    return

    thread = threading.Thread(target=write, name="scalein-log", daemon=True)
    thread.start()
    return thread
