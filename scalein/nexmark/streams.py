"""Nexmark's events as tables in memory, as flows that may be endless, and as one stream of all kinds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import pyarrow as pa

from scalein.api.binding import source
from scalein.api.flow import Flow
from scalein.api.sources import from_arrow, generate
from scalein.connectors.base import BoundSource
from scalein.connectors.sources.generate import Pace
from scalein.errors import BadArgument, SourceLoc, guess, here
from scalein.nexmark.generator import CHUNK, EVENT, Generator, schema_of
from scalein.nexmark.queries import QUERIES, Query, side_input
from scalein.storage.checked_json import Json

DELAY = "4s"  # how much later than a later event one may come, by the watermark
PIECE = 10_000  # events in a batch of a stream that has a rate


class Tables(NamedTuple):
    """The events of each kind, as Arrow tables."""

    person: pa.Table
    auction: pa.Table
    bid: pa.Table


class Streams(NamedTuple):
    """The events of each kind, as flows with a watermark."""

    person: Flow
    auction: Flow
    bid: Flow


def tables(events: int = 1_000_000, **settings: Any) -> Tables:
    """The first events in memory, by kind. `settings` are those of `Generator`: `seed=`, `rate=`, `out_of_order=`, ...

    >>> from scalein import nexmark
    >>> bids = nexmark.tables(events=100, seed=3).bid
    >>> bids.num_rows, bids.column_names
    (92, ['auction', 'bidder', 'price', 'channel', 'url', 'dateTime', 'extra'])
    """
    made = _generator(settings, here())
    _check_count("events", events, here())
    spans = [(start, min(start + CHUNK, events)) for start in range(0, events, CHUNK)]
    return Tables(*(pa.Table.from_batches([made.make(kind, *span) for span in spans], schema_of(kind)).combine_chunks()
                    for kind in Tables._fields))


def streams(events: int | None = None, *, events_per_second: float | None = None, **settings: Any) -> Streams:
    """The same events as flows that make them while they run; without `events` they never end.

    Offsets are numbers of events, so a job goes on after a crash where it was. At `events_per_second` (of all kinds)
    they come when they are due. The event time is `dateTime`, with the watermark that the benchmark has, 4 s behind.

    >>> from scalein import nexmark
    >>> nexmark.streams(events=1000).auction.count()
    60
    """
    at = here()
    made = _generator(settings, at)
    return Streams(*(_watermarked(Flow(source(kind, BoundSource(kind, Events(made, kind, _pace(
        events, events_per_second, at)), at), at))) for kind in Streams._fields))


def events(events: int | None = None, *, events_per_second: float | None = None, **settings: Any) -> Flow:
    """All kinds of events in one stream: `event_type` (0 person, 1 auction, 2 bid), a struct of each kind, of which the
    others are null, and `dateTime`. Otherwise as `streams`.

    >>> from scalein import col, nexmark
    >>> bids = nexmark.events(events=1000).filter(col("event_type") == 2)
    >>> bids.select(col("bid").struct.field("price")).count()
    920
    """
    at = here()
    made = _generator(settings, at)
    pace = _pace(events, events_per_second, at)
    return _watermarked(generate(lambda start, count: made.make("event", start, start + count), EVENT, rows=pace.rows,
                                 rows_per_second=pace.rows_per_second, batch_rows=pace.batch_rows))


def flow(name: str, data: Tables | Streams) -> Flow:
    """A query, "q0" to "q22", over tables or streams.

    >>> from scalein import nexmark
    >>> sorted(nexmark.flow("q4", nexmark.tables(events=50_000)).collect()["category"].to_pylist())
    [10, 11, 12, 13, 14]
    """
    return _query(name, here()).make(*_flows(data))


def flow_of_sql(name: str, data: Tables | Streams) -> Flow:
    """The same from the query's SQL, in Flink's spelling; for that, sqlglot must be installed."""
    from scalein.sql import sql

    query = _query(name, here())
    return sql(query.sql, **_flows(data)._asdict(), side_input=side_input())


@dataclass(frozen=True)
class Events:
    """A source of the events of one kind; an offset is the number of the next event, of any kind."""

    generator: Generator
    name: str
    pace: Pace
    replays = True

    @property
    def schema(self) -> pa.Schema:
        return schema_of(self.name)

    @property
    def bounded(self) -> bool:
        return self.pace.rows is not None

    def partitions(self) -> Sequence[str]:
        return ("events",)

    def read(self, partition: str, offset: Json) -> Iterator[tuple[pa.RecordBatch, Json]]:
        for start, end in self.pace.spans(offset if isinstance(offset, int) else 0):
            yield self.generator.make(self.name, start, end), end


def _query(name: str, at: SourceLoc) -> Query:
    if name not in QUERIES:
        raise BadArgument(f"Nexmark has no query {name!r}", at=at, has=", ".join(QUERIES), hint=guess(name, QUERIES))
    return QUERIES[name]


def _flows(data: Tables | Streams) -> Streams:
    return Streams(*(kind if isinstance(kind, Flow) else _watermarked(from_arrow(kind)) for kind in data))


def _generator(settings: dict[str, Any], at: SourceLoc) -> Generator:
    unknown = next((name for name in settings if name not in Generator.__dataclass_fields__), None)
    if unknown is not None:
        raise BadArgument(f"Nexmark has no setting {unknown!r}", at=at, has=", ".join(Generator.__dataclass_fields__),
                          hint=guess(unknown, Generator.__dataclass_fields__))
    try:
        return Generator(**settings)
    except BadArgument as error:
        error.locate(at)
        raise


def _pace(events: int | None, events_per_second: float | None, at: SourceLoc) -> Pace:
    if events is not None:
        _check_count("events", events, at)
    if events_per_second is not None and not events_per_second > 0:
        raise BadArgument("events_per_second is a number above 0", at=at, found=repr(events_per_second))
    piece = CHUNK if events_per_second is None else max(1, min(PIECE, int(events_per_second / 100)))
    return Pace(events_per_second, events, piece)


def _check_count(name: str, given: object, at: SourceLoc) -> None:
    if isinstance(given, bool) or not isinstance(given, int) or given < 1:
        raise BadArgument(f"{name} is a whole number above 0", at=at, found=repr(given))


def _watermarked(flow: Flow) -> Flow:
    return flow.with_watermark("dateTime", DELAY)
