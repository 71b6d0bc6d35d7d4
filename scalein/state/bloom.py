"""Bloom filters of runs, with about a byte per record. A filter never rejects a hash that the run has.

Three bits per hash, 6 to 11 bits per record: 1 to 7 % of the hashes that a run does not have pass. More bits would
reject more of them, at the expense of memory for records, which need no run at all.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from scalein.storage.filesystem import aligned_buffer

_MULTIPLIERS = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0xD6E8FEB86659FD93)  # odd; part of the format


# Sets the bits of hashes in a filter, at (hash * multiplier) >> shift: compiled, or `set_bits`.
SetBits = Callable[[np.ndarray, np.ndarray, int], None]


def empty_filter(records: int) -> np.ndarray:
    """The zeroed bytes of a filter for this many hashes: a power of two, at least 64."""
    filter = aligned_buffer(max(64, 1 << (3 * records // 4).bit_length()))
    filter[:] = 0
    return filter


def filter_shift(filter: np.ndarray) -> int:
    """The right shift of a product of 64 bits that gives a bit number of the filter."""
    return 64 - (8 * len(filter) - 1).bit_length()


def set_bits(filter: np.ndarray, hashes: np.ndarray, shift: int) -> None:
    for bit in _bit_numbers(hashes, shift):
        np.bitwise_or.at(filter, bit >> np.uint64(3), np.uint8(1) << (bit & np.uint64(7)).astype(np.uint8))


def may_contain(filter: np.ndarray, hashes: np.ndarray) -> np.ndarray:
    """Which of the hashes may be among those that the filter was built from."""
    bit = np.concatenate(_bit_numbers(hashes, filter_shift(filter)))
    is_set = (filter[bit >> np.uint64(3)] >> (bit & np.uint64(7)).astype(np.uint8)) & np.uint8(1)
    found: np.ndarray = is_set.reshape(len(_MULTIPLIERS), len(hashes)).all(axis=0)
    return found


def _bit_numbers(hashes: np.ndarray, shift: int) -> list[np.ndarray]:
    return [(hashes * np.uint64(multiplier)) >> np.uint64(shift) for multiplier in _MULTIPLIERS]
