"""Testing flows: streams written as small tables, whose pace the test decides, and tables compared by meaning.

>>> import scalein as si
>>> from scalein import testing
>>> clicks = testing.stream('''
...     t    user
...     0    ann
...     7    bob
...     ---------
...     31   ann
...     ---------
...     2    -
... ''')
>>> seen, late = si.to_memory(), si.to_memory()
>>> flow = si.from_source(clicks).with_watermark("t", 5).group_by(si.tumbling("t", 10)).agg(n=si.count())
>>> flow.start(sink=seen, late=late).wait()
>>> testing.assert_same(seen.table(), testing.table('''
...     window_start  window_end  n
...     0             10          2
...     30            40          1
... '''))
>>> late.table().to_pylist()
[{'t': 2, 'user': None}]
"""

from __future__ import annotations

import math
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa

from scalein.connectors.base import Json
from scalein.errors import BadArgument, here
from scalein.interp.values import from_arrow
from scalein.jobs.job import Job

_LONG_S = 30.0


# --- small tables


def batches(text: str, types: Mapping[str, pa.DataType] | None = None) -> list[pa.RecordBatch]:
    """Rows written below their names; a line of dashes ends a batch, a single dash is a null.

    Columns are integers, floats, booleans or text, as all of their values allow, unless `types` says more.

    >>> batches("t k \\n 1 a \\n --- \\n 2 -")[1].to_pydict()
    {'t': [2], 'k': [None]}
    """
    names, *lines = [line.split() for line in text.strip().splitlines() if line.strip()]
    parts: list[list[list[str]]] = [[]]
    for line in lines:
        if len(line) == 1 and set(line[0]) == {"-"} and (len(line[0]) > 1 or len(names) > 1):
            parts.append([])
        elif len(line) != len(names):
            raise BadArgument(f"this row has {len(line)} values", at=here(), found=" ".join(line), has=", ".join(names))
        else:
            parts[-1].append(line)
    columns = [[None if row[k] == "-" else row[k] for part in parts for row in part] for k in range(len(names))]
    known = types or {}
    whole = pa.table([_typed(column, known.get(name)) for name, column in zip(names, columns, strict=True)], names)
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
    """A source of one partition that gives these batches, each as one delivery."""
    return Stream({"all": batches(text, types)})


def _typed(values: list[str | None], wanted: pa.DataType | None) -> pa.Array:
    if wanted is not None:
        return pa.array(values, pa.string()).cast(wanted)
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
    """A source of batches by partition, which gives them when the test says so. Offsets count rows.

    `allowed` is how many batches of each partition may be read now, all if it is left away; `allow` and `push` let
    more through. With `ends=False` the source is endless, until `end()`.

    >>> import scalein as si
    >>> source = Stream({"a": batches("x \\n 1 \\n -- \\n 2")}, allowed={"a": 1})
    >>> seen = si.to_memory()
    >>> job = si.from_source(source).start(sink=seen)
    >>> until(lambda: seen.table().num_rows == 1, job)
    >>> source.allow("a", 2)
    >>> job.wait()
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

    def partitions(self) -> list[str]:
        return list(self.batches)

    def push(self, partition: str, batch: pa.RecordBatch) -> None:
        """One more batch of a partition; all before it may be read as well."""
        with self._changed:
            self.batches[partition].append(batch)
            self._allowed[partition] = len(self.batches[partition])
            self._changed.notify_all()

    def allow(self, partition: str, count: int) -> None:
        """Let the first so many batches of a partition be read."""
        with self._changed:
            self._allowed[partition] = max(count, self._allowed[partition])
            self._changed.notify_all()

    def end(self) -> None:
        """Let everything be read; nothing follows."""
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
                continue
            batch = some[number]
            number, begin = number + 1, begin + batch.num_rows
            if begin > at:
                rest = batch.slice(batch.num_rows - (begin - at))
                at = begin
                yield rest, at


def until(condition: Callable[[], bool], job: Job | None = None, most_s: float = _LONG_S) -> None:
    """Wait for something that a job brings about; raises what ended the job, or `AssertionError` if it never comes."""
    end = time.monotonic() + most_s
    while not condition():
        if job is not None and not job.is_active:
            job.wait()
            assert condition(), "the job has ended before"
            return
        assert time.monotonic() < end, f"it has not come within {most_s} s"
        time.sleep(0.0005)


# --- the same rows

Row = tuple[Any, ...]

# What rounding may cost: float32 columns are compared more loosely.
F64_TOLERANCE = 1e-12
F32_TOLERANCE = 1e-5


def assert_same(got: pa.Table, want: pa.Table, *, ordered: bool = False, tolerance: float = 0.0) -> None:
    """Names, types and rows agree, in any order unless `ordered`: NaN equals NaN, -0.0 equals 0.0.

    Floats agree up to rounding; `tolerance` widens that for floats that were summed, relative to values of size 1 and
    above.

    >>> assert_same(table("x \\n 1 \\n 2"), table("x \\n 2 \\n 1"))
    """
    assert got.schema.names == want.schema.names, f"names: {got.schema.names} != {want.schema.names}"
    assert got.schema.types == want.schema.types, f"types: {got.schema.types} != {want.schema.types}"
    assert got.num_rows == want.num_rows, f"rows: {got.num_rows} != {want.num_rows}\n{_show(got)}\n{_show(want)}"
    near = [_nearness(type_, tolerance) for type_ in want.schema.types]
    got_rows, want_rows = _rows(got), _rows(want)
    if ordered:
        for number, (mine, theirs) in enumerate(zip(got_rows, want_rows, strict=True)):
            assert _close(mine, theirs, near), f"row {number}: {mine} != {theirs} in {got.schema.names}"
    else:
        _assert_same_bag(got_rows, want_rows, near, got.schema.names)


def _rows(table: pa.Table) -> list[Row]:
    return list(zip(*([_frozen(value) for value in from_arrow(column)] for column in table.columns), strict=True))


def _frozen(value: Any) -> Any:
    """A value that can be hashed; nested ones are compared as a whole."""
    match value:
        case list() | tuple():
            return tuple(map(_frozen, value))
        case dict():
            return tuple((name, _frozen(inner)) for name, inner in value.items())
    return value


def _show(table: pa.Table) -> str:
    return str(table.slice(0, 20).to_pydict())


def _nearness(type_: pa.DataType, tolerance: float) -> tuple[float, float]:
    """Relative and absolute tolerance of a column."""
    if pa.types.is_float32(type_):
        return max(F32_TOLERANCE, tolerance), tolerance
    return max(F64_TOLERANCE, tolerance), tolerance


def _close(mine: Row, theirs: Row, near: list[tuple[float, float]]) -> bool:
    return all(map(_equal, mine, theirs, near))


def _equal(mine: Any, theirs: Any, near: tuple[float, float]) -> bool:
    if isinstance(mine, float) and isinstance(theirs, float):
        if math.isnan(mine) or math.isnan(theirs):
            return math.isnan(mine) and math.isnan(theirs)
        return math.isclose(mine, theirs, rel_tol=near[0], abs_tol=near[1])
    if isinstance(mine, tuple) and isinstance(theirs, tuple):
        return len(mine) == len(theirs) and all(_equal(a, b, near) for a, b in zip(mine, theirs, strict=True))
    return type(mine) is type(theirs) and bool(mine == theirs)


def _assert_same_bag(got: list[Row], want: list[Row], near: list[tuple[float, float]], names: list[str]) -> None:
    """The rows agree in some order: sorted within equal values of everything that is no float, then pair by pair."""
    mine, theirs = _buckets(got), _buckets(want)
    missing, extra = theirs.keys() - mine.keys(), mine.keys() - theirs.keys()
    assert not missing and not extra, f"{names}\nmissing {list(missing)[:5]}\nextra {list(extra)[:5]}"  # noqa: PT018
    for exact, rows in mine.items():
        others = theirs[exact]
        assert len(rows) == len(others), f"{names}: {len(rows)} rows instead of {len(others)} like {rows[0]}"
        rows.sort(key=_sort_key)
        others.sort(key=_sort_key)
        if not all(_close(a, b, near) for a, b in zip(rows, others, strict=True)):
            _assert_matching(rows, others, near, names)


def _assert_matching(got: list[Row], want: list[Row], near: list[tuple[float, float]], names: list[str]) -> None:
    """Slower: each wanted row takes the first free row close to it, since rounding may have changed the order."""
    free = list(got)
    for row in want:
        found = next((i for i, other in enumerate(free) if _close(other, row, near)), None)
        assert found is not None, f"no row like {row} in {names}; left are {free[:5]}"
        del free[found]


def _buckets(rows: list[Row]) -> dict[Row, list[Row]]:
    buckets: dict[Row, list[Row]] = defaultdict(list)
    for row in rows:
        buckets[tuple(map(_without_floats, row))].append(row)
    return buckets


def _without_floats(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_without_floats, value))
    return "float" if isinstance(value, float) else value


def _sort_key(row: Row) -> list[tuple[bool, float]]:
    return [(math.isnan(value), 0.0 if math.isnan(value) else value) for value in row if isinstance(value, float)]
