"""Stores of older formats can be opened, and the hashes of keys do not change."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from scalein.kernels.store import StoreKernels
from scalein.options import Options
from scalein.state import LogStore
from scalein.state.arena import Arena
from scalein.state.memtable import MemTable
from tests.state.golden import FOLDER, FUNCTIONS, content, rows

GOLDEN = sorted(FOLDER.parent.glob("golden_v*"))


@pytest.fixture(params=GOLDEN, ids=lambda path: path.name)
def golden(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, dict[str, object]]:
    about = json.loads((request.param / "content.json").read_text(encoding="utf-8"))
    shutil.copytree(request.param, tmp_path / "store", ignore=shutil.ignore_patterns("content.json"))
    return tmp_path / "store", about


def test_there_is_a_golden_store_of_every_version() -> None:
    assert [path.name for path in GOLDEN] == ["golden_v1", "golden_v2", "golden_v3"]


def test_a_store_of_an_older_format_is_read(golden: tuple[Path, dict[str, object]]) -> None:
    path, about = golden
    with LogStore.open(path, readonly=True) as store:
        assert store.stats()["runs"] == 6
        store.verify()
        keys = rows(0, 30).select(store._key.names)
        single = [row for k in range(30) for row in store.get(keys.slice(k, 1)).to_pylist()]
        assert content(store) == about["now"]
        assert store.get(keys).to_pylist() == single
    with LogStore.open(path, snapshot=about["snapshot"], readonly=True) as store:  # type: ignore[arg-type]
        assert content(store) == about["then"]


def test_a_store_of_an_older_format_is_written(golden: tuple[Path, dict[str, object]]) -> None:
    path, _ = golden
    with LogStore.open(path) as store:
        store.delete(rows(0, 200).select(store._key.names))
        assert len(store) == 0
        store.merge(rows(0, 1), **FUNCTIONS)
        store.compact()
    with LogStore.open(path) as store:
        assert len(store) == 1


def test_the_hashes_of_keys_do_not_change() -> None:
    """Files are sorted by hash: another hash would be another format."""
    key = pa.schema([("a", pa.int64()), ("b", pa.string()), ("c", pa.float64())])
    kernels = StoreKernels(key, pa.schema([("n", pa.int64())]), Options.make(workers=1))
    texts = pa.array(["", "a text of more than sixteen bytes", None])
    table = pa.record_batch({"a": pa.array([0, -1, None]), "b": texts, "c": pa.array([-0.0, float("nan"), 2.5])})
    _, hashes = kernels.lookup(MemTable(kernels, Arena(1 << 16, 1 << 24)), table)
    assert [f"{h:016x}" for h in hashes.tolist()] == HASHES
    assert hashes.dtype == np.uint64


HASHES = ["b5a7595b763ea410", "77bc36c69a8cfd59", "6b8db2e91b997b37"]
