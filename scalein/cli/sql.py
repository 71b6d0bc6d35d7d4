"""scalein sql ["SELECT ..."]: run SQL over files, or start a shell.

Files are tables under their paths, `FROM 'events/*.parquet'`, or under a name that `--from name=path` gives. The result
is printed, or written where `--to` says, in the format of its ending. Without a text, it is read from the standard
input; on a terminal a shell starts, with a history and completion, whose statements end with a semicolon.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import pyarrow as pa

from scalein.api.flow import Flow
from scalein.connectors.base import BoundSource
from scalein.connectors.sinks.simple import format_table
from scalein.errors import BadArgument
from scalein.ir import ops
from scalein.ir.rewrite import walk_ops
from scalein.options import Options

if TYPE_CHECKING:
    from scalein.jobs.job import Job
    from scalein.sql.session import Insert, Session, Step
    from scalein.sql.tables import Table

ROWS = 40  # that are printed
WRITERS = {"parquet": "write_parquet", "csv": "write_csv", "json": "write_json", "jsonl": "write_json",
           "arrow": "write_ipc", "ipc": "write_ipc"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("text", nargs="?", metavar="SQL", help="one or more statements, separated by semicolons")
    parser.add_argument("--from", action="append", default=[], dest="inputs", metavar="NAME=PATH",
                        help="a file, a folder or a glob as a table of this name; may be repeated")
    add_output_arguments(parser)


def add_output_arguments(parser: argparse.ArgumentParser) -> None:
    """What `scalein sql` and `scalein run` have in common."""
    parser.add_argument("--to", metavar="PATH", help=f"write the rows to a file: .{', .'.join(WRITERS)}")
    parser.add_argument("--rows", type=int, default=ROWS, help=f"rows to print (default: {ROWS})")
    parser.add_argument("--workers", type=int, default=None, help="threads (default: the cores this process may use)")


def run(args: argparse.Namespace) -> int:
    options, session = Options.make(workers=args.workers), new_session(args.inputs)
    if args.text is None and sys.stdin.isatty():
        from scalein.cli.shell import Shell

        if args.to is not None:
            raise BadArgument("--to needs a query", hint='scalein sql "SELECT ..." --to out.parquet')
        return Shell(session, args.rows, options.workers).run()
    text = sys.stdin.read() if args.text is None else args.text
    run_steps(session.steps(text), Output(args.to, args.rows, options.workers))
    return 0


def new_session(inputs: Iterable[str] = ()) -> Session:
    """A session whose tables are the files of `--from`, and which knows Nexmark's generator as a connector."""
    from scalein.sql import need_sqlglot

    need_sqlglot()
    from scalein.sql.session import Session

    given: dict[str, object] = {}
    for each in inputs:
        name, equals, path = each.partition("=")
        if not equals or not name.isidentifier() or not path:
            raise BadArgument("--from takes NAME=PATH", found=each, hint="--from events=events/*.parquet")
        given[name] = path
    return Session(given, {"nexmark": _nexmark})


class Output:
    """Where the rows of queries go: to a file, or to the terminal."""

    def __init__(self, path: str | None, rows: int, workers: int) -> None:
        self.path, self.rows, self.workers = path, rows, workers
        if path is not None:
            self._writer(path)

    def show(self, flow: Flow) -> None:
        """Runs a query, and prints its rows or writes them."""
        if self.path is not None:
            getattr(flow, self._writer(self.path))(self.path, workers=self.workers)
            return
        if is_endless(flow):
            from scalein.api.sinks import to_console

            wait_for(lambda: flow.start(sink=to_console(self.rows), workers=self.workers))
            return
        print(as_text(flow.collect(workers=self.workers), self.rows))

    @staticmethod
    def _writer(path: str) -> str:
        ending = path.rsplit(".", 1)[-1].lower()
        if ending not in WRITERS:
            raise BadArgument("--to takes a file whose ending says its format", found=path,
                              has=", ".join(f".{each}" for each in WRITERS))
        return WRITERS[ending]


def run_steps(steps: Iterable[Step], output: Output, checkpoint: str | None = None) -> None:
    """Does what statements ask for; INSERTs that come together are one job, which reads shared sources once."""
    from scalein.sql.session import Done, Inserts, Rows

    for step in steps:
        if isinstance(step, Rows):
            output.show(step.flow)
        elif isinstance(step, Inserts):
            run_inserts(step.inserts, output.workers, checkpoint)
        else:
            print(step.text, file=sys.stderr if isinstance(step, Done) else sys.stdout, flush=True)


def run_inserts(inserts: Sequence[Insert], workers: int, checkpoint: str | None = None) -> None:
    """A job that writes to the tables, until its input ends or Ctrl-C stops it."""
    from scalein.api.start import start

    outputs = [insert.flow.to(insert.table.sink()) for insert in inserts]
    start_s = time.perf_counter()
    job = wait_for(lambda: start(*outputs, workers=workers, checkpoint=checkpoint))
    names = ", ".join(insert.table.name for insert in inserts)
    print(f"{job.metrics()['rows_out']:,} rows into {names} in {time.perf_counter() - start_s:.2f} s", file=sys.stderr)


def wait_for(start: Callable[[], Job]) -> Job:
    """Starts a job and waits for its end; Ctrl-C stops it."""
    job = start()
    try:
        job.wait()
    except KeyboardInterrupt:
        job.stop()
    return job


def is_endless(flow: Flow) -> bool:
    """Whether a source of the flow never ends."""
    return any(isinstance(op, ops.Source) and isinstance(op.data, BoundSource) and not op.data.bounded
               for op in walk_ops(flow.op))


def as_text(table: pa.Table, rows: int) -> str:
    """The first rows of a table for the terminal, and how many there are."""
    count = f"{table.num_rows:,} row{'s' * (table.num_rows != 1)}"
    shown = f", of which {rows} are shown" if table.num_rows > rows else ""
    return f"{format_table(table.slice(0, rows))}\n({count}{shown})"


def _nexmark(table: Table) -> Flow:
    """The connector of Nexmark's generator: all kinds of events in one, or those of the option 'kind'."""
    from scalein import nexmark

    names = {"events.num": "events", "first-event.rate": "rate", "seed": "seed",
             "out-of-order.group-size": "out_of_order"}
    settings: dict[str, int] = {}
    for key, value in table.options.items():
        if key in names:
            if not value.isdigit():
                raise table.error(f"the option {key!r} of the connector nexmark is a whole number", found=value)
            settings[names[key]] = int(value)
    kind = table.options.get("kind", "event")
    if settings.get("events") == 0:
        del settings["events"]
    if kind == "event":
        return nexmark.events(**settings)
    if kind not in nexmark.Streams._fields:
        raise table.error(f"the connector nexmark has no kind {kind!r}", has="event, person, auction, bid")
    flow: Flow = getattr(nexmark.streams(**settings), kind)
    return flow
