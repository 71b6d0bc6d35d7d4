"""What the store's files have in common: names, magic numbers, versions, and sealed areas.

FORMAT.md describes the bytes of every kind of file. A sealed area is a sequence of blocks of 4 KiB whose last 8 bytes
are the checksum of the area with these 8 bytes zero. The first bytes of every file are the same in all versions (magic,
version, and the file's id at byte 16), and so is the seal of the area that begins there: so a newer format can be
distinguished from damage.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable

import numpy as np

from scalein.errors import Damaged, NewerFormat
from scalein.state.checksum import Checksums, block_checksums

BLOCK = 4096
SEAL = 8  # bytes of an area's checksum
VERSION = 3  # 1 had no index files, 2 had one checksum for the directory of an index; the rest is the same

RUN_MAGIC = b"SCRUN\0\0\0"
IMAGE_MAGIC = b"SCIMAGE\0"
INDEX_MAGIC = b"SCINDEX\0"
MANIFEST_MAGIC = b"SCSNAP\0\0"

# magic number, version, a word that the kind of file defines, file id
START = struct.Struct("<8sIIQ")

_NAMES = {"run": "run-{:010d}.run", "image": "image-{:010d}.seg", "index": "index-{:010d}.idx",
          "snapshot": "snapshot-{:010d}.manifest"}  # fmt: skip
KINDS = tuple(_NAMES)
_PATTERNS = {kind: re.compile(re.escape(name).replace(re.escape("{:010d}"), r"(\d{10,20})"), re.ASCII)
             for kind, name in _NAMES.items()}  # fmt: skip


def run_name(id: int) -> str:
    return _NAMES["run"].format(id)


def image_name(id: int) -> str:
    return _NAMES["image"].format(id)


def index_name(id: int) -> str:
    return _NAMES["index"].format(id)


def manifest_name(id: int) -> str:
    return _NAMES["snapshot"].format(id)


def ids(names: Iterable[str], kind: str) -> list[int]:
    """The ids of the files of a kind ("run", "image", "index", "snapshot") among these names, sorted.

    >>> ids(["LOCK", "run-0000000012.run", "run-0000000003.run", "_snapshot-0000000001.manifest"], "run")
    [3, 12]
    """
    found = (_PATTERNS[kind].fullmatch(name) for name in names)
    return sorted(int(match[1]) for match in found if match)


def padded(size: int) -> int:
    """The size rounded up to a multiple of a block.

    >>> padded(0), padded(1), padded(4096)
    (0, 4096, 4096)
    """
    return -(-size // BLOCK) * BLOCK


def seal(area: np.ndarray, seed: int, checksums: Checksums = block_checksums) -> None:
    """Write an area's checksum into its last 8 bytes."""
    area[-SEAL:] = 0
    area[-SEAL:].view("<u8")[0] = _sum(area, seed, checksums)


def check_seal(area: np.ndarray, seed: int, file: str, what: str, offset: int,
               checksums: Checksums = block_checksums) -> None:  # fmt: skip
    """Raise `Damaged` unless an area has the checksum in its last 8 bytes, which are zero afterwards."""
    stored = int(area[-SEAL:].view("<u8")[0])
    area[-SEAL:] = 0
    if (found := _sum(area, seed, checksums)) != stored:
        raise wrong_checksum(file, what, offset, stored, found)


def _sum(area: np.ndarray, seed: int, checksums: Checksums) -> int:
    return int(checksums(area.reshape(1, -1), np.array([seed], np.uint64))[0])


def wrong_checksum(file: str, what: str, offset: int, stored: int, found: int) -> Damaged:
    """The error for bytes that are not what was written."""
    return Damaged(f"{what} of a store's file is damaged", file=file, offset=offset,
                   found=f"checksum {found:016x}", stored=f"checksum {stored:016x}")  # fmt: skip


def check_start(area: np.ndarray, magic: bytes, id: int, file: str, what: str,
                checksums: Checksums = block_checksums) -> int:  # fmt: skip
    """Verify a file's first area: magic, seal, version, id. Returns the word that the kind of file defines."""
    found, version, word, stored_id = START.unpack_from(area.data)
    if found != magic:
        raise Damaged(f"{what} has the wrong magic number", file=file, offset=0, found=found, expected=magic)
    check_seal(area, stored_id, file, what, 0, checksums)
    if version > VERSION:
        raise NewerFormat("the store was written by a newer scalein", file=file, format=version,
                          reads=f"up to format {VERSION}", hint="open it with that version of scalein")  # fmt: skip
    if not version:
        raise Damaged(f"{what} has an unknown format", file=file, offset=8, found=version, expected=VERSION)
    if stored_id != id:
        raise Damaged(f"{what} has the id of another file", file=file, offset=16, found=f"id {stored_id}",
                      expected=f"id {id}")  # fmt: skip
    assert isinstance(word, int)
    return word
