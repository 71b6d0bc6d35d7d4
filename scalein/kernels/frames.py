"""The kernel library of values over frames: see `llvm_backend/frames.py`."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from scalein.cancellation import raise_if_cancelled
from scalein.layout import DONE
from scalein.llvm_backend.cache import load_lowered
from scalein.llvm_backend.target import Target
from scalein.memory import allocate
from scalein.options import Options

if TYPE_CHECKING:
    from scalein.llvm_backend.stage import Lowered

_DIGIT_BITS = 11
_STACK_WORDS = {  # words of each part that a row's aggregate has
    **dict.fromkeys(("count", "first", "last"), (1,)),
    **dict.fromkeys(("signed_sum", "unsigned_sum", "signed_mean", "unsigned_mean"), (2, 1)),
    **dict.fromkeys(("float_sum", "float_mean", "min", "max"), (1, 1)),
    "var": (1, 1, 1), "std": (1, 1, 1), "bounds": (),
}  # fmt: skip

FLOAT_RESULTS = frozenset({"float_sum", "float_mean", "signed_mean", "unsigned_mean", "var", "std"})


def partition(keys: np.ndarray, base: int, key_bits: int, rows: np.ndarray | None, row_bits: int,
              options: Options) -> np.ndarray:
    """The places of rows sorted by their keys, each less `base`, of `key_bits` bits; equal keys stay in order.

    `rows` is the order of the rows; None: by number.
    """
    count = len(keys)
    spare, out = (allocate(8 * count)[: 8 * count].view(np.uint64) for _ in range(2))
    given = keys
    for done in range(0, max(1, key_bits), _DIGIT_BITS):
        from_keys, has_rows = done == 0, done == 0 and rows is not None
        compiled = load_lowered(f"partition {from_keys} {has_rows}", partial(_lower_partition, from_keys, has_rows),
                                options)
        frame = compiled.kernel.frame.new()
        frame["count"], frame["shift"], frame["bits"], frame["base"] = count, row_bits + done, row_bits, base
        frame.point("in", given)
        frame.point("out", out)
        if rows is not None:
            frame.point("rows", rows)
        raise_if_cancelled()
        compiled.kernel.call(frame.address)
        given, out, spare = out, spare, out
    return given


class FramesOverflow(Exception):
    """A sum has no value in 64 bits."""


def aggregate(what: str, frame: str, until: str, places: np.ndarray, row_bits: int, *, width: int = 0,
              values: np.ndarray | None = None, valid: np.ndarray | None = None, times: np.ndarray | None = None,
              ties: np.ndarray | None = None, options: Options) -> tuple[np.ndarray, np.ndarray | None]:
    """The aggregate of each row's frame, by row, and which of these there are (bytes; None: all).

    For "bounds", the first place of each frame and the one after its last, by place.
    """
    count, nullable = len(places), valid is not None
    compiled = load_lowered(f"frames {what} {frame} {until} {nullable}",
                            partial(_lower_frames, what, frame, until, nullable), options)
    kernel = compiled.kernel.frame.new()
    kernel["count"], kernel["bits"], kernel["mask"], kernel["width"] = count, row_bits, (1 << row_bits) - 1, width
    words = 2 * count if what == "bounds" else count
    out = allocate(8 * words)[: 8 * words].view(np.float64 if what in FLOAT_RESULTS else np.int64)
    there = allocate(count)[:count] if "out.valid" in kernel else None
    given = {"places": places, "out": out, "out.valid": there, "values": values, "valid": valid, "times": times,
             "ties": ties}
    for name, array in given.items():
        if array is not None:
            kernel.point(name, array)
    if frame != "all":
        for number, size in enumerate(_STACK_WORDS[what]):
            kernel.point(f"stack{number}", allocate(8 * size * count))
    raise_if_cancelled()
    if compiled.kernel.call(kernel.address) != DONE:
        raise FramesOverflow
    return (out.reshape(-1, 2) if what == "bounds" else out), there


def spaced(places: np.ndarray, row_bits: int, times: np.ndarray, width: int, from_any: bool,
           options: Options) -> np.ndarray:
    """By row, whether it is the first of its partition, or so much later than the last one before it for which that
    is true, or `from_any`: than the one before it. `times` are by place, and ascending in a partition.
    """
    compiled = load_lowered(f"spaced {from_any}", partial(_lower_spaced, from_any), options)
    frame = compiled.kernel.frame.new()
    frame["count"], frame["bits"], frame["mask"], frame["width"] = len(places), row_bits, (1 << row_bits) - 1, width
    out = allocate(len(places))[: len(places)]
    for name, array in (("places", places), ("times", times), ("out", out)):
        frame.point(name, array)
    raise_if_cancelled()
    compiled.kernel.call(frame.address)
    return out.view(bool)


def _lower_spaced(from_any: bool, target: Target) -> Lowered:
    from scalein.llvm_backend.frames import lower_spaced

    return lower_spaced(from_any)


def _lower_partition(from_keys: bool, has_rows: bool, target: Target) -> Lowered:
    from scalein.llvm_backend.frames import lower_partition  # loads LLVM's builder: only a compiling process needs it

    return lower_partition(from_keys, has_rows)


def _lower_frames(what: str, frame: str, until: str, nullable: bool, target: Target) -> Lowered:
    from scalein.llvm_backend.frames import lower_frames

    return lower_frames(what, frame, until, nullable)
