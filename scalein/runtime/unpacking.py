"""Parquet pages, walked over and unpacked by kernels: `llvm_backend/page_headers.py`, `llvm_backend/unpack.py`."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from scalein.layout import DONE, HEADER_WORDS, OTHER_WIDTH, OUTPUT_FULL, PAGE_WORDS, FrameData
from scalein.llvm_backend.cache import load_lowered
from scalein.llvm_backend.jit import Kernel
from scalein.llvm_backend.target import Target
from scalein.memory import address
from scalein.options import Options

if TYPE_CHECKING:
    from scalein.llvm_backend.stage import Lowered

MOST_BITS = 24  # of a number: larger dictionaries are none
_ROWS = 256  # of headers that there is room for at first


def page_headers(chunk: np.ndarray, values: int, options: Options) -> np.ndarray | None:
    """A row of `HEADER_WORDS` for each page of a chunk that has so many values; None where one is not understood."""
    kernel = load_lowered("page headers", _lower_headers, options).kernel
    frame = kernel.frame.new()
    frame.point("data", chunk)
    frame["size"], frame["left"] = len(chunk), values
    rows = np.empty((_ROWS, HEADER_WORDS), np.int64)
    while True:
        frame["out"], frame["room"] = address(rows), len(rows)
        status = kernel.call(frame.address)
        if status != OUTPUT_FULL:
            return rows[: frame["rows"]] if status == DONE else None
        rows = np.concatenate((rows, np.empty_like(rows)))


class Unpacker:
    """Gives the values that pages have numbers of, in order. One thread uses it."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._kernels: dict[int, tuple[Kernel, FrameData]] = {}  # by width
        self._width = 1
        self._count = 0  # of the dictionary's entries
        self._values = np.zeros(1, np.int8)
        self._pages = np.zeros((0, PAGE_WORDS), np.int64)
        self._keep: object = None
        self._frame: FrameData | None = None  # of the page under way

    def use(self, dictionary: np.ndarray) -> None:
        """Numbers of the next pages are places in this one."""
        self._count = len(dictionary)
        # No number leads out of it; some writers have one bit more than they need.
        self._values = np.zeros(2 << self._count.bit_length(), dictionary.dtype)
        self._values[: self._count] = dictionary

    def open(self, pages: np.ndarray, keep: object) -> None:
        """Go on with these pages: a row of `PAGE_WORDS` each; `keep` holds their bytes."""
        assert pages.dtype == np.int64
        self._pages, self._keep = np.ascontiguousarray(pages), keep
        self._begin(0)

    def into(self, out: np.ndarray) -> int | None:
        """Fill an array of the dictionary's type; how many values there were, None where one is not understood."""
        assert self._frame is not None
        assert out.dtype == self._values.dtype
        done = 0
        while True:
            kernel, _ = self._kernels[self._width]
            frame = self._frame
            frame["out"], frame["count"], frame["done"] = address(out), len(out), done
            status = kernel.call(frame.address)
            if status == DONE:
                return frame["done"]
            if status != OTHER_WIDTH or not 1 <= frame["width"] <= MOST_BITS or frame["width"] >= self._most_bits:
                return None
            self._width, done = frame["width"], frame["done"]
            self._begin(frame["page"])

    @property
    def _most_bits(self) -> int:
        return len(self._values).bit_length()

    def _begin(self, page: int) -> None:
        """Have the kernel of the right width go on with a page, from its begin."""
        if self._width >= self._most_bits:
            self._width = 1
        found = self._kernels.get(self._width)
        if found is None:
            size = self._values.itemsize
            kernel = load_lowered(f"unpack {self._width} {size}", partial(_lower_unpack, self._width, size),
                                  self._options).kernel
            found = self._kernels[self._width] = kernel, kernel.frame.new()
        self._frame = frame = found[1]
        frame.point("pages", self._pages)
        frame.point("values", self._values)
        frame["pages.count"], frame["entries"] = len(self._pages), self._count
        frame["page"] = page
        for name in ("at", "left", "number", "base", "next", "values_left", "data", "size"):
            frame[name] = 0


def _lower_headers(target: Target) -> Lowered:
    from scalein.llvm_backend.page_headers import lower_page_headers  # LLVM's builder: only who compiles needs it

    return lower_page_headers()


def _lower_unpack(width: int, value_bytes: int, target: Target) -> Lowered:
    from scalein.llvm_backend.unpack import lower_unpack

    return lower_unpack(width, value_bytes)
