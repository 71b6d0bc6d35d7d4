"""A stage prepared for its input: specialised to input facts, compiled, its columns bound.

`Prepared` holds the input facts (which columns have nulls, how strings are stored) and compiles a new variant of its
kernel when a batch adds facts. A column that had nulls once is nullable from then on, so there are few variants.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
import pyarrow as pa

from scalein.arrow_rows import from_texts
from scalein.dtypes import STR, Kind, Schema
from scalein.ir.exprs import Call, Col, Expr, Named, type_of
from scalein.ir.functions.registry import python_function
from scalein.ir.stages import (
    FLOW_SINKS,
    Collect,
    DedupStep,
    FilterStep,
    FromBatches,
    Group,
    Partition,
    Probe,
    Process,
    Read,
    Sink,
    Stage,
    Step,
)
from scalein.ir.tables import Acc, AccKind, Key, Output, Table
from scalein.kernels.bind import addressable, bind, bind_codes, code_bits, form_of, has_nulls
from scalein.kernels.call import kernel
from scalein.kernels.output import collect_chunks
from scalein.kernels.specialise import CODE, IDS, Specialiser, code_name, needed
from scalein.layout import COLUMN, FrameData, size_of
from scalein.llvm_backend.cache import Compiled
from scalein.options import Options

# A kernel of many columns takes long to vectorize, although it is compiled in parts. For a small input of known size it
# is compiled with few optimizations.
BRIEF_COLUMNS = 48
BRIEF_PARTS = 1024  # parts of all expressions
BRIEF_ROWS = 1 << 18
MAX_VARIANTS = 16  # of a kernel, for different input facts

MAX_PYTHON_VALUES = 4096  # of a dictionary: Python computes an expression over them before LLVM has compiled it (20 ms)


@dataclass(frozen=True, slots=True)
class InputFacts:
    """The facts of an input column: its form, and whether it may have nulls."""

    form: str
    nulls: bool
    code_bits: int = 32


class Interner:
    """Ids of a dictionary column's strings over a whole run, across the dictionaries of its batches."""

    def __init__(self) -> None:
        self._ids: dict[str, int] = {}

    def table(self, dictionary: pa.Array) -> np.ndarray:
        """Code -> id for one dictionary."""
        ids = self._ids
        return np.fromiter((ids.setdefault(s, len(ids)) for s in dictionary.to_pylist()), np.int32, len(dictionary))

    def __len__(self) -> int:
        return len(self._ids)

    def values(self) -> pa.Array:
        return from_texts(self._ids)


class ProbedTable(Protocol):
    """The build side of a join as a kernel probes it: how it is addressed, and its columns."""

    @property
    def direct(self) -> bool: ...
    @property
    def unique(self) -> bool: ...
    @property
    def dense(self) -> bool: ...
    @property
    def payload(self) -> tuple[Read, ...]: ...
    @property
    def build(self) -> Table | None: ...
    @property
    def columns(self) -> Mapping[str, pa.Array]: ...
    @property
    def nested(self) -> Mapping[str, pa.Array]: ...

    def is_coded(self, column: str) -> bool:
        """Whether the column is a dictionary."""

    def nulls(self, how: str) -> dict[str, bool]:
        """Which columns may be null after a join of this kind."""

    def rows_of(self, dictionary: pa.Array) -> np.ndarray:
        """Code of the dictionary -> row of the match."""

    def attach(self, frame: FrameData, number: int) -> None:
        """Point the frame's slots of join `number` at the table."""


@dataclass(slots=True)
class Prepared:
    """Steps and sink of a node over a batch input."""

    name: str
    schema: Schema
    steps: tuple[Step, ...]
    sink: Callable[[Specialiser], Sink]
    exprs: tuple[Expr, ...]
    joins: Mapping[int, ProbedTable]
    options: Options
    facts: dict[str, InputFacts] = field(default_factory=dict)
    interners: dict[str, Interner] = field(default_factory=dict)
    compiled: Compiled | None = None
    stage: Stage | None = None
    lookups: dict[Expr, Read] = field(default_factory=dict)
    tables: dict[str, tuple[pa.Array, np.ndarray]] = field(default_factory=dict)  # lookup -> last dictionary, table
    names: tuple[str, ...] = ()
    key_exprs: tuple[Expr, ...] = ()
    few_rows: bool = False
    has_all_facts: bool = False  # of the whole input, so that no batch can add any
    variants: dict[Hashable, tuple[Stage, dict[Expr, Read], Compiled]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        read = needed(self.steps, self.exprs)
        self.names = tuple(f.name for f in self.schema if f.name in read)

    def observe(self, batch: pa.RecordBatch) -> bool:
        """Observe the facts of a batch; true if a new kernel is needed."""
        changed = self.compiled is None
        for name in () if self.has_all_facts else self.names:
            array = batch.column(name)
            old = self.facts.get(name)
            nulls = (old is not None and old.nulls) or has_nulls(array)
            if old is None or old.nulls != nulls:
                self.facts[name] = InputFacts(form_of(array.type), nulls, code_bits(array.type))
                changed = True
        return changed

    def observe_table(self, table: pa.Table | None) -> None:
        """Observe the facts of a whole table, so that no batch of it can add any."""
        if table is not None:
            self.few_rows, self.has_all_facts = table.num_rows < BRIEF_ROWS, True
            for name in self.names:
                column = table[name]
                nulls = bool(column.null_count) or (
                    pa.types.is_dictionary(column.type) and any(map(has_nulls, column.chunks)))
                self.facts[name] = InputFacts(form_of(column.type), nulls, code_bits(column.type))

    def specialise(self) -> Stage:
        """The stage for the facts observed so far."""
        known = self.facts
        special = Specialiser(
            nullable={n: known[n].nulls for n in self.names},
            coded={n: n for n in self.names if known[n].form == "dict"},
            code_bits={n: known[n].code_bits for n in self.names},
            is_coded=lambda number, column: self.joins[number].is_coded(column),
        )
        steps = tuple(self._variant(special.step(step, self._probe_nulls)) for step in self.steps)
        sink = self.sink(special)
        if special.lookups != self.lookups:
            self.lookups, self.tables = special.lookups, {}
        inner = needed(steps, _sink_exprs(sink))
        reads = [Read(n, self.schema[n].dtype, known[n].form, known[n].nulls, code_bits=known[n].code_bits)
                 for n in self.names if n in inner]
        reads += [read for read in special.lookups.values() if read.name in inner]
        exprs = list(_sink_exprs(sink))
        sizes = [e.size for e in (*exprs, *(step.predicate for step in steps if isinstance(step, FilterStep)))]
        brief = self.few_rows and (len(exprs) > BRIEF_COLUMNS or sum(sizes) > BRIEF_PARTS)
        return Stage(self.name, FromBatches(tuple(reads)), steps, sink, brief)

    def _probe_nulls(self, probe: Probe) -> dict[str, bool]:
        by_column = self.joins[probe.table].nulls(probe.how)
        return {name: by_column[column] for name, column in probe.keep}

    def _variant(self, step: Step) -> Step:
        if isinstance(step, DedupStep):
            return replace(step, table=with_keys(step.table, step.keys, nullable=not self.has_all_facts))
        if not isinstance(step, Probe):
            return step
        built = self.joins[step.table]
        codes = tuple((code_name(step.table, column), column) for _, column in step.keep if built.is_coded(column))
        is_one = built.unique or (step.times is not None and step.times.pick != "all")
        return replace(step, codes=codes, direct=built.direct, unique=is_one, dense=built.dense,
                       payload=built.payload, build=built.build)

    def compile(self) -> Compiled:
        self.stage = self.specialise()
        self.compiled = kernel(self.stage, self.options)
        return self.compiled

    @property
    def facts_key(self) -> Hashable:
        """The facts that kernels depend on."""
        return self.few_rows, self.has_all_facts, *self.facts.items()

    def compile_known(self, mode: Hashable = None) -> Compiled:
        """The kernel for the facts of the whole input: one compiled before for the same facts and `mode`, or a new one.

        `mode` is what the sink depends on beside the facts.
        """
        key = (mode, self.facts_key)
        known = self.variants.get(key)
        if known is None:
            compiled = self.compile()
            if len(self.variants) == MAX_VARIANTS:
                self.variants.clear()
            assert self.stage is not None
            self.variants[key] = (self.stage, self.lookups, compiled)
            return compiled
        self.stage, self.lookups, self.compiled = known
        return self.compiled

    def reset(self, table: pa.Table | None) -> None:
        """Start a run over other data, with the facts of its table."""
        self.compiled = None
        self.observe_table(table)

    def release(self) -> None:
        """Drop references to the data of a run that has ended."""
        self.tables, self.interners = {}, {}

    def bind(self, frame: FrameData, batch: pa.RecordBatch) -> None:
        """Point the frame at a batch whose facts were observed."""
        assert self.stage is not None
        assert isinstance(self.stage.reader, FromBatches)
        arrays: dict[str, pa.Array] = {}
        for read in self.stage.reader.reads:
            name = read.via or read.name
            if name not in arrays:
                arrays[name] = addressable(batch.column(name), self.facts[name].code_bits)
            if read.via:
                self._bind_lookup(frame, arrays[name], read)
            else:
                bind(frame, arrays[name], read)

    def _bind_lookup(self, frame: FrameData, array: pa.Array, read: Read) -> None:
        """Bind a lookup table over the dictionary's codes: ids, or an expression's values."""
        dictionary = array.dictionary
        known = self.tables.get(read.name)
        if known is None or not _is_same(known[0], dictionary):
            expr = next(e for e, r in self.lookups.items() if r.name == read.name)
            known = self.tables[read.name] = (dictionary, self._looked_up(expr, read, dictionary))
        bind_codes(frame, array.indices, read)
        frame[f"{COLUMN}{read.name}.values"] = len(dictionary)
        frame.point(f"{COLUMN}{read.name}.data", known[1])

    def _looked_up(self, expr: Expr, read: Read, dictionary: pa.Array) -> np.ndarray:
        match expr:
            case Col():
                return self.interners.setdefault(read.via, Interner()).table(dictionary)
            case Call("#match", params=(int() as number,)):
                return self.joins[number].rows_of(dictionary)
            case _:
                return _table(expr, read, dictionary, self.options)

    def key_values(self, position: int) -> pa.Array:
        """The strings of a dictionary-encoded key, by id."""
        key = self.key_exprs[position]
        assert isinstance(key, Col)
        if key.name.startswith(IDS):
            return self.interners[key.name.removeprefix(IDS)].values()
        number, _, column = key.name.removeprefix(CODE).partition(".")
        return self.joins[int(number)].columns[column].dictionary

    def attach_joins(self, frame: FrameData) -> None:
        for number, built in self.joins.items():
            built.attach(frame, number)


def _is_same(old: pa.Array, new: pa.Array) -> bool:
    """Whether two dictionaries share their memory; the old one is alive, so its address was not reused."""
    if len(old) != len(new) or old.offset != new.offset:
        return False
    return [_address(b) for b in old.buffers()] == [_address(b) for b in new.buffers()]


def _address(buffer: pa.Buffer | None) -> int:
    return 0 if buffer is None else int(buffer.address)


def _table(expr: Expr, read: Read, dictionary: pa.Array, options: Options) -> np.ndarray:
    """The lookup table of an expression: its value for each value of a dictionary; never null (see `Specialiser`).

    Few values are folded like constants: compiling a kernel for the expression would take longer, and for each constant
    in it anew. Many are the input column of such a kernel.
    """
    function = python_function(expr) if len(dictionary) <= MAX_PYTHON_VALUES else None
    dtype = type_of(expr)
    if function is not None and (dtype.is_number or dtype.kind is Kind.BOOL):
        try:
            found = [function(value) for value in dictionary.to_pylist()]
        except (ArithmeticError, ValueError):
            pass
        else:
            return np.array(found, dtype.arrow.to_pandas_dtype())
    items = (Named("value", Specialiser({read.via: False}, {}, {}, lambda number, column: False).expr(expr)),)
    column = Read(read.via, STR, "str32", nulls=False)
    compiled = kernel(Stage("lookup", FromBatches((column,)), (), Collect(items), brief=True), options)
    frame = compiled.kernel.frame.new()
    bind(frame, dictionary, column)
    frame["row"], frame["end"] = 0, len(dictionary)
    return np.concatenate([_bytes(part, size_of(dtype))
                           for (part,) in collect_chunks(compiled, frame, items, len(dictionary))])


def _bytes(array: pa.Array, width: int) -> np.ndarray:
    """The values of an array without nulls, as a kernel writes and reads them."""
    if pa.types.is_boolean(array.type):
        return np.asarray(array.cast(pa.uint8()))
    data = np.frombuffer(array.buffers()[1] or b"", np.uint8)
    return data[array.offset * width : (array.offset + len(array)) * width]


def _sink_exprs(sink: Sink) -> Iterable[Expr]:
    match sink:
        case Collect(items):
            return [item.expr for item in items]
        case Group(table, keys):
            return [*keys, *table_exprs(table)]
        case Process():
            return [*sink.keys, *sink.args, *(() if sink.time is None else (sink.time,))]
        case Partition():
            return [*sink.keys, *(item.expr for item in sink.items)]
        case _ if isinstance(sink, FLOW_SINKS):
            return []
    from scalein.ir.store_kernels import Lookup, Upsert  # only stores need them

    match sink:
        case Upsert():
            return [*sink.keys, *(item for item in sink.items if item is not None)]
        case Lookup():
            return sink.keys
        case _:
            return []


def table_exprs(table: Table) -> list[Expr]:
    """All expressions over a row in a table's updates, without its keys."""
    return [e for e, _ in table_args(table)]


def table_args(table: Table) -> list[tuple[Expr, bool]]:
    """The same, and whether a dictionary's code can stand for its text: to distinguish values, it can."""
    exprs = [(e, acc.kind is AccKind.DISTINCT and type_of(e).is_string)
             for acc in table.accs for e in acc.exprs]
    return [*exprs, *((e, False) for e in table.window.exprs)] if table.window is not None else exprs


def specialised_table(table: Table, keys: Iterable[Expr], special: Specialiser,
                      nullable: bool) -> tuple[Table, tuple[Expr, ...]]:
    """The table and its keys over specialised expressions.

    `nullable`: nulls may still occur, so the layout follows the schema. Else it follows the data: no null bits for keys
    without nulls, and no count of values for columns without nulls.
    """
    new_keys = tuple(special.key(key) for key in keys)
    window = None if table.window is None else table.window.over(special.expr)
    accs: dict[Acc, int] = {}  # with their numbers
    numbers: list[int] = []
    for acc in table.accs:
        is_by_code = acc.kind is AccKind.DISTINCT and acc.arg is not None and type_of(acc.arg).is_string
        acc = acc.over(special.key if is_by_code else special.expr)
        # An expression that may fail must be evaluated.
        every_row = acc.arg is not None and not acc.arg.nullable and not special.may_fail(acc.arg)
        if acc.kind is AccKind.VALID and every_row and not nullable:
            acc = Acc(AccKind.ROWS)
        numbers.append(accs.setdefault(acc, len(accs)))
    grouped = bool(new_keys) or window is not None
    outputs = tuple(_output(o, tuple(numbers[n] for n in o.accs), table.accs[o.accs[0]].kind, grouped)
                    for o in table.outputs)
    keyed = with_keys(table, new_keys, nullable)
    return replace(keyed, accs=tuple(accs), window=window, outputs=outputs), new_keys


def with_keys(table: Table, keys: tuple[Expr, ...], nullable: bool) -> Table:
    """The table over specialised keys: strings of a dictionary become ids, unnecessary null bits are removed."""
    return replace(table, keys=tuple(
        Key(k.name, k.dtype, k.nullable if nullable else e.nullable,
            coded=k.dtype.is_string and not type_of(e).is_string)
        for k, e in zip(table.keys, keys, strict=True)))


def _output(output: Output, accs: tuple[int, ...], kind: AccKind, grouped: bool) -> Output:
    """Row counts decide whether there is a value; a group that exists has at least one row."""
    if grouped and len(accs) == 2 and accs[1] == 0:
        if output.fn == "mean":
            return replace(output, accs=accs, nullable=False)
        return replace(output, accs=accs[:1], nullable=output.nullable and kind is AccKind.EXPR)
    return replace(output, accs=accs)
