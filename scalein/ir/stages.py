"""The fused form: stages of steps that end in a sink, each lowered to one kernel.

A stage reads rows (Arrow batches, or the records of a table), passes them through steps a block
at a time, and hands them to its sink. What is known only when data is there (which columns hold
nulls, how strings are stored, how a table is addressed) is filled in by `specialise` at run time:
`reads`, the variant of a probe, the mode of a group. A specialised stage is what the code cache
is keyed by. A stage ends at every node but a `Pipeline` (`Op.physical`, in `ir/ops/`);
which stages become one is decided in `passes/fuse.py`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import TYPE_CHECKING, TypeAlias

from scalein.dtypes import I64, DType
from scalein.ir.exprs import Expr, Named, type_of
from scalein.ir.internal_names import internal
from scalein.ir.tables import StoredTable, Table
from scalein.layout import size_of

if TYPE_CHECKING:
    from scalein.ir.process import ProcessBody
    from scalein.ir.store_kernels import StoreSink

FOREVER = (1 << 63) - 1  # a span of time without an end
ORDINAL = internal("ordinal")  # a row's number in its source, carried through a partition

# --- what a stage reads


@dataclass(frozen=True, slots=True)
class Read:
    """One column of a stage's input, as its bytes are.

    form: fixed | bits | bytes (of one width) | str32 | str64 | view | dict (codes into strings) | lut (a table over the
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

    @property
    def row_bytes(self) -> float:
        """What a row takes in memory; of strings only the place of their bytes."""
        return sum(_width(read) + read.nulls / 8 for read in self.reads)


_WIDTHS = {"str32": 4, "str64": 8, "view": 16, "dict": 4, "lut": 4}


def _width(read: Read) -> float:
    """Bytes a row of a column: a value, a dictionary code, or where a string's bytes are."""
    if read.form == "bytes":
        return read.dtype.width
    return _WIDTHS[read.form] if read.form in _WIDTHS else read.dtype.bits / 8


@dataclass(frozen=True, slots=True)
class FromPartials(FromBatches):
    """Partial groups side by side, those of one key in a row: gives the outputs of a table for each row.

    Of side `s`, the column `name` of a partial group is read as `side_column(s, name)`. The table has no keys, and its
    accumulators take columns of partial groups (`ir/partials.py`); none holds text, which needs a table's heap.
    """

    table: Table
    sides: int


def side_column(side: int, name: str) -> str:
    return internal(f"side{side}.{name}")


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
    picked: bool = False  # not all records, but those whose numbers are in slot `picked`


@dataclass(frozen=True, slots=True)
class FromRecords:
    """The raw records of a table with the sink's layout, to be merged."""


@dataclass(frozen=True, slots=True)
class FromPointers:
    """Stored records, wherever the pointers of slot `pointers` lead; their columns by name."""

    table: StoredTable


Reader = FromBatches | FromRows | FromTable | FromRecords | FromPointers

# --- steps


@dataclass(frozen=True, slots=True)
class FilterStep:
    """Keep the rows for which `predicate` is true."""

    predicate: Expr


@dataclass(frozen=True, slots=True)
class ProjectStep:
    """New columns in terms of the old ones; each is computed where it is first needed."""

    items: tuple[Named, ...]


@dataclass(frozen=True, slots=True)
class TimeRange:
    """The times that a probe's matches have: from `low_of` + `low` to `high_of` + `high`, both included.

    Sums that 64 bits do not hold are the least or the greatest time. The rows of a key are ordered by time. `pick` is
    all, or one of as-of joins: backward, forward, nearest (to `low_of`; of two the earlier). Of equal times it is the
    last row.
    """

    low_of: Expr
    low: int
    high_of: Expr
    high: int
    pick: str = "all"


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
    marks: bool = False  # rows of the table that match are marked
    times: TimeRange | None = None  # of matches; the table is ordered by time

    @property
    def exprs(self) -> tuple[Expr, ...]:
        """What it computes of a row."""
        return self.keys if self.times is None else (*self.keys, self.times.low_of, self.times.high_of)


@dataclass(frozen=True, slots=True)
class DedupStep:
    """Keep the first row of each key; the table remembers, in its one accumulator, which row that was.

    A kernel has at most one: see `llvm_backend/dedup.py` and `passes/fuse.py`.
    """

    table: Table
    keys: tuple[Expr, ...]


Step = FilterStep | ProjectStep | Probe | DedupStep


def step_exprs(steps: Iterable[Step]) -> list[Expr]:
    """What steps compute."""
    found: list[Expr] = []
    for step in steps:
        match step:
            case FilterStep(predicate):
                found.append(predicate)
            case ProjectStep(items):
                found += [item.expr for item in items]
            case Probe():
                found += step.exprs
            case DedupStep(keys=keys):
                found += keys
    return found


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
    """Update the table's record of each row's key. `owned`: only key groups of this worker. `watched`: if times are a
    column of the batch, slots `time.least` and `time.greatest` come to enclose those of all rows, also of dropped ones.
    """

    table: Table
    keys: tuple[Expr, ...]
    mode: GroupMode = GroupMode.HASH
    owned: bool = False
    watched: bool = False


@dataclass(frozen=True, slots=True)
class Merge:
    """Merge each record of another table with the same layout into this one.

    `slide` takes slices to windows: see sinks/merge.py.
    """

    table: Table
    mode: GroupMode = GroupMode.HASH
    slide: bool = False


@dataclass(frozen=True, slots=True)
class MergeBag:
    """Move the records of another table's bag into this one's, after the table itself was merged."""

    table: Table
    bag: int
    mode: GroupMode = GroupMode.HASH


@dataclass(frozen=True, slots=True)
class ExpandLog:
    """Write a pair (key, payload) for each entry of a log, group by group.

    It is (value in an order-preserving form, rows) where values are ranked, (number of the row, number of the entry)
    where they are listed, and what orders them instead of the row where only the best are.
    """

    table: Table
    acc: int
    mode: GroupMode


@dataclass(frozen=True, slots=True)
class Rank:
    """Rank each group's pairs: sort them, or compute its quantiles; `fold` writes the log anew, equal values as one."""

    table: Table
    acc: int
    fold: bool = False


@dataclass(frozen=True)
class Partition:
    """Append each row (keys, time, arguments) to the chunk of its key group: 8-byte aligned fields,
    a null word if any item may be null, the row's number if an accumulator asks for it."""

    keys: tuple[Expr, ...]
    items: tuple[Named, ...]
    ordinal: bool

    @cached_property
    def has_nulls(self) -> bool:
        return any(item.expr.nullable for item in self.items)

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        sizes = [max(8, size_of(type_of(item.expr))) for item in self.items]
        return tuple(sum(sizes[:k]) for k in range(len(sizes)))

    @cached_property
    def null_offset(self) -> int:
        return self.offsets[-1] + max(8, size_of(type_of(self.items[-1].expr)))

    @cached_property
    def ordinal_offset(self) -> int:
        return self.null_offset + 8 * self.has_nulls

    @cached_property
    def stride(self) -> int:
        return self.ordinal_offset + 8 * self.ordinal

    @cached_property
    def reader(self) -> FromRows:
        """How the rows are read back."""
        reads = [Read(item.name, type_of(item.expr), "field", item.expr.nullable, offset=offset, null_bit=k)
                 for k, (item, offset) in enumerate(zip(self.items, self.offsets, strict=True))]
        if self.ordinal:
            reads.append(Read(ORDINAL, I64, "field", False, offset=self.ordinal_offset))
        return FromRows(tuple(reads), self.stride, self.null_offset)


@dataclass(frozen=True, slots=True)
class Process:
    """Run the user's class over the record of each row's key; what it yields is written as `items`, the keys first.

    `action`: `rows` come at their `time`; `timers` of records, which are read with `FromTable`, fire; `load` makes
    records of rows with the keys, the fields and `None` for no state.
    """

    table: Table
    keys: tuple[Expr, ...]
    args: tuple[Expr, ...]
    body: ProcessBody
    items: tuple[Named, ...]
    time: Expr | None = None
    action: str = "rows"
    tracked: bool = False  # the status of records says whether they changed, and `due` when time changes them

    @property
    def makes_text(self) -> bool:
        """Whether its methods make text, or copy it to store it."""
        from scalein.ir.udf import builds_text  # most flows have none

        return self.table.has_heap or any(builds_text(method) for method in (self.body.on_row, self.body.on_timer))


FLOW_SINKS = (Collect, Group, Merge, MergeBag, ExpandLog, Rank, Partition, Process)
Sink: TypeAlias = "Collect | Process | Group | Merge | MergeBag | ExpandLog | Rank | Partition | StoreSink"


@dataclass(frozen=True, slots=True)
class Stage:
    """Rows in, steps, a sink: one kernel. `brief`: it will see few rows, so compile it fast rather than well."""

    name: str
    reader: Reader
    steps: tuple[Step, ...]
    sink: Sink
    brief: bool = False
