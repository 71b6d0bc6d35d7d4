"""`scalein COMMAND ...`: argument parsing and exit codes; each command is a file beside this one.

Exit codes: 0 success, 1 an error with scalein's explanation, 2 a command line that cannot be parsed, 130 interrupted.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Protocol

from scalein import __version__
from scalein.cli import bench, calibrate, demo, doctor, explain, predict, run, sql, state, top
from scalein.errors import BadArgument, ScaleinError, guess


class Command(Protocol):
    """The interface of a command's module; the first line of its docstring is its help."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, args: argparse.Namespace) -> int: ...


COMMANDS: dict[str, Command] = {"bench": bench, "calibrate": calibrate, "demo": demo, "doctor": doctor,
                                "explain": explain, "predict": predict, "run": run, "sql": sql, "state": state,
                                "top": top}


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="scalein", description="Dataflow queries compiled to machine code over Arrow data.")
    parser.add_argument("--version", action="version", version=f"scalein {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    for name, command in COMMANDS.items():
        about = (command.__doc__ or "").splitlines()[0].split(": ", 1)[-1]
        command.add_arguments(commands.add_parser(name, help=about, description=about[0].upper() + about[1:]))
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; gives the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        if arguments and not arguments[0].startswith("-") and arguments[0] not in COMMANDS:
            raise BadArgument(f"no command {arguments[0]!r}", has=", ".join(COMMANDS),
                              hint=guess(arguments[0], COMMANDS))
    except BadArgument as error:
        return _print_error(error, code=2)
    parser = make_parser()
    args = parser.parse_args(arguments)
    if args.command is None:
        parser.print_help()
        return 0
    try:
        return COMMANDS[args.command].run(args)
    except ScaleinError as error:
        return _print_error(error, code=1)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader closed the pipe (`scalein explain ... | head`); Python's own flush at exit would fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _print_error(error: ScaleinError, code: int) -> int:
    print(f"scalein: {error}", file=sys.stderr)
    return code
