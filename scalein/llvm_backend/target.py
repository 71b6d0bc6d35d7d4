"""The CPU that code is made for: name, features, target machine. Never guessed elsewhere.

How much LLVM optimises is decided in `jit.py` (`optimised`); for which kernels less (`brief`), in `kernels/prepare.py`.
LLVM is imported when it is needed: a kernel from the cache does without.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import llvmlite

from scalein.errors import BadArgument

if TYPE_CHECKING:
    from llvmlite import binding as llvm

# LLVM's own objects are not safe to use from several threads at once.
LLVM_LOCK = threading.RLock()


@dataclass(frozen=True, slots=True)
class Target:
    """A CPU by LLVM's name, with its features; part of every code-cache key."""

    triple: str
    cpu: str
    features: str

    @property
    def has_compress(self) -> bool:
        """In-register compress of 32-bit lanes (AVX-512F)."""
        return "+avx512f" in self.features.split(",")

    @property
    def version(self) -> str:
        return f"llvmlite {llvmlite.__version__}"

    def machine(self) -> llvm.TargetMachine:
        from llvmlite import binding as llvm

        initialise_llvm()
        target = llvm.Target.from_triple(self.triple)
        return target.create_target_machine(cpu=self.cpu, features=self.features, opt=3, reloc="pic",
                                            codemodel="default")


_LEVELS = ("x86-64", "x86-64-v2", "x86-64-v3", "x86-64-v4")


@cache
def initialise_llvm() -> None:
    """Load LLVM, and its code for the CPUs of this kind."""
    from llvmlite import binding as llvm

    with LLVM_LOCK:
        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()


@cache
def target_for(cpu: str) -> Target:
    """The target of a CPU name, as LLVM finds it; "native" is the CPU this process runs on."""
    from llvmlite import binding as llvm

    with LLVM_LOCK:
        initialise_llvm()
        triple = llvm.get_process_triple()
        if cpu == "native":
            host = llvm.get_host_cpu_features()
            features = host.flatten()
            if host.get("avx512f"):
                # 512-bit vectors pay for scans; LLVM prefers 256 on some server CPUs.
                features += ",-prefer-256-bit"
            name = llvm.get_host_cpu_name()
            if name.startswith("znver"):
                # On AMD's cores a gather takes longer than the loads that it stands for (Zen 4: 27 cycles for eight).
                features += ",+prefer-no-gather"
            return Target(triple, name, features)
        if cpu not in _LEVELS:
            raise BadArgument("no such CPU to compile for", found=repr(cpu), has=", ".join(("native", *_LEVELS)))
        features = "+avx512f" if cpu == "x86-64-v4" else ""
        return Target(triple, cpu, features)
