"""Doubling a key group's table: every word goes to one of two buckets by its tag's next bit.

No record is looked at. Words keep their order within a bucket; where a bucket overflows, the word
goes on to the next one, as it did before.
"""

from __future__ import annotations

from dataclasses import dataclass

from scalein.layout import ADDRESS_BITS, BUCKET_WORDS, DONE, FrameData
from scalein.llvm_backend.fn import I64, PTR, Fn, const
from scalein.llvm_backend.jit import Kernel, emit, link
from scalein.llvm_backend.target import target_for
from scalein.options import Options


@dataclass(frozen=True, slots=True)
class Grow:
    """The compiled loop; one for all tables."""

    kernel: Kernel

    def split(self, old: int, old_buckets: int, new: int, shift: int, mask: int) -> None:
        """Move all words of `old` into the zeroed buckets at `new`."""
        frame: FrameData = self.kernel.frame.new()
        frame["old"], frame["words"], frame["new"] = old, old_buckets * BUCKET_WORDS, new
        frame["shift"], frame["mask"] = shift, mask
        self.kernel.call(frame.address)


def grow_kernel(options: Options) -> Grow:
    f = Fn("grow")
    b = f.b
    old, new = f.slot("old", PTR), f.slot("new", PTR)
    with f.loop(f.slot("words")) as i:
        word = f.load(old, i, I64)
        with f.when(b.icmp_unsigned("!=", word, const(0))):
            tag = b.lshr(word, const(ADDRESS_BITS))
            place = f.var(I64, b.mul(b.lshr(tag, f.slot("shift")), const(BUCKET_WORDS)))
            with f.forever() as probe:
                probe.stop_if(b.icmp_unsigned("==", f.load(new, place.get(), I64), const(0)))
                following = b.add(place.get(), const(1))
                last = b.add(b.mul(f.slot("mask"), const(BUCKET_WORDS)), const(BUCKET_WORDS - 1))
                place.set(b.select(b.icmp_signed(">", following, last), const(0), following))
            f.store(word, new, place.get())
    b.ret(const(DONE))
    frame = f.finish()
    target = target_for(options.cpu)
    return Grow(link("grow", emit(f.text(), target), frame))
