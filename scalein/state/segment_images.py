"""Image files: copies of the used parts of memory segments, as they were at a snapshot.

Invariant: a block of 4 KiB is returned only after its checksum is verified, and an extent, which comes from a manifest,
is used only if it lies within the file. The seed of a checksum contains the file's id and the block's offset in the
file, so a block that was written to the wrong place is damaged too.

Threads: a writer belongs to one thread. An `ImageFile` may be read by any number of threads at once.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

import numpy as np

from scalein.errors import Damaged, InternalError, StoreFailed
from scalein.state import format
from scalein.state.checksum import Checksums, block_checksums
from scalein.storage.filesystem import FileSystem, aligned_buffer

SUM_BYTES = 8
_HEADER_BYTES = format.BLOCK


class Extent(NamedTuple):
    """The part of an image file that holds the first `size` bytes of a segment; its checksums follow."""

    segment: int
    offset: int
    size: int

    @property
    def end(self) -> int:
        """The offset after its checksums."""
        return self.offset + self.size + format.padded(self.size // format.BLOCK * SUM_BYTES)


class BlockRanges(NamedTuple):
    """Ranges of an image file in bytes: blocks of data, the blocks with their checksums, and the position of the first
    checksum in the latter."""

    offset: int
    size: int
    sums_offset: int
    sums_size: int
    sums_begin: int


def verify_blocks(blocks: np.ndarray, seeds: np.ndarray, stored: np.ndarray, origin: Callable[[int], tuple[str, int]],
                  checksums: Checksums) -> None:
    """Raise `Damaged` unless blocks of images have the stored checksums. `origin`: the file and offset of a block."""
    sums = checksums(blocks, seeds)
    if len(wrong := np.flatnonzero(sums != stored)):
        at = int(wrong[0])
        name, offset = origin(at)
        raise format.wrong_checksum(name, "an image", offset, int(stored[at]), int(sums[at]))


class ImageWriter:
    """A new image file, written extent by extent, durable once `finish` has returned."""

    def __init__(self, fs: FileSystem, id: int, expected_bytes: int = 0,
                 checksums: Checksums = block_checksums) -> None:
        self.id = id
        self._fs = fs
        self._checksums = checksums
        self._end = _HEADER_BYTES
        self._output = fs.create(format.image_name(id), expected_bytes)

    def add(self, segment: int, data: np.ndarray) -> Extent:
        """Write the used part of a segment: whole blocks of 4 KiB, preferably in page-aligned memory."""
        if len(data) % format.BLOCK or not len(data):
            raise InternalError("the size of an image extent is not a multiple of a block", found=f"{len(data)} bytes")
        extent = Extent(segment, self._end, len(data))
        blocks = data.reshape(-1, format.BLOCK)
        sums = aligned_buffer(extent.end - extent.offset - extent.size)
        sums[:] = 0
        sums.view("<u8")[: len(blocks)] = self._checksums(blocks, block_seeds(self.id, extent.offset, len(blocks)))
        self._output.write(extent.offset, data)
        self._output.write(extent.offset + extent.size, sums)
        self._end = extent.end
        return extent

    def finish(self) -> int:
        """Sync and close the file; returns its size in bytes."""
        header = aligned_buffer(_HEADER_BYTES)
        header[:] = 0
        format.START.pack_into(header.data, 0, format.IMAGE_MAGIC, format.VERSION, 0, self.id)
        format.seal(header, self.id, self._checksums)
        self._output.write(0, header)
        self._output.sync()
        self._output.close()
        return self._end

    def abandon(self) -> None:
        """Close the file and remove it if possible; otherwise the next start removes it."""
        self._output.close()
        with suppress(StoreFailed):
            self._fs.remove(format.image_name(self.id))


class ImageFile:
    """An image file that is read. Its header is verified on the first read."""

    def __init__(self, fs: FileSystem, id: int, checksums: Checksums = block_checksums) -> None:
        self.id = id
        self.name = fs.path_of(format.image_name(id))
        self._checksums = checksums
        self._is_verified = False
        self.input = fs.open(format.image_name(id))

    def verified(self) -> ImageFile:
        """The image with a verified header; raises `Damaged` or `NewerFormat` unless it is valid."""
        if not self._is_verified:
            header = self.input.read(0, _HEADER_BYTES)
            format.check_start(header, format.IMAGE_MAGIC, self.id, self.name, "an image", self._checksums)
            self._is_verified = True
        return self

    @property
    def size_bytes(self) -> int:
        return self.input.size

    def block_ranges(self, extent: Extent, start: int, size: int) -> BlockRanges:
        """The blocks of the file that hold the bytes [start, start + size) of an extent, and their checksums."""
        extent = self.verified()._checked(extent, start, size)
        first, last = _blocks(start, size)
        sums_at = extent.offset + extent.size + first * SUM_BYTES
        sums_block = sums_at // format.BLOCK * format.BLOCK
        end = format.padded(sums_at + (last - first) * SUM_BYTES)
        return BlockRanges(extent.offset + first * format.BLOCK, (last - first) * format.BLOCK, sums_block,
                           end - sums_block, sums_at - sums_block)

    def read(self, extent: Extent, start: int, size: int, direct: bool = False) -> np.ndarray:
        """The bytes [start, start + size) of an extent, verified; `direct` bypasses the page cache."""
        extent = self.verified()._checked(extent, start, size)
        first, last = _blocks(start, size)
        data = aligned_buffer((last - first) * format.BLOCK)
        offset = extent.offset + first * format.BLOCK
        self.input.read_into(offset, data.data, direct)
        stored = self.input.read(extent.offset + extent.size + first * SUM_BYTES, (last - first) * SUM_BYTES)
        verify_blocks(data.reshape(-1, format.BLOCK), block_seeds(self.id, offset, last - first), stored.view("<u8"),
                      lambda block: (self.name, offset + block * format.BLOCK), self._checksums)  # fmt: skip
        return data[start - first * format.BLOCK :][:size]

    def check(self, extent: Extent) -> None:
        """`Damaged` if the file is too short for an extent; its content is verified when it is read."""
        self._checked(extent, 0, 0)

    def verify(self, extent: Extent, step_bytes: int = 4 << 20) -> None:
        """Read a whole extent; `Damaged` if a byte of it or of its checksums is not what was written."""
        extent = self._checked(extent, 0, 0)
        for start in range(0, extent.size, step_bytes):
            self.read(extent, start, min(step_bytes, extent.size - start), direct=True)
        used = extent.offset + extent.size + extent.size // format.BLOCK * SUM_BYTES
        if self.input.read(used, extent.end - used).any():
            raise Damaged("an image of a store is damaged after its checksums", file=self.name, offset=used)

    def close(self) -> None:
        self.input.close()

    def _checked(self, extent: Extent, start: int, size: int) -> Extent:
        """The extent in Python integers, which do not overflow, if it lies in the file and contains these bytes."""
        extent = Extent(int(extent.segment), int(extent.offset), int(extent.size))
        offset, length = extent.offset, extent.size
        fits = offset >= _HEADER_BYTES and 0 < length <= self.input.size and extent.end <= self.input.size
        if not fits or offset % format.BLOCK or length % format.BLOCK:
            raise Damaged("a snapshot names an extent that its image file does not have", file=self.name,
                          offset=offset, needs=f"{length} bytes and their checksums",
                          found=f"{self.input.size} bytes in the file")  # fmt: skip
        if start < 0 or not 0 <= size <= length - start:
            raise Damaged("a snapshot names bytes after the end of an image extent", file=self.name, offset=offset,
                          needs=f"bytes {start} to {start + size}", found=f"{length} bytes")  # fmt: skip
        return extent


def _blocks(start: int, size: int) -> tuple[int, int]:
    """The first block of a range of bytes, and the end of its last block."""
    return start // format.BLOCK, -(-(start + size) // format.BLOCK)


def block_seeds(id: int, offset: int, count: int) -> np.ndarray:
    """The seeds of adjacent blocks of 4 KiB."""
    return np.uint64(id) ^ (np.uint64(offset) + np.arange(count, dtype=np.uint64) * np.uint64(format.BLOCK))
