"""scalein: dataflow queries compiled to machine code over Arrow data."""

from __future__ import annotations

from typing import TYPE_CHECKING

from scalein import elsewhere
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

if not TYPE_CHECKING:  # a type checker should go on reporting names that are not there

    def __getattr__(name: str) -> object:
        raise elsewhere.missing("scalein", name, elsewhere.MODULE)
