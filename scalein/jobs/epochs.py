"""The epochs of a checkpoint, verified: which ones a job can go on from, and what comes again if it goes back to one.

A start finds damage of manifests and of all that it reads, and goes back by itself (`Checkpoint.recovered`). Records
of a store are read when they are needed: damage of these ends the job while it runs, and at every start again. Here all
files that epochs name are read, and newer epochs are removed if the user says so. Those of a remote checkpoint are
copied for that.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from scalein.errors import BadArgument, Damaged, ScaleinError, StoreFailed
from scalein.exec.evolution import folder_name, states_by_folder
from scalein.jobs.checkpoint import SAVEPOINTS, Checkpoint
from scalein.state import LogStore, format, manifest
from scalein.state.row_buffer import verify_files
from scalein.storage.checked_json import Json, as_int, as_map, as_text
from scalein.storage.local import LocalFileSystem
from scalein.storage.object_store import Location


@dataclass(frozen=True)
class EpochInfo:
    """An epoch: the rows that the job had read and the results it had given. `damage`: why no start can use it."""

    number: int
    rows_in: int | None  # None: unknown, the manifest is damaged
    rows_out: int | None
    sinks: tuple[tuple[str, str], ...]  # the class of each, and where it writes to
    damage: str


def read_epochs(place: Path | Location) -> list[EpochInfo]:
    """The retained epochs of a checkpoint, newest first; all files that they name are read."""
    if isinstance(place, Location):
        found = _read_remote(place)
    else:
        checkpoint = Checkpoint(place)
        found = [_read(checkpoint, number) for number in reversed(checkpoint.numbers())] if place.is_dir() else []
    if not found:
        raise StoreFailed("there is no checkpoint in this directory", file=place)
    return found


def _read_remote(location: Location) -> list[EpochInfo]:
    from scalein.jobs.remote_checkpoint import RemoteEpochs, number_of

    found: list[EpochInfo] = []
    with tempfile.TemporaryDirectory(prefix="scalein-state-") as folder:
        checkpoint = Checkpoint(Path(folder))
        remote = RemoteEpochs(location, checkpoint.path)
        for name in remote.names():
            number = number_of(name)
            if found and number >= found[-1].number:
                continue  # of a run that went on beside a later one, or published again by that
            try:
                remote.fetch(name)
            except Damaged as error:
                found.append(EpochInfo(number, None, None, (), _described(error)))
                continue
            about = _read(checkpoint, number)
            found.append(replace(about, damage=about.damage.replace(f"{checkpoint.path}/", f"{location}/")))
    return found


def savepoints(place: Path | Location) -> list[str]:
    """The addresses of a checkpoint's savepoints."""
    if isinstance(place, Location):
        from scalein.jobs.remote_checkpoint import EPOCHS

        names = place.folders(SAVEPOINTS)
        return [place.uri_of(f"{SAVEPOINTS}/{name}") for name in names if place.names(f"{SAVEPOINTS}/{name}/{EPOCHS}")]
    return sorted(str(each) for each in (place / SAVEPOINTS).glob("[!.]*"))


def go_back(place: Path | Location, number: int) -> None:
    """Let the next start go on from an older epoch, which must be whole; later epochs are removed.

    A job that is running is an error; one of a remote checkpoint cannot be seen, and is fenced.
    """
    epochs = {epoch.number: epoch for epoch in read_epochs(place)}
    if number not in epochs:
        raise BadArgument(f"there is no epoch {number}", file=place, has=", ".join(map(str, epochs)))
    if damage := epochs[number].damage:
        raise BadArgument(f"epoch {number} is damaged", file=place, found=damage)
    checkpoint = Checkpoint(place) if isinstance(place, Path) else _remote_checkpoint(place)
    try:
        checkpoint.open()
        checkpoint.remove_after(number)
        if isinstance(place, Location):  # publishes the epoch again, as that of a later run
            checkpoint.recovered(lambda _: None)
    finally:
        checkpoint.close()


def _remote_checkpoint(location: Location) -> Checkpoint:
    from scalein.jobs.remote_checkpoint import RemoteCheckpoint

    return RemoteCheckpoint(location)


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
        damage = _described(error)
    except (ValueError, KeyError) as error:
        damage = f"its manifest is malformed: {error!r}"
    return EpochInfo(number, rows_in, rows_out, sinks, damage)


def _described(error: ScaleinError) -> str:
    return f"{error.what}: {error.facts.get('file', '')}".removesuffix(": ")


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
    """What a state says of a store or of buffered rows; windows of a changelog have both, joins two buffers."""
    if not isinstance(state, dict):
        return []
    return [each for each in (state, *map(state.get, ("expiry", "right", "rows", "hints"))) if isinstance(each, dict)]


def _verify(folder: Path, state: Json) -> None:
    """Read all that an operator's state names."""
    for about in _parts(state):
        verify_files(folder, as_map(about.get("files", {})))
        if "snapshot" in about:
            with LogStore.open(folder, snapshot=as_int(about["snapshot"]), readonly=True) as store:
                store.verify()
