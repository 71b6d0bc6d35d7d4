"""scalein: dataflow queries compiled to machine code over Arrow data."""

from __future__ import annotations

from scalein.choices import when
from scalein.column import Column, col, count, lit
from scalein.errors import (
    BadArgument,
    BadData,
    BadDuration,
    BadName,
    CannotCompile,
    ComputeError,
    InternalError,
    ScaleinError,
    UnknownColumn,
    WrongType,
)
from scalein.flow import Flow, flow, from_arrow, from_batches
from scalein.udf import udf
from scalein.windows import sliding, tumbling

__version__ = "0.1.0"

__all__ = [
    "BadArgument",
    "BadData",
    "BadDuration",
    "BadName",
    "CannotCompile",
    "Column",
    "ComputeError",
    "Flow",
    "InternalError",
    "ScaleinError",
    "UnknownColumn",
    "WrongType",
    "__version__",
    "col",
    "count",
    "flow",
    "from_arrow",
    "from_batches",
    "lit",
    "sliding",
    "tumbling",
    "udf",
    "when",
]
