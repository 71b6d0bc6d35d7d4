"""A flow as data: trees of Python text, tables of plain values. From it come the flow and a reproducer."""

from __future__ import annotations

import datetime
import decimal
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

import scalein as si
from scalein import col, lit, when
from scalein.api.flow import Flow
from scalein.dtypes import DType
from tests.campaign import udfs
from tests.campaign.kinds import array_of, encoded, type_text

HEAD = """\
import datetime
from decimal import Decimal
from math import inf, nan

import pyarrow as pa
import pyarrow.compute as pc

import scalein as si
from scalein import col, lit, when
from tests.campaign import udfs
"""
NAMES: dict[str, Any] = {
    "datetime": datetime, "Decimal": decimal.Decimal, "inf": math.inf, "nan": math.nan, "pa": pa, "pc": pc, "si": si,
    "col": col, "lit": lit, "when": when, "udfs": udfs,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Node:
    """Python text with holes for the nodes below; `dtype` is what it gives, None if it is no expression of rows."""

    pattern: str
    args: tuple[Node, ...] = ()
    dtype: DType | None = None
    fn: str = ""  # the function or aggregate that it calls

    def text(self) -> str:
        return self.pattern.format(*(arg.text() for arg in self.args))

    def walk(self) -> Iterator[Node]:
        yield self
        for arg in self.args:
            yield from arg.walk()


def plain(text: str, dtype: DType | None = None) -> Node:
    """A node without holes."""
    return Node(text.replace("{", "{{").replace("}", "}}"), (), dtype)


@dataclass(frozen=True, slots=True)
class Item:
    """An argument of a method: `name=` or nothing, and a node."""

    prefix: str
    node: Node

    def text(self) -> str:
        return self.prefix + self.node.text()


@dataclass(frozen=True, slots=True)
class Part:
    """One method call; its first `fixed` arguments belong together and are never dropped."""

    verb: str
    items: tuple[Item, ...]
    fixed: int = 0

    def text(self) -> str:
        return f".{self.verb}({', '.join(item.text() for item in self.items)})"


@dataclass(frozen=True, slots=True)
class Step:
    """What becomes of `flow`: one method call, or two for groups."""

    parts: tuple[Part, ...]

    def text(self) -> str:
        return "flow" + "".join(part.text() for part in self.parts)

    def nodes(self) -> Iterator[Node]:
        for part in self.parts:
            for item in part.items:
                yield from item.node.walk()


@dataclass(frozen=True, slots=True)
class ColumnSpec:
    """Values of a column; its array is a slice that leaves out the first `before` and the last `after` of them."""

    name: str
    type: pa.DataType
    nullable: bool
    values: tuple[Any, ...]
    before: int = 0
    after: int = 0

    def array(self) -> pa.Array:
        return array_of(self.values, self.type).slice(self.before, self.count)

    @property
    def count(self) -> int:
        return len(self.values) - self.before - self.after

    def rows(self, places: Sequence[int]) -> ColumnSpec:
        """The column with these of its rows, without what is sliced off."""
        return replace(self, values=tuple(self.values[self.before + i] for i in places), before=0, after=0)

    def text(self) -> str:
        values = f"[{', '.join(map(repr, self.values))}]"
        if pa.types.is_dictionary(self.type):
            codes, words = encoded(self.values)
            made = (f"pa.DictionaryArray.from_arrays(pa.array({codes}, {type_text(self.type.index_type)}), "
                    f"pa.array({words!r}, {type_text(self.type.value_type)}))")
        else:
            made = f"pa.array({values}, {type_text(self.type)})"
        return made if not self.before and not self.after else f"{made}.slice({self.before}, {self.count})"


@dataclass(frozen=True, slots=True)
class TableSpec:
    """A table in chunks that end at `cuts`."""

    name: str
    columns: tuple[ColumnSpec, ...]
    cuts: tuple[int, ...] = ()

    @property
    def count(self) -> int:
        return self.columns[0].count

    @property
    def schema(self) -> pa.Schema:
        return pa.schema([pa.field(c.name, c.type, c.nullable) for c in self.columns])

    def table(self) -> pa.Table:
        batch = pa.RecordBatch.from_arrays([c.array() for c in self.columns], schema=self.schema)
        ends = [cut for cut in self.cuts if cut <= self.count]
        parts = [batch.slice(a, b - a) for a, b in zip([0, *ends], [*ends, self.count], strict=True)]
        return pa.Table.from_batches(parts, self.schema)

    def rows(self, places: Sequence[int]) -> TableSpec:
        """The table with these of its rows, in one chunk."""
        return replace(self, columns=tuple(c.rows(places) for c in self.columns), cuts=())

    def text(self) -> str:
        fields = ", ".join(f"pa.field({c.name!r}, {type_text(c.type)}{'' if c.nullable else ', nullable=False'})"
                           for c in self.columns)
        arrays = "".join(f"    {c.text()},\n" for c in self.columns)
        made = f"{self.name} = pa.Table.from_arrays([\n{arrays}], schema=pa.schema([{fields}]))\n"
        if self.cuts:
            ends = [0, *(cut for cut in self.cuts if cut <= self.count), self.count]
            slices = ", ".join(f"{self.name}.slice({a}, {b - a})" for a, b in pairwise(ends))
            made += f"{self.name} = pa.concat_tables([{slices}])\n"
        return made


@dataclass(frozen=True, slots=True)
class FlowSpec:
    """Tables, of which the first is the source, and the steps that follow it.

    `ordered`: rows come out in the source's order. `loose`: floats are equal up to the rounding of a sum.
    """

    tables: tuple[TableSpec, ...]
    steps: tuple[Step, ...]
    ordered: bool
    loose: bool

    @property
    def may_skip_errors(self) -> bool:
        """Whether rows may stay uncomputed, and then cannot fail: behind a limit, and in counts of what is never null,
        which is known of a table but not of a reader."""
        has_limit = any(part.verb in ("limit", "top_k", "bottom_k") for step in self.steps for part in step.parts)
        return has_limit or any(n.fn == "count_valid" and n.args[0].args for step in self.steps for n in step.nodes())

    @property
    def reads_twice(self) -> bool:
        """Whether a step uses the flow as its argument, so that the source is read more than once."""
        return any("flow" in item.node.text() for step in self.steps for part in step.parts for item in part.items)

    def names(self) -> dict[str, Any]:
        """What the text of the steps refers to, but for `flow`."""
        return {**NAMES, **{table.name: table.table() for table in self.tables}}

    def text(self) -> str:
        return "".join(f"flow = {step.text()}\n" for step in self.steps)


def build(steps: tuple[Step, ...], flow: Flow, names: Mapping[str, Any]) -> Flow:
    """The flow that the steps make of one."""
    space = dict(names)
    for step in steps:
        space["flow"] = flow
        flow = eval(step.text(), space)
    return flow


def reproducer(spec: FlowSpec, ways: str, problem: str) -> str:
    """A program that shows what is wrong."""
    tables = "".join(table.text() for table in spec.tables)
    told = "".join(f"# {line}\n" for line in problem.splitlines())
    return f"{HEAD}\n{tables}\nflow = si.from_arrow({spec.tables[0].name})\n{spec.text()}{ways}{told}"
