"""scalein: dataflow queries compiled to machine code over Arrow data."""

from __future__ import annotations

from typing import TYPE_CHECKING

from scalein.api import hints
from scalein.api.column import Column, col, corr, count, cov, lit, when
from scalein.api.flow import Flow
from scalein.api.functions import coalesce, concat_str, max_horizontal, min_horizontal, struct
from scalein.api.sinks import to_callback, to_console, to_csv, to_ipc, to_json, to_memory, to_parquet
from scalein.api.sources import (
    flow,
    from_arrow,
    from_batches,
    from_source,
    generate,
    read_csv,
    read_flight,
    read_ipc,
    read_json,
    read_parquet,
)
from scalein.api.start import start
from scalein.api.windows import sliding, tumbling
from scalein.connectors.base import Sink, Source
from scalein.errors import (
    BadArgument,
    BadData,
    BadDuration,
    BadName,
    CannotCompile,
    ComputeError,
    Damaged,
    Fenced,
    InternalError,
    LateData,
    NewerFormat,
    ScaleinError,
    StoreFailed,
    UnknownColumn,
    WriteFailed,
    WrongType,
)
from scalein.udf import udf

__version__ = "0.1.0"

__all__ = [
    "BadArgument",
    "BadData",
    "BadDuration",
    "BadName",
    "CannotCompile",
    "Column",
    "ComputeError",
    "Damaged",
    "Fenced",
    "Flow",
    "InternalError",
    "LateData",
    "NewerFormat",
    "ScaleinError",
    "Sink",
    "Source",
    "StoreFailed",
    "UnknownColumn",
    "WriteFailed",
    "WrongType",
    "__version__",
    "coalesce",
    "col",
    "concat_str",
    "corr",
    "count",
    "cov",
    "flow",
    "from_arrow",
    "from_batches",
    "from_source",
    "generate",
    "lit",
    "max_horizontal",
    "min_horizontal",
    "read_csv",
    "read_flight",
    "read_ipc",
    "read_json",
    "read_parquet",
    "sliding",
    "start",
    "struct",
    "to_callback",
    "to_console",
    "to_csv",
    "to_ipc",
    "to_json",
    "to_memory",
    "to_parquet",
    "tumbling",
    "udf",
    "when",
]


def __dir__() -> list[str]:
    return sorted(__all__)


if not TYPE_CHECKING:  # a type checker should go on reporting names that are not there

    def __getattr__(name: str) -> object:
        raise hints.missing("scalein", name, hints.MODULE)
