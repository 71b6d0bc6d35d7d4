"""Op: what every logical operator answers for itself, so that passes, printer and verifier hold no list of ops.

An op is immutable. Every expression inside is resolved: the API resolves it against the input's schema before it
builds the op, so an op that exists is well typed. Plans may be thousands of ops deep, and inputs may be shared: nothing
here recurses.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, ClassVar, Self

from scalein.dtypes import Schema
from scalein.ir.digest import digest_of
from scalein.ir.event_time import NO_TIME, EventTime
from scalein.ir.exprs import Expr, deep_parts

if TYPE_CHECKING:
    from scalein.errors import SourceLoc
    from scalein.ir.passes.physicalize import Planner
    from scalein.ir.physical import Node


class Op(ABC):
    """A logical operator over its inputs; subclasses are frozen dataclasses.

    Equal ops have equal digests: data and places in the user's code do not count.
    """

    _schema: Schema | None = None
    _digest: bytes | None = None
    _depth: int | None = None
    _deep: tuple[Op, ...] | None = None
    _event_time: EventTime | None = None

    is_row_by_row: ClassVar[bool] = False  # each row gives its rows at once, whatever came before
    is_one_to_one: ClassVar[bool] = False  # each row gives exactly one
    has_state: ClassVar[bool] = False  # what comes of a row depends on others
    is_blocking: ClassVar[bool] = False  # it needs all its rows, and a bounded run of them, before it gives the first
    names_columns: ClassVar[bool] = True  # it decides which columns come out; else they are the input's
    keeps_nullable: ClassVar[bool] = False  # its columns have their nullability from its expressions

    if TYPE_CHECKING:

        @property
        def at(self) -> SourceLoc: ...

        @property
        def inputs(self) -> tuple[Op, ...]:
            """The ops that feed this one, left to right."""

    @property
    def schema(self) -> Schema:
        """The columns that come out."""
        if self._schema is None:
            for op in _unmade(self, "_schema"):
                op.__dict__["_schema"] = op._columns()
        assert self._schema is not None
        return self._schema

    @property
    def digest(self) -> bytes:
        """Equal for equal plans, whatever data they are over and wherever they were written."""
        if self._digest is None:
            for op in _unmade(self, "_digest"):
                op.__dict__["_digest"] = digest_of(type(op).__name__, [value for _, value in op._own_fields()]
                                                   + [below._digest for below in op.inputs])
        assert self._digest is not None
        return self._digest

    @property
    def depth(self) -> int:
        """The number of ops on the longest way down to a source."""
        if self._depth is None:
            for op in _unmade(self, "_depth"):
                op.__dict__["_depth"] = 1 + max((below._depth or 0 for below in op.inputs), default=0)
        assert self._depth is not None
        return self._depth

    @property
    def event_time(self) -> EventTime:
        """The event time of its rows."""
        if self._event_time is None:
            for op in _unmade(self, "_event_time"):
                op.__dict__["_event_time"] = op._time_of([below._event_time or NO_TIME for below in op.streams])
        assert self._event_time is not None
        return self._event_time

    @property
    def memory_shares(self) -> int:
        """What its state may have of a job's memory, in relation to other operators."""
        return 3 if self.has_state else 0

    @property
    def streams(self) -> tuple[Op, ...]:
        """The inputs whose rows a job passes on; the others, which come after them, are static tables."""
        return self.inputs

    @abstractmethod
    def _columns(self) -> Schema:
        """The schema; those of the inputs are made."""

    def _own_fields(self) -> Iterator[tuple[str, object]]:
        """What makes this op the op it is, beside its inputs."""
        for each in fields(self):  # type: ignore[arg-type]
            if each.compare and each.name not in ("input", "inputs", "left", "right"):
                yield each.name, getattr(self, each.name)

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Op) and self.digest == other.digest)

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        about = [type(below).__name__ for below in self.inputs] + [f"{k}={v!r}" for k, v in self._own_fields()]
        return f"{type(self).__name__}({', '.join(about)})"

    def __reduce__(self) -> tuple[object, ...]:
        """Ops that lie deep come first, so that pickle finds them known when it comes to those that they feed."""
        if self._deep is None:
            for op in _unmade(self, "_deep"):
                op.__dict__["_deep"] = deep_parts(op, [(below, below._deep or ()) for below in op.inputs])
        return _unpickled, (self._deep, type(self), *(getattr(self, each.name) for each in fields(self)))  # type: ignore[arg-type]

    # --- rebuilding

    @abstractmethod
    def with_inputs(self, inputs: tuple[Op, ...]) -> Op:
        """The op over other inputs with the columns that it reads; the same object if they are the same."""

    def exprs(self) -> tuple[tuple[Expr, int], ...]:
        """Every expression, each with the number of the input whose columns it reads."""
        return ()

    def with_exprs(self, exprs: Sequence[Expr]) -> Self:
        """The op with other expressions, in the order of `exprs()`; the same object if they are the same."""
        if all(new is old for new, (old, _) in zip(exprs, self.exprs(), strict=True)):
            return self
        return self._with_exprs(iter(exprs))

    def _with_exprs(self, new: Iterator[Expr]) -> Self:
        return self

    # --- text

    def describe(self) -> tuple[str, str]:
        """Its name and what it does, without its inputs: `("Filter", "price > 1.0")`."""
        return type(self).__name__, self._detail()

    def _detail(self) -> str:
        return ""

    def retention(self) -> tuple[str, ...]:
        """What a job retains of its inputs, how long and why, in lines; nothing if it is not said."""
        return ()

    # --- promises

    def wrong(self) -> Iterator[str]:
        """What is wrong with the op over sound inputs, beside its expressions: nothing, unless a pass is."""
        return iter(())

    # --- columns that are needed (prune)

    def reads(self, needed: set[str]) -> tuple[set[str], ...]:
        """The columns wanted of each input to give those that are needed, beside what expressions read."""
        return (needed,)

    def narrow(self, needed: set[str]) -> Op:
        """The op without what is not needed of it; its inputs stay."""
        return self

    def cheapest(self) -> set[str]:
        """One column to carry the number of rows, where nothing but that is needed; none if the input has it."""
        return set()

    def passes_through(self, column: str) -> bool:
        """Whether a column of the rows that come out is that of the first input."""
        return False

    # --- event time

    def _time_of(self, below: Sequence[EventTime]) -> EventTime:
        """The event time of its rows, of that of its streams."""
        return below[0].through(filter(self.passes_through, self.schema.names)) if below else NO_TIME

    def times(self) -> tuple[tuple[Expr, int], ...]:
        """What it compares with the watermark, each with the number of the input that it reads."""
        return ()

    @property
    def late_schema(self) -> Schema:
        """The columns that its late rows are reported with."""
        return self.streams[0].schema

    def state_reads(self) -> set[str]:
        """The input's columns that its state is made of."""
        return {field.name for below in self.inputs for field in below.schema}

    # --- filters (push_down)

    def push(self, predicate: Expr) -> list[tuple[int, Expr]] | None:
        """Where a conjunct above the op may go: numbers of inputs, each with the predicate there; None: it stays.

        What makes a move legal is the set of rows that a predicate is computed for: one that can fail must not
        meet a row that it did not meet before.
        """
        return None

    # --- the physical plan

    @abstractmethod
    def physical(self, p: Planner) -> Node:
        """The node that computes this op; those of its inputs are `p.node(input)`."""


def _unpickled(first: tuple[Op, ...], kind: type[Op], *fields: object) -> Op:
    return kind(*fields)


def _unmade(root: Op, name: str) -> Iterator[Op]:
    """The ops at and below `root` that have no such value yet, inputs first; the caller makes it for each."""
    waiting = [root]
    while waiting:
        op = waiting[-1]
        below = [each for each in op.inputs if getattr(each, name) is None]
        if below:
            waiting += reversed(below)
            continue
        waiting.pop()
        if getattr(op, name) is None:
            yield op


class Unary(Op):
    """An op over one input."""

    if TYPE_CHECKING:

        @property
        def input(self) -> Op: ...

    @property
    def inputs(self) -> tuple[Op, ...]:
        return (self.input,)

    def with_inputs(self, inputs: tuple[Op, ...]) -> Self:
        (below,) = inputs
        return self if below is self.input else replace(self, input=below)  # type: ignore[type-var]


class SameColumns(Unary):
    """An op that gives its input's columns."""

    names_columns = False

    def _columns(self) -> Schema:
        return self.input.schema

    def passes_through(self, column: str) -> bool:
        return True
