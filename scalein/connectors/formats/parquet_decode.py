"""Dictionary-encoded numbers of Parquet files, decoded by compiled kernels.

pyarrow takes 2.5 ns a value for dictionary pages, which is most of the time of many queries over files; the kernel
takes 0.5 ns (`llvm_backend/parquet/dictionary_pages.py`). So flat columns of numbers and times without nulls whose
pages are dictionary-encoded are decoded here. Whatever raises `Unsupported` is left to pyarrow.

Invariant: files are not trusted. Sizes are checked before bytes are read; pages that contradict the metadata, or have
indices outside the dictionary, are unsupported.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from scalein.layout import PAGE_KIND, PAGE_PLAIN, PAGE_START, PAGE_VALUES, WITHIN
from scalein.options import Options

_MAX_DICTIONARY_BYTES = 1 << 18  # stays in L2
_CODED = 0.9  # least share of dictionary-encoded values
_TOGETHER = 1 << 18  # least number of values decompressed by one call
_UNITS = {"milliseconds": "ms", "microseconds": "us", "nanoseconds": "ns"}
_STORED: dict[str, np.dtype[Any]] = {
    "INT32": np.dtype("<i4"), "INT64": np.dtype("<i8"), "FLOAT": np.dtype("<f4"), "DOUBLE": np.dtype("<f8"),
}  # fmt: skip
_SNAPPY = pa.Codec("snappy")


class Column:
    """The values of a column in some row groups, in order. One thread reads it."""

    def __init__(self, file: pa.Buffer, chunks: list[Chunk], stored: np.dtype[Any], arrow: pa.DataType,
                 options: Options) -> None:
        from scalein.kernels.parquet import DictionaryDecoder, PageDecompressor

        self._file, self._stored, self._arrow = file, stored, arrow
        self._bytes = np.frombuffer(file, np.uint8)
        self._decompressor = PageDecompressor(options)
        self._dtype = np.dtype(f"{stored.kind}{arrow.bit_width // 8}")
        self._decoder = DictionaryDecoder(self._dtype.itemsize, options)
        self._parts = self._opened(chunks)
        self._plain: np.ndarray | None = np.zeros(0, self._dtype)  # None: the next values are in the unpacker
        self._left = 0  # remaining values of either

    def take(self, count: int) -> pa.Array:
        """The next values; raises `Unsupported` at a page that cannot be decoded here."""
        buffer = pa.allocate_buffer(count * self._dtype.itemsize)
        out = np.frombuffer(buffer, self._dtype)
        done = 0
        while done < count:
            if not self._left:
                following = next(self._parts, None)
                if following is None:
                    raise Unsupported
                self._plain, self._left = following
            n = min(self._left, count - done)
            if self._plain is None:
                if self._decoder.fill(out[done : done + n]) != n:
                    raise Unsupported
            else:
                first = len(self._plain) - self._left
                out[done : done + n] = self._plain[first : first + n]
            done, self._left = done + n, self._left - n
        return pa.Array.from_buffers(self._arrow, count, [None, buffer], 0)

    def _opened(self, chunks: Iterable[Chunk]) -> Iterator[tuple[np.ndarray | None, int]]:
        """The values of some pages, or None if the unpacker has them, and their number."""
        for chunk in chunks:
            if chunk.dictionary is not None:
                self._decoder.set_dictionary(self._values(chunk.dictionary))
            for is_plain, pages in _together(chunk.pages):
                if is_plain:
                    for page in pages.tolist():
                        yield self._values(Page(*page)), page[PAGE_VALUES]
                    continue
                opened = None if chunk.dictionary is None else self._decompressor.open(self._bytes, pages)
                if opened is None:
                    raise Unsupported
                self._decoder.set_pages(opened)
                yield None, int(pages[:, PAGE_VALUES].sum())

    def _values(self, page: Page) -> np.ndarray:
        """Plain values."""
        raw = np.frombuffer(self._decompressed(page), np.uint8)
        if page.levels == WITHIN:
            size = int.from_bytes(raw[:4].tobytes(), "little")
            _check_levels(raw[4 : 4 + size].tobytes(), page.values)
            raw = raw[4 + size :]
        if len(raw) != page.values * self._stored.itemsize:
            raise Unsupported
        return raw.view(self._stored).astype(self._dtype, copy=False)

    def _decompressed(self, page: Page) -> pa.Buffer:
        """The decompressed bytes of a page, without the uncompressed levels before them."""
        levels = max(0, page.levels)
        if levels:
            _check_levels(self._file.slice(page.start, levels).to_pybytes(), page.values)
        data, raw_size = self._file.slice(page.start + levels, page.size - levels), page.raw_size - levels
        if not page.is_compressed:
            return data
        if _snappy_size(data) != raw_size:
            raise Unsupported
        try:
            return _SNAPPY.decompress(data, raw_size)
        except (pa.ArrowException, OSError, ValueError) as error:
            raise Unsupported from error


def _together(pages: np.ndarray) -> Iterator[tuple[bool, np.ndarray]]:
    """Neighbouring pages of one encoding; dictionary pages no more at once than fit the caches."""
    is_plain = pages[:, PAGE_PLAIN] != 0
    ends = np.flatnonzero(np.diff(is_plain)) + 1
    for start, end in pairwise([0, *ends.tolist(), len(pages)]):
        total = pages[start:end, PAGE_VALUES].cumsum()
        while start < end:
            count = len(total) if is_plain[start] else int(np.searchsorted(total, total[0] + _TOGETHER))
            yield bool(is_plain[start]), pages[start : start + max(1, count)]
            start, total = start + max(1, count), total[max(1, count) :]


def _snappy_size(data: pa.Buffer) -> int:
    """The decompressed size that the data itself declares: with another one the decompressor may leave bytes unset."""
    found = shift = 0
    start: bytes = data.slice(0, min(5, data.size)).to_pybytes()
    for byte in start:
        found, shift = found | (byte & 127) << shift, shift + 7
        if byte < 128:
            return found
    return -1


def _check_levels(levels: bytes, count: int) -> None:
    """Check that `count` definition levels are all 1; the kernel does so for levels that are stored with the indices.
    """
    at = 0
    while count > 0:
        head = shift = 0
        while True:
            if at >= len(levels) or shift > 28:
                raise Unsupported
            byte = levels[at]
            at, head, shift = at + 1, head | (byte & 127) << shift, shift + 7
            if byte < 128:
                break
        some = min(count, 8 * (head >> 1) if head & 1 else head >> 1)
        size, mask = (-(-some // 8), (1 << some) - 1) if head & 1 else (1, 0xFF)
        wanted = mask if head & 1 else 1
        if not some or int.from_bytes(levels[at : at + size], "little") & mask != wanted:
            raise Unsupported
        at, count = at + size, count - some


def decodable(schema: Any, fields: Sequence[pa.Field]) -> list[pa.Field]:
    """The columns of a Parquet schema that the kernels support."""
    places = _places(schema)
    leaves = [schema.column(places[field.name]) if field.name in places else None for field in fields]
    return [field for leaf, field in zip(leaves, fields, strict=True)
            if leaf is not None and "." not in field.name  # of a struct, or not
            and leaf.max_definition_level <= 1 and _is_as_stored(leaf, field.type)]  # fmt: skip


def are_compiled(fields: Sequence[pa.Field], rows: int) -> bool:
    """Whether the kernels for some columns are compiled, or compiling them pays."""
    from scalein.kernels.parquet import are_ready

    return are_ready({field.type.bit_width // 8 for field in fields}, len(fields) * rows, Options.make())


def _places(schema: Any) -> dict[str, int]:
    leaves = enumerate(schema.column(k) for k in range(len(schema)))
    return {leaf.path: k for k, leaf in leaves if not leaf.max_repetition_level}


def columns_of(file: pa.Buffer, metadata: Any, groups: list[int], fields: Sequence[pa.Field]) -> dict[str, Column]:
    """Decoders of columns in some row groups of a mapped file, without those that are unsupported or would be slower.
    """
    options = Options.make()
    places = _places(metadata.schema)
    found = {}
    for field in fields:
        leaf = metadata.schema.column(places[field.name])
        try:
            chunks = [chunk_of(file, metadata.row_group(k), places[field.name], leaf, options) for k in groups]
        except Unsupported:
            continue
        if all(map(_is_worth, chunks)):
            found[field.name] = Column(file, chunks, _STORED[leaf.physical_type], field.type, options)
    return found


def _is_worth(chunk: Chunk) -> bool:
    """Whether the kernel is faster than pyarrow: not for plain pages, nor for dictionaries larger than the cache."""
    values = chunk.pages[:, PAGE_VALUES]
    is_small = chunk.dictionary is not None and chunk.dictionary.raw_size <= _MAX_DICTIONARY_BYTES
    return is_small and bool(values[chunk.pages[:, PAGE_PLAIN] == 0].sum() >= _CODED * values.sum())


def _is_as_stored(leaf: Any, arrow: pa.DataType) -> bool:
    """Whether values of an Arrow type are the stored ones, or their low bytes."""
    if leaf.physical_type not in _STORED:
        return False
    bits = 8 * _STORED[leaf.physical_type].itemsize
    is_float = leaf.physical_type in ("FLOAT", "DOUBLE")
    if pa.types.is_integer(arrow):
        return not is_float and bool(arrow.bit_width == bits or arrow.bit_width < bits == 32)
    if pa.types.is_floating(arrow):
        return is_float and bool(arrow.bit_width == bits)
    if pa.types.is_timestamp(arrow):
        about = json.loads(leaf.logical_type.to_json())
        return leaf.physical_type == "INT64" and bool(_UNITS.get(about.get("timeUnit")) == arrow.unit)
    return bool(arrow == pa.date32()) and leaf.physical_type == "INT32"


# --- pages of a column chunk: an optional dictionary page, and data pages ---

_DICTIONARY = 2  # a kind of page, in parquet.thrift
_CODECS = ("UNCOMPRESSED", "SNAPPY")  # with others, decompression takes most of the time anyway


class Unsupported(Exception):
    """Pages that only pyarrow can read, or that are damaged."""


class Page(NamedTuple):
    """A page's place in its file, without its header; the words of `layout.PAGE_WORDS`."""

    start: int
    size: int
    raw_size: int  # decompressed
    values: int
    is_plain: int  # else indices into the dictionary
    levels: int
    is_compressed: int
    kind: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """A column's values of one row group, none of them null."""

    dictionary: Page | None
    pages: np.ndarray  # a row of `PAGE_WORDS` each


def chunk_of(file: pa.Buffer, group: Any, place: int, leaf: Any, options: Options) -> Chunk:
    """The pages of a column of a row group, by their metadata; raises `Unsupported`.

    pyarrow's reader must have accepted the chunk before: reading damaged metadata, or statistics of another type than
    the column's, ends the process.
    """
    from scalein.kernels.parquet import page_headers

    about, is_optional = group.column(place), leaf.max_definition_level == 1
    if about.physical_type != leaf.physical_type or about.num_values != group.num_rows:
        raise Unsupported
    statistics = about.statistics
    has_no_nulls = statistics is not None and statistics.has_null_count and statistics.null_count == 0
    if about.compression not in _CODECS or about.file_path or (is_optional and not has_no_nulls):
        raise Unsupported
    start = about.data_page_offset
    if about.has_dictionary_page and about.dictionary_page_offset:
        start = min(start, about.dictionary_page_offset)
    if not 0 <= start <= start + about.total_compressed_size <= file.size:
        raise Unsupported
    whole = np.frombuffer(file, np.uint8)[start : start + about.total_compressed_size]
    pages = page_headers(whole, about.num_values, is_optional, about.compression != "UNCOMPRESSED", options)
    if pages is None:
        raise Unsupported
    pages[:, PAGE_START] += start
    dictionary = None
    if len(pages) and pages[0, PAGE_KIND] == _DICTIONARY:
        dictionary, pages = Page(*pages[0].tolist()), pages[1:]
    if pages[:, PAGE_VALUES].sum() != about.num_values:
        raise Unsupported
    return Chunk(dictionary, pages)
