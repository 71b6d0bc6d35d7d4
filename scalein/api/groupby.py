"""GroupBy: keys and a window that wait for their aggregates."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import timedelta
from itertools import count
from typing import TYPE_CHECKING

from scalein.api import hints
from scalein.api.arguments import Order, check_distinct, first_rows, flat, row_outputs
from scalein.api.column import Column, as_expr, col
from scalein.api.functions import min_horizontal
from scalein.api.hints import ForeignNames
from scalein.api.windows import WindowSpec, resolve_window
from scalein.dtypes import BOOL, I64
from scalein.durations import Duration, in_units, span
from scalein.errors import BadArgument, BadDuration, BadName, ShortTraceback, SourceLoc, WrongType, here
from scalein.ir.exprs import Agg, AggregateResult, Call, Col, Expr, Lit, Named, NamedAgg, OverResult, type_of, walk
from scalein.ir.functions.arithmetic import plus
from scalein.ir.internal_names import internal
from scalein.ir.literals import hint_for_object
from scalein.ir.ops import Aggregate, AssignWindows, Filter, Op, Over, Process, Project
from scalein.ir.over import Frame, OverCall
from scalein.ir.physical import identity
from scalein.ir.resolve import Scope, column, resolve, resolve_agg
from scalein.ir.unify import cast_to, nested_hint
from scalein.ir.windows import Window, ttl_window

if TYPE_CHECKING:
    from scalein.api.flow import Flow
    from scalein.udf import ProcessClass

MAX_KEYS = 64  # a record has one word of null bits
ROW = internal("row")  # the number of a row of its key, for count windows
_WINDOW_COLUMNS = ["window_start", "window_end"]


class GroupBy(ForeignNames):
    """What `flow.group_by(...)` gives; `agg` makes a flow of it again."""

    __slots__ = ("_keys", "_op", "_window", "_wrap")
    _called, _elsewhere = "a GroupBy", hints.GROUP_BY

    def __init__(self, op: Op, keys: tuple[Named, ...], window: Window | None, wrap: type[Flow]) -> None:
        self._op = op
        self._keys = keys
        self._window = window
        self._wrap = wrap

    def __repr__(self) -> str:
        keys = [key.name for key in self._keys] + ["a window"] * (self._window is not None)
        return f"GroupBy({', '.join(keys)}); call .agg(...) on it"

    def agg(self, *aggregates: Column, ttl: Duration | Column | None = None, **named: Column) -> Flow:
        """One row a group: the keys, `window_start` and `window_end` if there is a window, then the aggregates.

        Aggregates combine with operators and functions, with constants and with the keys. One is called like its column
        (`count` for `si.count()`) unless it gets an alias or a keyword.

        >>> import pyarrow as pa, scalein as si
        >>> from scalein import col
        >>> sales = si.from_arrow(pa.table({"shop": ["a", "b", "a"], "price": [1.0, 2.0, 4.0]}))
        >>> sales.group_by("shop").agg(si.count(), total=col("price").sum()).columns
        ['shop', 'count', 'total']
        >>> spread = (col("price").max() - col("price").min()) / col("price").mean()
        >>> sales.group_by("shop").agg(spread=spread.round(2)).sort("shop").collect()["spread"].to_pylist()
        [1.2, 0.0]

        `ttl="7d"` forgets a group that had no row for so long, in the event time of `with_watermark`: its next row
        begins a new group. What is forgotten is final: in a job it comes then, and with `emit="changes"` a change comes
        when the watermark has passed its rows, which are in the order of event time.

        >>> logins = si.from_arrow({"user": ["a", "b", "a", "a"], "t": [0, 5, 9, 30]}).with_watermark("t", 2)
        >>> logins.group_by("user").agg(n=si.count(), ttl=20).sort("user", "n").collect().to_pydict()
        {'user': ['a', 'a', 'b'], 'n': [1, 2, 1]}
        """
        if isinstance(ttl, Column):  # an aggregate of this name
            named, ttl = {"ttl": ttl, **named}, None
        if ttl is not None:
            return self._forgetting(ttl, here(self._op.at)).agg(*aggregates, **named).drop(*_WINDOW_COLUMNS)
        scope = Scope(self._op.schema, "agg", here(self._op.at))
        given = [*((None, item) for item in flat(aggregates)), *named.items()]
        if not given:
            raise BadArgument("agg needs at least one aggregate", at=scope.at, hint="for example si.count()")
        items = [_named(name, item, scope) for name, item in given]
        fixed = [*(key.name for key in self._keys), *(_WINDOW_COLUMNS if self._window is not None else [])]
        check_distinct([*fixed, *(name for name, _ in items)], scope)
        results, aggs = self._aggregates(items, scope)
        aggregate = self._aggregate(aggs, scope)
        if all(isinstance(node, Agg) for _, node in items):
            return self._wrap(aggregate)
        over = Scope(aggregate.schema, "agg", scope.at, results)
        columns = [Named(name, column(name, over)) for name in fixed]
        columns += [Named(name, column(name, over) if isinstance(node, Agg) else resolve(node, over))
                    for name, node in items]
        return self._wrap(Project(aggregate, tuple(columns), at=scope.at))

    def _forgetting(self, ttl: Duration, at: SourceLoc) -> GroupBy:
        """Groups that end when they have been quiet: sessions."""
        if self._window is not None:
            raise BadArgument("ttl is for groups without a window", at=at, step="agg", found=f"ttl={ttl!r}",
                              hint="a window is forgotten when it closes")
        name, scope = _event_time(self._op, "agg", at), Scope(self._op.schema, "agg", at)
        check_distinct([*(key.name for key in self._keys), *_WINDOW_COLUMNS], scope)
        units = in_units(span(ttl, "ttl", at), self._op.schema[name].dtype, "ttl", name, at)
        if units < 2:
            raise BadDuration("ttl is too short", at=at, found=repr(ttl), hint=f"at least 2 units of {name}")
        return GroupBy(self._op, self._keys, ttl_window(column(name, scope), units), self._wrap)

    def process(self, cls: ProcessClass | type, *, ttl: str | timedelta | int | None = None) -> Flow:
        """The rows that a class yields, whose typed fields are what it remembers of each key.

        `on_row(self, row)` reads columns as `row.price`, changes fields, and may `yield {"name": value}` rows, which
        come out after the keys. With a watermark, rows of a key come in the order of event time, else in the source's.
        Fields are of type float, int, bool, str, `si.Timestamp` or `si.Duration`, or one of them with None. The class
        is compiled when it meets the columns of the flow; what cannot be compiled is refused with its line. A column
        that is null where the class needs a value is an error.

        With a watermark, `self.set_timer(time)` sets the timer of the key, in place of the one that was set, and
        `self.clear_timer()` clears it. `on_timer(self, at)` runs before the first row of the key that is at that time
        or later, or when the watermark has reached it; it may yield rows and set the timer again. At the end of the
        input timers up to the last row fire, and then each that is still set, once.

        `ttl="7d"` forgets a key that had neither a row nor a timer for so long: its next row finds the defaults. A key
        with a timer set is not forgotten.

        >>> import pyarrow as pa, scalein as si
        >>> @si.process
        ... class Spikes:
        ...     total: float = 0.0
        ...     n: int = 0
        ...
        ...     def on_row(self, row):
        ...         if self.n >= 2 and row.price > 2 * self.total / self.n:
        ...             yield {"price": row.price, "mean": self.total / self.n}
        ...         self.total += row.price
        ...         self.n += 1
        >>> sales = si.from_arrow(pa.table({"shop": ["a", "b", "a", "a"], "price": [1.0, 9.0, 2.0, 7.0]}))
        >>> sales.group_by("shop").process(Spikes).collect().to_pydict()
        {'shop': ['a'], 'price': [7.0], 'mean': [1.5]}
        >>> @si.process
        ... class Quiet:
        ...     since: si.Timestamp | None = None
        ...
        ...     def on_row(self, row):
        ...         self.since = row.t
        ...         self.set_timer(row.t + si.duration("10s"))
        ...
        ...     def on_timer(self, at):
        ...         yield {"since": self.since}
        >>> times = pa.array([0, 4000, 20000], pa.timestamp("ms"))
        >>> pings = si.from_arrow(pa.table({"k": [1, 1, 1], "t": times})).with_watermark("t", "1s")
        >>> pings.group_by("k").process(Quiet).collect()["since"].cast(pa.int64()).to_pylist()
        [4000, 20000]
        """
        from scalein.udf import ProcessClass, process

        at = here()
        if self._window is not None:
            raise BadArgument("process takes no window", at=at, hint="group by keys only; the class has timers")
        schema = self._op.schema
        time = self._op.event_time.column if ttl is None else _event_time(self._op, "process", at)
        scope = Scope(schema, "process", at)
        units = 0 if ttl is None else in_units(span(ttl, "ttl", at), schema[time].dtype, "ttl", time, at)
        with ShortTraceback():
            body = (cls if isinstance(cls, ProcessClass) else process(cls)).over(schema, time, units)
        check_distinct([*(key.name for key in self._keys), *(field.name for field in body.outputs)], scope)
        args = tuple(cast_to(column(name, scope), dtype) for name, dtype in zip(body.columns, body.types, strict=True))
        event = cast_to(column(time, scope), body.clock) if body.clock is not None and body.is_timed else None
        return self._wrap(Process(self._op, self._keys, args, body, time, event, at=at))

    def top_k(self, k: int, by: Order) -> Flow:
        """The `k` rows of each group with the greatest `by` (a column or a list of them), nulls last.

        They are the rows themselves, in no order, with `window_start` and `window_end` if there is a window, once for
        each of their windows, and with keys that are no columns. Ties are decided by the source's order. In a job rows
        of a window come when it closes.

        >>> import scalein as si
        >>> sales = si.from_arrow({"shop": ["a", "b", "a", "a"], "t": [1, 2, 3, 14], "price": [5, 4, 7, 1]})
        >>> sales.group_by("shop").top_k(1, by="price").collect().to_pydict()
        {'shop': ['b', 'a'], 't': [2, 3], 'price': [4, 7]}
        >>> dear = sales.group_by("shop", si.tumbling("t", 10)).top_k(1, "price")
        >>> dear.select("t", "window_end").collect().to_pydict()
        {'t': [2, 3, 14], 'window_end': [10, 10, 20]}
        """
        return self._first_rows(k, by, True, Scope(self._op.schema, "top_k", here(self._op.at)))

    def bottom_k(self, k: int, by: Order) -> Flow:
        """The `k` rows of each group with the least `by`, nulls last; otherwise like `top_k`.

        >>> import scalein as si
        >>> sales = si.from_arrow({"shop": ["a", "b", "a"], "price": [5, 4, None]})
        >>> sales.group_by("shop").bottom_k(1, by="price").collect().to_pydict()
        {'shop': ['a', 'b'], 'price': [5, 4]}
        """
        return self._first_rows(k, by, False, Scope(self._op.schema, "bottom_k", here(self._op.at)))

    def _first_rows(self, k: int, by: Order, descending: bool, scope: Scope) -> Flow:
        if self._counts_rows:
            raise BadArgument(f"{scope.step} takes windows of time", at=scope.at, found="a count window",
                              hint="number the rows: si.row_number().over(...) in with_columns")
        if self._window is not None and self._window.is_session:
            raise BadArgument(f"{scope.step} takes windows of time that are aligned: which session a row is in, later "
                              "rows decide", at=scope.at, found=str(self._window),
                              hint=f'group_by(..., si.tumbling(...)).{scope.step}(...); or the values of each session: '
                                   '.agg(best=col("x").top_k(10, by="x"))')
        order = first_rows(self._op, k, by, descending, scope)
        names = self._op.schema.names
        new = [key for key in self._keys if not (isinstance(key.expr, Col) and key.expr.name == key.name)]
        added = [*(key.name for key in new), *(_WINDOW_COLUMNS if self._window is not None else [])]
        check_distinct([*names, *added], scope, "name the key otherwise, or rename the column")
        op: Op = self._op
        if new:
            op = Project(op, (*identity(op.schema), *new), at=scope.at)
        keys = [column(key.name, Scope(op.schema, scope.step, scope.at)) for key in self._keys]
        if self._window is not None:
            op = AssignWindows(op, self._window, at=scope.at)
            keys += [column(name, Scope(op.schema, scope.step, scope.at)) for name in _WINDOW_COLUMNS]
        place = OverCall(internal("over0"), Agg("row_number", (), I64, False, at=scope.at), Frame())
        limit = op.event_time.limit_among(keys)
        time = "window_end" if self._window is not None else "" if limit is None else limit.name
        over = Over(op, tuple(keys), order.by, (place,), nulls_last=True, time=time, at=scope.at)
        among = Call("le", (Col(place.name, I64, False), Lit(k, I64)), dtype=BOOL, nullable=False, at=scope.at)
        shown = [item for item in identity(over.schema) if item.name in {*names, *added}]
        return self._wrap(Project(Filter(over, among, at=scope.at), tuple(shown), at=scope.at))

    @property
    def _counts_rows(self) -> bool:
        """Whether the window is one of rows, by number."""
        return self._window is not None and isinstance(self._window.time, Col) and self._window.time.name == ROW

    def _aggregate(self, aggs: tuple[NamedAgg, ...], scope: Scope) -> Op:
        """The aggregation. Count windows begin at a row; one that is not full ends after its last row."""
        if not self._counts_rows:
            return Aggregate(self._op, self._keys, self._window, aggs, at=scope.at)
        last = NamedAgg(internal("last"), Agg("max", (Col(ROW, I64, False),), I64, False, at=scope.at))
        found: Op = Aggregate(self._op, self._keys, self._window, (*aggs, last), at=scope.at)
        columns = {item.name: item.expr for item in identity(found.schema)}
        is_there = Call("ge", (columns["window_start"], Lit(0, I64)), dtype=BOOL, nullable=False, at=scope.at)
        end = min_horizontal(col("window_end"), Column(columns.pop(last.name)) + 1)
        columns["window_end"] = resolve(as_expr(end, scope.at), Scope(found.schema, scope.step, scope.at))
        items = tuple(Named(*each) for each in columns.items())
        return Project(Filter(found, is_there, at=scope.at), items, at=scope.at)

    def _aggregates(self, items: list[tuple[str, Expr | Agg]],
                    scope: Scope) -> tuple[Mapping[Agg | OverResult, str], tuple[NamedAgg, ...]]:
        """The aggregates in what the user gave, each once, and the columns that they are.

        One that has a name of its own is that column; the others get internal names.
        """
        grouped = bool(self._keys) or self._window is not None
        aggs = {name: resolve_agg(node, scope, grouped=grouped) for name, node in items if isinstance(node, Agg)}
        names = {agg: name for name, agg in reversed(aggs.items())}
        unused = (internal(f"agg{number}") for number in count())
        results: dict[Agg | OverResult, str] = {}
        for part in (part for _, node in items if not isinstance(node, Agg) for part in walk(node)):
            if isinstance(part, AggregateResult):
                agg = resolve_agg(part.agg, scope, grouped=grouped)
                if agg not in names:
                    names[agg] = next(unused)
                    aggs[names[agg]] = agg
                results[part.agg] = names[agg]
            elif isinstance(part, Col):
                self._check_key(part.name, scope)
        return results, tuple(NamedAgg(name, agg) for name, agg in aggs.items())

    def _check_key(self, name: str, scope: Scope) -> None:
        """Of a group, an expression can take keys and aggregates only."""
        keys = [key.name for key in self._keys]
        if name in keys or (self._window is not None and name in _WINDOW_COLUMNS):
            return
        column(name, scope)
        raise BadArgument(f"{name!r} is neither a key nor in an aggregate", at=scope.at, keys=", ".join(keys) or "none",
                          hint=f"a group has many values of it: write col({name!r}).sum(), .max() or .first()")


def _event_time(op: Op, step: str, at: SourceLoc) -> str:
    """The column of event time, by which keys are forgotten."""
    time = op.event_time.column
    if not time:
        raise BadArgument("ttl is in event time, and the flow has none", at=at, step=step,
                          hint="with_watermark(column, delay) before group_by")
    return time


def _named(name: str | None, item: object, scope: Scope) -> tuple[str, Expr | Agg]:
    """What the user gave, with its name: an aggregate, or an expression of aggregates."""
    is_one = isinstance(item, Column) and (isinstance(item.node, Agg) or any(
        isinstance(node, AggregateResult) for node in walk(item.node)))
    if not isinstance(item, Column) or not is_one:
        raise BadArgument("agg takes aggregates only", at=scope.at, found=repr(item), hint=_how_to_write(item))
    name = item.name if name is None else name
    if name is None:
        raise BadName("an aggregate has no name", at=scope.at, found=repr(item),
                      hint="name it with .alias(...), or give it as name=...")
    return name, item.node


def _how_to_write(given: object) -> str:
    """A hint for what is no aggregate."""
    match given:
        case str():
            return f"for example col({given!r}).sum()"
        case dict() if given and all(isinstance(fn, str) and hasattr(Column, fn) for fn in given.values()):
            return f"write {', '.join(f'col({name!r}).{fn}()' for name, fn in given.items())}"
        case (str() as name, str() as fn) if hasattr(Column, fn):
            return f"write col({name!r}).{fn}()"
        case dict():
            return "unpack it: agg(**aggregates)"
        case list() | tuple() | set():
            return "unpack it: agg(*aggregates)"
        case Column():
            return "for example col(...).sum(), .first() or si.count()"
        case _:
            return hint_for_object(given) or "write it with scalein's col: col(...).sum(), .first() or si.count()"


def group(op: Op, keys: Iterable[object], named: Mapping[str, object], wrap: type[Flow]) -> GroupBy:
    """Keys and at most one window, resolved."""
    scope = Scope(op.schema, "group_by", here())
    keys = flat(keys)
    windows = [key for key in keys if isinstance(key, WindowSpec)]
    misnamed = next((name for name, key in named.items() if isinstance(key, WindowSpec)), None)
    if misnamed is not None:
        raise BadArgument("a window has no name: it adds window_start and window_end", at=scope.at,
                          found=f"{misnamed}={named[misnamed]!r}", hint="give it without a name")
    option = next((name for name, key in named.items() if name in hints.NO_KEYS and isinstance(key, bool)), None)
    if option is not None:
        raise BadArgument(f"group_by has no option {option!r}", at=scope.at, hint=hints.NO_KEYS[option])
    if len(windows) > 1:
        raise BadArgument("group_by takes one window", at=scope.at, found=", ".join(map(repr, windows)),
                          hint="aggregate over one, then group the result by the other")
    resolved = row_outputs([key for key in keys if not isinstance(key, WindowSpec)], named, scope)
    nested = next((key for key in resolved if type_of(key.expr).is_nested), None)
    if nested is not None:
        raise WrongType(f"group_by takes no nested keys, but {nested.name!r} is {type_of(nested.expr)!r}", at=scope.at,
                        hint=nested_hint(type_of(nested.expr)))
    if len(resolved) > MAX_KEYS:
        raise BadArgument(f"group_by takes at most {MAX_KEYS} keys", at=scope.at, found=str(len(resolved)))
    window: Window | None = None
    if windows and windows[0].kind == "count":
        number = OverCall(internal("over0"), Agg("row_number", (), I64, False, at=scope.at), Frame())
        over = Over(op, tuple(key.expr for key in resolved), (), (number,), at=scope.at)
        row = Named(ROW, plus(Col(number.name, I64, False), -1))
        op = Project(over, (*identity(op.schema), row), at=scope.at)
        window = Window(Col(ROW, I64, False), windows[0].size.length, windows[0].every.length)
    elif windows:
        window = resolve_window(windows[0], scope)
    if window is not None:
        check_distinct([*(key.name for key in resolved), *_WINDOW_COLUMNS], scope)
    return GroupBy(op, tuple(resolved), window, wrap)
