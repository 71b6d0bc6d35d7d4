"""Dataflow operators as the user wrote them: immutable, typed, each answering for itself."""

from __future__ import annotations

from scalein.ir.ops.aggregate import Aggregate
from scalein.ir.ops.base import Op
from scalein.ir.ops.join import Join, OuterJoin, Reordered, Union
from scalein.ir.ops.order import By, Distinct, Limit, Sort
from scalein.ir.ops.over import Over
from scalein.ir.ops.process import Process
from scalein.ir.ops.rows import LAST_WINDOW, AssignWindows, Explode, Filter, MapBatches, Project
from scalein.ir.ops.source import Source
from scalein.ir.ops.stream_join import BufferedJoin, JoinSides, StreamJoin
from scalein.ir.ops.watermark import Watermark

__all__ = [
           "LAST_WINDOW",
           "Aggregate",
           "AssignWindows",
           "BufferedJoin",
           "By",
           "Distinct",
           "Explode",
           "Filter",
           "Join",
           "JoinSides",
           "Limit",
           "MapBatches",
           "Op",
           "OuterJoin",
           "Over",
           "Process",
           "Project",
           "Reordered",
           "Sort",
           "Source",
           "StreamJoin",
           "Union",
           "Watermark",
]
