"""Dedup: the first row of each key goes on, and the table remembers it.

Rows are numbered in the order in which they reach this step: blocks done so far, then the row's place in its block.
A key's record holds the least number of its rows; a row is the first if that number is its own. Blocks count
as done when everything after this step is: a kernel that leaves in between (index full, output full) and runs
the same block again gives its rows the same numbers, so it keeps the same ones. That holds for the rounds of
a join that multiplies rows as well.
"""

from __future__ import annotations

from collections.abc import Callable

from llvmlite import ir

from scalein.ir.stages import DedupStep
from scalein.layout import BLOCK_ROWS, DEDUP, ERROR
from scalein.llvm_backend.block import Block, keep
from scalein.llvm_backend.code import Code
from scalein.llvm_backend.fn import I64, PTR, const
from scalein.llvm_backend.hash_index import Index
from scalein.llvm_backend.keys import key_block
from scalein.llvm_backend.values import Env, Row


def lower_dedup(code: Code, step: DedupStep, block: Block, env: Env, then: Callable[[Block, Env], None]) -> None:
    """Frame: the table's slots, and `dedup.blocks`, the blocks done so far."""
    f, b, layout = code.f, code.f.b, step.table.layout
    index = Index(code, step.table, DEDUP)
    index.ensure_arena(BLOCK_ROWS)
    keys = key_block(code, block, env, step.keys, step.table.has_nulls)
    code.check_errors(ERROR)
    records = index.find(keys, block.count, None, insert=True)
    blocks = f.get_slot(f"{DEDUP}.blocks")
    before = b.mul(blocks, const(BLOCK_ROWS))

    def is_first(row: Row) -> ir.Value:
        place = f.byte_at(f.load(records, row.k, PTR), layout.offset("acc0"))
        number = b.add(before, row.k)
        least = f.min(b.load(place, typ=I64), number)
        f.store(least, place)
        return b.icmp_signed("==", least, number)

    then(keep(code, block, is_first), env)
    f.set_slot(f"{DEDUP}.blocks", b.add(blocks, const(1)))
