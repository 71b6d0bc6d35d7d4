"""One call of a kernel, and the errors it reports."""

from __future__ import annotations

from scalein.errors import ComputeError
from scalein.layout import ERROR, FrameData
from scalein.llvm_backend.cache import Compiled


def call(compiled: Compiled, frame: FrameData) -> int:
    """Run the kernel until it is done or wants something; raises for a row that failed."""
    status = compiled.kernel.call(frame.address)
    if status == ERROR:
        raise failure(compiled, frame["errors"])
    return status


def failure(compiled: Compiled, bits: int) -> ComputeError:
    """The first expression, in the order of the plan, that failed in some row."""
    number = next(k for k in range(64) if bits >> k & 1)
    return ComputeError(compiled.errors[number])
