"""GroupBy: keys and a window that wait for their aggregates."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from scalein.api import hints
from scalein.api.arguments import check_distinct, flat, row_outputs
from scalein.api.column import Column
from scalein.api.hints import Hinted
from scalein.api.windows import WindowSpec, resolve_window
from scalein.errors import BadArgument, BadName, WrongType, here
from scalein.ir.exprs import Agg, Named, NamedAgg, type_of
from scalein.ir.ops import Aggregate, Op, Window
from scalein.ir.resolve import Scope, resolve_agg
from scalein.ir.unify import nested_hint

if TYPE_CHECKING:
    from scalein.api.flow import Flow

MAX_KEYS = 64  # a record has one word of null bits
_WINDOW_COLUMNS = ["window_start", "window_end"]


class GroupBy(Hinted):
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

        An aggregate is called like its column (`count` for `si.count()`) unless it gets an alias or a keyword.

        >>> import pyarrow as pa, scalein as si
        >>> from scalein import col
        >>> sales = si.from_arrow(pa.table({"shop": ["a", "b", "a"], "price": [1.0, 2.0, 3.0]}))
        >>> sales.group_by("shop").agg(si.count(), total=col("price").sum()).columns
        ['shop', 'count', 'total']
        """
        scope = Scope(self._op.schema, "agg", here())
        given = [*((None, item) for item in flat(aggregates)), *named.items()]
        if not given:
            raise BadArgument("agg needs at least one aggregate", at=scope.at, hint="for example si.count()")
        grouped = bool(self._keys) or self._window is not None
        aggs = tuple(self._named(name, item, scope, grouped) for name, item in given)
        windowed = _WINDOW_COLUMNS if self._window is not None else []
        check_distinct([*(key.name for key in self._keys), *windowed, *(agg.name for agg in aggs)], scope)
        return self._wrap(Aggregate(self._op, self._keys, self._window, aggs, at=scope.at))

    @staticmethod
    def _named(name: str | None, item: object, scope: Scope, grouped: bool) -> NamedAgg:
        if not isinstance(item, Column) or not isinstance(item.node, Agg):
            raise BadArgument("agg takes aggregates only", at=scope.at, found=repr(item), hint=_how_to_write(item))
        agg = resolve_agg(item.node, scope, grouped=grouped)
        name = item.name if name is None else name
        if name is None:
            raise BadName("an aggregate has no name", at=scope.at, found=repr(item),
                          hint="name it with .alias(...), or give it as name=...")
        return NamedAgg(name, agg)


def _how_to_write(given: object) -> str:
    """A hint for what is no aggregate."""
    match given:
        case str():
            return f"for example col({given!r}).sum()"
        case dict() if given and all(isinstance(fn, str) and hasattr(Column, fn) for fn in given.values()):
            return f"write {', '.join(f'col({name!r}).{fn}()' for name, fn in given.items())}"
        case dict():
            return "unpack it: agg(**aggregates)"
        case list() | tuple() | set():
            return "unpack it: agg(*aggregates)"
        case _:
            return "for example col(...).sum(), .first() or si.count()"


def group(op: Op, keys: Iterable[object], named: Mapping[str, object], wrap: type[Flow]) -> GroupBy:
    """Keys and at most one window, resolved."""
    scope = Scope(op.schema, "group_by", here())
    keys = flat(keys)
    windows = [key for key in keys if isinstance(key, WindowSpec)]
    misnamed = next((name for name, key in named.items() if isinstance(key, WindowSpec)), None)
    if misnamed is not None:
        raise BadArgument("a window has no name: it adds window_start and window_end", at=scope.at,
                          found=f"{misnamed}={named[misnamed]!r}", hint="give it without a name")
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
