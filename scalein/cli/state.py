"""scalein state CHECKPOINT: show the epochs of a job's checkpoint, which of them are whole, and go back to one.

All files that epochs name are read. With --back-to the newer epochs are removed, so that the next start of the job goes
on from the given one: what is printed says which results it gives again.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from scalein.jobs.epochs import EpochInfo, go_back, read_epochs, savepoints


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", metavar="CHECKPOINT", type=Path, help="the directory that start(checkpoint=) got")
    parser.add_argument("--back-to", metavar="EPOCH", type=int, help="go on from this epoch at the next start")


def run(args: argparse.Namespace) -> int:
    epochs = read_epochs(args.checkpoint)
    for epoch in epochs:
        print(f"epoch {epoch.number:>6}  {_counted(epoch.rows_in)} rows read, {_counted(epoch.rows_out)} results, "
              f"{_verdict(epoch, epochs)}")
    for name in savepoints(args.checkpoint):
        print(f"savepoint {name}: begin another checkpoint with start(savepoint={str(args.checkpoint)!r} + "
              f'"/savepoints/{name}")')
    whole = [epoch for epoch in epochs if not epoch.damage]
    if args.back_to is not None:
        go_back(args.checkpoint, args.back_to)
        print(f"the next start goes on from epoch {args.back_to}")
        return 0
    if epochs[0].damage and whole:
        print(f"to go back: scalein state {args.checkpoint} --back-to {whole[0].number}")
    return 1 if epochs[0].damage else 0


def _verdict(epoch: EpochInfo, epochs: list[EpochInfo]) -> str:
    """Whether an epoch can be gone on from, and what comes again then."""
    if epoch.damage:
        return f"DAMAGED: {epoch.damage}"
    if epoch is epochs[0]:
        return "whole"
    newest = epochs[0].rows_out
    again = "later results" if newest is None or epoch.rows_out is None else f"{newest - epoch.rows_out:,} results"
    if again == "0 results":
        return "whole; from here no result comes again"
    parts = [f"in {place}, files with them are replaced" if kind == "FileSink" else f"{place or kind} gets them twice"
             for kind, place in epoch.sinks]
    return f"whole; from here {again} come again: {'; '.join(parts)}"


def _counted(rows: int | None) -> str:
    return "?" if rows is None else f"{rows:,}"
