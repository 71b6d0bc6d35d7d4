"""`scalein.state.open(path)`: what a store's directory holds, without opening the store. It takes no lock."""

from __future__ import annotations

import os
from dataclasses import dataclass

import pyarrow as pa

from scalein.errors import Damaged, StoreFailed, here
from scalein.state import format, manifest
from scalein.state.manifest import Manifest, decode_schemas
from scalein.storage.local import LocalFileSystem


@dataclass(frozen=True)
class SnapshotInfo:
    """One snapshot: its files and their size; `damage` says what is wrong with its manifest, if anything."""

    id: int
    files: tuple[str, ...]
    size_bytes: int
    runs: int
    damage: str = ""


@dataclass(frozen=True)
class StoreInfo:
    """A store, described by its files. Printing it shows columns, sizes and snapshots."""

    path: str
    key: pa.Schema
    value: pa.Schema
    snapshots: tuple[SnapshotInfo, ...]  # newest first
    size_bytes: int

    def __repr__(self) -> str:
        lines = [f"store {self.path}", f"  key        {_columns(self.key)}", f"  value      {_columns(self.value)}",
                 f"  on disk    {_size(self.size_bytes)}"]  # fmt: skip
        for one in self.snapshots:
            text = f"DAMAGED: {one.damage}" if one.damage else (
                f"{_size(one.size_bytes)} in {len(one.files)} files, {one.runs} of them runs")  # fmt: skip
            lines.append(f"  snapshot   {one.id:>6}  {text}")
        return "\n".join(lines)


def open(path: str | os.PathLike[str]) -> StoreInfo:
    """What a store's directory holds.

    >>> import tempfile, pyarrow as pa
    >>> from scalein.state import LogStore
    >>> folder = tempfile.mkdtemp()
    >>> LogStore.open(folder, key={"user": pa.string()}, value={"n": pa.int64()}).close()
    >>> open(folder).value.names
    ['n']
    """
    if not os.path.isdir(path):
        raise StoreFailed("there is no store in this directory", at=here(), file=os.fspath(path))
    fs = LocalFileSystem(path, readonly=True)
    names = fs.names()
    found: list[SnapshotInfo] = []
    columns: tuple[pa.Schema, pa.Schema] | None = None
    for id in reversed(format.ids(names, "snapshot")):
        try:
            one = manifest.read(fs, id)
            columns = columns or decode_schemas(one, fs)
            found.append(_about(one, fs))
        except Damaged as error:
            found.append(SnapshotInfo(id, (), 0, 0, error.what))
    if columns is None:
        raise StoreFailed("there is no intact snapshot in this directory", at=here(), file=os.fspath(path))
    return StoreInfo(os.fspath(path), *columns, tuple(found), sum(map(fs.size, names)))


def _about(one: Manifest, fs: LocalFileSystem) -> SnapshotInfo:
    named = one.meta.get("files")
    names = tuple(str(name) for name in named) if isinstance(named, list) else ()
    missing = [name for name in names if not fs.size(name)]
    runs = len(format.ids(names, "run"))
    return SnapshotInfo(one.id, names, sum(map(fs.size, names)), runs, f"no {missing[0]}" if missing else "")


def _columns(schema: pa.Schema) -> str:
    return ", ".join(f"{field.name}: {field.type}{'' if field.nullable else ' not null'}" for field in schema)


def _size(size_bytes: float) -> str:
    for unit in ("bytes", "KiB", "MiB"):
        if size_bytes < 1024:
            return f"{size_bytes:.4g} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:.4g} GiB"

