"""Materialized columns: costly ones that several loops read are computed once a block.

A `ProjectStep` only names columns, and each loop that reads one computes it: for a few instructions that is cheaper
than a trip through memory. A udf may cost anything, and columns in terms of columns in terms of columns many calls. So
where more than one loop reads a costly column, a loop of its own computes it right before the first of them, for the
rows live there, and the others load it.

Scratch has a place for each row of the block as it was read. So a materialized column must be a function of that row: a
join that multiplies rows must not come before it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

from llvmlite import ir

from scalein.ir.exprs import Call, Col, Expr, Named, columns, type_of, walk
from scalein.ir.functions.registry import REGISTRY, makes_text
from scalein.ir.functions.udf import has_udf
from scalein.ir.internal_names import internal
from scalein.ir.rewrite import map_args
from scalein.ir.stages import (
    FLOW_SINKS,
    Collect,
    DedupStep,
    FilterStep,
    Group,
    GroupMode,
    Partition,
    Probe,
    Process,
    ProjectStep,
    Sink,
    Stage,
)
from scalein.ir.tables import AccKind
from scalein.layout import BLOCK_ROWS, ERROR
from scalein.llvm_backend.block import PADDED, Block, rows
from scalein.llvm_backend.code import Code
from scalein.llvm_backend.exprs import lower_expr
from scalein.llvm_backend.fn import I8, I64, PTR, const
from scalein.llvm_backend.functions.registry import LAZY
from scalein.llvm_backend.parts import is_many
from scalein.llvm_backend.values import Binding, Env, Row, Str, Value, from_memory, memory_type, to_memory

COSTLY_CALLS = 16  # to compute a column: then a trip through memory is cheaper than computing it in each loop
MAX_MATERIALIZED = 64  # in a kernel: scratch is on the stack, 16 KB for a column of strings


@dataclass(eq=False, slots=True)
class MaterializedColumn:
    """A column on its way to scratch; until it is there, it is computed where it is read."""

    code: Code
    expr: Expr
    env: Env
    arrays: list[ir.Value] = field(default_factory=list)  # the data, of a string the addresses and sizes
    valid: ir.Value | None = None

    def compute(self, block: Block) -> None:
        """Fill scratch for the live rows."""
        code, f = self.code, self.code.f
        with rows(code, block) as row:
            value = lower_expr(code, self.expr, self.env, row)
            place = self._place(row)
            parts = [value.data.ptr, value.data.size] if isinstance(value.data, Str) else [to_memory(f, value.data)]
            arrays = [f.scratch(part.type, PADDED, "materialized") for part in parts]
            for part, array in zip(parts, arrays, strict=True):
                f.store(part, array, place)
            if value.valid is not None:
                self.valid = f.scratch(I8, PADDED, "materialized.valid")
                f.store(f.b.zext(value.valid, I8), self.valid, place)
        self.arrays = arrays
        code.check_errors(ERROR)

    def value(self, row: Row) -> Value:
        if not self.arrays:
            return lower_expr(self.code, self.expr, self.env, row)
        f, dtype, place = self.code.f, type_of(self.expr), self._place(row)
        data: ir.Value | Str
        if dtype.is_bytes:
            data = Str(f.load(self.arrays[0], place, PTR), f.load(self.arrays[1], place, I64))
        else:
            data = from_memory(f, f.load(self.arrays[0], place, memory_type(dtype)), dtype)
        if self.valid is None:
            return Value(data)
        return Value(data, f.b.icmp_unsigned("!=", f.load(self.valid, place, I8), const(0, I8)))

    def _place(self, row: Row) -> ir.Value:
        place = row.offset("in")
        self.code.check_within("a row of a materialized column", place, lambda: const(BLOCK_ROWS))
        return place


def bind(code: Code, expr: Expr, env: Env, keep: bool) -> Binding:
    """A column of a `ProjectStep`."""
    if isinstance(expr, Col) and not keep and expr.name in env:  # what no later step reads, the kernel does not either
        return env[expr.name]
    below = _needs(env, [expr])
    if keep:
        column = MaterializedColumn(code, expr, env)
        return Binding(column.value, needs=(*below, column))
    return Binding(lambda row: lower_expr(code, expr, env, row), (expr, env), below)


def materialize_needed(block: Block, env: Env, exprs: Iterable[Expr]) -> None:
    """Compute the materialized columns that these expressions are the first to read."""
    for column in _needs(env, exprs):
        if not column.arrays:
            column.compute(block)


def _needs(env: Env, exprs: Iterable[Expr]) -> tuple[MaterializedColumn, ...]:
    """The materialized columns that expressions need, each after those it reads itself."""
    names = sorted(set().union(*map(columns, exprs)) & env.keys())  # an accumulator's may be used up already
    return tuple(dict.fromkeys(column for name in names for column in env[name].needs))


def multiplies(step: object) -> bool:
    """Whether several rows may come out of a step for one row that goes in."""
    return isinstance(step, Probe) and not step.unique and step.how in ("inner", "left")


def find_materialized(stage: Stage) -> frozenset[tuple[int, str]]:
    """The columns to materialize (position of the `ProjectStep`, name): costly ones that more than one loop reads."""
    shared = _shared(stage)
    found: frozenset[tuple[int, str]] = frozenset()
    costly = COSTLY_CALLS
    while not found:
        found = frozenset(_costly(stage, shared, costly))
        if len(found) > MAX_MATERIALIZED:  # fewer, further apart
            found, costly = frozenset(), 2 * costly
        elif not found:
            break
    return found


def _shared(stage: Stage) -> set[tuple[int, str]]:
    """The columns that more than one loop reads, and that are functions of the row as it was read."""
    found: set[tuple[int, str]] = set()
    loops: dict[str, set[object]] = {}  # by column: loops that read it, two at most

    def read(names: Iterable[str], readers: Iterable[object]) -> None:
        for name in names:
            known = loops.setdefault(name, set())
            for loop in readers:
                if len(known) < 2:
                    known.add(loop)

    for number, exprs in enumerate(_loops(stage.sink)):
        read(set().union(*map(columns, exprs)), [("sink", number)])
    many = next((at for at, step in enumerate(stage.steps) if multiplies(step)), len(stage.steps))
    for at, step in reversed(list(enumerate(stage.steps))):
        match step:
            case FilterStep(predicate):
                read(columns(predicate), [at])
            case Probe() | DedupStep():
                # A probe by hash hashes the keys first, then asks for nulls.
                is_twice = isinstance(step, Probe) and step.build is not None
                exprs = step.exprs if isinstance(step, Probe) else step.keys
                read(set().union(*map(columns, exprs)), [at, (at, "nulls")] if is_twice else [at])
            case ProjectStep(items):
                after, loops = loops, {}
                for item in items:
                    readers = after.get(item.name, set())
                    if len(readers) > 1 and at < many:
                        found.add((at, item.name))
                    read([item.expr.name] if isinstance(item.expr, Col) else columns(item.expr), readers)
    return found


def _costly(stage: Stage, shared: set[tuple[int, str]], costly: int) -> Iterator[tuple[int, str]]:
    """Of shared columns those that take many calls from the materialized columns before; a udf counts for many, and
    so does text that is made.
    """
    calls: dict[str, int] = {}  # by column
    for at, step in enumerate(stage.steps):
        if isinstance(step, ProjectStep):
            before, calls = calls, {}
            for item in step.items:
                if isinstance(item.expr, Col):
                    calls[item.name] = before.get(item.expr.name, 0)
                    continue
                nodes = list(walk(item.expr))
                own = sum(isinstance(node, Call) for node in nodes)
                cost = own + sum(before.get(name, 0) for name in {n.name for n in nodes if isinstance(n, Col)})
                if has_udf(item.expr) or makes_text(item.expr):
                    cost += 64 * COSTLY_CALLS
                if (at, item.name) in shared and cost >= costly:
                    yield at, item.name
                    cost = 0
                calls[item.name] = cost


def hoist_costly(stage: Stage) -> Stage:
    """The stage with a `ProjectStep` before its sink for the costly calls that several loops of the sink make."""
    count = Counter(call for exprs in _loops(stage.sink) for call in dict.fromkeys(chain(*map(_sure_calls, exprs))))
    names = {call: Col(internal(f"materialized{k}"), call.dtype, call.nullable)
             for k, call in enumerate(call for call, n in count.items() if n > 1)}
    if not names:
        return stage
    below = {node.name: node for expr in sink_exprs(stage.sink) for node in walk(expr) if isinstance(node, Col)}
    items = [Named(name, column) for name, column in below.items()]
    let = ProjectStep((*items, *(Named(column.name, call) for call, column in names.items())))
    return replace(stage, steps=(*stage.steps, let), sink=_renamed(stage.sink, names))


def _sure_calls(expr: Expr) -> Iterator[Call]:
    """The calls of udfs, and of what makes text, that are made for every row: not those that a condition guards."""
    waiting = [expr]
    while waiting:
        node = waiting.pop()
        if isinstance(node, Call) and (node.fn == "udf" or REGISTRY[node.fn].makes_text(node)):
            yield node
        elif isinstance(node, Call) and node.fn not in LAZY:
            waiting += reversed(node.args)


def _renamed(sink: Sink, names: Mapping[Call, Col]) -> Sink:
    """The sink with columns in the place of calls."""

    def new(expr: Expr) -> Expr:
        if isinstance(expr, Call):
            return names[expr] if expr in names else map_args(expr, new)
        return expr

    match sink:
        case Collect(items):
            return Collect(tuple(Named(item.name, new(item.expr)) for item in items))
        case Group(table, keys):
            accs = tuple(acc.over(new) for acc in table.accs)
            return replace(sink, table=replace(table, accs=accs), keys=tuple(map(new, keys)))
        case _:
            return sink


def sink_exprs(sink: Sink) -> list[Expr]:
    """Everything that a sink computes for its rows."""
    return [expr for exprs in _loops(sink) for expr in exprs]


def _loops(sink: Sink) -> list[Sequence[Expr]]:
    """What a sink computes, loop by loop over a block."""
    match sink:
        case Collect(items):
            # What has no fixed size is measured first.
            return [[item.expr] for item in items for _ in range(2 if type_of(item.expr).is_loose else 1)]
        case Process():
            return [sink.keys, [*sink.keys, *sink.args, *(() if sink.time is None else (sink.time,))]]
        case Partition():
            return [[*sink.keys, *(item.expr for item in sink.items)]]
        case Group(table, keys):
            given = [(acc, acc.exprs) for acc in table.accs]
            early = [exprs for acc, exprs in given
                     if acc.has_side or acc.has_heap or (acc.kind is AccKind.MOMENTS and sink.mode is GroupMode.ONE)]
            late = [exprs for _, exprs in given]
            if sink.mode is not GroupMode.ONE and not is_many(table.accs):
                late = [tuple(expr for exprs in late for expr in exprs)]
            times = [] if table.window is None else [list(table.window.exprs)] * 2
            return [*times, *([keys] * (2 if sink.owned else 1)), *early, *late]
        case _ if isinstance(sink, FLOW_SINKS):
            return []
        case _:
            from scalein.llvm_backend.store_sinks import store_loops

            return store_loops(sink)
