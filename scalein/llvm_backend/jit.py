"""LLVM: verify, optimise and emit a module, and link object code that `object_loader.py` cannot. Kernels from the cache
do without all of this.
"""

from __future__ import annotations

import itertools
from functools import cache

from llvmlite import binding as llvm

from scalein.errors import InternalError
from scalein.layout import Frame
from scalein.llvm_backend.object_loader import SIGNATURE, Kernel
from scalein.llvm_backend.target import LLVM_LOCK, Target

_library_names = itertools.count()


def optimised(text: str, target: Target, brief: bool = False) -> llvm.ModuleRef:
    """The module of `text`, verified and run through LLVM's pipeline for the target.

    `brief` leaves the vectorizer out: a third of the compile time, for kernels that see few rows.
    """
    with LLVM_LOCK:
        try:
            module = llvm.parse_assembly(text)
            module.verify()
        except RuntimeError as error:
            raise InternalError(f"LLVM refuses the generated code: {error}") from error
        machine = _machine(target)
        tuning = llvm.create_pipeline_tuning_options(speed_level=1 if brief else 2)
        tuning.loop_vectorization = not brief
        tuning.slp_vectorization = False
        # Interleaving and unrolling made no workload faster here, and every kernel a third slower to compile; but
        # short loops of the user's own, unrolled, leave straight code that is computed for several rows at once.
        tuning.loop_interleaving = False
        tuning.loop_unrolling = not brief and '@"udf.' in text
        builder = llvm.create_pass_builder(machine, tuning)
        builder.getModulePassManager().run(module, builder)
        return module


@cache
def _machine(target: Target) -> llvm.TargetMachine:
    return target.machine()


def emit(text: str, target: Target, brief: bool = False) -> bytes:
    """Object code of a module's text."""
    with LLVM_LOCK:
        return bytes(_machine(target).emit_object(optimised(text, target, brief)))


def assembly(text: str, target: Target, brief: bool = False) -> str:
    with LLVM_LOCK:
        return str(_machine(target).emit_assembly(optimised(text, target, brief)))


@cache
def _lljit() -> llvm.LLJIT:
    # JITLink puts the sections of an object side by side. LLVM's older linker maps each on its own, and
    # aborts the process when large tables leave no room for two of them within 2 GiB of each other.
    return llvm.create_lljit_compiler(use_jit_link=True)


def link(name: str, image: bytes, frame: Frame) -> Kernel:
    """A kernel from object code; raises RuntimeError on a damaged image."""
    with LLVM_LOCK:
        library = f"{name}.{next(_library_names)}"
        tracker = (llvm.JITLibraryBuilder().add_object_img(image).add_current_process()
                   .export_symbol(name).link(_lljit(), library))
        return Kernel(name, frame, SIGNATURE(tracker[name]), tracker)
