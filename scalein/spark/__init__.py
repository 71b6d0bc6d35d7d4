"""The same flows inside Spark: on DataFrames, on files that executors read themselves, and on streams.

    df.mapInArrow(q.map_in_arrow, scalein.spark.schema(q))    row by row, or by partition
    scalein.spark.apply(q, df)                                the whole flow: compiled before and after a shuffle
    scalein.spark.run(flow, spark)                            a flow bound to files, which executors read
    scalein.spark.start(q, stream_df, sink=..., ...)          a stream, with state of scalein's own; .scale(16) live
    scalein.spark.read_state(checkpoint)                      that state as a table
    scalein.spark.doctor(spark)                               can the executors run flows?
"""

from __future__ import annotations

from importlib.util import find_spec

if find_spec("pyspark") is None:
    raise ImportError('scalein.spark needs pyspark: pip install "scalein[spark]"', name="pyspark")

from scalein.spark.batch.apply import apply
from scalein.spark.batch.scan import run
from scalein.spark.doctor import doctor
from scalein.spark.package import ship
from scalein.spark.session import session
from scalein.spark.streaming.read_state import read_state
from scalein.spark.streaming.start import start
from scalein.spark.types import schema

__all__ = ["apply", "doctor", "read_state", "run", "schema", "session", "ship", "start"]
