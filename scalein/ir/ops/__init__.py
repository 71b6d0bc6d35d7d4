"""Dataflow operators as the user wrote them: immutable, typed, each answering for itself."""

from __future__ import annotations

from scalein.ir.ops.aggregate import Aggregate
from scalein.ir.ops.base import Op
from scalein.ir.ops.join import Join, OuterJoin, Union
from scalein.ir.ops.order import By, Distinct, Limit, Sort
from scalein.ir.ops.rows import Explode, Filter, MapBatches, Project
from scalein.ir.ops.source import Source
from scalein.ir.ops.watermark import Watermark

__all__ = ["Aggregate", "By", "Distinct", "Explode", "Filter", "Join", "Limit", "MapBatches", "Op", "OuterJoin",
           "Project", "Sort", "Source", "Union", "Watermark"]
