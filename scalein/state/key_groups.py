"""Key groups: the unit in which keyed state is assigned to partitions, and reassigned when a stream is rescaled.

A key's group is the top eight bits of its hash, whatever the number of partitions; each partition owns a contiguous
range of groups. (A job on one machine assigns nothing: its workers share one state.)
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

KEY_GROUPS = 256


def key_groups(hashes: np.ndarray) -> np.ndarray:
    """The key group of each row, 0 to 255, from the hashes of its keys."""
    return (hashes >> np.uint64(56)).astype(np.uint8)


def key_group_ranges(partitions: int) -> list[tuple[int, int]]:
    """The key groups [first, last) of each partition: ranges of (nearly) equal size.

    >>> key_group_ranges(3)
    [(0, 86), (86, 171), (171, 256)]
    """
    return list(pairwise(-(-KEY_GROUPS * k // partitions) for k in range(partitions + 1)))


def partition_of_key_groups(partitions: int) -> np.ndarray:
    """The partition of each of the 256 key groups.

    >>> partition_of_key_groups(3)[[0, 85, 86, 255]].tolist()
    [0, 0, 1, 2]
    """
    ranges = key_group_ranges(partitions)
    return np.repeat(np.arange(partitions, dtype=np.uint8), [last - first for first, last in ranges])
