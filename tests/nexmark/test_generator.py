"""The Nexmark generator: the published proportions and distributions, and the same events in whatever ranges."""

from __future__ import annotations

import time
from itertools import pairwise
from pathlib import Path
from random import Random

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

import scalein as si
from scalein import col, nexmark
from scalein.errors import BadArgument
from scalein.nexmark.generator import CHUNK, SCHEMAS, Generator, schema_of
from tests.same import assert_same

EVENTS = 2 * CHUNK
DATA = nexmark.tables(events=EVENTS, seed=3)


def share(mask: pa.ChunkedArray) -> float:
    return float(pc.mean(mask.cast(pa.float64())).as_py())


def test_of_fifty_events_one_is_a_person_and_three_are_auctions() -> None:
    assert [table.num_rows * 50 / EVENTS for table in DATA] == [1, 3, 46]
    assert DATA.person["id"].to_pylist() == list(range(1000, 1000 + EVENTS // 50))
    assert DATA.auction["id"].to_pylist() == list(range(1000, 1000 + 3 * EVENTS // 50))
    for table, schema in zip(DATA, SCHEMAS.values(), strict=True):
        table.validate(full=True)
        assert table.schema.equals(schema)
        assert all(column.null_count == 0 for column in table.columns)
    assert schema_of("bid") is nexmark.BID


def test_hot_keys_are_as_frequent_as_published() -> None:
    auction, bidder = DATA.bid["auction"].to_numpy(), DATA.bid["bidder"].to_numpy()
    seller = DATA.auction["seller"].to_numpy()
    # The hot ones are the first auction, the second person and the first person of each hundred.
    assert np.mean(auction % 100 == 0) == pytest.approx(1 / 2 + 1 / 200, abs=0.02)
    assert np.mean(bidder % 100 == 1) == pytest.approx(3 / 4 + 1 / 400, abs=0.02)
    assert np.mean(seller % 100 == 0) == pytest.approx(3 / 4 + 1 / 400, abs=0.02)
    hot = share(pc.is_in(DATA.bid["channel"], pa.array(["Google", "Facebook", "Baidu", "Apple"])))
    assert hot == pytest.approx(1 / 2, abs=0.02)
    assert 5000 < pc.count_distinct(DATA.bid["channel"]).as_py() <= 10_004
    with_id = share(pc.match_substring(DATA.bid["url"], "&channel_id="))
    assert with_id == pytest.approx(0.9 / 2, abs=0.02)


def test_bids_and_auctions_refer_to_what_exists_or_soon_will() -> None:
    bid, auction = DATA.bid, DATA.auction
    turn = np.arange(bid.num_rows) // 46
    last_auction = 1000 + 3 * turn + 2
    assert (bid["auction"].to_numpy() <= last_auction + 10).all()
    cold = bid["auction"].to_numpy() % 100 != 0
    assert (bid["auction"].to_numpy()[cold] >= np.maximum(last_auction[cold] - 100, 1000)).all()
    assert (bid["bidder"].to_numpy() <= 1000 + turn + 10).all()
    assert (auction["seller"].to_numpy() <= 1000 + np.arange(auction.num_rows) // 3 + 10).all()


def test_prices_are_uniform_in_their_logarithm_and_auctions_close() -> None:
    price = DATA.bid["price"].to_numpy()
    assert price.min() >= 100
    assert price.max() <= 100_000_000
    assert np.histogram(np.log10(price), bins=6, range=(2, 8))[0] / len(price) == pytest.approx([1 / 6] * 6, abs=0.02)
    assert set(DATA.auction["category"].to_pylist()) == {10, 11, 12, 13, 14}
    assert (DATA.auction["reserve"].to_numpy() > DATA.auction["initialBid"].to_numpy()).all()
    opened, closed = (DATA.auction[name].cast(pa.int64()).to_numpy() for name in ("dateTime", "expires"))
    length = closed - opened
    # 100 auctions in flight are 1666 events, which are 166 ms at 10,000 events a second; twice that is the longest.
    assert 1 <= length.min() <= length.max() <= 2 * 167
    assert length.mean() == pytest.approx(167, rel=0.05)


def test_texts_fill_events_to_their_sizes() -> None:
    extra = pc.binary_length(DATA.bid["extra"]).to_numpy()
    assert extra.mean() == pytest.approx(100 - 32, rel=0.02)
    assert (extra.min(), extra.max()) == (54, 81)
    assert pc.count_distinct(DATA.bid["extra"]).as_py() > 0.999 * DATA.bid.num_rows
    assert pc.mean(pc.binary_length(DATA.person["extra"])).as_py() == pytest.approx(200 - 65, rel=0.1)
    for text, pattern in ((DATA.person["creditCard"], r"^\d{4} \d{4} \d{4} \d{4}$"),
                          (DATA.person["emailAddress"], r"^[a-z][a-z ]+[a-z]@[a-z][a-z ]+[a-z]\.com$"),
                          (DATA.auction["itemName"], r"^[a-z][a-z ]{1,17}[a-z]$"),
                          (DATA.bid["url"], r"^https://www\.nexmark\.com/\w+/\w+/\w+/item\.htm\?query=1")):
        assert share(pc.match_substring_regex(text, pattern)) == 1.0, pattern


def test_times_follow_the_rate() -> None:
    times = nexmark.tables(events=1000, rate=100).bid["dateTime"].cast(pa.int64()).to_numpy()
    assert times[-1] - times[0] == (999 - 4) * 10
    assert (np.diff(times) >= 0).all()


@pytest.mark.parametrize("out_of_order", [1, 1000])
@pytest.mark.parametrize("kind", ["person", "auction", "bid", "event"])
def test_any_range_gives_the_same_events(kind: str, out_of_order: int) -> None:
    made, random = Generator(seed=5, out_of_order=out_of_order), Random(f"{kind} {out_of_order}")
    whole = pa.Table.from_batches([made.make(kind, 0, 2 * CHUNK)])
    cuts = sorted({0, 2 * CHUNK, *(random.randrange(2 * CHUNK) for _ in range(4))})
    pieces = pa.Table.from_batches([made.make(kind, *span) for span in pairwise(cuts)])
    assert pieces.equals(whole)
    assert made.make(kind, 7, 7).num_rows == 0


def test_out_of_order_events_are_the_same_ones_within_their_group() -> None:
    for straight, shuffled in zip(DATA, nexmark.tables(events=EVENTS, seed=3, out_of_order=1000), strict=True):
        assert_same(shuffled, straight)
        times = shuffled["dateTime"].cast(pa.int64()).to_numpy()
        assert (np.diff(times) < 0).any()
        assert (np.maximum.accumulate(times) - times).max() <= 100  # 1000 events at 10,000 a second


def test_one_stream_has_all_kinds() -> None:
    events = nexmark.events(events=1000, seed=3)
    prices = events.filter(col("event_type") == 2).select(price=col("bid").struct.field("price")).collect()["price"]
    assert prices.to_pylist() == DATA.bid["price"].to_pylist()[:920]
    table = events.collect()
    assert table["event_type"].to_pylist()[:5] == [0, 1, 1, 1, 2]
    for number, (name, straight) in enumerate(zip(SCHEMAS, nexmark.tables(events=1000, seed=3), strict=True)):
        mine = table.filter(pc.equal(table["event_type"], number))[name].combine_chunks()
        assert [column.to_pylist() for column in mine.flatten()] == [column.to_pylist() for column in straight.columns]
        others = table.filter(pc.not_equal(table["event_type"], number))[name]
        assert others.null_count == len(others)


def test_streams_are_the_tables_and_go_on_after_a_stop(tmp_path: Path) -> None:
    flows = nexmark.streams(events=EVENTS, seed=3)
    assert flows.auction.collect().equals(DATA.auction)
    endless = nexmark.streams(seed=3, events_per_second=200_000).person
    ids: list[int] = []
    for _ in range(2):
        out = si.to_memory()
        job = endless.start(sink=out, checkpoint=tmp_path / "c", every="10ms")
        deadline_s = time.monotonic() + 60
        while not job.metrics()["rows_out"] and time.monotonic() < deadline_s:
            time.sleep(0.01)
        job.stop()
        ids += out.table()["id"].to_pylist()
    assert ids
    assert ids == list(range(1000, 1000 + len(ids)))


@pytest.mark.parametrize(("settings", "says"), [
    ({"sede": 1}, "did you mean 'seed'"), ({"rate": 0}, "rate of Nexmark is a whole number above 0"),
    ({"out_of_order": 999}, "for example 1000"), ({"events": 0}, "events is a whole number above 0"),
])  # fmt: skip
def test_wrong_settings_are_named(settings: dict[str, int], says: str) -> None:
    with pytest.raises(BadArgument, match=says) as caught:
        nexmark.tables(**settings)
    assert "test_generator.py" in str(caught.value)
