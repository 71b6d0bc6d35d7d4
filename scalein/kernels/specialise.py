"""Specialise a stage to the input facts: which columns have nulls, how strings are stored.

No null handling is compiled for columns without nulls. An expression over one dictionary column is computed once for
each dictionary value and looked up by code; a dictionary key is grouped by its id in the run's own dictionary. Names
that begin with `#` are internal and pass every `ProjectStep`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from scalein.dtypes import I32, DType
from scalein.ir.exprs import Call, Col, Expr, Lit, Named, columns, type_of
from scalein.ir.functions.registry import can_fail, is_strict, nullable
from scalein.ir.stages import DedupStep, FilterStep, Probe, ProjectStep, Read, Step


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
                hidden = {n: v for n, v in self.nullable.items() if n.startswith("#")}
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
        if len(probe.keys) > 1 or not isinstance(key, Col) or key.name not in self.coded:
            return replace(probe, keys=tuple(self.expr(k) for k in probe.keys))
        via = self.coded[key.name]
        name = f"#match.{probe.table}.{via}"
        matches = Call("#match", (Col(via),), (probe.table,))
        read = self._lookup(matches, name, I32, via, self.nullable.get(key.name, True))
        return replace(probe, keys=(Col(name, I32, read.nulls),), by_code=True)

    def _lookup(self, expr: Expr, name: str, dtype: DType, via: str, nulls: bool) -> Read:
        """The lookup table of an expression over a dictionary column, declared at its first use."""
        if expr not in self.lookups:
            self.lookups[expr] = Read(name, dtype, "lut", nulls, via=via, code_bits=self.code_bits[via])
        return self.lookups[expr]

    def expr(self, expr: Expr) -> Expr:
        if isinstance(expr, Lit):
            return expr
        if isinstance(expr, Col):
            return replace(expr, nullable=expr.nullable and self.nullable.get(expr.name, True))
        found = self._looked_up(expr)
        if found is not None:
            return found
        args = tuple(self._tried(arg) if expr.fn == "try" else self.expr(arg) for arg in expr.args)
        return replace(expr, args=args, nullable=expr.nullable and nullable(expr, args))

    def _tried(self, expr: Expr) -> Expr:
        """A call under `try`, which must stay a call: only its arguments may be looked up."""
        assert isinstance(expr, Call)
        args = tuple(map(self.expr, expr.args))
        return replace(expr, args=args, nullable=expr.nullable and nullable(expr, args))

    def _looked_up(self, expr: Call) -> Expr | None:
        names = columns(expr)
        if len(names) != 1 or type_of(expr).is_bytes or can_fail(expr) or not _is_strict(expr):
            return None
        name = next(iter(names))
        if name not in self.coded:
            return None
        nulls = self.nullable.get(name, True)
        key = _renamed(expr, name, self.coded[name])
        read = self._lookup(key, f"#lookup{len(self.lookups)}", type_of(expr), self.coded[name], nulls)
        return Col(read.name, read.dtype, read.nulls)

    def key(self, expr: Expr) -> Expr:
        """A group key: a dictionary column is grouped by id."""
        if isinstance(expr, Col) and expr.name in self.coded:
            via = self.coded[expr.name]
            nulls = expr.nullable and self.nullable.get(expr.name, True)
            self._lookup(Col(via), f"#ids.{via}", I32, via, nulls)
            return Col(f"#ids.{via}", I32, nulls)
        if isinstance(expr, Col) and expr.name in self.joined:
            return Col(self.joined[expr.name], I32, expr.nullable and self.nullable.get(expr.name, True))
        return self.expr(expr)


def code_name(join: int, column: str) -> str:
    """The name under which a probe gives the dictionary code of a string column."""
    return f"#code.{join}.{column}"


def _is_strict(expr: Expr) -> bool:
    """Whether an expression over one column is null exactly where the column is: a lookup table has no entry for null.
    """
    match expr:
        case Col():
            return True
        case Lit():
            return expr.value is not None
        case Call("and" | "or", args):  # each side must depend on the column, else a constant could decide
            return all(columns(arg) and _is_strict(arg) for arg in args)
        case Call(_, args):
            return is_strict(expr) and all(map(_is_strict, args))
    return False


def _renamed(expr: Expr, old: str, new: str) -> Expr:
    match expr:
        case Col():
            return replace(expr, name=new)
        case Call():
            return replace(expr, args=tuple(_renamed(arg, old, new) for arg in expr.args))
        case _:
            return expr


def needed(steps: Sequence[Step], exprs: Iterable[Expr]) -> set[str]:
    """Columns of a stage's input that its kernel reads."""
    names = set().union(*map(columns, exprs))
    for step in reversed(steps):
        match step:
            case FilterStep(predicate):
                names |= columns(predicate)
            case ProjectStep(items):
                given = {i.name: i.expr for i in items}
                hidden = {n for n in names if n.startswith("#") and n not in given}
                names = hidden.union(*(columns(given[n]) for n in names if n in given))
            case Probe():
                names -= {name for name, _ in (*step.keep, *step.codes)}
                names = names.union(*map(columns, step.keys))
            case DedupStep():
                names = names.union(*map(columns, step.keys))
    return names
