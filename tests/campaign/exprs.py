"""Random expressions of a type over the columns in scope."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

from scalein.dtypes import BOOL, F64, I32, I64, STR, DType
from tests.campaign.kinds import constant_text, type_text, value_of
from tests.campaign.rules import RULES, Rule
from tests.campaign.spec import Node, plain

_USUAL = [I64, I32, I32, F64, STR]


@dataclass(frozen=True, slots=True)
class Known:
    """A column in scope. One that is not exact (a rounded sum, a zero of either sign) is only handed on; one that is
    tame holds numbers of usual size, which sum up alike in any order."""

    name: str
    dtype: DType
    is_exact: bool = True
    is_tame: bool = False

    def node(self) -> Node:
        return plain(f"col({self.name!r})", self.dtype)


@cache
def _rules_for(dtype: DType) -> tuple[list[Rule], list[int]]:
    rules = [rule for rule in RULES if rule.gives(dtype)]
    return rules, [rule.weight for rule in rules]


class Exprs:
    """Makes expressions over some columns."""

    def __init__(self, rng: random.Random, known: Iterable[Known], extreme: bool) -> None:
        self.rng = rng
        self.known = [column for column in known if column.is_exact]
        self.types = [column.dtype for column in self.known]
        self.extreme = extreme

    def some_type(self) -> DType:
        """A type to make an expression of: mostly one that a column has."""
        if self.types and self.rng.random() < 0.8:
            return self.rng.choice(self.types)
        return BOOL if self.rng.random() < 0.5 else self.rng.choice(_USUAL)

    def expr(self, dtype: DType, depth: int) -> Node:
        """An exact expression, at most so many calls deep."""
        if depth <= 0 or self.rng.random() < 0.12:
            return self.leaf(dtype)
        rules, weights = _rules_for(dtype)
        for rule in self.rng.choices(rules, weights, k=3) if rules else ():
            if rule.is_exact and (made := self._applied(rule, dtype, depth)) is not None:
                return made
        return self.leaf(dtype)

    def rounding(self, dtype: DType, depth: int) -> Node | None:
        """A call whose last bit may differ, over exact arguments; None if the type has none."""
        rules = [rule for rule in _rules_for(dtype)[0] if not rule.is_exact]
        return self._applied(self.rng.choice(rules), dtype, depth) if rules else None

    def tame(self, dtype: DType, depth: int) -> Node | None:
        """An expression of numbers of usual size, whose sums hardly round."""
        leaves = [column for column in self.known if column.is_tame and column.dtype == dtype]
        if not leaves:
            return None
        rules = [rule for rule in _rules_for(dtype)[0] if rule.is_tame and rule.is_exact]
        if depth <= 0 or not rules or self.rng.random() < 0.6:
            return self.rng.choice(leaves).node()
        rule = self.rng.choice(rules)
        args: list[DType] = []
        nodes: list[Node] = []
        for take in rule.takes:
            taken = take(self.rng, self.types, dtype, args)
            node = self.tame(dtype, depth - 1) if taken == dtype and dtype != BOOL else self.expr(BOOL, depth - 1)
            if taken is None or node is None:
                return self.rng.choice(leaves).node()
            args.append(taken)
            nodes.append(node)
        return Node(self._text(rule, dtype, args), tuple(nodes), dtype, rule.fn)

    def _applied(self, rule: Rule, dtype: DType, depth: int) -> Node | None:
        args: list[DType] = []
        for take in rule.takes:
            taken = take(self.rng, self.types, dtype, args)
            if taken is None:
                return None
            args.append(taken)
        nodes = [self.expr(arg, depth - 1) for arg in args]
        return Node(self._text(rule, dtype, args), tuple(nodes), dtype, rule.fn)

    def _text(self, rule: Rule, dtype: DType, args: list[DType]) -> str:
        return rule.write if isinstance(rule.write, str) else rule.write(self.rng, dtype, args)

    def leaf(self, dtype: DType) -> Node:
        """A column of the type, or a constant."""
        found = [column for column in self.known if column.dtype == dtype]
        if not found and dtype.is_string:
            found = [column for column in self.known if column.dtype.is_string]
        if found and (dtype.is_nested or self.rng.random() < 0.9):
            return self.rng.choice(found).node()
        if dtype.is_nested:
            return plain(f"lit(None, {type_text(dtype.arrow)})", dtype)  # never met: nested types come from columns
        value = None if self.rng.random() < 0.08 else value_of(self.rng, dtype, self.extreme)
        return plain(constant_text(value, dtype), dtype)
