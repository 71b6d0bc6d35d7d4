"""Merging tables of one layout: workers' partial results, slices into windows; and what their records own with them."""

from __future__ import annotations

import numpy as np

from scalein.exec.tables import State, grown
from scalein.ir.stages import FromRecords, GroupMode, Merge, MergeBag, Sink, Stage
from scalein.ir.tables import Table
from scalein.kernels.call import call, kernel
from scalein.layout import DONE, FrameData
from scalein.llvm_backend.cache import Compiled
from scalein.options import Options

EVERYTHING = (-(2**63), 2**63 - 1)


class Merging:
    """The kernels that merge states of one table."""

    def __init__(self, table: Table, mode: GroupMode, options: Options, slide: bool = False) -> None:
        self.table, self._options = table, options
        self._records = self._kernel(Merge(table, mode, slide))
        self._bags = [self._kernel(MergeBag(table, k, mode)) for k in range(len(table.bags))]

    def _kernel(self, sink: Sink) -> Compiled:
        return kernel(Stage("merge", FromRecords(), (), sink), self._options)

    def into(self, target: State, source: State, back: int = 0, within: tuple[int, int] = EVERYTHING) -> None:
        """Merge the records of one state into another, of slices (or windows, when they slide) within a range."""
        moved = self._moved(source)
        if moved is not None:
            moved[:] = -1
        frame = self._records.kernel.frame.new()
        frame["slide.back"] = back
        frame["range.first"], frame["range.last"] = within
        _run(self._records, frame, target, source.first, source.count, source)
        if source.sides is None or target.sides is None:
            return
        for k, compiled in enumerate(self._bags):
            bag = source.sides.bags[k]
            frame = compiled.kernel.frame.new()
            frame["owners"] = source.first - source.base
            _run(compiled, frame, target, bag.first, bag.count, source)
        if moved is not None:
            for log, other in zip(target.sides.logs, source.sides.logs, strict=True):
                places = moved[(other.column("owner") - source.base) // self.table.layout.size]
                stay = places >= 0
                entries = other.entries if stay.all() else other.entries[stay]
                log.add(entries)
                log.column("owner")[log.count - len(entries) :] = places[stay]
                log.kept += [heap for heap in (other.heap, *other.kept) if heap not in log.kept]

    def _moved(self, source: State) -> np.ndarray | None:
        """Where each record of the source went, if anything outside of it must follow."""
        if not self.table.has_sides:
            return None
        layout = self.table.layout
        return source.words(layout.size // 8)[:, layout.offset("moved") // 8]


def _run(compiled: Compiled, frame: FrameData, target: State, first: int, count: int, source: State) -> None:
    frame["source"], frame["row"], frame["end"] = first, 0, count
    frame.keep["source"] = source
    while True:
        target.attach(frame)
        status = call(compiled, frame)
        target.detach(frame)
        if status == DONE:
            return
        grown(target, status, frame)
