"""Two inputs become one: join keys brought to one type, output names settled, unions checked."""

from __future__ import annotations

from collections.abc import Sequence

from scalein.api.column import Column, as_column
from scalein.api.naming import row_expr
from scalein.dtypes import DType, Schema
from scalein.dtypes import alike as same_type
from scalein.errors import BadArgument, BadName, SourceLoc, WrongType
from scalein.ir.exprs import Call, Col, Expr, Named, type_of
from scalein.ir.ops import Join, Op, Project
from scalein.ir.resolve import Scope, resolve, shown
from scalein.ir.unify import as_decimal, cast_to, common_type, nested_hint

HOWS = ("inner", "left", "semi", "anti")
Keys = str | Column | Sequence[str | Column]


def join(left: Op, right: Op, on: Keys | None, left_on: Keys | None, right_on: Keys | None, how: str,
         at: SourceLoc) -> Join:
    """The join of two ops; `right` is read whole first."""
    if how not in HOWS:
        raise BadArgument("no such join", at=at, found=repr(how), has=", ".join(HOWS))
    left_given, right_given = _both_sides(on, left_on, right_on, at)
    left_scope = Scope(left.schema, "join (left side)", at)
    right_scope = Scope(right.schema, "join (right side)", at)
    left_keys = [row_expr(as_column(key, "join"), left_scope) for key in left_given]
    right_keys = [row_expr(as_column(key, "join"), right_scope) for key in right_given]
    pairs = [_same_type(a, b, at) for a, b in zip(left_keys, right_keys, strict=True)]
    keep = () if how in ("semi", "anti") else _kept(left, right, right_keys, at)
    return Join(left, right, tuple(a for a, _ in pairs), tuple(b for _, b in pairs), how, keep, at=at)


def _both_sides(on: Keys | None, left_on: Keys | None, right_on: Keys | None,
                at: SourceLoc) -> tuple[list[str | Column], list[str | Column]]:
    hint = 'write on="id", or left_on="id", right_on="ad_id"'
    if on is not None and (left_on is not None or right_on is not None):
        raise BadArgument("join takes on, or left_on and right_on, not both", at=at, hint=hint)
    if on is None and (left_on is None or right_on is None):
        raise BadArgument("join needs on, or both left_on and right_on", at=at, hint=hint)
    left, right = _as_list(on if left_on is None else left_on), _as_list(on if right_on is None else right_on)
    if len(left) != len(right):
        raise BadArgument("left_on and right_on have different lengths", at=at, found=f"{len(left)} and {len(right)}")
    if not left:
        raise BadArgument("join needs at least one key", at=at, hint=hint)
    return left, right


def _as_list(keys: Keys | None) -> list[str | Column]:
    if isinstance(keys, list | tuple):
        return list(keys)
    return [keys]  # type: ignore[list-item]


def _same_type(left: Expr, right: Expr, at: SourceLoc) -> tuple[Expr, Expr]:
    """Both keys in the type that holds either without loss."""
    a, b = type_of(left), type_of(right)
    if a.is_nested or b.is_nested:
        raise WrongType(f"join takes no nested keys: {a!r} and {b!r}", at=at,
                        hint=nested_hint(a if a.is_nested else b))
    shared = common_type(a, b)
    if shared is None or not (_is_lossless(a, shared) and _is_lossless(b, shared)):
        raise WrongType(f"join keys of types {a!r} and {b!r} cannot be compared without loss", at=at,
                        hint="cast one side to the other's type before joining")
    return cast_to(left, shared), cast_to(right, shared)


def _is_lossless(source: DType, target: DType) -> bool:
    """f64 holds integers of 32 bits exactly, f32 those of 16; `common_type` sees to all but 64 bits."""
    if target.is_decimal and (have := as_decimal(source)) is not None:
        return have.precision - have.scale <= target.precision - target.scale
    return not ((source.is_int and target.is_float and source.bits == 64) or (source.is_decimal and target.is_float))


def _kept(left: Op, right: Op, right_keys: list[Expr], at: SourceLoc) -> tuple[tuple[str, str], ...]:
    """Output name and column of what comes from the right: all but its keys; a clash gets `_right`."""
    keys = {key.name for key in right_keys if isinstance(key, Col)}
    taken = set(left.schema.names)
    kept = []
    for column in right.schema.names:
        if column in keys:
            continue
        name = column if column not in left.schema.names else f"{column}_right"
        if name in taken:
            raise BadName(f"two outputs of join would be called {name!r}", at=at, left=", ".join(left.schema.names),
                          right=", ".join(right.schema.names), hint="rename one of them before the join")
        taken.add(name)
        kept.append((name, column))
    return tuple(kept)


def alike(op: Op, first: Schema, number: int, at: SourceLoc) -> Op:
    """The op in the first one's schema; only the Arrow form of text and nulls may differ."""
    found = op.schema
    if found.names != first.names:
        same = sorted(found.names) == sorted(first.names)
        raise BadName(f"input {number} of union has other columns than the first", at=at, found=shown(found),
                      wanted=shown(first), hint="bring them into one order with select(...)" if same else
                      "select the columns that both have, or add the others: with_columns(x=lit(None, type))")
    for field, want in zip(found, first, strict=True):
        if not same_type(field.dtype, want.dtype):
            raise WrongType(f"column {field.name!r} is {field.dtype!r} in input {number} of union, "
                            f"but {want.dtype!r} in the first", at=at, hint="cast one of them")
    if all(field.dtype == want.dtype for field, want in zip(found, first, strict=True)):
        return op
    scope = Scope(found, "union", at)
    items = [Named(f.name, resolve(Call("cast", (Col(f.name),), dtype=f.dtype), scope)) for f in first]
    return Project(op, tuple(items), at=at)
