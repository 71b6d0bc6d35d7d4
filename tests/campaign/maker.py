"""A flow in the making: what is known of its columns, and the steps so far."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import replace

import scalein as si
from scalein.api.flow import Flow
from scalein.dtypes import Schema
from scalein.errors import InternalError, ScaleinError
from tests.campaign import data
from tests.campaign.exprs import Exprs, Known
from tests.campaign.kinds import dtype_of
from tests.campaign.spec import FlowSpec, Item, Part, Step, build, plain

_DEPTHS = [0, 1, 1, 1, 2, 2, 2, 3, 4]


def step(verb: str, *items: Item, fixed: int = 0) -> Step:
    return Step((Part(verb, items, fixed),))


def name(text: str) -> Item:
    return Item("", plain(repr(text)))


class Maker:
    """Makes one flow, step by step; `known` are the columns behind the last step."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.extreme = rng.random() < 0.12
        self.tables = [data.table(rng, "t", self.extreme)]
        self.known = [Known(c.name, dtype_of(c.type), True, data.is_tame(dtype_of(c.type), c.values))
                      for c in self.tables[0].columns]
        self.steps: list[Step] = []
        self.ordered, self.loose = True, False
        self.names = 0
        self.joins = 0
        self.refused: list[str] = []

    @property
    def exprs(self) -> Exprs:
        return Exprs(self.rng, self.known, self.extreme)

    @property
    def depth(self) -> int:
        return self.rng.choice(_DEPTHS)

    def new_name(self) -> str:
        self.names += 1
        return f"n{self.names}"

    def spec(self) -> FlowSpec:
        return FlowSpec(tuple(self.tables), tuple(self.steps), self.ordered, self.loose)

    def make(self, kinds: Iterable[MakeStep]) -> FlowSpec:
        """A flow of steps of these kinds; what has no place in it is left out."""
        flow = si.from_arrow(self.tables[0].table())
        for kind in kinds:
            before = (list(self.tables), self.known, self.ordered, self.loose, self.joins)
            made = kind(self)
            if made is None:
                continue
            step, known = made
            try:
                names = {"t": None, **FlowSpec(tuple(self.tables[1:]), (), True, False).names()}
                flow = build((step,), flow, names)
            except InternalError:
                raise
            except ScaleinError as error:
                self.refused.append(f"{step.text()}: {error}")
                self.tables, self.known, self.ordered, self.loose, self.joins = before
                continue
            self.steps.append(step)
            self.known = self._settled(known, flow)
        return self.spec()

    def _settled(self, known: list[Known], flow: Flow) -> list[Known]:
        """The columns with the types that they really have, in order."""
        by_name = {column.name: column for column in known}
        fields = Schema.from_arrow(flow.schema)
        return [replace(by_name.get(f.name, Known(f.name, f.dtype)), dtype=f.dtype) for f in fields]

    # --- expressions with their flags

    def new(self, name: str, depth: int) -> tuple[Item, Known]:
        """A new column."""
        exprs = self.exprs
        dtype = exprs.some_type()
        rounding = exprs.rounding(dtype, depth) if self.rng.random() < 0.12 else None
        self.loose = self.loose or rounding is not None
        node = rounding or exprs.expr(dtype, depth)
        return Item(f"{name}=", node), Known(name, dtype, rounding is None)


Made = tuple[Step, list[Known]]  # a step, and the columns behind it
MakeStep = Callable[[Maker], Made | None]
