"""Where rows come from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol, Self, runtime_checkable

import pyarrow as pa

from scalein.dtypes import Schema
from scalein.errors import NOWHERE, SourceLoc
from scalein.ir.ops.base import Op
from scalein.ir.ops.predicates import width
from scalein.ir.physical import Node, Scan

if TYPE_CHECKING:
    from scalein.ir.passes.physicalize import Planner


@runtime_checkable
class Lenient(Protocol):
    """Data whose handling of malformed records can be chosen."""

    def lenient(self, way: str) -> Self: ...


@dataclass(frozen=True, eq=False, repr=False)
class Source(Op):
    """Batches of a given Arrow schema; `data` is None for an unbound input (`si.flow(schema)`).

    `data` is a zero-argument callable giving an iterator of record batches, or a pa.Table. It takes
    no part in equality: a plan is compiled for a schema. `columns` is what the plan reads, in order
    (pruning narrows it).
    """

    name: str
    arrow: pa.Schema
    columns: tuple[str, ...]
    data: object = field(default=None, compare=False)
    at: SourceLoc = field(default=NOWHERE, compare=False)

    inputs = ()

    def _columns(self) -> Schema:
        return Schema.from_arrow(pa.schema([self.arrow.field(name) for name in self.columns]))

    def with_inputs(self, inputs: tuple[Op, ...]) -> Self:
        return self

    def null_on_error(self) -> Source:
        """The source with null where a field cannot be decoded."""
        return replace(self, data=self.data.lenient("null")) if isinstance(self.data, Lenient) else self

    def _detail(self) -> str:
        return self.name

    def wrong(self) -> Iterator[str]:
        known = set(self.arrow.names)
        return (f"no column {name!r} in its data" for name in self.columns if name not in known)

    def reads(self, needed: set[str]) -> tuple[set[str], ...]:
        return ()

    def narrow(self, needed: set[str]) -> Source:
        columns = tuple(name for name in self.columns if name in needed)
        return self if columns == self.columns else replace(self, columns=columns)

    def cheapest(self) -> set[str]:
        return {min(self.schema.fields, key=width).name}

    def physical(self, p: Planner) -> Node:
        return Scan(self)
