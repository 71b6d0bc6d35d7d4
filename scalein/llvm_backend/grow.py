"""Doubling a key group's table: every word goes to one of two buckets by its tag's next bit.

No record is looked at. Words keep their order within a bucket; where a bucket overflows, the word
goes on to the next one, as it did before.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from scalein.layout import ADDRESS_BITS, BUCKET_WORDS, DONE, FrameData
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
    from scalein.llvm_backend.fn import I64, PTR, Fn, const  # LLVM's builder: only who compiles needs it
    from scalein.llvm_backend.stage import Lowered

    f = Fn("grow")
    b = f.b
    moves = f.slot("moves", PTR)
    with f.loop(f.slot("count"), rare=True) as k:
        row = b.mul(k, const(5))
        old, new = (f.load(moves, b.add(row, const(at)), PTR) for at in (0, 2))
        buckets, shift, mask = (f.load(moves, b.add(row, const(at)), I64) for at in (1, 3, 4))
        last = b.add(b.mul(mask, const(BUCKET_WORDS)), const(BUCKET_WORDS - 1))
        with f.loop(b.mul(buckets, const(BUCKET_WORDS)), rare=True) as i:
            word = f.load(old, i, I64)
            with f.when(b.icmp_unsigned("!=", word, const(0))):
                tag = b.lshr(word, const(ADDRESS_BITS))
                place = f.var(I64, b.mul(b.lshr(tag, shift), const(BUCKET_WORDS)))
                with f.forever() as probe:
                    probe.stop_if(b.icmp_unsigned("==", f.load(new, place.get(), I64), const(0)))
                    following = b.add(place.get(), const(1))
                    place.set(b.select(b.icmp_signed(">", following, last), const(0), following))
                f.store(word, new, place.get())
    b.ret(const(DONE))
    frame = f.finish()
    return Lowered("grow", f.text(), frame, (), (), ())
