"""What names mean at a place of a query: relations with their columns, and the columns of the query around it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from scalein.dtypes import Schema
from scalein.errors import BadName, UnknownColumn, guess
from scalein.ir.exprs import Col, Expr, Named, type_of
from scalein.ir.ops import Op, Project
from scalein.ir.windows import Window
from scalein.sql.parse import Span, Text


@dataclass(frozen=True, slots=True)
class Visible:
    """A column that a query may name: by its name, or with that of its table. The expression is over the relation's op.

    A column that USING has merged into another is only found with the name of its table, and is not in `*`.
    """

    table: str
    name: str
    expr: Expr
    is_merged: bool = False


@dataclass(frozen=True, slots=True)
class EventWindow:
    """The windows in which the rows of a relation are, or are about to be: `start` and `end` are columns of theirs.

    A pending one stands in FROM: its rows are those of the table, and their windows become columns, or what they are
    grouped by. `keys` are those of sessions.
    """

    kind: str
    time: Expr
    window: Window | None
    start: Expr
    end: Expr
    last: Expr
    keys: tuple[Expr, ...] = ()
    is_pending: bool = True


@dataclass(frozen=True, slots=True)
class Relation:
    """Rows, and the names of their columns."""

    op: Op
    columns: tuple[Visible, ...]
    window: EventWindow | None = None
    is_single_row: bool = False  # an aggregation without keys
    tables: tuple[str, ...] = field(default=())

    @staticmethod
    def of(op: Op, table: str) -> Relation:
        """All columns of an op, under one table's name."""
        found = tuple(Visible(table, f.name, Col(f.name, f.dtype, f.nullable)) for f in op.schema)
        return Relation(op, found, tables=(table,))

    def named(self, table: str, names: tuple[str, ...] = ()) -> Relation:
        """The same rows under another name, their first columns as well."""
        columns = [each for each in self.columns if not each.is_merged]
        new = (*names, *(each.name for each in columns[len(names) :]))
        return replace(self, columns=tuple(replace(each, table=table, name=name)
                                           for each, name in zip(columns, new, strict=True)), tables=(table,))

    def over(self, op: Op) -> Relation:
        """The same columns over an op that has them all."""
        return replace(self, op=op)

    def find(self, name: str, table: str = "") -> list[Visible]:
        """The columns that a name may mean; case counts only where names differ in nothing else."""
        lower, place = name.lower(), table.lower()
        found = [each for each in self.columns if each.name.lower() == lower
                 and (each.table.lower() == place if table else not each.is_merged)]
        exact = [each for each in found if each.name == name]
        return exact if exact and len(exact) < len(found) else found

    def structs(self, name: str) -> list[Visible]:
        """The columns with fields that a name before a dot may mean, where it is not that of a table."""
        if any(name.lower() == table.lower() for table in self.tables):
            return []
        return [each for each in self.find(name) if type_of(each.expr).is_nested]


def column(relation: Relation, name: str, table: str, source: Text, span: Span | None, step: str) -> Visible:
    """The one column that a name means."""
    found = relation.find(name, table)
    if len(found) == 1:
        return found[0]
    if found:
        tables = " and ".join(dict.fromkeys(repr(each.table) for each in found))
        raise source.error(BadName, f"{name!r} is a column of {tables}", span,
                           hint=f"write {found[0].table}.{name}" if not table else "give one of them another name")
    raise unknown(relation, name, table, source, span, step)


def unknown(relation: Relation, name: str, table: str, source: Text, span: Span | None, step: str) -> UnknownColumn:
    """The error for a name that means nothing, with the nearest one."""
    tables = {each.table for each in relation.columns if each.table}
    if table and table.lower() not in {each.lower() for each in tables}:
        return source.error(UnknownColumn, f"no table {table!r} in {step}", span, tables=", ".join(sorted(tables)),
                            hint=guess(table, tables))
    names = [each.name for each in relation.columns if not table or each.table.lower() == table.lower()]
    elsewhere = relation.find(name)
    hint = guess(name, names) or (f"{elsewhere[0].table} has it" if elsewhere else None)
    where = f"in {table!r}" if table else f"in {step}"
    return source.error(UnknownColumn, f"no column {name!r} {where}", span,
                        has=shown(relation.columns, table), hint=hint)


def shown(columns: Iterable[Visible], table: str = "") -> str:
    """Columns with their types, for errors."""
    listed = [f"{each.name}: {type_of(each.expr)!r}" for each in columns
              if not each.is_merged and (not table or each.table.lower() == table.lower())]
    return ", ".join(listed[:24]) + (f", and {len(listed) - 24} more" if len(listed) > 24 else "")


def fresh(name: str, taken: Iterable[str]) -> str:
    """A name that is not taken yet, like the one that is wanted."""
    known = set(taken)
    if name not in known:
        return name
    number = 1
    while f"{name}_{number}" in known:
        number += 1
    return f"{name}_{number}"


def apart(left: Schema, right: Relation, at: object) -> Relation:
    """The right side of a join under names that the left one has not, called after their tables."""
    taken = set(left.names)
    names = {}
    owner = {each.expr.name: each.table for each in right.columns if isinstance(each.expr, Col)}
    for name in right.op.schema.names:
        new = name if name not in taken else fresh(f"{owner.get(name) or 'right'}.{name}",
                                                   taken | set(right.op.schema.names))
        taken.add(new)
        names[name] = new
    if all(name == new for name, new in names.items()):
        return right
    fields = {f.name: f for f in right.op.schema}
    items = tuple(Named(new, Col(name, fields[name].dtype, fields[name].nullable)) for name, new in names.items())
    renamed = {name: Col(new, fields[name].dtype, fields[name].nullable) for name, new in names.items()}
    return rebased(right, Project(right.op, items, at=at), renamed)  # type: ignore[arg-type]


def rebased(relation: Relation, op: Op, columns: dict[str, Col]) -> Relation:
    """The relation over an op in which its columns have other names."""
    from scalein.ir.rewrite import substitute

    def moved(expr: Expr) -> Expr:
        return substitute(expr, columns)

    window = relation.window
    if window is not None:
        window = replace(window, time=moved(window.time), start=moved(window.start), end=moved(window.end),
                         last=moved(window.last), keys=tuple(map(moved, window.keys)))
    return replace(relation, op=op, window=window,
                   columns=tuple(replace(each, expr=moved(each.expr)) for each in relation.columns))


def visible_names(relation: Relation) -> Iterator[str]:
    """The names in `*`."""
    return (each.name for each in relation.columns if not each.is_merged)
