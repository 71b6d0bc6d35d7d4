"""Stable text of expressions and plans, for `explain`, error messages and golden tests.

Expressions read like the Python that makes them, column names without quotes:

    (price * 0.8 > 1.0) & event_type.str.starts_with('v')

Plans are a tree, result first, with the columns that come out of each op that changes them:

    Aggregate by user: total = price.sum()  -> user: str?, total: f64?
      Filter price > 1.0
        Source arrow  -> user: str?, price: f64?
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta
from functools import cache
from typing import TYPE_CHECKING

from scalein.dtypes import DATE, UNITS_PER_SECOND, DType, Kind
from scalein.ir.aggregates import AGGREGATES
from scalein.ir.exprs import (
    Agg,
    AggregateResult,
    Call,
    Col,
    Expr,
    Lit,
    Named,
    OverResult,
    args_of,
    branches,
    post_order,
)
from scalein.ir.functions.registry import REGISTRY
from scalein.ir.internal_names import PREFIX, internal, is_internal
from scalein.ir.rewrite import walk_ops

if TYPE_CHECKING:
    from scalein.ir.aggregates import Aggregate
    from scalein.ir.ops import Op
    from scalein.ir.over import WindowFunction

# How tightly Python binds what show_expr writes: a comparison weaker than `|` and `&`.
_COMPARISON, _OR, _AND, _SUM, _PRODUCT, _PREFIX, _POWER, _METHOD = range(8)

_SIGNS = {
    **dict.fromkeys(("==", "!=", "<", "<=", ">", ">="), _COMPARISON), "|": _OR, "&": _AND, "+": _SUM, "-": _SUM,
    **dict.fromkeys(("*", "/", "//", "%"), _PRODUCT), "**": _POWER,
}  # fmt: skip


_MAX_NODES_OF_ERRORS = 400
_MAX_NODES = 200_000  # of a part that is written out; shared parts can make a text of any length


def show_expr(expr: Expr) -> str:
    """Text of an expression, as close to the Python of the user as its typed form allows.

    >>> show_expr(Call("gt", (Call("add", (Col("x"), Lit(1))), Lit(2))))
    'x + 1 > 2'
    """
    return _Text(expr).whole


def show_brief(expr: Expr) -> str:
    """As `show_expr`, but `...` for an argument that would be longer than anyone reads in an error."""
    return _Text(expr, _MAX_NODES_OF_ERRORS).whole


def show_operand(expr: Expr) -> str:
    """Text of an expression that means the same inside of any other: `(x + 1)`, `x.abs()`."""
    return _Text(expr).within(expr, _METHOD)


def show_agg(agg: Agg) -> str:
    """Text of an aggregate: `price.sum()`, `price.arg_max(time)`, `count()`, `corr(x, y)`, `count().filter(x > 2)`."""
    declared: Aggregate | WindowFunction | None = AGGREGATES.get(agg.fn)
    if declared is None:
        from scalein.ir.over import WINDOW_FUNCTIONS

        declared = WINDOW_FUNCTIONS[agg.fn]
    method = declared.shown(agg)
    if declared.is_method:
        inside = [*map(repr, agg.params), *map(show_expr, agg.args[1:])]
        text = f"{_Text(agg.args[0]).receiver(agg.args[0])}.{method}({', '.join(inside)})"
    else:
        text = f"{method}({', '.join(map(show_expr, agg.args))})"
    return text if agg.where is None else f"{text}.filter({show_expr(agg.where)})"


def _parts(expr: Expr) -> tuple[Expr, ...]:
    """What stands in the text of an expression."""
    match expr:
        case Call("if_else"):
            return branches(expr)
        case Call("try", (Call() as tried,)) if tried.args and tried.fn != "udf":
            return tried.args
        case _:
            return args_of(expr)


@cache
def _parsed(template: str) -> tuple[list[tuple[str, str, int | None]], int]:
    """A template as text and names of placeholders, each operand with how tightly what it stands beside binds.

    Equals on the right need brackets, and on the left too for comparisons and powers: Python reads `a < b < c` as a
    range and `a ** b ** c` from the right.
    """
    if template[0] in "-~":
        return [(template[0], "", None), ("", "0", _PREFIX)], _PREFIX
    found: list[tuple[str, str, int | None]] = []
    tokens = template.split()
    levels = [_SIGNS.get(token) for token in tokens]
    signs = [level for level in levels if level is not None]
    if not signs:  # a method: text and placeholders in turn
        for number, part in enumerate(re.split(r"\{(\w+)\}", template)):
            found.append(("", part, None) if number % 2 else (part, "", None))
        return found, _METHOD
    for token, before, after in zip(tokens, [None, *levels], [*levels[1:], None], strict=False):
        left = 0 if before is None else before + 1
        right = 0 if after is None else after + 1 if after in (_COMPARISON, _POWER) else after
        if found:
            found.append((" ", "", None))
        name = token.strip("{}") if token.startswith("{") else ""
        found.append(("" if name else token, name, max(left, right) if name.isdigit() else None))
    return found, min(signs)


class _Text:
    """The text of an expression, written from the leaves up; that of a part goes when all that hold it have used it."""

    def __init__(self, expr: Expr, most_nodes: int = _MAX_NODES) -> None:
        def parts(node: Expr) -> tuple[Expr, ...]:
            return _parts(node) if node.size <= most_nodes or node is expr else ()

        self._of: dict[int, tuple[str, int]] = {}  # text, and how tightly its outermost operator binds
        order = post_order(expr, parts)
        users = Counter(id(part) for node in order for part in parts(node))
        for node in order:
            is_shown = node.size <= most_nodes or node is expr
            self._of[id(node)] = self._written(node) if is_shown else ("...", _METHOD)
            for part in parts(node):
                users[id(part)] -= 1
                if not users[id(part)]:
                    del self._of[id(part)]
        self.whole = self._of[id(expr)][0]

    def within(self, expr: Expr, level: int) -> str:
        """The text of a part beside an operator that binds so tightly."""
        text, binds = self._of[id(expr)]
        return text if binds >= level else f"({text})"

    def receiver(self, expr: Expr) -> str:
        """What stands before the dot of a method; a bare constant takes none."""
        return f"lit({self._plain(expr)})" if isinstance(expr, Lit) else self.within(expr, _METHOD)

    def _plain(self, expr: Expr) -> str:
        return self._of[id(expr)][0]

    def _written(self, expr: Expr) -> tuple[str, int]:
        match expr:
            case AggregateResult(name) | OverResult(name):
                return name, _METHOD
            case Col(name):
                is_plain = name.isidentifier() or is_internal(name)  # in fused plans
                return (name if is_plain else f"col({name!r})"), _METHOD
            case Lit(value, dtype):
                text = show_value(value, dtype)
                return text, _PREFIX if text.startswith("-") else _METHOD
            case Call("if_else"):
                return self._when(expr), _METHOD
            case Call("try", (Call() as tried,)):
                return self._try(tried), _METHOD
            case _:
                return self._fill(expr, REGISTRY[expr.fn].show)

    def _fill(self, call: Call, template: str) -> tuple[str, int]:
        """A call by the template that its function declares, and how tightly that binds."""
        pieces, binds = _parsed(template)
        return "".join(
            text if not name else self._placeholder(call, name) if level is None
            else self.within(call.args[int(name)], level) for text, name, level in pieces), binds  # fmt: skip

    def _placeholder(self, call: Call, name: str) -> str:
        """What stands for `{name}` in the template of a method; see `Function.show`."""
        match name, call.params:
            case "0", _:
                return self.receiver(call.args[0])
            case "args", _:
                return ", ".join(map(self._plain, call.args))
            case "fields", names:
                return ", ".join(f"{name}={self._plain(arg)}" for name, arg in zip(names, call.args, strict=True))
            case "type", _:
                return repr(call.dtype)
            case "name", (udf,):
                from scalein.ir.udf import AnyUdf  # most flows have no udf

                assert isinstance(udf, AnyUdf)
                return udf.name
            case "values", (tuple() as values, bool() as has_null):
                of = call.args[0].dtype
                return ", ".join([show_value(value, of) for value in values] + (["None"] if has_null else []))
            case "span", (int() as every,):
                return repr(show_span(every, call.args[0].dtype))
            case ("params" | "span"), params:
                given = params[:-1] if params[-1:] == (None,) else params  # str.slice(offset) without a length
                return ", ".join(map(repr, given))
            case _:
                return self._plain(call.args[int(name)])

    def _try(self, tried: Call) -> str:
        """`x.try_cast(i32)`, `x.try_add(y)` and `try(f(x))`."""
        if not tried.args or tried.fn == "udf":
            return f"try({self._plain(tried)})"
        template = REGISTRY[tried.fn].show
        if not template.endswith(")"):  # an operator
            template = "{0}." + f"{tried.fn}({', '.join(f'{{{k}}}' for k in range(1, len(tried.args)))})"
        object_, _, method = template.partition("(")[0].rpartition(".")
        return self._fill(tried, f"{object_}.try_{method}({template.partition('(')[2]}")[0]

    def _when(self, call: Call) -> str:
        """`when(a).then(x).when(b).then(y).otherwise(z)`."""
        *pairs, last = branches(call)
        text = ".".join(f"when({self._plain(condition)}).then({self._plain(value)})"
                        for condition, value in zip(pairs[::2], pairs[1::2], strict=True))
        return text if isinstance(last, Lit) and last.value is None else f"{text}.otherwise({self._plain(last)})"


def show_value(value: object, dtype: DType | None) -> str:
    """Text of a constant; typed times are physical integers and shown as what they mean."""
    if value is None or dtype is None or not isinstance(value, int):
        return str(value) if isinstance(value, float) else repr(value)
    match dtype.kind:
        case Kind.DUR:
            return f"duration({show_span(value, dtype)!r})"
        case Kind.DATE:
            return _calendar("date", value, lambda: str(date(1970, 1, 1) + timedelta(days=value)))
        case Kind.DATE64 if value % 86_400_000 == 0:
            return show_value(value // 86_400_000, DATE)
        case Kind.TS:
            return _calendar("datetime", value, lambda: _show_instant(value, dtype))
        case Kind.TIME:
            return _calendar("time", value, lambda: _show_instant(value, dtype).removeprefix("1970-01-01 "))
        case Kind.DEC:
            return f"Decimal('{_show_digits(value, dtype.scale)}')"
        case _:
            return repr(value)


def _show_digits(value: int, scale: int) -> str:
    """`-12.50` of -1250 at a scale of 2."""
    digits = f"{abs(value):0{max(0, scale) + 1}d}"
    text = f"{digits[:-scale]}.{digits[-scale:]}" if scale > 0 else digits + "0" * -scale
    return ("-" if value < 0 else "") + text


def _calendar(name: str, value: int, show: Callable[[], str]) -> str:
    try:
        return f"{name}({show()!r})"
    except (OverflowError, ValueError):  # outside of the years that Python's calendar knows
        return f"{name}({value})"


def _show_instant(value: int, dtype: DType) -> str:
    """`2024-05-01 10:00:00.250`: UTC, with a fraction only where there is one; followed by the zone, if there is one.
    """
    per_second = UNITS_PER_SECOND[dtype.unit]
    seconds, fraction = divmod(value, per_second)
    whole = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(seconds=seconds)
    digits = f".{fraction:0{len(str(per_second)) - 1}d}" if fraction else ""
    return f"{whole:%Y-%m-%d %H:%M:%S}{digits}{'Z' if dtype.tz else ''}"


def show_span(value: int, dtype: DType | None) -> str:
    """A length in units of `dtype`: `1h30m` for times, the plain number for integers.

    >>> show_span(5_400_000, DType(Kind.TS, unit="ms"))
    '1h30m'
    """
    if dtype is None or dtype.kind not in (Kind.TS, Kind.DUR, Kind.DATE):
        return str(value)
    rest = abs(value) * 86_400_000_000_000 if dtype.kind is Kind.DATE else (
        abs(value) * (UNITS_PER_SECOND["ns"] // UNITS_PER_SECOND[dtype.unit])
    )  # fmt: skip
    text = ""
    for unit, size in _SPANS:
        count, rest = divmod(rest, size)
        text += f"{count}{unit}" if count else ""
    return ("-" if value < 0 else "") + (text or "0s")


_SPANS = (
    ("d", 86_400_000_000_000), ("h", 3_600_000_000_000), ("m", 60_000_000_000), ("s", 1_000_000_000),
    ("ms", 1_000_000), ("us", 1_000), ("ns", 1),
)  # fmt: skip


def show_named(item: Named) -> str:
    """`name = expression`, or a column's name where it keeps it."""
    same = isinstance(item.expr, Col) and item.expr.name == item.name
    return show_expr(item.expr) if same else f"{item.name} = {show_expr(item.expr)}"


def show_equation(left: Expr, right: Expr) -> str:
    """Text of a pair of keys that must be equal: `user == id`."""
    return f"{_Text(left).within(left, _OR)} == {_Text(right).within(right, _OR)}"


def aggregate_texts(root: Op) -> dict[str, str]:
    """The internal columns that aggregates of an expression (`GroupBy.agg`) became, each with its aggregate's text."""
    from scalein.ir.ops import Aggregate, Over

    names = {named.name: show_agg(named.agg) for op in walk_ops(root) if isinstance(op, Aggregate)
             for named in op.aggs if is_internal(named.name)}
    return names | {call.name: op.shown(call) for op in walk_ops(root) if isinstance(op, Over) for call in op.calls}


def with_aggregates(text: str, op: Op) -> str:
    """The text with aggregates in the place of the internal columns that they became, for users.

    Ops above an aggregation have no internal columns of others below it: those are inside of its input.
    """
    if internal("agg") not in text and internal("over") not in text:
        return text
    names = aggregate_texts(op)
    return re.sub(rf"{PREFIX}(agg|over)\d+", lambda found: names.get(found[0], found[0]), text)


def dump(root: Op, with_retention: bool = False) -> str:
    """The plan as a tree, result first; an op with several users is written once and named `#1`, `#2`.

    `with_retention` adds what a job retains of the inputs of joins, and why.
    """
    users: dict[int, int] = {}
    for op in walk_ops(root):
        for below in op.inputs:
            users[id(below)] = users.get(id(below), 0) + 1
    labels: dict[int, str] = {}
    lines: list[str] = []
    waiting = [(root, 0)]
    while waiting:
        op, depth = waiting.pop()
        indent = "  " * depth
        if id(op) in labels:
            lines.append(f"{indent}{labels[id(op)]}")
            continue
        label = ""
        if users.get(id(op), 0) > 1:
            labels[id(op)] = f"#{len(labels) + 1}"
            label = f"{labels[id(op)]} "
        name, detail = op.describe()
        columns = f"  -> {op.schema!r}" if op.names_columns else ""
        lines.append(with_aggregates(f"{indent}{label}{name}{' ' if detail else ''}{detail}{columns}", op))
        lines += [f"{indent}  | {line}" for line in op.retention() if with_retention]
        waiting += [(below, depth + 1) for below in reversed(op.inputs)]
    return "\n".join(lines)
