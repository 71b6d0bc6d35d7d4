"""How a flow is run: CPU, workers, batches, kind of source, safe mode, and how well kernels are optimised.

Optimising a kernel costs ten times as much as making its unoptimised code, and hardly changes what is tested: the
lowering. So most runs skip LLVM's passes; a share of them has the full pipeline, which would make undefined code show.
"""

from __future__ import annotations

import gc
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import pyarrow as pa
from llvmlite import binding as llvm

import scalein as si
from scalein.api.flow import Flow
from scalein.errors import InternalError
from scalein.llvm_backend import cache as kernels
from scalein.llvm_backend import jit
from scalein.llvm_backend.target import LLVM_LOCK, Target

CPUS = ["native", "native", "x86-64-v3", "x86-64"]
FULL_SHARE = 0.1


@dataclass(frozen=True, slots=True)
class Way:
    """One way to run a flow. `batches`: most rows of a batch, one of these at a time; empty: as the table has them."""

    cpu: str = "native"
    workers: int = 1
    source: str = "table"  # "table", "reader" (read once), "batches" (from a function) or "unbound"
    batches: tuple[int, ...] = ()
    safe: bool = False
    level: str = "raw"  # "raw", "brief" or "full"
    reorder: bool = False  # every other batch has dictionaries of its own

    def text(self) -> str:
        """The call, for a reproducer."""
        safe = "  # with SCALEIN_SAFE=1" if self.safe else ""
        return f"print(flow.collect(cpu={self.cpu!r}, workers={self.workers})){safe}  # {self}\n"


def ways_of(seed: int) -> tuple[Way, Way]:
    """Two ways for the flow of a seed; mostly they share their kernels."""
    rng = random.Random(seed + 1)
    first = _way(rng)
    second = _way(rng)
    if rng.random() < 0.85:
        second = Way(first.cpu, second.workers, second.source, second.batches, first.safe, first.level, second.reorder)
    return first, second


def _way(rng: random.Random) -> Way:
    source = rng.choice(["table", "table", "table", "reader", "batches", "unbound"])
    sizes = [1, 3, 7, 16, 64, 255, 256, 257, 1000]
    batches = tuple(rng.choices(sizes, k=rng.choice([1, 3]))) if rng.random() < 0.5 else ()
    level = "full" if rng.random() < FULL_SHARE else "brief" if rng.random() < 0.03 else "raw"
    return Way(rng.choice(CPUS), rng.choice([1, 1, 2, 3, 4]), source, batches, rng.random() < 0.2, level,
               rng.random() < 0.3)


def cut(table: pa.Table, way: Way) -> list[pa.RecordBatch]:
    """The table's rows in the way's batches, an empty one now and then."""
    if not way.batches:
        return [_reordered(batch) if way.reorder and number % 2 else batch
                for number, batch in enumerate(table.to_batches())]
    found: list[pa.RecordBatch] = []
    start = 0
    whole = pa.Table.from_batches([b for b in table.to_batches() if b.num_rows], table.schema)
    while start < whole.num_rows:
        size = way.batches[len(found) % len(way.batches)]
        for batch in whole.slice(start, size).to_batches():
            found.append(_reordered(batch) if way.reorder and len(found) % 2 else batch)
        start += size
    return [*found[:2], *(batch.slice(0, 0) for batch in found[:1]), *found[2:]]


def _reordered(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The same rows; dictionaries have another order, and a word that no row has."""
    columns = [_other_dictionary(c) if pa.types.is_dictionary(c.type) else c for c in batch.columns]
    return pa.RecordBatch.from_arrays(columns, schema=batch.schema)


def _other_dictionary(array: pa.Array) -> pa.Array:
    words = array.dictionary
    order = list(range(len(words) - 1, -1, -1))
    shuffled = pa.concat_arrays([words.take(pa.array(order, pa.int64())), words.slice(0, 1)])
    codes = pa.array([None if code is None else order[code] for code in array.indices.to_pylist()],
                     array.type.index_type)
    return pa.DictionaryArray.from_arrays(codes, shuffled)


def source(table: pa.Table, way: Way, reads_twice: bool) -> tuple[Flow, pa.Table | None]:
    """The flow's beginning, and what `collect` is given."""
    if way.source == "table":
        return si.from_arrow(pa.Table.from_batches(cut(table, way), table.schema)), None
    if way.source == "unbound" and not reads_twice and not any(map(pa.types.is_dictionary, table.schema.types)):
        return si.flow(table.schema), pa.Table.from_batches(cut(table, way), table.schema)
    batches = cut(table, way)
    if way.source == "reader" and not reads_twice:
        return si.from_arrow(pa.RecordBatchReader.from_batches(table.schema, iter(batches))), None

    def again() -> Iterator[pa.RecordBatch]:
        return iter(batches)

    return si.from_batches(again, table.schema), None


def collect(flow: Flow, data: pa.Table | None, way: Way) -> pa.Table:
    """The flow's result by the way's kernels."""
    os.environ["SCALEIN_SAFE"] = "1" if way.safe else "0"
    use_level(way.level)
    return flow.collect(data, workers=way.workers, cpu=way.cpu)


# --- kernels of several levels. The engine has no such option, since no user needs it.

_level = "full"
_emit = jit.emit


def use_level(level: str) -> None:
    global _level
    if level != _level:
        kernels._known.clear()  # digests know nothing of levels
        _level = level


def emitted(text: str, target: Target, brief: bool = False) -> bytes:
    if _level != "raw":
        return _emit(text, target, brief or _level == "brief")
    with LLVM_LOCK:
        try:
            module = llvm.parse_assembly(text)
            module.verify()
        except RuntimeError as error:
            raise InternalError(f"LLVM refuses the generated code: {error}") from error
        return bytes(_raw_machine(target).emit_object(module))


@cache
def _raw_machine(target: Target) -> llvm.TargetMachine:
    made = llvm.Target.from_triple(target.triple)
    return made.create_target_machine(cpu=target.cpu, features=target.features, opt=0, reloc="pic",
                                      codemodel="default")


def prepare() -> None:
    """Make this process fit for many flows: levels, nothing on disk, few collections of garbage."""
    os.environ["SCALEIN_CACHE_DIR"] = ""
    kernels.emit = emitted
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)
