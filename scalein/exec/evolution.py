"""Evolution: whose state a stateful op of a resumed flow takes over, and what has changed in it.

An epoch has a record of each state: the name of its op (`Flow.named`), its folder, and, of an aggregation, its
`Layout`: keys and window, and each aggregate with the columns that it is finished from. States find their ops by name,
then by order. Of an aggregation, keys and window must be the same; its aggregates are found by what they compute,
whatever their names and places.

An aggregate that was dropped is ignored. One that was added (`evolve=True`) begins empty: it counts the rows that
arrive from now on, also where its accumulators are there for others. So it gets columns of its own (`StateColumns`),
and may be null in a group that gets no more rows. Where rows are held instead of groups (`BufferedAggregate`), it is
computed from all rows that are held, if they have its columns.

State with other columns is migrated to a new folder (`state/migration.py`) before the first row arrives; the old folder
stays as long as an epoch names it.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path

from scalein.dtypes import Schema
from scalein.errors import BadArgument, SourceLoc, warn
from scalein.exec import fragments as cutting
from scalein.exec.aggregate_operator import ROW, aggregate_node
from scalein.exec.compatibility import HINT, signature
from scalein.exec.fragments import Fragment
from scalein.ir import ops
from scalein.ir.aggregates import AGGREGATES
from scalein.ir.exprs import Agg, Expr, NamedAgg, columns
from scalein.ir.partials import StateColumns, columns_of, empty_value, fits, has_parts, width
from scalein.ir.passes.loosen import loosen
from scalein.ir.passes.null_on_error import as_written
from scalein.ir.printer import show_agg, show_named
from scalein.ir.tables import Table
from scalein.layout import MAX_KEYS, MAX_VALUES
from scalein.state.migration import Migration
from scalein.storage.checked_json import Json, as_int, as_list, as_map, as_text

_FOLDERS = "state-*"
_NEW = 1 << 30  # in the place of a column's old number: it begins now


@dataclass(frozen=True)
class HeldAggregate:
    """An aggregate as a state has it."""

    text: str  # what it computes
    over: str  # the columns that it reads, with their types
    since: int  # the epoch after which it began; 0: with the state
    columns: tuple[int, ...]  # the groups of columns that it is finished from; none where rows are held


@dataclass(frozen=True)
class Layout:
    """What the state of an aggregation has."""

    by: str  # keys and window, with the types that they are over
    holds_rows: bool  # else partial groups
    held: tuple[str, ...]  # columns of rows, or groups of columns of partial groups, with their types
    aggs: tuple[HeldAggregate, ...]

    def to_json(self) -> Json:
        aggs: list[Json] = [{"agg": each.text, "over": each.over, "since": each.since, "columns": [*each.columns]}
                            for each in self.aggs]
        return {"by": self.by, "rows": self.holds_rows, "held": [*self.held], "aggs": aggs}

    @staticmethod
    def from_json(given: Json) -> Layout:
        about = as_map(given)
        aggs = (as_map(each) for each in as_list(about["aggs"]))
        return Layout(as_text(about["by"]), about["rows"] is True, tuple(map(as_text, as_list(about["held"]))), tuple(
            HeldAggregate(as_text(each["agg"]), as_text(each["over"]), as_int(each["since"]),
                          tuple(map(as_int, as_list(each["columns"])))) for each in aggs))


@dataclass(frozen=True)
class Resumed:
    """What an operator begins with."""

    state: Json  # of an epoch; None: nothing
    folder: int
    name: str = ""
    layout: Layout | None = None  # of an aggregation that an epoch will record
    holds_rows: bool = False  # an aggregation holds rows instead of partial groups
    columns: StateColumns | None = None  # of partial groups, where some began later than others
    migration: Migration | None = None

    @property
    def record(self) -> Json:
        """What an epoch says of it besides its content."""
        return {"name": self.name, "layout": None if self.layout is None else self.layout.to_json()}

NOTHING = Resumed(None, -1)


@dataclass(frozen=True)
class _Old:
    """A state in an epoch."""

    state: Json
    step: str
    name: str
    folder: int
    layout: Layout | None


def folder_name(number: int) -> str:
    return f"state-{number}"


def states_by_folder(epoch: dict[str, Json]) -> dict[int, Json]:
    """The states of an epoch by the numbers of their folders."""
    return dict(zip(_folders(epoch), as_list(epoch["states"]), strict=True))


def _folders(epoch: dict[str, Json]) -> list[int]:
    """The number of the folder of each state."""
    count = len(as_list(epoch["states"]))
    found = [as_int(each) for each in as_list(epoch.get("folders", [*range(count)]))]
    if len(found) != count or len(set(found)) != count:
        raise ValueError(f"{count} states in the folders {found}")
    return found


def remove_unnamed(folder: Path, named: Iterable[int]) -> None:
    """Remove state of earlier flows that no epoch names any more; what cannot be removed is left."""
    wanted = set(map(folder_name, named))
    for path in folder.glob(_FOLDERS):
        if path.name not in wanted:
            shutil.rmtree(path, ignore_errors=True)


def resume(roots: Sequence[ops.Op], epoch: dict[str, Json] | None, numbers: list[list[int]], folder: Path | None,
           emit: str, evolve: bool, at: SourceLoc) -> tuple[Sequence[ops.Op], list[Resumed]]:
    """What each fragment of a job begins with, and its flows, in which aggregates that began later may be null.

    `numbers` has the states of the epoch that each flow had; `folder` is that of the checkpoint, None without one: then
    nothing is recorded. Raises `BadArgument` with the difference if the state of the epoch does not fit.
    """
    edges = cutting.cut_together(roots, emit)
    path = cutting.fragments(edges)
    own = [_stateful(number, path, edges) for number in range(len(roots))]
    for each in own:
        _check_names([path[k] for k in each])
    if folder is None:
        return roots, _unrecorded(path, emit)
    found = {} if epoch is None else _matched_outputs(path, own, _old_states(epoch), numbers, evolve, at)
    taken = {old.folder for old in found.values()}
    resumed: list[Resumed] = []
    for number, fragment in enumerate(path):
        if fragment.state is None:
            resumed.append(NOTHING)
            continue
        old = found.get(number)
        fresh = next(each for each in count() if each not in taken and not (folder / folder_name(each)).exists())
        if not isinstance(fragment.state, ops.Aggregate):
            new = Resumed(None, fresh) if old is None else Resumed(old.state, old.folder)
        else:
            since = _begun(fragment, old, 0 if epoch is None else as_int(epoch["epoch"]), evolve, at)
            looser = {each.name for each in fragment.state.aggs
                      if since.get(each.name) and not each.agg.nullable and not AGGREGATES[each.agg.fn].never_null}
            if looser and not (old is not None and old.layout is not None and old.layout.holds_rows):
                roots = loosen(roots, partial(_nullable, fragment.state, looser))
                path[:] = cutting.fragments(cutting.cut_together(roots, emit))
                fragment = path[number]
            new = _aggregate(fragment, old, since, fresh, folder, _emit_of(fragment, emit), at)
        taken.add(new.folder)
        resumed.append(replace(new, name=_name(fragment)))
    return roots, resumed


def _stateful(output: int, path: list[Fragment], edges: list[cutting.SourceEdge]) -> list[int]:
    """The numbers of the fragments with state that an output depends on."""
    end = next(fragment for fragment in path if output in fragment.outputs)
    return [path.index(each) for each in cutting.upstream(end, edges) if each.state is not None]


def _name(fragment: Fragment) -> str:
    return str(getattr(fragment.state, "name", ""))


def _unrecorded(path: list[Fragment], emit: str) -> list[Resumed]:
    """What each fragment begins with, in a job without a checkpoint."""
    return [Resumed(None, number, holds_rows=isinstance(fragment.state, ops.Aggregate)
                    and _holds_rows(_table(fragment), None, _emit_of(fragment, emit)))
            for number, fragment in enumerate(path)]


def _emit_of(fragment: Fragment, emit: str) -> str:
    """Only the last aggregation emits changes."""
    return "final" if fragment.consumers else emit


# --- which state is whose


def _check_names(path: list[Fragment]) -> None:
    seen: set[str] = set()
    for fragment in path:
        if (name := _name(fragment)) in seen:
            raise BadArgument("two steps of a flow have the same name", at=fragment.op.at, found=repr(name))
        seen |= {name} - {""}


def _old_states(epoch: dict[str, Json]) -> list[_Old]:
    states, steps = as_list(epoch["states"]), [as_text(each) for each in as_list(epoch["steps"])]
    if len(states) != len(steps) or None in states:
        raise ValueError(f"{len(states)} states of {len(steps)} steps")
    records: list[Json] = [{"name": "", "layout": None} for _ in states]
    found = []
    # Manifests of earlier versions have no records.
    for state, step, folder, given in zip(states, steps, _folders(epoch), as_list(epoch.get("operators", records)),
                                          strict=True):
        record = as_map(given)
        layout = record["layout"]
        found.append(_Old(state, step, as_text(record["name"]), folder,
                          None if layout is None else Layout.from_json(layout)))
    return found


def _matched_outputs(path: list[Fragment], own: list[list[int]], olds: list[_Old], numbers: list[list[int]],
                     evolve: bool, at: SourceLoc) -> dict[int, _Old]:
    """The state of each fragment, by its number; outputs may share some."""
    found: dict[int, _Old] = {}
    for fragments, states in zip(own, numbers, strict=True):
        if any(not 0 <= number < len(olds) for number in states):
            raise ValueError(f"the states {states} of {len(olds)}")
        mine = _matched([path[k] for k in fragments], [olds[number] for number in states], evolve, at)
        for k, old in ((fragments[k], old) for k, old in mine.items()):
            if found.setdefault(k, old) is not old or sum(other is old for other in found.values()) > 1:
                raise BadArgument("outputs of this job share other steps than when the checkpoint was written", at=at,
                                  step=old.step, hint=HINT)
    return found


def _matched(path: list[Fragment], olds: list[_Old], evolve: bool, at: SourceLoc) -> dict[int, _Old]:
    """The state of each fragment with state of an output: by name, then by order."""
    named = {old.name: old for old in olds if old.name}
    found = {k: named[_name(fragment)] for k, fragment in enumerate(path) if _name(fragment) in named}
    rest = [old for old in olds if not old.name]
    left = [k for k in range(len(path)) if k not in found]
    if len(left) != len(rest):  # steps with a new name are new ones; else they have got their name now
        left = [k for k in left if not _name(path[k])]
    if len(left) != len(rest) and ((left and rest) or not found):
        raise _differs([old.step for old in olds], list(map(signature, path)), at,
                       f"{HINT}; steps with names (flow.named) may be added, dropped and moved")
    found |= dict(zip(left, rest, strict=False))
    for k, old in found.items():
        if not _fits(path[k], old):
            raise _differs([old.step], [signature(path[k])], at)
    dropped = [old.step for old in olds if not any(each is old for each in found.values())]
    added = [signature(fragment) for k, fragment in enumerate(path) if k not in found]
    if (dropped or added) and not evolve:
        raise _differs(dropped, added, at, "evolve=True goes on: steps that were added begin empty, and the state of "
                       "those that were dropped is ignored")
    return found


def _fits(fragment: Fragment, old: _Old) -> bool:
    if isinstance(fragment.state, ops.Aggregate) and old.layout is not None:
        return _by(fragment.state) == old.layout.by
    return signature(fragment) == old.step


def _differs(old: list[str], new: list[str], at: SourceLoc, hint: str = "") -> BadArgument:
    pairs = [(a, b) for a, b in zip(old, new, strict=False) if a != b]
    was, is_ = pairs[0] if pairs else ("\n".join(old[len(new):]), "\n".join(new[len(old):]))
    return BadArgument("this flow keeps other state than the one that wrote the checkpoint", at=at,
                       checkpoint=was or "nothing more", flow=is_ or "nothing more", hint=hint or HINT)


# --- aggregates


def _by(state: ops.Aggregate) -> str:
    """Keys and window of an aggregation."""
    written = as_written(state.with_inputs((cutting.placeholder(state.input.schema),)))
    assert isinstance(written, ops.Aggregate)
    by = [*map(show_named, written.keys), *([] if written.window is None else [str(written.window)])]
    exprs = [key.expr for key in state.keys] + ([] if state.window is None else [state.window.time])
    return f"{', '.join(by) or 'all'}  over {_over(state, exprs)!r}"


def _over(state: ops.Aggregate, exprs: Iterable[Expr]) -> Schema:
    """The columns that expressions read."""
    used = {name for expr in exprs for name in columns(expr)}
    return Schema(tuple(field for field in state.input.schema if field.name in used))


def _held(fragment: Fragment) -> dict[str, HeldAggregate]:
    """The aggregates that a fragment computes, by their names; those that no op downstream wants are left out."""
    state = fragment.state
    assert isinstance(state, ops.Aggregate)
    written = as_written(state.with_inputs((cutting.placeholder(state.input.schema),)))
    assert isinstance(written, ops.Aggregate)
    wanted = {output.name for output in _table(fragment).outputs}
    return {each.name: HeldAggregate(show_agg(each.agg), repr(_over(state, each.agg.args)), 0, ())
            for each in written.aggs if each.name in wanted}


def _table(fragment: Fragment) -> Table:
    return aggregate_node(fragment.program("whole", lambda: fragment.op)).table


def _begun(fragment: Fragment, old: _Old | None, epoch: int, evolve: bool, at: SourceLoc) -> dict[str, int]:
    """Since which epoch each aggregate has counted rows: 0 where it has counted all. Those that were added are refused,
    or reported where earlier rows are missing in them.
    """
    held = _held(fragment)
    if old is None or old.layout is None:
        return dict.fromkeys(held, 0)
    before = {each.text: each for each in old.layout.aggs}
    added = [name for name, each in held.items() if each.text not in before]
    for name, each in held.items():
        if name not in added and before[each.text].over != each.over:
            raise BadArgument("an aggregate has other types than in the checkpoint", at=at, found=each.text,
                              checkpoint=before[each.text].over, flow=each.over, hint=HINT)
    if added and not evolve:
        raise BadArgument("this flow has aggregates that its checkpoint does not have", at=at,
                          found=", ".join(dict.fromkeys(held[name].text for name in added)),
                          checkpoint=", ".join(dict.fromkeys(before)),
                          hint="evolve=True goes on: they begin empty, and the others continue; or give another "
                               "checkpoint directory")
    if added and not old.layout.holds_rows:
        warn("aggregates were added since the checkpoint was written, and count rows from now on: "
             f"{', '.join(dict.fromkeys(held[name].text for name in added))}", at)
    return {name: before[each.text].since if each.text in before else max(1, epoch) for name, each in held.items()}


def _nullable(state: ops.Aggregate, names: set[str], op: ops.Op) -> ops.Op:
    """The aggregation in which these may be null: a group may have no row since they began."""
    if not isinstance(op, ops.Aggregate) or (op.keys, op.window, op.aggs) != (state.keys, state.window, state.aggs):
        return op
    return replace(op, aggs=tuple(NamedAgg(each.name, replace(each.agg, nullable=True)) if each.name in names else each
                                  for each in op.aggs))  # fmt: skip


def _aggregate(fragment: Fragment, old: _Old | None, since: dict[str, int], fresh: int, folder: Path, emit: str,
               at: SourceLoc) -> Resumed:
    """What an aggregation begins with."""
    table, state = _table(fragment), fragment.state
    assert isinstance(state, ops.Aggregate)
    aggs = {name: replace(each, since=since[name]) for name, each in _held(fragment).items()}
    before = None if old is None else old.layout
    held = StateColumns.of(table)
    if before is not None and not before.holds_rows and fits(table):
        held, sources = _columns(table, aggs, before, at)
    else:
        sources = tuple(range(len(held.accs)))
    holds_rows = _holds_rows(table, held, emit)
    if before is not None:
        if holds_rows and not before.holds_rows:
            raise _needs_rows(state, table, at)
        holds_rows = before.holds_rows
    elif old is not None and has_parts(table):  # the first versions of format 1 held rows for these
        holds_rows = holds_rows or ROW not in as_map(old.state)
    if holds_rows:
        return _with_rows(fragment, old, tuple(aggs.values()), fresh, folder, at)
    layout = Layout(_by(state), False, tuple(_shown(table, held, group) for group in range(len(held.accs))), tuple(
        replace(aggs[output.name], columns=held.outputs[output.name]) for output in table.outputs))
    if old is None:
        return Resumed(None, fresh, layout=layout)
    columns = None if held == StateColumns.of(table) else held
    if before is None or (layout.held == before.held and sources == tuple(range(len(before.held)))):
        return Resumed(old.state, old.folder, layout=layout, columns=columns)
    names, empty = {}, {}
    for group, source in enumerate(sources):
        for column in columns_of(table, held, group):
            if source == _NEW:
                empty[column.name] = empty_value(table.accs[held.accs[group]], column)
            else:
                names[column.name] = column.name.replace(f"#acc{group}", f"#acc{source}", 1)
    return Resumed(old.state, fresh, layout=layout, columns=columns,
                   migration=Migration(folder / folder_name(old.folder), names, empty))


def _holds_rows(table: Table, held: StateColumns | None, emit: str) -> bool:
    """Whether a new aggregation holds rows: its aggregates are as large as its input, or too many for a store."""
    if table.needs_two_passes:
        return True
    is_narrow = len(table.keys) < MAX_KEYS and width(table, held) <= MAX_VALUES
    return not fits(table) or (not is_narrow and (table.window is None or emit == "changes"))


def _shown(table: Table, held: StateColumns, group: int) -> str:
    """The kind and the types of a group of columns."""
    found = columns_of(table, held, group)
    return f"{table.accs[held.accs[group]].kind.value}: {', '.join(repr(column.dtype) for column in found)}"


def _columns(table: Table, aggs: dict[str, HeldAggregate], before: Layout,
             at: SourceLoc) -> tuple[StateColumns, tuple[int, ...]]:
    """The groups of columns of a state, and which one of the earlier state each was; old ones come first."""
    taken: dict[int, tuple[int, ...]] = {}  # aggregate of the earlier state -> accumulators
    sources: dict[str, tuple[int, ...]] = {}
    for output in table.outputs:
        found = next((k for k, each in enumerate(before.aggs) if each.text == aggs[output.name].text
                      and taken.get(k, output.accs) == output.accs), None)  # fmt: skip
        if found is None:
            sources[output.name] = (_NEW,) * len(output.accs)
            continue
        taken[found], sources[output.name] = output.accs, before.aggs[found].columns
    groups = {(0, 0)} | {(source, acc) for output in table.outputs
                         for source, acc in zip(sources[output.name], output.accs, strict=True)}  # fmt: skip
    order = sorted(groups)
    numbers = {group: number for number, group in enumerate(order)}
    held = StateColumns(tuple(acc for _, acc in order), {output.name: tuple(
        numbers[group] for group in zip(sources[output.name], output.accs, strict=True)) for output in table.outputs})
    for number, (source, _) in enumerate(order):
        if source != _NEW and (now := _shown(table, held, number)) != before.held[source]:
            raise BadArgument("an aggregate has other types than in the checkpoint", at=at,
                              checkpoint=before.held[source], flow=now, hint=HINT)
    return held, tuple(source for source, _ in order)


# --- rows


def _with_rows(fragment: Fragment, old: _Old | None, aggs: tuple[HeldAggregate, ...], fresh: int, folder: Path,
               at: SourceLoc) -> Resumed:
    state = fragment.state
    assert isinstance(state, ops.Aggregate)
    used = state.state_reads()
    fields = Schema(tuple(field for field in fragment.before.schema if field.name in used)
                    or tuple(fragment.before.schema)[:1])
    layout = Layout(_by(state), True, tuple(repr(Schema((field,))) for field in fields), aggs)
    if old is None:
        return Resumed(None, fresh, layout=layout, holds_rows=True)
    if old.layout is None or old.layout.held == layout.held:
        return Resumed(old.state, old.folder, layout=layout, holds_rows=True)
    missing = [text for text in layout.held if text not in old.layout.held]
    if missing:
        raise BadArgument("this flow needs columns of rows that came before, and its checkpoint does not have them",
                          at=at, found=", ".join(missing), checkpoint=", ".join(old.layout.held), hint=HINT)
    return Resumed(old.state, fresh, layout=layout, holds_rows=True,
                   migration=Migration(folder / folder_name(old.folder), {}, {}))


def _needs_rows(state: ops.Aggregate, table: Table, at: SourceLoc) -> BadArgument:
    names = {output.name for output in table.outputs if not fits(replace(table, accs=tuple(
        table.accs[number] for number in output.accs)))}  # fmt: skip
    found: list[Agg] = [each.agg for each in state.aggs if each.name in names]
    return BadArgument("an aggregate that needs all rows of its group cannot be added to groups that hold none", at=at,
                       found=", ".join(map(show_agg, found)) or "more columns than a group can have", hint=HINT)
