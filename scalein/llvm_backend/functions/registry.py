"""One lowering a function: `@lowers("name")` on what makes its machine code, and `lower_call`, which finds it.

A lowering gets a `CallSite` and gives the data of a value. What null means stands in the function's declaration
(`ir/functions/`): where that is STRICT, validity is applied here, and a lowering that may be null in other rows as well
gives a `Value` whose `valid` says where it is known. Lowerings of other functions give a `Value` of their own.

Null and dead rows are computed as well, so every lowering is total: divisors and shifts are guarded with `select`. A
failing row only sets a bit (`CallSite.fail`), under the validity of the arguments and under `live`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from llvmlite import ir

from scalein.dtypes import DType
from scalein.errors import InternalError
from scalein.ir.exprs import Call, Expr, Lit, type_of
from scalein.ir.functions.registry import REGISTRY, Nulls
from scalein.ir.printer import show_brief, show_expr
from scalein.llvm_backend.code import Code
from scalein.llvm_backend.fn import Fn, const
from scalein.llvm_backend.values import Str, Value

Data: TypeAlias = ir.Value | Str


@dataclass(slots=True)
class CallSite:
    """A call in a row, and what its lowering needs."""

    code: Code
    call: Call
    values: Sequence[Value]  # of the arguments; none if the lowering is lazy
    live: ir.Value | None  # the rows in which the call's value is asked for
    failed: list[ir.Value] | None = None  # takes the conditions under which a call that is only tried fails
    f: Fn = field(init=False)
    valid: ir.Value | None = field(init=False)  # no argument is null

    def __post_init__(self) -> None:
        self.f = self.code.f
        self.valid = self.f.all_of(*(value.valid for value in self.values))

    @property
    def args(self) -> list[ir.Value]:
        """The data of the arguments."""
        return [value.data for value in self.values]

    @property
    def string(self) -> Str:
        """The first argument, a text."""
        return self.values[0].string

    @property
    def types(self) -> list[DType]:
        return [type_of(arg) for arg in self.call.args]

    @property
    def dtype(self) -> DType:
        return type_of(self.call)

    @property
    def params(self) -> tuple[object, ...]:
        return self.call.params

    @property
    def literals(self) -> list[object]:
        """The arguments that are constants, None for the others."""
        return [arg.value if isinstance(arg, Lit) else None for arg in self.call.args]

    def fail(self, what: str, condition: ir.Value) -> None:
        """A row for which the condition holds has no value: an error, unless the call is only tried."""
        if self.failed is not None:
            self.failed.append(condition)
            return
        counted = self.f.all_of(condition, self.valid, self.live)
        assert counted is not None
        self.code.fail(f"{what} in `{show_brief(self.call)}`", counted)


    def fail_with(self, what: str, condition: ir.Value, text: Str) -> None:
        """As `fail`, with an error that shows the text of the first such row."""
        self.fail(what, condition)
        if self.failed is None:
            is_first = self.f.b.icmp_unsigned("==", self.f.get_slot("bad.error"), const(0))
            counted = self.f.all_of(condition, self.valid, self.live, is_first)
            with self.f.when(counted, likely=False):
                self.f.set_slot("bad.error", const(1 << self.code.bit(f"{what} in `{show_brief(self.call)}`")))
                self.f.set_slot("bad.text", text.ptr)
                self.f.set_slot("bad.size", text.size)


Lowering = Callable[[CallSite], Data | Value]
# Asks for arguments, each with where it is computed (elsewhere it cannot fail), is sent their values, returns its own.
# An expression may be deep, so lowerings do not call one another.
LazyLowering = Callable[[CallSite], Generator[tuple[Expr, ir.Value | None], Value, Value]]

LOWERINGS: dict[str, Lowering] = {}
LAZY: dict[str, LazyLowering] = {}  # those that get unevaluated arguments
PLAIN: set[str] = set()  # those of which LLVM makes the same code whatever a float constant among their arguments is


def lowers(*names: str, plain: bool = False) -> Callable[[Lowering], Lowering]:
    """Registers the lowering of functions; see `PLAIN`."""

    def register(lowering: Lowering) -> Lowering:
        for name in names:
            assert name not in LOWERINGS | LAZY, f"{name} is lowered twice"
            LOWERINGS[name] = lowering
        PLAIN.update(names if plain else ())
        return lowering

    return register


def lowers_lazily(name: str, plain: bool = False) -> Callable[[LazyLowering], LazyLowering]:
    """Registers a lowering that decides itself which arguments count, and where."""

    def register(lowering: LazyLowering) -> LazyLowering:
        assert name not in LOWERINGS | LAZY, f"{name} is lowered twice"
        LAZY[name] = lowering
        PLAIN.update([name] if plain else ())
        return lowering

    return register


def lower_call(site: CallSite) -> Value:
    """The value of a call, null as its function declares it."""
    lowering = LOWERINGS.get(site.call.fn)
    if lowering is None:
        raise InternalError(f"no lowering for {site.call.fn}", found=show_expr(site.call))
    found = lowering(site)
    if REGISTRY[site.call.fn].nulls is not Nulls.STRICT:
        assert isinstance(found, Value)
        return found
    if isinstance(found, Value):
        return Value(found.data, site.f.all_of(site.valid, found.valid))
    return Value(found, site.valid)
