"""A ring that goes on: sliding windows of a job, with the slices of all open windows in each key's record.

As in `ring.py` a row costs one probe. But windows are emitted when the caller says that time has come so far, not when
a row shows it, and the slices that no open window needs are cleared. The ring covers `size` slices from the first one
that an open window has a part in; the caller looks before it adds (`takes`), and keeps rows outside of it elsewhere.

Each table has its own key groups and passes over the others' rows. So what is to be done (rows, windows, slices to
clear) is only noted, and done table by table when somebody wants results: workers wait for each other once, not at each
window. Another number of workers first means that some serve several tables, or none. When a window has closed, new
tables are begun for them (`divide`); the old ones stay as they are, take no more rows, and go when all their slices
have closed. Meanwhile a key may be in several, so windows are put together from partial groups by slice. All content
leaves as partial groups (`leave`) where a column has its first null (records have no room for what does not happen),
and where most records are of keys that do not come any more.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from scalein.errors import InternalError
from scalein.exec.emit import Emitter
from scalein.exec.join_build import JoinTable
from scalein.exec.ring import FAR_SLICE
from scalein.exec.tables import HashTable, grown
from scalein.ir.passes.pass_through import kernel_steps
from scalein.ir.physical import WindowAggregate
from scalein.ir.stages import Group, GroupMode
from scalein.ir.tables import Slicing, Table
from scalein.kernels.call import call
from scalein.kernels.output import CHUNK_ROWS, Collector
from scalein.kernels.prepare import Prepared, specialised_table, table_exprs
from scalein.kernels.specialise import Specialiser
from scalein.kernels.workers import run_parallel
from scalein.layout import DONE, RING_ADVANCE, FrameData
from scalein.llvm_backend.cache import Compiled
from scalein.options import Options

FEW_RECORDS = 1 << 16
THREAD_ROWS = 1 << 14
_LAST = 1 << 126  # behind all times
DEAD_SHARE = 4  # times as many records as the last window had groups: most are of keys that come no more


class StandingRing:
    """Open windows of a node. Slices are numbered by time // slice size."""

    def __init__(self, node: WindowAggregate, partial_: WindowAggregate, joins: dict[int, JoinTable],
                 options: Options, size: int) -> None:
        node, partial_ = (replace(each, steps=kernel_steps(each)) for each in (node, partial_))
        assert node.table.window is not None
        self._windows, self._slices = (
            _Emitted(each, replace(each.table, slicing=Slicing.RING, ring=size), options) for each in (node, partial_))
        self._options, self._size = options, size
        self._slice_size = node.table.slice_size
        self._of_window = node.table.window.size // self._slice_size
        self._step = node.table.window.every // self._slice_size
        self._workers = self._now = options.workers  # that the tables are for, and that there are
        self._lock = threading.Lock()
        self._prepared = Prepared("ring", node.input.schema, node.steps, self._sink,
                                  (*node.keys, *table_exprs(node.table)), joins, options)
        self._node = node
        self._parts: list[_Part] = []
        self._old: list[_Old] = []
        self._notes: list[_Note] = []  # what the tables have to do yet
        self._noted_rows = 0
        self._given: list[pa.RecordBatch] = []  # windows that nobody has asked for yet
        self._first: int | None = None  # slice that a window begins with, the first that is read from here
        self._least = 0  # slice whose windows are all read from here, or closed
        self._last: int | None = None  # slice that may have a row
        self._emitted: int | None = None  # groups of the last window, if it was read from here alone

    def _sink(self, special: Specialiser) -> Group:
        # Of the facts so far: `add` begins anew when they change.
        for each in (self._windows, self._slices):
            each.table, keys = specialised_table(each.general, each.node.keys, special, nullable=False)
        self._prepared.key_exprs = keys
        return Group(self._windows.table, keys, GroupMode.HASH, owned=self._workers > 1)

    # --- rows

    def takes(self, least: int, greatest: int) -> bool:
        """Whether the ring covers these times."""
        low, high = least // self._slice_size, greatest // self._slice_size
        if low < -FAR_SLICE or high > FAR_SLICE:
            return False  # too near the limits of 64 bits for the arithmetic here
        first, least_ = self._first, self._least
        if first is None:  # earlier windows are open perhaps, and have rows that come later
            first = (low // self._step - (-(-self._of_window // self._step) - 1)) * self._step
            least_ = first + self._of_window - self._step
        if low < least_ or high >= first + self._size:
            return False
        self._first, self._least, self._last = first, least_, high if self._last is None else max(high, self._last)
        return True

    def add(self, batches: list[pa.RecordBatch], workers: int) -> list[pa.RecordBatch]:
        """Count rows in whose times it takes; gives partial groups that had to leave."""
        if not batches:
            return []
        self._now = workers
        left: list[pa.RecordBatch] = []
        # All of them: facts decide how the records look.
        has_news = any([self._prepared.learn(batch) for batch in batches])  # noqa: C419
        if has_news:
            left = self.partials(_LAST)
            self._parts, self._old = [], []
        if not self._parts:
            self._workers = workers
            compiled = self._prepared.compile()
            self._parts = [_Part(self._prepared, compiled, self._windows.table, self._options, worker, self._workers)
                           for worker in range(self._workers)]
        assert self._first is not None
        self._noted_rows += sum(batch.num_rows for batch in batches)
        self._note(_Note(partial(_Part.run, batches=batches, lock=self._lock, first=self._first, size=self._size)))
        return left

    def _note(self, note: _Note) -> None:
        if self._parts:
            self._notes.append(note)

    def _catch_up(self) -> None:
        """Do what was noted."""
        notes, rows = self._notes, self._noted_rows
        self._notes, self._noted_rows = [], 0
        if not notes:
            return
        rows += sum(note.windows for note in notes) * sum(part.records.count for part in self._parts)
        self._share([partial(part.play, notes) for part in self._parts], rows)
        for number, note in enumerate(notes):
            if note.emits is not None:
                found = self._batches(note.emits, [part.given[number] for part in self._parts])
                self._emitted = sum(batch.num_rows for batch in found) // note.windows
                self._given += found
        for part in self._parts:
            part.given.clear()

    def _batches(self, what: _Emitted, chunks: list[list[list[pa.Array]]]) -> list[pa.RecordBatch]:
        return [what.emitter.batch(arrays, self._prepared, what.table)
                for some in chunks for arrays in some if len(arrays[0])]

    def _share(self, jobs: list[Callable[[], None]], rows: int) -> None:
        """Run what is to be done for each table, on as many workers as there are now."""
        workers = max(1, min(self._now, rows // THREAD_ROWS, len(jobs)))  # a thread costs as much as many rows
        run_parallel([partial(_each, jobs[worker::workers]) for worker in range(workers)])

    @property
    def is_divided(self) -> bool:
        """Whether a key may be in several tables: then windows are made of `partials`."""
        return bool(self._old)

    @property
    def _tables(self) -> list[_Part]:
        return [*self._parts, *(part for old in self._old for part in old.parts)]

    @property
    def bytes(self) -> int:
        return sum(part.records.used for part in self._tables)

    @property
    def earliest(self) -> int | None:
        """A time before all that it has, if it has any."""
        first = self._first  # others look at it while it changes
        return None if first is None or not (self._parts or self._old) else first * self._slice_size

    @property
    def is_mostly_dead(self) -> bool:
        if self._emitted is None:
            return False
        return sum(part.records.count for part in self._tables) > max(FEW_RECORDS, DEAD_SHARE * self._emitted)

    # --- out

    def close(self, after: int, end: int) -> None:
        """Give windows that end behind `after`, up to `end`, in units of time; what only they and earlier ones need is
        gone. It is not divided.

        Slices are cleared at once: the next window's last ones have the places of the last window's first ones.
        """
        if self._first is None or self._last is None or not self._parts:
            return
        size, step = self._of_window, self._step
        start = max(self._first, -(-(after + 1) // self._slice_size) - size)
        start = -(-start // step) * step
        starts = range(start, min(end // self._slice_size - size, self._last) + 1, step)
        if start > self._first:
            self.forget(start * self._slice_size)
        if not starts or self._first is None:
            return
        self._windows.prepare(size)  # before threads do
        self._note(_Note(partial(_Part.emit, what=self._windows, slices=size, firsts=starts, forget=True),
                         self._windows, len(starts)))
        self._first = self._least = starts[-1] + step

    def given(self) -> list[pa.RecordBatch]:
        """The windows that were closed since the last time."""
        self._catch_up()
        found, self._given = self._given, []
        return found

    def partials(self, end: int) -> list[pa.RecordBatch]:
        """What it has of slices that begin before a time, as partial groups."""
        self._catch_up()
        self._emitted = None
        tables = self._tables
        if self._first is None or self._last is None or not tables:
            return []
        firsts = range(self._first, min(-(-end // self._slice_size) - 1, self._last) + 1)
        if not firsts:
            return []
        self._slices.prepare(1)  # before threads do
        found: list[list[list[pa.Array]]] = [[] for _ in tables]

        def emit(k: int) -> None:
            found[k] += tables[k].emit(self._slices, 1, firsts, forget=False)

        records = sum(part.records.count for part in tables)
        self._share([partial(emit, k) for k in range(len(tables))], records * len(firsts))
        return self._batches(self._slices, found)

    def forget(self, first_open: int) -> None:
        """Clear the slices before a time, which is where the first window starts that is open."""
        first = first_open // self._slice_size
        if self._first is None or first < self._first:
            return
        self._least = first
        if self._last is None or first > self._last:
            self._catch_up()
            self._first, self._last, self._parts, self._old = None, None, [], []  # everything is over
            return
        closed = range(self._first, min(first, self._first + self._size))
        self._note(_Note(partial(_Part.clear, slices=closed)))
        self._old = [old for old in self._old if old.last >= first]
        for old in self._old:
            for part in old.parts:
                part.clear(closed)
        self._first = first

    def divide(self, workers: int) -> None:
        """Begin new tables if there is another number of workers. What there is stays where it is."""
        if workers == self._workers or not self._parts or self._last is None:
            return
        self._catch_up()
        self._old.append(_Old(self._parts, self._last))
        self._parts, self._emitted = [], None

    def leave(self) -> list[pa.RecordBatch]:
        """All that it has, as partial groups; it is empty then."""
        found = self.partials(_LAST)
        self._last, self._parts, self._old = None, [], []
        return found


def _each(jobs: list[Callable[[], None]]) -> None:
    for job in jobs:
        job()


class _Old(NamedTuple):
    """Tables that take no more rows, and the last slice that they may have one of."""

    parts: list[_Part]
    last: int


class _Note(NamedTuple):
    """What each table has to do; if it emits windows, what they are read as and how many there are."""

    work: Callable[[_Part], list[list[pa.Array]] | None]
    emits: _Emitted | None = None
    windows: int = 0


class _Emitted:
    """What the records of a ring are read as: windows, or slices."""

    def __init__(self, node: WindowAggregate, table: Table, options: Options) -> None:
        self.node, self.general, self.table = node, table, table
        self.emitter = Emitter(node, None, {}, options)

    def prepare(self, slices: int) -> None:
        self.emitter.kernel(self.table, slices)


class _Part:
    """A table, of some key groups."""

    def __init__(self, prepared: Prepared, compiled: Compiled, table: Table, options: Options, worker: int,
                 workers: int) -> None:
        self._prepared, self._compiled, self._table = prepared, compiled, table
        self.records = HashTable(table, options)
        # Results of many borders in one chunk: untouched memory costs nothing, and a chunk for each would cost a
        # hundred faults for small pages.
        self._out: dict[_Emitted, Collector] = {}
        self.given: dict[int, list[list[pa.Array]]] = {}  # columns, by the number of a note
        self.frame = compiled.kernel.frame.new()
        self.frame["owner.workers"], self.frame["owner.worker"] = workers, worker
        prepared.attach_joins(self.frame)

    def play(self, notes: list[_Note]) -> None:
        for number, note in enumerate(notes):
            self.given[number] = note.work(self) or []

    def run(self, batches: list[pa.RecordBatch], lock: threading.Lock, first: int, size: int) -> None:
        """Count rows in, of slices from the first on."""
        self.frame["ring.open"], self.frame["ring.limit"] = first, first + size
        for batch in batches:
            with lock:  # what dictionaries stand for is shared
                self._prepared.bind(self.frame, batch)
            self.frame["first_row"], self.frame["row"], self.frame["end"] = 0, 0, batch.num_rows
            while (status := self._call(self.frame)) != DONE:
                if status == RING_ADVANCE:
                    raise InternalError("a row lies outside of the slices that a ring covers")
                grown(self.records, status, self.frame)

    def _call(self, frame: FrameData) -> int:
        self.records.attach(frame)
        status = call(self._compiled, frame)
        self.records.detach(frame)
        return status

    def emit(self, what: _Emitted, slices: int, firsts: range, forget: bool) -> list[list[pa.Array]]:
        if what not in self._out:
            compiled, items = what.emitter.kernel(what.table, slices)
            self._out[what] = Collector(compiled, compiled.kernel.frame.new(), items, CHUNK_ROWS)
        out, layout = self._out[what], self._table.layout
        frame = out.frame
        frame.keep["source"] = self.records
        chunks: list[list[pa.Array]] = []
        for first in firsts:
            frame["window.first"] = first
            for k in range(slices):
                frame[f"window.slice{k}"] = ((first + k) & (self._table.ring - 1)) * layout.ring_step
            frame["source"], frame["row"], frame["end"] = self.records.first, 0, self.records.count
            chunks += out.run()
            if forget:
                self.clear(range(first, first + firsts.step))
        return [*chunks, out.finish()]

    def clear(self, slices: range) -> None:
        layout = self._table.layout
        words = self.records.words(layout.size // 8)
        count = layout.ring_step // 8
        for number in slices:
            start = (layout.ring_start + (number & (self._table.ring - 1)) * layout.ring_step) // 8
            words[:, start : start + count] = np.frombuffer(layout.template, np.int64)[start : start + count]
