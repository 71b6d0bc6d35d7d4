"""A job whose state grows without bound says so once, with the operator and the rate; others say nothing."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest

import scalein as si
from scalein import col
from scalein.api.flow import Flow
from scalein.exec.schedule import Schedule, using
from scalein.jobs import state_growth
from scalein.testing import until
from tests.jobs.streams import rows_in

ROWS = 4_000
SCHEMA = {"k": pa.int64(), "few": pa.int64(), "t": pa.int64()}


@si.process
class Sums:
    total: int = 0

    def on_row(self, row: Any) -> Any:
        self.total += row.t
        if self.total < 0:
            yield {"total": self.total}


def endless() -> Flow:
    """Rows with keys that come once (`k`), and with 300 others."""

    def batch(start: int, count: int) -> pa.RecordBatch:
        numbers = list(range(start, start + count))
        return pa.record_batch({"k": numbers, "few": [n % 300 for n in numbers], "t": numbers})

    return si.generate(batch, SCHEMA, batch_rows=50).with_watermark("t", 0)


class SmallRounds(Schedule):
    """The size of a state is looked at after each round."""

    def round_rows(self, rows: int) -> int:
        return 100


def said(flow: Flow, emit: str = "final") -> list[str]:
    with warnings.catch_warnings(record=True) as found, using(SmallRounds()):
        warnings.simplefilter("always")
        job = flow.start(sink=si.to_callback(lambda batch: None), emit=emit)
        until(lambda: rows_in(job) > ROWS, job)
        job.stop()
    return [str(each.message) for each in found if "without bound" in str(each.message)]


FLOWS: dict[str, tuple[Callable[[str, Any], Flow], str]] = {
    "distinct k": (lambda key, ttl: endless().distinct(key, ttl=ttl), "final"),
    "aggregate by k: n = count()": (lambda key, ttl: endless().group_by(key).agg(n=si.count(), ttl=ttl), "changes"),
    "process": (lambda key, ttl: endless().group_by(key).process(Sums, ttl=ttl), "final"),
    "over t.sum().over(k": (lambda key, ttl: endless().select(s=col("t").sum().over(
        key, order_by="t", within=ttl)), "final"),
    "streamjoin inner on k == k": (lambda key, ttl: endless().join(endless(), on=key, keep=ttl or "forever"), "final"),
}


@pytest.mark.parametrize("name", FLOWS)
def test_it_is_said_once_with_the_operator_and_the_rate(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_growth, "FIRST_LOOK", 500)
    make, emit = FLOWS[name]
    (text,) = said(make("k", None), emit)
    assert f"the state of {name}" in text
    assert re.search(r"[\d,]+ after [\d,]+ rows, (1,000|99\d) more for each 1,000 rows, [\d,]+ a second", text.replace(
        " keys", "").replace(" rows after", " after"))
    assert ('keep="1h"' if "join" in name else 'within="1h"' if "over" in name else 'ttl="7d"') in text


@pytest.mark.parametrize("name", FLOWS)
def test_what_forgets_says_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_growth, "FIRST_LOOK", 500)
    make, emit = FLOWS[name]
    assert said(make("k", 5), emit) == []


def test_keys_that_are_few_say_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_growth, "FIRST_LOOK", 200)
    make, emit = FLOWS["distinct k"]
    assert said(make("few", None), emit) == []
