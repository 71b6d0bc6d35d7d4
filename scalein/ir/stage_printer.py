"""Text of the fused form: the program as a tree of nodes, and one stage as the kernel's author sees it."""

from __future__ import annotations

from collections.abc import Iterator

from scalein.ir.exprs import Col, Named
from scalein.ir.printer import show_expr, show_window
from scalein.ir.stages import (
    Acc,
    Chain,
    Collect,
    FromBatches,
    FromRecords,
    FromRows,
    FromTable,
    Group,
    Grouped,
    Host,
    Let,
    Merge,
    Node,
    Partition,
    Pipe,
    Probe,
    Scan,
    Stage,
    Step,
    Table,
    Take,
    Where,
)


def dump_program(root: Node) -> str:
    """The program, result first; what stands below a line feeds it."""
    return "\n".join(_lines(root, 0))


def _lines(node: Node, depth: int) -> Iterator[str]:
    pad = "  " * depth
    match node:
        case Scan():
            yield f"{pad}scan {node.source.name}: {node.schema!r}"
        case Pipe():
            yield f"{pad}kernel: collect {_items(node.items)}"
            yield from _steps(node.steps, pad)
            yield from _below(node, depth)
        case Grouped():
            yield f"{pad}kernel: group {_table(node.table)}"
            yield from (f"{pad}  | {line}" for line in _state(node.table))
            yield from _steps(node.steps, pad)
            yield from _below(node, depth)
        case Host():
            what = f"map_batches {getattr(node.op.fn, '__name__', 'function')}" if node.op is not None else (
                "pyarrow " + ", ".join(f"{i.name} = {show_expr(i.expr)}" for i in node.items if not isinstance(i.expr, Col)))
            yield f"{pad}host: {what}"
            yield from _lines(node.input, depth + 1)
        case Take():
            yield f"{pad}take {node.count}"
            yield from _lines(node.input, depth + 1)
        case Chain():
            yield f"{pad}chain"
            for each in node.inputs:
                yield from _lines(each, depth + 1)


def _below(node: Pipe | Grouped, depth: int) -> Iterator[str]:
    for number, table in node.joins:
        keys = ", ".join(map(show_expr, table.keys))
        yield f"{'  ' * (depth + 1)}table join{number} by {keys}: {', '.join(table.columns) or 'keys only'}"
        yield from _lines(table.input, depth + 2)
    yield from _lines(node.input, depth + 1)


def _steps(steps: tuple[Step, ...], pad: str) -> Iterator[str]:
    """Last step first, as data flows upwards."""
    return (f"{pad}  ^ {show_step(step)}" for step in reversed(steps))


def show_step(step: Step) -> str:
    match step:
        case Where():
            return f"where {show_expr(step.predicate)}"
        case Let():
            return f"let {_items(step.items)}"
        case Probe():
            how = "" if step.build is None and not step.direct else " direct" if step.direct else " hash"
            several = "" if step.unique else ", several matches a row"
            return f"probe join{step.table}{how} {step.how} on {', '.join(map(show_expr, step.keys))}{several}"


def _items(items: tuple[Named, ...]) -> str:
    return ", ".join(i.name if isinstance(i.expr, Col) and i.expr.name == i.name else f"{i.name} = {show_expr(i.expr)}"
                     for i in items)


def _table(table: Table) -> str:
    by = [key.name for key in table.keys]
    if table.window is not None:
        by.append(show_window(table.window))
    return f"by {', '.join(by)}" if by else "all rows"


def _state(table: Table) -> Iterator[str]:
    """The record: how large it is, what it remembers, what comes out."""
    layout = table.layout
    ring = f", {table.ring} slices of {layout.ring_step}" if table.ring else ""
    yield f"record of {layout.size} bytes{ring}: {', '.join(_acc(acc) for acc in table.accs)}"
    yield "gives " + ", ".join(f"{o.name} = {o.fn}" for o in table.outputs)


def _acc(acc: Acc) -> str:
    args = ", ".join(show_expr(e) for e in (acc.arg, acc.by) if e is not None)
    return f"{acc.kind.value}({args})" if args else acc.kind.value


def dump_stage(stage: Stage) -> str:
    """A specialised stage: what is read, step by step, into which sink."""
    lines = [f"kernel {stage.name}"]
    match stage.reader:
        case FromBatches(reads) | FromRows(reads):
            kind = "rows of a partition" if isinstance(stage.reader, FromRows) else "batch"
            shown = ", ".join(f"{r.name}: {r.dtype!r}{'?' if r.nulls else ''}{'' if r.form == 'fixed' else f' ({r.form})'}"
                              for r in reads)
            lines.append(f"  read   {kind}: {shown or 'row count'}")
        case FromTable(table):
            lines.append(f"  read   groups {_table(table)}")
        case FromRecords():
            lines.append("  read   records")
    lines += [f"  {'step':<6} {show_step(step)}" for step in stage.steps]
    match stage.sink:
        case Collect(items):
            lines.append(f"  sink   collect {_items(items)}")
        case Group():
            table = stage.sink.table
            lines.append(f"  sink   group {stage.sink.mode.value} {_table(table)}")
            lines += [f"         {line}" for line in _state(table)]
        case Merge():
            lines.append(f"  sink   merge {'slices into windows ' if stage.sink.slide else ''}{_table(stage.sink.table)}")
        case Partition():
            lines.append(f"  sink   partition by key group, {stage.sink.stride} bytes a row: {_items(stage.sink.items)}")
    return "\n".join(lines)
