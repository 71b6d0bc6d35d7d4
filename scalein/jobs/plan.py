"""What a job was asked to do."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from scalein.connectors.base import Sink
from scalein.errors import SourceLoc
from scalein.ir import ops
from scalein.options import Options


@dataclass(frozen=True)
class Plan:
    """Everything that `Flow.start` was given, checked."""

    op: ops.Op
    options: Options
    sinks: dict[str, Sink]  # out, and perhaps late and failed
    checkpoint: Path | None
    savepoint: Path | None
    bootstrap: ops.Op | None
    every_s: float
    emit: str
    late: str  # drop | error | sink
    on_error: str  # raise | sink
    rows_per_second: float | None
    at: SourceLoc
