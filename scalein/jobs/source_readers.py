"""Source readers: each partition is read ahead by a thread of its own, into a queue of bounded size. Tables in memory
need neither: their batches are taken one by one.

The job takes what is queued. A long source batch, or one that exceeds the rate limit, is delivered in pieces; the
watermark moves after the last one.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import pyarrow as pa

from scalein.connectors.base import BoundSource
from scalein.connectors.in_memory import Batches
from scalein.errors import BadData
from scalein.exec.schedule import schedule
from scalein.storage.checked_json import Json, as_int, as_list

PIECE_ROWS = 1 << 21
AHEAD_ROWS = 1 << 23  # of a partition, that wait to be taken
AHEAD_BATCHES = 256
AHEAD_BYTES = 1 << 28  # where no limit is given
SLICE_S = 0.01  # of a rate, that is taken at once, and waited for afterwards
MAX_SAVED_S = 1.0  # of a rate that was not used: a source that was silent for an hour does not flood the job


@dataclass(frozen=True, slots=True)
class SourcePosition:
    """A position in a partition: the source's offset, and the rows taken of the batch after it."""

    offset: Json = None
    rows: int = 0

    def to_json(self) -> Json:
        return [self.offset, self.rows]

    @staticmethod
    def of(given: Json) -> SourcePosition:
        offset, rows = as_list(given)
        return SourcePosition(offset, as_int(rows))


class SourceBatch(NamedTuple):
    """A piece of a batch; `is_last` if the batch ends with it."""

    reader: Reader
    batch: pa.RecordBatch
    after: SourcePosition
    is_last: bool
    arrival_s: float  # when, by the monotonic clock
    size: int = 0  # bytes


@dataclass(eq=False)
class Reader:
    """A partition that is read ahead."""

    name: str
    data: Batches | BoundSource
    columns: list[str]
    position: SourcePosition  # after what was taken
    malformed_columns: list[str] = field(default_factory=list)  # filled only for lines that cannot be decoded
    pending: deque[SourceBatch] = field(default_factory=deque)
    rows: int = 0  # that are pending
    bytes: int = 0
    is_ended: bool = False  # nothing more is read
    error: BaseException | None = None
    most_bytes: int = AHEAD_BYTES
    quiet_s: float = 0.0  # seconds since the source first reported that it has no data
    _quiet_since: float | None = None

    @property
    def has_ended(self) -> bool:
        """Whether all its rows were taken; one that broke has more, which a later run will read."""
        return self.is_ended and self.error is None and not self.pending

    @property
    def is_bounded(self) -> bool:
        return not isinstance(self.data, BoundSource) or self.data.bounded

    @property
    def is_in_memory(self) -> bool:
        """Whether its batches are parts of a table that the user holds anyway."""
        return isinstance(self.data, Batches) and self.data.table is not None

    def hold_within(self, memory: int) -> None:
        """Half of it for batches that wait here, half for those that the source reads ahead."""
        self.most_bytes = min(AHEAD_BYTES, memory // 2)
        if isinstance(self.data, BoundSource):
            self.data = self.data.within(memory // 2)

    @property
    def is_full(self) -> bool:
        """Whether enough waits to be taken; one batch always may."""
        return bool(self.pending) and (self.rows >= AHEAD_ROWS or len(self.pending) >= AHEAD_BATCHES
                                       or self.bytes >= self.most_bytes)

    def deliveries(self) -> Iterator[SourceBatch]:
        at, skipped = self.position.offset, self.position.rows
        for batch, after in self._batches(at):
            first = min(skipped, batch.num_rows)  # the source may cut its rows elsewhere than the last time
            skipped -= first
            is_last = first == batch.num_rows > 0
            while not is_last:
                piece = batch if not first and batch.num_rows <= PIECE_ROWS else batch.slice(first, PIECE_ROWS)
                first += piece.num_rows
                is_last = first >= batch.num_rows
                position = SourcePosition(after, skipped) if is_last else SourcePosition(at, first)
                yield SourceBatch(self, piece, position, is_last, time.monotonic(), self._size(piece))
            at = after

    def enqueue(self, delivery: SourceBatch, now: float) -> None:
        """Keep a delivery until it is taken. An empty one says that the source has nothing now."""
        self.pending.append(delivery)
        self.rows += delivery.batch.num_rows
        self.bytes += delivery.size
        if delivery.batch.num_rows:
            self._quiet_since, self.quiet_s = None, 0.0
        else:
            self._quiet_since = now if self._quiet_since is None else self._quiet_since
            self.quiet_s = now - self._quiet_since

    def take(self, most: int | None) -> SourceBatch:
        """The next delivery; of one that has more rows than `most`, a piece."""
        found = self.pending.popleft()
        rows = found.batch.num_rows
        if most is not None and rows > most:
            size = found.size * most // rows
            self.pending.appendleft(found._replace(batch=found.batch.slice(most), size=found.size - size))
            after = SourcePosition(self.position.offset, self.position.rows + most)
            found = found._replace(batch=found.batch.slice(0, most), after=after, is_last=False, size=size)
        self.rows -= found.batch.num_rows
        self.bytes -= found.size
        self.position = found.after
        return found

    def _size(self, batch: pa.RecordBatch) -> int:
        """Its bytes; pyarrow takes 20 us to add them up."""
        if self._row_bytes is None:
            return int(batch.nbytes)
        return int(batch.num_rows * self._row_bytes)

    @cached_property
    def _row_bytes(self) -> float | None:
        types = [self.data.schema.field(name).type for name in self.columns]
        fixed = [each for each in types if pa.types.is_primitive(each)]
        return sum(each.bit_width for each in fixed) / 8 if len(fixed) == len(types) else None

    def _batches(self, offset: Json) -> Iterator[tuple[pa.RecordBatch, Json]]:
        """With the columns that are wanted; those of a table are chosen once, not batch by batch."""
        names = [*self.columns, *self.malformed_columns]
        if isinstance(self.data, BoundSource):
            return ((_with(names, batch), after) for batch, after in self.data.read_from(self.name, offset))
        if self.data.table is not None:
            return _numbered(self.data.table.select(names).to_batches(), offset)
        return _numbered((_with(names, batch) for batch in self.data.read()), offset)


def _with(names: list[str], batch: pa.RecordBatch) -> pa.RecordBatch:
    return batch if batch.schema.names == names else batch.select(names)


def _numbered(batches: Iterable[pa.RecordBatch], start: Json) -> Iterator[tuple[pa.RecordBatch, Json]]:
    """Batches in memory: an offset counts rows, since the same table may come in other batches the next time."""
    left, after = 0 if start is None else as_int(start), 0
    for batch in batches:
        after += batch.num_rows
        if batch.num_rows > left:
            yield batch.slice(left) if left else batch, after
        left = max(0, left - batch.num_rows)


class SourceReaders:
    """All partitions of all sources of a job."""

    def __init__(self, readers: list[Reader], rows_per_second: float | None, memory: int | None = None) -> None:
        self.readers = readers
        reading = [reader for reader in readers if not reader.is_in_memory]
        self._is_tight = memory is not None and bool(reading)
        if memory is not None:
            for reader in reading:
                reader.hold_within(memory // len(reading))
        self._rate = rows_per_second
        self._schedule = schedule()
        self._clock = self._schedule.clock()
        self._changed = threading.Condition()
        self._taken = 0
        self._began = self._clock.now()
        self._turn = 0
        self._held = {reader: reader.deliveries() for reader in readers if reader.is_in_memory}
        for reader in self._held:
            self._go_on(reader)
        self._threads = [threading.Thread(target=self._read, args=(reader,), name=f"scalein-read-{k}", daemon=True)
                         for k, reader in enumerate(reading)]
        for thread in self._threads:
            thread.start()

    def _go_on(self, reader: Reader) -> None:
        """Let the next batch of a table wait; of others a thread sees to that."""
        if reader in self._held and not reader.pending and not reader.is_ended:
            found = next(self._held[reader], None)
            if found is None:
                reader.is_ended = True
            else:
                reader.enqueue(found, self._clock.now())

    def _read(self, reader: Reader) -> None:
        error: BaseException | None = None
        size = 0  # read since Arrow gave what it had freed back to the system
        try:
            for delivery in reader.deliveries():
                size += delivery.size
                if self._is_tight and size > reader.most_bytes:
                    pa.default_memory_pool().release_unused()
                    size = 0
                with self._changed:
                    while not reader.is_ended and reader.is_full:
                        self._changed.wait()
                    if reader.is_ended:
                        return
                    reader.enqueue(delivery, self._clock.now())
                    self._changed.notify_all()
        except BaseException as raised:
            error = raised
        with self._changed:
            if not reader.is_ended:  # else it is no longer read
                reader.is_ended, reader.error = True, error
            self._changed.notify_all()

    @property
    def has_ended(self) -> bool:
        """Whether everything was taken; raises what ended a partition before its end."""
        has_ended = all(reader.is_ended and not reader.pending for reader in self.readers)
        if has_ended:
            self._raise()
        return has_ended

    def wake(self) -> None:
        """Let who waits look around."""
        with self._changed:
            self._changed.notify_all()

    def take(self, most: int, wait_s: float) -> list[SourceBatch]:
        """What there is, up to some rows, fairly from all partitions; nothing after some time without any."""
        most = min(most, self._allowed(wait_s))
        if most <= 0:
            return []
        self._raise()
        with self._changed:
            if not any(reader.pending for reader in self.readers):
                if self.has_ended:
                    return []
                self._changed.wait(wait_s)
            return self._take(most)

    def take_more(self, most: int) -> list[SourceBatch]:
        """What there is besides what was taken, up to some rows, without waiting; any thread may ask. Nothing if a rate
        says how much may be taken, or if what was taken makes room for more to be read than memory is for.
        """
        with self._changed:
            return self._take(most) if self._rate is None and not self._is_tight else []

    def _take(self, most: int) -> list[SourceBatch]:
        found: list[SourceBatch] = []
        rows = 0
        while rows < most:
            ready = [k for k, reader in enumerate(self.readers) if reader.pending]
            if not ready:
                break
            self._turn = self._schedule.next_port(ready, self._turn)
            reader = self.readers[self._turn]
            delivery = reader.take(self._schedule.piece_rows() if self._rate is None else most - rows)
            rows += delivery.batch.num_rows
            found.append(delivery)
            self._go_on(reader)
        self._changed.notify_all()
        self._taken += rows
        return found

    def _allowed(self, wait_s: float) -> int:
        """Rows that may be taken now."""
        if self._rate is None:
            return 1 << 62
        now = self._clock.now()
        self._began = max(self._began, now - self._taken / self._rate - MAX_SAVED_S)
        ahead_s = self._taken / self._rate - (now - self._began)
        if ahead_s > 0:
            self._clock.sleep(min(ahead_s, wait_s))
            return 0
        return max(1, int(max(-ahead_s, SLICE_S) * self._rate))

    def _raise(self) -> None:
        for reader in self.readers:
            if reader.error is not None and not reader.pending:
                error = reader.error
                if isinstance(error, Exception):
                    raise error
                raise BadData("a source could not be read", found=repr(error))

    def has_thread(self, thread: threading.Thread) -> bool:
        return thread in self._threads

    def has_more(self, wait_s: float) -> bool:
        """Whether there are rows that were not taken, or arrive within some time."""
        end = time.monotonic() + wait_s
        with self._changed:
            while not any(reader.rows for reader in self.readers) and (left_s := end - time.monotonic()) > 0:
                if all(reader.is_ended for reader in self.readers):
                    break
                self._changed.wait(left_s)
            return any(reader.rows for reader in self.readers)

    def end(self) -> None:
        """Read nothing more. What was read can be taken, at any rate; a table in memory was."""
        with self._changed:
            self._rate = None
            for reader in self.readers:
                reader.is_ended = reader.is_ended or reader not in self._held
            self._changed.notify_all()

    def close(self) -> None:
        """Stop reading."""
        self.end()
        for thread in self._threads:
            thread.join(timeout=2.0)
