"""Fn: a structured builder over llvmlite. Control flow reads as control flow.

No basic block, phi or alloca is written outside this file. Locals are `Var`s (stack slots that
LLVM's SROA turns into registers), loops and conditions are context managers, and everything a
kernel gets from outside is a named slot of its frame: an array of 8-byte words, one pointer
argument, so that a call costs one struct pointer (0.23 us against 0.68 for five arguments).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

from llvmlite import ir

from scalein.layout import DONE, Frame, check_slot

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
    part: _Part | None = None

    def _insert(self, instruction: ir.Instruction) -> None:
        if self.part is not None:
            self.part.localize(instruction)
        super()._insert(instruction)
        self.wide += _is_wide(instruction)

    def _set_terminator(self, terminator: ir.Instruction) -> ir.Instruction:
        if self.part is not None:
            self.part.localize(terminator)
        return super()._set_terminator(terminator)

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


Rename = Callable[[str], str]


def literal_name(value: float) -> str:
    """A float constant among the names in which parts differ."""
    return f"={value!r}"


def _renaming(new: dict[str, str]) -> Rename:
    """From names that begin with a key, or are one, to those that begin with its value."""
    longest = sorted(new, key=len, reverse=True)

    def rename(name: str) -> str:
        old = next((old for old in longest if name == old or name.startswith(f"{old}.")), None)
        return name if old is None else new[old] + name[len(old) :]

    return rename


class _Part:
    """A part of a kernel under construction, which becomes a function of its own: see `Fn.part`.

    Whatever it takes from the kernel is a parameter, in the order in which it is met. `given` makes the arguments of a
    call, in the kernel, for the names of that call.
    """

    def __init__(self, fn: ir.Function, names: tuple[str, ...]) -> None:
        self.fn, self.names = fn, names
        self.leaves = False  # whether it may return a status with which the kernel leaves
        self.is_special = False  # whether it serves one call only
        self.given: list[Callable[[Rename], ir.Value]] = []
        self._known: dict[object, ir.Value] = {}

    def parameter(self, key: object, typ: ir.Type, given: Callable[[Rename], ir.Value]) -> ir.Value:
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = ir.Argument(self.fn, typ)
            if typ == PTR:  # scratch, input, output and records never overlap
                found.add_attribute("noalias")
            self.fn.args = (*self.fn.args, found)
            self.fn.ftype = ir.FunctionType(I64, [arg.type for arg in self.fn.args])
            self.given.append(given)
        return found

    def localize(self, instruction: ir.Instruction) -> None:
        """Replace values of the kernel by parameters."""
        for name, value in vars(instruction).items():
            if isinstance(value, list | tuple):
                setattr(instruction, name, type(value)(map(self.local, value)))
            else:
                setattr(instruction, name, self.local(value))

    def local(self, value: object) -> object:
        if isinstance(value, ir.Instruction):
            is_own = value.function is self.fn
        elif isinstance(value, ir.Argument):
            is_own = value.parent is self.fn
        else:
            return value
        return value if is_own else self.parameter(id(value), value.type, lambda rename: value)


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
        self._part: _Part | None = None
        self._before = self.b  # of a part: what comes before its body
        self._parts: dict[object, _Part] = {}
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
        if self._part is not None:
            return self._part.parameter(("place", name), PTR, lambda rename: self.slot_ptr(rename(name)))
        place = self._slots.get(name)
        if place is None:
            check_slot(name)
            place = self._slots[name] = len(self._slots)
        return self._head.gep(self.fn.args[0], [const(place)], source_etype=I64)

    def slot(self, name: str, typ: ir.Type = I64) -> ir.Value:
        """A frame slot's value, read once at entry; before the call of a part that asks for it, if none else does."""
        if self._part is not None:
            return self._part.parameter(("slot", name), typ, lambda rename: self._slot_now(rename(name), typ))
        if name not in self._loaded:
            self._loaded[name] = self._head.load(self.slot_ptr(name), typ=typ, name=name)
        return self._loaded[name]

    def _slot_now(self, name: str, typ: ir.Type) -> ir.Value:
        return self._loaded[name] if name in self._loaded else self.get_slot(name, typ)

    def named_constant(self, name: str, value: Callable[[str], int]) -> ir.Value:
        """A constant that belongs to a name, such as the offset of a field: calls of a part may have others."""
        if self._part is None or not self._part.names:
            return const(value(name))
        return self._part.parameter(("constant", name, value(name)), I64, lambda rename: const(value(rename(name))))

    def literal(self, value: float, typ: ir.Type) -> ir.Value:
        """A float of an expression; calls of a part may have others."""
        name = literal_name(value)
        if self._part is None or name not in self._part.names:
            return const(value, typ)
        return self._part.parameter((name, str(typ)), typ, lambda rename: const(float(rename(name)[1:]), typ))

    def labelled_constant(self, text: str, value: Callable[[str], int]) -> ir.Value | None:
        """A constant that belongs to a text which ends in a name in backticks, if other parts have other ones."""
        part = self._part
        label = "" if part is None else next((n for n in part.names if n[0] == "`" and text.endswith(n)), "")
        if part is None or not label:
            return None
        start = text[: -len(label)]
        return part.parameter(("constant", text), I64, lambda rename: const(value(start + rename(label))))

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
        """A load from a buffer that is not written while the kernel runs."""
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
        start = start if self._part is None else self._part.local(start)
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
        outer = self.fn, self._entry, self._head, self.b, self._part
        self._part = None
        self.fn = ir.Function(self.module, ir.FunctionType(result, args), self.module.get_unique_name(f"udf.{name}"))
        self.fn.linkage = "internal"
        self.fn.attributes.add("nounwind")
        self._entry = self.fn.append_basic_block("entry")
        self._head = _Builder(self._entry)
        self.b = _Builder(self.fn.append_basic_block("body"))
        made = self.fn
        yield made
        self._head.branch(made.basic_blocks[1])
        self.fn, self._entry, self._head, self.b, self._part = outer

    def part(self, body: Callable[[], None], key: object = None, names: tuple[str, ...] = ()) -> bool:
        """What `body` writes as a function of its own, called here: LLVM's time grows faster than a function does.

        Parts with the same `key` have the same code but for `names`, the first words of slots and of fields: one
        function serves them all, and `body` writes it once. Gives whether it was written now.
        """
        found = None if key is None else self._parts.get(key)
        if found is None:
            found = self._written(body, names)
            if key is not None and not found.is_special:
                self._parts[key] = found
        rename = _renaming(dict(zip(found.names, names, strict=True)))
        status = self.b.call(found.fn, [given(rename) for given in found.given])
        if found.leaves:
            out, on = self.b.append_basic_block("leave"), self.b.append_basic_block("stay")
            self.b.cbranch(self.b.icmp_unsigned("!=", status, const(DONE)), out, on)
            self.b.position_at_end(out)
            self.b.ret(status)
            self.b.position_at_end(on)
        return found.names is names

    def _written(self, body: Callable[[], None], names: tuple[str, ...]) -> _Part:
        assert self._part is None, "a part within a part"
        outer = self.fn, self._entry, self._head, self.b, self._before
        self.fn = ir.Function(self.module, ir.FunctionType(I64, []), self.module.get_unique_name("part"))
        self.fn.linkage = "internal"
        self.fn.attributes.add("nounwind")
        self.fn.attributes.add("noinline")
        part = self._part = _Part(self.fn, names)
        self._entry, before, first = (self.fn.append_basic_block(name) for name in ("entry", "before", "body"))
        self._head, self._before, self.b = (_Builder(block) for block in (self._entry, before, first))
        for builder in (self._head, self._before, self.b):
            builder.part = part
        body()
        self.b.ret(const(DONE))
        self._head.branch(before)
        self._before.branch(first)
        self.fn, self._entry, self._head, self.b, self._before = outer
        self._part = None
        return part

    @property
    def has_part(self) -> bool:
        """Whether what is written goes to a part."""
        return self._part is not None

    @contextmanager
    def before_part(self) -> Iterator[None]:
        """What is written inside comes before the rest of the part."""
        assert self._part is not None
        here, self.b = self.b, self._before
        yield
        self._before, self.b = self.b, here

    def keep_special(self) -> None:
        """The part under way has something of its own: no other one is like it."""
        if self._part is not None:
            self._part.is_special = True

    def give(self, value: ir.Value) -> None:
        """Return from an internal function here. What follows in this block is dead."""
        self.b.ret(value)
        self.b.position_at_end(self.b.append_basic_block("dead"))

    def leave(self, status: int) -> None:
        """Return from the kernel here. What follows in this block is dead."""
        if self._part is not None:
            self._part.leaves = True
        self.b.ret(const(status))
        self.b.position_at_end(self.b.append_basic_block("dead"))

    def leave_if(self, condition: ir.Value, status: int) -> None:
        if self._part is not None:
            self._part.leaves = True
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

    def freeze(self, value: ir.Value) -> ir.Value:
        """The value as it is, which LLVM does not join with what it was computed from."""
        frozen = ir.Instruction(self.b.block, value.type, "freeze", [value])
        self.b._insert(frozen)
        return frozen

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
