"""Digests: bytes that are equal where two parts of a plan are, so that plans of any depth compare in one step.

A value is written down with its type, so 1, 1.0 and True differ. Functions are known by identity: a number that no
other function gets.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import lru_cache
from hashlib import blake2b
from weakref import WeakKeyDictionary

import pyarrow as pa

from scalein.dtypes import DType

_numbers: WeakKeyDictionary[object, int] = WeakKeyDictionary()
_next = itertools.count()


def digest_of(kind: str, values: Iterable[object]) -> bytes:
    """The digest of something of this kind that is made of these values."""
    return blake2b(b"\0".join((kind.encode(), *map(_written, values))), digest_size=16).digest()


def _written(value: object) -> bytes:
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return repr(value).encode(errors="surrogatepass")
    if isinstance(value, tuple | list):
        return digest_of(type(value).__name__, value)
    if isinstance(value, DType):
        return _written_type(value)
    known = getattr(value, "digest", None)
    if isinstance(known, bytes):
        return known
    if isinstance(value, pa.Schema):
        return digest_of("schema", [part for field in value for part in (field.name, str(field.type), field.nullable)])
    if isinstance(value, frozenset | set):
        return digest_of("set", sorted(map(_written, value)))
    if isinstance(value, Enum):
        return repr(value).encode()
    if is_dataclass(value) and not isinstance(value, type):
        given = [getattr(value, field.name) for field in fields(value) if field.compare]
        return digest_of(type(value).__qualname__, given)
    if callable(value):
        return f"{type(value).__qualname__} {_number(value)}".encode()
    return f"{type(value).__qualname__} {value!r}".encode(errors="surrogatepass")


@lru_cache(maxsize=256)
def _written_type(dtype: DType) -> bytes:
    return digest_of("DType", [str(getattr(dtype, field.name)) for field in fields(dtype)])


def _number(function: object) -> int:
    try:
        return _numbers.setdefault(function, next(_next))
    except TypeError:  # it cannot be referred to weakly, or has no hash
        return -id(function)
