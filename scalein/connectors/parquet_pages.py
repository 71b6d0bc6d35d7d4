"""Pages of a Parquet column chunk: where each lies in the file, and what its header says.

A chunk is a dictionary page, if there is one, and data pages. Only what `parquet_columns.py` decodes is known here:
flat columns without nulls, plain or dictionary-coded values. Everything else is `Unusual`, and left to pyarrow, which
reads it or says what is wrong with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from scalein.layout import HEADER_FIELDS
from scalein.options import Options

# Numbers of parquet.thrift
_DATA, _DICTIONARY, _DATA_V2 = 0, 2, 3
PLAIN = 0
_PLAIN_DICTIONARY, _RLE, _RLE_DICTIONARY = 2, 3, 8

_CODECS = ("UNCOMPRESSED", "SNAPPY")  # others are slow anyway
_MOST_PAGE_BYTES = 1 << 28


class Unusual(Exception):
    """Pages of a kind that only pyarrow reads, or that nobody can."""


@dataclass(frozen=True, slots=True)
class Page:
    """A page's place in its file, without its header."""

    start: int
    size: int
    raw_size: int  # decompressed
    count: int  # values
    is_plain: bool  # or they are numbers of the dictionary's entries
    levels: int | None  # bytes before the values, never compressed; None: among them, and they tell their length
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
    whole = np.frombuffer(file, np.uint8)[start : start + about.total_compressed_size]
    headers = page_headers(whole, about.num_values, options)
    if headers is None:
        raise Unusual
    is_compressed = about.compression != "UNCOMPRESSED"
    pages = [_page(row, start, is_optional, is_compressed) for row in headers.tolist()]
    dictionary = pages.pop(0) if len(pages) and headers[0, 1] == _DICTIONARY else None
    if (headers[1:, 1] == _DICTIONARY).any() or sum(page.count for page in pages) != about.num_values:
        raise Unusual
    return Chunk(dictionary, pages)


def _page(header: list[int], start: int, is_optional: bool, is_compressed: bool) -> Page:
    """A page by the words of its header (`llvm_backend/page_headers.py`), which may be any."""
    end, kind, raw_size, size = header[:4]
    inner = header[HEADER_FIELDS:]
    levels: int | None = 0
    if kind == _DICTIONARY:
        count, encoding = inner[1:3]
        is_known = encoding in (PLAIN, _PLAIN_DICTIONARY)
        encoding = PLAIN
    elif kind == _DATA:
        count, encoding, level_encoding = inner[1:4]
        is_known = level_encoding == _RLE or not is_optional
        levels = None if is_optional else 0
    else:
        count, nulls, _, encoding, definition, repetition, flag = inner[1:8]
        is_known = kind == _DATA_V2 and nulls == 0 and repetition == 0 and definition >= is_optional
        levels, is_compressed = definition, is_compressed and flag != 0
    is_sound = count >= 0 and 0 <= (levels or 0) <= min(size, raw_size) and raw_size <= _MOST_PAGE_BYTES
    if not is_known or not is_sound or encoding not in (PLAIN, _PLAIN_DICTIONARY, _RLE_DICTIONARY):
        raise Unusual
    return Page(start + end, size, raw_size, count, encoding == PLAIN, levels, is_compressed)
