"""Collect: write the live rows' columns, compacted, after those already in the output chunk.

One loop a column keeps each vectorizable. Validity and bools are written as bytes and packed when
the chunk is closed. Room for a whole block is made sure of before anything is written, so a kernel
that leaves with OUTPUT_FULL has done nothing of its block.
"""

from __future__ import annotations

from collections.abc import Callable

from llvmlite import ir

from scalein.ir.exprs import Named, type_of
from scalein.ir.stages import Collect
from scalein.layout import ERROR, OUTPUT_FULL
from scalein.llvm_backend.block import Block, rows
from scalein.llvm_backend.code import Code
from scalein.llvm_backend.exprs import lower_expr
from scalein.llvm_backend.fn import I1, I8, I32, I64, PTR, const
from scalein.llvm_backend.parts import is_many, shape_of
from scalein.llvm_backend.values import Env, Str, to_memory


def lower_collect(code: Code, sink: Collect, block: Block, env: Env) -> None:
    f, b = code.f, code.f.b
    count = f.get_slot("out.count")
    end = b.add(count, block.count)
    f.leave_if(b.icmp_signed(">", end, f.slot("out.capacity")), OUTPUT_FULL)
    texts = [k for k, item in enumerate(sink.items) if type_of(item.expr).is_loose]
    is_wide = is_many(sink.items)
    sizes = [_measure(code, block, env, sink.items[k], is_wide) for k in texts]
    for k, size in zip(texts, sizes, strict=True):
        after = b.add(f.get_slot(f"out{k}.used"), size)
        f.leave_if(b.icmp_signed(">", after, f.slot(f"out{k}.room")), OUTPUT_FULL)
    for k, item in enumerate(sink.items):
        is_bytes = type_of(item.expr).is_bytes
        write = _write_strings if type_of(item.expr).is_loose else _write_bytes if is_bytes else _write_fixed
        if is_wide:
            _write_apart(code, k, item, block, env, count, write)
        else:
            write(code, k, item, block, env, count)
    code.check_errors(ERROR)
    f.set_slot("out.count", end)


Write = Callable[[Code, int, Named, Block, Env, ir.Value], None]


def _write_apart(code: Code, k: int, item: Named, block: Block, env: Env, count: ir.Value, write: Write) -> None:
    """The same in a part of its own; columns of one shape share it."""
    shape = shape_of([item.expr], env)
    key = None if shape is None else (write, shape[0])
    before = len(code.never_null)
    code.part(lambda: write(code, k, item, block, env, count), key, () if shape is None else (*shape[1], f"out{k}"))
    if key is not None:
        if len(code.never_null) == before:
            code.never_null.append(code.sure[key])
        code.sure[key] = code.never_null[-1]


def _measure(code: Code, block: Block, env: Env, item: Named, is_wide: bool) -> ir.Value:
    """Bytes that a string column of this block takes."""
    f = code.f
    total = f.var(I64, const(0))

    def measure() -> None:
        found = f.var(I64, const(0))
        with rows(code, block) as row:
            value = lower_expr(code, item.expr, env, row)
            size = value.string.size
            if value.valid is not None:
                size = f.b.select(value.valid, size, const(0))
            found.set(f.b.add(found.get(), size))
        total.set(found.get())

    if is_wide:
        code.part(measure)
    else:
        measure()
    return total.get()


def _write_fixed(code: Code, k: int, item: Named, block: Block, env: Env, count: ir.Value) -> None:
    f, b = code.f, code.f.b
    with rows(code, block) as row:
        value = lower_expr(code, item.expr, env, row)
        code.never_null.append(value.valid is None)
        position = b.add(count, row.k)
        code.check_within(f"a row of the output {item.name!r}", position, lambda: f.slot("out.capacity"))
        f.store(to_memory(f, value.data), f.slot(f"out{k}.data", PTR), position)
        if value.valid is not None:
            f.store(b.zext(value.valid, I8), f.slot(f"out{k}.valid", PTR), position)


def _write_bytes(code: Code, k: int, item: Named, block: Block, env: Env, count: ir.Value) -> None:
    """Binaries of one width, each in its place; a null leaves its place as it is."""
    f, b, width = code.f, code.f.b, const(type_of(item.expr).width)
    with rows(code, block) as row:
        value = lower_expr(code, item.expr, env, row)
        code.never_null.append(value.valid is None)
        position = b.add(count, row.k)
        code.check_within(f"a row of the output {item.name!r}", position, lambda: f.slot("out.capacity"))
        size = width if value.valid is None else b.select(value.valid, width, const(0))
        target = f.byte_at(f.slot(f"out{k}.data", PTR), b.mul(position, width))
        f.call("llvm.memcpy.p0.p0.i64", ir.VoidType(), [target, value.string.ptr, size, const(0, I1)])
        if value.valid is not None:
            f.store(b.zext(value.valid, I8), f.slot(f"out{k}.valid", PTR), position)


def _write_strings(code: Code, k: int, item: Named, block: Block, env: Env, count: ir.Value) -> None:
    """Bytes of all rows, consecutively, and the end offset of each."""
    f, b = code.f, code.f.b
    used = f.var(I64, f.get_slot(f"out{k}.used"))
    with rows(code, block) as row:
        value = lower_expr(code, item.expr, env, row)
        code.never_null.append(value.valid is None)
        text = value.string
        if value.valid is not None:
            text = Str(text.ptr, b.select(value.valid, text.size, const(0)))
        position = b.add(count, row.k)
        target = f.byte_at(f.slot(f"out{k}.data", PTR), used.get())
        f.call("llvm.memcpy.p0.p0.i64", ir.VoidType(), [target, text.ptr, text.size, const(0, I1)])
        used.set(b.add(used.get(), text.size))
        if f.safe:
            fits = b.icmp_unsigned("<=", used.get(), f.slot(f"out{k}.room"))
            code.check(f"the bytes of the output {item.name!r}", fits)
        f.store(b.trunc(used.get(), I32), f.slot(f"out{k}.offsets", PTR), b.add(position, const(1)))
        if value.valid is not None:
            f.store(b.zext(value.valid, I8), f.slot(f"out{k}.valid", PTR), position)
    f.set_slot(f"out{k}.used", used.get())
