"""Nexmark, the benchmark of an online auction: a generator of its streams, and its queries, as flows and in SQL.

>>> from scalein import nexmark
>>> data = nexmark.tables(events=100_000, seed=1)
>>> data.person.num_rows, data.auction.num_rows, data.bid.num_rows
(2000, 6000, 92000)
>>> nexmark.flow("q2", data).collect().num_rows > 0
True
"""

from __future__ import annotations

from scalein.nexmark.generator import AUCTION, BID, EVENT, PERSON, Generator
from scalein.nexmark.queries import QUERIES, Query, side_input
from scalein.nexmark.streams import DELAY, Streams, Tables, events, flow, flow_of_sql, streams, tables

__all__ = ["AUCTION", "BID", "DELAY", "EVENT", "PERSON", "QUERIES", "Generator", "Query", "Streams", "Tables", "events",
           "flow", "flow_of_sql", "side_input", "streams", "tables"]
