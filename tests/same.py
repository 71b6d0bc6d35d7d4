"""`assert_same`: two tables hold the same rows, by scalein's meaning of same."""

from __future__ import annotations

from scalein.testing import assert_same

__all__ = ["assert_same"]
