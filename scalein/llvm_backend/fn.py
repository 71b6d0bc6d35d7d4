"""Fn: a structured builder over llvmlite. Control flow reads as control flow.

No basic block, phi or alloca is written outside this file. Locals are `Var`s (stack slots that
LLVM's SROA turns into registers), loops and conditions are context managers, and everything a
kernel gets from outside is a named slot of its frame: an array of 8-byte words, one pointer
argument, so that a call costs one struct pointer (0.23 us against 0.68 for five arguments).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

from llvmlite import ir

from scalein.layout import Frame, check_slot

_RARE = "scalein.rare"
I1, I8, I16, I32, I64, I128 = (ir.IntType(n) for n in (1, 8, 16, 32, 64, 128))
F32, F64 = ir.FloatType(), ir.DoubleType()
PTR = ir.PointerType()

Arm = AbstractContextManager[object]  # one side of a condition, entered to write it


def const(value: int | float, typ: ir.Type = I64) -> ir.Constant:
    """A constant; integers are wrapped into the type's bits."""
    if isinstance(typ, ir.IntType):
        return ir.Constant(typ, int(value) & ((1 << typ.width) - 1))
    return ir.Constant(typ, value)


class _Builder(ir.IRBuilder):  # type: ignore[misc]  # llvmlite has no types
    """Integers of more than 64 bits are aligned to 8 bytes, as in records and in Arrow's buffers; LLVM assumes 16.

    `wide` counts the instructions that compute with such: see `Fn.loop`.
    """

    wide = 0

    def _insert(self, instruction: ir.Instruction) -> None:
        super()._insert(instruction)
        self.wide += _is_wide(instruction)

    def load(self, ptr: ir.Value, name: str = "", align: int | None = None, typ: ir.Type | None = None) -> ir.Value:
        return super().load(ptr, name, align or _align(typ), typ)

    def store(self, value: ir.Value, ptr: ir.Value, align: int | None = None) -> ir.Value:
        return super().store(value, ptr, align or _align(value.type))


def _is_wide(instruction: ir.Instruction) -> bool:
    """Whether it computes with integers of more than 64 bits; extending and cutting one alone leaves no trace."""
    if isinstance(instruction, ir.CastInstr):
        return False
    return any(_align(value.type) is not None for value in (instruction, *instruction.operands))


def _align(typ: ir.Type | None) -> int | None:
    return 8 if isinstance(typ, ir.IntType) and typ.width > 64 else None


class Var:
    """A mutable local."""

    def __init__(self, f: Fn, typ: ir.Type, slot: ir.Value) -> None:
        self._f, self._typ, self._slot = f, typ, slot

    def get(self) -> ir.Value:
        return self._f.b.load(self._slot, typ=self._typ)

    def set(self, value: ir.Value) -> None:
        self._f.b.store(value, self._slot)


class Fn:
    """One kernel under construction: `i64 name(ptr frame)`."""

    def __init__(self, name: str, *, safe: bool = False, features: str = "") -> None:
        self.module = ir.Module(name)
        self.fn = ir.Function(self.module, ir.FunctionType(I64, [PTR]), name)
        self.fn.attributes.add("nounwind")
        self.fn.args[0].add_attribute("noalias")
        self.safe = safe
        self.features = features
        self._entry = self.fn.append_basic_block("entry")
        self._head = _Builder(self._entry)
        self.b = _Builder(self.fn.append_basic_block("body"))
        self._slots: dict[str, int] = {}
        self._loaded: dict[str, ir.Value] = {}
        domain = self.module.add_metadata([ir.MetaDataString(self.module, "scalein")])
        scope = self.module.add_metadata([ir.MetaDataString(self.module, "input"), domain])
        # Input buffers are never written by a kernel: say so on every load and store, or the
        # vectorizer would have to check each pair of pointers at run time.
        self._input_scope = self.module.add_metadata([scope])

    def finish(self) -> Frame:
        """Close the entry block; gives the frame's slot names in order."""
        self._head.branch(self.fn.basic_blocks[1])
        return Frame(tuple(self._slots))

    def text(self) -> str:
        """The module as LLVM reads it."""
        # A loop's metadata must name itself first, which llvmlite cannot say.
        rare = rf'^(!\d+) = !{{ !"{_RARE}" }}$'
        named = r'\1 = distinct !{ \1, !{ !"llvm.loop.vectorize.enable", i1 false } }'
        return re.sub(rare, named, str(self.module), flags=re.MULTILINE)

    # --- the frame

    def slot_ptr(self, name: str) -> ir.Value:
        """Address of a frame slot that the kernel changes."""
        place = self._slots.get(name)
        if place is None:
            check_slot(name)
            place = self._slots[name] = len(self._slots)
        return self._head.gep(self.fn.args[0], [const(place)], source_etype=I64)

    def slot(self, name: str, typ: ir.Type = I64) -> ir.Value:
        """A frame slot's value, read once at entry."""
        if name not in self._loaded:
            self._loaded[name] = self._head.load(self.slot_ptr(name), typ=typ, name=name)
        return self._loaded[name]

    def set_slot(self, name: str, value: ir.Value) -> None:
        self.b.store(value, self.slot_ptr(name))

    def get_slot(self, name: str, typ: ir.Type = I64) -> ir.Value:
        """A frame slot's current value."""
        return self.b.load(self.slot_ptr(name), typ=typ)

    # --- locals and memory

    def var(self, typ: ir.Type, init: ir.Value | None = None) -> Var:
        slot = self._head.alloca(typ)
        slot.type = PTR
        var = Var(self, typ, slot)
        if init is not None:
            var.set(init)
        return var

    def scratch(self, typ: ir.Type, count: int, name: str = "scratch") -> ir.Value:
        """An array on the stack, aligned to a cache line."""
        block = self._head.alloca(ir.ArrayType(typ, count), name=name)
        block.align = 64
        block.type = PTR  # llvmlite gives a typed pointer, which this LLVM no longer knows
        return block

    def constant_array(self, name: str, typ: ir.ArrayType, values: object, align: int = 16) -> ir.Value:
        """Address of constant data, one copy a module."""
        data = self.module.globals.get(name)
        if data is None:
            data = ir.GlobalVariable(self.module, typ, name)
            data.initializer = ir.Constant(typ, values)
            data.global_constant = True
            data.linkage = "private"
            data.align = align
            data.type = PTR
        return data

    def at(self, base: ir.Value, index: ir.Value, typ: ir.Type) -> ir.Value:
        """Address of element `index` of an array of `typ`."""
        return self.b.gep(base, [index], source_etype=typ, inbounds=True)

    def byte_at(self, base: ir.Value, offset: ir.Value | int) -> ir.Value:
        return self.at(base, const(offset) if isinstance(offset, int) else offset, I8)

    def load(self, base: ir.Value, index: ir.Value, typ: ir.Type, align: int | None = None) -> ir.Value:
        return self.b.load(self.at(base, index, typ), typ=typ, align=align)

    def load_input(self, ptr: ir.Value, typ: ir.Type, align: int | None = None) -> ir.Value:
        """A load from a buffer that nobody writes while the kernel runs."""
        loaded = self.b.load(ptr, typ=typ, align=align)
        loaded.set_metadata("alias.scope", self._input_scope)
        return loaded

    def load_now(self, ptr: ir.Value) -> ir.Value:
        """A word that another thread may change at any time."""
        return self.b.load_atomic(ptr, "monotonic", 8, typ=I64)

    def store_now(self, value: ir.Value, ptr: ir.Value) -> None:
        """A word that another thread may read at any time; it sees everything stored before as well."""
        self.b._insert(ir.instructions.StoreAtomicInstr(self.b.block, value, ptr, "release", 8))

    def store(self, value: ir.Value, base: ir.Value, index: ir.Value | None = None, align: int | None = None) -> None:
        ptr = base if index is None else self.at(base, index, value.type)
        self.b.store(value, ptr, align=align).set_metadata("noalias", self._input_scope)

    # --- control flow

    @contextmanager
    def loop(self, count: ir.Value, start: ir.Value | None = None, step: int = 1,
             rare: bool = False) -> Iterator[ir.Value]:
        """`for i in range(start, count, step)`, as a rotated loop the vectorizer understands.

        A `rare` one is left as it is: making it fast would take longer than it will ever run. So is one that computes
        with more than 64 bits: no CPU has vectors of such, and LLVM 22 mixes up their lanes on AVX-512.
        """
        b = self.b
        start = const(0) if start is None else start
        before = b.block
        body, after = b.append_basic_block("loop"), b.append_basic_block("done")
        b.cbranch(b.icmp_signed("<", start, count), body, after)
        b.position_at_end(body)
        i = b.phi(I64, "i")
        i.add_incoming(start, before)
        wide = b.wide
        yield i
        following = b.add(i, const(step), flags=["nsw"])
        i.add_incoming(following, b.block)
        back = b.cbranch(b.icmp_signed("<", following, count), body, after)
        if rare or b.wide > wide:
            back.set_metadata("llvm.loop", self.module.add_metadata([ir.MetaDataString(self.module, _RARE)]))
        b.position_at_end(after)

    @contextmanager
    def forever(self) -> Iterator[Loop]:
        """A loop left through `Loop.stop_if`."""
        b = self.b
        body, after = b.append_basic_block("loop"), b.append_basic_block("done")
        b.branch(body)
        b.position_at_end(body)
        yield Loop(self, body, after)
        b.branch(body)
        b.position_at_end(after)

    @contextmanager
    def when(self, condition: ir.Value, likely: bool | None = None) -> Iterator[None]:
        with self.b.if_then(condition, likely=likely):
            yield

    @contextmanager
    def when_else(self, condition: ir.Value, likely: bool | None = None) -> Iterator[tuple[Arm, Arm]]:
        with self.b.if_else(condition, likely=likely) as arms:
            yield arms

    @contextmanager
    def function(self, name: str, result: ir.Type, args: Sequence[ir.Type]) -> Iterator[ir.Function]:
        """An internal function: what is built inside goes there. It has no frame, and returns through `give`."""
        outer = self.fn, self._entry, self._head, self.b
        self.fn = ir.Function(self.module, ir.FunctionType(result, args), self.module.get_unique_name(f"udf.{name}"))
        self.fn.linkage = "internal"
        self.fn.attributes.add("nounwind")
        self._entry = self.fn.append_basic_block("entry")
        self._head = _Builder(self._entry)
        self.b = _Builder(self.fn.append_basic_block("body"))
        made = self.fn
        yield made
        self._head.branch(made.basic_blocks[1])
        self.fn, self._entry, self._head, self.b = outer

    def give(self, value: ir.Value) -> None:
        """Return from an internal function here. What follows in this block is dead."""
        self.b.ret(value)
        self.b.position_at_end(self.b.append_basic_block("dead"))

    def leave(self, status: int) -> None:
        """Return from the kernel here. What follows in this block is dead."""
        self.b.ret(const(status))
        self.b.position_at_end(self.b.append_basic_block("dead"))

    def leave_if(self, condition: ir.Value, status: int) -> None:
        out, on = self.b.append_basic_block("leave"), self.b.append_basic_block("stay")
        self.b.cbranch(condition, out, on)
        self.b.position_at_end(out)
        self.b.ret(const(status))
        self.b.position_at_end(on)

    # --- small things

    def call(self, name: str, result: ir.Type, args: Sequence[ir.Value]) -> ir.Value:
        """An LLVM intrinsic by its mangled name, or a C function of the process."""
        typ = ir.FunctionType(result, [a.type for a in args])
        fn = self.module.globals.get(name) or ir.Function(self.module, typ, name)
        return self.b.call(fn, list(args))

    def prefetch(self, ptr: ir.Value, is_near: bool = False) -> None:
        """Have a cache line brought into L2 (`prefetcht1`), whether it will be read or written; into L1 if `is_near`,
        where most lines come from a cache.

        L1 has some two dozen places for lines on their way, and prefetching into it waits for one: 12 ns a random line
        of memory on a Zen 4 core, whatever the distance. L2 has many more: 5 ns. From L2 or L3 it need not wait long.
        """
        read, level, data = const(0, I32), const(3 if is_near else 2, I32), const(1, I32)
        self.call("llvm.prefetch.p0", ir.VoidType(), [ptr, read, level, data])

    def min(self, a: ir.Value, b: ir.Value) -> ir.Value:
        return self.b.select(self.b.icmp_signed("<", a, b), a, b)

    def max(self, a: ir.Value, b: ir.Value) -> ir.Value:
        return self.b.select(self.b.icmp_signed(">", a, b), a, b)

    def all_of(self, *conditions: ir.Value | None) -> ir.Value | None:
        """The conjunction of i1 values; None stands for true."""
        result: ir.Value | None = None
        for condition in conditions:
            if condition is not None:
                result = condition if result is None else self.b.and_(result, condition)
        return result

    def any_of(self, *conditions: ir.Value | None) -> ir.Value | None:
        """The disjunction of i1 values; None stands for false."""
        result: ir.Value | None = None
        for condition in conditions:
            if condition is not None:
                result = condition if result is None else self.b.or_(result, condition)
        return result


class Loop:
    """Handle of a `forever` loop."""

    def __init__(self, f: Fn, head: ir.Block, after: ir.Block) -> None:
        self._f, self._head, self._after = f, head, after

    def stop_if(self, condition: ir.Value) -> None:
        b = self._f.b
        on = b.append_basic_block("on")
        b.cbranch(condition, self._after, on)
        b.position_at_end(on)

    def again(self) -> None:
        """Begin the next round here."""
        b = self._f.b
        b.branch(self._head)
        b.position_at_end(b.append_basic_block("dead"))

    def stop(self) -> None:
        b = self._f.b
        b.branch(self._after)
        b.position_at_end(b.append_basic_block("dead"))
