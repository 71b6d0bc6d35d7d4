"""Opening: from manifests to what a store begins with. Its own last snapshot, or parts of several older stores.

Recovery, a smaller or larger share of the key groups, and moving in from old owners are one thing: pieces and runs of
some key groups, read in place. The files of other stores are linked into the directory (copied where that cannot be),
so that their owners may remove them, and nothing is read before somebody asks for it.

Invariant: a file's id begins with the random number of the store that wrote it, so files of several stores can lie side
by side under the names and with the checksums that they have.
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
from scalein.state.columns import known_functions
from scalein.state.manifest import Json, Manifest
from scalein.state.pieces import Piece
from scalein.state.run_levels import BUNDLES, Cold, ColdRun
from scalein.state.snapshot_writer import file_id, find_manifest, names_in, schemas_of
from scalein.state.sum_bounds import SumBounds
from scalein.storage.filesystem import FileSystem
from scalein.storage.local import LocalFileSystem

if TYPE_CHECKING:
    from scalein.kernels.store import Functions

_STORE_BITS = 30
_NUMBER_BITS = 32

Groups = frozenset[int]


class Ids:
    """Numbers of snapshots, and ids of files: the number of the store that wrote it, and a number of its own."""

    def __init__(self, store: int | None = None, following: int = 1) -> None:
        self.store = randbits(_STORE_BITS) if store is None else store
        self.following = following

    @staticmethod
    def of(found: Manifest, fs: FileSystem) -> Ids:
        """Those of the store that wrote a snapshot, from there on."""
        try:
            return Ids(file_id(found.meta["store"]), max(file_id(found.meta["next"]), found.id + 1))
        except (KeyError, ValueError) as error:
            raise Damaged("a snapshot's manifest does not say what a snapshot has",
                          file=fs.path_of(format.manifest_name(found.id)), found=repr(error)) from error

    def new(self) -> int:
        number, self.following = self.following, self.following + 1
        return number

    def new_file(self) -> int:
        return self.file(self.new())

    def file(self, number: int) -> int:
        return self.store << _NUMBER_BITS | number

    def number(self, file: int) -> int:
        """The number of a file of this store; 0 for those of others, which are older than all."""
        return file & (1 << _NUMBER_BITS) - 1 if file >> _NUMBER_BITS == self.store else 0

    def pass_over(self, names: list[str]) -> None:
        """Never give a number again that a file has."""
        numbers = [self.number(id) for kind in ("image", "index", "run") for id in format.ids(names, kind)]
        self.following = max([self.following, *(n + 1 for n in [*numbers, *format.ids(names, "snapshot")])])


@dataclass(frozen=True, eq=False)
class Part:
    """What one snapshot has of some key groups."""

    functions: Functions
    bounds: Json
    pieces: list[Piece]
    runs: list[tuple[ColdRun, ...]]
    groups: Groups | None  # None: all


def groups_given(given: Iterable[int] | None) -> Groups | None:
    """The key groups that a user names."""
    if given is None:
        return None
    groups = frozenset(given)
    if not groups or not all(isinstance(g, int) and not isinstance(g, bool) and 0 <= g < GROUPS for g in groups):
        raise BadArgument("key_groups must be numbers of key groups", at=here(), found=repr(given),
                          wanted=f"some of 0 to {GROUPS - 1}")
    return groups


def part_of(found: Manifest, fs: FileSystem, cold: Cold, value: pa.Schema, wanted: Groups | None) -> Part:
    """What a manifest has of the wanted groups; `Damaged` if it does not say what a snapshot has."""
    meta = found.meta
    try:
        known = _groups(meta.get("groups"))
        pieces = [Piece.from_tables(found, k, facts)  # type: ignore[arg-type]
                  for k, facts in enumerate(meta["pieces"])]  # type: ignore[arg-type]
        masks = meta.get("masks", {})
        if not isinstance(masks, dict):
            raise ValueError(f"masks: {masks!r}")
        ids = [[file_id(id) for id in some] for some in meta["runs"]]  # type: ignore[union-attr]
        groups = {id: _groups(masks.get(str(id))) for some in ids for id in some}
        if len(groups) != sum(map(len, ids)):
            raise ValueError(f"a run twice: {ids!r}")
        runs = cold.open_all(ids, groups)
        if len(runs) != BUNDLES:
            raise ValueError(f"runs of {len(runs)} bundles")
        for run in (run for some in runs for run in some):
            known_functions(list(run.functions), value)
        names_in(found)
        SumBounds(value).restore(meta["bounds"])
        part = Part(known_functions(meta["functions"], value), meta["bounds"], pieces, runs, known)
    except (KeyError, TypeError, ValueError, IndexError, OverflowError, AttributeError) as error:
        raise Damaged("a snapshot's manifest does not say what a snapshot has",
                      file=fs.path_of(format.manifest_name(found.id)), found=repr(error)) from error
    return part if wanted is None else _only(part, wanted, fs)


def _groups(given: Json) -> Groups | None:
    if given is None:
        return None
    if not isinstance(given, list) or not all(isinstance(g, int) and 0 <= g < GROUPS for g in given):
        raise ValueError(f"key groups: {given!r}")
    return frozenset(int(str(g)) for g in given)


def _only(part: Part, wanted: Groups, fs: FileSystem) -> Part:
    if part.groups is not None and not wanted <= part.groups:
        raise BadArgument("the store does not have all of these key groups", at=here(), file=fs.path_of(""),
                          found=shown_groups(wanted), has=shown_groups(part.groups))
    pieces = [piece.only(wanted) for piece in part.pieces]
    runs = [tuple(run.only(wanted) for run in some) for some in part.runs]
    return Part(part.functions, part.bounds, [piece for piece in pieces if piece.groups],
                [tuple(run for run in some if run.groups) for some in runs], wanted)


def move_in(
    fs: FileSystem, old: Sequence[LocalFileSystem], columns: tuple[pa.Schema, pa.Schema] | None, wanted: Groups | None,
    checksums: Checksums,
) -> tuple[tuple[pa.Schema, pa.Schema], list[tuple[Manifest, Groups | None]]]:
    """Link the files of old stores into a new one; gives their columns, and which groups come from which manifest."""
    found: list[tuple[Manifest, Groups | None]] = []
    taken: Groups = frozenset()
    for other in old:
        manifest = find_manifest(other, None, checksums)
        if manifest is None:
            raise BadArgument("there is no store to move in from", at=here(), file=other.path)
        theirs = schemas_of(manifest, other)
        if columns is not None and theirs != columns:
            raise BadArgument("the old stores have other columns", at=here(), file=other.path)
        columns = theirs
        everything = _groups(manifest.meta.get("groups")) or frozenset(range(GROUPS))
        groups = everything if wanted is None else everything & wanted
        if groups & taken:
            raise BadArgument("two of the old stores have the same key groups", at=here(), file=other.path,
                              found=shown_groups(groups & taken), hint="say with key_groups= which to take")
        taken |= groups
        found.append((manifest, groups))
        for name in sorted(names_in(manifest)):
            fs.link_from(other, name)
    if columns is None or (wanted is not None and not wanted <= taken):
        raise BadArgument("the old stores do not have all of these key groups", at=here(),
                          found=shown_groups((wanted or frozenset()) - taken))
    fs.sync_directory()
    return columns, found


def shown_groups(groups: Groups) -> str:
    """Key groups as ranges."""
    numbers = sorted(groups)
    starts = [n for n in numbers if n - 1 not in groups]
    ends = [n for n in numbers if n + 1 not in groups]
    return ", ".join(f"{a}" if a == b else f"{a} to {b}" for a, b in zip(starts, ends, strict=True))


def together(parts: list[Part]) -> Part:
    """Parts of disjoint groups as one."""
    first = parts[0]
    if any(part.functions != first.functions for part in parts[1:]):
        raise BadArgument("the old stores were merged by different functions", at=here(),
                          found=" and ".join(str(part.functions) for part in parts),
                          hint="open each of them and compact() it, or merge with the same functions first")
    bounds: Json = [str(max(int(str(b)) for b in column))
                    for column in zip(*(part.bounds for part in parts), strict=True)]
    groups = frozenset[int]().union(*(part.groups or frozenset(range(GROUPS)) for part in parts))
    runs = [reduce(_joined, (part.runs[bundle] for part in parts)) for bundle in range(BUNDLES)]
    return Part(first.functions, bounds, [piece for part in parts for piece in part.pieces], runs,
                None if len(groups) == GROUPS else groups)


def _joined(some: tuple[ColdRun, ...], more: tuple[ColdRun, ...]) -> tuple[ColdRun, ...]:
    """Runs of disjoint groups of a bundle as one list. Stores that were once one share runs: such a run is there once.

    Both lists have these in the same order, so that of each list can be kept.
    """
    theirs = {run.id: k for k, run in enumerate(more)}
    found: list[ColdRun] = []
    at = 0
    for run in some:
        k = theirs.get(run.id)
        if k is None:
            found.append(run)
            continue
        mine, other = run.groups, more[k].groups
        if k < at or mine is None or other is None:
            raise BadArgument("the old stores have the same run in different places", at=here(),
                              found=format.run_name(run.id), hint="open each of them and compact() it first")
        found += [*more[at:k], replace(run, groups=mine | other)]
        at = k + 1
    return (*found, *more[at:])


def mask_of(groups: Groups | None) -> np.ndarray | None:
    """For each key group whether it is among these."""
    if groups is None:
        return None
    mask = np.zeros(GROUPS, bool)
    mask[list(groups)] = True
    return mask
