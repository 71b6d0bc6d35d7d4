"""BlockReader: reads return the bytes of the files, whatever the system supports, and no read stays in flight."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from random import Random
from typing import NamedTuple

import numpy as np
import pytest

from scalein.errors import Damaged, StoreFailed
from scalein.storage import aio
from scalein.storage.aio import BlockReader, ReadBuffer
from scalein.storage.filesystem import PAGE, Input
from scalein.storage.local import LocalFileSystem

PAGES = 300  # of each file


class Request(NamedTuple):
    inputs: list[Input]
    input_index: np.ndarray
    offsets: np.ndarray
    sizes: np.ndarray


@pytest.fixture
def contents() -> list[bytes]:
    return [Random(k).randbytes(PAGES * PAGE) for k in range(3)]


@pytest.fixture
def inputs(tmp_path: Path, contents: list[bytes]) -> list[Input]:
    for k, content in enumerate(contents):
        (tmp_path / f"file{k}").write_bytes(content)
    files = LocalFileSystem(tmp_path)
    return [files.open(f"file{k}") for k in range(3)]


def some(random: Random, inputs: list[Input], most: int) -> Request:
    """Random pages of all files, many of them adjacent; those of a file are in order."""
    rows = sorted((k, page) for k in range(3) for page in random.sample(range(PAGES), random.randint(0, most)))
    sizes = [1 if random.random() < 0.9 else min(3, PAGES - page) for _, page in rows]
    return Request(inputs, np.array([k for k, _ in rows], np.int64),
                   np.array([page * PAGE for _, page in rows], np.int64), np.array(sizes, np.int64) * PAGE)


def wanted(part: Request, contents: list[bytes]) -> bytes:
    rows = zip(part.input_index.tolist(), part.offsets.tolist(), part.sizes.tolist(), strict=True)
    return b"".join(contents[k][offset : offset + size] for k, offset, size in rows)


class FewAtOnce(aio._System):
    """Accepts three reads at a time; every fifth fails, and some are short."""

    def submit(self, context: int, controls: np.ndarray) -> int:
        return super().submit(context, controls[:3])

    def events(self, context: int, least: int, events: np.ndarray) -> int:
        half = events[: len(events) // 2 + 1]
        count = super().events(context, min(least, len(half)), half)
        events["result"][events["data"] % 5 == 1] = -5
        events["result"][events["data"] % 7 == 2] //= 2
        return count


class Stubborn(aio._System):
    """Refuses the reads after the first ten."""

    def submit(self, context: int, controls: np.ndarray) -> int:
        return super().submit(context, controls[:10]) if len(controls) > 20 else -11


class NoContext(aio._System):
    def setup(self) -> int:
        return 0


class Full(aio._System):
    """Has space for four reads in flight."""

    at_once = 0

    def submit(self, context: int, controls: np.ndarray) -> int:
        if self.at_once == 4:
            return -11
        done = super().submit(context, controls[: 4 - self.at_once])
        self.at_once += done
        return done

    def events(self, context: int, least: int, events: np.ndarray) -> int:
        done = super().events(context, least, events)
        self.at_once -= done
        return done


@pytest.mark.parametrize("system", ["real", "few", "stubborn", "full", "no context", "none", "no direct"])
def test_reads_return_the_bytes_of_the_files(system: str, inputs: list[Input], contents: list[bytes],
                                             monkeypatch: pytest.MonkeyPatch) -> None:
    calls = aio._CALLS[os.uname().machine]
    made = {"few": FewAtOnce, "stubborn": Stubborn, "no context": NoContext, "full": Full}.get(system)
    monkeypatch.setattr(aio, "_free", [])
    if made is not None:
        monkeypatch.setattr(aio, "_system", lambda: made(calls))
    if system == "none":
        monkeypatch.setattr(aio, "_system", lambda: None)
    if system == "no direct":
        inputs[1]._direct = -1  # type: ignore[attr-defined]
    random = Random(3)
    reader = BlockReader(40 * PAGE)
    for most in (0, 1, 12, 100, 100, 5):  # also requests that are larger than a buffer
        parts = [some(random, inputs, most) for _ in range(random.randint(0, 9))]
        found = [(part, area.tobytes()) for part, area in reader.read(parts)]
        assert [part for part, _ in found] == parts
        assert all(area == wanted(part, contents) for part, area in found)
        assert reader.memory_bytes == aio.BUFFERS * 40 * PAGE
    reader.close()


def test_an_abandoned_read_leaves_no_read_in_flight(inputs: list[Input], contents: list[bytes]) -> None:
    random = Random(4)
    reader = BlockReader(40 * PAGE)
    for after in (0, 1, 2, 5):
        parts = [some(random, inputs, 30) for _ in range(7)]
        reading = reader.read(parts)
        for _ in range(after):
            next(reading)
        parts = [some(random, inputs, 30) for _ in range(4)]
        assert [area.tobytes() for _, area in reader.read(parts)] == [wanted(part, contents) for part in parts]
    next(reader.read([some(random, inputs, 30) for _ in range(7)]))
    reader.close()


class Interrupted(aio._System):
    """Ctrl-C interrupts the wait for reads after some have ended."""

    is_first = True
    in_flight = 0

    def submit(self, context: int, controls: np.ndarray) -> int:
        done = super().submit(context, controls)
        self.in_flight += max(done, 0)
        return done

    def events(self, context: int, least: int, events: np.ndarray) -> int:
        assert least <= self.in_flight, "this would never return"
        count = super().events(context, 1 if self.is_first else least, events)
        self.in_flight -= max(count, 0)
        if self.is_first:
            self.is_first = False
            raise KeyboardInterrupt
        return count


def test_reads_that_ended_before_an_interrupt_are_not_awaited_again(inputs: list[Input], contents: list[bytes],
                                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    found = aio._system()
    if found is None:
        pytest.skip("no asynchronous I/O here")
    system = Interrupted(aio._CALLS[platform.machine()])
    monkeypatch.setattr(aio, "_system", lambda: system)
    buffer, part = ReadBuffer(1 << 16), some(Random(4), inputs, 60)
    buffer.start(*part)
    if system.in_flight:
        with pytest.raises(KeyboardInterrupt):
            buffer.wait()
    assert buffer.wait().tobytes() == wanted(part, contents)
    buffer.start(*part)
    assert buffer.wait().tobytes() == wanted(part, contents)
    buffer.close()


def test_a_truncated_file_is_damaged(tmp_path: Path, inputs: list[Input]) -> None:
    os.truncate(tmp_path / "file1", 10 * PAGE + 100)
    part = Request(inputs, np.array([0, 1, 1, 2]), np.array([0, 9, 10, 20]) * PAGE, np.full(4, PAGE))
    with pytest.raises(Damaged, match="ends too early") as caught:
        list(BlockReader(40 * PAGE).read([part]))
    assert caught.value.facts["file"] == str(tmp_path / "file1")


def test_a_failed_read_reports_the_reason(inputs: list[Input], tmp_path: Path) -> None:
    os.close(inputs[2]._fd)  # type: ignore[attr-defined]
    inputs[2]._fd = os.open(tmp_path, os.O_RDONLY)  # type: ignore[attr-defined]
    inputs[2]._direct = -1  # type: ignore[attr-defined]
    with pytest.raises(StoreFailed, match="Is a directory"):
        list(BlockReader(40 * PAGE).read([Request(inputs, np.array([2]), np.array([0]), np.array([PAGE]))]))


def test_reads_bypass_the_page_cache(inputs: list[Input], monkeypatch: pytest.MonkeyPatch) -> None:
    if aio._system() is None or inputs[0].direct_fd < 0:
        pytest.skip("no asynchronous reads here")
    monkeypatch.setattr(inputs[0], "read_into", None)  # the fallback
    buffer = ReadBuffer(40 * PAGE)
    buffer.start(inputs, np.zeros(40, np.int64), np.arange(40) * PAGE * 2, np.full(40, PAGE))
    assert len(buffer.wait()) == 40 * PAGE
    buffer.close()
    buffer.close()
