"""Filters: which hashes a run may have, by about a byte a record. They never deny one that it has.

Three bits of each hash are set among 6 to 11 a record: of hashes that a run does not have, 1 to 7 % pass. More bits
would deny more of them, and take memory from the records that need no run at all.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from scalein.storage.filesystem import aligned_buffer

_STEPS = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0xD6E8FEB86659FD93)  # odd; part of the format


# Set the bits of hashes in a filter, whose places are hashes * step >> shift: compiled, or `mark_bits`.
Mark = Callable[[np.ndarray, np.ndarray, int], None]


def empty_filter(records: int) -> np.ndarray:
    """The zeroed bytes of a filter over so many hashes: a power of two, at least 64."""
    filter = aligned_buffer(max(64, 1 << (3 * records // 4).bit_length()))
    filter[:] = 0
    return filter


def shift_of(filter: np.ndarray) -> int:
    """What leaves of 64 bits a place in the filter."""
    return 64 - (8 * len(filter) - 1).bit_length()


def mark_bits(filter: np.ndarray, hashes: np.ndarray, shift: int) -> None:
    for place in _places(hashes, shift):
        np.bitwise_or.at(filter, place >> np.uint64(3), np.uint8(1) << (place & np.uint64(7)).astype(np.uint8))


def passes(filter: np.ndarray, hashes: np.ndarray) -> np.ndarray:
    """Which of some hashes may be among those that the filter was made of."""
    place = np.concatenate(_places(hashes, shift_of(filter)))
    bits = (filter[place >> np.uint64(3)] >> (place & np.uint64(7)).astype(np.uint8)) & np.uint8(1)
    found: np.ndarray = bits.reshape(len(_STEPS), len(hashes)).all(axis=0)
    return found


def _places(hashes: np.ndarray, shift: int) -> list[np.ndarray]:
    return [(hashes * np.uint64(step)) >> np.uint64(shift) for step in _STEPS]
