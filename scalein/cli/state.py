"""scalein state CHECKPOINT: show the epochs of a job's checkpoint, which of them are whole, and go back to one.

CHECKPOINT is a directory, or the address of one ("s3://bucket/folder"). All files that epochs name are read. With
--back-to the newer epochs are removed, so that the next start of the job goes on from the given one: what is printed
says which results it gives again.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from scalein.errors import NOWHERE
from scalein.jobs.epochs import EpochInfo, go_back, read_epochs, savepoints
from scalein.storage.object_store import Location, parse_location


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="the directory or address that start(checkpoint=) got")
    parser.add_argument("--back-to", metavar="EPOCH", type=int, help="go on from this epoch at the next start")


def run(args: argparse.Namespace) -> int:
    place = _place(args.checkpoint)
    epochs = read_epochs(place)
    for epoch in epochs:
        print(f"epoch {epoch.number:>6}  {_counted(epoch.rows_in)} rows read, {_counted(epoch.rows_out)} results, "
              f"{_verdict(epoch, epochs)}")
    for address in savepoints(place):
        print(f"savepoint {address.rpartition('/')[2]}: begin another checkpoint with start(savepoint={address!r})")
    whole = [epoch for epoch in epochs if not epoch.damage]
    if args.back_to is not None:
        go_back(place, args.back_to)
        print(f"the next start goes on from epoch {args.back_to}")
        return 0
    if epochs[0].damage and whole:
        print(f"to go back: scalein state {args.checkpoint} --back-to {whole[0].number}")
    return 1 if epochs[0].damage else 0


def _place(given: str) -> Path | Location:
    if "://" not in given:
        return Path(given)
    found = parse_location(given, NOWHERE)
    return Path(found.base) if found.is_local else found


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
