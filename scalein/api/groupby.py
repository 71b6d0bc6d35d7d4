"""GroupBy: keys and a window that wait for their aggregates."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import count
from typing import TYPE_CHECKING

from scalein.api import hints
from scalein.api.arguments import check_distinct, flat, row_outputs
from scalein.api.column import Column
from scalein.api.hints import ForeignNames
from scalein.api.windows import WindowSpec, resolve_window
from scalein.errors import BadArgument, BadName, WrongType, here
from scalein.ir.exprs import Agg, AggregateResult, Col, Expr, Named, NamedAgg, type_of, walk
from scalein.ir.internal_names import internal
from scalein.ir.literals import hint_for_object
from scalein.ir.ops import Aggregate, Op, Project
from scalein.ir.resolve import Scope, column, resolve, resolve_agg
from scalein.ir.unify import nested_hint
from scalein.ir.windows import Window

if TYPE_CHECKING:
    from scalein.api.flow import Flow

MAX_KEYS = 64  # a record has one word of null bits
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

    def agg(self, *aggregates: Column, **named: Column) -> Flow:
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
        """
        scope = Scope(self._op.schema, "agg", here(self._op.at))
        given = [*((None, item) for item in flat(aggregates)), *named.items()]
        if not given:
            raise BadArgument("agg needs at least one aggregate", at=scope.at, hint="for example si.count()")
        items = [_named(name, item, scope) for name, item in given]
        fixed = [*(key.name for key in self._keys), *(_WINDOW_COLUMNS if self._window is not None else [])]
        check_distinct([*fixed, *(name for name, _ in items)], scope)
        results, aggs = self._aggregates(items, scope)
        aggregate = Aggregate(self._op, self._keys, self._window, aggs, at=scope.at)
        if all(isinstance(node, Agg) for _, node in items):
            return self._wrap(aggregate)
        over = Scope(aggregate.schema, "agg", scope.at, results)
        columns = [Named(name, column(name, over)) for name in fixed]
        columns += [Named(name, column(name, over) if isinstance(node, Agg) else resolve(node, over))
                    for name, node in items]
        return self._wrap(Project(aggregate, tuple(columns), at=scope.at))

    def _aggregates(self, items: list[tuple[str, Expr | Agg]],
                    scope: Scope) -> tuple[dict[Agg, str], tuple[NamedAgg, ...]]:
        """The aggregates in what the user gave, each once, and the columns that they are.

        One that has a name of its own is that column; the others get internal names.
        """
        grouped = bool(self._keys) or self._window is not None
        aggs = {name: resolve_agg(node, scope, grouped=grouped) for name, node in items if isinstance(node, Agg)}
        names = {agg: name for name, agg in reversed(aggs.items())}
        unused = (internal(f"agg{number}") for number in count())
        results: dict[Agg, str] = {}
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
    window = resolve_window(windows[0], scope) if windows else None
    if window is not None:
        check_distinct([*(key.name for key in resolved), *_WINDOW_COLUMNS], scope)
    return GroupBy(op, tuple(resolved), window, wrap)
