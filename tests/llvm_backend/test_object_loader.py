"""Object code linked ahead: it computes what LLVM's own linker makes of it, and what is not understood goes to LLVM."""

from __future__ import annotations

import math
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import scalein as si
from scalein import col
from scalein.llvm_backend import cache, jit
from scalein.llvm_backend.object_loader import flatten

TABLE = pa.table({"k": ["a", "bb", "a", None], "x": [1.5, 2.5, None, 4.0], "n": [1, 2, 3, 4],
                  "d": pa.array([1, 2, 3, 4]).cast(pa.decimal128(25, 2))})


@si.udf
def wave(x: float, n: int) -> float:
    total = 0.0
    for k in range(n):
        total += math.sin(x) * math.exp(-k)
    return total


FLOWS = {
    "rows": si.from_arrow(TABLE).filter(col("k") != "bb").select("n", up=col("x") * 2 + col("n")),
    "text": si.from_arrow(TABLE).group_by("k").agg(n=si.count(), last=col("k").max(), sum=col("d").sum()),
    "imports": si.from_arrow(TABLE).select(y=wave(col("x"), col("n")), z=col("x").exp()),
    "constants": si.from_arrow(TABLE).filter(col("n").is_in([1, 3, 4, 7, 9, 12, 15, 18, 99, 1000, 12345])),
}


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SCALEIN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(cache, "_known", OrderedDict())


def rows(name: str) -> list[str]:
    cache._known.clear()
    found = si.Flow(FLOWS[name].op).collect(workers=1).to_pylist()
    return sorted(map(str, found))


@pytest.mark.parametrize("name", FLOWS)
def test_images_compute_what_llvm_links(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    linked: list[str] = []

    def link(name: str, *args: Any) -> Any:
        linked.append(name)
        return of_llvm(name, *args)

    of_llvm = jit.link
    monkeypatch.setattr(jit, "link", link)
    compiled, from_disk = rows(name), rows(name)
    assert linked == []
    with monkeypatch.context() as patch:
        patch.setattr(cache, "flatten", lambda code, name: None)
        patch.setenv("SCALEIN_CACHE_DIR", "")
        by_llvm = rows(name)
    assert linked
    assert compiled == from_disk == by_llvm


def test_object_code_of_the_cache_is_linked_by_llvm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "flatten", lambda code, name: None)
    assert rows("text") == rows("text")
    assert {kernel.origin for kernel in cache._known.values()} == {"disk"}


def test_objects_for_other_cpus_are_not_flattened(monkeypatch: pytest.MonkeyPatch) -> None:
    objects: list[tuple[bytes, str]] = []
    monkeypatch.setattr(cache, "flatten", lambda code, name: objects.append((code, name)))
    rows("rows")
    (code, name), *_ = objects
    assert flatten(code, name) is not None
    arm = bytearray(code)
    arm[18:20] = (183).to_bytes(2, "little")  # e_machine
    assert flatten(bytes(arm), name) is None
    assert flatten(b"\xcf\xfa\xed\xfe" + code[4:], name) is None  # not ELF at all
