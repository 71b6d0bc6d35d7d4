"""scalein explain FILE.py[:NAME]: print the plan of a flow that a Python file makes.

The file is run as a module (its `__name__` is not "__main__", so a guarded script does not start), and the flow is
looked up by name; without a name it must be the only one. Nothing is read or computed unless --analyze is given, or the
file itself does so. What the file prints goes to stderr, it sees no command-line arguments, and its jobs do not start.
"""

from __future__ import annotations

import argparse
import runpy
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path

from scalein.api.flow import Flow
from scalein.api.start import jobs_disabled
from scalein.errors import BadArgument, ScaleinError, SourceLoc, guess

LEVELS = ("logical", "fused", "llvm", "asm")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("flow", metavar="FILE.py[:NAME]", help="a Python file and the name of a flow in it")
    parser.add_argument("--level", choices=LEVELS, default="logical", help="how far down to look (default: logical)")
    parser.add_argument("--verbose", action="store_true", help="show the plan after every pass")
    parser.add_argument("--analyze", action="store_true", help="run the flow and add rows and time to each stage")


def run(args: argparse.Namespace) -> int:
    flow = load_flow(args.flow)
    print(flow.explain(args.level, verbose=args.verbose, analyze=args.analyze))
    return 0


def load_flow(target: str) -> Flow:
    """The flow that `FILE.py` or `FILE.py:NAME` names."""
    path, _, name = target.partition(":")
    if not Path(path).is_file():
        raise BadArgument(f"no file {path!r}", hint="explain wants FILE.py or FILE.py:NAME")
    found = {key: value for key, value in run_script(path).items() if isinstance(value, Flow)}
    if name:
        if name not in found:
            raise BadArgument(f"no flow {name!r} in {path}", has=", ".join(found), hint=guess(name, found))
        return found[name]
    if len(found) != 1:
        raise BadArgument(f"{path} has {len(found)} flows at top level", has=", ".join(found),
                          hint=f"name one: {path}:{next(iter(found), 'NAME')}")
    return next(iter(found.values()))


def run_script(path: str) -> dict[str, object]:
    """The names that a Python file defines at top level; whatever it raises becomes one error that names its line."""
    try:
        with redirect_stdout(sys.stderr), _no_arguments(path), jobs_disabled():
            return runpy.run_path(path)
    except (ScaleinError, BrokenPipeError):
        raise
    except SyntaxError as error:
        at = SourceLoc(error.filename or path, error.lineno or 0)
        raise BadArgument(f"{path} is no Python", at=at, found=error.msg) from error
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        line = next((frame.lineno for frame in reversed(frames) if frame.filename == path), None)
        raise BadArgument(f"{path} raised {type(error).__name__} while it was run", at=SourceLoc(path, line or 0),
                          found=error, hint='put what only a script does under if __name__ == "__main__":') from error


@contextmanager
def _no_arguments(path: str) -> Iterator[None]:
    """`sys.argv` of a command line without arguments."""
    saved, sys.argv = sys.argv, [path]
    try:
        yield
    finally:
        sys.argv = saved
