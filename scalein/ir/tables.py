"""Keyed state as a kernel sees it: keys, accumulators, outputs, and the record that holds them.

`aggregate_table` decides what a table has; its `layout` gives the bytes. The store that replaces its memory
reads the same description.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from typing import TYPE_CHECKING

from scalein.dtypes import F64, I64, DType, Field, Kind, Schema
from scalein.ir.accumulators import ExprAcc
from scalein.ir.exprs import Expr, type_of
from scalein.layout import KEY_NULLS, SKETCH_REGISTERS, VALUE_NULLS, RecordLayout, Slot, size_of

if TYPE_CHECKING:
    from scalein.ir.windows import Window


class AccKind(Enum):
    """What a group remembers. Finished by `Output`s; several outputs may share one."""

    ROWS = "rows"
    VALID = "valid"
    ISUM = "isum"
    FSUM = "fsum"
    MIN = "min"
    MAX = "max"
    MOMENTS = "moments"
    COMOMENTS = "comoments"
    FIRST = "first"
    LAST = "last"
    ARG_MIN = "arg_min"
    ARG_MAX = "arg_max"
    CHAIN = "chain"
    DISTINCT = "distinct"
    SKETCH = "sketch"
    VALUES = "values"
    QUANTILE = "quantile"
    LIST = "list"
    TOP = "top"
    EXPR = "expr"  # its slots, update and merge are in an `ExprAcc`


@dataclass(frozen=True, slots=True)
class Acc:
    """One accumulator: its kind and the expressions it takes.

    `by` is what rows are compared by, the second of a pair, or whether a first or last row counts. One that counts
    partial groups in (`partials.py`) takes their columns: as `arg` a value, or a mean; the `parts` are the number of
    that value's row, or count and spread. Of an EXPR accumulator the `parts` are its arguments, or the slots of a
    partial group where `params` has "merge" as well; `by` says whether a row counts.
    """

    kind: AccKind
    arg: Expr | None = None
    by: Expr | None = None
    params: tuple[object, ...] = ()
    parts: tuple[Expr, ...] = ()

    @property
    def exprs(self) -> tuple[Expr, ...]:
        """All that it takes from a row."""
        return tuple(e for e in (self.arg, self.by, *self.parts) if e is not None)

    def over(self, new: Callable[[Expr], Expr]) -> Acc:
        """The same over other expressions."""
        arg, by = (None if e is None else new(e) for e in (self.arg, self.by))
        return replace(self, arg=arg, by=by, parts=tuple(map(new, self.parts)))

    @property
    def dtype(self) -> DType:
        return I64 if self.arg is None else type_of(self.arg)

    @property
    def expr(self) -> ExprAcc:
        """What an EXPR accumulator does."""
        found = self.params[0]
        assert isinstance(found, ExprAcc)
        return found

    @property
    def has_heap(self) -> bool:
        """Whether it holds bytes of any length, which live in the heap of the table's owner."""
        if self.kind is AccKind.EXPR:
            return any(slot.dtype.is_bytes and slot.ring is None for slot in self.expr.slots)
        given = [type_of(e) for e in (self.arg, self.by) if e is not None]
        return self.kind in _KEEPS_VALUES and any(dtype.is_bytes for dtype in given)

    @property
    def has_side(self) -> bool:
        """Whether rows are counted in outside of the record: in a bag or a log."""
        return self.kind in (AccKind.DISTINCT, AccKind.VALUES, AccKind.LIST, AccKind.TOP)

    @property
    def needs_order(self) -> bool:
        """Whether it depends on the numbers of rows in the source."""
        return self.kind in _ORDERED and not self.parts


_KEEPS_VALUES = (AccKind.MIN, AccKind.MAX, AccKind.FIRST, AccKind.LAST, AccKind.ARG_MIN, AccKind.ARG_MAX,
                 AccKind.LIST, AccKind.TOP)
_ORDERED = (AccKind.FIRST, AccKind.LAST, AccKind.ARG_MIN, AccKind.ARG_MAX, AccKind.LIST, AccKind.TOP)
_ROUNDED = (AccKind.FSUM, AccKind.MOMENTS, AccKind.COMOMENTS, AccKind.EXPR)


@dataclass(frozen=True, slots=True)
class Output:
    """An aggregate of the user's, computed from accumulators when a group is emitted."""

    name: str
    fn: str
    dtype: DType
    nullable: bool
    accs: tuple[int, ...]
    part: str = ""  # of an accumulator that has several fields, the one that is given as it is

    @property
    def is_list(self) -> bool:
        """Whether its values are in a log, to which the record only points."""
        return self.fn in ("collect", "top_k")


@dataclass(frozen=True, slots=True)
class Key:
    """A group key. Dictionary strings are stored as ids of the run's dictionary (`coded`)."""

    name: str
    dtype: DType
    nullable: bool
    coded: bool = False

    @property
    def stored(self) -> DType:
        return DType(Kind.I32) if self.coded else self.dtype


class Slicing(Enum):
    """Where a window lives in the state."""

    NONE = "none"
    KEY = "key"  # the slice's start is one more key
    RING = "ring"  # a ring of slices in each record
    SESSION = "session"  # sessions of a key are a list of records: see llvm_backend/sessions.py


@dataclass(frozen=True)
class Table:
    """Keyed state: as `aggregate_table` decides it."""

    keys: tuple[Key, ...]
    accs: tuple[Acc, ...]
    outputs: tuple[Output, ...]
    slicing: Slicing = Slicing.NONE
    window: Window | None = None
    slice_size: int = 0
    ring: int = 0

    @property
    def window_slices(self) -> int:
        """The slices of a window."""
        assert self.window is not None
        return self.window.in_slices(self.slice_size)[0]

    @property
    def window_step(self) -> int:
        """The slices from the start of a window to the next start."""
        assert self.window is not None
        return self.window.in_slices(self.slice_size)[1]

    def slice_of(self, time: int) -> int:
        """The number of the slice that holds a time."""
        assert self.window is not None
        return (time - self.window.offset) // self.slice_size

    def slice_start(self, number: int) -> int:
        assert self.window is not None
        return number * self.slice_size + self.window.offset

    @property
    def has_nulls(self) -> bool:
        return any(key.nullable for key in self.keys)

    @property
    def bags(self) -> tuple[tuple[int, Table], ...]:
        """Side tables, each with the number of its accumulator: (record of a group, value) -> number of rows."""
        return tuple((k, _bag(acc)) for k, acc in enumerate(self.accs) if acc.kind is AccKind.DISTINCT)

    @property
    def logs(self) -> tuple[tuple[int, Acc], ...]:
        """Accumulators whose values go to a log, one entry a row: see `log_layout`."""
        logged = (AccKind.VALUES, AccKind.LIST, AccKind.TOP)
        return tuple((k, acc) for k, acc in enumerate(self.accs) if acc.kind in logged)

    @property
    def has_lists(self) -> bool:
        """Whether groups give lists, whose values are not in their records when they are emitted."""
        return any(output.is_list for output in self.outputs)

    @property
    def has_sides(self) -> bool:
        """Whether something outside of the records belongs to them."""
        return bool(self.bags or self.logs)

    @property
    def needs_two_passes(self) -> bool:
        """Whether groups are sessions that kernels can neither copy nor merge: `exec/session_rows.py`."""
        return self.slicing is Slicing.SESSION and (self.has_sides or self.has_heap)

    @property
    def is_rounded(self) -> bool:
        """Whether the last bits of a result may depend on the order in which rows are added and tables are merged."""
        return any(acc.kind in _ROUNDED for acc in self.accs)

    @property
    def has_heap(self) -> bool:
        return any(acc.has_heap for acc in self.accs)

    @property
    def heap_cells(self) -> tuple[str, ...]:
        """Fields of a record that hold bytes, other than keys."""
        kept = [(k, acc) for k, acc in enumerate(self.accs) if acc.has_heap and not acc.has_side]
        parts = [(f"acc{k}.{part}", e) for k, acc in kept for part, e in (("value", acc.arg), ("by", acc.by))]
        return tuple(name for name, e in parts if e is not None and type_of(e).is_bytes)

    def quantiles_of(self, values: Acc) -> tuple[tuple[int, float], ...]:
        """Accumulators computed from ranked values, each with its share."""
        if values.kind is not AccKind.VALUES:
            return ()
        return tuple((k, float(str(acc.params[0]))) for k, acc in enumerate(self.accs)
                     if acc.kind is AccKind.QUANTILE and (acc.arg, acc.params[1:]) == (values.arg, values.params))

    @cached_property
    def layout(self) -> RecordLayout:
        fixed = [Slot("hash", 8)] if self.keys or self.window else []
        if self.has_nulls:
            fixed.append(Slot("nulls", 8))
        if self.has_sides:
            fixed.append(Slot("moved", 8, _MINUS))  # when merged: the record's new place
        fixed += [Slot(f"key{k}", size_of(key.stored)) for k, key in enumerate(self.keys)]
        if self.slicing is Slicing.KEY:
            fixed.append(Slot("slice", 8))
        if self.slicing is Slicing.SESSION:
            fixed += [Slot("first", 8, _GREATEST), Slot("last", 8, _LEAST), Slot("previous", 8)]
        fields = [slot for k, acc in enumerate(self.accs) for slot in acc_slots(k, acc)]
        if self.slicing is Slicing.RING:
            return RecordLayout(tuple(fixed), tuple(fields), self.ring)
        return RecordLayout(tuple(fixed + fields))

    @property
    def acc_slots(self) -> list[tuple[str, int]]:
        """The fields of accumulators, and their sizes."""
        return [(slot.name, slot.size) for k, acc in enumerate(self.accs) for slot in acc_slots(k, acc)]

    @property
    def schema(self) -> Schema:
        fields = [Field(k.name, k.dtype, k.nullable) for k in self.keys]
        if self.window is not None:
            dtype = type_of(self.window.time)
            fields += [Field("window_start", dtype, False), Field("window_end", dtype, False)]
        return Schema(tuple(fields + [Field(o.name, o.dtype, o.nullable) for o in self.outputs]))


_GREATEST = (2**63 - 1).to_bytes(8, "little", signed=True)
_LEAST = (-(2**63)).to_bytes(8, "little", signed=True)
_MINUS = (-1).to_bytes(8, "little", signed=True)


def _bag(acc: Acc) -> Table:
    keys = (Key("owner", I64, False), Key("value", acc.dtype, False))
    return Table(keys, (Acc(AccKind.ROWS),), ())


def log_layout(acc: Acc) -> RecordLayout:
    """An entry of a log: the record of its group, its row's number, its value, and what it is ordered by.

    Of values that are only ranked, an entry has one in an order-preserving form, and the number of its rows.
    """
    if acc.kind is AccKind.VALUES:
        return RecordLayout((Slot("owner", 8), Slot("key", 8), Slot("rows", 8)))
    by = [Slot("by", 8)] if acc.kind is AccKind.TOP else []
    return RecordLayout((Slot("owner", 8), Slot("row", 8), *by, Slot("value", size_of(acc.dtype))))


def _cell(name: str, dtype: DType, init: bytes = b"") -> list[Slot]:
    """A value that is replaced now and then; bytes have a piece of heap of their own, and its size."""
    own = [Slot(f"{name}.heap", 8), Slot(f"{name}.room", 8)] if dtype.is_bytes else []
    return [Slot(name, size_of(dtype), init), *own]


# Of pairs: their number, mean and sum of squared deviations of either side, and the sum of products of deviations.
COMOMENTS = ("n", "mean", "m2", "by_mean", "by_m2", "co")

# A trillion values of this many digits have a sum of less than 2^127.
_DIGITS_SUMMED = 26


def sum_bytes(dtype: DType) -> int:
    """Bytes in which values of a type are summed, such that no order of the rows can overflow them."""
    return 24 if dtype.is_decimal and dtype.precision > _DIGITS_SUMMED else 16


def acc_slots(number: int, acc: Acc) -> list[Slot]:
    """The fields of an accumulator, with the values that mean "no row yet"."""
    name = f"acc{number}"
    value = _cell(f"{name}.value", acc.dtype)
    ok = Slot(f"{name}.ok", 1)
    match acc.kind:
        case AccKind.MIN | AccKind.MAX if acc.dtype.is_bytes:
            return [*value, ok]
        case AccKind.DISTINCT:
            return [Slot(name, 8)]
        case AccKind.SKETCH:
            return [Slot(name, SKETCH_REGISTERS)]
        case AccKind.QUANTILE:
            return [Slot(name, 8)]
        case AccKind.VALUES | AccKind.LIST:
            return [Slot(name, 8), Slot(f"{name}.start", 8)]
        case AccKind.TOP:  # what is not above the limit is not among the best
            least = (-(2**63)).to_bytes(8, "little", signed=True)
            return [Slot(name, 8), Slot(f"{name}.start", 8), Slot(f"{name}.limit", 8, least)]
        case AccKind.ROWS | AccKind.VALID:
            return [Slot(name, 8)]
        case AccKind.ISUM:
            return [Slot(name, sum_bytes(acc.dtype))]
        case AccKind.FSUM:
            return [Slot(name, 8)]
        case AccKind.MIN | AccKind.MAX:
            return [Slot(name, size_of(acc.dtype), extreme(acc.dtype, least=acc.kind is AccKind.MAX))]
        case AccKind.MOMENTS:
            return [Slot(f"{name}.n", 8), Slot(f"{name}.mean", 8), Slot(f"{name}.m2", 8)]
        case AccKind.COMOMENTS:
            return [Slot(f"{name}.{part}", 8) for part in COMOMENTS]
        case AccKind.FIRST | AccKind.LAST:
            worst = 2**63 - 1 if acc.kind is AccKind.FIRST else -1
            return [Slot(f"{name}.row", 8, worst.to_bytes(8, "little", signed=True)), *value, ok]
        case AccKind.ARG_MIN | AccKind.ARG_MAX:
            by = type_of(acc.by) if acc.by is not None else F64
            return [Slot(f"{name}.row", 8, _MINUS), *_cell(f"{name}.by", by), *value, ok]
        case AccKind.CHAIN:
            return [Slot(f"{name}.head", 8, _MINUS), Slot(f"{name}.tail", 8, _MINUS)]
        case AccKind.EXPR:
            return [field for part, slot in acc.expr.parts for field in (
                *(_cell(f"{name}.{part}", slot.dtype, slot.init_bytes) if slot.ring is None else
                  [Slot(f"{name}.{part}", slot.dtype.width)]),
                *([Slot(f"{name}.{part}.ok", 1, bytes([slot.init is not None]))] if slot.nullable else []))]


def extreme(dtype: DType, *, least: bool) -> bytes:
    """The least or greatest value of a type, as bytes: where max and min start. NaN is the greatest."""
    if dtype.is_float:
        return struct.pack("<f" if dtype.bits == 32 else "<d", float("-inf") if least else float("nan"))
    if dtype.kind is Kind.BOOL:
        return b"\0" if least else b"\1"
    low, high = dtype.int_range()
    return (low if least else high).to_bytes(dtype.bits // 8, "little", signed=dtype.is_signed)


@dataclass(frozen=True)
class StoredTable:
    """A table of the state store: its key and value columns, and the record that holds them.

    Its layout never follows the data, unlike that of a `Table`: files outlive the run. A value has its column's own
    type; what a row does to it (`sum`, `max`, `replace`, ...) belongs to the call, not to the table.
    """

    keys: tuple[Field, ...]
    values: tuple[Field, ...]

    @cached_property
    def layout(self) -> RecordLayout:
        nulls = ((1 << len(self.values)) - 1) << VALUE_NULLS
        head = Slot("head", 8, nulls.to_bytes(8, "little"))
        keys = [Slot(f"key{k}", size_of(key.dtype)) for k, key in enumerate(self.keys)]
        values = [Slot(f"value{k}", size_of(value.dtype)) for k, value in enumerate(self.values)]
        return RecordLayout((head, *keys, *values))

    @property
    def schema(self) -> Schema:
        return Schema((*self.keys, *self.values))

    @property
    def text_cells(self) -> tuple[int, ...]:
        """Offsets of the fields that may lead to bytes outside of the record."""
        fields = [(f"{kind}{k}", field) for kind, columns in (("key", self.keys), ("value", self.values))
                  for k, field in enumerate(columns)]
        return tuple(self.layout.offset(name) for name, field in fields if field.dtype.is_bytes)

    def null_bit(self, value: int) -> int:
        return 1 << (VALUE_NULLS + value)

    def key_null_bit(self, key: int) -> int:
        return 1 << (KEY_NULLS + key)
