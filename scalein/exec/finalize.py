"""Finalize: compute the values of groups that need all of their rows, and write them into the records.

Quantiles and lists come from logs: kernels (`llvm_backend/sinks/side_state.py`) gather the entries of each group into
consecutive pairs, sort them and compute quantiles; the start of each group is computed here, from the counts in the
records.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import partial

import numpy as np
import pyarrow as pa

from scalein.cancellation import DETACHED_ROWS, run_detached
from scalein.dtypes import Kind
from scalein.exec.side_state import HEAP_BYTES, Heap, Log
from scalein.exec.tables import DirectTable, HashTable, OneRecord, State
from scalein.ir.stages import ExpandLog, FromRecords, GroupMode, Rank, Stage
from scalein.ir.tables import AccKind, Table
from scalein.kernels.call import call, kernel
from scalein.kernels.workers import run_parallel
from scalein.layout import DONE, INLINE_BYTES, FrameData, size_of
from scalein.llvm_backend.cache import Compiled
from scalein.memory import address, allocate
from scalein.options import Options

VIEW_STEP = 1 << 30  # bytes
PARALLEL_PAIRS = 1 << 18  # from which sorting on all workers pays
CALL_PAIRS = 1 << 19  # of a call, so that Ctrl-C takes effect soon


@dataclass(frozen=True, slots=True)
class ListValues:
    """The values of a list's entries, group by group; text as views, with the number of bytes before each."""

    values: pa.Array
    bytes_before: np.ndarray | None


def finalize(table: Table, state: State, options: Options) -> dict[int, ListValues]:
    """Finalize the groups of a state; returns the values of every list, by the accumulator's number."""
    lists: dict[int, ListValues] = {}
    for position, (number, acc) in enumerate(table.logs):
        assert state.side_state is not None
        log = state.side_state.logs[position]
        if acc.kind is AccKind.TOP:
            _retain_best(table, state, number, log, options)
            _set_counts(table, state, number, np.bincount(_numbers(log, table, state), minlength=state.count))
            lists[number] = _list_values(log, np.arange(log.count))
            continue
        pairs = _rank(table, state, number, log, options)
        if acc.kind is AccKind.LIST:
            values = partial(_list_values, log, pairs[:, 1])
            lists[number] = run_detached(values) if log.count > DETACHED_ROWS else values()
    return lists


def compact_logs(table: Table, state: State, options: Options, *, at_once: bool = False) -> None:
    """Compact long logs: to the best entries of each group, or to one entry for equal values of a group."""
    for position, (number, acc) in enumerate(table.logs):
        assert state.side_state is not None
        log = state.side_state.logs[position]
        if not log.is_long(at_once=at_once):
            continue
        if acc.kind is AccKind.TOP:
            _retain_best(table, state, number, log, options)
            log.retain(log.entries[np.argsort(log.column("row"), kind="stable")])
        else:
            before = log.count
            _rank(table, state, number, log, options, fold=True)
            log.folded(before)


def _retain_best(table: Table, state: State, number: int, log: Log, options: Options) -> None:
    """Retain only the best entries of each group, the best first, and their bytes.

    A full group has a limit from now on: a later entry must be better than its last.
    """
    rows = log.column("row")
    if np.any(rows[1:] < rows[:-1]):  # merged from several logs: ties must be in the order of rows
        log.retain(log.entries[np.argsort(rows, kind="stable")])
    most = int(str(log.acc.params[0]))
    counts = _column(table, state, f"acc{number}").copy()
    pairs = _rank(table, state, number, log, options)
    starts = np.cumsum(counts) - counts
    rank = np.arange(len(pairs)) - np.repeat(starts, counts)
    log.retain(log.entries[pairs[rank < most, 1]])
    _column(table, state, f"acc{number}")[:] = np.minimum(counts, most)
    last = log.column("by")[np.cumsum(np.minimum(counts, most))[counts >= most] - 1]
    _column(table, state, f"acc{number}.limit")[counts >= most] = last
    if log.acc.dtype.is_bytes:
        _compact_bytes(log)


def _compact_bytes(log: Log) -> None:
    """Copy the bytes that entries still point to into one new piece, and free the others."""
    start = log.layout.offset("value") // 8
    cells = log.entries[:, start : start + 2]
    is_long = cells[:, 0] & 0xFFFFFFFF > INLINE_BYTES
    views = _views(np.ascontiguousarray(cells[is_long]).view(np.uint8), [log.heap, *log.merged_heaps])
    text = views.cast(pa.large_binary())
    offsets = np.frombuffer(text.buffers()[1], np.int64)[: len(text)]
    used = text.buffers()[2].size if text.buffers()[2] is not None else 0
    piece = allocate(max(HEAP_BYTES, 2 * used))
    if used:
        piece[:used] = np.frombuffer(text.buffers()[2], np.uint8)
    cells[is_long, 1] = address(piece) + offsets
    log.merged_heaps, log.heap.pieces = [], []
    log.heap.use_piece(piece, used)


def _column(table: Table, state: State, name: str) -> np.ndarray:
    """A field of 8 bytes of every record."""
    return state.words(table.layout.size // 8)[:, table.layout.offset(name) // 8]


def _numbers(log: Log, table: Table, state: State) -> np.ndarray:
    """The number of each entry's record."""
    return (log.column("owner") - state.base) // table.layout.size


def _set_counts(table: Table, state: State, number: int, counts: np.ndarray) -> None:
    """Set the number of entries of each group, and the start of its entries if groups are consecutive."""
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


def _rank(table: Table, state: State, number: int, log: Log, options: Options, fold: bool = False) -> np.ndarray:
    """All pairs of a log, group by group, sorted within each group."""
    counts = _column(table, state, f"acc{number}")
    _set_counts(table, state, number, counts)
    pairs = allocate(max(16, 16 * log.count))[: 16 * log.count].view(np.int64).reshape(-1, 2)
    expand = kernel(Stage("expand_log", FromRecords(), (), ExpandLog(table, number, mode_of(state))), options)
    for first in range(0, log.count, CALL_PAIRS):
        _run(expand, state, log, log.first, first, min(log.count, first + CALL_PAIRS), pairs, np.zeros(1, np.int64))
    rank = kernel(Stage("rank", FromRecords(), (), Rank(table, number, fold)), options)
    ends = np.cumsum(counts)
    workers = options.workers if log.count > PARALLEL_PAIRS and not fold else 1
    shares = [0, *np.searchsorted(ends, log.count * np.arange(1, workers) // workers).tolist(), state.count]
    jobs = []
    for first, last in itertools.pairwise(shares):
        # Folding writes the log anew from its start on, in one call.
        pieces = [(first, last)] if fold else _pieces(ends, first, last)
        jobs.append(partial(_rank_groups, rank, state, log, counts, pieces, pairs))
    run_parallel(jobs)
    return pairs


def _pieces(ends: np.ndarray, first: int, last: int) -> list[tuple[int, int]]:
    """Ranges of groups with few pairs each, unless one group has more; `ends` are the ends of the groups' pairs."""
    start, stop = 0 if first == 0 else int(ends[first - 1]), 0 if last == 0 else int(ends[last - 1])
    if stop - start <= CALL_PAIRS:
        return [(first, last)]
    borders = np.searchsorted(ends, np.arange(start + CALL_PAIRS, stop, CALL_PAIRS))
    return list(itertools.pairwise(np.unique([first, *borders.clip(first, last).tolist(), last]).tolist()))


def _rank_groups(rank: Compiled, state: State, log: Log, counts: np.ndarray, pieces: list[tuple[int, int]],
                 pairs: np.ndarray) -> None:
    longest = max((int(counts[first:last].max(initial=0)) for first, last in pieces), default=0)
    spare = allocate(16 * longest + 16)
    for first, last in pieces:
        job = partial(_run, rank, state, log, state.first, first, last, pairs, spare)
        # The pairs of one group are sorted in one call; the frame keeps what that call uses alive.
        if int(counts[first:last].sum()) > DETACHED_ROWS:
            run_detached(job)
        else:
            job()


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


def _list_values(log: Log, order: np.ndarray) -> ListValues:
    """The values of a log's entries in this order."""
    dtype = log.acc.dtype
    # One element per value, for all types: numpy gathers those far faster than rows of bytes.
    plain = {1: "u1", 2: "u2", 4: "u4", 8: "u8", 16: "c16"}[size_of(dtype)]
    values = np.ndarray(log.count, plain, log.memory, log.layout.offset("value"), (log.layout.size,))
    cells = values[order].view(np.uint8).reshape(len(order), size_of(dtype))
    if dtype.is_bytes:
        sizes = cells.view(np.int32).reshape(-1, 4)[:, 0].astype(np.int64)
        return ListValues(_views(cells, [log.heap, *log.merged_heaps]), np.concatenate(([0], np.cumsum(sizes))))
    if dtype.kind is Kind.BOOL:
        return ListValues(pa.array(cells[:, 0].astype(bool)), None)
    return ListValues(pa.Array.from_buffers(dtype.arrow, len(cells), [None, pa.py_buffer(cells)]), None)


def _views(cells: np.ndarray, heaps: list[Heap]) -> pa.Array:
    """Cells as Arrow views: the same 16 bytes, except that the pointer becomes a buffer number and an offset."""
    # An offset has 31 bits, so a large piece is several buffers, each to the piece's end.
    parts = [piece[at:] for heap in heaps for piece in heap.pieces for at in range(0, len(piece), VIEW_STEP)]
    parts.sort(key=address)
    words = cells.view(np.int32).reshape(-1, 4)
    is_long = words[:, 0] > INLINE_BYTES
    pointers = cells.view(np.int64).reshape(-1, 2)[is_long, 1]
    starts = np.array([address(part) for part in parts], np.int64)
    numbers = np.searchsorted(starts, pointers, side="right") - 1
    words[is_long, 2] = numbers
    words[is_long, 3] = pointers - starts[numbers] if len(pointers) else 0
    buffers = [None, pa.py_buffer(cells), *map(pa.py_buffer, parts)]
    return pa.Array.from_buffers(pa.binary_view(), len(words), buffers)
