"""Jobs: what `Flow.start` and `si.start` take, checked before anything runs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, TypeGuard

from scalein.api.binding import bind
from scalein.connectors.base import BoundSource, Sink
from scalein.connectors.in_memory import Batches
from scalein.durations import Duration, seconds
from scalein.errors import BadArgument, SourceLoc, StoreFailed, here, type_name
from scalein.ir import ops
from scalein.ir.ops.join import as_written
from scalein.ir.rewrite import rewrite, walk_ops
from scalein.options import Options

if TYPE_CHECKING:
    from scalein.jobs.job import Job
    from scalein.storage.object_store import Location

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


class FlowOutput:
    """A flow and the sink that its results go to: `flow.to(sink)`, for `si.start`."""

    def __init__(self, op: ops.Op, sink: Sink, at: SourceLoc) -> None:
        self.op, self.sink, self.at = op, sink, at

    def __repr__(self) -> str:
        return f"FlowOutput({type(self.sink).__name__})"

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("_"):
            raise AttributeError(name)
        raise BadArgument(f"{name} is a method of the flow, and this is a flow with its sink", at=here(self.at),
                          hint=f"si.start(flow.to(sink), ...) runs it; {name} comes before to(sink)")


def flow_output(op: ops.Op, sink: object, at: SourceLoc) -> FlowOutput:
    """What `flow.to(sink)` gives."""
    return FlowOutput(op, _sink(sink, "to", at), at)


def start(*outputs: FlowOutput, checkpoint: object = None, every: Duration = "1s", emit: str = "final",
          late: object = "drop", on_error: object = "raise", workers: int | None = None,
          memory: str | int | None = None, max_rows_per_second: float | None = None, savepoint: object = None,
          until: str | None = None, restarts: int = 0, evolve: bool = False) -> Job:
    """Run several flows as one job, each with its sink: `si.start(views.to(x), alerts.to(y), checkpoint="ckpt/")`.

    What the flows have in common is computed once: a source that several begin with is read once (once for each
    watermark, if theirs differ), and steps that they share run once. A checkpoint covers all of them: after a crash no
    output has lost a row or has one twice, and none is ahead of the others. The other arguments are those of
    `Flow.start`, and are for all outputs; a row that is too late, or fails, in several outputs comes once for each.

    Started again with the same checkpoint, an output is recognised by the path of its sink, or else by its flow: they
    may change places, and one may be left out, which drops its state. A new one is refused.

    >>> import pyarrow as pa, scalein as si
    >>> from scalein import col
    >>> orders = si.from_arrow(pa.table({"shop": ["a", "b", "a"], "price": [5, 70, 8]}))
    >>> totals, large = si.to_memory(), si.to_memory()
    >>> job = si.start(orders.group_by("shop").agg(total=col("price").sum()).to(totals),
    ...                orders.filter(col("price") > 50).to(large))
    >>> job.wait()
    True
    >>> totals.table().sort_by("shop").to_pydict(), large.table().to_pydict()
    ({'shop': ['a', 'b'], 'total': [13, 70]}, {'shop': ['b'], 'price': [70]})
    """
    at = here()
    if not outputs:
        raise BadArgument("start takes flows, each with its sink", at=at, hint="si.start(flow.to(sink), ...)")
    for output in outputs:
        if not isinstance(output, FlowOutput):
            raise BadArgument("start takes flows, each with its sink", at=at, found=type_name(output),
                              hint="give the flow a sink: flow.to(si.to_parquet(\"out/\"))")
    bound = [FlowOutput(bind(output.op, None, output.at, "begin it with from_arrow"), output.sink, output.at)
             for output in outputs]
    return _start(bound, checkpoint, savepoint, None, every, emit, late, on_error, max_rows_per_second, until, restarts,
                  evolve, Options.make(workers=workers, memory=memory, at=at), at)


def start_one(op: ops.Op, data: object, sink: object, checkpoint: object, savepoint: object, bootstrap: ops.Op | None,
              every: Duration, emit: str, late: object, on_error: object, rows_per_second: float | None, until: object,
              restarts: int, evolve: bool, options: Options, at: SourceLoc) -> Job:
    """The job of a flow, already running."""
    op = bind(op, data, at, "give it here: start(data, ...)")
    return _start([FlowOutput(op, _sink(sink, "sink", at), at)], checkpoint, savepoint, bootstrap, every, emit, late,
                  on_error, rows_per_second, until, restarts, evolve, options, at)


def _start(outputs: list[FlowOutput], checkpoint: object, savepoint: object, bootstrap: ops.Op | None, every: Duration,
           emit: str, late: object, on_error: object, rows_per_second: float | None, until: object, restarts: int,
           evolve: bool, options: Options, at: SourceLoc) -> Job:
    if _JOBS_DISABLED.get():
        raise BadArgument("the script starts a job, but is only looked at", at=at,
                          hint='put it under if __name__ == "__main__":')
    outputs = [FlowOutput(as_written(output.op), output.sink, output.at) for output in outputs]
    bootstrap = None if bootstrap is None else as_written(bootstrap)
    roots = [output.op for output in outputs]
    for root in roots:
        _check_joins(root)
    sinks: dict[str, Sink] = {}
    if emit not in ("final", "changes"):
        raise BadArgument("no such way to emit", at=at, found=repr(emit), has="'final', 'changes'")
    how_late = _place(late, "late", ("drop", "error"), at)
    if how_late == "sink":
        sinks["late"] = _sink(late, "late", at)
    how_wrong = _place(on_error, "on_error", ("raise", "null"), at)
    if how_wrong == "sink":
        sinks["failed"] = _sink(on_error, "on_error", at)
    _check_different([output.sink for output in outputs], list(sinks.values()), at)
    if rows_per_second is not None and not rows_per_second > 0:
        raise BadArgument("max_rows_per_second must be a number above 0", at=at, found=repr(rows_per_second))
    if isinstance(restarts, bool) or not isinstance(restarts, int) or restarts < 0:
        raise BadArgument("restarts is how often a job may be started again: 0 or more", at=at, found=repr(restarts))
    if not isinstance(evolve, bool):
        raise BadArgument("evolve is True or False", at=at, found=repr(evolve))
    if until not in (None, "now"):
        raise BadArgument("until does not know this word", at=at, found=repr(until), has="'now'")
    roots = roots if until is None else _until_now(roots, at)
    folder, point = _place_of(checkpoint, "checkpoint", at), _place_of(savepoint, "savepoint", at)
    if folder is not None:
        for root in roots:
            _check_replays(root, at)
    elif point is not None:
        raise BadArgument("a job that begins from a savepoint needs a checkpoint of its own", at=at,
                          hint='give checkpoint="another directory/" as well')
    if bootstrap is not None:
        _check_past(roots[0], bootstrap, at)
    every_s = seconds(every, "argument every", at)
    from scalein.ir.passes.null_on_error import null_on_errors
    from scalein.jobs.job import Job
    from scalein.jobs.spec import JobOutput, JobSpec

    roots = null_on_errors(roots) if how_wrong == "null" else roots
    found = tuple(JobOutput(root, output.sink, output.at) for root, output in zip(roots, outputs, strict=True))
    return Job(JobSpec(found, options, sinks, folder, point, bootstrap, every_s, emit, how_late, how_wrong,
                       rows_per_second, until is not None, restarts, evolve, at))


def _sink(given: object, name: str, at: SourceLoc) -> Sink:
    missing = [method for method in _METHODS if not callable(getattr(given, method, None))]
    if missing:
        raise BadArgument(f"{name} takes a sink", at=at, found=repr(given),
                          hint='for example si.to_parquet("out/"), si.to_callback(print) or si.to_memory()')
    return given  # type: ignore[return-value]


def _check_different(outputs: list[Sink], others: list[Sink], at: SourceLoc) -> None:
    """Each kind of rows has a sink, and each output a path, of its own."""
    if len({id(each) for each in (*outputs, *others)}) < len(outputs) + len(others):
        raise BadArgument("one sink cannot take two kinds of rows", at=at, hint="give each its own")
    paths = [_resolved(path) for sink in outputs if isinstance(path := getattr(sink, "path", None), str)]
    twice = next((path for path in paths if paths.count(path) > 1), None)
    if twice is not None:
        raise BadArgument("two outputs of a job write to the same path", at=at, found=twice, hint="give each its own")


def _resolved(path: str) -> str:
    """The path without links; one that cannot be a path stays as it is: its sink says what is wrong with it."""
    try:
        return os.path.realpath(path)
    except (OSError, ValueError):
        return path


def _place(given: object, name: str, words: tuple[str, ...], at: SourceLoc) -> str:
    """Where rows go that are no result: one of some words, or "sink"."""
    if isinstance(given, str):
        if given not in words:
            raise BadArgument(f"{name} does not know this word", at=at, found=repr(given),
                              has=", ".join(map(repr, words)) + ", or a sink")
        return given
    return "sink"


def _place_of(given: object, name: str, at: SourceLoc) -> Path | Location | None:
    """A folder of the local file system, or the address of another one."""
    if given is None or isinstance(given, os.PathLike) or (isinstance(given, str) and "://" not in given):
        return _folder(given, name, at)
    from scalein.storage.object_store import Location, parse_location  # pyarrow.fs, which few jobs need

    found = given if isinstance(given, Location) else parse_location(given, at)
    return Path(found.base) if found.is_local else found


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
                                  hint='join with a table or files, the endless input on the left; or join streams: '
                                       'within=si.tumbling("t", "10s"), between=("-5s", "5s"), or keep="1h" or '
                                       '"forever", which says how long rows wait')


def _until_now(roots: list[ops.Op], at: SourceLoc) -> list[ops.Op]:
    """The flows whose endless sources end with what is there; one that several read ends for all at the same row."""

    def ended(source: ops.Op) -> ops.Op | None:
        if not _is_endless(source) or source.data in found.values():
            return None
        assert isinstance(source.data, BoundSource)
        if source.data not in found:
            data = source.data.until_now()
            if data is None:
                raise BadArgument(f'until="now" cannot end the source {source.name!r}: it cannot say what is there now',
                                  at=at, hint="follow files, or give the source a method until_now()")
            found[source.data] = data
        return replace(source, data=found[source.data])

    found: dict[BoundSource, BoundSource] = {}
    return [rewrite(root, ended) for root in roots]


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
