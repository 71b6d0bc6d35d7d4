"""scalein run FILE: run a script of SQL, or a flow that a Python file makes.

`scalein run report.sql` runs the statements of a file: CREATE TABLE and CREATE VIEW make tables, SELECT prints rows,
INSERT INTO statements that follow one another are one job. `scalein run flows.py:NAME` runs a flow, or an output
(`flow.to(sink)`) as a job; without a name all outputs of the file are one job, or its only flow is run. Jobs end with
their input, or with Ctrl-C; with `--checkpoint` the next run goes on where they were.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from scalein.api.flow import Flow
from scalein.api.start import FlowOutput, start
from scalein.cli.explain import run_script
from scalein.cli.shell import read_script
from scalein.cli.sql import Output, add_output_arguments, new_session, run_steps, wait_for
from scalein.errors import BadArgument, guess
from scalein.options import Options


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="a script of SQL, or FILE.py[:NAME]")
    parser.add_argument("--from", action="append", default=[], dest="inputs", metavar="NAME=PATH",
                        help="for SQL: a file, a folder or a glob as a table of this name; may be repeated")
    parser.add_argument("--checkpoint", metavar="FOLDER", help="where jobs keep what the next run goes on with")
    add_output_arguments(parser)


def run(args: argparse.Namespace) -> int:
    output = Output(args.to, args.rows, Options.make(workers=args.workers).workers)
    path, _, name = args.file.partition(":")
    if path.endswith(".py"):
        _run_python(path, name, output, args.checkpoint)
        return 0
    if not Path(path).is_file():
        raise BadArgument(f"no file {path!r}", hint="run wants a script of SQL, or FILE.py[:NAME]")
    run_steps(new_session(args.inputs).steps(read_script(path), path), output, args.checkpoint)
    return 0


def _run_python(path: str, name: str, output: Output, checkpoint: str | None) -> None:
    if not Path(path).is_file():
        raise BadArgument(f"no file {path!r}", hint="run wants a script of SQL, or FILE.py[:NAME]")
    made = run_script(path)
    outputs = {key: value for key, value in made.items() if isinstance(value, FlowOutput)}
    flows = {key: value for key, value in made.items() if isinstance(value, Flow)}
    if name and name not in outputs and name not in flows:
        raise BadArgument(f"no flow {name!r} in {path}", has=", ".join([*outputs, *flows]),
                          hint=guess(name, [*outputs, *flows]))
    if name in outputs or (not name and outputs):
        chosen = [outputs[name]] if name else list(outputs.values())
        wait_for(lambda: start(*chosen, workers=output.workers, checkpoint=checkpoint))
        return
    if not name and len(flows) != 1:
        raise BadArgument(f"{path} has {len(flows)} flows at top level", has=", ".join(flows),
                          hint=f"name one: {path}:{next(iter(flows), 'NAME')}")
    output.show(flows[name] if name else next(iter(flows.values())))
