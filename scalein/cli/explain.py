"""scalein explain FILE.py[:NAME]: print the plan of a flow that a Python file makes.

The file is run as a module (its `__name__` is not "__main__", so a guarded script does not start), and the flow is
looked up by name; without a name it must be the only one. Nothing is read or computed unless --analyze is given.
"""

from __future__ import annotations

import argparse
import runpy
from pathlib import Path

from scalein.errors import BadArgument, guess
from scalein.flow import Flow

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


def load_flow(place: str) -> Flow:
    """The flow that `FILE.py` or `FILE.py:NAME` names."""
    path, _, name = place.partition(":")
    if not Path(path).is_file():
        raise BadArgument(f"no file {path!r}", hint="explain wants FILE.py or FILE.py:NAME")
    found = {key: value for key, value in runpy.run_path(path).items() if isinstance(value, Flow)}
    if name:
        if name not in found:
            raise BadArgument(f"no flow {name!r} in {path}", has=", ".join(found), hint=guess(name, found))
        return found[name]
    if len(found) != 1:
        raise BadArgument(f"{path} has {len(found)} flows at top level", has=", ".join(found),
                          hint=f"name one: {path}:{next(iter(found), 'NAME')}")
    return next(iter(found.values()))
