"""The specification of a job, and the shares of its memory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from scalein.connectors.base import Sink
from scalein.errors import SourceLoc
from scalein.ir import ops
from scalein.ir.rewrite import walk_streams
from scalein.options import Options
from scalein.storage.object_store import Location

MAX_QUEUED = 1 << 29  # bytes of batches read ahead; more would not make anything faster


@dataclass(frozen=True, slots=True)
class Shares:
    """How a job divides its memory, in bytes; None is no limit.

    - `queues`, an eighth: source batches that are read ahead;
    - `spare`, an eighth: memory maps pooled for reuse;
    - an eighth: the intermediate results of a batch;
    - `kept`, the rest, in equal shares: the state of each operator, plus a third of that for an aggregation's tables.

    Not included: static tables, and windows that are being closed (at most a quarter of an operator's share, see
    `close_batches.py`).
    """

    queues: int | None
    kept: int | None  # each
    spare: int | None = None  # that tables had and the next may have

    @staticmethod
    def of(memory: int | None, shares: int) -> Shares:
        """The shares of operators whose `Op.memory_shares` add up to `shares`.

        >>> Shares.of(1_000, 4), Shares.of(1_000, 4 + 3)  # an aggregation; and a sort
        (Shares(queues=125, kept=468, spare=125), Shares(queues=125, kept=267, spare=125))
        """
        if memory is None:
            return Shares(None, None)
        queues, spare, results = min(memory // 8, MAX_QUEUED), memory // 8, memory // 8
        rest = memory - queues - spare - results
        return Shares(queues, max(1, 3 * rest // max(3, shares)), spare)


@dataclass(frozen=True)
class JobOutput:
    """A flow, and where its results go."""

    op: ops.Op
    sink: Sink
    at: SourceLoc


@dataclass(frozen=True)
class JobSpec:
    """Everything that `start` was given, checked."""

    outputs: tuple[JobOutput, ...]
    options: Options
    side_sinks: dict[str, Sink]  # perhaps late and failed
    checkpoint: Path | Location | None  # a folder, or one that is not on the local file system
    savepoint: Path | Location | None
    bootstrap: ops.Op | None
    every_s: float
    emit: str
    late: str  # drop | error | sink
    on_error: str  # raise | null (the op is one that does not fail) | sink
    rows_per_second: float | None
    until_now: bool  # endless sources end with what is there, and windows stay open for the next run
    restarts: int  # after failures that may pass
    evolve: bool  # aggregates may have been added since the checkpoint
    at: SourceLoc

    @property
    def memory(self) -> Shares:
        steps = walk_streams(*(output.op for output in self.outputs))
        return Shares.of(self.options.memory, sum(op.memory_shares for op in steps))
