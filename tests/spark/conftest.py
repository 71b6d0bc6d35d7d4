"""Spark's tests are skipped where pyspark is not installed. They share the session of `tests/conftest.py`."""

from __future__ import annotations

import pytest

pytest.importorskip("pyspark", reason="Spark's tests need pyspark: pip install 'scalein[spark]'")
