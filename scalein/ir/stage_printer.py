"""Text of the fused form: the program as a tree of nodes, and one stage as its kernel sees it.

A program is a tree, result first, like a logical plan. What stands after the bars is one kernel, its
last step first, as everything here flows upwards; below it stand the tables it probes and what it reads:

    kernel group by campaign, tumbling(time, 10s)  -> campaign: str?, ..., views: i64
    | emit    views = count()
    | state   24 bytes a group: rows
    | probe   join0, inner on ad
    | filter  kind == 'view'
      join0 by ad: campaign
        scan arrow  -> ad: i64?, campaign: str?
      scan arrow  -> ad: i64?, kind: str?, time: timestamp[us]

A stage is printed in the order in which its kernel works: what it reads, step by step, into which sink.
Names that begin with `#:` are internal: columns that pyarrow computes or is given (`#:host0`), tables over the codes of
a dictionary (`#:lookup0`), ids of strings (`#:ids.name`, `#:code.0.name`), and the row numbers by which nested columns
are taken, of the batch (`#:row`) and of a joined table (`#:at.0`).
"""

from __future__ import annotations

from collections.abc import Iterator

from scalein.ir.aggregates import AGGREGATES
from scalein.ir.exprs import Call, Col, Expr, Lit, Named, walk
from scalein.ir.functions.registry import is_host
from scalein.ir.internal_names import internal
from scalein.ir.ops import AssignWindows, Explode
from scalein.ir.passes.pass_through import Origin, is_copy_free, split_items, taken_items
from scalein.ir.physical import (
    Host,
    Limit,
    Node,
    OuterJoin,
    Over,
    Pipeline,
    Process,
    Scan,
    Sort,
    Union,
    WindowAggregate,
    inputs,
)
from scalein.ir.printer import show_agg, show_expr
from scalein.ir.stages import (
    FOREVER,
    ORDINAL,
    Collect,
    DedupStep,
    ExpandLog,
    FilterStep,
    FromBatches,
    FromPartials,
    FromPointers,
    FromRecords,
    FromRows,
    FromTable,
    Group,
    GroupMode,
    Merge,
    MergeBag,
    Partition,
    Probe,
    ProjectStep,
    Rank,
    Read,
    Stage,
    Step,
)
from scalein.ir.stages import Process as ProcessSink
from scalein.ir.tables import Acc, AccKind, Output, Table, log_layout

_ACCS = {AccKind.VALID: "count", AccKind.ISUM: "sum", AccKind.FSUM: "sum"}
_MODES = {GroupMode.ONE: "in one record", GroupMode.DIRECT: "in a direct table", GroupMode.HASH: "in a hash table"}
_FORMS = {"str32": "", "str64": "", "view": "", "fixed": "", "bits": "", "field": "", "dict": " (dictionary)"}


def dump_program(root: Node) -> str:
    """The program, result first; what stands below a line feeds it."""
    found: list[str] = []
    waiting: list[str | tuple[Node, str]] = [(root, "")]
    while waiting:
        part = waiting.pop()
        if isinstance(part, str):
            found.append(part)
            continue
        node, pad = part
        found += [f"{pad}{line}" for line in _lines(node)]
        waiting += reversed(list(_inputs(node, f"{pad}  ")))
    return "\n".join(found)


def _lines(node: Node) -> Iterator[str]:
    """A node without what feeds it."""
    match node:
        case Scan():
            yield f"scan {node.source.name}  -> {node.schema!r}"
        case Pipeline():
            kernel = "" if is_copy_free(node) else "kernel "
            columns = "" if node.schema == node.input.schema else f"  -> {node.schema!r}"
            yield f"{kernel}{node.name}{columns}"
            yield from (f"| {line}" for line in (*_collected(node), *_steps(node.steps)))
        case WindowAggregate():
            yield f"kernel group {_by(node.table)}  -> {node.schema!r}"
            yield from (f"| {line}" for line in (*_state(node.table), *_steps(node.steps)))
        case Process():
            keys = ", ".join(key.name for key in node.keys)
            how = "plain Python, row by row:" if node.body.python is not None else "kernel"
            yield f"{how} process {node.body.name}{f' by {keys}' if keys else ''}  -> {node.schema!r}"
        case OuterJoin():
            yield f"then unmatched rows of join{node.table}  -> {node.schema!r}"
        case Host():
            yield f"{_host(node)}  -> {node.schema!r}"
        case Limit():
            yield f"limit {node.count}"
        case Sort():
            yield _ordered(node)
        case Over():
            calls = ", ".join(show_agg(call.agg) for call in node.calls)
            yield f"kernel over {', '.join(node.keys) or 'all rows'}: {calls}  -> {node.schema!r}"
        case Union():
            yield f"union  -> {node.schema!r}"


def _inputs(node: Node, pad: str) -> Iterator[str | tuple[Node, str]]:
    """What feeds a node: lines, and nodes with what stands before their lines."""
    for number, table in node.joins if isinstance(node, Pipeline | WindowAggregate) else ():
        keys = ", ".join(map(show_expr, table.keys))
        yield f"{pad}join{number} by {keys}: {', '.join(table.columns) or 'keys only'}"
        yield table.input, f"{pad}  "
    below = inputs(node)
    yield from ((each, pad) for each in (below if isinstance(node, Union) else below[-1:]))


def _collected(pipe: Pipeline) -> Iterator[str]:
    """What a pipe's kernel writes, and the columns that it need not copy."""
    passed, written = split_items(pipe)
    if written:
        yield _line("write", _items(written))
    if taken := taken_items(pipe):
        names = [_taken(pipe.items[i].name, origin) for i, origin in taken.items()]
        yield _line("take", f"{', '.join(names)}, by row number")
    if passed:
        handed_on = [Named(pipe.items[i].name, Col(name)) for i, name in passed.items()]
        yield _line("as is", _items(tuple(handed_on)))


def _taken(name: str, origin: Origin) -> str:
    column = origin.column if origin.join is None else f"join{origin.join}.{origin.column}"
    return name if column == name else f"{name} = {column}"


def _host(node: Host) -> str:
    if isinstance(node.op, Explode):
        return f"explode {', '.join(node.op.lists)}, by pyarrow"
    if isinstance(node.op, AssignWindows):
        return f"windows {node.op.window}, by numpy"
    if node.op is not None:
        return f"map_batches {getattr(node.op.fn, '__name__', type(node.op.fn).__name__)}, in Python"
    made = [item for item in node.items if not isinstance(item.expr, Col)]
    by_whom = {"pyarrow": [item for item in made if not _is_python(item)], "Python": list(filter(_is_python, made))}
    return ", ".join(f"{step} computes {_items(tuple(items))}" for step, items in by_whom.items() if items)


def _is_python(item: Named) -> bool:
    """Whether a function of the user's that stays Python is called in it."""
    return any(isinstance(e, Call) and e.fn == "udf" and is_host(e) for e in walk(item.expr))


def _ordered(node: Sort) -> str:
    by = ", ".join(f"{name}{' descending' if descending else ''}" for name, descending in node.by)
    what = "sort" if node.count is None else f"first {node.count}"
    return f"{what} by {by}{', nulls last' if node.nulls_last else ''}"


def _steps(steps: tuple[Step, ...]) -> Iterator[str]:
    """Last step first, as data flows upwards."""
    return map(show_step, reversed(steps))


def _line(what: str, text: str) -> str:
    return f"{what:<7} {text}"


def show_step(step: Step) -> str:
    """One step, its verb first; of a probe also the variant, once it is known."""
    match step:
        case FilterStep():
            return _line("filter", show_expr(step.predicate))
        case ProjectStep():
            return _line("project", _items(tuple(item for item in step.items if not _keeps_name(item))))
        case Probe():
            is_cross = all(isinstance(key, Lit) for key in step.keys)
            how = "cross" if is_cross else f"{step.how} on {', '.join(map(show_expr, step.keys))}"
            more = ("" if step.unique else ", several matches a row") + (", marking matches" if step.marks else "")
            return _line("probe", f"join{step.table}, {how}{_range(step)}{_variant(step)}{more}")
        case DedupStep():
            keys = ", ".join(map(show_expr, step.keys))
            return _line("dedup", f"by {keys}: its first row, {step.table.layout.size} bytes a record")


def _range(probe: Probe) -> str:
    """The times of the rows that a probe matches."""
    if probe.times is None:
        return ""
    low, high = ((f"{show_expr(of)} {'-' if more < 0 else '+'} {abs(more)}" if more else show_expr(of))
                 if abs(more) < FOREVER else "any"
                 for of, more in ((probe.times.low_of, probe.times.low), (probe.times.high_of, probe.times.high)))
    return f", times {low} to {high}{'' if probe.times.pick == 'all' else f', {probe.times.pick}'}"


def _variant(probe: Probe) -> str:
    """How a probe finds its row; empty before the table is built."""
    if probe.by_code:
        return ", by dictionary code"
    return ", by position" if probe.direct else ", by hash" if probe.build is not None else ""


def _items(items: tuple[Named, ...]) -> str:
    return ", ".join(map(_item, items))


def _item(item: Named) -> str:
    if _keeps_name(item):
        return item.name
    if isinstance(item.expr, Col) and item.expr.name in (names := _as_what(item.name)):
        return f"{item.name} ({names[item.expr.name]})"
    return f"{item.name} = {show_expr(item.expr)}"


def _as_what(name: str) -> dict[str, str]:
    """What an internal column means for the user's column of this name."""
    return {internal(f"id.{name}"): "as an id", internal(f"start.{name}"): "where its values start",
            internal(f"count.{name}"): "how many they are"}


def _keeps_name(item: Named) -> bool:
    return isinstance(item.expr, Col) and item.expr.name == item.name


def _by(table: Table) -> str:
    by = [key.name for key in table.keys]
    if table.window is not None:
        by.append(str(table.window))
    return f"by {', '.join(by)}" if by else "all rows"


def _state(table: Table) -> Iterator[str]:
    """The outputs of a group, and the layout of its record."""
    layout = table.layout
    ring = f", {table.ring} slices of {layout.ring_step}" if table.ring else ""
    yield _line("emit", ", ".join(f"{o.name} = {_output(o, table)}" for o in table.outputs) or "its keys")
    yield _line("state", f"{layout.size} bytes a group{ring}: {', '.join(map(_acc, table.accs))}")
    beside = [f"{bag.layout.size} bytes for each value of {_args(table.accs[k])}" for k, bag in table.bags]
    beside += [f"{log_layout(acc).size} bytes for each row of {_args(acc)}" for _, acc in table.logs]
    if beside:
        yield _line("side", ", ".join(beside))


def _output(output: Output, table: Table) -> str:
    """The aggregate as the user wrote it, from the accumulator it is finished from."""
    first = table.accs[output.accs[0]]
    if first.kind is AccKind.EXPR:
        return _acc(first)
    params = first.params[:1]  # what follows the user's own is for kernels
    args = ", ".join(filter(None, [_args(first), *map(repr, params)]))
    declared = AGGREGATES.get(output.fn)  # None for the columns of partial groups
    return f"{declared.method or output.fn if declared else output.fn}({args})"


def _acc(acc: Acc) -> str:
    if acc.kind is AccKind.EXPR:
        return f"{acc.expr.name}({', '.join(map(show_expr, acc.parts))})"
    name = _ACCS.get(acc.kind, acc.kind.value)
    return f"{name}({_args(acc)})" if acc.arg is not None else name


def _args(acc: Acc) -> str:
    arg = _hashed(acc.arg) if acc.kind is AccKind.SKETCH and acc.arg is not None else acc.arg
    return ", ".join(show_expr(e) for e in (arg, acc.by) if e is not None)


def _hashed(arg: Expr) -> Expr:
    """The user's expression in what a sketch takes: its hash, null where it is (see `aggregate_table`)."""
    match arg:
        case Call("hash", (value,)) | Call("if_else", (_, Call("hash", (value,)), _)):
            return value
    return arg


def dump_stage(stage: Stage) -> str:
    """A specialised stage: what is read, step by step, into which sink."""
    lines = [_reader(stage), *map(show_step, stage.steps), *_sink(stage)]
    return "\n".join([f"kernel {stage.name}", *(f"  {line}" for line in lines)])


def _reader(stage: Stage) -> str:
    match stage.reader:
        case FromPartials(reads, sides=sides):
            return _line("read", f"partial groups, {sides} a row: {', '.join(map(_read, reads))}")
        case FromBatches(reads):
            return _line("read", ", ".join(map(_read, reads)) or "nothing but the number of rows")
        case FromRows(reads, stride):
            return _line("read", f"a partition's rows of {stride} bytes: {', '.join(map(_read, reads))}")
        case FromTable(table, window_slices):
            merged = f", {window_slices} slices a window" if window_slices else ""
            return _line("read", f"groups {_by(table)}{merged}")
        case FromRecords():
            return _line("read", "records of another table")
        case FromPointers():
            return _line("read", "stored records")


def _read(read: Read) -> str:
    form = f" (by the code of {read.via})" if read.via else _FORMS.get(read.form, f" ({read.form})")
    return f"{'row number' if read.name == ORDINAL else read.name}: {read.dtype!r}{'?' if read.nulls else ''}{form}"


def _sink(stage: Stage) -> Iterator[str]:
    match stage.sink:
        case Collect(items):
            yield _line("write", _items(items))
        case ProcessSink(table):
            yield _line("process", f"{stage.sink.body.name} {_by(table)}, in a hash table: {_items(stage.sink.items)}")
        case Group(table, mode=mode, owned=owned):
            own = ", each worker its own keys" if owned else ""
            yield _line("group", f"{_by(table)}, {_MODES[mode]}{own}")
            yield from _state(table)
        case Merge(table, mode, slide):
            what = "slices into windows" if slide else "groups"
            yield _line("merge", f"{what} {_by(table)}, {_MODES[mode]}")
        case MergeBag(table, bag):
            yield _line("merge", f"the values of {_args(table.accs[table.bags[bag][0]])}, group by group")
        case ExpandLog(table, acc):
            yield _line("append", f"16 bytes to the group's values of {_args(table.accs[acc])}")
        case Rank(table, acc, fold):
            yield _line("fold" if fold else "rank", f"each group's values of {_args(table.accs[acc])}")
        case Partition() as sink:
            row_number = ", row number" if sink.ordinal else ""
            yield _line("append", f"{sink.stride} bytes to a partition: {_items(sink.items)}{row_number}")
