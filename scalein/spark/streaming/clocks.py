"""Clocks: how far event time has come, told by tasks that each see a part of a batch.

The watermark is the greatest time so far less the delay; it moves between batches and never back. Times that lie far
ahead of the rest move nothing, as in jobs (`exec/event_time.py`): one broken clock must not close everybody's windows.
If most rows of `JUMP_BATCHES` batches in a row are far ahead, time has made a jump, and is believed.

A task says of each batch that it works on what it saw (`seen`); whoever has the words of all tasks comes to the same
time (`moved`). Times are integers in units of the time column.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace

import numpy as np
import pyarrow as pa

from scalein.exec.event_time import JUMP_BATCHES, as_integers
from scalein.storage.checked_json import Json, as_int, as_map


@dataclass(frozen=True, slots=True)
class Clock:
    """What is known of time between two batches."""

    greatest: int | None = None
    far_batches: int = 0  # one behind the other, most of whose rows were far ahead
    far_rows: int = 0
    watermark: int | None = None  # kept, for a flow may go on with another delay: what is closed stays closed

    def to_json(self) -> Json:
        return asdict(self)

    @staticmethod
    def of(given: Json) -> Clock:
        about = as_map(given)
        greatest, watermark = (None if about[name] is None else as_int(about[name])
                               for name in ("greatest", "watermark"))
        return Clock(greatest, as_int(about["far_batches"]), as_int(about["far_rows"]), watermark)


@dataclass(frozen=True, slots=True)
class Seen:
    """The times of some rows: the greatest that is not far ahead of what was known, if there is one; how many are far
    ahead; and the greatest that is not far ahead of their own middle.
    """

    rows: int
    near: int | None
    far: int
    middle: int
    believed: int


def seen(times: pa.Array, within: tuple[int, int], known: int | None, far: int | None) -> Seen:
    """What some times say, whose least and greatest are known. `far` is the distance that is not believed."""
    least, greatest = within
    count = len(times) - times.null_count
    if far is None or greatest - (least if known is None else known) <= far:
        return Seen(count, greatest, 0, greatest, greatest)
    values = np.asarray(as_integers(times).drop_null())
    middle = int(np.partition(values, len(values) // 2)[len(values) // 2])
    believed = int(values[values <= middle + far].max())
    if known is None:
        return Seen(count, None, 0, middle, believed)
    near = values[values <= known + far]
    return Seen(count, int(near.max()) if len(near) else None, count - len(near), middle, believed)


def moved(clock: Clock, what: Iterable[Seen], far: int | None, delay: int) -> Clock:
    """The time behind a batch."""
    now = _seen_by_all(clock, what, far)
    if now.greatest is None:
        return now
    reached = now.greatest - delay
    return replace(now, watermark=reached if clock.watermark is None else max(clock.watermark, reached))


def _seen_by_all(clock: Clock, what: Iterable[Seen], far: int | None) -> Clock:
    some = [each for each in what if each.rows]
    if not some:
        return clock
    if clock.greatest is None:
        by_middle = sorted(some, key=lambda each: each.middle)
        half = sum(each.rows for each in some) / 2
        weights = np.cumsum([each.rows for each in by_middle])
        middle = by_middle[int(np.searchsorted(weights, half))].middle
        return Clock(max(each.believed for each in some if far is None or each.believed <= middle + far))
    far_rows = sum(each.far for each in some)
    far_batches = clock.far_batches + 1 if far_rows * 2 > sum(each.rows for each in some) else 0
    near = [each.near for each in some if each.near is not None]
    if far_batches >= JUMP_BATCHES:
        return Clock(max(each.believed for each in some if each.far * 2 > each.rows), 0, clock.far_rows + far_rows)
    return Clock(max([clock.greatest, *near]), far_batches, clock.far_rows + far_rows)


def least_open(watermark: int, size: int, every: int) -> int:
    """The least time that is in a window which is not closed."""
    return ((watermark - size) // every + 1) * every
