"""Cards of jobs and stores in a notebook: what they show, that they are redrawn in place, and that no thread stays."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import scalein as si
from scalein import notebook_card
from scalein.errors import SourceLoc
from scalein.jobs import job_card
from scalein.jobs.job import Job
from scalein.notebook_card import Card, format_bytes, format_seconds
from scalein.state import LogStore


@dataclass
class Notebook:
    """IPython's shell in a kernel, as far as cards know it; outputs by display id."""

    kernel: object = field(default_factory=object)
    shown: dict[str, list[str]] = field(default_factory=dict)  # all that was drawn
    callbacks: list[Callable[[object], None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.display_pub = SimpleNamespace(publish=self.publish)
        self.compile = SimpleNamespace(format_code_name=lambda path: None)
        self.events = SimpleNamespace(register=lambda event, function: self.callbacks.append(function),
                                      unregister=lambda event, function: self.callbacks.remove(function))

    def publish(self, data: dict[str, str], transient: dict[str, str], update: bool) -> None:
        place = transient["display_id"]
        assert (place in self.shown) or not update
        self.shown.setdefault(place, []).append(data["text/html"])

    def end_cell(self) -> None:
        for function in list(self.callbacks):
            function(None)

    @property
    def last(self) -> str:
        (drawn,) = self.shown.values()
        return drawn[-1]


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> Notebook:
    found = Notebook()
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: found))  # type: ignore[arg-type]
    monkeypatch.setattr(job_card, "SAMPLE_S", 0.02)
    monkeypatch.setattr(notebook_card, "REDRAW_S", 0.0)
    return found


def clicks(start: int, count: int) -> pa.RecordBatch:
    number = np.arange(start, start + count)
    return pa.record_batch({"time": pa.array(number * 10, pa.timestamp("ms")), "user": number % 7})


def started(**more: Any) -> Job:
    flow = si.generate(clicks, {"time": pa.timestamp("ms"), "user": pa.int64()}, rows_per_second=20_000)
    counts = flow.with_watermark("time", "1s").group_by("user", si.tumbling("time", "10s")).agg(n=si.count())
    return counts.start(sink=si.to_memory(), **more)


def wait_until(what: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not what():
        assert time.monotonic() < end
        time.sleep(0.01)


def card_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "scalein-card"]


def test_a_job_is_redrawn_until_it_ends(notebook: Notebook, tmp_path: Path) -> None:
    job = started(checkpoint=tmp_path / "checkpoint", every="50ms")
    job._ipython_display_()
    job._ipython_display_()  # shown twice: both outputs are the same display
    assert len(card_threads()) == 1
    wait_until(lambda: "checkpoints" in notebook.last and "<svg" in notebook.last and "watermark" in notebook.last)
    assert "&#9679; running" in notebook.last
    assert str(tmp_path / "checkpoint") in notebook.last
    job.stop()
    notebook.end_cell()
    assert "&#9679; stopped" in notebook.last
    wait_until(lambda: not card_threads())
    assert notebook.callbacks == []
    assert f"{job.metrics()['rows_in']:,}" in notebook.last


def test_a_job_that_waits_says_why(notebook: Notebook) -> None:
    waiting = threading.Event()

    def never(start: int, count: int) -> pa.RecordBatch:
        waiting.wait(20)
        return clicks(start, count)

    flow = si.generate(never, {"time": pa.timestamp("ms"), "user": pa.int64()}, rows=10)
    job = flow.group_by("user").agg(n=si.count()).start(sink=si.to_memory())
    job._ipython_display_()
    assert "No row has arrived yet" in notebook.last
    waiting.set()
    job.wait()
    wait_until(lambda: not card_threads())
    assert "No row" not in notebook.last


def test_a_job_that_failed_shows_its_error(notebook: Notebook) -> None:
    job = si.from_arrow(pa.table({"x": [1, 0]})).select(y=10 // si.col("x")).start(sink=si.to_memory())
    job.await_end(20)
    with pytest.raises(NotImplementedError):
        job._ipython_display_()  # nothing will change: IPython shows _repr_html_
    assert "&#9679; failed" in job._repr_html_()
    assert "division by zero" in job._repr_html_()


def test_a_store_is_redrawn_by_its_calls(notebook: Notebook, tmp_path: Path) -> None:
    store = LogStore.open(tmp_path / "store", key={"user": pa.int64()}, value={"n": pa.int64()}, memory=64_000_000)
    store._ipython_display_()
    for _ in range(3):
        store.merge(pa.table({"user": [1, 2], "n": [1, 1]}), n="sum")
    assert card_threads() == []
    assert len(next(iter(notebook.shown.values()))) == 4
    assert "&#9679; open" in notebook.last
    assert "of at most 64.0 MB" in notebook.last
    store.close()
    assert "&#9679; closed" in notebook.last
    assert "snapshots" in notebook.last
    assert notebook.callbacks == []
    assert notebook.last == store._repr_html_()


def test_an_object_that_is_gone_is_not_drawn(notebook: Notebook) -> None:
    class Shown:
        def draw(self) -> tuple[str, str]:
            return "html", "text"

    shown = Shown()
    display = notebook_card.Display(shown.draw)
    display.show()
    notebook.end_cell()
    assert notebook.shown.popitem()[1] == ["html", "html"]
    del shown  # the notebook does not keep it
    notebook.end_cell()
    assert notebook.callbacks == []
    assert notebook.shown == {}


@pytest.mark.parametrize("shell", [None, SimpleNamespace(kernel=None)], ids=["no IPython", "a terminal"])
def test_outside_of_a_notebook_it_is_text(shell: object, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))  # type: ignore[arg-type]
    store = LogStore.open(tmp_path / "store", key={"user": pa.int64()}, value={"n": pa.int64()})
    with pytest.raises(NotImplementedError):  # IPython then falls back to repr
        store._ipython_display_()
    store.close()


def test_errors_name_the_cell(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cells = SimpleNamespace(format_code_name=lambda path: ("Cell", "In[3]") if "ipykernel" in path else None)
    shell = SimpleNamespace(compile=cells)
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))  # type: ignore[arg-type]
    assert str(SourceLoc(str(tmp_path / "ipykernel_12" / "3456.py"), 2)) == "Cell In[3]:2"
    assert str(SourceLoc(str(tmp_path / "flow.py"), 2)) == "flow.py:2"


def test_names_are_escaped() -> None:
    html = Card("Job", "running", "<b>", [("<i>", "a & b")], note="<script>").html
    assert "<script>" not in html
    assert "&lt;script&gt;" in html
    assert "<i>" not in html
    assert "a &amp; b" in html


def test_amounts() -> None:
    assert [format_bytes(size) for size in (0, 999, 1_000, 2_500_000, 7e12)] == [
        "0 bytes", "999 bytes", "1.0 kB", "2.5 MB", "7,000.0 GB"]
    assert [format_seconds(s) for s in (0, 0.0005, 2, 89, 100, 7_200, 2e5, 1e8)] == [
        "0.0 ms", "0.5 ms", "2.0 s", "89.0 s", "1.7 min", "2.0 h", "2.3 days", "3.2 years"]


def test_what_was_drawn_last_is_published_last(notebook: Notebook) -> None:
    drawing, go_on = threading.Event(), threading.Event()

    class Counter:
        count = 0

        def draw(self) -> tuple[str, str]:
            self.count += 1
            number = self.count
            if number == 2:  # by the thread, which is overtaken
                drawing.set()
                go_on.wait(20)
            return f"<b>{number}</b>", str(number)

    counter = Counter()
    display = notebook_card.Display(counter.draw)
    display.show()
    thread = threading.Thread(target=display.update)
    thread.start()
    assert drawing.wait(20)
    threading.Timer(0.05, go_on.set).start()
    notebook.end_cell()
    thread.join()
    assert notebook.last == "<b>3</b>"
