"""The epochs of a checkpoint, verified: which ones a job can go on from, and what comes again if it goes back to one.

A start finds damage of manifests and of all that it reads, and goes back by itself (`Checkpoint.recovered`). Records
of a store are read when they are needed: damage of these ends the job while it runs, and at every start again. Here all
files that epochs name are read, and newer epochs are removed if the user says so.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from scalein.errors import BadArgument, ScaleinError, StoreFailed
from scalein.exec.evolution import folder_name, states_by_folder
from scalein.jobs.checkpoint import SAVEPOINTS, Checkpoint
from scalein.state import LogStore, format, manifest
from scalein.state.row_buffer import verify_files
from scalein.storage.checked_json import Json, as_int, as_map, as_text
from scalein.storage.local import LocalFileSystem


@dataclass(frozen=True)
class EpochInfo:
    """An epoch: the rows that the job had read and the results it had given. `damage`: why no start can use it."""

    number: int
    rows_in: int | None  # None: unknown, the manifest is damaged
    rows_out: int | None
    sinks: tuple[tuple[str, str], ...]  # the class of each, and where it writes to
    damage: str


def read_epochs(path: Path) -> list[EpochInfo]:
    """The retained epochs of a checkpoint, newest first; all files that they name are read."""
    checkpoint = Checkpoint(path)
    if not path.is_dir() or not checkpoint.numbers():
        raise StoreFailed("there is no checkpoint in this directory", file=path)
    return [_read(checkpoint, number) for number in reversed(checkpoint.numbers())]


def savepoints(path: Path) -> list[str]:
    """The names of a checkpoint's savepoints."""
    return sorted(each.name for each in (path / SAVEPOINTS).glob("[!.]*"))


def go_back(path: Path, number: int) -> None:
    """Let the next start go on from an older epoch, which must be whole; later epochs are removed."""
    checkpoint = Checkpoint(path)
    if number not in checkpoint.numbers():
        raise BadArgument(f"there is no epoch {number}", file=path, has=", ".join(map(str, checkpoint.numbers())))
    if damage := _read(checkpoint, number).damage:
        raise BadArgument(f"epoch {number} is damaged", file=path, found=damage)
    checkpoint.open()
    try:
        checkpoint.remove_after(number)
    finally:
        checkpoint.close()


def _read(checkpoint: Checkpoint, number: int) -> EpochInfo:
    rows_in = rows_out = None
    sinks: tuple[tuple[str, str], ...] = ()
    damage = ""
    try:
        epoch = checkpoint.read(number)
        counters, places = as_map(epoch["metrics"]), as_map(epoch.get("places", {}))
        rows_in, rows_out = as_int(counters["rows_in"]), as_int(counters["rows_out"])
        sinks = tuple((as_text(kind), str(places.get(name, ""))) for name, kind in as_map(epoch["sinks"]).items())
        for folder, state in states_by_folder(epoch).items():
            _verify(checkpoint.path / folder_name(folder), state)
    except ScaleinError as error:
        damage = f"{error.what}: {error.facts.get('file', '')}".removesuffix(": ")
    except (ValueError, KeyError) as error:
        damage = f"its manifest is malformed: {error!r}"
    return EpochInfo(number, rows_in, rows_out, sinks, damage)


def files_of_epoch(path: Path, epoch: dict[str, Json]) -> list[str]:
    """The files of state that an epoch needs, below the folder of its checkpoint."""
    found = []
    for number, state in states_by_folder(epoch).items():
        folder = folder_name(number)
        for about in _parts(state):
            found += [f"{folder}/{name}" for name in as_map(about.get("files", {}))]
            if "snapshot" in about:
                one = manifest.read(LocalFileSystem(path / folder, readonly=True), as_int(about["snapshot"]))
                names = [*sorted(manifest.manifest_files(one)), format.manifest_name(one.id)]
                found += [f"{folder}/{name}" for name in names]
    return found


def _parts(state: Json) -> list[dict[str, Json]]:
    """What a state says of a store or of buffered rows; windows of a changelog have both."""
    return [each for each in (state, state.get("expiry")) if isinstance(each, dict)] if isinstance(state, dict) else []


def _verify(folder: Path, state: Json) -> None:
    """Read all that an operator's state names."""
    for about in _parts(state):
        verify_files(folder, as_map(about.get("files", {})))
        if "snapshot" in about:
            with LogStore.open(folder, snapshot=as_int(about["snapshot"]), readonly=True) as store:
                store.verify()
