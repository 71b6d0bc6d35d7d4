"""Accumulators whose update and merge are expressions over slots: those of `@si.udaf`, and any aggregate that is not
worth machine code of its own.

    geometric mean:  slots logs = 0.0, n = 0
                     update(x)    logs, n = logs + log(x), n + 1
                     merge(other) logs, n = logs + other.logs, n + other.n
                     finish       exp(logs / n)

From the slots come the fields of records, the slices of rings and the columns of partial groups (`ir/partials.py`); the
machine code is in `llvm_backend/expr_accumulators.py`. A slot with its first value is neutral: merging it changes
nothing. Slots have plain types; one that may be null says so.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

from scalein.dtypes import DType, Kind
from scalein.ir.exprs import Col, Expr, Named
from scalein.ir.internal_names import internal

if TYPE_CHECKING:  # most flows have none
    from scalein.ir.udf import Method


@dataclass(frozen=True, slots=True)
class Slot:
    """A value that a group remembers."""

    name: str
    dtype: DType
    init: object  # before the first row; None for null
    nullable: bool = False
    ring: DType | None = None  # of the values of a ring: their number and the values, in words of 8 bytes

    @property
    def size(self) -> int:
        """The values that a ring holds."""
        return self.dtype.width // 8 - 1

    @property
    def own(self) -> Col:
        """It, in an expression."""
        return Col(internal(f"self.{self.name}"), self.dtype, self.nullable)

    @property
    def other(self) -> Col:
        """That of the group to merge."""
        return Col(internal(f"other.{self.name}"), self.dtype, self.nullable)

    @property
    def init_bytes(self) -> bytes:
        """What a new record has of it."""
        if self.ring is not None:
            return b""
        if self.dtype.is_bytes:  # in place, as text of up to 12 bytes is
            text = str(self.init or "").encode()
            return len(text).to_bytes(4, "little") + text.ljust(12, b"\0")
        init = self.init or 0
        assert isinstance(init, int | float)
        if self.dtype.is_float:
            return struct.pack("<f" if self.dtype.bits == 32 else "<d", init)
        size = 1 if self.dtype.kind is Kind.BOOL else self.dtype.bits // 8
        return int(init).to_bytes(size, "little", signed=self.dtype.is_signed)


def argument(number: int, dtype: DType, nullable: bool = False) -> Col:
    """What a row brings, in the expressions of an update."""
    return Col(internal(f"x{number}"), dtype, nullable)


@dataclass(frozen=True, slots=True)
class Assign:
    """New values of slots, which are all computed before the first is stored."""

    values: tuple[Named, ...]


@dataclass(frozen=True, slots=True)
class ExprAcc:
    """What an EXPR accumulator does. A row with a null among the `strict` arguments does not count."""

    name: str  # of the aggregate, for errors
    slots: tuple[Slot, ...]
    strict: tuple[bool, ...]  # by argument
    update: Assign | Method
    merge: Assign | Method
    finish: Expr  # over the slots

    @property
    def parts(self) -> tuple[tuple[str, Slot], ...]:
        """Its slots, by the names of their columns in partial groups."""
        return tuple((f"s{number}", slot) for number, slot in enumerate(self.slots))
