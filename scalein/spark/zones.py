"""The session's time zone, in which Spark reads the clock of a TIMESTAMP.

A TIMESTAMP is an instant, and Spark's `hour`, `date_trunc` and the like read it in `spark.sql.session.timeZone`. A flow
has the zone in the column's type: `si.flow(df.schema)` takes it from the active session, so that `dt.hour()` is the
same hour. Windows are aligned to the epoch in UTC, in both.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SETTING = "spark.sql.session.timeZone"
_UTC = ("UTC", "GMT", "UT", "Z", "Zulu", "Etc/UTC", "Etc/GMT", "Etc/UCT", "Etc/Zulu", "UCT", "GMT0", "Greenwich")
_OFFSET = re.compile(r"(?:UTC|GMT|UT)?([+-])(\d{1,2})(?::?(\d{2}))?")


def session_zone(spark: SparkSession) -> str:
    """The time zone of a session, as Arrow writes it."""
    return arrow_zone(str(spark.conf.get(SETTING, "UTC")))


def active_zone() -> str:
    """The time zone of the active session; UTC if there is none."""
    from pyspark.sql import SparkSession

    # Another thread than the one that made the session has no active one.
    spark = SparkSession.getActiveSession() or getattr(SparkSession, "_instantiatedSession", None)
    return "UTC" if spark is None else session_zone(spark)


def arrow_zone(name: str) -> str:
    """Spark's name of a zone as Arrow knows it: a region, an offset, or UTC.

    >>> arrow_zone("GMT+8"), arrow_zone("-0330"), arrow_zone("Z"), arrow_zone("Europe/Paris")
    ('+08:00', '-03:30', 'UTC', 'Europe/Paris')
    """
    if name in _UTC:
        return "UTC"
    offset = _OFFSET.fullmatch(name)
    if offset is None:
        return name
    sign, hours, minutes = offset.groups()
    return "UTC" if not int(hours) and not int(minutes or 0) else f"{sign}{int(hours):02}:{minutes or '00'}"
