"""Recovery: from manifests to the state that a store starts with: its own last snapshot, or parts of other stores.

Opening a snapshot, opening some of its key groups, and importing key groups of other stores are the same: pieces and
runs of some key groups, read in place. The files of other stores are linked into the directory (copied where links
fail), so that their owners may remove them; no record is read before it is needed.

Invariant: a file's id begins with the random number of the store that wrote it, so files of several stores can be in
one directory under their original names and checksums.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from secrets import randbits
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from scalein.errors import BadArgument, Damaged, here
from scalein.layout import GROUPS
from scalein.state import format
from scalein.state.checksum import Checksums
from scalein.state.columns import check_stored_functions
from scalein.state.manifest import Manifest, decode_schemas, file_id, find_snapshot, manifest_files
from scalein.state.pieces import RestoredPiece
from scalein.state.run_levels import SHARDS, Run, RunLevels
from scalein.state.sum_bounds import SumBounds
from scalein.storage.checked_json import Json
from scalein.storage.filesystem import FileSystem
from scalein.storage.local import LocalFileSystem

if TYPE_CHECKING:
    from scalein.kernels.store import Functions

_STORE_BITS = 30
_NUMBER_BITS = 32

Groups = frozenset[int]


class FileIds:
    """Numbers of snapshots, and ids of files: the random number of the store, and a sequence number."""

    def __init__(self, store: int | None = None, following: int = 1) -> None:
        self.store = randbits(_STORE_BITS) if store is None else store
        self.following = following

    @staticmethod
    def of(manifest: Manifest, fs: FileSystem) -> FileIds:
        """Those of the store that wrote a snapshot, continued after it."""
        try:
            return FileIds(file_id(manifest.meta["store"]), max(file_id(manifest.meta["next"]), manifest.id + 1))
        except (KeyError, ValueError) as error:
            raise _incomplete(manifest, fs, error) from error

    def new(self) -> int:
        number, self.following = self.following, self.following + 1
        return number

    def new_file(self) -> int:
        return self.file(self.new())

    def file(self, number: int) -> int:
        return self.store << _NUMBER_BITS | number

    def number(self, file: int) -> int:
        """The sequence number of a file of this store; 0 for those of others, which are older than all of its own."""
        return file & (1 << _NUMBER_BITS) - 1 if file >> _NUMBER_BITS == self.store else 0

    def skip_used(self, names: list[str]) -> None:
        """Never assign the number of an existing file again."""
        numbers = [self.number(id) for kind in ("image", "index", "run") for id in format.ids(names, kind)]
        self.following = max([self.following, *(n + 1 for n in [*numbers, *format.ids(names, "snapshot")])])


@dataclass(frozen=True, eq=False)
class RecoveredState:
    """The state of some key groups in one snapshot."""

    functions: Functions
    bounds: Json
    pieces: list[RestoredPiece]
    runs: list[tuple[Run, ...]]
    groups: Groups | None  # None: all


def parse_key_groups(given: Iterable[int] | None) -> Groups | None:
    """The key groups that a user names."""
    if given is None:
        return None
    groups = frozenset(given)
    if not groups or not all(isinstance(g, int) and not isinstance(g, bool) and 0 <= g < GROUPS for g in groups):
        raise BadArgument("key_groups must be numbers of key groups", at=here(), found=repr(given),
                          wanted=f"some of 0 to {GROUPS - 1}")
    return groups


def recover(manifest: Manifest, fs: FileSystem, levels: RunLevels, value: pa.Schema,
            wanted: Groups | None) -> RecoveredState:
    """The state of the wanted groups in a snapshot; `Damaged` if its manifest is incomplete or invalid."""
    meta = manifest.meta
    try:
        owned = _decode_groups(meta.get("groups"))
        pieces = [RestoredPiece.from_tables(manifest, k, facts)  # type: ignore[arg-type]
                  for k, facts in enumerate(meta["pieces"])]  # type: ignore[arg-type]
        masks = meta.get("masks", {})
        if not isinstance(masks, dict):
            raise ValueError(f"masks: {masks!r}")
        ids = [[file_id(id) for id in shard] for shard in meta["runs"]]  # type: ignore[union-attr]
        groups = {id: _decode_groups(masks.get(str(id))) for shard in ids for id in shard}
        if len(groups) != sum(map(len, ids)):
            raise ValueError(f"duplicate runs: {ids!r}")
        runs = levels.open_all(ids, groups)
        if len(runs) != SHARDS:
            raise ValueError(f"runs of {len(runs)} shards")
        for run in (run for shard_runs in runs for run in shard_runs):
            check_stored_functions(list(run.functions), value)
        manifest_files(manifest)
        SumBounds(value).restore(meta["bounds"])
        functions = check_stored_functions(meta["functions"], value)
    except (KeyError, TypeError, ValueError, IndexError, OverflowError, AttributeError) as error:
        raise _incomplete(manifest, fs, error) from error
    state = RecoveredState(functions, meta["bounds"], pieces, runs, owned)
    return state if wanted is None else _restrict(state, wanted, fs)


def _incomplete(manifest: Manifest, fs: FileSystem, error: Exception) -> Damaged:
    return Damaged("a snapshot's manifest is incomplete or invalid",
                   file=fs.path_of(format.manifest_name(manifest.id)), found=repr(error))


def _decode_groups(given: Json) -> Groups | None:
    if given is None:
        return None
    if not isinstance(given, list) or not all(isinstance(g, int) and 0 <= g < GROUPS for g in given):
        raise ValueError(f"key groups: {given!r}")
    return frozenset(int(str(g)) for g in given)


def _restrict(state: RecoveredState, wanted: Groups, fs: FileSystem) -> RecoveredState:
    if state.groups is not None and not wanted <= state.groups:
        raise BadArgument("the store does not have all of these key groups", at=here(), file=fs.path_of(""),
                          found=format_groups(wanted), has=format_groups(state.groups))
    pieces = [piece.restrict_to(wanted) for piece in state.pieces]
    runs = [tuple(run.restrict_to(wanted) for run in shard_runs) for shard_runs in state.runs]
    return RecoveredState(state.functions, state.bounds, [piece for piece in pieces if piece.groups],
                          [tuple(run for run in shard_runs if run.groups) for shard_runs in runs], wanted)


def import_stores(
    fs: FileSystem, old: Sequence[LocalFileSystem], columns: tuple[pa.Schema, pa.Schema] | None, wanted: Groups | None,
    checksums: Checksums,
) -> tuple[tuple[pa.Schema, pa.Schema], list[tuple[Manifest, Groups | None]]]:
    """Link the files of other stores into a new one; returns their columns, and the groups to take of each manifest."""
    found: list[tuple[Manifest, Groups | None]] = []
    taken: Groups = frozenset()
    for other in old:
        manifest = find_snapshot(other, None, checksums)
        if manifest is None:
            raise BadArgument("there is no store to import", at=here(), file=other.path)
        theirs = decode_schemas(manifest, other)
        if columns is not None and theirs != columns:
            raise BadArgument("the old stores have other columns", at=here(), file=other.path)
        columns = theirs
        available = _decode_groups(manifest.meta.get("groups")) or frozenset(range(GROUPS))
        groups = available if wanted is None else available & wanted
        if groups & taken:
            raise BadArgument("two of the old stores have the same key groups", at=here(), file=other.path,
                              found=format_groups(groups & taken), hint="choose the groups with key_groups=")
        taken |= groups
        found.append((manifest, groups))
        for name in sorted(manifest_files(manifest)):
            fs.link_from(other, name)
    if columns is None or (wanted is not None and not wanted <= taken):
        raise BadArgument("the old stores do not have all of these key groups", at=here(),
                          found=format_groups((wanted or frozenset()) - taken))
    fs.sync_directory()
    return columns, found


def format_groups(groups: Groups) -> str:
    """Key groups as ranges."""
    numbers = sorted(groups)
    starts = [n for n in numbers if n - 1 not in groups]
    ends = [n for n in numbers if n + 1 not in groups]
    return ", ".join(f"{a}" if a == b else f"{a} to {b}" for a, b in zip(starts, ends, strict=True))


def combine(parts: list[RecoveredState]) -> RecoveredState:
    """States of disjoint groups as one."""
    first = parts[0]
    if any(part.functions != first.functions for part in parts[1:]):
        raise BadArgument("the old stores were merged by different functions", at=here(),
                          found=" and ".join(str(part.functions) for part in parts),
                          hint="open each of them and compact() it, or merge with the same functions first")
    bounds: Json = [str(max(int(str(b)) for b in column))
                    for column in zip(*(part.bounds for part in parts), strict=True)]
    groups = frozenset[int]().union(*(part.groups or frozenset(range(GROUPS)) for part in parts))
    runs = [reduce(_combine_runs, (part.runs[shard] for part in parts)) for shard in range(SHARDS)]
    return RecoveredState(first.functions, bounds, [piece for part in parts for piece in part.pieces], runs,
                          None if len(groups) == GROUPS else groups)


def _combine_runs(some: tuple[Run, ...], more: tuple[Run, ...]) -> tuple[Run, ...]:
    """Runs of disjoint groups of a shard as one list. A run that both lists share, because the stores were once one, is
    in the result once.

    The shared runs must have the same order in both lists, so that the order of each list is preserved.
    """
    positions = {run.id: k for k, run in enumerate(more)}
    found: list[Run] = []
    at = 0
    for run in some:
        k = positions.get(run.id)
        if k is None:
            found.append(run)
            continue
        groups, others = run.groups, more[k].groups
        if k < at or groups is None or others is None:
            raise BadArgument("the old stores have the same runs in different orders", at=here(),
                              found=format.run_name(run.id), hint="open each of them and compact() it first")
        found += [*more[at:k], replace(run, groups=groups | others)]
        at = k + 1
    return (*found, *more[at:])


def group_mask(groups: Groups | None) -> np.ndarray | None:
    """Which of the 256 key groups are among these."""
    if groups is None:
        return None
    mask = np.zeros(GROUPS, bool)
    mask[list(groups)] = True
    return mask
