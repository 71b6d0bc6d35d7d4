"""The kernel that doubles the index of a hash table: `llvm_backend/hash_index.py` has its loop."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from scalein.layout import FrameData
from scalein.llvm_backend.cache import load_lowered
from scalein.llvm_backend.jit import Kernel
from scalein.llvm_backend.target import Target
from scalein.memory import address
from scalein.options import Options

if TYPE_CHECKING:
    from scalein.llvm_backend.stage import Lowered


@dataclass(frozen=True, slots=True)
class Grow:
    """The compiled loop; one for all tables."""

    kernel: Kernel

    def split(self, moves: np.ndarray) -> None:
        """Move all words of tables into zeroed buckets. A row each: old, number of its buckets, new, shift, mask."""
        moves = np.ascontiguousarray(moves, np.int64)
        frame: FrameData = self.kernel.frame.new()
        frame["moves"], frame["count"] = address(moves), len(moves)
        self.kernel.call(frame.address)


def grow_kernel(options: Options) -> Grow:
    return Grow(load_lowered("grow", _lower, options).kernel)


def _lower(target: Target) -> Lowered:
    from scalein.llvm_backend.hash_index import lower_doubling  # LLVM's builder: only a compiling process needs it

    return lower_doubling()
