"""Joins of two relations: their ops, and where their columns are afterwards."""

from __future__ import annotations

from dataclasses import replace

from scalein.api.arguments import same_type
from scalein.dtypes import BOOL, I32, Kind
from scalein.errors import SourceLoc
from scalein.ir.exprs import Call, Col, Expr, Lit, Named, type_of
from scalein.ir.functions.registry import REGISTRY
from scalein.ir.internal_names import internal
from scalein.ir.ops import Distinct, Filter, Join, Op, OuterJoin, Project, Union
from scalein.sql.scope import Relation, Visible, fresh, rebased

Pair = tuple[Expr, Expr]


def equi_join(left: Relation, right: Relation, pairs: list[Pair], how: str, at: SourceLoc,
              keeps_keys: bool = False) -> Relation:
    """The join of relations whose columns have different names, by keys that are equal; `pairs` are typed alike.

    `how` is inner, left, full, semi, anti, or cross. The columns of both sides are all there afterwards. Keys of an
    inner join are equal, so the left ones stand for both, unless the right ones are to be kept apart.
    """
    if how == "full":
        return _full(left, right, pairs, at)
    if how == "cross" or not pairs:
        if how in ("semi", "anti", "left"):
            left, right, pairs = _by_constant(left, right, at)
        else:
            op: Op = Join(left.op, right.op, (), (), "cross", _all_of(right), at=at)
            return _both(left, right, op, {})
    if how in ("semi", "anti"):
        sides = tuple(a for a, _ in pairs), tuple(b for _, b in pairs)
        return left.over(Join(left.op, right.op, *sides, how, (), at=at))
    same = {b.name: a for a, b in pairs if isinstance(a, Col) and isinstance(b, Col)} if (
        how == "inner" and not keeps_keys) else {}
    keys = {b.name for _, b in pairs if isinstance(b, Col)}
    right_op, pairs = _with_copies(right.op, pairs, keys - same.keys(), at)
    keep = tuple((name, name) for name in right.op.schema.names if name not in same)
    op = Join(left.op, right_op, tuple(a for a, _ in pairs), tuple(b for _, b in pairs), how, keep, at=at)
    return _both(left, right, op, same)


def _by_constant(left: Relation, right: Relation, at: SourceLoc) -> tuple[Relation, Relation, list[Pair]]:
    """Both sides with a key that is the same in all rows."""
    keys, ops, taken = [], [], {*left.op.schema.names, *right.op.schema.names}
    for each in (left, right):
        name = fresh(internal("all"), taken)
        taken.add(name)
        ops.append(Project(each.op, (*_columns(each.op), Named(name, _constant())), at=at))
        keys.append(Col(name, I32, False))
    return left.over(ops[0]), right.over(ops[1]), [(keys[0], keys[1])]


def _constant() -> Expr:
    return Lit(0, I32)


def _all_of(right: Relation) -> tuple[tuple[str, str], ...]:
    return tuple((name, name) for name in right.op.schema.names)


def _columns(op: Op) -> list[Named]:
    return [Named(f.name, Col(f.name, f.dtype, f.nullable)) for f in op.schema]


def _with_copies(op: Op, pairs: list[Pair], wanted: set[str], at: SourceLoc) -> tuple[Op, list[Pair]]:
    """The right side with copies of key columns that come out: the keys of a join do not."""
    if not wanted:
        return op, pairs
    taken = set(op.schema.names)
    copies: dict[str, Col] = {}
    for _, key in pairs:
        if isinstance(key, Col) and key.name in wanted and key.name not in copies:
            name = fresh(internal(f"key.{key.name}"), taken)
            taken.add(name)
            copies[key.name] = Col(name, key.dtype, key.nullable)
    items = [*_columns(op), *(Named(copy.name, Col(name, copy.dtype, copy.nullable)) for name, copy in copies.items())]
    return Project(op, tuple(items), at=at), [(a, copies.get(b.name, b) if isinstance(b, Col) else b) for a, b in pairs]


def _both(left: Relation, right: Relation, op: Op, same: dict[str, Col]) -> Relation:
    """The columns of both sides over the op of their join; of `same` ones the left side has the values."""
    fields = {f.name: f for f in op.schema}

    def there(each: Visible) -> Visible:
        assert isinstance(each.expr, Col)
        name = each.expr.name
        return replace(each, expr=Col(name, fields[name].dtype, fields[name].nullable))

    moved = rebased(right, right.op, same) if same else right
    columns = (*map(there, left.columns), *map(there, moved.columns))
    window = left.window or (right.window and moved.window)
    return Relation(op, columns, window, left.is_single_row and right.is_single_row, (*left.tables, *right.tables))


def _full(left: Relation, right: Relation, pairs: list[Pair], at: SourceLoc) -> Relation:
    """A full join by copies of the keys: those of the join hold the keys of either side, and the columns stay."""
    taken = set(left.op.schema.names) | set(right.op.schema.names)
    ops, keys = [], []
    if not pairs:
        pairs = [(_constant(), _constant())]
    for side, relation in enumerate((left, right)):
        items, found = _columns(relation.op), []
        for number, pair in enumerate(pairs):
            expr = pair[side]
            name = fresh(internal(f"key{number}.{side}"), taken)
            taken.add(name)
            items.append(Named(name, expr))
            found.append(Col(name, type_of(expr), expr.nullable))
        ops.append(Project(relation.op, tuple(items), at=at))
        keys.append(tuple(found))
    op = OuterJoin(ops[0], ops[1], keys[0], keys[1], "outer", _all_of(right), at=at)
    return _both(left, right, op, {})


def typed_pair(left: Expr, right: Expr, at: SourceLoc) -> Pair:
    """Two keys in one type, without loss; WrongType if there is none."""
    return same_type(left, right, at)


def null_safe_semi(left: Relation, right: Op, names: list[str], how: str, at: SourceLoc) -> Relation:
    """The rows of the left side that are (or are not) among those of the right one, where null equals null."""
    pairs: list[Pair] = []
    for name in names:
        mine, other = left.op.schema[name], right.schema[name]
        a, b = Col(name, mine.dtype, mine.nullable), Col(name, other.dtype, other.nullable)
        if not (mine.nullable or other.nullable):
            pairs.append((a, b))
            continue
        for side in (_null_flag, _filled):
            pairs.append((side(a), side(b)))
    keys = tuple(a for a, _ in pairs), tuple(b for _, b in pairs)
    return left.over(Join(left.op, right, *keys, how, (), at=at))


def _null_flag(key: Col) -> Expr:
    call = Call("is_null", (key,), dtype=BOOL, nullable=False)
    return Call("if_else", (call, _number(1), _number(0)), dtype=I32, nullable=False)


def _number(value: int) -> Lit:
    return Lit(value, I32)


def _filled(key: Col) -> Expr:
    dtype = type_of(key)
    plain: object = "" if dtype.is_string else b"" if dtype.kind is Kind.BIN else (
        False if dtype.kind is Kind.BOOL else 0.0 if dtype.is_float else 0)
    return REGISTRY["fill_null"].rule(Call("fill_null", (key, Lit(plain, dtype))), (key, Lit(plain, dtype)))


def left_join_where(left: Relation, right: Relation, matched: Relation, used: list[str], at: SourceLoc) -> Relation:
    """A left join by any condition: its inner join `matched`, and the other rows of the left side with nulls.

    Which rows are the others is decided by the columns of the left side that the condition reads.
    """
    keys = tuple(Named(name, Col(name, left.op.schema[name].dtype, left.op.schema[name].nullable)) for name in used)
    if keys:
        found: Op = Distinct(Project(matched.op, keys, at=at), tuple(used), at=at)
        others = null_safe_semi(left, found, used, "anti", at)
    else:
        others = equi_join(left, Relation(Project(matched.op, (Named(internal("one"), _number(1)),), at=at), ()), [],
                           "anti", at)
    return union_of(matched, others, right, at)


def union_of(matched: Relation, others: Relation, right: Relation, at: SourceLoc) -> Relation:
    """The joined rows, then those of the left side alone."""
    fields = matched.op.schema
    mine = set(others.op.schema.names)
    items = tuple(Named(f.name, Col(f.name, f.dtype, others.op.schema[f.name].nullable) if f.name in mine
                        else Lit(None, f.dtype)) for f in fields)
    op = Union((matched.op, Project(others.op, items, at=at)), at=at)
    schema = {f.name: f for f in op.schema}
    columns = tuple(replace(each, expr=Col(each.expr.name, each.expr.dtype, schema[each.expr.name].nullable))
                    for each in matched.columns if isinstance(each.expr, Col))
    return replace(matched, op=op, columns=columns)


def filtered(relation: Relation, condition: Expr, at: SourceLoc) -> Relation:
    """The rows for which a condition is true."""
    if isinstance(condition, Lit) and condition.value is True:
        return relation
    return relation.over(Filter(relation.op, condition, at=at))
