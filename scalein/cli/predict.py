"""scalein predict FILE.py[:NAME] --sample FILE: how a flow will do in a configuration, before it is deployed.

The flow of the Python file is profiled over the rows of the sample (Parquet, CSV, JSON or Arrow), and the prediction is
printed. With --recommend it is the fewest workers for --rate and --p99 instead. `--serve PORT` answers over HTTP:
`POST /predict` and `POST /recommend` take the arguments of `model.predict` and `model.recommend` as a JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from scalein.cli.explain import load_flow
from scalein.errors import BadArgument

OPTIONS = {"workers": int, "rate": float, "memory": str, "every": str, "batch_rows": int, "keys": int,
           "partitions": int, "executors": int, "cores": int, "read_by": str, "migration": str,
           "variability": float}  # fmt: skip
FOR_PLANS = ("rate", "memory", "every", "batch_rows", "keys", "variability", "partitions", "cores", "read_by")
ONLY_PLANS = {"p99": str, "most": int, "headroom": float}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("flow", metavar="FILE.py[:NAME]", help="a Python file and the name of a flow in it")
    parser.add_argument("--sample", metavar="FILE", help="rows as they will come (default: the first of its source)")
    parser.add_argument("--calibration", metavar="FILE", help="of this machine, as `scalein calibrate` wrote it")
    parser.add_argument("--on", metavar="FILE", help="the calibration of another machine, to predict for")
    for name, kind in OPTIONS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar="N" if kind is not str else "AMOUNT",
                            help=f"as in model.predict({name}=...)")
    for name, kind in ONLY_PLANS.items():
        parser.add_argument(f"--{name}", type=kind, metavar="N" if kind is not str else "TIME",
                            help=f"with --recommend: as in model.recommend({name}=...)")
    parser.add_argument("--recommend", action="store_true", help="the fewest workers that hold --rate and --p99")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--serve", type=int, metavar="PORT", help="answer over HTTP until Ctrl-C (0: any port)")
    parser.add_argument("--host", default="127.0.0.1", help="the address to serve at (default: this machine only)")


def run(args: argparse.Namespace) -> int:
    asked = {name: value for name in OPTIONS if (value := getattr(args, name)) is not None}
    if args.on is not None:
        asked["on"] = args.on
    if args.recommend and args.rate is None:
        raise BadArgument("--recommend needs the rate to hold", hint="--rate 1e6 --p99 100ms")
    limits = {name: value for name in ONLY_PLANS if (value := getattr(args, name)) is not None}
    if limits and not args.recommend and args.serve is None:
        raise BadArgument(f"--{next(iter(limits))} is about a recommendation", hint="add --recommend")
    if args.recommend and (wrong := [name for name in asked if name not in (*FOR_PLANS, "on")]):
        raise BadArgument(f"--recommend chooses the configuration itself, without --{wrong[0]}")
    from scalein.model import profile

    model = profile(load_flow(args.flow), None if args.sample is None else _sample(args.sample),
                    calibration=args.calibration)
    if args.serve is not None:
        from scalein.model.server import PredictionServer

        with PredictionServer(model, args.serve, args.host) as server:
            print(f"answering at {server.url}/predict and /recommend; Ctrl-C ends it", file=sys.stderr, flush=True)
            server.serve_forever()
        return 0
    found: Any = model.recommend(**limits, **asked) if args.recommend else model.predict(**asked)
    print(json.dumps(found.to_json(), indent=1) if args.json else repr(found))
    return 0


def _sample(path: str) -> object:
    """The rows of a file, at most as many as a profile takes."""
    from scalein.api.sources import read_csv, read_ipc, read_json, read_parquet
    from scalein.model.profile import MAX_SAMPLE_ROWS

    readers = {".parquet": read_parquet, ".csv": read_csv, ".json": read_json, ".jsonl": read_json,
               ".ndjson": read_json, ".arrow": read_ipc, ".ipc": read_ipc, ".feather": read_ipc}
    end = next((end for end in readers if path.endswith(end)), None)
    if end is None:
        raise BadArgument("a sample is a file of Parquet, CSV, JSON or Arrow", found=repr(path),
                          has=", ".join(readers))
    return readers[end](path).limit(MAX_SAMPLE_ROWS).collect()
