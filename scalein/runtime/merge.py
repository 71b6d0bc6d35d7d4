"""Merging tables of one layout: workers' partial results, slices into windows."""

from __future__ import annotations

from scalein.layout import DONE
from scalein.llvm_backend.cache import Compiled
from scalein.runtime.call import call
from scalein.runtime.tables import DirectTable, HashTable, OneRecord, grown

State = OneRecord | DirectTable | HashTable


def merge_into(compiled: Compiled, target: State, source: State, back: int = 0) -> None:
    """Merge all records of one state into another."""
    frame = compiled.kernel.frame.new()
    frame["source"] = source.first
    frame.keep["source"] = source
    frame["row"], frame["end"] = 0, source.count
    frame["slide.back"] = back
    while True:
        target.attach(frame)
        status = call(compiled, frame)
        if isinstance(target, HashTable):
            target.detach(frame)
        if status == DONE:
            return
        grown(target, status, frame)
