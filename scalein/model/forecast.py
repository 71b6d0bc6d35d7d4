"""Forecasts of a load: trend and seasons from little history, with intervals that its own past has earned.

Candidates are simple methods (the last value, the last season, drift) and two that know trend and seasons: damped
Holt-Winters, and a regression on harmonics of the seasons with a trend, whose residuals fade out. Each forecasts the
last part of the history from several moments (rolling origins); the one with the least absolute error is taken, and the
errors that it made there, by how far ahead, are the width of the interval. So a method that knows seasons wins only
where there are some, and the interval is wide where the past was not predictable.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
import pyarrow as pa

from scalein.errors import BadArgument, SourceLoc, here

ORIGINS = 8  # moments from which the past is forecast
MAX_HARMONICS = 8
MIN_VALUES = 4
FADE = 0.9  # of the last residual, a step

Method = Callable[[np.ndarray, Sequence[int], int], np.ndarray]  # the history, periods, steps ahead


@dataclass(frozen=True, slots=True)
class Forecast:
    """The continuation of a series: `mean`, and the interval [`low`, `high`] that holds `coverage` of the values."""

    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray
    coverage: float
    method: str
    errors: dict[str, float]  # the mean absolute error of each method on the history itself
    baselines: dict[str, np.ndarray]  # what the other methods forecast
    history: np.ndarray

    @property
    def peak(self) -> float:
        """The greatest value that the interval allows."""
        return float(self.high.max())

    def __repr__(self) -> str:
        return (f"Forecast of {len(self.mean)} steps by {self.method}: {self.mean[0]:.4g} to {self.mean[-1]:.4g}, "
                f"{self.coverage:.0%} within {self.low.min():.4g} and {self.high.max():.4g}")


def forecast(load: object, ahead: int, period: int | Sequence[int] = (), coverage: float = 0.9) -> Forecast:
    """Continue a series of loads, one value a step, by `ahead` steps; `period` is the length of a season, or several.

    >>> import numpy as np
    >>> wave = 100 + 10 * np.sin(2 * np.pi * np.arange(240) / 24)
    >>> found = forecast(wave, ahead=6, period=24)
    >>> bool(np.abs(found.mean - (100 + 10 * np.sin(2 * np.pi * np.arange(240, 246) / 24))).max() < 0.5)
    True
    """
    at = here()
    history = _values(load, at)
    periods = _periods(period, len(history), at)
    if isinstance(ahead, bool) or not isinstance(ahead, int) or ahead < 1:
        raise BadArgument("ahead must be a number of steps, at least 1", at=at, found=repr(ahead))
    if not 0 < coverage < 1:
        raise BadArgument("coverage is between 0 and 1", at=at, found=repr(coverage))
    methods = {name: method for name, method in METHODS.items() if periods or name not in SEASONAL}
    misses = {name: _misses(method, history, periods, ahead) for name, method in methods.items()}
    errors = {name: float(np.nanmean(np.abs(each))) for name, each in misses.items()}
    best = min(errors, key=errors.__getitem__)
    means = {name: method(history, periods, ahead) for name, method in methods.items()}
    low, high = _interval(misses[best], ahead, coverage)
    floor = 0.0 if history.min() >= 0 else -np.inf  # a load that never was negative will not be
    mean = np.maximum(means.pop(best), floor)
    return Forecast(mean, np.maximum(mean + low, floor), np.maximum(mean + high, floor), coverage, best, errors, means,
                    history)


def _values(load: object, at: SourceLoc) -> np.ndarray:
    """The series as floats; gaps (null, NaN) are interpolated."""
    if isinstance(load, (pa.Array, pa.ChunkedArray)):
        load = load.to_numpy(zero_copy_only=False) if isinstance(load, pa.Array) else load.to_numpy()
    try:
        values = np.array(load, float)
    except (TypeError, ValueError):
        raise BadArgument("a load is a series of numbers", at=at, found=type(load).__name__) from None
    known = np.isfinite(values) if values.ndim == 1 else np.array([], bool)
    if known.sum() < MIN_VALUES:
        raise BadArgument(f"a forecast needs a series of at least {MIN_VALUES} numbers", at=at,
                          found=f"{int(known.sum())} numbers")
    places = np.arange(len(values))
    whole: np.ndarray = np.interp(places, places[known], values[known])
    return whole


def _periods(period: int | Sequence[int], count: int, at: SourceLoc) -> list[int]:
    """The seasons of which the history has at least two, shortest first."""
    given = [period] if isinstance(period, int) else list(period)
    for each in given:
        if isinstance(each, bool) or not isinstance(each, int) or each < 2:
            raise BadArgument("a period is a number of steps, at least 2", at=at, found=repr(each))
    return sorted({each for each in given if 2 * each <= count})


def _misses(method: Method, history: np.ndarray, periods: Sequence[int], ahead: int) -> np.ndarray:
    """Truth less forecast from several moments of the past: a row each, a column each step ahead; NaN if unknown."""
    count = len(history)
    first = max(MIN_VALUES, min(count - 1, max((2 * each for each in periods), default=0)), count // 2)
    first = min(first, count - 1)
    origins = np.unique(np.linspace(first, count - 1, ORIGINS).astype(int))
    found = np.full((len(origins), ahead), np.nan)
    for row, origin in enumerate(origins):
        truth = history[origin:origin + ahead]
        usable = [each for each in periods if 2 * each <= origin]
        found[row, :len(truth)] = truth - method(history[:origin], usable, ahead)[:len(truth)]
    return found


def _interval(misses: np.ndarray, ahead: int, coverage: float) -> tuple[np.ndarray, np.ndarray]:
    """How far below and above the mean values may be, at each step ahead: it grows with what was missed so far."""
    known = ~np.isnan(misses)
    squares = np.where(known, misses, 0.0) ** 2
    level = np.sqrt(np.maximum.accumulate(squares.sum(axis=0) / np.maximum(known.sum(axis=0), 1)))
    scale = np.where(level > 0, level, max(level.max(), np.finfo(float).tiny))
    shares = (misses / scale)[known]
    count = len(shares)
    # The quantile of a new miss: with few misses, that beyond the greatest (as in conformal prediction).
    beyond = min(1.0, coverage * (count + 1) / count)
    width = np.quantile(np.abs(shares), beyond) * level
    return -width, width


# --- methods


def last_value(history: np.ndarray, periods: Sequence[int], ahead: int) -> np.ndarray:
    return np.full(ahead, history[-1])


def drift(history: np.ndarray, periods: Sequence[int], ahead: int) -> np.ndarray:
    """The line through the first and the last value."""
    slope = (history[-1] - history[0]) / max(1, len(history) - 1)
    line: np.ndarray = history[-1] + slope * np.arange(1, ahead + 1)
    return line


def last_season(history: np.ndarray, periods: Sequence[int], ahead: int) -> np.ndarray:
    if not periods:
        return last_value(history, periods, ahead)
    season = history[-periods[-1]:]
    return season[np.arange(ahead) % len(season)]


def harmonic(history: np.ndarray, periods: Sequence[int], ahead: int) -> np.ndarray:
    """A trend and waves of each season, by least squares; what the last values have beyond it fades out."""
    count = len(history)
    design = _design(np.arange(count + ahead), count, periods)
    weights, *_ = np.linalg.lstsq(design[:count], history, rcond=None)
    fitted = design @ weights
    recent = history[-min(5, count):] - fitted[count - min(5, count):count]
    faded: np.ndarray = fitted[count:] + recent.mean() * FADE ** np.arange(1, ahead + 1)
    return faded


def _design(steps: np.ndarray, count: int, periods: Sequence[int]) -> np.ndarray:
    columns = [np.ones(len(steps)), steps / count]
    for period in periods:
        for wave in range(1, min(MAX_HARMONICS, (period - 1) // 2, count // 8) + 1):
            angle = 2 * np.pi * wave * steps / period
            columns += [np.sin(angle), np.cos(angle)]
    return np.stack(columns, axis=1)


def holt_winters(history: np.ndarray, periods: Sequence[int], ahead: int) -> np.ndarray:
    """Level, damped trend and one season that follow the series, with the weights that served its past best.

    All combinations of weights run side by side, as vectors.
    """
    level_w, trend_w, season_w = np.array(list(product((0.05, 0.2, 0.5, 0.8), (0.0, 0.05, 0.2), (0.05, 0.2, 0.5)))).T
    damping, period = 0.98, periods[-1] if periods else 1
    season = np.repeat((history[:period] - history[:period].mean())[:, None], len(level_w), axis=1)
    level, trend = np.full(len(level_w), history[:period].mean()), np.zeros(len(level_w))
    missed = np.zeros(len(level_w))
    for step in range(period, len(history)):
        place = step % period
        expected = level + damping * trend
        missed += np.abs(history[step] - expected - season[place])
        new = expected + level_w * (history[step] - season[place] - expected)
        trend = damping * trend + trend_w * (new - expected)
        season[place] += season_w * (history[step] - new - season[place])
        level = new
    best = int(missed.argmin())
    damped = np.cumsum(damping ** np.arange(1, ahead + 1))
    places = (len(history) + np.arange(ahead)) % period
    found: np.ndarray = level[best] + trend[best] * damped + (season[places, best] if periods else 0.0)
    return found


METHODS: dict[str, Method] = {"last value": last_value, "drift": drift, "last season": last_season,
                              "harmonic regression": harmonic, "Holt-Winters": holt_winters}
SEASONAL = ("last season",)
