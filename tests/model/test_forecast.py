"""Forecasts against series whose continuation is known."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

import scalein as si
from scalein.model import forecast

DAY = 96  # steps


def wave(steps: np.ndarray, growth: float = 0.0) -> np.ndarray:
    day = 2 * np.pi * steps / DAY
    return 1000 + growth * steps + 300 * np.sin(day) + 120 * np.cos(2 * day + 1)


def noisy(count: int, seed: int, growth: float = 0.3, noise: float = 20.0) -> np.ndarray:
    return wave(np.arange(count), growth) + np.random.default_rng(seed).normal(0, noise, count)


def test_trend_and_season_are_continued() -> None:
    found = forecast(noisy(7 * DAY, seed=1), ahead=DAY, period=DAY)
    truth = wave(np.arange(7 * DAY, 8 * DAY), 0.3)
    assert np.abs(found.mean - truth).mean() < 20
    assert found.errors[found.method] == min(found.errors.values())
    assert set(found.baselines) | {found.method} == set(found.errors)
    assert found.errors["last value"] > 3 * found.errors[found.method]


def test_two_seasons() -> None:
    steps = np.arange(8 * 7 * 24)
    load = 100 + 20 * np.sin(2 * np.pi * steps / 24) + 30 * np.sin(2 * np.pi * steps / 168)
    found = forecast(load[:-48], ahead=48, period=[24, 168])
    assert np.abs(found.mean - load[-48:]).max() < 3


def test_intervals_cover_what_comes() -> None:
    inside, count = 0, 0
    for seed in range(12):
        series = noisy(6 * DAY, seed, noise=40)
        found = forecast(series[:-DAY // 2], ahead=DAY // 2, period=DAY, coverage=0.9)
        inside += int(((series[-DAY // 2:] >= found.low) & (series[-DAY // 2:] <= found.high)).sum())
        count += DAY // 2
    assert 0.85 <= inside / count <= 0.99


def test_a_walk_without_seasons_is_not_given_one() -> None:
    walk = 1e4 + np.cumsum(np.random.default_rng(3).normal(0, 10, 600))
    found = forecast(walk, ahead=30, period=24)
    assert np.abs(found.mean - walk[-1]).max() < 150
    assert found.high[-1] - found.low[-1] > found.high[0] - found.low[0], "later is less certain"


def test_gaps_types_and_short_histories() -> None:
    series = noisy(4 * DAY, seed=5)
    gaps = [None if step % 11 == 3 else float(each) for step, each in enumerate(series)]
    whole, holes = forecast(series, ahead=10, period=DAY), forecast(pa.array(gaps), ahead=10, period=DAY)
    assert np.abs(whole.mean - holes.mean).max() < 40
    assert (forecast(pa.chunked_array([[1, 2], [3, 4]]), ahead=3).mean > 3.5).all()
    assert forecast([5.0] * 4, ahead=2, period=100).mean == pytest.approx([5, 5])
    dying = forecast(np.linspace(100, 0, 50), ahead=20)
    assert (dying.low >= 0).all()
    assert "steps by" in repr(dying)


@pytest.mark.parametrize(("make", "says"), [
    (lambda: forecast([1, 2], ahead=1), "at least 4 numbers"),
    (lambda: forecast("abc", ahead=1), "series of numbers"),
    (lambda: forecast([1, 2, 3, 4], ahead=0), "ahead"),
    (lambda: forecast([1, 2, 3, 4], ahead=1, period=1), "period"),
    (lambda: forecast([1, 2, 3, 4], ahead=1, coverage=2), "coverage"),
])
def test_mistakes_are_named(make: object, says: str) -> None:
    with pytest.raises(si.ScaleinError, match=says) as caught:
        make()
    assert "test_forecast.py" in str(caught.value)
