"""Jobs: what `Flow.start` takes, checked before anything runs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeGuard

from scalein.api.binding import bind
from scalein.connectors.base import BoundSource, Sink
from scalein.connectors.in_memory import Batches
from scalein.durations import Duration, seconds
from scalein.errors import BadArgument, SourceLoc, StoreFailed
from scalein.ir import ops
from scalein.ir.rewrite import rewrite, walk_ops
from scalein.options import Options

if TYPE_CHECKING:
    from scalein.jobs.job import Job

_METHODS = ("open", "write", "prepare", "commit", "close")
_JOBS_DISABLED = ContextVar("_JOBS_DISABLED", default=False)


@contextmanager
def jobs_disabled() -> Iterator[None]:
    """While a script is run for the flows in it, jobs do not start."""
    token = _JOBS_DISABLED.set(True)
    try:
        yield
    finally:
        _JOBS_DISABLED.reset(token)


def start(op: ops.Op, data: object, sink: object, checkpoint: object, savepoint: object, bootstrap: ops.Op | None,
          every: Duration, emit: str, late: object, on_error: object, rows_per_second: float | None, until: object,
          restarts: int, evolve: bool, options: Options, at: SourceLoc) -> Job:
    """The job of a flow, already running."""
    if _JOBS_DISABLED.get():
        raise BadArgument("the script starts a job, but is only looked at", at=at,
                          hint='put it under if __name__ == "__main__":')
    op = bind(op, data, at, "give it here: start(data, ...)")
    _check_joins(op)
    sinks = {"out": _sink(sink, "sink", at)}
    if emit not in ("final", "changes"):
        raise BadArgument("no such way to emit", at=at, found=repr(emit), has="'final', 'changes'")
    how_late = _place(late, "late", ("drop", "error"), at)
    if how_late == "sink":
        sinks["late"] = _sink(late, "late", at)
    how_wrong = _place(on_error, "on_error", ("raise", "null"), at)
    if how_wrong == "sink":
        sinks["failed"] = _sink(on_error, "on_error", at)
    if len({id(each) for each in sinks.values()}) < len(sinks):
        raise BadArgument("one sink cannot take two kinds of rows", at=at, hint="give each its own")
    if rows_per_second is not None and not rows_per_second > 0:
        raise BadArgument("max_rows_per_second must be a number above 0", at=at, found=repr(rows_per_second))
    if isinstance(restarts, bool) or not isinstance(restarts, int) or restarts < 0:
        raise BadArgument("restarts is how often a job may be started again: 0 or more", at=at, found=repr(restarts))
    if not isinstance(evolve, bool):
        raise BadArgument("evolve is True or False", at=at, found=repr(evolve))
    if until not in (None, "now"):
        raise BadArgument("until does not know this word", at=at, found=repr(until), has="'now'")
    op = op if until is None else _until_now(op, at)
    folder, point = _folder(checkpoint, "checkpoint", at), _folder(savepoint, "savepoint", at)
    if folder is not None:
        _check_replays(op, at)
    elif point is not None:
        raise BadArgument("a job that begins from a savepoint needs a checkpoint of its own", at=at,
                          hint='give checkpoint="another directory/" as well')
    if bootstrap is not None:
        _check_past(op, bootstrap, at)
    every_s = seconds(every, "argument every", at)
    from scalein.ir.passes.null_on_error import null_on_error
    from scalein.jobs.job import Job
    from scalein.jobs.spec import JobSpec

    op = null_on_error(op) if how_wrong == "null" else op
    return Job(JobSpec(op, options, sinks, folder, point, bootstrap, every_s, emit, how_late, how_wrong,
                       rows_per_second, until is not None, restarts, evolve, at))


def _sink(given: object, name: str, at: SourceLoc) -> Sink:
    missing = [method for method in _METHODS if not callable(getattr(given, method, None))]
    if missing:
        raise BadArgument(f"{name} takes a sink", at=at, found=repr(given),
                          hint='for example si.to_parquet("out/"), si.to_callback(print) or si.to_memory()')
    return given  # type: ignore[return-value]


def _place(given: object, name: str, words: tuple[str, ...], at: SourceLoc) -> str:
    """Where rows go that are no result: one of some words, or "sink"."""
    if isinstance(given, str):
        if given not in words:
            raise BadArgument(f"{name} does not know this word", at=at, found=repr(given),
                              has=", ".join(map(repr, words)) + ", or a sink")
        return given
    return "sink"


def _folder(given: object, name: str, at: SourceLoc) -> Path | None:
    if given is None:
        return None
    if not isinstance(given, str | os.PathLike) or not os.fspath(given):
        raise BadArgument(f"{name} takes a directory", at=at, found=repr(given))
    path = Path(given)
    try:
        if path.exists() and not path.is_dir():
            raise BadArgument(f"the {name} is no directory", at=at, file=path)
    except OSError as error:
        raise StoreFailed(f"the {name} cannot be used", at=at, file=path, found=error) from error
    return path


def _check_past(op: ops.Op, past: ops.Op, at: SourceLoc) -> None:
    """Rows of the past are what the one source of the flow would have given."""
    from scalein.exec.fragments import cut

    edges = cut(op)
    if len(edges) > 1:
        raise BadArgument("bootstrap takes the past of one source, and the flow has several", at=at,
                          found=", ".join(edge.source.name for edge in edges),
                          hint="make one flow of each, or start it from a savepoint")
    first = edges[0].source.arrow
    if [(f.name, f.type) for f in past.schema.arrow] != [(f.name, f.type) for f in first]:
        raise BadArgument("bootstrap gives other columns than the flow's source", at=at, found=repr(past.schema),
                          wanted=", ".join(f"{field.name}: {field.type}" for field in first))
    for source in walk_ops(past):
        if _is_endless(source):
            raise BadArgument("bootstrap takes a flow that ends", at=at, found=source.name)


def _check_joins(op: ops.Op) -> None:
    """A join begins when its right side has been read whole."""
    for join in walk_ops(op):
        for source in walk_ops(join.right) if isinstance(join, ops.Join) else ():
            if _is_endless(source):
                raise BadArgument("the right side of a join must be bounded: it is read whole before the first row",
                                  at=join.at, found=f"{source.name}, which never ends",
                                  hint="join with a table or files; the endless input goes to the left")


def _until_now(op: ops.Op, at: SourceLoc) -> ops.Op:
    """The flow whose endless sources end with what is there."""

    def ended(source: ops.Op) -> ops.Op | None:
        if not _is_endless(source) or source.data in found:
            return None
        assert isinstance(source.data, BoundSource)
        data = source.data.until_now()
        if data is None:
            raise BadArgument(f'until="now" cannot end the source {source.name!r}: it cannot say what is there now',
                              at=at, hint="follow files, or give the source a method until_now()")
        found.append(data)
        return replace(source, data=data)

    found: list[object] = []
    return rewrite(op, ended)


def _is_endless(op: ops.Op) -> TypeGuard[ops.Source]:
    return isinstance(op, ops.Source) and isinstance(op.data, BoundSource) and not op.data.bounded


def _check_replays(op: ops.Op, at: SourceLoc) -> None:
    """A source whose rows are gone once read cannot go on from a checkpoint."""
    for source in walk_ops(op):
        if isinstance(source, ops.Source) and not _replays(source.data):
            raise BadArgument(f"the source {source.name!r} can be read only once, so a checkpoint could not go on",
                              at=at, hint="read files, a table or a replayable source, or leave checkpoint away")


def _replays(data: object) -> bool:
    return data.replays if isinstance(data, BoundSource | Batches) else True
