"""scalein calibrate: measure what this machine can do, for predictions, and keep it in a readable file.

Without --to, the file is kept beside compiled code, where `si.model.profile` and `scalein predict` find it. A file can
be carried to another machine: `model.predict(on="that.json")` says how a flow would do here.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from scalein.errors import BadArgument, WriteFailed


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--to", metavar="FILE", help="where to write it (default: the folder of compiled code)")
    parser.add_argument("--folder", metavar="FOLDER", help="on the disk that is measured (default: temporary files)")
    parser.add_argument("--spark", action="store_true", help="measure Spark too: needs pyspark and Java")


def run(args: argparse.Namespace) -> int:
    from scalein.model.calibrate import calibrate
    from scalein.model.calibration import default_path

    path = default_path() if args.to is None else Path(args.to)
    if path is None:
        raise BadArgument("there is no folder of compiled code to keep the calibration in",
                          hint="scalein calibrate --to FILE")
    started = time.perf_counter()
    found = calibrate(args.folder, spark=args.spark, report=lambda text: print(f"{text} ...", file=sys.stderr))
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        found.save(path)
    except OSError as error:
        raise WriteFailed("the calibration cannot be written", file=path, found=error) from error
    print(found)
    print(f"written to {path} in {time.perf_counter() - started:.1f} s")
    return 0
