"""What the parser reads and the planner does not: refused by name, so that no part of a query is dropped in silence.

`_READ` lists the arguments of sqlglot's nodes that the planner looks at. Of nodes that are not in it, such as calls and
operators, all arguments that are expressions are read, or the node is refused as a whole; what else a node carries must
be one of `_FLAGS`, which do not change what is meant.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from sqlglot import exp

from scalein.errors import BadSql

if TYPE_CHECKING:
    from scalein.sql.parse import Text

_MODIFIERS = "with_ order limit offset"
_READ: dict[type[exp.Expr], frozenset[str]] = {kind: frozenset(names.split()) for kind, names in {
    exp.Select: f"{_MODIFIERS} expressions distinct from_ joins where group having qualify windows",
    exp.From: "this", exp.Where: "this", exp.Having: "this", exp.Qualify: "this",
    exp.Join: "this on side kind using method",
    exp.Group: "expressions grouping_sets cube rollup totals all",  # all but lists are refused with a hint
    exp.Order: "this expressions", exp.Ordered: "this desc nulls_first",
    exp.Limit: "expression", exp.Fetch: "direction count limit_options", exp.Offset: "expression",
    exp.LimitOptions: "rows", exp.Distinct: "expressions on",
    exp.With: "expressions recursive", exp.CTE: "this alias materialized", exp.TableAlias: "this columns",
    exp.Table: "this alias db catalog joins", exp.Subquery: f"this alias joins {_MODIFIERS}",
    exp.Values: "expressions alias order limit offset",
    exp.Union: f"{_MODIFIERS} this expression distinct by_name",
    exp.Except: f"{_MODIFIERS} this expression distinct by_name",
    exp.Intersect: f"{_MODIFIERS} this expression distinct by_name",
    exp.Star: "except_ replace", exp.Column: "this table db catalog", exp.Identifier: "this quoted",
    exp.Window: "this partition_by order spec alias over", exp.WindowSpec: "kind start start_side end end_side",
    exp.Cast: "this to", exp.TryCast: "this to safe", exp.In: "this expressions query", exp.Between: "this low high",
    exp.Extract: "this expression", exp.Exists: "this", exp.Interval: "this unit",
    exp.DateDiff: "this expression unit date_part_boundary", exp.TimestampDiff: "this expression unit",
    exp.Pad: "this expression fill_pattern is_left",
    exp.TimestampTrunc: "this unit", exp.DateTrunc: "this unit", exp.TimeToStr: "this format",
    exp.StrToTime: "this format",
    exp.DateAdd: "this expression unit", exp.DateSub: "this expression unit", exp.TimestampAdd: "this expression unit",
    exp.TsOrDsToDate: "this", exp.Date: "this", exp.Bracket: "this expressions offset",
    exp.DataType: "this expressions nested values kind",
    exp.Insert: "this expression", exp.Create: "this kind expression replace exists properties",
    exp.Schema: "this expressions",
    exp.Drop: "this tables kind exists", exp.Trim: "this expression position",
}.items()}
_FLAGS = frozenset(("this", "is_string", "big_int", "safe", "coalesce", "is_nvl", "is_null", "negate", "ignore_nulls",
                    "date_part_boundary", "null_if_pos_overflow", "quoted", "over", "is_left"))
_WORDS = {
    "limit_options": "PERCENT or WITH TIES", "exclude": "EXCLUDE", "sample": "TABLESAMPLE", "pivots": "PIVOT",
    "locks": "FOR UPDATE", "laterals": "LATERAL", "percent": "PERCENT", "with_ties": "WITH TIES",
    "with_fill": "WITH FILL",
    "overwrite": "OVERWRITE", "conflict": "ON CONFLICT", "returning": "RETURNING", "symmetric": "SYMMETRIC",
    "match_condition": "MATCH_CONDITION", "into": "INTO", "rename": "RENAME", "format": "FORMAT", "zone": "a time zone",
    "exists": "IF NOT EXISTS", "by_name": "BY NAME", "version": "a version", "ilike": "ILIKE",
}
_HINTS = {"limit_options": "LIMIT takes a number of rows", "percent": "LIMIT takes a number of rows",
          "sample": "ORDER BY hash(...) LIMIT n takes rows by chance"}


def check(source: Text, tree: exp.Expr) -> None:
    """Raises `BadSql` if something in a tree would not be looked at."""
    for node in tree.walk():
        read = _READ.get(type(node))
        for name, value in node.args.items():
            if value is None or value is False or value == [] or (read is not None and name in read):
                continue
            if read is None and (name in _FLAGS or _is_read(value)):
                continue
            _refuse(source, node, name, value)


def _is_read(value: object) -> bool:
    """Whether an argument of a call is among those that the function gets."""
    return all(isinstance(each, exp.Expr) for each in (value if isinstance(value, list) else [value]))


def _refuse(source: Text, node: exp.Expr, name: str, value: object) -> None:
    if isinstance(value, exp.LimitOptions) and not any(value.args.get(each) for each in ("percent", "with_ties")):
        return
    what = _WORDS.get(name, name.strip("_").replace("_", " ").upper())
    kind = re.sub(r"(?<!^)([A-Z])", r" \1", type(node).__name__).upper()
    raise source.error(BadSql, f"{what} is not supported in {_KINDS.get(kind, kind)}", node, hint=_HINTS.get(name))


_KINDS = {"WINDOW SPEC": "a frame of OVER", "LIMIT OPTIONS": "LIMIT", "TABLE": "FROM", "ORDERED": "ORDER BY",
          "STAR": "SELECT *", "CAST": "CAST", "IDENTIFIER": "a name"}
