"""Kernels with loops of the user's (`@si.udf`), run so that they can be told to end.

Such a kernel may run for as long as the user's loop does. It runs in a thread of its own while the caller waits, so
that Ctrl-C and a run that ended elsewhere reach the caller, which sets the frame's `stop`: every loop looks at it.
"""

from __future__ import annotations

import threading

from scalein.kernels.stopping import leave_if_stopped
from scalein.layout import FrameData
from scalein.llvm_backend.jit import Kernel

_LOOK_S = 0.05


def enter(kernel: Kernel, frame: FrameData) -> int:
    """Call the kernel; gives its status."""
    if "stop" not in frame:
        return kernel.call(frame.address)
    status: list[int] = []
    thread = threading.Thread(target=lambda: status.append(kernel.call(frame.address)), name="scalein-udf", daemon=True)
    thread.start()
    try:
        while thread.is_alive():
            thread.join(_LOOK_S)
            leave_if_stopped()
    except BaseException:
        frame["stop"] = 1
        thread.join()  # it reads and writes the caller's memory
        frame["stop"] = 0
        raise
    return status[0]
