"""What a job was asked to do."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from scalein.connectors.base import Sink
from scalein.errors import SourceLoc
from scalein.ir import ops
from scalein.ir.rewrite import walk_ops
from scalein.options import Options


@dataclass(frozen=True, slots=True)
class Shares:
    """How a job divides its memory, in bytes: a quarter for batches that wait to be taken, the rest alike for what its
    steps keep. None: as much as they want. Static tables, and what a batch is turned into, come on top.
    """

    queues: int | None
    kept: int | None  # each

    @staticmethod
    def of(memory: int | None, parts: int) -> Shares:
        """
        >>> Shares.of(1_000, 3)
        Shares(queues=250, kept=250)
        """
        if memory is None:
            return Shares(None, None)
        queues = memory // 4
        return Shares(queues, max(1, (memory - queues) // max(1, parts)))


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
    on_error: str  # raise | null (the op is one that does not fail) | sink
    rows_per_second: float | None
    at: SourceLoc

    @property
    def memory(self) -> Shares:
        parts = {ops.Aggregate: 2, ops.Distinct: 1, ops.Sort: 1}  # groups are in a state and in workers' own tables
        return Shares.of(self.options.memory, sum(parts.get(type(op), 0) for op in walk_ops(self.op)))
