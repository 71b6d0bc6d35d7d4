"""Specialise a stage to the input facts: which columns have nulls, how strings are stored.

No null handling is compiled for columns without nulls. An expression over one dictionary column is computed once for
each dictionary value and looked up by code; a dictionary key is grouped by its id in the run's own dictionary. Names
of internal columns pass every `ProjectStep`.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field, replace

from scalein.dtypes import I32, DType
from scalein.ir.exprs import Call, Col, Expr, Lit, Named, columns, post_order, type_of
from scalein.ir.functions.registry import can_fail, fallible, is_strict, nullable
from scalein.ir.internal_names import internal, is_internal
from scalein.ir.rewrite import rewrite_expr
from scalein.ir.stages import DedupStep, FilterStep, Probe, ProjectStep, Read, Step

IDS = internal("ids.")  # of a dictionary column's values, before its name
CODE = internal("code.")  # of a joined dictionary column, before its join's number and its name


@dataclass(slots=True)
class Specialiser:
    """Rewrites the expressions of a stage, step by step, from its input on."""

    nullable: dict[str, bool]  # by visible name
    coded: dict[str, str]  # visible name -> dictionary column of the input
    code_bits: dict[str, int]  # of the input's dictionary columns
    is_coded: Callable[[int, str], bool]  # whether a join's column is dictionary-encoded
    lookups: dict[Expr, Read] = field(default_factory=dict)  # expression over a dictionary column -> its table
    joined: dict[str, str] = field(default_factory=dict)  # visible name -> name of its join's codes
    failing: set[str] = field(default_factory=set)  # visible names of columns that are computed, and may fail

    def may_fail(self, expr: Expr) -> bool:
        """Whether computing it can fail, with the columns it is computed from."""
        return can_fail(expr) or bool(columns(expr) & self.failing)

    def step(self, step: Step, keep_nulls: Callable[[Probe], dict[str, bool]]) -> Step:
        """A step over specialised expressions; afterwards, names are those of the step's output."""
        match step:
            case FilterStep(predicate):
                return FilterStep(self.expr(predicate))
            case ProjectStep(items):
                new = tuple(Named(i.name, self.expr(i.expr)) for i in items)
                self.failing = {i.name for i in items if self.may_fail(i.expr)}
                hidden = {n: v for n, v in self.nullable.items() if is_internal(n)}
                self.coded = {i.name: self.coded[i.expr.name] for i in items
                              if isinstance(i.expr, Col) and i.expr.name in self.coded}
                self.joined = {i.name: self.joined[i.expr.name] for i in items
                               if isinstance(i.expr, Col) and i.expr.name in self.joined}
                self.nullable = {**hidden, **{i.name: i.expr.nullable for i in new}}
                return ProjectStep(new)
            case Probe():
                probe = self._probe(step)
                nulls = keep_nulls(step)
                for name, column in step.keep:
                    self.nullable[name] = nulls[name]
                    self.failing.discard(name)
                    self.coded.pop(name, None)
                    self.joined.pop(name, None)
                    if self.is_coded(step.table, column):
                        self.joined[name] = code_name(step.table, column)
                return probe
            case DedupStep():
                return replace(step, keys=tuple(self.key(key) for key in step.keys))

    def _probe(self, probe: Probe) -> Probe:
        """Matches of a dictionary column are looked up once for each of its values."""
        key = probe.keys[0]
        if probe.times is not None:
            times = replace(probe.times, low_of=self.expr(probe.times.low_of), high_of=self.expr(probe.times.high_of))
            probe = replace(probe, times=times)
        if len(probe.keys) > 1 or not isinstance(key, Col) or key.name not in self.coded:
            return replace(probe, keys=tuple(self.expr(k) for k in probe.keys))
        via = self.coded[key.name]
        name = internal(f"match.{probe.table}.{via}")
        matches = Call("#match", (Col(via),), (probe.table,))
        read = self._lookup(matches, name, I32, via, self.nullable.get(key.name, True))
        return replace(probe, keys=(Col(name, I32, read.nulls),), by_code=True)

    def _lookup(self, expr: Expr, name: str, dtype: DType, via: str, nulls: bool) -> Read:
        """The lookup table of an expression over a dictionary column, declared at its first use."""
        if expr not in self.lookups:
            self.lookups[expr] = Read(name, dtype, "lut", nulls, via=via, code_bits=self.code_bits[via])
        return self.lookups[expr]

    def expr(self, expr: Expr) -> Expr:
        """The expression over specialised columns; the largest parts of it that a table can give are looked up."""
        tables = _Tables(expr, self.coded)
        made: dict[tuple[int, bool], Expr] = {}  # by identity, and whether it must stay a call
        waiting: list[tuple[Expr, bool, bool]] = [(expr, False, False)]  # and whether its arguments are done
        while waiting:
            node, must_stay, is_over = waiting.pop()
            place = id(node), must_stay
            if isinstance(node, Call) and is_over:
                args = tuple(made[id(arg), node.fn == "try"] for arg in node.args)
                made[place] = replace(node, args=args, nullable=node.nullable and nullable(node, args))
            elif place not in made:
                found = self._leaf(node, None if must_stay else tables.column_of(node))
                if found is not None:
                    made[place] = found
                elif isinstance(node, Call):
                    waiting.append((node, must_stay, True))
                    # What is only tried must stay a call: only its arguments may be looked up.
                    waiting += [(arg, node.fn == "try", False) for arg in reversed(node.args)]
        return made[id(expr), False]

    def _leaf(self, node: Expr, coded: str | None) -> Expr | None:
        """What takes the place of a column, a constant, or an expression over the dictionary column `coded`."""
        if isinstance(node, Lit):
            return node
        if isinstance(node, Col):
            return replace(node, nullable=node.nullable and self.nullable.get(node.name, True))
        if coded is None:
            return None
        via, nulls = self.coded[coded], self.nullable.get(coded, True)
        name = internal(f"lookup{len(self.lookups)}")
        read = self._lookup(_renamed(node, coded, via), name, type_of(node), via, nulls)
        return Col(read.name, read.dtype, read.nulls)

    def key(self, expr: Expr) -> Expr:
        """A group key: a dictionary column is grouped by id."""
        if isinstance(expr, Col) and expr.name in self.coded:
            via = self.coded[expr.name]
            nulls = expr.nullable and self.nullable.get(expr.name, True)
            self._lookup(Col(via), f"{IDS}{via}", I32, via, nulls)
            return Col(f"{IDS}{via}", I32, nulls)
        if isinstance(expr, Col) and expr.name in self.joined:
            return Col(self.joined[expr.name], I32, expr.nullable and self.nullable.get(expr.name, True))
        return self.expr(expr)


def code_name(join: int, column: str) -> str:
    """The name under which a probe gives the dictionary code of a string column."""
    return f"{CODE}{join}.{column}"


class _Tables:
    """Which subexpressions can be looked up by the code of a dictionary column: those that read that column alone,
    cannot fail, and are null exactly where it is, as a lookup table has no entry for null.
    """

    def __init__(self, expr: Expr, coded: Container[str]) -> None:
        # By identity: the column that it reads, "" if there is none, None if it cannot be looked up.
        self._only: dict[int, str | None] = {}
        if any(name in coded for name in columns(expr)):
            for node in post_order(expr):
                self._only[id(node)] = self._column(node, coded)

    def column_of(self, node: Expr) -> str | None:
        """The dictionary column by whose codes a call can be looked up."""
        if not isinstance(node, Call) or type_of(node).is_bytes:
            return None
        return self._only.get(id(node)) or None

    def _column(self, node: Expr, coded: Container[str]) -> str | None:
        match node:
            case Col(name):
                return name if name in coded else None
            case Lit(value):
                return None if value is None else ""
            case Call(fn, args):
                names = {self._only[id(arg)] for arg in args}
                # Each side of `and` must depend on the column, else a constant could decide.
                is_strict_here = "" not in names if fn in ("and", "or") else is_strict(node)
                if None in names or not is_strict_here or fallible(node):
                    return None
                names.discard("")
                return next(iter(names), "") if len(names) < 2 else None


def _renamed(expr: Expr, old: str, new: str) -> Expr:
    if old == new:
        return expr
    return rewrite_expr(expr, lambda e: replace(e, name=new) if isinstance(e, Col) and e.name == old else None)


def needed(steps: Sequence[Step], exprs: Iterable[Expr]) -> set[str]:
    """Columns of a stage's input that its kernel reads."""
    names = set().union(*map(columns, exprs))
    for step in reversed(steps):
        match step:
            case FilterStep(predicate):
                names |= columns(predicate)
            case ProjectStep(items):
                given = {i.name: i.expr for i in items}
                hidden = {n for n in names if is_internal(n) and n not in given}
                names = hidden.union(*(columns(given[n]) for n in names if n in given))
            case Probe():
                names -= {name for name, _ in (*step.keep, *step.codes)}
                names = names.union(*map(columns, step.exprs))
            case DedupStep():
                names = names.union(*map(columns, step.keys))
    return names
