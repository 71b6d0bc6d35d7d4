"""In which order relations are joined, and which side of each join is the table: pure functions of plain numbers.

A `Graph` says how many rows each relation has, which of its columns are equal to columns of others, and how many
distinct values these have. `cheapest` finds the tree of joins that costs least: by dynamic programming over all
connected subsets for up to `EXACT` relations, and by joining the cheapest pair again and again for more. The right side
of a pair is the table, which is read whole and indexed; the rows of the left side probe it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import TypeAlias

EXACT = 8  # relations for which all orders are compared

# What a row costs, in units of a probe: indexing it in a table, and handing it on after a join.
BUILD = 4.0
OUTPUT = 1.0
UNKNOWN_SHARE = 1 / 3  # of the rows, for a condition on several relations that is no equality

Tree: TypeAlias = "int | tuple[Tree, Tree]"  # a relation's number; the probing side of a join, and its table


@dataclass(frozen=True)
class Graph:
    """Relations to be joined. `equal` are classes of columns that are equal: by relation, their distinct values.

    `others` are further conditions: the relations that each one is about, and the share of rows for which it holds.
    """

    rows: Sequence[float]
    equal: Sequence[Mapping[int, float]]
    others: Sequence[tuple[frozenset[int], float]] = ()

    @cached_property
    def _neighbours(self) -> list[int]:
        """For each relation those that share a class with it, as bits."""
        found = [0] * len(self.rows)
        for members in self.equal:
            bits = sum(1 << k for k in members)
            for k in members:
                found[k] |= bits & ~(1 << k)
        return found

    @cached_property
    def _classes(self) -> list[tuple[int, list[tuple[float, int]]]]:
        """Each class as bits, and its relations by their distinct values, the fewest first."""
        return [(sum(1 << k for k in members), sorted((max(1.0, count), 1 << k) for k, count in members.items()))
                for members in self.equal]

    @cached_property
    def _conditions(self) -> list[tuple[int, float]]:
        return [(sum(1 << k for k in relations), share) for relations, share in self.others]

    @cached_property
    def _by_several(self) -> list[tuple[int, float]]:
        """Pairs of relations that several classes connect, as bits, and by what their join has more rows.

        Two keys together have no more values than there are rows, whereas their classes by themselves would leave
        the share of rows that have the product of their values.
        """
        found = []
        for a in range(len(self.rows)):
            for b in range(a + 1, len(self.rows)):
                shared = [members for members in self.equal if a in members and b in members]
                if len(shared) > 1:
                    together = min(min(prod(max(1.0, members[k]) for members in shared), max(1.0, self.rows[k]))
                                   for k in (a, b))
                    alone = prod(max(1.0, members[a], members[b]) for members in shared)
                    if alone > together:
                        found.append((1 << a | 1 << b, alone / together))
        return found

    def joined_rows(self, relations: int) -> float:
        """How many rows the join of some relations (bits) has; of each class all counts but the least divide."""
        found = prod(rows for k, rows in enumerate(self.rows) if relations >> k & 1)
        for bits, counts in self._classes:
            if bits & relations:
                present = [count for count, bit in counts if bit & relations]
                for count in present[1:]:
                    found /= count
        for bits, share in self._conditions:
            if bits & relations == bits:
                found *= share
        for bits, factor in self._by_several:
            if bits & relations == bits:
                found *= factor
        return max(found, 1.0)

    def are_connected(self, one: int, other: int) -> bool:
        """Whether an equality is between two sets of relations (bits)."""
        return any(self._neighbours[k] & other for k in range(len(self.rows)) if one >> k & 1)


def join_cost(probing: float, table: float, out: float) -> float:
    """What one join costs, by rows."""
    return probing + BUILD * table + OUTPUT * out


def relations_of(tree: Tree) -> int:
    """The relations of a tree, as bits."""
    return 1 << tree if isinstance(tree, int) else relations_of(tree[0]) | relations_of(tree[1])


def cost(tree: Tree, graph: Graph) -> float:
    """What all joins of a tree cost."""
    if isinstance(tree, int):
        return 0.0
    one, other = map(relations_of, tree)
    rows = graph.joined_rows
    return cost(tree[0], graph) + cost(tree[1], graph) + join_cost(rows(one), rows(other), rows(one | other))


def shown(tree: Tree, graph: Graph, names: Sequence[str]) -> str:
    """A tree with the rows that are estimated.

    >>> shown((0, (1, 2)), Graph([5000.0, 10.0, 3.0], [{0: 10.0, 1: 10.0}, {1: 3.0, 2: 3.0}]), ["a", "b", "c"])
    '(a 5,000 JOIN (b 10 JOIN c 3) 10) 5,000'
    """
    inner = names[tree] if isinstance(tree, int) else f"({' JOIN '.join(shown(each, graph, names) for each in tree)})"
    return f"{inner} {graph.joined_rows(relations_of(tree)):,.0f}"


def cheapest(graph: Graph) -> Tree:
    """The tree that costs least. Relations without a condition between them are joined only if there is no other way.

    >>> cheapest(Graph([1000.0, 10.0], [{0: 10.0, 1: 10.0}]))
    (0, 1)
    >>> cheapest(Graph([10.0, 1000.0], [{0: 10.0, 1: 10.0}]))
    (1, 0)
    """
    return _exact(graph) if len(graph.rows) <= EXACT else _greedy(graph)


@dataclass(frozen=True, slots=True)
class _Plan:
    tree: Tree
    rows: float
    cost: float


def _pair(a: _Plan, b: _Plan, rows: float) -> _Plan:
    """The join of two plans, with the side as the table that makes it cheaper; of equal ones the first."""
    below = a.cost + b.cost
    one, other = join_cost(a.rows, b.rows, rows), join_cost(b.rows, a.rows, rows)
    return _Plan((a.tree, b.tree), rows, below + one) if one <= other else _Plan((b.tree, a.tree), rows, below + other)


def _exact(graph: Graph) -> Tree:
    """Dynamic programming: the best plan of each subset is a pair of best plans."""
    best: dict[int, _Plan] = {1 << k: _Plan(k, rows, 0.0) for k, rows in enumerate(graph.rows)}
    whole = (1 << len(graph.rows)) - 1
    for subset in range(1, whole + 1):
        if subset not in best:
            rows = graph.joined_rows(subset)
            pairs = list(_splits(subset))
            connected = [each for each in pairs if graph.are_connected(*each)]
            plans = [_pair(best[one], best[other], rows) for one, other in connected or pairs]
            best[subset] = min(plans, key=lambda plan: plan.cost)
    return best[whole].tree


def _splits(subset: int) -> Iterator[tuple[int, int]]:
    """Every way to cut a set in two; the first part has its least member."""
    least = subset & -subset
    rest = subset ^ least
    part = rest
    while part:
        part = (part - 1) & rest
        yield least | part, rest ^ part


def _greedy(graph: Graph) -> Tree:
    """Again and again the pair whose join has the fewest rows, connected ones first."""
    plans = {1 << k: _Plan(k, rows, 0.0) for k, rows in enumerate(graph.rows)}
    while len(plans) > 1:
        pairs = [(a, b) for a in plans for b in plans if a < b]
        pairs = [each for each in pairs if graph.are_connected(*each)] or pairs
        sizes = {each: graph.joined_rows(each[0] | each[1]) for each in pairs}
        one, other = min(pairs, key=lambda each: (sizes[each], *each))
        plans[one | other] = _pair(plans.pop(one), plans.pop(other), sizes[one, other])
    (found,) = plans.values()
    return found.tree


def as_written(count: int, are_connected: Callable[[int, int], bool]) -> Tree:
    """The order of FROM, except that a relation waits until a condition connects it with one before."""
    found: Tree = 0
    inside, waiting = [0], list(range(1, count))
    while waiting:
        number = next((each for each in waiting if any(are_connected(each, other) for other in inside)), waiting[0])
        found = (found, number)
        inside.append(number)
        waiting.remove(number)
    return found
