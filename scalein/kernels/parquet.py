"""The kernel library of the Parquet reader: page headers, decompression and dictionary decoding.

The loops are in `llvm_backend/parquet`: `page_headers`, `snappy`, `dictionary_pages`.

Which columns they decode is decided in `connectors/formats/parquet_decode.py`.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from scalein.layout import (
    DONE,
    MAX_BITS,
    OPEN_WORDS,
    OUTPUT_FULL,
    PAGE_COMPRESSED,
    PAGE_RAW_SIZE,
    PAGE_WORDS,
    SLOP,
)
from scalein.llvm_backend.cache import has_kernel, load_lowered
from scalein.llvm_backend.target import Target
from scalein.memory import address
from scalein.options import Options

if TYPE_CHECKING:
    from scalein.llvm_backend.stage import Lowered

_ROWS = 256  # initial capacity, in page headers
_HEADERS, _OPEN = "page headers", "open pages"
_WORTH_COMPILING = 50_000_000  # values for which pyarrow takes longer by as much time as compiling the kernels takes

_missed = 0  # values that pyarrow decoded because the kernels were not compiled


def are_ready(value_sizes: Iterable[int], values: int, options: Options) -> bool:
    """Whether kernels for these value sizes are compiled, or enough values were decoded without them that compiling
    pays: reading a single file should not wait for it.
    """
    global _missed
    if all(has_kernel(name, options) for name in (_HEADERS, _OPEN, *map(_name, value_sizes))):
        return True
    _missed += values  # not atomic: a few may be lost between threads
    return _missed >= _WORTH_COMPILING


def _name(value_bytes: int) -> str:
    return f"unpack {value_bytes}"


def page_headers(chunk: np.ndarray, values: int, is_optional: bool, is_compressed: bool,
                 options: Options) -> np.ndarray | None:
    """A row of `PAGE_WORDS` for each page of a column chunk of `values` values; None if a page is not supported."""
    kernel = load_lowered(_HEADERS, _lower_headers, options).kernel
    frame = kernel.frame.new()
    frame.point("data", chunk)
    frame["size"], frame["left"] = len(chunk), values
    frame["optional"], frame["compressed"] = is_optional, is_compressed
    rows = np.empty((_ROWS, PAGE_WORDS), np.int64)
    while True:
        frame["out"], frame["room"] = address(rows), len(rows)
        status = kernel.call(frame.address)
        if status != OUTPUT_FULL:
            return rows[: frame["rows"]] if status == DONE else None
        rows = np.concatenate((rows, np.empty_like(rows)))


class PageDecompressor:
    """Decompresses pages of a file into a buffer of its own, valid until the next call."""

    def __init__(self, options: Options) -> None:
        self._kernel = load_lowered(_OPEN, _lower_open, options).kernel
        self._frame = self._kernel.frame.new()
        self._room = np.empty(0, np.uint8)

    def open(self, file: np.ndarray, pages: np.ndarray) -> np.ndarray | None:
        """A row of `OPEN_WORDS` for each row of `PAGE_WORDS`; None if a page is not supported."""
        size = int(pages[pages[:, PAGE_COMPRESSED] != 0, PAGE_RAW_SIZE].sum()) + SLOP
        if len(self._room) < size:
            self._room = np.empty(size, np.uint8)
        frame, out = self._frame, np.empty((len(pages), OPEN_WORDS), np.int64)
        frame.point("file", file)
        frame["pages"], frame["pages.count"] = address(pages), len(pages)
        frame["room"], frame["out"] = address(self._room), address(out)
        return out if self._kernel.call(frame.address) == DONE else None


class DictionaryDecoder:
    """Decodes dictionary-encoded pages, in order. Not thread-safe."""

    def __init__(self, value_bytes: int, options: Options) -> None:
        self._kernel = load_lowered(_name(value_bytes), partial(_lower_unpack, value_bytes), options).kernel
        self._frame = self._kernel.frame.new()
        self._value_bytes = value_bytes

    def set_dictionary(self, dictionary: np.ndarray) -> None:
        """Set the dictionary of the next pages."""
        assert dictionary.itemsize == self._value_bytes
        # Padded, so that no index is out of bounds; some writers use one bit more than necessary.
        most_width = len(dictionary).bit_length() + 1
        values = np.zeros(1 << most_width, dictionary.dtype)
        values[: len(dictionary)] = dictionary
        self._frame.point("values", values)
        self._frame["entries"], self._frame["most_width"] = len(dictionary), min(most_width, MAX_BITS)

    def set_pages(self, pages: np.ndarray) -> None:
        """Set the next pages: a row of `OPEN_WORDS` each; the caller keeps their bytes alive."""
        frame = self._frame
        frame.point("pages", pages)
        frame["pages.count"] = len(pages)
        for name in ("page", "at", "left", "number", "base", "next", "values_left", "data", "size", "width"):
            frame[name] = 0

    def fill(self, out: np.ndarray) -> int | None:
        """Fill an array; returns the number of values, None if a page is not supported."""
        assert out.itemsize == self._value_bytes
        frame = self._frame
        frame["out"], frame["count"], frame["done"] = address(out), len(out), 0
        return frame["done"] if self._kernel.call(frame.address) == DONE else None


def _lower_headers(target: Target) -> Lowered:
    from scalein.llvm_backend.parquet.page_headers import (
        lower_page_headers,  # loads LLVM's builder: only a compiling process needs it
    )

    return lower_page_headers()


def _lower_open(target: Target) -> Lowered:
    from scalein.llvm_backend.parquet.snappy import lower_open_pages

    return lower_open_pages()


def _lower_unpack(value_bytes: int, target: Target) -> Lowered:
    from scalein.llvm_backend.parquet.dictionary_pages import lower_unpack

    return lower_unpack(value_bytes)
