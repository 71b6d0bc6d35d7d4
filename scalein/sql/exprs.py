"""From sqlglot's expressions to typed ones of ours, by the rules of the registry; what is wrong is underlined.

Constants stay without a type until they meet one, as in the rest of scalein. A subquery, an aggregate or an OVER is a
column by the time its expression is read: the planner has put it into `known`.

Where SQL means something else than Python, it is as in DuckDB: `//` and `%` truncate, `0.1` is a decimal, text that
meets a time or a number is read as one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import date, datetime, time, timedelta
from decimal import Decimal

from sqlglot import exp

from scalein.dtypes import BOOL, DATE, F32, F64, I32, I64, MAX_PRECISION, STR, TIMES, DType, Kind
from scalein.durations import Span
from scalein.errors import BadSql, ScaleinError, WrongType, warn
from scalein.ir.exprs import Call, Col, Expr, Lit, type_of
from scalein.ir.functions.registry import REGISTRY
from scalein.ir.time_formats import BadFormat
from scalein.ir.unify import Refused, own_type_of, type_literal
from scalein.sql.parse import Text, span_of, unwrapped
from scalein.sql.scope import Relation, column

_SPANS = {"NANOSECOND": 0.001, "MICROSECOND": 1, "MILLISECOND": 1_000, "SECOND": 10**6, "MINUTE": 60 * 10**6,
          "HOUR": 3_600 * 10**6, "DAY": 86_400 * 10**6, "WEEK": 7 * 86_400 * 10**6}  # microseconds
_MONTHS = {"MONTH": 1, "QUARTER": 3, "YEAR": 12}
_SHORT = {"MS": "MILLISECOND", "US": "MICROSECOND", "NS": "NANOSECOND", "S": "SECOND", "SEC": "SECOND",
          "M": "MINUTE", "MIN": "MINUTE", "H": "HOUR", "HR": "HOUR", "D": "DAY", "W": "WEEK", "Y": "YEAR"}


@dataclass(frozen=True, slots=True)
class Months:
    """An interval of calendar months: it moves dates and times, and is no length of its own."""

    count: int
    rest: timedelta = timedelta()


@dataclass
class Exprs:
    """Expressions over one relation; `step` is the clause that they stand in.

    `known` are nodes that have become columns. `keys` are, after GROUP BY, what the keys were and what they are now;
    `before` reads expressions as they were before it. `aliases` are outputs of SELECT, which other clauses may name.
    """

    source: Text
    relation: Relation
    step: str
    known: dict[int, Expr] = field(default_factory=dict)
    aliases: dict[str, exp.Expr] = field(default_factory=dict)
    keys: list[tuple[Expr, Expr]] | None = None
    before: Exprs | None = None
    prefers_aliases: bool = False
    _open: set[str] = field(default_factory=set)

    # --- what callers want

    def typed(self, node: exp.Expr) -> Expr:
        """The expression with a type."""
        found = self.expr(node)
        if isinstance(found, Lit) and found.dtype is None:
            if found.value is None:
                return Lit(None, I32)  # as in DuckDB
            if isinstance(found.value, Months):
                raise self.refused("an interval of months is no value: months have no fixed length", node,
                                   "add it to a date or a time, or use days")
        return self._checked(node, lambda: type_literal(found))

    def condition(self, node: exp.Expr) -> Expr:
        """The expression, which is true or false."""
        found = self.expr(node)
        if isinstance(found, Lit) and found.dtype is None and found.value is None:
            return Lit(None, BOOL)
        found = self._checked(node, lambda: type_literal(found))
        if type_of(found).kind is not Kind.BOOL:
            raise self.source.error(WrongType, f"{self.step} takes a condition, not {type_of(found)!r}", node,
                                    hint="compare it with something: >, =, IN (...)")
        return found

    def constant(self, node: exp.Expr) -> object:
        """The value of a constant, in Python; None for what is none."""
        found = self.expr(node)
        if isinstance(found, Call) and found.fn == "neg" and isinstance(found.args[0], Lit):
            return None
        return found.value if isinstance(found, Lit) else None

    def expr(self, node: exp.Expr) -> Expr:
        """The expression; a plain constant has no type."""
        known = self.known.get(id(node))
        if known is not None:
            return known
        if self.keys is not None:
            found = self._key(node)
            if found is not None:
                return found
        rule = _RULES.get(type(node))
        if rule is not None:
            return rule(self, node)
        if isinstance(node, exp.Func):
            from scalein.sql.calls import call_of

            return call_of(self, node)
        raise self.unsupported(node)

    # --- groups

    def _key(self, node: exp.Expr) -> Expr | None:
        """The key that an expression of the groups' input is."""
        assert self.keys is not None
        assert self.before is not None
        if isinstance(node, exp.Column) or (len(self.keys) and isinstance(node, exp.Condition)
                                            and not isinstance(node, exp.Literal | exp.Null | exp.Boolean)):
            if not isinstance(node, exp.Column) and any(id(each) in self.known for each in node.walk()):
                return None
            try:
                found = self.before.expr(node)
            except ScaleinError:
                if isinstance(node, exp.Column) and self._alias(node) is None:
                    raise
                return None
            if isinstance(found, Lit):
                return found if not isinstance(node, exp.Column) and found.dtype is None else None
            for expr, key in self.keys:
                if expr == found:
                    return key
            if isinstance(node, exp.Column):
                if self._alias(node) is not None and not self.before.relation.find(node.name, node.table):
                    return None
                raise self.source.error(
                    BadSql, f"{node.name!r} is neither in GROUP BY nor in an aggregate", node,
                    keys=", ".join(_shown(expr) for expr, _ in self.keys) or "none",
                    hint=f"a group has many values of it: write MAX({node.name}), or add it to GROUP BY")
        return None

    # --- names

    def _alias(self, node: exp.Column) -> exp.Expr | None:
        """The output that a name means."""
        name = node.name.lower()
        return None if node.table or name in self._open else self.aliases.get(name)

    def column(self, node: exp.Column) -> Expr:
        """A column of the relation, or else an output of SELECT."""
        alias = self._alias(node)
        if isinstance(node.this, exp.Star):
            raise self.refused("* is not one value", node, "name the columns")
        scope = self.relation
        if not node.table and alias is not None and (self.prefers_aliases or not scope.find(node.name)):
            self._open.add(node.name.lower())
            try:
                return self.expr(alias)
            finally:
                self._open.discard(node.name.lower())
        if node.args.get("db") or node.args.get("catalog"):
            parts = [part.name for part in node.parts]
            if scope.find(parts[1], parts[0]):
                return self._fields(column(scope, parts[1], parts[0], self.source, span_of(node), self.step).expr,
                                    parts[2:], node)
            return self._fields(column(scope, parts[0], "", self.source, span_of(node), self.step).expr,
                                parts[1:], node)
        if node.table and not scope.find(node.name, node.table):
            structs = scope.structs(node.table)
            if len(structs) == 1:
                return self._fields(structs[0].expr, [node.name], node)
        if not scope.find(node.name, node.table) and node.name.upper() in _NILADIC and not node.table:
            return self.clock(node.name.upper(), node)
        return column(scope, node.name, node.table, self.source, span_of(node), self.step).expr

    def clock(self, name: str, node: exp.Expr) -> Expr:
        """The time of the clock, which no flow knows; PROCTIME() of a stream with event time is read as that."""
        event = self.relation.op.event_time.column if name == "PROCTIME" else ""
        field = self.relation.op.schema.get(event) if event else None
        if field is None:
            raise self.refused(f"{name} is not known when a flow is planned: results would not repeat", node,
                               "give the time as a constant, or use event time")
        warn(f"PROCTIME() is read as the event time {event!r}: results do not depend on when a flow runs",
             self.source.at)
        return Col(field.name, field.dtype, field.nullable)

    def _fields(self, struct: Expr, names: list[str], node: exp.Expr) -> Expr:
        for name in names:
            struct = self.call(node, "struct_field", struct, params=(name,))
        return struct

    # --- calls

    def call(self, node: exp.Expr, fn: str, *args: Expr, params: tuple[object, ...] = (),
             dtype: DType | None = None) -> Expr:
        """The typed call of a function of the registry."""
        return self._checked(node, lambda: REGISTRY[fn].rule(Call(fn, args, params, dtype, at=self.source.at), args))

    def tried(self, node: exp.Expr, fn: str, *args: Expr, params: tuple[object, ...] = (),
              dtype: DType | None = None) -> Expr:
        """The same, with null where it fails."""
        call = Call(fn, args, params, dtype, at=self.source.at)
        return self._checked(node, lambda: REGISTRY["try"].rule(Call("try", (call,), at=self.source.at), args))

    def _checked(self, node: exp.Expr, make: Callable[[], Expr]) -> Expr:
        try:
            return make()
        except Refused as refused:
            raise self.source.error(WrongType, _in_sql(refused.what), node, hint=_sql_hint(refused.hint)) from None
        except BadFormat as wrong:
            raise self.refused(f"this format of times cannot be read: {wrong}", node, "for example '%Y-%m-%d %H:%M'"
                               ) from None

    def with_type(self, node: exp.Expr, arg: Expr) -> Expr:
        """An argument that has a type."""
        return self._checked(node, lambda: type_literal(arg))

    def refused(self, what: str, node: exp.Expr, hint: str | None = None) -> BadSql:
        """The error for what SQL here has not."""
        return self.source.error(BadSql, what, node, hint=hint)

    def unsupported(self, node: exp.Expr) -> BadSql:
        """The error for a kind of expression that is not known."""
        name = re.sub(r"(?<!^)([A-Z])", r" \1", type(node).__name__).upper()
        return self.refused(f"{name} is not supported in {self.step}", node)

    # --- operands that meet

    def meeting(self, node: exp.Expr, *args: Expr) -> tuple[Expr, ...]:
        """The arguments, where text becomes the time or number that it meets, and dates meet timestamps at midnight."""
        owns = [own_type_of(arg) for arg in args if not _is_months(arg)]
        other = next((own for own in owns if own is not None and not own.is_string), None)
        if other is not None and any(own is not None and own.is_string for own in owns):
            args = tuple(self._read(node, arg, other) for arg in args)
            owns = [own_type_of(arg) for arg in args]
        kinds = {own.kind for own in owns if own is not None}
        if Kind.TS in kinds and kinds & {Kind.DATE, Kind.DATE64}:
            return self._at_midnight(node, args)
        return args

    def _read(self, node: exp.Expr, arg: Expr, other: DType) -> Expr:
        """A constant text as what it meets."""
        if not (isinstance(arg, Lit) and isinstance(arg.value, str)):
            return arg
        text = arg.value.strip()
        try:
            if other.kind in (Kind.TS, Kind.DATE, Kind.DATE64):
                found = datetime.fromisoformat(text)
                if other.kind is not Kind.TS and found.time() == time():
                    return Lit(found.date())
                return Lit(found)
            if other.kind is Kind.TIME:
                return Lit(time.fromisoformat(text))
            if other.is_int or other.is_float or other.is_decimal:
                return Lit(int(text) if re.fullmatch(r"[+-]?\d+", text) else
                           float(text) if other.is_float else Decimal(text))
            if other.kind is Kind.BOOL and text.lower() in ("true", "false"):
                return Lit(text.lower() == "true")
        except (ValueError, ArithmeticError):
            raise self.source.error(WrongType, f"the text {arg.value!r} is no {other!r}", node,
                                    hint="for example '2024-05-01 12:30:00'" if other.kind in TIMES else None) from None
        return arg

    def _at_midnight(self, node: exp.Expr, args: tuple[Expr, ...]) -> tuple[Expr, ...]:
        constants = [arg for arg in args if isinstance(arg, Lit) and isinstance(arg.value, datetime)]
        others = [arg for arg in args if not (isinstance(arg, Lit) and arg.dtype is None)]
        are_dates = all((own := own_type_of(arg)) is not None and own.kind is not Kind.TS for arg in others)
        if constants and are_dates and all(isinstance(each.value, datetime) and each.value.time() == time()
                                           and each.value.tzinfo is None for each in constants):
            return tuple(Lit(arg.value.date()) if isinstance(arg, Lit) and isinstance(arg.value, datetime) else arg
                         for arg in args)
        stamp = next(own for arg in args if (own := own_type_of(arg)) is not None and own.kind is Kind.TS)
        unit = stamp.unit or "us"
        return tuple(self._stamp(node, arg, unit) for arg in args)

    def _stamp(self, node: exp.Expr, arg: Expr, unit: str) -> Expr:
        own = own_type_of(arg)
        if own is None or own.kind not in (Kind.DATE, Kind.DATE64):
            return arg
        if isinstance(arg, Lit) and isinstance(arg.value, date):
            return Lit(datetime(arg.value.year, arg.value.month, arg.value.day))
        return self.call(node, "cast", arg, dtype=DType(Kind.TS, unit=unit))

    # --- arithmetic

    def arithmetic(self, node: exp.Expr, fn: str, left: Expr, right: Expr) -> Expr:
        """`+`, `-`, `*` and `/`; of two constants at once."""
        for one, other in ((left, right), (right, left)):
            if _is_months(one):
                return self._months(node, fn, other, one)
        if _is_number(left) and _is_number(right):
            folded = _folded(fn, left.value, right.value)  # type: ignore[union-attr]
            if folded is not None:
                return Lit(folded)
        owns = own_type_of(left), own_type_of(right)
        kinds = tuple(own.kind if own else None for own in owns)
        dates = (Kind.DATE, Kind.DATE64)
        if fn == "sub" and kinds[0] in dates and kinds[1] in dates:
            return self.call(node, "dt_total_days", self.call(node, "sub", left, right))
        if fn in ("add", "sub"):
            left, right = self._moved(node, left, right, kinds[0] in dates), self._moved(
                node, right, left, kinds[1] in dates and fn == "add")
            if Kind.TS in kinds and set(kinds) & set(dates):
                left, right = self._at_midnight(node, (left, right))
            if isinstance(left, Lit) and isinstance(right, Lit) and isinstance(left.value, datetime) and isinstance(
                    right.value, timedelta):
                return Lit(left.value + right.value if fn == "add" else left.value - right.value)
        if any(own is not None and own.is_string for own in owns):
            left, right = self.meeting(node, left, right)
        return self.call(node, fn, left, right)

    def _moved(self, node: exp.Expr, arg: Expr, other: Expr, is_moved: bool) -> Expr:
        """A date that a length of time is added to, as a timestamp; a number beside a date, as days."""
        own, theirs = own_type_of(arg), own_type_of(other)
        if is_moved and theirs is not None and theirs.kind is Kind.DUR:
            return self._stamp(node, arg, "us")
        if own is not None and own.is_int and theirs is not None and theirs.kind in (Kind.DATE, Kind.DATE64):
            if isinstance(arg, Lit):
                return Lit(timedelta(days=int(str(arg.value))))
            return self.call(node, "mul", Lit(timedelta(days=1)), arg)
        return arg

    def _months(self, node: exp.Expr, fn: str, value: Expr, by: Expr) -> Expr:
        assert isinstance(by, Lit)
        assert isinstance(by.value, Months)
        own = own_type_of(value)
        is_time = own is not None and (own.kind is Kind.DATE or (own.kind is Kind.TS and not own.tz))
        if fn not in ("add", "sub") or not is_time:
            raise self.refused("an interval of months moves dates and times without a zone", node,
                               "CAST(... AS TIMESTAMP) makes one")
        if not (isinstance(value, Lit) and isinstance(value.value, date)):
            return self._months_later(node, value, by.value if fn == "add" else Months(-by.value.count, -by.value.rest))
        moved = value.value if isinstance(value.value, datetime) else datetime.combine(value.value, time())
        total = moved.year * 12 + moved.month - 1 + (by.value.count if fn == "add" else -by.value.count)
        year, month = divmod(total, 12)
        day = min(moved.day, (date(year + month // 11, (month + 1) % 12 + 1, 1) - timedelta(days=1)).day)
        moved = moved.replace(year=year, month=month + 1, day=day)
        return Lit(moved + by.value.rest if fn == "add" else moved - by.value.rest)

    def _months_later(self, node: exp.Expr, value: Expr, by: Months) -> Expr:
        """A time some months later, on the same day, or the last one of a shorter month."""
        def call(fn: str, left: Expr, right: Expr | int) -> Expr:
            return self.call(node, fn, left, Lit(right) if isinstance(right, int) else right)

        def first(month: Expr) -> Expr:
            """The days from 1970 to the first of a month, which is counted from March of the year 0."""
            year, rest = call("floordiv", month, 12), call("mod", month, 12)
            leaps = call("add", call("sub", call("floordiv", year, 4), call("floordiv", year, 100)),
                         call("floordiv", year, 400))
            days = call("floordiv", call("add", call("mul", rest, 153), 2), 5)
            return call("sub", call("add", call("add", call("mul", year, 365), leaps), days), 719_468)

        year = self.call(node, "cast", self.call(node, "dt_year", value), dtype=I64)
        month = call("add", call("add", call("mul", year, 12), self.call(node, "dt_month", value)), by.count - 3)
        length = call("sub", first(call("add", month, 1)), first(month))
        day = call("sub", self.call(node, "row_min", self.call(node, "dt_day", value), length), 1)
        days = self.call(node, "mul", Lit(timedelta(days=1)), call("add", first(month), day))
        found = self.call(node, "add", Lit(datetime(1970, 1, 1)), days)
        if type_of(value).kind is Kind.TS:
            midnight = self.call(node, "dt_truncate", value, params=(Span(86_400 * 10**9, False, "1d"),))
            found = self.call(node, "add", found, self.call(node, "sub", value, midnight))
        return found if not by.rest else self.call(node, "add", found, Lit(by.rest))

    def truncating(self, node: exp.Expr, fn: str, left: Expr, right: Expr) -> Expr:
        """`//` and `%` towards zero: ours floor, so what they give is moved where the signs differ."""
        left, right = self.meeting(node, left, right)
        if _is_number(left) and _is_number(right):
            left = self._checked(node, lambda: type_literal(left))
        owns = [own_type_of(arg) for arg in (left, right)]
        if any(own is not None and own.is_decimal for own in owns):
            left, right = (self.call(node, "cast", arg, dtype=F64) for arg in (left, right))
        rest = self.call(node, "mod", left, right)
        found = rest if fn == "mod" else self.call(node, fn, left, right)
        if all(own is not None and own.is_int and not own.is_signed for own in owns):
            return found
        zero: Expr = Lit(0)
        differs = self.call(node, "lt", left, zero)
        if not (_is_number(right) and right.value > 0):  # type: ignore[union-attr, operator]
            differs = self.call(node, "ne", differs, self.call(node, "lt", right, zero))
        moves = self.call(node, "and", self.call(node, "ne", rest, zero), differs)
        other = self.call(node, "sub", rest, right) if fn == "mod" else self.call(node, "add", found, Lit(1))
        return self.call(node, "if_else", moves, other, found)


_NILADIC = ("CURRENT_TIMESTAMP", "CURRENT_DATE", "CURRENT_TIME", "LOCALTIMESTAMP", "LOCALTIME", "NOW", "PROCTIME",
            "GET_CURRENT_TIMESTAMP", "TODAY", "CURRENT_ROW_TIMESTAMP", "UNIX_TIMESTAMP", "RANDOM", "RAND", "UUID",
            "GEN_RANDOM_UUID")


def _is_months(arg: Expr) -> bool:
    return isinstance(arg, Lit) and isinstance(arg.value, Months)


def _is_number(arg: Expr) -> bool:
    return isinstance(arg, Lit) and arg.dtype is None and type(arg.value) in (int, float, Decimal)


def _folded(fn: str, left: object, right: object) -> object:
    """Arithmetic of two plain constants: exact, as long as no float takes part."""
    if isinstance(left, float) or isinstance(right, float):
        left, right = float(left), float(right)  # type: ignore[arg-type]
    assert isinstance(left, int | float | Decimal)
    assert isinstance(right, int | float | Decimal)
    match fn:
        case "add":
            found = left + right  # type: ignore[operator]
        case "sub":
            found = left - right  # type: ignore[operator]
        case "mul":
            found = left * right  # type: ignore[operator]
        case _:
            return None
    if isinstance(found, int) and not -(2**63) <= found < 2**63:
        return None
    return found


def _shown(expr: Expr) -> str:
    from scalein.ir.printer import show_expr

    return show_expr(expr)


_SIGNS = (("// does not take", "// does not take"), ("== ", "= "), ("cannot compare", "cannot compare"))


def _in_sql(what: str) -> str:
    """A refusal in SQL's words."""
    for old, new in _SIGNS:
        what = what.replace(old, new)
    return what


def _sql_hint(hint: str | None) -> str | None:
    """A hint in SQL's words; those about Python's methods say nothing here."""
    if hint is None:
        return None
    if ".cast(" in hint:
        return "CAST(... AS type) brings both to one type"
    return None if re.search(r"\.\w+\(|lit\(|col\(", hint) else hint


# --- rules, one a kind of node --------------------------------------------------------------------------------------

Rule = Callable[[Exprs, exp.Expr], Expr]


def _literal(e: Exprs, node: exp.Expr) -> Expr:
    text = str(node.this)
    if node.args.get("is_string"):
        return Lit(text)
    if re.fullmatch(r"\d[\d_]*", text):
        value = int(text.replace("_", ""))
        return Lit(value) if value < 2**64 else Lit(Decimal(value))
    if re.search(r"[eE]", text):
        return Lit(float(text))
    found = Decimal(text)
    return Lit(found) if len(found.as_tuple().digits) <= MAX_PRECISION else Lit(float(text))


def _compare(fn: str) -> Rule:
    def rule(e: Exprs, node: exp.Expr) -> Expr:
        left, right = e.meeting(node, e.expr(node.this), e.expr(node.args["expression"]))
        if _is_null(left) or _is_null(right):
            return Lit(None, BOOL)
        return e.call(node, fn, left, right)

    return rule


def _is_null(arg: Expr) -> bool:
    return isinstance(arg, Lit) and arg.dtype is None and arg.value is None


def _logic(fn: str) -> Rule:
    def rule(e: Exprs, node: exp.Expr) -> Expr:
        parts = [_as_condition(e, each, fn.upper()) for each in _flat(node, type(node))]
        found = parts[0]
        for each in parts[1:]:
            found = e.call(node, fn, found, each)
        return found

    return rule


def _flat(node: exp.Expr, kind: type[exp.Expr]) -> Iterator[exp.Expr]:
    """The operands of a chain such as a AND b AND c, without recursion."""
    waiting = [node]
    while waiting:
        each = waiting.pop()
        if isinstance(each, kind):
            waiting += [each.args["expression"], each.this]
        else:
            yield each


def _as_condition(e: Exprs, node: exp.Expr, where: str) -> Expr:
    found = e.expr(node)
    if _is_null(found):
        return Lit(None, BOOL)
    own = own_type_of(found)
    if own is None or own.kind is not Kind.BOOL:
        raise e.source.error(WrongType, f"{where} takes conditions, not {own!r}", node,
                             hint="compare it with something: >, =, IN (...)")
    return type_literal(found)


def _not(e: Exprs, node: exp.Expr) -> Expr:
    return e.call(node, "not", _as_condition(e, node.this, "NOT"))


def _arithmetic(e: Exprs, node: exp.Expr) -> Expr:
    """A chain such as a + b - c, from its innermost operand on: as long as it likes, since nothing recurses."""
    chain = [node]
    while type(inner := chain[-1].this) in _ARITHMETIC and id(inner) not in e.known and e.keys is None:
        chain.append(inner)
    found = e.expr(chain[-1].this)
    for each in reversed(chain):
        found = e.arithmetic(each, _ARITHMETIC[type(each)], found, e.expr(each.args["expression"]))
    return found


_ARITHMETIC: dict[type[exp.Expr], str] = {exp.Add: "add", exp.Sub: "sub", exp.Mul: "mul", exp.Div: "div"}


def _truncating(fn: str) -> Rule:
    return lambda e, node: e.truncating(node, fn, e.expr(node.this), e.expr(node.args["expression"]))


def _negative(e: Exprs, node: exp.Expr) -> Expr:
    arg = e.expr(node.this)
    if isinstance(arg, Lit) and isinstance(arg.value, timedelta):
        return Lit(-arg.value)
    if isinstance(arg, Lit) and isinstance(arg.value, Months):
        return Lit(Months(-arg.value.count, -arg.value.rest))
    return e.call(node, "neg", arg)


def _is(e: Exprs, node: exp.Expr) -> Expr:
    """IS NULL, IS TRUE and IS FALSE, which are never null."""
    right = node.args["expression"]
    arg = e.typed(node.this) if isinstance(right, exp.Null) else _as_condition(e, node.this, "IS")
    if isinstance(right, exp.Null):
        return e.call(node, "is_null", arg)
    if not isinstance(right, exp.Boolean):
        raise e.refused("IS takes NULL, TRUE or FALSE", node, "IS NOT DISTINCT FROM compares values")
    wanted = arg if right.this else e.call(node, "not", arg)
    return e.call(node, "fill_null", wanted, Lit(False))


def _distinct_from(is_equal: bool) -> Rule:
    def rule(e: Exprs, node: exp.Expr) -> Expr:
        left, right = e.meeting(node, e.expr(node.this), e.expr(node.args["expression"]))
        nulls = [Lit(True) if _is_null(arg) else e.call(node, "is_null", e.with_type(node, arg))
                 for arg in (left, right)]
        both = e.call(node, "and", *nulls)
        if _is_null(left) or _is_null(right):
            return both if is_equal else e.call(node, "not", both)
        same = e.call(node, "fill_null", e.call(node, "eq", left, right), Lit(False))
        found = e.call(node, "or", same, both)
        return found if is_equal else e.call(node, "not", found)

    return rule


def _between(e: Exprs, node: exp.Expr) -> Expr:
    value = e.expr(node.this)
    ends = []
    for fn, name in (("ge", "low"), ("le", "high")):
        arg, end = e.meeting(node, value, e.expr(node.args[name]))
        ends.append(Lit(None, BOOL) if _is_null(arg) or _is_null(end) else e.call(node, fn, arg, end))
    return e.call(node, "and", *ends)


def _in(e: Exprs, node: exp.Expr) -> Expr:
    if node.args.get("query") is not None:
        raise e.refused("a subquery cannot stand here", node, "put IN (SELECT ...) into WHERE")
    if isinstance(unwrapped(node.this), exp.Tuple):
        return _in_rows(e, node, unwrapped(node.this).expressions)
    listed = [e.expr(each) for each in node.expressions]
    arg = e.expr(node.this)
    met = e.meeting(node, arg, *listed)
    arg, listed = met[0], list(met[1:])
    if all(isinstance(each, Lit) for each in listed) and not isinstance(arg, Lit):
        values = tuple(each if each.dtype else each.value for each in listed  # type: ignore[union-attr]
                       if not _is_null(each))
        if not values:
            return Lit(None, BOOL)
        plain = e.with_type(node, arg)
        own = type_of(plain)
        try:
            call = Call("is_in", (plain,), (values, len(values) < len(listed)), at=e.source.at)
            return REGISTRY["is_in"].rule(call, (plain,))
        except Refused:
            if not own.is_float and not own.is_int and not own.is_decimal and own.kind not in TIMES:
                return e._checked(node, lambda: REGISTRY["is_in"].rule(call, (plain,)))
    tests = [Lit(None, BOOL) if _is_null(each) or _is_null(arg) else e.call(node, "eq", arg, each) for each in listed]
    found = tests[0]
    for test in tests[1:]:
        found = e.call(node, "or", found, test)
    return found


def _in_rows(e: Exprs, node: exp.Expr, values: list[exp.Expr]) -> Expr:
    """(a, b) IN ((1, 2), (3, 4))."""
    tests: list[Expr] = []
    for each in node.expressions:
        row = unwrapped(each)
        if not isinstance(row, exp.Tuple) or len(row.expressions) != len(values):
            raise e.refused(f"IN compares {len(values)} columns with something else", each,
                            "(a, b) IN ((1, 2), (3, 4))")
        same = [_compare("eq")(e, exp.EQ(this=a, expression=b)) for a, b in zip(values, row.expressions, strict=True)]
        found = same[0]
        for test in same[1:]:
            found = e.call(node, "and", found, test)
        tests.append(found)
    whole = tests[0]
    for test in tests[1:]:
        whole = e.call(node, "or", whole, test)
    return whole


def _case(e: Exprs, node: exp.Expr) -> Expr:
    """CASE; a chain in one call, so that all values meet in one type."""
    subject = node.this
    args: list[Expr] = []
    for branch in node.args["ifs"]:
        if subject is None:
            args.append(_as_condition(e, branch.this, "WHEN"))
        else:
            left, right = e.meeting(branch.this, e.expr(subject), e.expr(branch.this))
            is_unknown = _is_null(left) or _is_null(right)
            args.append(Lit(None, BOOL) if is_unknown else e.call(branch.this, "eq", left, right))
        args.append(e.expr(branch.args["true"]))
    last = node.args.get("default")
    args.append(Lit(None) if last is None else e.expr(last))
    return _chosen(e, node, args)


def _chosen(e: Exprs, node: exp.Expr, args: list[Expr]) -> Expr:
    values = e.meeting(node, *args[1::2], args[-1])
    if all(map(_is_null, values)):
        return Lit(None)
    conditions = args[:-1:2]
    return e.call(node, "if_else", *(each for pair in zip(conditions, values, strict=False) for each in pair),
                  values[-1])


def _if(e: Exprs, node: exp.Expr) -> Expr:
    last = node.args.get("false")
    return _chosen(e, node, [_as_condition(e, node.this, "IF"), e.expr(node.args["true"]),
                             Lit(None) if last is None else e.expr(last)])


def _coalesce(e: Exprs, node: exp.Expr) -> Expr:
    found = [each for each in (e.expr(arg) for arg in (node.this, *node.expressions)) if not _is_null(each)]
    if not found:
        return Lit(None)
    return e.call(node, "coalesce", *e.meeting(node, *found)) if len(found) > 1 else found[0]


def _nullif(e: Exprs, node: exp.Expr) -> Expr:
    value = e.expr(node.this)
    left, right = e.meeting(node, value, e.expr(node.args["expression"]))
    if _is_null(left) or _is_null(right):
        return value
    return e.call(node, "if_else", e.call(node, "eq", left, right), Lit(None),
                  e.with_type(node, value))


_TYPES = {
    "TINYINT": DType(Kind.I8), "SMALLINT": DType(Kind.I16), "INT": I32, "INTEGER": I32, "BIGINT": I64,
    "UTINYINT": DType(Kind.U8), "USMALLINT": DType(Kind.U16), "UINT": DType(Kind.U32), "UBIGINT": DType(Kind.U64),
    "FLOAT": F32, "DOUBLE": F64, "BOOLEAN": BOOL, "DATE": DATE, "TIME": DType(Kind.TIME, unit="us"),
    "VARCHAR": STR, "TEXT": STR, "CHAR": STR, "NCHAR": STR, "NVARCHAR": STR, "VARBINARY": DType(Kind.BIN),
    "BINARY": DType(Kind.BIN), "INTERVAL": DType(Kind.DUR, unit="us"),
    "TIMESTAMP_S": DType(Kind.TS, unit="s"), "TIMESTAMP_MS": DType(Kind.TS, unit="ms"),
    "TIMESTAMP_NS": DType(Kind.TS, unit="ns"),
}  # fmt: skip
_UNITS = {0: "s", 1: "ms", 2: "ms", 3: "ms", 4: "us", 5: "us", 6: "us", 7: "ns", 8: "ns", 9: "ns"}


def type_named(source: Text, node: exp.Expr, where: exp.Expr | None = None) -> DType:
    """The type that SQL names; `where` is what an error underlines."""
    kind = str(node.args.get("kind") or (node.this.name if hasattr(node.this, "name") else node.this)).upper()
    params = [int(each.name) for each in node.expressions if isinstance(each, exp.DataTypeParam)
              and each.name.isdigit()]
    if kind == "DECIMAL":
        precision, scale = (*params, *(18, 3)[len(params):]) if len(params) != 1 else (params[0], 0)
        if precision > MAX_PRECISION:
            raise source.error(BadSql, f"a decimal has {MAX_PRECISION} digits at most", node)
        return DType(Kind.DEC, precision=precision, scale=scale)
    if kind in ("TIMESTAMP", "TIMESTAMPNTZ", "DATETIME"):
        return DType(Kind.TS, unit=_UNITS.get(params[0], "us") if params else "us")
    if kind in ("TIMESTAMPTZ", "TIMESTAMPLTZ"):
        return DType(Kind.TS, unit=_UNITS.get(params[0], "us") if params else "us", tz="UTC")
    found = _TYPES.get(kind)
    if found is None:
        raise source.error(BadSql, f"there is no type {kind}", where or node, has=", ".join([*_TYPES, "DECIMAL(p, s)",
                                                                                  "TIMESTAMP(p)"]))
    return found


def _cast(e: Exprs, node: exp.Expr) -> Expr:
    target = type_named(e.source, node.args["to"], node)
    arg = e.expr(node.this)
    if _is_null(arg):
        return Lit(None, target)
    if isinstance(arg, Lit) and isinstance(arg.value, str) and target.kind in TIMES and target.kind is not Kind.DUR:
        try:
            found = e._read(node, arg, target)
        except WrongType:
            if isinstance(node, exp.TryCast):
                return Lit(None, target)
            raise
        if isinstance(found, Lit) and isinstance(found.value, datetime) and target.kind in (Kind.DATE, Kind.DATE64):
            return Lit(found.value.date())
        return found
    arg = e.with_type(node, arg)
    if isinstance(node, exp.TryCast):
        return e.tried(node, "cast", arg, dtype=target)
    return e.call(node, "cast", arg, dtype=target)


def _interval(e: Exprs, node: exp.Expr) -> Expr:
    """INTERVAL '10' SECOND, INTERVAL 3 DAY, INTERVAL '1 hour 30 minutes'."""
    unit, value = node.args.get("unit"), node.this
    if isinstance(unit, exp.IntervalSpan):
        return Lit(_of_clock(e, node, str(value.this), unit))
    if not isinstance(value, exp.Literal | exp.Neg | exp.Paren) and value is not None:
        length, _ = _length_of(e, node, "1", "" if unit is None else unit.name)
        return e.call(node, "mul", Lit(length), e.expr(value))
    text = str(e.constant(value)) if value is not None else ""
    parts = [(text, unit.name)] if isinstance(unit, exp.Expr) else re.findall(r"([+-]?[\d.]+)\s*([A-Za-z]+)", text)
    if not parts:
        raise e.refused("the interval has no unit", node, "INTERVAL '10' SECOND")
    total, months = timedelta(), 0
    for number, name in parts:
        length, more = _length_of(e, node, number, name)
        total, months = total + length, months + more
    return Lit(Months(months, total)) if months else Lit(total)


def _length_of(e: Exprs, node: exp.Expr, number: str, name: str) -> tuple[timedelta, int]:
    unit = name.upper()
    unit = _SHORT.get(unit, unit.removesuffix("S") if unit != "S" else "SECOND")
    try:
        count = Decimal(number.strip())
    except ArithmeticError:
        raise e.refused(f"the interval {number!r} is no number", node, "INTERVAL '10' SECOND") from None
    if unit in _MONTHS:
        return timedelta(), int(count * _MONTHS[unit])
    if unit not in _SPANS:
        raise e.refused(f"there is no unit {name!r} of intervals", node, ", ".join((*_SPANS, *_MONTHS)))
    return timedelta(microseconds=float(count) * _SPANS[unit]), 0


def _of_clock(e: Exprs, node: exp.Expr, text: str, unit: exp.Expr) -> timedelta:
    """INTERVAL '1:30' MINUTE TO SECOND."""
    names = ["DAY", "HOUR", "MINUTE", "SECOND"]
    first, last = unit.this.name.upper(), unit.args["expression"].name.upper()
    numbers = re.split(r"[ :]", text.strip())
    wanted = names[names.index(first) : names.index(last) + 1] if {first, last} <= set(names) else []
    if len(wanted) != len(numbers):
        raise e.refused(f"the interval {text!r} is not of the form {first} TO {last}", node, "INTERVAL '10' SECOND")
    return sum((_length_of(e, node, number, name)[0] for number, name in zip(numbers, wanted, strict=True)),
               timedelta())


def _column(e: Exprs, node: exp.Expr) -> Expr:
    assert isinstance(node, exp.Column)
    return e.column(node)


def _subquery(e: Exprs, node: exp.Expr) -> Expr:
    raise e.refused(f"a subquery cannot stand in {e.step} here", node, "join it, or compute it in WITH")


def _aggregate_here(e: Exprs, node: exp.Expr) -> Expr:
    raise e.refused(f"an aggregate cannot stand in {e.step}", node,
                    "conditions on aggregates go into HAVING" if e.step == "WHERE" else None)


def _over_here(e: Exprs, node: exp.Expr) -> Expr:
    raise e.refused(f"OVER cannot stand in {e.step}", node, "compute it in a subquery, or filter by QUALIFY")


def _dot(e: Exprs, node: exp.Expr) -> Expr:
    return e.call(node, "struct_field", e.typed(node.this), params=(node.args["expression"].name,))


def _concat(e: Exprs, node: exp.Expr) -> Expr:
    """`||`, which is null where either side is; what is no text is cast."""
    sides = [_as_text(e, node, e.expr(each)) for each in _flat(node, type(node))]
    found = sides[0]
    for each in sides[1:]:
        if _is_null(found) or _is_null(each):
            return Lit(None, STR)
        found = e.call(node, "concat", found, each)
    return found


def _as_text(e: Exprs, node: exp.Expr, arg: Expr) -> Expr:
    own = own_type_of(arg)
    if own is None or own.is_string:
        return arg
    return e.call(node, "cast", e.with_type(node, arg), dtype=STR)


def _like(e: Exprs, node: exp.Expr) -> Expr:
    from scalein.sql.calls import like

    return _negated(e, node, like(e, node, ignores_case=isinstance(node, exp.ILike)))


def _negated(e: Exprs, node: exp.Expr, found: Expr) -> Expr:
    return e.call(node, "not", found) if node.args.get("negate") else found


def _escape(e: Exprs, node: exp.Expr) -> Expr:
    from scalein.sql.calls import like

    found = like(e, node.this, isinstance(node.this, exp.ILike), str(e.constant(node.args["expression"])))
    return _negated(e, node.this, found)


def _bracket(e: Exprs, node: exp.Expr) -> Expr:
    """list[1] counts from 1, as in DuckDB; struct['field'] is a field."""
    arg, (inside,) = e.typed(node.this), node.expressions
    item = e.constant(inside)
    if isinstance(item, str):
        return e.call(node, "struct_field", arg, params=(item,))
    if not isinstance(item, int):
        raise e.refused("a list is indexed by a constant", node)
    offset = node.args.get("offset")  # what the parser has taken off already
    number = item if offset is not None or item < 0 else item - 1
    return e.call(node, "list_get", arg, params=(number,))


_RULES: dict[type[exp.Expr], Rule] = {
    exp.Column: _column,
    exp.Literal: _literal,
    exp.Null: lambda e, node: Lit(None),
    exp.Boolean: lambda e, node: Lit(bool(node.this)),
    exp.Paren: lambda e, node: e.expr(node.this),
    exp.Alias: lambda e, node: e.expr(node.this),
    exp.EQ: _compare("eq"), exp.NEQ: _compare("ne"), exp.LT: _compare("lt"), exp.LTE: _compare("le"),
    exp.GT: _compare("gt"), exp.GTE: _compare("ge"),
    exp.NullSafeEQ: _distinct_from(True), exp.NullSafeNEQ: _distinct_from(False),
    exp.And: _logic("and"), exp.Or: _logic("or"), exp.Not: _not,
    **dict.fromkeys(_ARITHMETIC, _arithmetic),
    exp.IntDiv: _truncating("floordiv"), exp.Mod: _truncating("mod"),
    exp.Neg: _negative, exp.Is: _is, exp.Between: _between, exp.In: _in, exp.Case: _case, exp.If: _if,
    exp.Coalesce: _coalesce, exp.Nullif: _nullif, exp.Cast: _cast, exp.TryCast: _cast, exp.Interval: _interval,
    exp.Subquery: _subquery, exp.Select: _subquery, exp.Exists: _subquery, exp.Window: _over_here, exp.Dot: _dot,
    exp.DPipe: _concat, exp.Like: _like, exp.ILike: _like, exp.Escape: _escape, exp.Bracket: _bracket,
    exp.Filter: _aggregate_here, exp.WithinGroup: _aggregate_here,
}  # fmt: skip
