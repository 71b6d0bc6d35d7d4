"""Reading ahead: everything in order, errors in their place, a bound on what is held, no thread left behind."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scalein.connectors.sources.read_ahead import ReadTask, read_ahead


def units(sizes: list[int], made: Callable[[], object] = lambda: None) -> Iterator[ReadTask[tuple[int, int]] | None]:
    def unit(number: int, size: int) -> Iterator[tuple[int, int]]:
        for k in range(size):
            made()
            yield number, k

    for number, size in enumerate(sizes):
        yield lambda number=number, size=size: unit(number, size)  # type: ignore[misc]


@settings(max_examples=30, deadline=None)
@given(sizes=st.lists(st.integers(0, 9), max_size=9), threads=st.integers(1, 5), depth=st.integers(1, 3))
def test_items_come_in_order(sizes: list[int], threads: int, depth: int) -> None:
    before = set(threading.enumerate())
    got = [item for item in read_ahead(units(sizes), threads, 1, depth) if item is not None]
    assert got == [(number, k) for number, size in enumerate(sizes) for k in range(size)]
    assert set(threading.enumerate()) <= before


def test_little_is_made_before_it_is_wanted() -> None:
    made: list[None] = []
    with closing(read_ahead(units([100] * 100, lambda: made.append(None)), 2, 1)) as items:  # type: ignore[type-var]
        next(items)
        time.sleep(0.1)
        assert len(made) <= 2 * 3 + 1  # each thread: a full lane, and one in its hands
    assert len(made) <= 2 * 4 + 1


@pytest.mark.parametrize("threads", [1, 3])
def test_an_error_comes_in_its_place(threads: int) -> None:
    def failing() -> Iterator[tuple[int, int]]:
        yield 3, 0
        raise KeyError("here")

    def given() -> Iterator[ReadTask[tuple[int, int]] | None]:
        yield from units([2, 0, 1])
        yield failing
        yield from units([5])

    got: list[object] = []
    with pytest.raises(KeyError, match="here"):
        got.extend(item for item in read_ahead(given(), threads, 1) if item is not None)
    assert got == [(0, 0), (0, 1), (2, 0), (3, 0)]

    def broken() -> Iterator[ReadTask[tuple[int, int]] | None]:
        yield from units([2])
        raise ValueError("no more")

    got.clear()
    with pytest.raises(ValueError, match="no more"):
        got.extend(item for item in read_ahead(broken(), threads, 1) if item is not None)
    assert got == [(0, 0), (0, 1)]


def test_silence_is_told_and_units_may_come_later() -> None:
    is_there = threading.Event()

    def given() -> Iterator[ReadTask[tuple[int, int]] | None]:
        while not is_there.is_set():
            yield None
        yield from units([1])

    with closing(read_ahead(given(), 2, 0.01)) as items:  # type: ignore[type-var]
        assert next(items) is None
        assert next(items) is None
        is_there.set()
        assert next(item for item in items if item is not None) == (0, 0)
        assert [item for item in items if item is not None] == []
