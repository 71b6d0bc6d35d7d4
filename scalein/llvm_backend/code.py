"""Code: one kernel being lowered, with the errors its expressions may raise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from llvmlite import ir

from scalein.layout import OUT_OF_BOUNDS
from scalein.llvm_backend.fn import I8, I64, Fn, Var, const


@dataclass(slots=True)
class Code:
    """The builder, and a bit for each way an expression can fail.

    Failing rows only set bits, in vector code; the block's end looks at them once. Past 63 different
    failures the last bit is shared.
    """

    f: Fn
    errors: list[str] = field(default_factory=list)
    failed: Var | None = None
    rounds: Var | None = None  # of joins that multiply rows, in this call
    never_null: list[bool] = field(default_factory=list)  # of the collected columns
    sure: dict[object, bool] = field(default_factory=dict)  # the same by the key of the part that writes them
    checks: list[str] = field(default_factory=list)  # of safe mode
    strings: dict[bytes, int] = field(default_factory=dict)
    helpers: dict[str, ir.Function] = field(default_factory=dict)

    def fail(self, what: str, condition: ir.Value) -> None:
        """Remember `what` if `condition` holds for a live, valid row."""
        mark = self.f.labelled_constant(what, lambda text: 1 << self.bit(text))
        if mark is None:
            mark = const(1 << self.bit(what))
        self.fail_bits(self.f.b.select(condition, mark, const(0)))

    def part(self, body: Callable[[], None], key: object = None, names: tuple[str, ...] = ()) -> None:
        """What `body` writes as a function of its own: see `Fn.part`. Its failures are the kernel's."""
        outer = self.failed
        assert outer is not None

        def write() -> None:
            # Bits are collected in a register: a store in a loop would keep it from being vectorized.
            self.failed = self.f.var(I64, const(0))
            body()
            outer.set(self.f.b.or_(outer.get(), self.failed.get()))

        try:
            self.f.part(write, None if self.f.safe else key, names)
        finally:
            self.failed = outer

    def bit(self, what: str) -> int:
        """The bit that stands for `what`; a part that has one is like no other."""
        self.f.keep_special()
        if what not in self.errors:
            self.errors.append(what)
        return min(self.errors.index(what), 63)

    def fail_bits(self, bits: ir.Value) -> None:
        """Remember every failure whose bit is set."""
        assert self.failed is not None
        self.failed.set(self.f.b.or_(self.failed.get(), bits))

    def check(self, what: str, *conditions: ir.Value) -> None:
        """Safe mode: leave the kernel unless all conditions hold. Otherwise no code at all."""
        if not self.f.safe:
            return
        if what not in self.checks:
            self.checks.append(what)
        holds = self.f.all_of(*conditions)
        assert holds is not None
        with self.f.when(self.f.b.not_(holds), likely=False):
            self.f.set_slot("unsafe", const(self.checks.index(what)))
            self.f.leave(OUT_OF_BOUNDS)

    def check_within(self, what: str, index: ir.Value, count: Callable[[], ir.Value]) -> None:
        """Safe mode: 0 <= index < count. The count is asked for only then: it may need a slot of its own."""
        if self.f.safe:
            self.check(what, self.f.b.icmp_unsigned("<", index, count()))

    def check_errors(self, status: int, later: bool = False) -> None:
        """Leave the kernel if any row has failed so far; `later`: what can fail may not have been lowered yet."""
        if self.failed is None or not (self.errors or later):
            return
        bits = self.failed.get()
        with self.f.when(self.f.b.icmp_unsigned("!=", bits, const(0)), likely=False):
            self.f.set_slot("errors", bits)
            self.f.leave(status)

    def helper(self, name: str, write: Callable[[Code], ir.Function]) -> ir.Function:
        """An internal function of the kernel, written when it is first needed."""
        if name not in self.helpers:
            self.helpers[name] = write(self)
        return self.helpers[name]

    def text(self, content: bytes) -> ir.Value:
        """Address of constant bytes, padded so that 16 bytes may be read from any start."""
        number = self.strings.setdefault(content, len(self.strings))
        padded = content + bytes(16)
        return self.f.constant_array(f"text{number}", ir.ArrayType(I8, len(padded)), bytearray(padded))
