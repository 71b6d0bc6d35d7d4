"""Settle: compute what groups can tell only when they are complete, and write it into their records.

Quantiles and lists come from logs: the entries of each group are put one behind the other and sorted by kernels; where
a group's begin is computed here, from the numbers in the records.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import partial

import numpy as np
import pyarrow as pa

from scalein.dtypes import DType, Kind
from scalein.ir.stages import FromRecords, GroupMode, Rank, Spread, Stage
from scalein.ir.tables import AccKind, Table
from scalein.layout import DONE, FrameData
from scalein.llvm_backend.cache import Compiled
from scalein.options import Options
from scalein.runtime.call import call, kernel
from scalein.runtime.memory import address, allocate
from scalein.runtime.sides import Heap, Log
from scalein.runtime.tables import DirectTable, HashTable, OneRecord, State
from scalein.runtime.workers import side_by_side

INLINE = 12
SHARED = 1 << 18  # pairs from which on it pays to sort them on all workers


@dataclass(frozen=True, slots=True)
class Settled:
    """The values of every list, by the accumulator's number: a group's lie where its record says."""

    lists: dict[int, pa.Array]


def settle(table: Table, state: State, options: Options) -> Settled:
    """Finish the groups of a state."""
    lists: dict[int, pa.Array] = {}
    for position, (number, acc) in enumerate(table.logs):
        assert state.sides is not None
        log = state.sides.logs[position]
        if acc.kind is AccKind.TOP:
            best = log.best(int(str(acc.params[0])))
            _place(table, state, number, np.bincount(_numbers(log, table, state)[best], minlength=state.count))
            lists[number] = _values(log, best, state)
            continue
        pairs = _ranked(table, state, number, log, options)
        if acc.kind is AccKind.LIST:
            lists[number] = _values(log, pairs[:, 1], state)
    return Settled(lists)


def shorten(table: Table, state: State, options: Options) -> None:
    """Cut long logs: to the best of each group, or to one entry for equal values of it."""
    for position, (number, acc) in enumerate(table.logs):
        assert state.sides is not None
        log = state.sides.logs[position]
        if not log.is_long:
            continue
        if acc.kind is AccKind.TOP:
            log.keep(log.entries[np.sort(log.best(int(str(acc.params[0]))))])
            _place(table, state, number, np.bincount(_numbers(log, table, state), minlength=state.count))
        else:
            _ranked(table, state, number, log, options, fold=True)
            log.shortened()


def _column(table: Table, state: State, name: str) -> np.ndarray:
    """A field of 8 bytes of every record."""
    return state.words(table.layout.size // 8)[:, table.layout.offset(name) // 8]


def _numbers(log: Log, table: Table, state: State) -> np.ndarray:
    """The number of each entry's record."""
    return (log.column("owner") - state.base) // table.layout.size


def _place(table: Table, state: State, number: int, counts: np.ndarray) -> None:
    """Write down how many entries each group has, and where they begin if they lie one group behind the other."""
    _column(table, state, f"acc{number}")[:] = counts
    _column(table, state, f"acc{number}.start")[:] = np.cumsum(counts) - counts


def mode_of(state: State) -> GroupMode:
    """How a state's records are found."""
    match state:
        case OneRecord():
            return GroupMode.ONE
        case DirectTable():
            return GroupMode.DIRECT
        case HashTable():
            return GroupMode.HASH


def _ranked(table: Table, state: State, number: int, log: Log, options: Options, fold: bool = False) -> np.ndarray:
    """All pairs of a log, group by group, each group's ranked."""
    counts = _column(table, state, f"acc{number}")
    _place(table, state, number, counts)
    pairs = allocate(max(16, 16 * log.count))[: 16 * log.count].view(np.int64).reshape(-1, 2)
    spread = kernel(Stage("spread", FromRecords(), (), Spread(table, number, mode_of(state))), options)
    _run(spread, state, log, log.first, 0, log.count, pairs, np.zeros(1, np.int64))
    rank = kernel(Stage("rank", FromRecords(), (), Rank(table, number, fold)), options)
    ends = np.cumsum(counts)
    workers = options.workers if log.count > SHARED and not fold else 1
    shares = [0, *np.searchsorted(ends, log.count * np.arange(1, workers) // workers).tolist(), state.count]
    jobs = []
    for first, last in itertools.pairwise(shares):
        longest = int(counts[first:last].max(initial=0))
        jobs.append(partial(_run, rank, state, log, state.first, first, last, pairs, allocate(16 * longest + 16)))
    side_by_side(jobs)
    return pairs


def _run(compiled: Compiled, state: State, log: Log, source: int, first: int, last: int, pairs: np.ndarray,
         spare: np.ndarray) -> None:
    frame: FrameData = compiled.kernel.frame.new()
    state.attach(frame)
    frame["source"], frame["row"], frame["end"], frame["base"] = source, first, last, state.base
    frame["pairs"], frame["pairs.count"], frame["spare"] = address(pairs), len(pairs), address(spare)
    frame["log"], frame["log.used"] = log.first, 0
    frame.keep["pairs"] = (pairs, spare)
    status = call(compiled, frame)
    assert status == DONE, status
    log.used = frame.get("log.used", log.used)


def _values(log: Log, order: np.ndarray, state: State) -> pa.Array:
    """The values of a log's entries in this order, as an Arrow array."""
    dtype, start = log.acc.dtype, log.layout.offset("value")
    size = 16 if dtype.is_bytes or dtype.is_decimal else 1 if dtype.kind is Kind.BOOL else dtype.bits // 8
    cells = np.ascontiguousarray(log.entries.view(np.uint8)[:, start : start + size][order])
    if dtype.is_bytes:
        assert state.sides is not None
        return _texts(cells, dtype, [state.sides.heap, *state.sides.kept])
    if dtype.kind is Kind.BOOL:
        return pa.array(cells[:, 0].astype(bool))
    return pa.Array.from_buffers(dtype.arrow, len(cells), [None, pa.py_buffer(cells)])


def _texts(cells: np.ndarray, dtype: DType, heaps: list[Heap]) -> pa.Array:
    """Cells as Arrow's views: the same 16 bytes, but for the pointer, which becomes a piece and an offset."""
    pieces = sorted((piece for heap in heaps for piece in heap.pieces), key=address)
    words = cells.view(np.int32).reshape(-1, 4)
    is_long = words[:, 0] > INLINE
    pointers = cells.view(np.int64).reshape(-1, 2)[is_long, 1]
    starts = np.array([address(piece) for piece in pieces], np.int64)
    numbers = np.searchsorted(starts, pointers, side="right") - 1
    words[is_long, 2] = numbers
    words[is_long, 3] = pointers - starts[numbers] if len(pointers) else 0
    view = pa.string_view() if dtype.is_string else pa.binary_view()
    buffers = [None, pa.py_buffer(cells), *map(pa.py_buffer, pieces)]
    return pa.Array.from_buffers(view, len(cells), buffers).cast(dtype.arrow)
