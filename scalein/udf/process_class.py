"""Classes for `group_by(...).process(...)`, compiled: `on_row` and `on_timer` over typed fields.

Times are integers in the unit of the class: the finest of the event time and the columns of time that it reads. A time
minus a time is a duration; what Python's `datetime` and `timedelta` compute exactly is computed as they do, anything
else is refused. Yields of both methods are rows of one schema; the types of its columns are a fixed point over both.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import partial

import pyarrow as pa

from scalein.api.times import duration
from scalein.dtypes import BOOL, F64, I64, STR, UNITS_PER_SECOND, DType, Field, Kind, Schema, from_arrow_type
from scalein.errors import CannotCompile
from scalein.ir.accumulators import Slot
from scalein.ir.exprs import Lit
from scalein.ir.process import NEVER, TIMER, ProcessBody, PythonBody
from scalein.ir.udf import Apply, Assign, ForRange, Local, Part, RingAppend, RingRead, Variable, Yield
from scalein.layout import INLINE_BYTES
from scalein.udf.body import Block, Compiled
from scalein.udf.classes import (
    Fields,
    MethodBody,
    UserClass,
    annotated,
    compile_method,
    own_name,
    variables,
    with_fields,
)
from scalein.udf.conversions import NAMES, common, convert
from scalein.udf.exprs import Exprs
from scalein.udf.known import Known
from scalein.udf.python_source import Source

PLAIN = "@si.process(compile=False) runs it as plain Python, row by row"
_YIELDED = "yield "  # before the names of a row's columns among the types of locals
_OUTPUT_TYPES = "int, float, bool, str or a time, and None beside one of them"
_TIMER = f"self.{TIMER}"
_TIMES = (Kind.TS, Kind.DUR)
_EPOCH = datetime(1970, 1, 1)
_MICROSECONDS = 1_000_000


@dataclass(frozen=True, slots=True)
class Clock:
    """How a class sees times: their unit and zone, and the type of event times; None without a watermark."""

    unit: str
    tz: str
    event: DType | None

    @property
    def timestamp(self) -> DType:
        return DType(Kind.TS, unit=self.unit, tz=self.tz)

    @property
    def duration(self) -> DType:
        return DType(Kind.DUR, unit=self.unit)

    @property
    def types(self) -> dict[object, DType]:
        """Those of fields."""
        return {float: F64, int: I64, bool: BOOL, str: STR, datetime: self.timestamp, timedelta: self.duration}

    def units(self, value: timedelta) -> int | None:
        """A length in units of the class; None if it is no whole number of them."""
        units, rest = divmod(_microseconds(value) * UNITS_PER_SECOND[self.unit], _MICROSECONDS)
        return None if rest else units

    def constant(self, value: object) -> Lit | None:
        """A time of Python's as a constant; None for what is none, or does not fit."""
        if isinstance(value, datetime):
            naive = value if value.tzinfo is None else value.astimezone(UTC).replace(tzinfo=None)
            units, dtype = self.units(naive - _EPOCH), self.timestamp
        elif isinstance(value, timedelta):
            units, dtype = self.units(value), self.duration
        else:
            return None
        return None if units is None else Lit(units, dtype)


def _microseconds(value: timedelta) -> int:
    return (value.days * 86_400 + value.seconds) * _MICROSECONDS + value.microseconds


@dataclass
class _Yields:
    """The columns of the rows that a class yields, as found so far."""

    names: list[str] = field(default_factory=list)
    types: dict[str, Variable] = field(default_factory=dict)
    nullable: set[str] = field(default_factory=set)


class _NeedsValue(Exception):
    """A column is used where it cannot be None."""

    def __init__(self, name: str) -> None:
        self.name = name


class _Exprs(Exprs):
    """Expressions of a class: with times, and columns that are never None where they are used without a test."""

    def __init__(self, source: Source, names: set[str], clock: Clock, rings: Mapping[str, DType]) -> None:
        super().__init__(source, names)
        self.clock, self.rings = clock, rings

    def read(self, node: ast.expr, known: Known) -> Part:
        match node:
            case ast.Name(name) if name in self.rings:
                raise self.source.refuse(node, "a ring is not a value",
                                         "it has append, len, items, iteration, sum, min and max")
            case ast.Subscript(ast.Name(name), index) if name in self.rings and not isinstance(index, ast.Slice):
                return RingRead("item", name, (self.integer(index, known),), self.rings[name], node.lineno)
        return super().read(node, known)

    def value(self, node: ast.expr, known: Known) -> Part:
        part = self.read(node, known)
        if part.nullable and isinstance(part, Local) and part.name.startswith("row."):
            raise _NeedsValue(part.name)
        return super().value(node, known)

    def _captured(self, node: ast.expr) -> Part:
        value = self.source.outside(node)
        return self._time(node, value) if isinstance(value, datetime | timedelta) else super()._captured(node)

    def _time(self, node: ast.expr, value: object) -> Part:
        found = self.clock.constant(value)
        if found is None:
            raise self.source.refuse(node, f"{value!r} is no whole number of the class's units of time "
                                           f"({self.clock.unit})", "cast the columns of time to a finer unit")
        return found

    def _call(self, node: ast.Call, known: Known) -> Part:
        match node.func, node.args:
            case ast.Name(), [ast.Name(ring)] if ring in self.rings and not node.keywords:
                for function in (len, sum, min, max):
                    if self.source.outside(node.func) is function:
                        dtype = I64 if function is len else self.rings[ring]
                        return RingRead(function.__name__, ring, (), dtype, node.lineno)
        match node.func:
            case ast.Name(name) if name in self.names:
                pass
            case ast.Attribute(base, "total_seconds") if self.is_value(base) and not node.args and not node.keywords:
                part = self.value(base, known)
                if _kind(part) is Kind.DUR:
                    ticks = Lit(float(UNITS_PER_SECOND[self.clock.unit]), F64)
                    return Apply("div", (Apply("to_float", (part,), F64), ticks), F64)
            case ast.Attribute(base) if self.is_value(base):
                pass
            case called if self.source.outside(called) in (duration, timedelta):
                try:
                    given = [ast.literal_eval(arg) for arg in node.args]
                    named = {str(each.arg): ast.literal_eval(each.value) for each in node.keywords}
                    value = self.source.outside(called)(*given, **named)  # type: ignore[operator]
                except (ValueError, TypeError):
                    raise self.source.refuse(node, "a duration is made of constants here",
                                             'multiply one: n * si.duration("1s")') from None
                return self._time(node, value)
        return super()._call(node, known)

    def _unary(self, node: ast.expr, op: ast.unaryop, inner: ast.expr, known: Known) -> Part:
        if isinstance(op, ast.USub | ast.UAdd):
            part = self.value(inner, known)
            if _kind(part) is Kind.DUR:
                assert part.dtype is not None
                return part if isinstance(op, ast.UAdd) else Apply("neg", (part,), part.dtype, line=node.lineno)
        return super()._unary(node, op, inner, known)

    def as_text(self, node: ast.expr, part: Part) -> Part:
        if _kind(part) in _TIMES:
            raise self.source.refuse(node, "the text of a time is not compiled", "make it after process, with "
                                     ".dt.strftime")
        return super().as_text(node, part)

    def binary(self, node: ast.expr, op: ast.operator, left: Part, right: Part) -> Part:
        kinds = _kind(left), _kind(right)
        if not {Kind.TS, Kind.DUR} & {*kinds}:
            return super().binary(node, op, left, right)
        length, line = self.clock.duration, node.lineno
        match op, *kinds:
            case ast.Sub(), Kind.TS, Kind.TS:
                return Apply("sub", (left, right), length, line=line)
            case (ast.Add() | ast.Sub(), Kind.TS, Kind.DUR) | (ast.Add(), Kind.DUR, Kind.TS):
                return Apply("add" if isinstance(op, ast.Add) else "sub", (left, right), self.clock.timestamp,
                             line=line)
            case ast.Add() | ast.Sub() | ast.Mod(), Kind.DUR, Kind.DUR:
                name = {ast.Add: "add", ast.Sub: "sub", ast.Mod: "mod"}[type(op)]
                return Apply(name, (left, right), length, line=line)
            case ast.FloorDiv(), Kind.DUR, Kind.DUR:
                return Apply("floordiv", (left, right), I64, line=line)
            case ast.Div(), Kind.DUR, Kind.DUR:
                both = tuple(Apply("to_float", (part,), F64) for part in (left, right))
                return Apply("div", both, F64, line=line)
            case (ast.Mult() | ast.FloorDiv(), Kind.DUR, _) if right.dtype in (I64, BOOL):
                name = "mul" if isinstance(op, ast.Mult) else "floordiv"
                return Apply(name, (left, convert(right, I64)), length, line=line)
            case ast.Mult(), _, Kind.DUR if left.dtype in (I64, BOOL):
                return Apply("mul", (convert(left, I64), right), length, line=line)
        raise self.source.refuse(node, f"{NAMES[left.dtype]} and {NAMES[right.dtype]} have no such operator",
                                 "times are subtracted and compared, durations added, multiplied by ints and divided")

    def _test(self, node: ast.expr, op: ast.cmpop, left: Part, right: Part) -> Part:
        if {_kind(left), _kind(right)} & {*_TIMES} and left.dtype != right.dtype:
            raise self.source.refuse(node, f"{NAMES[left.dtype]} and {NAMES[right.dtype]} cannot be compared")
        return super()._test(node, op, left, right)


def _kind(part: Part) -> Kind | None:
    return None if part.dtype is None else part.dtype.kind


class _ProcessMethod(MethodBody):
    """The statements of a method that yields rows and sets the timer."""

    def __init__(self, source: Source, params: tuple[Variable, ...], clock: Clock, yields: _Yields,
                 rings: Mapping[str, DType]) -> None:
        self.clock, self.yields, self.rings = clock, yields, rings
        self.iterated: list[str] = []  # rings of loops around
        super().__init__(source, params)
        self.exprs.types.update(yields.types)

    def new_exprs(self, source: Source, names: set[str]) -> Exprs:
        return _Exprs(source, names, self.clock, self.rings)

    def infer(self) -> Block:
        found = super().infer()
        self.yields.types = {name: each for name, each in self.exprs.types.items() if name.startswith(_YIELDED)}
        return found

    def locals(self) -> list[Variable]:
        return [variable for variable in super().locals() if not variable.name.startswith(_YIELDED)]

    def statement(self, node: ast.stmt, known: Known) -> tuple[Block, Known | None]:
        match node:
            case ast.Expr(ast.Yield(ast.Dict(keys, values))):
                return (self._yield(node, keys, values, known),), known
            case ast.Expr(ast.Yield() | ast.YieldFrom()):
                raise self.source.refuse(node, "it yields something else than a row", 'write `yield {"name": value}`')
            case ast.Expr(ast.Call(ast.Attribute(ast.Name(name), "append"), [value], [])) if name in self.rings:
                return (self._append(node, name, value, known),), known
            case ast.For(ast.Name(target), ast.Name(name)) if name in self.rings:
                return self._for_ring(node, target, name, known)
            case ast.Assign([ast.Name(name)], value) if name == _TIMER:
                return (self._set_timer(node, value, known),), known
            case _:
                return super().statement(node, known)

    def _append(self, node: ast.stmt, name: str, value: ast.expr, known: Known) -> RingAppend:
        if name in self.iterated:
            raise self.source.refuse(node, "a ring does not change while a loop goes over it")
        part, dtype = self.exprs.number(value, known), self.rings[name]
        if common([part.dtype, dtype]) != dtype:
            raise self.source.refuse(value, f"the ring has {NAMES[dtype]} values, not {NAMES[part.dtype]}")
        return RingAppend(name, convert(part, dtype))

    def _for_ring(self, node: ast.For, target: str, name: str, known: Known) -> tuple[Block, Known | None]:
        """A loop over the values, from the oldest."""
        counter = self.exprs.new_local(I64)
        item = RingRead("item", name, (counter,), self.rings[name], node.lineno)

        def once(head: Known) -> Compiled[Block]:
            assignment, inside = self.assign(node, target, item, head)
            self.iterated.append(name)
            with self._loop(node) as around:
                body, end = self.block(node.body, inside)
            self.iterated.pop()
            return around, (*assignment, *body), head, end

        around, whole, head, _ = self._rounds(known, [node.target, *node.body], once)
        length = RingRead("len", name, (), I64, node.lineno)
        loop = ForRange(counter.name, Lit(0, I64), length, Lit(1, I64), whole, node.lineno)
        return self._after_loop(node, around, loop, head)

    def _set_timer(self, node: ast.stmt, value: ast.expr, known: Known) -> Assign:
        dtype = self.declared[_TIMER].dtype
        if isinstance(value, ast.Constant) and value.value is None:
            return Assign(_TIMER, Lit(NEVER, dtype))
        part = self.exprs.value(value, known)
        if part.dtype != dtype:
            raise self.source.refuse(value, f"set_timer takes a time, not {NAMES[part.dtype]}",
                                     'for example self.set_timer(row.time + si.duration("1m"))')
        return Assign(_TIMER, part)

    def assign(self, node: ast.stmt, name: str, part: Part, known: Known) -> tuple[Block, Known]:
        declared = self.declared.get(name)
        takes_none = declared is None or declared.nullable
        if not takes_none and isinstance(part, Local) and part.nullable and part.name.startswith("row."):
            raise _NeedsValue(part.name)
        return super().assign(node, name, part, known)

    def _yield(self, node: ast.stmt, keys: list[ast.expr | None], values: list[ast.expr], known: Known) -> Yield:
        names = [key.value for key in keys if isinstance(key, ast.Constant) and isinstance(key.value, str)]
        if len(names) < len(keys) or len(set(names)) < len(names) or not names:
            raise self.source.refuse(node, "the names of a row are constant texts, each once")
        if not self.yields.names:
            self.yields.names += names
        if set(names) != set(self.yields.names):
            raise self.source.refuse(node, "its rows have different names",
                                     f"the first has {', '.join(self.yields.names)}")
        given = dict(zip(names, values, strict=True))
        return Yield(tuple(self._output(node, name, self.exprs.read(given[name], known))
                           for name in self.yields.names))

    def _output(self, node: ast.stmt, name: str, part: Part) -> Part:
        """A value of a row; the column's type widens to hold it."""
        place = f"{_YIELDED}{name}"
        old = self.exprs.types.get(place)
        dtype = common([part.dtype, old.dtype if old else None])
        if part.nullable or part.dtype is None:
            self.yields.nullable.add(name)
        if dtype is None and part.dtype is None:  # another yield says of which type
            return part
        if dtype is None or dtype.is_nested:
            raise self.source.refuse(node, f"{name!r} has no type that holds all its values", _OUTPUT_TYPES)
        self.exprs.types[place] = Variable(place, dtype)
        return convert(part, dtype)


class _ProcessFields(Fields):
    """Fields of a class that may set a timer: `self.set_timer(t)` and `self.clear_timer()` assign to it."""

    def __init__(self, source: Source, objects: Mapping[str, tuple[str, tuple[str, ...]]], why_not: str) -> None:
        super().__init__(source, objects)
        self.why_not = why_not  # no timer can be set

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        match node.value:
            case ast.Call(ast.Attribute(ast.Name(me), "set_timer" | "clear_timer" as name), args, keywords) if (
                    self.objects.get(me, ("", ()))[0] == "self"):  # fmt: skip
                if self.why_not:
                    reason, _, hint = self.why_not.partition("; ")
                    raise self.source.refuse(node, reason, hint)
                if keywords or len(args) != (name == "set_timer"):
                    raise self.source.refuse(node, f"{name} takes {'one time' if name == 'set_timer' else 'nothing'}")
                value = self.visit(args[0]) if args else ast.Constant(None)
                made = ast.Assign([ast.Name(_TIMER, ast.Store())], value)
                return ast.fix_missing_locations(ast.copy_location(made, node))
        return self.generic_visit(node)


def compile_process(cls: type, schema: Schema, time: str = "", ttl: int = 0) -> ProcessBody:
    """A class with typed fields and the methods on_row and perhaps on_timer, over rows of a schema whose event time is
    the column `time`; raises `CannotCompile`.
    """
    user = UserClass(cls, "process", PLAIN)
    source = user.method("on_row", yields=True)
    on_timer = user.method("on_timer", yields=True) if "on_timer" in vars(cls) else None
    me, row = own_name(source, 2)
    read = [node.attr for each in source.tree.body for node in ast.walk(each)
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == row]
    columns = tuple(name for name in dict.fromkeys(read) if name in schema.names)
    clock = clock_of(schema, columns, time)
    fields = _fields(user, clock)
    names = tuple(slot.name for slot in fields)
    rings = {f"self.{slot.name}": slot.ring for slot in fields if slot.ring is not None}
    why_not = ""
    if on_timer is None:
        why_not = "it sets a timer, and has no method on_timer; write `def on_timer(self, at):`"
    elif clock.event is None:
        why_not = "a timer needs event time; .with_watermark(column, delay) before group_by gives the flow one"
    if clock.event is None:
        on_timer = None
    own = variables(fields, "self")
    if on_timer is not None:
        assert clock.event is not None
        own = (*own, Variable(_TIMER, clock.event))
    changing = (*fields, Slot(TIMER, I64, NEVER)) if on_timer is not None else fields
    source = with_fields(source, {me: ("self", names), row: ("row", tuple(schema.names))},
                         partial(_ProcessFields, why_not=why_not))
    at = ""
    if on_timer is not None:
        of_timer, at = own_name(on_timer, 2)
        on_timer = with_fields(on_timer, {of_timer: ("self", names)}, partial(_ProcessFields, why_not=why_not))
    types = {name: column_type(source, schema[name], clock) for name in columns}
    needed: set[str] = set()  # columns that cannot be None where they are used
    yields = _Yields()
    while True:
        before = dict(yields.types)
        params = tuple(Variable(f"row.{name}", types[name], schema[name].nullable and f"row.{name}" not in needed)
                       for name in columns)
        body = _ProcessMethod(source, (*own, *params), clock, yields, rings)
        try:
            compiled = compile_method(source, body.params, changing, body, makes_text=True)
        except _NeedsValue as found:
            needed.add(found.name)
            continue
        timed = None
        if on_timer is not None:
            assert clock.event is not None
            body = _ProcessMethod(on_timer, (*own, Variable(at, clock.event)), clock, yields, rings)
            timed = compile_method(on_timer, body.params, changing, body, makes_text=True)
        if yields.types == before:
            break
    if not yields.names:
        raise source.refuse(source.tree, "it yields no row", 'write `yield {"name": value}`')
    if ttl and schema[time].dtype.kind is Kind.TS:
        ttl *= UNITS_PER_SECOND[clock.unit] // UNITS_PER_SECOND[schema[time].dtype.unit]
    for name in yields.names:
        if f"{_YIELDED}{name}" not in yields.types:
            raise source.refuse(source.tree, f"{name!r} is None in all rows that it yields", _OUTPUT_TYPES)
    outputs = tuple(Field(name, yields.types[f"{_YIELDED}{name}"].dtype, name in yields.nullable)
                    for name in yields.names)
    return ProcessBody(cls.__name__, fields, columns, tuple(types.values()), outputs, compiled, timed, clock.event,
                       timed is not None, ttl)


def _fields(user: UserClass, clock: Clock) -> tuple[Slot, ...]:
    found = user.fields(clock.types, clock.constant)
    for slot in found:
        if slot.dtype == STR and len(str(slot.init or "").encode()) > INLINE_BYTES:
            raise user.refuse(f"the default of {slot.name!r} is longer than {INLINE_BYTES} bytes",
                              "take None as the default, and `self.name or default` where it is read", slot.init)
    return found


def clock_of(schema: Schema, columns: tuple[str, ...], time: str) -> Clock:
    """The unit of times in a class, for the columns that it reads and that of event time."""
    event = schema[time].dtype if time else None
    found = [dtype for dtype in (event, *(schema[name].dtype for name in columns))
             if dtype is not None and dtype.kind in _TIMES]
    unit = max((dtype.unit for dtype in found), key=lambda unit: UNITS_PER_SECOND[unit], default="us")
    tz = next((dtype.tz for dtype in found if dtype.kind is Kind.TS), "")
    if event is not None:
        event = DType(Kind.TS, unit=unit, tz=tz) if event.kind is Kind.TS else I64
    return Clock(unit, tz, event)


def column_type(source: Source, column: Field, clock: Clock) -> DType:
    """The type in which a method sees a column."""
    dtype = column.dtype
    if dtype.is_float:
        return F64
    if dtype.is_int and dtype.kind is not Kind.U64:
        return I64
    if dtype.kind in (Kind.BOOL, Kind.STR):
        return STR if dtype.is_string else dtype
    if dtype.kind is Kind.DUR:
        return clock.duration
    if dtype.kind is Kind.TS and bool(dtype.tz) == bool(clock.tz):
        return clock.timestamp
    raise source.refuse(source.tree, f"the column {column.name!r} is {dtype!r}",
                        "times with and without a zone do not go together: cast the column" if dtype.kind is Kind.TS
                        else "columns of ints, floats, bools, text, timestamps and durations are supported")


def python_process(cls: type, schema: Schema, outputs: Mapping[str, object] | None, time: str, ttl: int) -> ProcessBody:
    """A class that stays Python. Its fields have types all the same, and so have the rows that it yields."""
    user = UserClass(cls, "process", None)
    if "on_row" not in vars(cls):
        raise user.refuse("it has no method 'on_row'")
    names = tuple(schema.names)
    clock = clock_of(schema, names, time)
    fields = _fields(user, clock)
    if outputs is None:
        try:
            found = compile_process(cls, schema, time).outputs
        except CannotCompile as error:
            raise user.refuse("the types of the rows that it yields are not known", 'say them: '
                              '@si.process(compile=False, outputs={"price": float})', found=error.what) from None
    else:
        found = tuple(_output(user, name, kind, clock.types) for name, kind in outputs.items())
    if ttl and schema[time].dtype.kind is Kind.TS:
        ttl *= UNITS_PER_SECOND[clock.unit] // UNITS_PER_SECOND[schema[time].dtype.unit]
    has_timer = clock.event is not None and "on_timer" in vars(cls)
    seen = tuple(each.dtype for each in schema)
    return ProcessBody(cls.__name__, fields, names, seen, found, None, None, clock.event, has_timer, ttl,
                       PythonBody(cls))


def _output(user: UserClass, name: str, kind: object, types: Mapping[object, DType]) -> Field:
    if isinstance(kind, pa.DataType):
        return Field(name, from_arrow_type(kind, name))
    dtype, nullable = annotated(kind, types)
    if dtype is None:
        raise user.refuse(f"the output {name!r} has a type that is not supported", found=kind)
    return Field(name, dtype, nullable)
