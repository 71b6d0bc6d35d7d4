"""Partition: append each row to the chunk of its key group, so that a group fits the cache.

A partition row is keys and whatever else the table's update needs, side by side. Each of the 256
groups writes into a chunk of its own; a full chunk is exchanged for a free one from the frame's
list. Before a block it is made sure that there are enough free chunks for any distribution of it.
"""

from __future__ import annotations

from collections.abc import Callable

from llvmlite import ir

from scalein.ir.exprs import type_of
from scalein.ir.stages import Partition
from scalein.layout import CHUNKS_FULL, ERROR, GROUPS, size_of
from scalein.llvm_backend.block import Block, rows
from scalein.llvm_backend.code import Code
from scalein.llvm_backend.exprs import lower_expr
from scalein.llvm_backend.fn import PTR, const
from scalein.llvm_backend.keys import first_bytes, null_word, row_key, string_words
from scalein.llvm_backend.values import Env, Row, Str, to_memory


def lower_partition(code: Code, sink: Partition, block: Block, env: Env, ordinal: Callable[[Row], ir.Value]) -> None:
    """Frame: `part.heads` is 256 x (next free byte, end of chunk); `part.free` a list of chunk addresses."""
    f, b = code.f, code.f.b
    left = f.get_slot("part.left")
    f.leave_if(b.icmp_signed("<", left, const(GROUPS + 1)), CHUNKS_FULL)
    heads = f.slot("part.heads", PTR)
    offsets, nulls_at = sink.offsets, sink.null_offset
    with rows(code, block) as row:
        _, h = row_key(code, row, env, sink.keys, sink.has_nulls)
        group = b.lshr(h, const(56))
        head = f.at(heads, b.shl(group, const(1)), PTR)
        end = b.load(f.at(head, const(1), PTR), typ=PTR)
        with f.when(b.icmp_unsigned("==", b.load(head, typ=PTR), end), likely=False):
            _next_chunk(code, sink, head, group)
        target = b.load(head, typ=PTR)
        values = [lower_expr(code, item.expr, env, row) for item in sink.items]
        for offset, value, item in zip(offsets, values, sink.items, strict=True):
            if isinstance(value.data, Str):
                text = value.data
                first, second = string_words(f, text, *first_bytes(code, text))
                f.store(first, f.byte_at(target, offset), align=8)
                f.store(second, f.byte_at(target, offset + 8), align=8)
            else:
                size = min(8, size_of(type_of(item.expr)))
                f.store(to_memory(f, value.data), f.byte_at(target, offset), align=size)
        if sink.has_nulls:
            f.store(null_word(f, values), f.byte_at(target, nulls_at), align=8)
        if sink.ordinal:
            f.store(ordinal(row), f.byte_at(target, sink.ordinal_offset), align=8)
        f.store(f.byte_at(target, sink.stride), head)
    code.check_errors(ERROR)


def _next_chunk(code: Code, sink: Partition, head: ir.Value, group: ir.Value) -> None:
    """Take a free chunk for a group; the allocation log records which chunks a group has."""
    f, b = code.f, code.f.b
    left = b.sub(f.get_slot("part.left"), const(1))
    f.set_slot("part.left", left)
    chunk = f.load(f.slot("part.free", PTR), left, PTR)
    taken = f.get_slot("part.taken")
    f.store(group, f.slot("part.log", PTR), b.shl(taken, const(1)))
    f.store(chunk, f.slot("part.log", PTR), b.add(b.shl(taken, const(1)), const(1)))
    f.set_slot("part.taken", b.add(taken, const(1)))
    f.store(chunk, head)
    f.store(f.byte_at(chunk, f.slot("part.chunk_bytes")), f.at(head, const(1), PTR))
