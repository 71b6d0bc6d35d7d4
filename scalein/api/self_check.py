"""Does compiling work here? Asked by `scalein doctor`, and by Spark's doctor on every executor."""

from __future__ import annotations

import time

import pyarrow as pa

from scalein.api.column import col
from scalein.api.sources import from_arrow


def try_compiler() -> tuple[bool, str]:
    """Whether a small flow compiles and gives the right rows, and a sentence that says so.

    >>> try_compiler()[0]
    True
    """
    table = pa.table({"k": [1, 2, 1, 3], "v": [10, 20, 30, 40]})
    flow = from_arrow(table).filter(col("v") > 10).group_by("k").agg(total=col("v").sum())
    start = time.perf_counter()
    try:
        result = flow.collect()
    except Exception as error:  # whatever is broken, the doctor reports it
        return False, f"fails: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    duration_ms = (time.perf_counter() - start) * 1e3
    if result.sort_by("k").to_pydict() != {"k": [1, 2, 3], "total": [30, 20, 40]}:
        return False, "gives wrong results: please report this with the lines above"
    return True, f"works; a first small flow took {duration_ms:.0f} ms"
