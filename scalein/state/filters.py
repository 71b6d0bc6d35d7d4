"""Filters: which hashes a run may have, by a byte or two a record. They never deny one that it has.

Three bits of each hash are set among 8 to 16 a record: of hashes that a run does not have, 1 to 3 % pass.
"""

from __future__ import annotations

import numpy as np

_STEPS = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0xD6E8FEB86659FD93)  # odd; part of the format


def make_filter(hashes: np.ndarray) -> np.ndarray:
    """The bytes of a filter over these hashes: a power of two, at least 64."""
    size = max(64, 1 << max(0, len(hashes) - 1).bit_length())
    bits = np.zeros(8 * size, bool)
    for place in _places(hashes, size):
        bits[place] = True
    return np.packbits(bits, bitorder="little")


def passes(filter: np.ndarray, hashes: np.ndarray) -> np.ndarray:
    """Which of some hashes may be among those that the filter was made of."""
    found = np.ones(len(hashes), bool)
    for place in _places(hashes, len(filter)):
        found &= (filter[place >> np.uint64(3)] >> (place & np.uint64(7)).astype(np.uint8)) & 1 == 1
    return found


def _places(hashes: np.ndarray, size: int) -> list[np.ndarray]:
    shift = np.uint64(64 - (8 * size - 1).bit_length())
    return [(hashes * np.uint64(step)) >> shift for step in _STEPS]
