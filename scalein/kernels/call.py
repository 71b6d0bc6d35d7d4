"""One call of a kernel, and the errors it reports."""

from __future__ import annotations

import ctypes
import threading
import time

import pyarrow as pa
import pyarrow.ipc

from scalein.cancellation import POLL_S, raise_if_cancelled
from scalein.errors import ComputeError, InternalError
from scalein.ir.stages import Stage
from scalein.kernels import kernel_metrics
from scalein.kernels.kernel_metrics import Profile, current_profile
from scalein.layout import COLUMN, DONE, ERROR, OUT_OF_BOUNDS, PAUSED, FrameData
from scalein.llvm_backend.cache import Compiled, load_kernel
from scalein.llvm_backend.object_loader import Kernel
from scalein.options import Options

MAX_SHOWN = 80  # bytes of a text in an error
MAX_ROWS = 1 << 19  # of one call, a few milliseconds, so that Ctrl-C takes effect soon; whole blocks


def kernel(stage: Stage, options: Options) -> Compiled:
    """The compiled kernel of a stage; recorded in the current profile, if any."""
    started = time.perf_counter()
    compiled = load_kernel(stage, options)
    profile = current_profile()
    if profile is not None:
        profile.add_kernel(stage, compiled, time.perf_counter() - started)
    return compiled


def call(compiled: Compiled, frame: FrameData) -> int:
    """Run the kernel until it is done or needs something of the caller; raises for a row that failed."""
    profile, counters = current_profile(), kernel_metrics.current_counters()
    first, started = frame["row"] if counters is not None else 0, time.perf_counter()
    end = frame["end"] if compiled.is_divisible else 0
    while True:
        raise_if_cancelled()
        is_part = end > MAX_ROWS and end - frame["row"] > MAX_ROWS
        if is_part:
            frame["end"] = frame["row"] + MAX_ROWS
        status = enter(compiled.kernel, frame) if profile is None else _measured(compiled, frame, profile)
        if is_part:
            frame["end"] = end
        if status != PAUSED and not (status == DONE and is_part):
            break
    if counters is not None:
        counters.useful_s += time.perf_counter() - started
        if compiled.row_bytes:
            rows = frame["row"] - first
            counters.rows, counters.bytes = counters.rows + rows, counters.bytes + rows * compiled.row_bytes
    if status == OUT_OF_BOUNDS:
        raise _unsafe(compiled, frame)
    if status == ERROR:
        raise _failure(compiled, frame)
    return status


def _measured(compiled: Compiled, frame: FrameData, profile: Profile) -> int:
    first, written = frame["row"], frame.get("out.count", 0)
    elsewhere_s: list[float] = []
    started = time.thread_time()  # a kernel never waits: what else runs on the machine does not count
    status = enter(compiled.kernel, frame, elsewhere_s)
    here_s = time.thread_time() - started
    rows, frame.rows = frame.rows or frame["row"] - first, 0
    profile.add_call(compiled, rows, here_s, sum(elsewhere_s), frame.get("out.count", 0) - written)
    return status


def _unsafe(compiled: Compiled, frame: FrameData) -> InternalError:
    """Safe mode caught an access outside of its memory; the batch is written to a file, so that it can be replayed."""
    arrays = {name.removeprefix(COLUMN): column for name, column in frame.keep.items() if isinstance(column, pa.Array)}
    batch = pa.table({name: column for name, column in arrays.items() if len(column) == frame["end"]})
    import tempfile

    descriptor, path = tempfile.mkstemp(prefix="scalein-replay-", suffix=".arrow")
    with open(descriptor, "wb") as file, pa.ipc.new_file(file, batch.schema) as writer:
        writer.write_table(batch)
    return InternalError(f"the kernel {compiled.kernel.name!r} left {compiled.checks[frame['unsafe']]}",
                         found=f"in the block of rows from {frame['row']}", replay=path,
                         hint="the Arrow data is damaged (try table.validate(full=True)), or this is a bug of ours")


def _failure(compiled: Compiled, frame: FrameData) -> ComputeError:
    """The first expression, in the order of the plan, that failed in some row."""
    bits = frame["errors"]
    number = next(k for k in range(64) if bits >> k & 1)
    others = len(compiled.errors) - 64
    if number == 63 and others > 0:  # the last bit is shared
        return ComputeError(f"{compiled.errors[number]}, or in one of the {others} expressions after it")
    found = None
    if frame.get("bad.error", 0) >> number & 1:
        text = ctypes.string_at(frame["bad.text"], min(frame["bad.size"], MAX_SHOWN))
        found = repr(text.decode(errors="replace")) + (" ..." if frame["bad.size"] > MAX_SHOWN else "")
    return ComputeError(compiled.errors[number], found=found)


# Kernels with loops of the user (`@si.udf`), run so that they can be cancelled.
#
# Such a kernel may run for as long as the user's loop does. It runs in a thread of its own while the caller waits, so
# that Ctrl-C and cancellation reach the caller, which sets the frame's `stop`: every loop checks it.


def enter(kernel: Kernel, frame: FrameData, elsewhere_s: list[float] | None = None) -> int:
    """Call the kernel; returns its status. What it took of the CPU in a thread of its own goes to `elsewhere_s`."""
    if "stop" not in frame:
        return kernel.call(frame.address)
    status: list[int] = []
    done = threading.Event()  # not `join`: after Ctrl-C in it, Python 3.11 takes the thread for ended

    def run() -> None:
        status.append(kernel.call(frame.address))
        if elsewhere_s is not None:
            elsewhere_s.append(time.thread_time())  # all that the thread has done
        done.set()

    threading.Thread(target=run, name="scalein-udf", daemon=True).start()
    try:
        while not done.wait(POLL_S):
            raise_if_cancelled()
    except BaseException:
        frame["stop"] = 1
        done.wait()  # it reads and writes the caller's memory
        frame["stop"] = 0
        raise
    return status[0]
