"""Streams written as small tables, which give their batches when the test allows it.

The test's thread adds and allows batches; the job's reader threads wait for them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import pyarrow as pa

from scalein.errors import BadArgument, here
from scalein.jobs.job import Job
from scalein.storage.checked_json import Json

LONG_S = 30.0


def batches(text: str, types: Mapping[str, pa.DataType] | None = None) -> list[pa.RecordBatch]:
    """Rows written below their names; a line of dashes ends a batch, a single dash is a null.

    Columns are integers, floats, booleans or text, as all of their values allow, unless `types` says more.

    >>> batches("t k \\n 1 a \\n --- \\n 2 -")[1].to_pydict()
    {'t': [2], 'k': [None]}
    """
    names, *lines = [line.split() for line in text.strip().splitlines() if line.strip()]
    parts: list[list[list[str]]] = [[]]
    for line in lines:
        if is_rule(line) or (line == ["-"] and len(names) > 1):
            parts.append([])
        elif len(line) != len(names):
            raise BadArgument(f"this row has {len(line)} values", at=here(), found=" ".join(line), has=", ".join(names))
        else:
            parts[-1].append(line)
    columns = [[None if row[k] == "-" else row[k] for part in parts for row in part] for k in range(len(names))]
    known = types or {}
    whole = pa.table([column_of(column, known.get(name)) for name, column in zip(names, columns, strict=True)], names)
    found: list[pa.RecordBatch] = []
    at = 0
    for part in parts:
        rows = whole.slice(at, len(part)).combine_chunks().to_batches()
        found += rows or [pa.RecordBatch.from_pylist([], whole.schema)]
        at += len(part)
    return found


def table(text: str, types: Mapping[str, pa.DataType] | None = None) -> pa.Table:
    """The rows of `batches` as one table.

    >>> table("t at \\n 1 2024-05-01T12:00", {"at": pa.timestamp("s")}).column("at")[0].as_py()
    datetime.datetime(2024, 5, 1, 12, 0)
    """
    return pa.Table.from_batches(batches(text, types))


def stream(text: str, types: Mapping[str, pa.DataType] | None = None) -> Stream:
    """A source of one partition that gives these batches, each as one source batch."""
    return Stream({"all": batches(text, types)})


def is_rule(words: list[str]) -> bool:
    """Whether a line is one of dashes."""
    return len(words) == 1 and len(words[0]) > 1 and set(words[0]) == {"-"}


def column_of(values: list[str | None], wanted: pa.DataType | None) -> pa.Array:
    """Values as they are written, in a type or in the one that they allow."""
    if wanted is not None:
        try:
            return pa.array(values, pa.string()).cast(wanted)
        except pa.ArrowInvalid as error:
            raise BadArgument(f"a value is no {wanted}", at=here(), found=error) from None
    known = [value for value in values if value is not None]
    if known and all(value in ("true", "false") for value in known):
        return pa.array([None if value is None else value == "true" for value in values], pa.bool_())
    for kind, type_ in ((int, pa.int64()), (float, pa.float64())):
        try:
            return pa.array([None if value is None else kind(value) for value in values], type_)
        except ValueError:
            continue
    return pa.array(values, pa.string())


# --- streams


class Stream:
    """A source of batches by partition, which gives them when the test allows it. Offsets count rows.

    `allowed` is how many batches of each partition may be read at first (default: all); `allow` and `push` allow more.
    With `ends=False` the source is unbounded, until `end()`.

    >>> import scalein as si
    >>> source = Stream({"a": batches("x \\n 1 \\n -- \\n 2")}, allowed={"a": 1})
    >>> seen = si.to_memory()
    >>> job = si.from_source(source).start(sink=seen)
    >>> until(lambda: seen.table().num_rows == 1, job)
    >>> source.allow("a", 2)
    >>> job.wait()
    True
    >>> seen.table().to_pydict()
    {'x': [1, 2]}
    """

    def __init__(self, batches: Mapping[str, Sequence[pa.RecordBatch]], *, ends: bool = True,
                 allowed: Mapping[str, int] | None = None) -> None:
        self.batches = {name: list(some) for name, some in batches.items()}
        self.bounded = ends
        self.schema = next(iter(self.batches.values()))[0].schema
        self._allowed = dict(allowed or {name: len(some) for name, some in self.batches.items()})
        self._changed = threading.Condition()
        self.quiet_rounds = dict.fromkeys(self.batches, 0)  # how often a reader was told that there are no rows, lately

    def partitions(self) -> list[str]:
        return list(self.batches)

    def push(self, partition: str, batch: pa.RecordBatch) -> None:
        """Add a batch to a partition; it and all before it may be read."""
        with self._changed:
            self.batches[partition].append(batch)
            self._allowed[partition] = len(self.batches[partition])
            self._changed.notify_all()

    def allow(self, partition: str, count: int) -> None:
        """Allow the first `count` batches of a partition to be read."""
        with self._changed:
            self._allowed[partition] = max(count, self._allowed[partition])
            self._changed.notify_all()

    def end(self) -> None:
        """Allow all batches to be read; no batch follows."""
        with self._changed:
            self.bounded = True
            self._allowed = {name: len(some) for name, some in self.batches.items()}
            self._changed.notify_all()

    def read(self, partition: str, offset: Json) -> Iterator[tuple[pa.RecordBatch, Json]]:
        at = offset if isinstance(offset, int) else 0
        number = begin = 0
        while True:
            with self._changed:
                some, is_ready = self.batches[partition], number < self._allowed[partition]
                if not is_ready:
                    if self.bounded and self._allowed[partition] >= len(some):
                        return
                    self._changed.wait(0.02)
            if not is_ready:
                yield some[0].slice(0, 0), at
                self.quiet_rounds[partition] += 1
                continue
            self.quiet_rounds[partition] = 0
            batch = some[number]
            number, begin = number + 1, begin + batch.num_rows
            if begin > at:
                rest = batch.slice(batch.num_rows - (begin - at))
                at = begin
                yield rest, at


def until(condition: Callable[[], bool], job: Job | None = None, most_s: float = LONG_S) -> None:
    """Wait for a condition that a job brings about; raises the job's error, or `AssertionError` after a timeout."""
    end = time.monotonic() + most_s
    while not condition():
        if job is not None and not job.is_active:
            job.wait()
            assert condition(), "the job ended before the condition held"
            return
        assert time.monotonic() < end, f"the condition did not hold within {most_s} s"
        time.sleep(0.0005)
