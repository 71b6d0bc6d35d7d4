"""The sinks of stores' kernels, for `stage.py`: imported with the first store, since most processes have none."""

from __future__ import annotations

from collections.abc import Sequence

from llvmlite import ir

from scalein.errors import InternalError
from scalein.ir.exprs import Expr
from scalein.ir.stages import Sink
from scalein.ir.store_kernels import (
    BulkOp,
    CombineRecords,
    Evict,
    HashKeys,
    Lookup,
    MergeRecords,
    ReadBlocks,
    Retain,
    SeekHashes,
    Upsert,
)
from scalein.llvm_backend.block import Block
from scalein.llvm_backend.code import Code
from scalein.llvm_backend.store_bulk import lower_bulk
from scalein.llvm_backend.store_records import (
    lower_combine_records,
    lower_hash_keys,
    lower_lookup,
    lower_merge_records,
    lower_seek_hashes,
    lower_upsert,
)
from scalein.llvm_backend.store_spill import lower_evict, lower_read_blocks, lower_retain
from scalein.llvm_backend.values import Env


def takes_large_blocks(sink: Sink) -> bool:
    return isinstance(sink, Upsert | MergeRecords)


def store_loops(sink: Sink) -> list[Sequence[Expr]]:
    """What a sink computes, loop by loop over a block."""
    match sink:
        case Upsert():
            return [sink.keys, [item for item in sink.items if item is not None]]
        case Lookup():
            return [sink.keys]
        case _:
            return []


def lower_store_sink(code: Code, sink: Sink, block: Block, env: Env, start: ir.Value) -> None:
    match sink:
        case Upsert():
            lower_upsert(code, sink, block, env, start)
        case Lookup():
            lower_lookup(code, sink, block, env, start)
        case MergeRecords():
            lower_merge_records(code, sink, block, start)
        case CombineRecords():
            lower_combine_records(code, sink, block, start)
        case Retain():
            lower_retain(code, sink, block, start)
        case Evict():
            lower_evict(code, sink, block, start)
        case ReadBlocks():
            lower_read_blocks(code, sink, block, start)
        case BulkOp():
            lower_bulk(code, sink, block, start)
        case HashKeys():
            lower_hash_keys(code, sink, block, start)
        case SeekHashes():
            lower_seek_hashes(code, sink, block, start)
        case _:
            raise InternalError(f"no lowering for the sink {sink!r}")
