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
)
from scalein.llvm_backend.functions.registry import CallSite, Data, lowers
from scalein.llvm_backend.values import Value

__all__ = ["arithmetic", "casts", "compare", "dates", "hashing", "internal", "logic", "membership", "strings"]


@lowers("udf")
def _udf(c: CallSite) -> Value:
    from scalein.llvm_backend.functions.udf import lower_udf  # most flows have none

    return lower_udf(c)


@lowers("dt_strftime", "str_strptime")
def _time_text(c: CallSite) -> Data:
    from scalein.llvm_backend.functions.time_text import lower_strftime, lower_strptime  # most flows have none

    return lower_strftime(c) if c.call.fn == "dt_strftime" else lower_strptime(c)
