"""digest: what a plan computes, as bytes. Plans are cached by it, and bound to their data when they run."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from functools import cache
from hashlib import blake2b
from typing import Any

import pyarrow as pa

from scalein.ir.ops import Op

_PLAIN = (str, int, float, bytes, Decimal, date, datetime, time, timedelta)


def digest(root: Op) -> bytes | None:
    """Equal for plans that differ only in data and in where they were written; None for one that holds a Python
    function, which cannot be told from another by its value.

    Ops and expressions are told by what takes part in their equality, and one that is met again by its number: so
    inputs that are shared are told from inputs that are only equal.
    """
    parts: list[str] = []
    numbers: dict[int, int] = {}
    waiting: list[object] = [root]
    while waiting:
        value = waiting.pop()
        if value is None or isinstance(value, _PLAIN):
            parts.append(f"{type(value).__name__} {value!r}")
        elif isinstance(value, tuple):
            parts.append(f"tuple {len(value)}")
            waiting += reversed(value)
        elif id(value) in numbers:
            parts.append(f"again {numbers[id(value)]}")
        elif isinstance(value, Enum):
            parts.append(str(value))
        elif is_dataclass(value) and not isinstance(value, type):
            numbers[id(value)] = len(numbers)
            parts.append(type(value).__name__)
            waiting += [getattr(value, name) for name in _compared(type(value))]
        elif isinstance(value, pa.Schema):
            parts.append(f"schema {len(value)}")
            parts += [f"{field.name!r} {field.type} {field.nullable}" for field in value]
        elif isinstance(value, pa.DataType):
            parts.append(f"type {value}")
        else:
            return None
    return blake2b("\n".join(parts).encode("utf-8", "surrogatepass"), digest_size=20).digest()


@cache
def _compared(kind: Any) -> tuple[str, ...]:
    """The fields that take part in equality, from the last to the first."""
    return tuple(field.name for field in reversed(fields(kind)) if field.compare)
