"""Source and Sink: what a flow reads from and a job writes to, and how a flow holds a source.

A source yields batches, each with the offset after it; an offset is plain JSON and is stored in a job's checkpoint. A
sink receives batches and commits them in two phases. User-defined ones need no base class: any object with these
methods will do.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from typing import Protocol, runtime_checkable

import pyarrow as pa

from scalein.connectors.formats.statistics import Condition
from scalein.connectors.in_memory import checked, plain_schema
from scalein.errors import BadArgument, BadData, ScaleinError, SourceLoc
from scalein.storage.checked_json import Json

Read = Iterator[tuple[pa.RecordBatch, Json]]

QUIET_S = 0.1  # longest time for which the read of an unbounded source yields nothing


@runtime_checkable
class Source(Protocol):
    """Rows in one or more partitions, each with its own order.

    Optional attributes: `bounded = False` (the source never ends), `replays = False` (rows cannot be read twice; jobs
    with a checkpoint refuse such a source) and `name` (identifies the source among those of a flow when a job resumes).
    Optional methods return the same source reading less: `project(columns)` reads these columns only, `where(tests)`
    may leave out rows for which one of the tests (`scalein.connectors.formats.statistics.Condition`) does not hold,
    `within(memory)` prefetches at most that many bytes, and `until_now()`, for `start(until="now")`, makes an unbounded
    source end with the rows that are there now. `origin(offset)`, for dead letters, is the name of the place that an
    offset is in, and the number of rows before it there, or None.
    """

    @property
    def schema(self) -> pa.Schema:
        """The columns of every batch."""

    def partitions(self) -> Sequence[str]:
        """The names of the partitions: the same ones in every run."""

    def read(self, partition: str, offset: Json) -> Read:
        """Batches, each with the offset after it; None is the beginning.

        Reading from an offset yields exactly the rows that follow it. An unbounded source yields an empty batch (with
        an unchanged offset) whenever it has had no rows for 100 ms: a partition that does so for 5 s is idle and does
        not hold the watermark back, one that yields nothing is busy. The iterator may be closed at any time.
        """


@runtime_checkable
class Sink(Protocol):
    """Where a job's rows go, epoch by epoch. One thread calls at a time, but `commit` may run beside `write`.

    Optional methods: `acquire(run, checkpoint)` is called before anything else of each run. `run` is `<job>-<run>`,
    `checkpoint` the path of the job's checkpoint, or None. A sink that another job writes to raises. `take_over(job,
    name)` is called before that if the job begins from a savepoint of another `job`, which wrote to the same place,
    under names that begin with `name`: `open` gets what that job had committed.
    """

    def open(self, schema: pa.Schema, committed: Json, next: str) -> None:
        """Called once, before anything is written. `committed` is what the last committed `prepare` gave.

        The sink completes that commit, also where the sink of an earlier run staged it in another folder, and removes
        staged output that no commit names. `next` is `<job>-<run>`: the part before the first "-" is the
        job's own over all its runs, the whole is unique; names of new files begin with it.
        """

    def write(self, batch: pa.RecordBatch) -> None:
        """Rows of the current epoch."""

    def prepare(self) -> Json:
        """End the current epoch: its rows are durable, but not visible yet. Returns what `commit` needs.

        The result of one `prepare` is committed before the result of the next becomes a job's `committed`.
        """

    def commit(self, prepared: Json) -> None:
        """Make an epoch visible. Idempotent: it may be called again for the same epoch, also by a later run, and before
        that run's `open` if its checkpoint replaced one that had failed.
        """

    def close(self) -> None:
        """Release everything; rows after the last `prepare` are discarded."""


class BoundSource:
    """A source bound to a flow: the interface of `in_memory.Batches`, plus offsets. Every batch is checked.

    `schema` is in the types that scalein reads; after `project` it has those columns, in that order.
    """

    __slots__ = ("__weakref__", "_at", "_columns", "_whole", "name", "schema", "source", "table")

    def __init__(self, name: str, source: Source, at: SourceLoc, columns: Sequence[str] | None = None) -> None:
        self._at, self.name, self.source = at, name, source
        self._whole = plain_schema(source.schema, at)
        self._columns = columns
        self.schema = self._whole if columns is None else pa.schema([self._whole.field(name) for name in columns])
        self.table = None  # nothing is in memory

    @property
    def bounded(self) -> bool:
        """Whether the input ends."""
        return bool(getattr(self.source, "bounded", True))

    @property
    def replays(self) -> bool:
        """Whether it can be read again from an offset."""
        return bool(getattr(self.source, "replays", True))

    def partitions(self) -> list[str]:
        """The names of the source's partitions."""
        try:
            return list(self.source.partitions())
        except ScaleinError as error:
            error.locate(self._at)
            raise
        except Exception as error:
            raise self._raised(error, "its partitions were listed") from error

    def project(self, columns: Sequence[str]) -> BoundSource:
        """The same input with these columns; nothing else is read if the source supports projection."""
        if list(columns) == self.schema.names:
            return self
        project = getattr(self.source, "project", None)
        if project is None:
            return BoundSource(self.name, self.source, self._at, columns)
        return BoundSource(self.name, project(list(columns)), self._at)

    def where(self, tests: tuple[Condition, ...]) -> BoundSource:
        """The same input, perhaps without rows for which one of the tests does not hold."""
        where = getattr(self.source, "where", None)
        return self if where is None or not tests else BoundSource(self.name, where(tests), self._at, self._columns)

    def within(self, memory: int) -> BoundSource:
        """The same input, prefetching at most that many bytes, if the source supports a limit."""
        within = getattr(self.source, "within", None)
        return self if within is None else BoundSource(self.name, within(memory), self._at, self._columns)

    def until_now(self) -> BoundSource | None:
        """The same input up to the rows that are there now; None if the source does not know which these are."""
        until_now = getattr(self.source, "until_now", None)
        return None if until_now is None else BoundSource(self.name, until_now(), self._at, self._columns)

    def lenient(self, how: str, needed: Sequence[str] = ()) -> BoundSource:
        """The same input, in which a malformed record is a row, if the format supports that: see `formats/lenient.py`.
        """
        lenient = getattr(self.source, "lenient", None)
        return self if lenient is None else BoundSource(self.name, lenient(how, needed), self._at, self._columns)

    def content(self) -> str | None:
        """What tells the rows that there are now from others, if the source knows it without reading them."""
        content = getattr(self.source, "content", None)
        return None if content is None else str(content())

    def with_dictionaries(self) -> BoundSource:
        """The same input, in which text with few different values may be a dictionary: the types of columns change."""
        coded = getattr(self.source, "with_dictionaries", None)
        source = self.source if coded is None else coded()
        return self if source is self.source else BoundSource(self.name, source, self._at, self._columns)

    @property
    def row_groups_skipped(self) -> int:
        """How many row groups of Parquet `where` has left out so far."""
        return int(getattr(self.source, "row_groups_skipped", 0))

    def read(self) -> Iterator[pa.RecordBatch]:
        """All rows, partition by partition; refused for an input without an end."""
        if not self.bounded:
            raise BadArgument(f"the input ({self.name}) never ends, so its result cannot be collected", at=self._at,
                              hint="start(sink=...) runs it as a job")
        for partition in self.partitions():
            with closing(self.read_from(partition, None)) as batches:
                yield from (batch for batch, _ in batches if batch.num_rows)

    def read_from(self, partition: str, offset: Json) -> Generator[tuple[pa.RecordBatch, Json], None, None]:
        """The rows of a partition after an offset; any exception of the source is raised as `BadData`."""
        number, expected = 0, self.source.schema.remove_metadata()
        # Without types to convert and without non-nullable fields, comparing schemas is all the validation a batch
        # needs.
        is_simple = expected.types == self._whole.types and all(field.nullable for field in expected)
        batches: Read = iter(())
        try:
            batches = self.source.read(partition, offset)
            for batch, after in batches:
                if not (is_simple and isinstance(batch, pa.RecordBatch) and batch.schema.equals(expected)):
                    batch = checked(batch, self._whole, number, self._at)
                yield (batch if self._columns is None else batch.select(self._columns)), after
                number += 1
        except ScaleinError as error:
            error.locate(self._at)
            raise
        except Exception as error:
            raise self._raised(error, f"batch {number} of partition {partition!r} was read") from error
        finally:
            if hasattr(batches, "close"):
                batches.close()

    def _raised(self, error: Exception, when: str) -> BadData:
        return BadData(f"the source raised {type(error).__name__} while {when}", at=self._at, found=error,
                       source=self.name)


def of_source(source: object, at: SourceLoc) -> BoundSource:
    """A user's own source, if it has what one needs."""
    missing = [name for name in ("schema", "partitions", "read") if not hasattr(source, name)]
    if missing:
        raise BadArgument(f"this {type(source).__name__} is no source", at=at, found="no " + ", no ".join(missing),
                          hint="a source has a schema, partitions() and read(partition, offset): see scalein.Source")
    if not isinstance(source.schema, pa.Schema):  # type: ignore[attr-defined]
        raise BadArgument("the source's schema is no pyarrow schema", at=at,
                          found=repr(source.schema))  # type: ignore[attr-defined]
    return BoundSource(type(source).__name__, source, at)  # type: ignore[arg-type]
