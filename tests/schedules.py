"""Schedules at random: cuts, workers and ports in any order. No result may depend on them."""

from __future__ import annotations

import random
from collections.abc import Sequence

from scalein.exec.schedule import Schedule


class RandomSchedule(Schedule):
    """Every choice at random, from a seed; with several threads, who asks first is up to the machine."""

    def __init__(self, seed: int) -> None:
        self.seed, self._random = seed, random.Random(seed)

    def __repr__(self) -> str:
        return f"RandomSchedule({self.seed})"

    def assign(self, workers: int) -> int:
        return self._random.randrange(workers)

    def round_rows(self, proposed: int) -> int:
        return min(proposed, self._random.choice([1, 3, 10, 50, proposed]))

    def piece_rows(self) -> int | None:
        return self._random.choice([1, 2, 5, 20, None])

    def morsel_rows(self, proposed: int) -> int:
        return min(proposed, self._random.choice([1, 2, 7, 64, 1000, proposed]))

    def next_port(self, ready: Sequence[int], last: int) -> int:
        return self._random.choice(ready)
