"""Close batches: windows that close together are finished in batches whose partials and results fit into memory.

They are split by time, since a window needs its own slices only. A window that is too large alone is split by key: its
groups, by hash, are finished one share after the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from scalein.compiler import compile_flow
from scalein.dtypes import I64
from scalein.exec.bounded import Program
from scalein.ir import ops
from scalein.ir.exprs import Call, Expr, Named, columns
from scalein.ir.functions.hashing import P1
from scalein.ir.windows import Window
from scalein.options import Options

MIN_BYTES = 1 << 20  # that are always finished at once
SHARE = 4  # of what a step may keep, for what is finished at once: tables and results come on top
MAX_SHARES = 256


@dataclass(frozen=True, slots=True)
class Part:
    """Windows that end after a time, up to another; of these perhaps a share of the keys."""

    after: int
    end: int
    share: int = 0
    shares: int = 1


def most_bytes(memory: int | None) -> int | None:
    """How much may be finished at once."""
    return None if memory is None else max(MIN_BYTES, memory // SHARE)


def parts_of(whole: Part, starts: np.ndarray, sizes: np.ndarray, window: Window | None, most: int,
             has_keys: bool) -> Iterator[Part]:
    """A part in smaller ones, of at most `most` bytes if that can be. `starts` are those of all slices, in order, and
    `sizes` what waits of each.
    """
    before = np.concatenate([[0], np.cumsum(sizes)])
    if window is None:
        yield from _shared(whole, int(before[-1]), most, has_keys)
        return

    def size_of(after: int, end: int) -> int:
        least, behind = max(window.least_open(after), int(starts[0])), min(end, int(starts[-1]) + 1)
        return int(before[np.searchsorted(starts, behind)] - before[np.searchsorted(starts, least)])

    after, done = whole.after, whole.after
    for end in np.unique(window.last_ends(starts)).tolist():
        if end >= whole.end:
            break
        if done > after and size_of(after, end) > most:
            yield from _shared(Part(after, done), size_of(after, done), most, has_keys)
            after = done
        done = max(done, end)
    if done > after and size_of(after, whole.end) > most:
        yield from _shared(Part(after, done), size_of(after, done), most, has_keys)
        after = done
    yield from _shared(Part(after, whole.end), size_of(after, whole.end), most, has_keys)


def _shared(part: Part, size: int, most: int, has_keys: bool) -> Iterator[Part]:
    shares = min(MAX_SHARES, -(-size // most)) if has_keys else 1
    yield from (Part(part.after, part.end, share, max(1, shares)) for share in range(max(1, shares)))


class KeyShares:
    """Which share of the keys a row is of."""

    def __init__(self, schema: pa.Schema, keys: tuple[Expr, ...]) -> None:
        self._names = list(dict.fromkeys(name for key in keys for name in columns(key)))
        source = ops.Source("rows", pa.schema([schema.field(name) for name in self._names]), tuple(self._names))
        items = tuple(Named(f"h{k}", Call("hash", (key,), (), I64, False)) for k, key in enumerate(keys))
        self._program = Program(compile_flow(ops.Project(source, items)))

    def has(self, rows: pa.RecordBatch, part: Part, options: Options) -> np.ndarray:
        """For each row, whether it is of a part's share."""
        found = [np.zeros(0, np.uint64)]
        for batch in self._program.run([rows.select(self._names)], options):
            mixed = np.zeros(batch.num_rows, np.uint64)
            for column in batch.columns:
                mixed = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(P1) + np.asarray(column).view(np.uint64)
            found.append(mixed)
        is_of: np.ndarray = (np.concatenate(found) >> np.uint64(32)) % np.uint64(part.shares) == part.share
        return is_of
