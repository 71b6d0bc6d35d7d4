"""Order statistics of more numbers than memory holds, and the numbers reduced to them.

Numbers are compared as unsigned words in the same order, in which NaN is the greatest and both zeros are equal. The
number of some rank is found 16 bits at a time, from the highest on: each pass over all numbers counts those that begin
with the bits found so far, by their next 16 bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from scalein.cancellation import raise_if_cancelled

DIGIT_BITS = 16
DIGITS = 1 << DIGIT_BITS
WORD_BITS = 64
_SIGN = np.uint64(1 << 63)


def words_of(numbers: np.ndarray) -> np.ndarray:
    """Floats as words in the same order."""
    plain = np.where(np.isnan(numbers), np.nan, numbers + 0.0).view(np.uint64)
    return np.where(plain & _SIGN, ~plain, plain | _SIGN)


def floats_of(words: np.ndarray) -> np.ndarray:
    """The floats that words stand for."""
    return np.where(words & _SIGN, words & ~_SIGN, ~words).view(np.float64)


def quantile_neighbours(batches: Callable[[], Iterator[np.ndarray]], shares: Sequence[float]) -> np.ndarray:
    """The numbers between which the quantiles of all batches lie, as words in order; `batches` reads them again."""
    found: dict[int, list[int]] = {}  # the bits found so far -> the ranks among the words that begin with them
    for shift in range(WORD_BITS - DIGIT_BITS, -1, -DIGIT_BITS):
        counts = {prefix: np.zeros(DIGITS, np.int64) for prefix in found or (0,)}
        for words in batches():
            raise_if_cancelled()
            begins = None if not found else words >> np.uint64(shift + DIGIT_BITS)
            for prefix, count in counts.items():
                ours = words if begins is None else words[begins == np.uint64(prefix)]
                digits = (ours >> np.uint64(shift)) & np.uint64(DIGITS - 1)
                count += np.bincount(digits.astype(np.int64), minlength=DIGITS)
        found = _next_digit(found or {0: _ranks(int(counts[0].sum()), shares)}, counts)
    return np.array(sorted(found), np.uint64)


def _ranks(count: int, shares: Sequence[float]) -> list[int]:
    """The ranks next to share * (count - 1), which kernels interpolate between."""
    places = [share * float(count - 1) for share in shares] if count else []
    return sorted({rank for place in places for rank in (math.floor(place), math.ceil(place))})


def _next_digit(found: dict[int, list[int]], counts: dict[int, np.ndarray]) -> dict[int, list[int]]:
    longer: dict[int, list[int]] = {}
    for prefix, ranks in found.items():
        ends = np.cumsum(counts[prefix])
        for rank in ranks:
            digit = int(np.searchsorted(ends, rank, side="right"))
            before = int(ends[digit] - counts[prefix][digit])
            longer.setdefault(prefix << DIGIT_BITS | digit, []).append(rank - before)
    return longer


def reduced(words: np.ndarray, statistics: np.ndarray) -> np.ndarray:
    """For each word the greatest of the statistics that is not above it, or the least of them.

    That preserves the order, and the statistics themselves: they have the same ranks among the reduced words.
    """
    places = np.searchsorted(statistics, words, side="right") - 1
    return statistics[np.maximum(places, 0)]
