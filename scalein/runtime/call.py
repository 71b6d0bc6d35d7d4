"""One call of a kernel, and the errors it reports."""

from __future__ import annotations

import time

from scalein.errors import ComputeError
from scalein.layout import ERROR, FrameData
from scalein.llvm_backend.cache import Compiled, load_kernel
from scalein.ir.stages import Stage
from scalein.options import Options
from scalein.runtime.profile import Profile, current


def kernel(stage: Stage, options: Options) -> Compiled:
    """The stage's kernel; whoever listens is told."""
    compiled = load_kernel(stage, options)
    profile = current()
    if profile is not None:
        profile.met(stage, compiled)
    return compiled


def call(compiled: Compiled, frame: FrameData) -> int:
    """Run the kernel until it is done or wants something; raises for a row that failed."""
    profile = current()
    if profile is None:
        status = compiled.kernel.call(frame.address)
    else:
        status = _measured(compiled, frame, profile)
    if status == ERROR:
        raise failure(compiled, frame["errors"])
    return status


def _measured(compiled: Compiled, frame: FrameData, profile: Profile) -> int:
    first, written = frame["row"], frame["out.count"] if "out.count" in frame else 0
    started = time.perf_counter()
    status = compiled.kernel.call(frame.address)
    took = time.perf_counter() - started
    now = frame["out.count"] if "out.count" in frame else 0
    profile.called(compiled, frame["row"] - first, took, now - written)
    return status


def failure(compiled: Compiled, bits: int) -> ComputeError:
    """The first expression, in the order of the plan, that failed in some row."""
    number = next(k for k in range(64) if bits >> k & 1)
    return ComputeError(compiled.errors[number])
