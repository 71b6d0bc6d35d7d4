"""Costs of a flow, as a profile measured them, in seconds of one worker and bytes: all that a model predicts from.

A job works in rounds. A round takes a fixed time, a time for each batch that it takes in, for each call of a kernel
(small batches are put together before), and for each row. Three kinds of it scale differently. Kernels run in parallel.
What prepares them, Python and pyarrow, is done by any worker, but by one at a time, while others are in their kernels.
What ends a round, such as closing windows, waits for all and is one thread's. Long rounds are not made of short ones:
large ones are aggregated before their times are known, and tables grow; so `Costs.alone` has those of one batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from math import ceil, exp, log

import numpy as np

from scalein.exec.morsels import COALESCED_ROWS, SMALL_ROWS
from scalein.ir.estimate import StageCost

HEAVIEST = 1_000  # keys whose places are looked at one by one; the others are spread evenly


@dataclass(frozen=True, slots=True)
class StageShare:
    """A compiled stage in the flow: the cost of one of its rows by its code, and what was observed of it."""

    cost: StageCost
    rows: float  # of the stage, for a row of the source
    seconds: float  # for a row of the source
    is_serial: bool = False  # one worker computes it at a time: rows of a key, one after the other


@dataclass(frozen=True, slots=True)
class Groups:
    """The distinct keys of a stateful step in a sample, by how often each occurs.

    >>> even = Groups(rows=1000, of_count={10: 100})  # 100 keys, ten times each
    >>> round(even.expected(1000)), round(even.expected(20)), round(even.expected(10**9))
    (100, 18, 100)
    >>> new = Groups(rows=1000, of_count={1: 1000})  # each row a key of its own
    >>> round(new.expected(500)), new.is_growing
    (500, True)
    """

    rows: int
    of_count: Mapping[int, int]  # how many keys occur so often

    @property
    def distinct(self) -> int:
        return sum(self.of_count.values())

    @property
    def unseen(self) -> float:
        """How many keys the sample has not met, at least (Chao's estimate, by keys that occur once and twice)."""
        once, twice = self.of_count.get(1, 0), self.of_count.get(2, 0)
        return once * (once - 1) / (2 * (twice + 1))

    @property
    def new_share(self) -> float:
        """The share of rows that bring a new key at the sample's end (Good and Turing)."""
        return self.of_count.get(1, 0) / max(1, self.rows)

    @property
    def is_growing(self) -> bool:
        """Whether the sample says little about how many keys there are: most of its keys occur once."""
        return self.distinct > 0 and self.of_count.get(1, 0) > 0.5 * self.distinct

    @property
    def heaviest(self) -> float:
        """The share of rows that the most frequent key has."""
        return max(self.of_count, default=0) / max(1, self.rows)

    def fullest(self, parts: int) -> float:
        """The share of rows in the part that has most of them, where all rows of a key are in one, by its hash.

        >>> 0.8 <= Groups(rows=100, of_count={80: 1, 1: 20}).fullest(8) < 0.9
        True
        >>> round(Groups(rows=10**6, of_count={1: 10**6}).fullest(8), 3), Groups(0, {}).fullest(4)
        (0.125, 0.25)
        """
        counts: list[int] = []
        for count in sorted(self.of_count, reverse=True):
            counts += [count] * min(self.of_count[count], HEAVIEST - len(counts))
        if not counts:
            return 1 / parts
        owners = np.random.default_rng(1).integers(0, parts, len(counts))
        heavy = np.bincount(owners, np.array(counts) / self.rows, parts)
        return float(heavy.max()) + (1 - sum(counts) / self.rows) / parts

    def expected(self, rows: float, keys: int | None = None) -> float:
        """The number of distinct keys among `rows` rows; `keys` is their number in all, where it is known."""
        if rows <= self.rows:
            left = 1 - rows / max(1, self.rows)
            found = float(sum(number * (1 - left ** count) for count, number in self.of_count.items()))
        else:
            unseen = self.unseen if keys is None else max(0.0, keys - self.distinct)
            found = float(self.distinct)
            if unseen > 0:
                once = max(1, self.of_count.get(1, 0))
                found += unseen * (1 - exp(-(rows - self.rows) / max(1, self.rows) * once / unseen))
        return found if keys is None else min(found, float(keys))

    def share_of_hottest(self, part: float) -> float:
        """The share of rows whose keys are among this part of the keys, the most frequent ones.

        >>> Groups(rows=20, of_count={10: 1, 1: 10}).share_of_hottest(1 / 11)
        0.5
        """
        left, rows = part * self.distinct, 0.0
        for count in sorted(self.of_count, reverse=True):
            taken = min(left, self.of_count[count])
            rows, left = rows + taken * count, left - taken
            if left <= 0:
                break
        return rows / max(1, self.rows)


@dataclass(frozen=True, slots=True)
class Span:
    """How long something stays, in seconds of event time; where times have no unit, in rows of the step."""

    slices: float  # of time that are kept apart
    seconds: float = 0.0
    rows: float = 0.0


@dataclass(frozen=True, slots=True)
class StateCost:
    """A step with state."""

    name: str
    groups: Groups
    group_bytes: float
    rows: float  # of the step, for a row of the source
    span: Span | None = None  # None: it stays for ever
    keeps_rows: bool = False  # each is kept, whatever its key

    def count(self, rate: float, keys: int | None, rows: float) -> float:
        """The groups that there are when `rows` rows of the source have come, at a rate.

        >>> state = StateCost("sort", Groups(100, {1: 100}), 24.0, 0.5, keeps_rows=True)
        >>> state.count(1e6, None, 1e9), state.count(1e6, 1000, 1e9)
        (500000000.0, 500000000.0)
        """
        total = rows * self.rows
        within = total if self.span is None else self.span.rows or rate * self.rows * self.span.seconds
        if self.keeps_rows:
            return min(total, within)
        if self.span is None:
            return self.groups.expected(total, keys)
        return self.span.slices * self.groups.expected(min(total, within) / self.span.slices, keys)


    def changed(self, rate: float, keys: int | None, seconds: float) -> float:
        """The groups that the rows of `seconds` change, at `rate` rows a second: each slice of time has its own.

        >>> hot = StateCost("group_by", Groups(1000, {10: 100}), 24.0, 1.0, Span(2.0, seconds=10.0))
        >>> round(hot.changed(1e6, None, 1.0)), round(hot.changed(1e6, None, 50.0))
        (100, 1000)
        """
        rows = rate * self.rows * seconds
        if self.keeps_rows:
            return rows
        slices = 1.0
        if self.span is not None:
            slices = max(1.0, self.span.slices * (rows / self.span.rows if self.span.rows else
                                                  seconds / max(self.span.seconds, 1e-9)))
        return slices * self.groups.expected(rows / slices, keys)


Curve = tuple[tuple[float, float], ...]  # rows of a round, and the seconds of each


@dataclass(frozen=True, slots=True)
class Costs:
    """Of one worker, by a profile."""

    batch_s: float  # that prepares kernels, as the next two
    call_s: float
    row_s: float
    round_s: float  # that ends a round, as the next one
    end_row_s: float
    kernel_call_s: float
    kernel_row_s: Curve
    spread: float = 0.03  # relative, of what was measured
    variability: float = 0.1  # squared coefficient of variation of the time of a batch
    rows: int = 0  # of the sample
    bytes: float = 0.0  # of a row, in the columns that the flow reads
    rows_out: float = 0.0  # for a row of the source
    stages: tuple[StageShare, ...] = ()
    states: tuple[StateCost, ...] = ()
    emits_late: bool = True  # a round may be as long as rows are at hand
    alone: Costs | None = None  # of rounds of one batch; None: as of long rounds

    def calls(self, rows: float, batch_rows: float) -> float:
        """The number of kernel calls in a round of `rows` rows."""
        return rows / batch_rows if batch_rows >= SMALL_ROWS else ceil(rows / COALESCED_ROWS)

    def prepare_s(self, rows: float, batch_rows: float) -> float:
        """Seconds that prepare kernels in a round of `rows` rows, which come in batches of `batch_rows`."""
        return self.batch_s * rows / batch_rows + self.call_s * self.calls(rows, batch_rows) + self.row_s * rows

    def end_s(self, rows: float) -> float:
        """Seconds that end a round of `rows` rows."""
        return self.round_s + self.end_row_s * rows

    def kernels_s(self, rows: float, batch_rows: float) -> float:
        """Seconds in kernels in a round of `rows` rows."""
        return self.kernel_call_s * self.calls(rows, batch_rows) + rows * _read(self.kernel_row_s, rows)


def _read(points: Curve, rows: float) -> float:
    """The value of a curve, straight between its points by the logarithm of the rows, and flat outside."""
    if rows <= points[0][0]:
        return points[0][1]
    for (x0, y0), (x1, y1) in pairwise(points):
        if rows <= x1:
            return y0 + (y1 - y0) * (log(rows) - log(x0)) / (log(x1) - log(x0))
    return points[-1][1]


@dataclass(frozen=True, slots=True)
class Round:
    """What a profile measured of rounds that are alike, all together."""

    rounds: int
    batches: int
    calls: int
    rows: int
    prepare_s: float
    end_s: float
    kernels_s: float

    @property
    def row_count(self) -> float:
        """Rows of one of them."""
        return self.rows / self.rounds

    @property
    def seconds(self) -> float:
        return self.prepare_s + self.end_s + self.kernels_s


@dataclass(frozen=True, slots=True)
class Fit:
    """Costs taken apart, and how far they are from what was measured (relative, root of the mean square)."""

    batch_s: float
    call_s: float
    row_s: float
    round_s: float
    end_row_s: float
    kernel_call_s: float
    kernel_row_s: Curve
    error: float


def fit(measured: Sequence[Round]) -> Fit:
    """Take apart what rounds of different sizes took. No cost is negative; errors count relative to whole rounds.

    What is left of the kernels' time after their calls is that of rows, as a curve over the size of the round: so it
    goes through what was measured.

    >>> rounds = [Round(n, n * k, n * c, n * r, n * (k * 1e-5 + c * 2e-5), n * 1e-4, n * (c * 3e-6 + r * 1e-8))
    ...           for n, k, c, r in [(10, 1, 1, 1000), (5, 50, 1, 50_000), (4, 1, 1, 60_000), (1, 32, 32, 2_000_000)]]
    >>> found = fit(rounds)
    >>> round(found.round_s * 1e6), round(found.batch_s * 1e6), round(found.call_s * 1e6), round(found.error, 3)
    (100, 10, 20, 0.0)
    >>> round(found.kernel_call_s * 1e6), [round(seconds * 1e9) for _, seconds in found.kernel_row_s]
    (3, [10, 10, 10, 10])
    """
    whole = np.array([each.seconds for each in measured])
    rounds, batches, calls, rows = (np.array([each[k] for each in (
        (one.rounds, one.batches, one.calls, one.rows) for one in measured)], float) / whole for k in range(4))
    prepare, ends, kernels = (np.array([each[k] for each in (
        (one.prepare_s, one.end_s, one.kernels_s) for one in measured)]) / whole for k in range(3))
    of_prepare, of_end = np.stack([batches, calls, rows], 1), np.stack([rounds, rows], 1)
    batch_s, call_s, row_s = map(float, _least_squares(of_prepare, prepare))
    round_s, end_row_s = map(float, _least_squares(of_end, ends))
    kernel_call_s = float(_least_squares(np.stack([calls, rows], 1), kernels)[0])
    curve: dict[float, list[float]] = {}
    for each in measured:
        left = max(1e-13, (each.kernels_s - kernel_call_s * each.calls) / each.rows)
        curve.setdefault(each.row_count, []).append(left)
    points = tuple((count, float(np.mean(found))) for count, found in sorted(curve.items()))
    errors = of_prepare @ [batch_s, call_s, row_s] - prepare + of_end @ [round_s, end_row_s] - ends
    return Fit(batch_s, call_s, row_s, round_s, end_row_s, kernel_call_s, points, float(np.sqrt(np.mean(errors ** 2))))


def _least_squares(columns: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """x at least 0 with the least |columns @ x - wanted|, by trying which of a few variables are 0."""
    count = columns.shape[1]
    best, least = np.zeros(count), float((wanted ** 2).sum())
    for size in range(1, count + 1):
        for used in map(list, combinations(range(count), size)):
            found, *_ = np.linalg.lstsq(columns[:, used], wanted, rcond=None)
            if (found < 0).any():
                continue
            error = float(((columns[:, used] @ found - wanted) ** 2).sum())
            if error < least * (1 - 1e-9):
                least, best = error, np.zeros(count)
                best[used] = found
    return best
