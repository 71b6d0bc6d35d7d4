"""Seen: what a `distinct` remembers while its pipe runs: one table for the whole run, and how many blocks went by.

The pipe runs in one thread, a batch after the other: side by side, which row of a key comes first would depend on
timing. Batches may bring new variants of the kernel; records keep their layout, so the table stays.
"""

from __future__ import annotations

from scalein.exec.tables import HashTable, grown
from scalein.ir.stages import Fresh, Stage
from scalein.kernels.call import call
from scalein.layout import DONE, OUTPUT_FULL, SEEN, FrameData
from scalein.llvm_backend.cache import Compiled
from scalein.options import Options


class Seen:
    """The keys that have gone by."""

    def __init__(self, stage: Stage, options: Options) -> None:
        step = next(step for step in stage.steps if isinstance(step, Fresh))
        self._table = HashTable(step.table, options)
        self._blocks = 0

    def call(self, compiled: Compiled, frame: FrameData) -> int:
        """Run the kernel until it is done or its output is full; the table gets the room it asks for."""
        while True:
            self._table.attach(frame, SEEN)
            frame[f"{SEEN}.blocks"] = self._blocks
            status = call(compiled, frame)
            self._table.detach(frame, SEEN)
            self._blocks = frame[f"{SEEN}.blocks"]
            if status in (DONE, OUTPUT_FULL):
                return status
            grown(self._table, status, frame, SEEN)
