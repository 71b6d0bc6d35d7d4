"""The Nexmark generator: persons, auctions and bids of an online auction, as functions of event numbers.

Of 50 events in a row one is a person, three are auctions and 46 are bids. What an event contains is a function of the
seed and of its number, by a counter-based hash, so that any range can be made anew: after a crash, in another process,
and whatever the batches. Work goes by chunks of `CHUNK` events, in numpy and Arrow: no Python runs for a row.

Distributions are those of the published generator (proportions, ids ahead of what exists, hot auctions, sellers and
bidders, log-uniform prices, lengths of auctions, sizes of texts); its random numbers are not, since they depend on the
order of calls. Free text is cut from random slabs: one slice of a slab is the text column of a chunk.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from scalein.arrow_rows import from_numpy, gathered
from scalein.errors import BadArgument

EVENTS, PERSONS, AUCTIONS, BIDS = 50, 1, 3, 46  # of 50 events in a row: one person, three auctions, then bids
CHUNK = 50_000  # events that are made at once
FIRST_ID, FIRST_CATEGORY, CATEGORIES = 1000, 10, 5
LEAD = 10  # ids beyond the last one that auctions and bids may refer to
HOT_EVERY = 100  # one of this many persons or auctions is hot
CHANNELS = 10_000  # channels besides the four hot ones
SLAB = 1 << 23  # bytes of random text
WORD_BREAK = 13  # one character of this many is a blank

STATES = ("AZ", "CA", "ID", "OR", "WA", "WY")
CITIES = ("Phoenix", "Los Angeles", "San Francisco", "Boise", "Portland", "Bend", "Redmond", "Seattle", "Kent",
          "Cheyenne")
FIRST_NAMES = ("Peter", "Paul", "Luke", "John", "Saul", "Vicky", "Kate", "Julie", "Sarah", "Deiter", "Walter")
LAST_NAMES = ("Shultz", "Abrams", "Spencer", "White", "Bartels", "Walton", "Smith", "Jones", "Noris")
HOT_CHANNELS = ("Google", "Facebook", "Baidu", "Apple")

TIME = pa.timestamp("ms")
PERSON = pa.schema([
    pa.field(name, kind, nullable=False) for name, kind in (
        ("id", pa.int64()), ("name", pa.string()), ("emailAddress", pa.string()), ("creditCard", pa.string()),
        ("city", pa.string()), ("state", pa.string()), ("dateTime", TIME), ("extra", pa.string()))])
AUCTION = pa.schema([
    pa.field(name, kind, nullable=False) for name, kind in (
        ("id", pa.int64()), ("itemName", pa.string()), ("description", pa.string()), ("initialBid", pa.int64()),
        ("reserve", pa.int64()), ("dateTime", TIME), ("expires", TIME), ("seller", pa.int64()),
        ("category", pa.int64()), ("extra", pa.string()))])
BID = pa.schema([
    pa.field(name, kind, nullable=False) for name, kind in (
        ("auction", pa.int64()), ("bidder", pa.int64()), ("price", pa.int64()), ("channel", pa.string()),
        ("url", pa.string()), ("dateTime", TIME), ("extra", pa.string()))])
SCHEMAS = {"person": PERSON, "auction": AUCTION, "bid": BID}
EVENT = pa.schema([
    pa.field("event_type", pa.int32(), nullable=False), *(pa.field(n, pa.struct(list(s))) for n, s in SCHEMAS.items()),
    pa.field("dateTime", TIME, nullable=False)])

# The random choices of an event; each has a salt of its own.
_CHOICES = ("hot", "id", "hot_bidder", "bidder", "price", "reserve", "category", "length", "hot_channel", "channel",
            "extra", "name", "description", "state", "city", "email", "host", "card")
# What keeps the slabs and the texts in them apart.
_TEXTS = ("extra", "name", "description", "email", "host")

Ints = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]
Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Generator:
    """What the events look like; the same settings give the same events.

    `rate` is the number of events in a second of event time. Events come in groups of `out_of_order`, in each of which
    they are shuffled; 1 leaves them in the order of time. Of auctions and bids, all but one in `hot_auctions`,
    `hot_sellers` and `hot_bidders` are for the hot auction, and by the hot seller or bidder, of the moment.
    """

    seed: int = 1
    rate: int = 10_000
    out_of_order: int = 1
    start: datetime = field(default=datetime(2024, 1, 1))
    hot_auctions: int = 2
    hot_sellers: int = 4
    hot_bidders: int = 4
    auctions_in_flight: int = 100
    active_persons: int = 1000
    person_bytes: int = 200
    auction_bytes: int = 500
    bid_bytes: int = 100

    def __post_init__(self) -> None:
        for name in ("rate", "out_of_order", "hot_auctions", "hot_sellers", "hot_bidders", "auctions_in_flight",
                     "active_persons"):
            given = getattr(self, name)
            if isinstance(given, bool) or not isinstance(given, int) or given < 1:
                raise BadArgument(f"{name} of Nexmark is a whole number above 0", found=repr(given))
        if CHUNK % self.out_of_order:
            near = min((n for n in range(1, CHUNK + 1) if CHUNK % n == 0), key=lambda n: abs(n - self.out_of_order))
            raise BadArgument(f"out_of_order of Nexmark must divide {CHUNK:,}", found=str(self.out_of_order),
                              hint=f"for example {near}")

    def make(self, kind: str, start: int, end: int) -> pa.RecordBatch:
        """The rows of a kind ("person", "auction", "bid", or "event" for all) among the events from `start` to `end`,
        in the order in which they come.

        >>> Generator(seed=7).make("auction", 0, 100)["id"].to_pylist()
        [1000, 1001, 1002, 1003, 1004, 1005]
        """
        pieces = []
        for chunk in range(start // CHUNK, -(-end // CHUNK)):
            first = chunk * CHUNK
            whole = self._chunk(kind, chunk)
            if first < start or first + CHUNK > end:
                within = max(start - first, 0), min(end - first, CHUNK)
                low, high = (self._rows_before(kind, number) for number in within)
                whole = whole.slice(low, high - low)
            pieces.append(whole)
        if len(pieces) == 1:
            return pieces[0]
        return pa.concat_batches(pieces) if pieces else pa.RecordBatch.from_pylist([], schema=schema_of(kind))

    def _chunk(self, kind: str, chunk: int) -> pa.RecordBatch:
        made = self._event(chunk) if kind == "event" else getattr(self, f"_{kind}")(chunk)
        order = self._order(kind)
        return made if order is None else pa.RecordBatch.from_arrays([gathered(c, order) for c in made.columns],
                                                                     schema=made.schema)

    # --- kinds, in the order of event numbers ---

    def _person(self, chunk: int) -> pa.RecordBatch:
        rounds, _, number = _numbers(chunk, 0, PERSONS)
        key = _keys(number)
        names, lengths = _joined_names()
        name = self._below("name", key, len(names))
        email, email_bytes = self._text(chunk, "email", key, *_string_lengths(7), blanks=True)
        host, host_bytes = self._text(chunk, "host", key, *_string_lengths(5), blanks=True)
        city, state = self._below("city", key, len(CITIES)), self._below("state", key, len(STATES))
        used = 8 + lengths[name] + email_bytes + host_bytes + 5 + 19 + _lengths(CITIES)[city] + 2
        return pa.RecordBatch.from_arrays([
            from_numpy(FIRST_ID + rounds), names.take(from_numpy(name)), _email(email, host),
            self._credit_cards(key), _array(CITIES).take(from_numpy(city)), _array(STATES).take(from_numpy(state)),
            _times(self._time_ms(number)), self._extra(chunk, key, used, self.person_bytes)], schema=PERSON)

    def _auction(self, chunk: int) -> pa.RecordBatch:
        rounds, turn, number = _numbers(chunk, PERSONS, AUCTIONS)
        key = _keys(number)
        seller = np.where(self._below("hot", key, self.hot_sellers) > 0, rounds // HOT_EVERY * HOT_EVERY,
                          self._some_person("id", key, rounds))
        first_bid, time_ms = self._price("price", key), self._time_ms(number)
        ahead = self.auctions_in_flight * EVENTS // AUCTIONS
        length_ms = 1 + self._below("length", key, np.maximum(2 * (self._time_ms(number + ahead) - time_ms), 1))
        name, name_bytes = self._text(chunk, "name", key, *_string_lengths(20), blanks=True)
        about, about_bytes = self._text(chunk, "description", key, *_string_lengths(100), blanks=True)
        return pa.RecordBatch.from_arrays([
            from_numpy(FIRST_ID + rounds * AUCTIONS + turn), name, about, from_numpy(first_bid),
            from_numpy(first_bid + self._price("reserve", key)), _times(time_ms), _times(time_ms + length_ms),
            from_numpy(FIRST_ID + seller), from_numpy(FIRST_CATEGORY + self._below("category", key, CATEGORIES)),
            self._extra(chunk, key, 8 + name_bytes + about_bytes + 40, self.auction_bytes)], schema=AUCTION)

    def _bid(self, chunk: int) -> pa.RecordBatch:
        rounds, _, number = _numbers(chunk, PERSONS + AUCTIONS, BIDS)
        key = _keys(number)
        last_auction = rounds * AUCTIONS + AUCTIONS - 1
        first = np.maximum(last_auction - self.auctions_in_flight, 0)
        auction = np.where(self._below("hot", key, self.hot_auctions) > 0, last_auction // HOT_EVERY * HOT_EVERY,
                           first + self._below("id", key, last_auction - first + 1 + LEAD))
        bidder = np.where(self._below("hot_bidder", key, self.hot_bidders) > 0, rounds // HOT_EVERY * HOT_EVERY + 1,
                          self._some_person("bidder", key, rounds))
        hot = self._below("hot_channel", key, 2) > 0
        channel = from_numpy(np.where(hot, self._below("channel", key, len(HOT_CHANNELS)),
                                      len(HOT_CHANNELS) + self._below("channel", key, CHANNELS)))
        channels, urls = _channels(self.seed)
        return pa.RecordBatch.from_arrays([
            from_numpy(FIRST_ID + auction), from_numpy(FIRST_ID + bidder), from_numpy(self._price("price", key)),
            channels.take(channel), urls.take(channel), _times(self._time_ms(number)),
            self._extra(chunk, key, np.full(len(key), 32), self.bid_bytes)], schema=BID)

    def _event(self, chunk: int) -> pa.RecordBatch:
        """All kinds in one: of the three structs, one is not null."""
        turn = np.arange(CHUNK) % EVENTS
        kind = np.where(turn < PERSONS, 0, np.where(turn < PERSONS + AUCTIONS, 1, 2))
        columns: list[pa.Array] = [from_numpy(kind.astype(np.int32))]
        for code, name in enumerate(SCHEMAS):
            mine = kind == code
            rows = pa.array(np.where(mine, np.cumsum(mine) - 1, 0), mask=~mine)
            made = getattr(self, f"_{name}")(chunk)
            columns.append(pa.StructArray.from_arrays([gathered(column, rows) for column in made.columns],
                                                      fields=list(SCHEMAS[name]), mask=pa.array(~mine)))
        number = np.arange(chunk * CHUNK, (chunk + 1) * CHUNK)
        return pa.RecordBatch.from_arrays([*columns, _times(self._time_ms(number))], schema=EVENT)

    # --- the order in which events come ---

    def _turns(self) -> Ints:
        """The event that comes first, second, ... of a chunk: a shuffle of each group. 953 has no factor of `CHUNK`."""
        turn = np.arange(CHUNK)
        group = self.out_of_order
        return turn // group * group + turn * 953 % group

    def _order(self, kind: str) -> pa.Array | None:
        """The rows of a kind in a chunk in the order in which they come; None if that is their own order."""
        if self.out_of_order == 1:
            return None
        mine, before = self._coming(kind)
        turns = self._turns()[mine] if mine is not None else self._turns()
        return from_numpy(before[turns])

    def _coming(self, kind: str) -> tuple[npt.NDArray[np.bool_] | None, Ints]:
        """Which events of a chunk, as they come, are of a kind; and for each event how many of the kind precede it."""
        if kind == "event":
            return None, np.arange(CHUNK)
        low = {"person": 0, "auction": PERSONS, "bid": PERSONS + AUCTIONS}[kind]
        high = {"person": PERSONS, "auction": PERSONS + AUCTIONS, "bid": EVENTS}[kind]
        turn = np.arange(CHUNK) % EVENTS
        is_mine = (turn >= low) & (turn < high)
        return is_mine[self._turns()], np.cumsum(is_mine) - is_mine

    def _rows_before(self, kind: str, turn: int) -> int:
        """How many rows of a kind are among the first `turn` events of a chunk, as they come."""
        mine, _ = self._coming(kind)
        return turn if mine is None else int(np.count_nonzero(mine[:turn]))

    # --- choices ---

    @cached_property
    def _salts(self) -> dict[str, np.uint64]:
        salts = np.random.default_rng([self.seed, 1]).integers(0, 1 << 64, len(_CHOICES), np.uint64)
        return dict(zip(_CHOICES, salts, strict=True))

    def _draw(self, choice: str, key: Words) -> Words:
        """64 random bits for each event: the finalizer of SplitMix64."""
        x = key + self._salts[choice]
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))

    def _below(self, choice: str, key: Words, count: int | Ints) -> Ints:
        """A number from 0 to `count - 1` for each event."""
        limit = np.asarray(count).astype(np.uint64)
        return (((self._draw(choice, key) >> np.uint64(32)) * limit) >> np.uint64(32)).astype(np.int64)

    def _price(self, choice: str, key: Words) -> Ints:
        """Cents from 100 to 100,000,000, uniform in their logarithm."""
        unit = (self._draw(choice, key) >> np.uint64(11)).astype(np.float64) * 2.0**-53
        cents: Ints = np.rint(np.exp(unit * (6 * math.log(10))) * 100).astype(np.int64)
        return cents

    def _some_person(self, choice: str, key: Words, last: Ints) -> Ints:
        """One of the active persons, or of those that come next."""
        active = np.minimum(last + 1, self.active_persons)
        return last + 1 - active + self._below(choice, key, active + LEAD)

    def _time_ms(self, number: Ints) -> Ints:
        return self._start_ms + number * 1000 // self.rate

    @cached_property
    def _start_ms(self) -> int:
        start = self.start if self.start.tzinfo is not None else self.start.replace(tzinfo=UTC)
        return int(start.timestamp() * 1000)

    # --- texts ---

    def _extra(self, chunk: int, key: Words, used: Ints, average: int) -> pa.Array:
        """Letters that fill an event up to `average` bytes, 20 % more or less; none if it has more already."""
        free = np.maximum(average - used, 0)
        spread = np.rint(free * 0.2).astype(np.int64)
        return self._text(chunk, "extra", key, free - spread, np.maximum(2 * spread, 1), blanks=False)[0]

    def _text(self, chunk: int, choice: str, key: Words, least: int | Ints, spread: int | Ints,
              blanks: bool) -> tuple[pa.Array, Ints]:
        """Random text for each event, from `least` to `least + spread - 1` characters, and the lengths.

        The texts of a chunk stand side by side in a slab, from a place that the chunk chooses.
        """
        length = least + self._below(choice, key, spread)
        ends = np.zeros(len(length) + 1, np.int32)
        np.cumsum(length, out=ends[1:])
        slab = _slab(self.seed, blanks)
        place = int(np.random.default_rng([self.seed, 2, chunk, _TEXTS.index(choice)]).integers(
            0, SLAB - int(ends[-1])))
        text = slab[place : place + int(ends[-1])]
        if blanks:  # a text has none at its ends
            text = text.copy()
            for edge in (ends[:-1], ends[1:] - 1):
                bare = edge[text[edge] == ord(" ")]
                text[bare] = ord("a") + bare % 26
        return _strings(ends, text), length

    def _credit_cards(self, key: Words) -> pa.Array:
        """Four groups of four digits each."""
        digits = self._draw("card", key)[:, None] // np.array([10**n for n in range(16)], np.uint64) % np.uint64(10)
        text = np.full((len(key), 19), ord(" "), np.uint8)
        text[:, [n for n in range(19) if n % 5 != 4]] = digits.astype(np.uint8) + ord("0")
        return _strings(np.arange(len(key) + 1, dtype=np.int32) * 19, text.reshape(-1))


def schema_of(kind: str) -> pa.Schema:
    """The columns of "person", "auction", "bid" or "event"."""
    return EVENT if kind == "event" else SCHEMAS[kind]


def _numbers(chunk: int, first: int, count: int) -> tuple[Ints, Ints, Ints]:
    """The events of a kind in a chunk, `count` of 50 from the `first` on: round of 50, turn in it, and number.

    The number of the round is also that of its person.
    """
    rounds = np.arange(chunk * CHUNK // EVENTS, (chunk + 1) * CHUNK // EVENTS)
    numbers = (rounds * EVENTS)[:, None] + np.arange(first, first + count)
    return np.repeat(rounds, count), np.tile(np.arange(count), len(rounds)), numbers.reshape(-1)


def _keys(number: Ints) -> Words:
    """Numbers spread over 64 bits: the steps of SplitMix64."""
    return number.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)


def _string_lengths(most: int) -> tuple[int, int]:
    """Random text has from 3 to `most - 1` characters."""
    return 3, most - 3


def _times(ms: Ints) -> pa.Array:
    return from_numpy(ms).view(TIME)


def _strings(ends: npt.NDArray[np.int32], text: Bytes) -> pa.Array:
    return pa.Array.from_buffers(pa.string(), len(ends) - 1, [None, pa.py_buffer(ends), pa.py_buffer(text)])


def _email(user: pa.Array, host: pa.Array) -> pa.Array:
    import pyarrow.compute as pc

    joined: Any = pc.binary_join_element_wise
    return joined(joined(user, host, "@"), pa.scalar("com"), ".")


@lru_cache(maxsize=8)
def _slab(seed: int, blanks: bool) -> Bytes:
    """Random letters, with blanks between words if asked for."""
    made = np.random.default_rng([seed, 3, blanks])
    text = made.integers(ord("a"), ord("z") + 1, SLAB, np.uint8)
    if blanks:
        text[made.integers(0, WORD_BREAK, SLAB, np.uint8) == 0] = ord(" ")
    return text


@lru_cache(maxsize=8)
def _channels(seed: int) -> tuple[pa.Array, pa.Array]:
    """Names and addresses: of the hot channels, then of the others, nine of ten of which have their number in it."""
    made = np.random.default_rng([seed, 4])
    count = len(HOT_CHANNELS) + CHANNELS
    alphabet = np.array([*"abcdefghijklmnopqrstuvwxyz"])
    letters = alphabet[made.integers(0, 26, (count, 12))]
    blanks = made.integers(0, WORD_BREAK, (count, 12)) == 0
    letters[blanks] = "_"
    lengths, numbered = made.integers(3, 5, (count, 3)), made.integers(0, 10, count) > 0
    names, urls = [*HOT_CHANNELS], []
    for n in range(count):
        folders = "/".join("".join(letters[n, 4 * part : 4 * part + lengths[n, part]]) for part in range(3))
        url = f"https://www.nexmark.com/{folders}/item.htm?query=1"
        if n >= len(HOT_CHANNELS):
            # The bits of the channel's number in reverse, as a positive int32.
            number = abs(int.from_bytes(int(f"{n - len(HOT_CHANNELS):032b}"[::-1], 2).to_bytes(4, "big"), "big",
                                        signed=True))
            names.append(f"channel-{number}")
            url += f"&channel_id={number}" if numbered[n] else ""
        urls.append(url)
    return pa.array(names), pa.array(urls)


@lru_cache(maxsize=1)
def _joined_names() -> tuple[pa.Array, Ints]:
    names = tuple(f"{first} {last}" for first in FIRST_NAMES for last in LAST_NAMES)
    return _array(names), _lengths(names)


@lru_cache(maxsize=8)
def _array(texts: tuple[str, ...]) -> pa.Array:
    return pa.array(texts)


@lru_cache(maxsize=8)
def _lengths(texts: tuple[str, ...]) -> Ints:
    return np.array([len(text) for text in texts])
