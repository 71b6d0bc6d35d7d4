"""scalein: dataflow queries compiled to machine code over Arrow data."""

from __future__ import annotations

from typing import TYPE_CHECKING

from scalein.api import hints
from scalein.api.column import Column, col, corr, count, cov, lit, when
from scalein.api.flow import Flow
from scalein.api.functions import (
    coalesce,
    concat_str,
    dense_rank,
    max_horizontal,
    min_horizontal,
    rank,
    row_number,
    struct,
)
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
from scalein.api.times import Duration, Timestamp, duration
from scalein.api.windows import count_window, cumulate, session, sliding, tumbling
from scalein.connectors.base import Sink, Source
from scalein.errors import (
    BadArgument,
    BadData,
    BadDuration,
    BadName,
    BadSql,
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
from scalein.ir.ring import Ring
from scalein.sql import sql
from scalein.udf import process, udaf, udf

__version__ = "0.1.0"

__all__ = [
    "BadArgument",
    "BadData",
    "BadDuration",
    "BadName",
    "BadSql",
    "CannotCompile",
    "Column",
    "ComputeError",
    "Damaged",
    "Duration",
    "Fenced",
    "Flow",
    "InternalError",
    "LateData",
    "NewerFormat",
    "Ring",
    "ScaleinError",
    "Sink",
    "Source",
    "StoreFailed",
    "Timestamp",
    "UnknownColumn",
    "WriteFailed",
    "WrongType",
    "__version__",
    "coalesce",
    "col",
    "concat_str",
    "corr",
    "count",
    "count_window",
    "cov",
    "cumulate",
    "dense_rank",
    "duration",
    "flow",
    "from_arrow",
    "from_batches",
    "from_source",
    "generate",
    "lit",
    "max_horizontal",
    "min_horizontal",
    "process",
    "rank",
    "read_csv",
    "read_flight",
    "read_ipc",
    "read_json",
    "read_parquet",
    "row_number",
    "session",
    "sliding",
    "sql",
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
    "udaf",
    "udf",
    "when",
]


def __dir__() -> list[str]:
    return sorted(__all__)


if not TYPE_CHECKING:  # a type checker should go on reporting names that are not there

    def __getattr__(name: str) -> object:
        if name == "model":  # imported when it is used
            from importlib import import_module

            return import_module("scalein.model")
        raise hints.missing("scalein", name, hints.MODULE)
