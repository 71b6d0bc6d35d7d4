"""Flows of several streams, tested step by step: what comes in, and what must come out, in one table.

Lines are played in their order, each when the job has done with the one before, so results do not depend on chance.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby

import pyarrow as pa

from scalein.api.flow import Flow
from scalein.api.sinks import to_memory
from scalein.api.sources import from_source
from scalein.errors import BadArgument, here
from scalein.jobs.job import Job
from scalein.testing.control import Clock
from scalein.testing.same import assert_same
from scalein.testing.streams import Stream, column_of, is_rule, until

_WORDS = ("=", "late", "wait", "end")


@dataclass(slots=True)
class _Line:
    """One line of a step: `words[0]` is an input's name, or says what is done."""

    number: int
    words: list[str]


@dataclass(slots=True)
class _Step:
    lines: list[_Line] = field(default_factory=list)

    @property
    def actions(self) -> list[_Line]:
        return [line for line in self.lines if line.words[0] not in ("=", "late")]

    @property
    def expected(self) -> list[list[str]]:
        return [line.words[1:] for line in self.lines if line.words[0] == "="]

    @property
    def late(self) -> int:
        return sum(int(line.words[1]) for line in self.lines if line.words[0] == "late")


def check_steps(build: Callable[..., Flow], text: str, types: Mapping[str, pa.DataType] | None = None,
                **options: object) -> pa.Table:  # fmt: skip
    """Run a flow of several streams as a job and check what it gives after each step; returns all of its rows.

    The text begins with a line for each input: its name, and its columns. `build` gets a flow for each input, by that
    name. After a line of dashes each step follows:

        clicks 7 ann    a row of the input `clicks`; a dash is a null; consecutive rows of an input are one batch
        wait 6s         the time of the clock, which is virtual: after 5 s without rows an input is idle
        end             of all inputs, or of those that are named: no more rows come
        = ann 7 9.5     a row that must come out in this step, in the order of the flow's columns
        late 1          how many rows are late in this step

    Rows that come out and are not expected are a failure, and so are late rows. `types` are those of columns that are
    not integers, floats, booleans or text, as in `batches`. Other options are those of `start`.

    >>> def build(clicks, buys):
    ...     clicks, buys = clicks.with_watermark("t", 2), buys.with_watermark("t", 2)
    ...     return clicks.join(buys, on="user", between=(0, 10), how="left").select("t", "user", "price")
    >>> found = check_steps(build, '''
    ...     clicks  t    user
    ...     buys    t    user  price
    ...     -----------------------------------
    ...     clicks  1    ann
    ...     clicks  3    bob
    ...     buys    5    ann   9.5
    ...     =       1    ann   9.5
    ...     -----------------------------------
    ...     clicks  30   cid
    ...     buys    20   bob   1.0
    ...     =       3    bob   -
    ...     -----------------------------------
    ...     buys    2    ann   7.0
    ...     late    1
    ...     -----------------------------------
    ...     end
    ...     =       30   cid   -
    ... ''')
    >>> found.num_rows
    3

    An input without rows holds the others back until it is idle:

    >>> import scalein as si
    >>> def build(a, b):
    ...     both = a.with_watermark("t", 0).union(b.with_watermark("t", 0))
    ...     return both.group_by(si.tumbling("t", 10)).agg(n=si.count()).select("window_start", "n")
    >>> _ = check_steps(build, '''
    ...     a     t
    ...     b     t
    ...     --------------
    ...     b     3
    ...     a     5
    ...     --------------
    ...     wait  6s
    ...     a     25
    ...     =     0   2
    ... ''')
    """
    head, *steps = list(_parse(text))
    names = {line.words[0]: line.words[1:] for line in head.lines}
    _check_head(head, names)
    for step in steps:
        for line in step.lines:
            _check_line(line, names)
    sources = {name: _Input(name, columns, steps, types or {}) for name, columns in names.items()}
    out = to_memory()
    with Clock() as clock, warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".* rows came too late")  # the steps say how many
        flow = build(**{name: from_source(source.stream) for name, source in sources.items()})
        job = flow.start(sink=out, **options)  # type: ignore[arg-type]
        try:
            seen = late = 0
            for number, step in enumerate(steps, 1):
                for words in _grouped(step.actions, names):
                    _play(words, sources, clock, job)
                _settle(job, sources)
                table = out.table()
                _compare(number, step, table.slice(seen), flow)
                now_late = int(str(job.metrics()["late_rows"]))
                if now_late - late != step.late:
                    raise AssertionError(f"step {number}: {now_late - late} rows are late, not {step.late}")
                seen, late = table.num_rows, now_late
        finally:
            if job.is_active:
                job.stop()
    return out.table()


def _parse(text: str) -> Iterator[_Step]:
    step = _Step()
    for number, line in enumerate(text.strip().splitlines(), 1):
        words = line.split()
        if is_rule(words):
            yield step
            step = _Step()
        elif words and not words[0].startswith("#"):
            step.lines.append(_Line(number, words))
    yield step


def _check_head(head: _Step, names: Mapping[str, list[str]]) -> None:
    if not names or len(names) < len(head.lines) or not all(names.values()) or set(names) & {*_WORDS}:
        raise BadArgument("a text of steps begins with the inputs, each with a name and its columns", at=here(),
                          found="; ".join(" ".join(line.words) for line in head.lines),
                          hint="a line of dashes ends them; names are not " + ", ".join(_WORDS[1:]))


def _check_line(line: _Line, names: Mapping[str, list[str]]) -> None:
    word, *rest = line.words
    reason = ""
    if word in names and len(rest) != len(names[word]):
        reason = f"this row of {word} has {len(rest)} values, and not {len(names[word])}"
    elif word == "wait" and len(rest) != 1:
        reason = "wait takes a duration, such as 6s"
    elif word == "end" and not set(rest) <= set(names):
        reason = f"there is no input of this name: {', '.join(sorted(set(rest) - set(names)))}"
    elif word == "late" and not (len(rest) == 1 and rest[0].isdigit()):
        reason = "late takes the number of rows"
    elif word not in names and word not in _WORDS:
        reason = f"a step has no {word!r}"
    if reason:
        raise BadArgument(reason, at=here(), found=" ".join(line.words), line=line.number,
                          has=", ".join([*names, *_WORDS]))


class _Input:
    """One input: all of its rows, of which the stream has those that were played."""

    def __init__(self, name: str, columns: list[str], steps: list[_Step], types: Mapping[str, pa.DataType]) -> None:
        rows = [line.words[1:] for step in steps for line in step.lines if line.words[0] == name]
        values = [[None if row[k] == "-" else row[k] for row in rows] for k in range(len(columns))]
        self._rows = pa.table([column_of(each, types.get(column))
                               for each, column in zip(values, columns, strict=True)], columns)  # fmt: skip
        self.given = 0
        self.stream = Stream({name: [pa.RecordBatch.from_pylist([], self._rows.schema)]}, ends=False)
        self._name = name

    def push(self, count: int) -> None:
        (batch,) = self._rows.slice(self.given, count).combine_chunks().to_batches()
        self.given += count
        self.stream.push(self._name, batch)


def _grouped(lines: list[_Line], names: Mapping[str, list[str]]) -> Iterator[list[str]]:
    """The words of lines; of consecutive rows of one input, its name and how many there are."""
    for key, some in groupby(lines, lambda line: line.words[0] if line.words[0] in names else line.number):
        found = list(some)
        yield [str(key), str(len(found))] if key in names else found[0].words


def _play(words: list[str], sources: Mapping[str, _Input], clock: Clock, job: Job) -> None:
    word, *rest = words
    if word in sources:
        sources[word].push(int(rest[0]))
    elif word == "wait":
        _await_quiet(sources)  # the sources have no rows since the time of now,
        clock.advance(rest[0])
        _await_quiet(sources)  # and know what time it is
    elif word == "end":
        for name in rest or sources:
            sources[name].stream.end()
    _settle(job, sources)


def _await_quiet(sources: Mapping[str, _Input]) -> None:
    """Until the readers of inputs that go on have found no rows a few times."""
    streams = [source.stream for source in sources.values() if not source.stream.bounded]
    before = [sum(stream.quiet_rounds.values()) for stream in streams]
    for stream, number in zip(streams, before, strict=True):
        until(lambda stream=stream, number=number: sum(stream.quiet_rounds.values()) >= number + 2)  # type: ignore[misc]


def _settle(job: Job, sources: Mapping[str, _Input]) -> None:
    """Wait until the job has done with all that it was given."""
    given = sum(source.given for source in sources.values())
    until(lambda: int(str(job.metrics()["rows_in"])) >= given or not job.is_active, job)
    if all(source.stream.bounded for source in sources.values()):
        job.wait()
        return
    for _ in range(2):  # the round that is running, and one that began with the time of now
        job._driver.ask(lambda: None)
    if not job.is_active:
        job.wait()


def _compare(number: int, step: _Step, found: pa.Table, flow: Flow) -> None:
    columns = found.schema.names
    for row in step.expected:
        if len(row) != len(columns):
            raise BadArgument(f"an expected row has {len(row)} values", at=here(), found=" ".join(row),
                              has=", ".join(columns))
    values = [[None if row[k] == "-" else row[k] for row in step.expected] for k in range(len(columns))]
    expected = pa.table([column_of(each, column.type) for each, column in zip(values, found.schema, strict=True)],
                        schema=found.schema)
    try:
        assert_same(found, expected)
    except AssertionError as error:
        raise AssertionError(f"step {number}: {error}") from None
