"""The machine code of every function; importing the package registers all lowerings."""

from scalein.llvm_backend.functions import (
    arithmetic,
    casts,
    compare,
    dates,
    hashing,
    internal,
    logic,
    membership,
    strings,
    time_text,
    udf,
)

__all__ = [
    "arithmetic",
    "casts",
    "compare",
    "dates",
    "hashing",
    "internal",
    "logic",
    "membership",
    "strings",
    "time_text",
    "udf",
]
