"""The fused form: stages of steps that end in a sink, each lowered to one kernel.

A stage reads rows (Arrow batches, or the records of a table), passes them through steps a block
at a time, and hands them to its sink. What is known only when data is there (which columns hold
nulls, how strings are stored, how a table is addressed) is filled in by `specialise` at run time:
`reads`, the variant of a probe, the mode of a group. A specialised stage is what the code cache
is keyed by.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from enum import Enum

from scalein.dtypes import F64, I64, DType, Field, Kind, Schema
from scalein.ir import ops
from scalein.ir.exprs import Expr, Named, type_of
from scalein.layout import RecordLayout, Slot, size_of

# --- what a stage reads


@dataclass(frozen=True, slots=True)
class Read:
    """One column of a stage's input, as its bytes are.

    form: fixed | bits | str32 | str64 | view | dict (codes into strings) | lut (a table over the
    codes of column `via`) | field (of a record, at `offset`; its null bit is `null_bit` of the
    record's null word).
    """

    name: str
    dtype: DType
    form: str = "fixed"
    nulls: bool = True
    via: str = ""
    offset: int = 0
    null_bit: int = 0
    code_bits: int = 32  # of a dictionary's codes


@dataclass(frozen=True, slots=True)
class FromBatches:
    """Arrow batches, column by column."""

    reads: tuple[Read, ...]


@dataclass(frozen=True, slots=True)
class FromRows:
    """Rows that a partitioner wrote: records of `stride` bytes without a header."""

    reads: tuple[Read, ...]
    stride: int
    null_offset: int


@dataclass(frozen=True, slots=True)
class FromTable:
    """The finished groups of a table: keys, window, aggregates.

    `window_slices` > 0 merges that many slices of each record into one window (their byte offsets
    are in the frame). `sparse` skips records that no row reached.
    """

    table: Table
    window_slices: int = 0
    sparse: bool = False


@dataclass(frozen=True, slots=True)
class FromRecords:
    """The raw records of a table with the sink's layout, to be merged."""


Reader = FromBatches | FromRows | FromTable | FromRecords

# --- steps


@dataclass(frozen=True, slots=True)
class Where:
    """Keep the rows for which `predicate` is true."""

    predicate: Expr


@dataclass(frozen=True, slots=True)
class Let:
    """New columns in terms of the old ones; each is computed where it is first needed."""

    items: tuple[Named, ...]


@dataclass(frozen=True, slots=True)
class Probe:
    """Look keys up in a static table and go on with the matches.

    The variant (`direct`, `unique`, `dense`, `payload`) is known when the table has been built.
    """

    table: int  # number of the join in the program
    keys: tuple[Expr, ...]
    how: str
    keep: tuple[tuple[str, str], ...]
    direct: bool = False  # key - base is the position; else hash
    by_code: bool = False  # the key is a dictionary's code, looked up to the row of its match
    unique: bool = True  # at most one match a row
    dense: bool = False  # direct, and every position of the domain has a row
    payload: tuple[Read, ...] = ()
    codes: tuple[tuple[str, str], ...] = ()  # name -> string column whose dictionary code it is
    build: Table | None = None


Step = Where | Let | Probe

# --- tables


class AccKind(Enum):
    """What a group remembers. Finished by `Output`s; several outputs may share one."""

    ROWS = "rows"
    VALID = "valid"
    ISUM = "isum"
    FSUM = "fsum"
    MIN = "min"
    MAX = "max"
    MOMENTS = "moments"
    FIRST = "first"
    LAST = "last"
    ARG_MIN = "arg_min"
    ARG_MAX = "arg_max"
    CHAIN = "chain"


@dataclass(frozen=True, slots=True)
class Acc:
    """One accumulator: its kind and the expressions it takes."""

    kind: AccKind
    arg: Expr | None = None
    by: Expr | None = None

    @property
    def dtype(self) -> DType:
        return I64 if self.arg is None else type_of(self.arg)


@dataclass(frozen=True, slots=True)
class Output:
    """An aggregate of the user's, computed from accumulators when a group is emitted."""

    name: str
    fn: str
    dtype: DType
    nullable: bool
    accs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Key:
    """A group key. Dictionary strings are kept as ids of the run's dictionary (`coded`)."""

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


@dataclass(frozen=True)
class Table:
    """Keyed state: what place_state decided."""

    keys: tuple[Key, ...]
    accs: tuple[Acc, ...]
    outputs: tuple[Output, ...]
    slicing: Slicing = Slicing.NONE
    window: ops.Window | None = None
    slice_size: int = 0
    ring: int = 0

    @property
    def has_nulls(self) -> bool:
        return any(key.nullable for key in self.keys)

    @property
    def layout(self) -> RecordLayout:
        fixed = [Slot("hash", 8)] if self.keys or self.window else []
        if self.has_nulls:
            fixed.append(Slot("nulls", 8))
        fixed += [Slot(f"key{k}", size_of(key.stored)) for k, key in enumerate(self.keys)]
        if self.slicing is Slicing.KEY:
            fixed.append(Slot("slice", 8))
        fields = [slot for k, acc in enumerate(self.accs) for slot in acc_slots(k, acc)]
        if self.slicing is Slicing.RING:
            return RecordLayout(tuple(fixed), tuple(fields), self.ring)
        return RecordLayout(tuple(fixed + fields))

    @property
    def schema(self) -> Schema:
        fields = [Field(k.name, k.dtype, k.nullable) for k in self.keys]
        if self.window is not None:
            dtype = type_of(self.window.time)
            fields += [Field("window_start", dtype, False), Field("window_end", dtype, False)]
        return Schema(tuple(fields + [Field(o.name, o.dtype, o.nullable) for o in self.outputs]))


def acc_slots(number: int, acc: Acc) -> list[Slot]:
    """The fields of an accumulator, with the values that mean "no row yet"."""
    name = f"acc{number}"
    value = Slot(f"{name}.value", size_of(acc.dtype))
    match acc.kind:
        case AccKind.ROWS | AccKind.VALID:
            return [Slot(name, 8)]
        case AccKind.ISUM:
            return [Slot(name, 16)]
        case AccKind.FSUM:
            return [Slot(name, 8)]
        case AccKind.MIN | AccKind.MAX:
            return [Slot(name, value.size, extreme(acc.dtype, least=acc.kind is AccKind.MAX))]
        case AccKind.MOMENTS:
            return [Slot(f"{name}.n", 8), Slot(f"{name}.mean", 8), Slot(f"{name}.m2", 8)]
        case AccKind.FIRST | AccKind.LAST:
            worst = 2**63 - 1 if acc.kind is AccKind.FIRST else -1
            return [Slot(f"{name}.row", 8, worst.to_bytes(8, "little", signed=True)), value, Slot(f"{name}.ok", 1)]
        case AccKind.ARG_MIN | AccKind.ARG_MAX:
            by = type_of(acc.by) if acc.by is not None else F64
            return [Slot(f"{name}.row", 8, (-1).to_bytes(8, "little", signed=True)),
                    Slot(f"{name}.by", size_of(by)), value, Slot(f"{name}.ok", 1)]
        case AccKind.CHAIN:
            minus = (-1).to_bytes(8, "little", signed=True)
            return [Slot(f"{name}.head", 8, minus), Slot(f"{name}.tail", 8, minus)]


def extreme(dtype: DType, *, least: bool) -> bytes:
    """The least or greatest value of a type, as bytes: where max and min start. NaN is the greatest."""
    if dtype.is_float:
        return struct.pack("<f" if dtype.bits == 32 else "<d", float("-inf") if least else float("nan"))
    if dtype.kind is Kind.BOOL:
        return b"\0" if least else b"\1"
    low, high = dtype.int_range()
    return (low if least else high).to_bytes(dtype.bits // 8, "little", signed=dtype.is_signed)


# --- sinks


@dataclass(frozen=True, slots=True)
class Collect:
    """Write the live rows' columns, compacted, into output buffers."""

    items: tuple[Named, ...]


class GroupMode(Enum):
    """How a row finds its record."""

    ONE = "one"  # no keys: one record
    DIRECT = "direct"  # dense domain: position by arithmetic
    HASH = "hash"  # index and arena


@dataclass(frozen=True, slots=True)
class Group:
    """Update the table's record of each row's key. `owned`: only key groups of this worker."""

    table: Table
    keys: tuple[Expr, ...]
    mode: GroupMode = GroupMode.HASH
    owned: bool = False


@dataclass(frozen=True, slots=True)
class Merge:
    """Merge each record of another table with the same layout into this one.

    `slide` takes slices to windows: see sinks/merge.py.
    """

    table: Table
    mode: GroupMode = GroupMode.HASH
    slide: bool = False


@dataclass(frozen=True)
class Partition:
    """Append each row (keys, time, arguments) to the chunk of its key group: 8-byte aligned fields,
    a null word if any item may be null, the row's number if an accumulator asks for it."""

    keys: tuple[Expr, ...]
    items: tuple[Named, ...]
    ordinal: bool

    @property
    def has_nulls(self) -> bool:
        return any(item.expr.nullable for item in self.items)

    @property
    def offsets(self) -> tuple[int, ...]:
        sizes = [16 if type_of(item.expr).is_string else 8 for item in self.items]
        return tuple(sum(sizes[:k]) for k in range(len(sizes)))

    @property
    def null_offset(self) -> int:
        last = 16 if type_of(self.items[-1].expr).is_string else 8
        return self.offsets[-1] + last

    @property
    def ordinal_offset(self) -> int:
        return self.null_offset + 8 * self.has_nulls

    @property
    def stride(self) -> int:
        return self.ordinal_offset + 8 * self.ordinal

    @property
    def reader(self) -> FromRows:
        """How the rows are read back."""
        reads = [Read(item.name, type_of(item.expr), "field", item.expr.nullable, offset=offset, null_bit=k)
                 for k, (item, offset) in enumerate(zip(self.items, self.offsets, strict=True))]
        if self.ordinal:
            reads.append(Read("?row", I64, "field", False, offset=self.ordinal_offset))
        return FromRows(tuple(reads), self.stride, self.null_offset)


Sink = Collect | Group | Merge | Partition


@dataclass(frozen=True, slots=True)
class Stage:
    """Rows in, steps, a sink: one kernel. `brief`: it will see few rows, so compile it fast rather than well."""

    name: str
    reader: Reader
    steps: tuple[Step, ...]
    sink: Sink
    brief: bool = False



# --- the program: a tree of nodes, each run by the runtime


@dataclass(frozen=True, slots=True)
class Scan:
    """Batches of a source."""

    source: ops.Source

    @property
    def schema(self) -> Schema:
        return self.source.schema


@dataclass(frozen=True, slots=True)
class Pipe:
    """Batches through a stage that ends in Collect."""

    input: Node
    steps: tuple[Step, ...]
    items: tuple[Named, ...]
    joins: tuple[tuple[int, JoinTable], ...] = ()
    name: str = field(default="pipe", compare=False)

    @property
    def schema(self) -> Schema:
        return Schema(tuple(Field(i.name, type_of(i.expr), i.expr.nullable) for i in self.items))


@dataclass(frozen=True, slots=True)
class Grouped:
    """Batches through a stage that ends in Group; gives the table's finished groups as rows."""

    input: Node
    steps: tuple[Step, ...]
    table: Table
    keys: tuple[Expr, ...]
    joins: tuple[tuple[int, JoinTable], ...] = ()
    name: str = field(default="group", compare=False)

    @property
    def schema(self) -> Schema:
        return self.table.schema


@dataclass(frozen=True, slots=True)
class JoinTable:
    """A static table to probe: read whole, keyed by `keys`."""

    input: Node
    keys: tuple[Expr, ...]
    columns: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Host:
    """A step in Python or pyarrow between kernels: map_batches, or expressions LLVM cannot do well."""

    input: Node
    op: ops.MapBatches | None
    items: tuple[Named, ...] = ()

    @property
    def schema(self) -> Schema:
        if self.op is not None:
            return self.op.schema
        return Schema(tuple(Field(i.name, type_of(i.expr), i.expr.nullable) for i in self.items))


@dataclass(frozen=True, slots=True)
class Take:
    """The first rows in order."""

    input: Node
    count: int

    @property
    def schema(self) -> Schema:
        return self.input.schema


@dataclass(frozen=True, slots=True)
class Chain:
    """The batches of each input in turn."""

    inputs: tuple[Node, ...]
    schema: Schema


Node = Scan | Pipe | Grouped | Host | Take | Chain
