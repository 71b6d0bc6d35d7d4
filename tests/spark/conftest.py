"""One Spark session for each test process: it takes some seconds to start, and all tests can share it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("pyspark", reason="Spark's tests need pyspark: pip install 'scalein[spark]'")

from scalein.spark.errors import SparkFailed
from scalein.spark.session import java_version, session
from tests.spark.cluster import SHORT_LIVED


@pytest.fixture(scope="session")
def spark() -> Iterator[Any]:
    """local[2], four shuffle partitions, times in UTC."""
    try:
        java_version()
    except SparkFailed as error:
        pytest.skip(error.what)
    started = session(cores=2, config={"spark.sql.shuffle.partitions": 4, "spark.driver.extraJavaOptions": SHORT_LIVED})
    yield started
    started.stop()
