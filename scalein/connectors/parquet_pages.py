"""Pages of a Parquet column chunk: where each lies in the file, and what its header says.

A chunk is a dictionary page, if there is one, and data pages. Only what `parquet_columns.py` decodes is known here:
flat columns without nulls, plain or dictionary-coded values. Everything else is `Unusual`, and left to pyarrow, which
reads it or says what is wrong with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from scalein.layout import HEADER_FIELDS
from scalein.options import Options

# Numbers of parquet.thrift
_DATA, _DICTIONARY, _DATA_V2 = 0, 2, 3
PLAIN = 0
_PLAIN_DICTIONARY, _RLE, _RLE_DICTIONARY = 2, 3, 8

WITHIN = -1  # levels are in one piece with values
_CODECS = ("UNCOMPRESSED", "SNAPPY")  # others are slow anyway
_MOST_PAGE_BYTES = 1 << 28


class Unusual(Exception):
    """Pages of a kind that only pyarrow reads, or that nobody can."""


class Page(NamedTuple):
    """A page's place in its file, without its header."""

    start: int
    size: int
    raw_size: int  # decompressed
    values: int
    is_plain: bool  # or they are numbers of the dictionary's entries
    levels: int  # bytes before the values, never compressed; WITHIN: among the values, and they tell their length
    is_compressed: bool


@dataclass(frozen=True, slots=True)
class Chunk:
    """A column's values of one row group, none of them null."""

    dictionary: Page | None
    pages: list[Page]


def chunk_of(file: pa.Buffer, group: Any, place: int, leaf: Any, options: Options) -> Chunk:
    """The pages of a column of a row group, by their metadata; raises `Unusual`.

    pyarrow's reader must have taken these before: asked for what is damaged, metadata end the process. So do statistics
    of another type than the column's.
    """
    from scalein.runtime.unpacking import page_headers

    about, is_optional = group.column(place), leaf.max_definition_level == 1
    if about.physical_type != leaf.physical_type or about.num_values != group.num_rows:
        raise Unusual
    statistics = about.statistics
    has_no_nulls = statistics is not None and statistics.has_null_count and statistics.null_count == 0
    if about.compression not in _CODECS or about.file_path or (is_optional and not has_no_nulls):
        raise Unusual
    start = about.data_page_offset
    if about.has_dictionary_page and about.dictionary_page_offset:
        start = min(start, about.dictionary_page_offset)
    if not 0 <= start <= start + about.total_compressed_size <= file.size:
        raise Unusual
    bytes_ = np.frombuffer(file, np.uint8)
    headers = page_headers(bytes_[start : start + about.total_compressed_size], about.num_values, options)
    if headers is None:
        raise Unusual
    pages = _pages(bytes_, start, headers, is_optional, about.compression != "UNCOMPRESSED")
    dictionary = pages.pop(0) if len(pages) and headers[0, 1] == _DICTIONARY else None
    if (headers[1:, 1] == _DICTIONARY).any() or sum(page.values for page in pages) != about.num_values:
        raise Unusual
    return Chunk(dictionary, pages)


def _pages(file: np.ndarray, start: int, headers: np.ndarray, is_optional: bool, is_compressed: bool) -> list[Page]:
    """Pages by the words of their headers (`llvm_backend/page_headers.py`), which may be any; all at once, since a page
    has some ten thousand values only."""
    end, kind, raw_size, size = headers.T[:4]
    inner = headers.T[HEADER_FIELDS:]
    is_dictionary, is_data, is_v2 = kind == _DICTIONARY, kind == _DATA, kind == _DATA_V2
    count, encoding = inner[1], np.where(is_v2, inner[4], inner[2])
    nulls, level_encoding, definition, repetition = inner[2], inner[3], inner[5], inner[6]
    levels = np.where(is_v2, definition, WITHIN if is_optional else 0)
    levels[is_dictionary] = 0
    before = np.maximum(levels, 0)
    is_known = (encoding == PLAIN) | (encoding == _PLAIN_DICTIONARY) | (encoding == _RLE_DICTIONARY) & ~is_dictionary
    is_known &= (
        is_dictionary
        | is_data & ((level_encoding == _RLE) | (not is_optional))
        | is_v2 & (nulls == 0) & (repetition == 0) & (definition >= is_optional)
    )  # fmt: skip
    is_sound = (count >= 0) & (before <= np.minimum(size, raw_size)) & (raw_size <= _MOST_PAGE_BYTES)
    packed = is_compressed & (~is_v2 | (inner[7] != 0))
    if not (is_known & is_sound).all():
        raise Unusual
    first = start + end
    if (_snappy_sizes(file, first + before, size - before) != raw_size - before)[packed].any():
        raise Unusual
    columns = (first, size, raw_size, count, is_dictionary | (encoding == PLAIN), levels, packed)
    return list(map(Page._make, zip(*(column.tolist() for column in columns), strict=True)))


def _snappy_sizes(file: np.ndarray, starts: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """How many bytes some pieces become, as they say themselves: else whoever decompresses them may leave some unset.

    A varint, the low bits first; -1 if it does not end within the piece.
    """
    found, has_ended = np.zeros_like(starts), np.zeros(len(starts), bool)
    for k in range(5):
        byte = file[np.minimum(starts + k, len(file) - 1)].astype(np.int64)
        is_part = ~has_ended & (k < sizes)
        found += np.where(is_part, (byte & 127) << 7 * k, 0)
        has_ended |= is_part & (byte < 128)
    return np.where(has_ended, found, -1)
