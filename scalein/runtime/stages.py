"""A stage made ready for the batches at hand: specialised, compiled, its columns bound.

`Prepared` keeps what it knows of the data (which columns hold nulls, how strings are stored) and makes a
new variant of its kernel when a batch shows more. What is once known to hold nulls stays so, so
there are few variants.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

import numpy as np
import pyarrow as pa

from scalein.dtypes import Schema
from scalein.ir.exprs import Col, Expr, type_of
from scalein.ir.stages import (
    Acc,
    AccKind,
    Collect,
    FromBatches,
    Group,
    Key,
    Output,
    Partition,
    Probe,
    Read,
    Sink,
    Stage,
    Step,
    Table,
)
from scalein.layout import FrameData
from scalein.llvm_backend.cache import Compiled
from scalein.options import Options
from scalein.runtime.call import kernel
from scalein.runtime.batch import addressable, bind, bind_codes, form_of
from scalein.runtime.joins import Built
from scalein.runtime.specialise import Specialiser, code_name, needed


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known of an input column: its form, and whether it may hold nulls."""

    form: str
    nulls: bool


class Interner:
    """Ids of a dictionary column's strings over a whole run, whatever dictionaries its batches bring."""

    def __init__(self) -> None:
        self._ids: dict[str, int] = {}
        self._tables: dict[int, tuple[pa.Array, np.ndarray]] = {}

    def table(self, dictionary: pa.Array) -> np.ndarray:
        """Code -> id for one dictionary; the same dictionary object is looked at once."""
        offsets = dictionary.buffers()[1]
        known = self._tables.get(offsets.address if offsets is not None else 0)
        if known is not None and known[0].equals(dictionary):
            return known[1]
        ids = self._ids
        table = np.fromiter((ids.setdefault(s, len(ids)) for s in dictionary.to_pylist()), np.int32, len(dictionary))
        if offsets is not None:
            self._tables = {offsets.address: (dictionary, table)}
        return table

    def __len__(self) -> int:
        return len(self._ids)

    def values(self) -> pa.Array:
        return pa.array(list(self._ids), pa.string())


@dataclass(slots=True)
class Prepared:
    """Steps and sink of a node over a batch input."""

    name: str
    schema: Schema
    steps: tuple[Step, ...]
    sink: Callable[[Specialiser], Sink]
    exprs: tuple[Expr, ...]
    joins: dict[int, Built]
    options: Options
    facts: dict[str, Facts] = field(default_factory=dict)
    interners: dict[str, Interner] = field(default_factory=dict)
    compiled: Compiled | None = None
    stage: Stage | None = None
    lookups: dict[Expr, Read] = field(default_factory=dict)
    names: tuple[str, ...] = ()
    key_exprs: tuple[Expr, ...] = ()

    def __post_init__(self) -> None:
        read = needed(self.steps, self.exprs)
        self.names = tuple(f.name for f in self.schema if f.name in read)

    def learn(self, batch: pa.RecordBatch) -> bool:
        """Take a batch's facts in; true if a new kernel is needed."""
        changed = self.compiled is None
        for name in self.names:
            array = batch.column(name)
            if pa.types.is_dictionary(array.type) and array.dictionary.null_count:
                form = "str32"
            else:
                form = form_of(array.type)
            old = self.facts.get(name)
            nulls = (old is not None and old.nulls) or array.null_count > 0
            if old is None or old.nulls != nulls or old.form != form:
                self.facts[name] = Facts(form, nulls)
                changed = True
        return changed

    def assume(self, table: pa.Table | None) -> None:
        """Take the facts of a whole table in, so that no batch of it brings news."""
        if table is not None:
            for name in self.names:
                column = table[name]
                form = form_of(column.type)
                if form == "dict" and any(c.dictionary.null_count for c in column.chunks):
                    form = "str32"
                self.facts[name] = Facts(form, column.null_count > 0)

    def specialise(self) -> Stage:
        """The stage for what is known so far."""
        known = self.facts
        special = Specialiser(
            nullable={n: known[n].nulls for n in self.names},
            coded={n: n for n in self.names if known[n].form == "dict"},
            is_coded=lambda number, column: self.joins[number].is_coded(column),
        )
        steps = tuple(self._variant(special.step(step, self._probe_nulls)) for step in self.steps)
        sink = self.sink(special)
        self.lookups = special.lookups
        inner = needed(steps, _sink_exprs(sink))
        reads = [Read(n, self.schema[n].dtype, known[n].form, known[n].nulls) for n in self.names if n in inner]
        reads += [read for read in special.lookups.values() if read.name in inner]
        return Stage(self.name, FromBatches(tuple(reads)), steps, sink)

    def _probe_nulls(self, probe: Probe) -> dict[str, bool]:
        by_column = self.joins[probe.table].nulls(probe.how)
        return {name: by_column[column] for name, column in probe.keep}

    def _variant(self, step: Step) -> Step:
        if not isinstance(step, Probe):
            return step
        built = self.joins[step.table]
        codes = tuple((code_name(step.table, column), column) for _, column in step.keep if built.is_coded(column))
        return replace(step, codes=codes, direct=built.direct, unique=built.unique, dense=built.dense, payload=built.payload,
                       build=built.build)

    def compile(self) -> Compiled:
        self.stage = self.specialise()
        self.compiled = kernel(self.stage, self.options)
        return self.compiled

    def bind(self, frame: FrameData, batch: pa.RecordBatch) -> None:
        """Point the frame at a batch whose facts have been learned."""
        assert self.stage is not None
        assert isinstance(self.stage.reader, FromBatches)
        arrays: dict[str, pa.Array] = {}
        for read in self.stage.reader.reads:
            name = read.via or read.name
            if name not in arrays:
                array = batch.column(name)
                arrays[name] = array if self.facts[name].form == form_of(array.type) != "dict" else (
                    addressable(array) if self.facts[name].form == "dict" else array.cast(pa.string()))
            if read.via:
                self._bind_lookup(frame, arrays[name], read)
            else:
                bind(frame, arrays[name], read)

    def _bind_lookup(self, frame: FrameData, array: pa.Array, read: Read) -> None:
        """A table over the dictionary's codes: ids, or an expression's values."""
        expr = next(e for e, r in self.lookups.items() if r.name == read.name)
        if isinstance(expr, Col):
            table = self.interners.setdefault(read.via, Interner()).table(array.dictionary)
        else:
            table = _evaluated(expr, read, array.dictionary)
        bind_codes(frame, array.indices, read)
        frame.point(f"{read.name}.data", table if len(table) else np.zeros(8, np.uint8))

    def key_values(self, position: int) -> pa.Array:
        """The strings that ids of a coded key stand for."""
        key = self.key_exprs[position]
        assert isinstance(key, Col)
        kind, _, name = key.name.partition(".")
        if kind == "#ids":
            return self.interners[name].values()
        number, _, column = name.partition(".")
        return self.joins[int(number)].columns[column].dictionary

    def attach_joins(self, frame: FrameData) -> None:
        for number, built in self.joins.items():
            built.attach(frame, number)


def _evaluated(expr: Expr, read: Read, dictionary: pa.Array) -> np.ndarray:
    """The bytes of an expression for every value of a dictionary; it has one for each (see `Specialiser`)."""
    from scalein.interp import evaluate

    values = evaluate(expr, pa.RecordBatch.from_arrays([dictionary], [read.via]))
    values = values.combine_chunks() if isinstance(values, pa.ChunkedArray) else values
    if pa.types.is_boolean(values.type):
        return np.asarray(values.cast(pa.uint8()))
    width = type_of(expr).bits // 8
    data = np.frombuffer(values.buffers()[1] or b"", np.uint8)
    return np.ascontiguousarray(data[values.offset * width : (values.offset + len(values)) * width])


def _sink_exprs(sink: Sink) -> Iterable[Expr]:
    match sink:
        case Collect(items):
            return [item.expr for item in items]
        case Group(table, keys):
            return [*keys, *table_exprs(table)]
        case Partition():
            return [*sink.keys, *(item.expr for item in sink.items)]
        case _:
            return []


def table_exprs(table: Table) -> list[Expr]:
    """Everything a table's updates compute from a row, but its keys."""
    exprs = [e for acc in table.accs for e in (acc.arg, acc.by) if e is not None]
    return [*exprs, table.window.time] if table.window is not None else exprs


def specialised_table(table: Table, keys: Iterable[Expr], special: Specialiser, nullable: bool) -> tuple[Table, tuple[Expr, ...]]:
    """The table and its keys over specialised expressions.

    `nullable`: nulls may still come, so the layout follows the schema. Else it follows the data: no
    null bits for keys without nulls, and no count of values for columns whose every row has one.
    """
    new_keys = tuple(special.key(key) for key in keys)
    stored = tuple(
        Key(k.name, k.dtype, k.nullable if nullable else e.nullable, coded=k.dtype.is_string and not type_of(e).is_string)
        for k, e in zip(table.keys, new_keys, strict=True))
    window = None if table.window is None else replace(table.window, time=special.expr(table.window.time))
    accs: list[Acc] = []
    numbers: list[int] = []
    for acc in table.accs:
        acc = replace(acc, arg=None if acc.arg is None else special.expr(acc.arg), by=None if acc.by is None else special.expr(acc.by))
        if acc.kind is AccKind.VALID and acc.arg is not None and not acc.arg.nullable and not nullable:
            acc = Acc(AccKind.ROWS)
        if acc not in accs:
            accs.append(acc)
        numbers.append(accs.index(acc))
    grouped = bool(new_keys) or window is not None
    outputs = tuple(_output(o, tuple(numbers[n] for n in o.accs), grouped) for o in table.outputs)
    return replace(table, keys=stored, accs=tuple(accs), window=window, outputs=outputs), new_keys


def _output(output: Output, accs: tuple[int, ...], grouped: bool) -> Output:
    """Row counts decide whether there is a value; a group that exists has at least one row."""
    if grouped and len(accs) == 2 and accs[1] == 0:
        if output.fn == "mean":
            return replace(output, accs=accs, nullable=False)
        return replace(output, accs=accs[:1], nullable=False)
    return replace(output, accs=accs)
