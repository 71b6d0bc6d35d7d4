"""What a model says of a configuration: `Prediction`, and `Plan`, the recommendation of one. They show themselves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from html import escape
from math import isfinite
from typing import Any

import numpy as np

from scalein.errors import BadArgument, here
from scalein.notebook_card import Card, format_bytes, format_seconds

CURVE = (0.05, 0.2, 0.35, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.93, 0.96)  # of the greatest rate, for plots
Interval = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What checkpoints take, one every so often."""

    bytes: float  # written for each
    seconds: float  # until it is durable, beside the job's work
    share: float  # of the workers' time


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a configuration will do under a load. `intervals` hold the true figures in about nine of ten cases."""

    config: Mapping[str, object]
    rate: float  # rows a second; without one given, 70 % of the greatest
    max_rate: float
    low: float
    high: float
    utilization: float
    p50_s: float
    p99_s: float
    saturated: bool
    state_bytes: float
    memory: float  # bytes beyond the process itself and its static tables
    on_disk_bytes: float  # of the state, that memory has no room for
    checkpoint: Checkpoint | None
    rescale_pause_s: float
    bottleneck: str
    row_s: Mapping[str, float]  # where the seconds of a row go, at the greatest rate
    intervals: Mapping[str, Interval]
    notes: tuple[str, ...] = ()
    _at: Callable[[float], Prediction] | None = field(default=None, repr=False, compare=False)  # another rate
    batch_s: float | None = None  # of a micro-batch of Spark

    @property
    def workers(self) -> int:
        return int(str(self.config["workers"]))

    def curve(self) -> list[tuple[float, float, float]]:
        """Rates up to the greatest, each with p50 and p99 in seconds."""
        assert self._at is not None
        found = [self._at(share * self.max_rate) for share in CURVE]
        return [(each.rate, each.p50_s, each.p99_s) for each in found]

    def to_json(self) -> dict[str, Any]:
        """All figures as JSON; infinite ones, of a saturated configuration, are None."""
        names = ("rate", "max_rate", "low", "high", "utilization", "p50_s", "p99_s", "state_bytes", "memory",
                 "on_disk_bytes", "rescale_pause_s")
        found: dict[str, Any] = {"config": dict(self.config), **{name: _finite(getattr(self, name)) for name in names}}
        checkpoint = self.checkpoint
        return {**found, "batch_s": self.batch_s, "saturated": self.saturated, "bottleneck": self.bottleneck,
                "row_s": dict(self.row_s), "checkpoint": None if checkpoint is None else {
                    "bytes": checkpoint.bytes, "seconds": checkpoint.seconds, "share": checkpoint.share},
                "intervals": {name: [_finite(low), _finite(high)] for name, (low, high) in self.intervals.items()},
                "notes": list(self.notes)}

    def _facts(self) -> list[tuple[str, str]]:
        latency = "grows without end: saturated" if self.saturated else (
            f"p50 {format_seconds(self.p50_s)}, p99 {format_seconds(self.p99_s)} {_interval(self, 'p99_s', _time)}")
        facts = [
            ("greatest rate", f"{self.max_rate:,.0f} rows/s {_interval(self, 'max_rate', _count)}"),
            ("at", f"{self.rate:,.0f} rows/s: {self.utilization:.0%} busy {_interval(self, 'utilization', _share)}"),
            ("latency", latency),
            ("memory", f"{format_bytes(self.memory)} {_interval(self, 'memory', format_bytes)}, "
                       f"of it state {format_bytes(self.state_bytes - self.on_disk_bytes)}"
                       + (f"; {format_bytes(self.on_disk_bytes)} on disk" if self.on_disk_bytes else ""))]
        if self.checkpoint is not None:
            facts.append(("checkpoints", f"{format_bytes(self.checkpoint.bytes)} in "
                                         f"{format_seconds(self.checkpoint.seconds)}, {self.checkpoint.share:.1%} of "
                                         f"the time"))
        if self.batch_s is not None:
            facts.append(("micro-batch", f"{format_seconds(self.batch_s)} {_interval(self, 'batch_s', _time)}"))
        return [*facts, ("rescaling", f"pauses for {format_seconds(self.rescale_pause_s)}"),
                ("bottleneck", self.bottleneck)]

    @property
    def _title(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self.config.items() if value is not None)

    def __repr__(self) -> str:
        facts = self._facts()
        width = max(len(name) for name, _ in facts)
        return "\n".join([f"Prediction({self._title})", *(f"  {name:<{width}}  {text}" for name, text in facts),
                          *(f"  note: {note}" for note in self.notes)])

    def _repr_html_(self) -> str:
        rates = [p99 for _, _, p99 in self.curve()] if self._at is not None else []
        status = "saturated" if self.saturated else f"{self.utilization:.0%} busy"
        notes = "\n".join(self.notes) + ("\nThe line is p99 latency by load, up to 96 %." if rates else "")
        return Card(f"Prediction({self._title})", status, "", self._facts(), notes.strip(), rates).html

    def plot(self, axes: Any = None) -> Any:
        """Latency by rate, with the greatest rate and its interval; gives matplotlib's axes."""
        try:
            import matplotlib.pyplot
        except ImportError as error:
            raise BadArgument("plot needs matplotlib, which is not installed", at=here(),
                              hint="pip install matplotlib") from error
        if axes is None:
            _, axes = matplotlib.pyplot.subplots(figsize=(7, 3.5))
        rates, p50, p99 = (np.array(each) for each in zip(*self.curve(), strict=True))
        axes.plot(rates / 1e6, p99 * 1e3, label="p99")
        axes.plot(rates / 1e6, p50 * 1e3, label="p50")
        axes.axvspan(self.low / 1e6, self.high / 1e6, color="0.85", label="greatest rate, 90 % interval")
        axes.axvline(self.max_rate / 1e6, color="0.5", linewidth=1)
        if not self.saturated:
            axes.plot([self.rate / 1e6], [self.p99_s * 1e3], "o", color="C0")
        axes.set(xlabel="million rows/s", ylabel="latency, ms", yscale="log", title=self._title)
        axes.legend()
        return axes


@dataclass(frozen=True, slots=True)
class Plan:
    """A recommended configuration: the cheapest that holds, or, if none does, the greatest that was asked about."""

    feasible: bool
    workers: int
    prediction: Prediction
    breaks_first: str  # what, and how far away
    margin: float  # the factor on the rate at which it breaks; below 1 it does not hold now
    limits: Mapping[str, float]  # the factor on the rate that each thing allows
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {"feasible": self.feasible, "workers": self.workers, "breaks_first": self.breaks_first,
                "margin": _finite(self.margin), "limits": {name: _finite(value) for name, value in self.limits.items()},
                "prediction": self.prediction.to_json(), "notes": list(self.notes)}

    @property
    def _head(self) -> str:
        return f"{self.workers} workers" if self.feasible else f"not feasible with up to {self.workers} workers"

    def __repr__(self) -> str:
        notes = "".join(f"\n  note: {note}" for note in self.notes)
        return f"Plan: {self._head}\n  breaks first: {self.breaks_first}{notes}\n{self.prediction!r}"

    def _repr_html_(self) -> str:
        notes = "".join(f"<br>{escape(note)}" for note in self.notes)
        return (f"<b>Plan: {escape(self._head)}</b><br>breaks first: {escape(self.breaks_first)}{notes}<br>"
                f"{self.prediction._repr_html_()}")


def _finite(value: float) -> float | None:
    return value if isfinite(value) else None


def _interval(found: Prediction, name: str, show: Callable[[float], str]) -> str:
    if name not in found.intervals:
        return ""
    low, high = found.intervals[name]
    return f"({show(low)} to {show(high)})"


def _time(seconds: float) -> str:
    return format_seconds(seconds) if isfinite(seconds) else "without end"


def _count(number: float) -> str:
    return f"{number:,.0f}"


def _share(share: float) -> str:
    return f"{share:.0%}"
