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

from scalein.layout import PAGE_KIND, PAGE_START, PAGE_VALUES
from scalein.options import Options

_DICTIONARY = 2  # a kind of page, in parquet.thrift
_CODECS = ("UNCOMPRESSED", "SNAPPY")  # others are slow anyway


class Unusual(Exception):
    """Pages of a kind that only pyarrow reads, or that nobody can."""


class Page(NamedTuple):
    """A page's place in its file, without its header; the words of `layout.PAGE_WORDS`."""

    start: int
    size: int
    raw_size: int  # decompressed
    values: int
    is_plain: int  # or they are numbers of the dictionary's entries
    levels: int
    is_compressed: int
    kind: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """A column's values of one row group, none of them null."""

    dictionary: Page | None
    pages: np.ndarray  # a row of `PAGE_WORDS` each


def chunk_of(file: pa.Buffer, group: Any, place: int, leaf: Any, options: Options) -> Chunk:
    """The pages of a column of a row group, by their metadata; raises `Unusual`.

    pyarrow's reader must have taken these before: asked for what is damaged, metadata end the process. So do statistics
    of another type than the column's.
    """
    from scalein.kernels.parquet import page_headers

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
    pages = page_headers(whole, about.num_values, is_optional, about.compression != "UNCOMPRESSED", options)
    if pages is None:
        raise Unusual
    pages[:, PAGE_START] += start
    dictionary = None
    if len(pages) and pages[0, PAGE_KIND] == _DICTIONARY:
        dictionary, pages = Page(*pages[0].tolist()), pages[1:]
    if pages[:, PAGE_VALUES].sum() != about.num_values:
        raise Unusual
    return Chunk(dictionary, pages)
