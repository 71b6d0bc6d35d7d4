"""explain(): the plan of a flow at each level, and the metrics of each kernel of a run.

logical   the ops after all passes
fused     nodes and their fused steps: one kernel each
llvm/asm  the kernels, compiled for a sample of the data (its first rows; for an input without rows
          in memory, one made-up row)
analyze   the fused plan, then every kernel of a whole run: rows, time, copies, memory
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

import pyarrow as pa

from scalein.compiler import compile_flow
from scalein.connectors.in_memory import Batches
from scalein.dtypes import from_arrow_type_or_none
from scalein.errors import NOWHERE, ComputeError
from scalein.exec.bounded import batches
from scalein.exec.scan_predicates import row_groups_skipped
from scalein.ir import ops
from scalein.ir.passes import OP_PASSES
from scalein.ir.passes.pass_through import split_items
from scalein.ir.physical import Node, Pipeline, walk_nodes
from scalein.ir.printer import dump
from scalein.ir.rewrite import rewrite
from scalein.ir.stage_printer import dump_program, dump_stage
from scalein.ir.stages import Collect, ExpandLog, FromTable, Partition, Stage
from scalein.kernels.kernel_metrics import KernelMetrics, profiling
from scalein.kernels.machine import copy_bandwidth
from scalein.llvm_backend.jit import assembly
from scalein.llvm_backend.stage import lower_stage
from scalein.llvm_backend.target import target_for
from scalein.options import Options

SAMPLE_ROWS = 1_000
_COPY_BYTES = 64 << 20  # enough to estimate the bandwidth, in a few hundredths of a second


def explain(op: ops.Op, options: Options, level: str, verbose: bool, analyze: bool) -> str:
    """The plan as text."""
    if analyze:
        return _analysed(op, options)
    if verbose and level in ("logical", "fused"):
        return _every_pass(op, level)
    if level == "logical":
        for step in OP_PASSES:
            op = step(op)
        return dump(op, with_retention=True)
    if level == "fused":
        return dump_program(compile_flow(op))
    kernels = _kernels(op, options, level)
    return f"{_commented(_every_pass(op, 'fused'))}\n\n{kernels}" if verbose else kernels


def _every_pass(op: ops.Op, level: str) -> str:
    """The plan after every pass of the level; `unchanged` after one that changed nothing."""
    parts: list[str] = []
    last = ""

    def record(name: str, plan: ops.Op | Node) -> None:
        nonlocal last
        if isinstance(plan, Node) and level == "logical":
            return
        text = dump_program(plan) if isinstance(plan, Node) else dump(plan)
        parts.append(f"-- {name}\n{'unchanged' if text == last else text}")
        last = text

    compile_flow(op, record)
    return "\n\n".join(parts)


# --- llvm, asm


def _kernels(op: ops.Op, options: Options, level: str) -> str:
    """LLVM or machine code of every kernel that a run over a sample uses."""
    sampled = _sampled(op)
    with profiling() as profile, suppress(ComputeError):
        # A row of the sample may fail; the kernels loaded before that are shown.
        for _ in batches(sampled, replace(options, workers=1)):
            pass
    target = target_for(options.cpu)
    parts = []
    for metrics in profile.kernels.values():
        lowered = lower_stage(metrics.stage, target, options.safe)
        text = lowered.text if level == "llvm" else assembly(lowered.text, target)
        parts.append(f"{_commented(dump_stage(metrics.stage))}\n{text}")
    return "\n".join(parts) or "; nothing to compile: every column is passed through"


def _commented(text: str) -> str:
    return "\n".join(f"; {line}".rstrip() for line in text.splitlines())


def _sampled(root: ops.Op) -> ops.Op:
    """The plan over a few rows. A user's function is not called: its output is made up like an input."""

    def rule(op: ops.Op) -> ops.Op | None:
        match op:
            case ops.Source(data=Batches(table=pa.Table() as table)) if 0 < table.num_rows <= SAMPLE_ROWS:
                return None
            case ops.Source(data=Batches(table=pa.Table() as table)) if table.num_rows:
                return _source(op, table.slice(0, SAMPLE_ROWS), op.columns)
            case ops.Source(data=Batches(table=pa.Table() as table)) if table.schema.metadata == {b"made": b"up"}:
                return None
            case ops.Source():
                return _source(op, _made_up(op.arrow), op.columns)
            case ops.MapBatches():
                made = _made_up(op.arrow)
                return _source(ops.Source("map_batches", op.arrow, tuple(op.arrow.names)), made, tuple(op.arrow.names))
            case _:
                return None

    return rewrite(root, rule)


def _source(op: ops.Source, table: pa.Table, columns: tuple[str, ...]) -> ops.Source:
    return replace(op, columns=columns, data=Batches(table.schema, NOWHERE, table=table))


def _made_up(schema: pa.Schema) -> pa.Table:
    """One row of zeros and empty strings."""
    arrays = [_made_up_column(field.type) for field in schema]
    return pa.Table.from_arrays(arrays, schema=schema).replace_schema_metadata({"made": "up"})


def _made_up_column(arrow: pa.DataType) -> pa.Array:
    if pa.types.is_dictionary(arrow):
        return pa.DictionaryArray.from_arrays(pa.array([0], arrow.index_type), pa.array([""], arrow.value_type))
    dtype = from_arrow_type_or_none(arrow)
    if dtype is not None and dtype.is_bytes and dtype.form != "fixed":
        return pa.array([b""], arrow)
    if pa.types.is_boolean(arrow):
        return pa.array([False])
    if pa.types.is_list(arrow) or pa.types.is_large_list(arrow):  # with an element, for explode
        kind = pa.ListArray if pa.types.is_list(arrow) else pa.LargeListArray
        return kind.from_arrays([0, 1], _made_up_column(arrow.value_type), type=arrow)
    if pa.types.is_nested(arrow) or pa.types.is_null(arrow):
        return pa.nulls(1, arrow)
    return pa.Array.from_buffers(arrow, 1, [None, pa.py_buffer(bytes(arrow.bit_width // 8))])


# --- analyze


def _analysed(op: ops.Op, options: Options) -> str:
    """The fused plan, then each kernel with its rows, time, copies and share of the memory bandwidth."""
    node = compile_flow(op)
    bandwidth = copy_bandwidth(size_bytes=_COPY_BYTES)
    skipped = row_groups_skipped(op)
    with profiling() as profile:
        started = time.perf_counter()
        rows = sum(batch.num_rows for batch in batches(op, options))
        took = time.perf_counter() - started
    kernels = list(profile.kernels.values())
    busy, loading = sum(u.seconds for u in kernels), sum(u.load_seconds for u in kernels)
    lines = [dump_program(node), "", f"{_count(rows, 'row')} in {_ms(took)} with {_count(options.workers, 'worker')}"]
    if kernels:
        lines[-1] += f": {_ms(busy)} in {_count(len(kernels), 'kernel')} (all workers), {_ms(loading)} to load them"
    else:
        lines[-1] += ", without a kernel: every column is passed through"
    if more := row_groups_skipped(op) - skipped:
        lines.append(f"{_count(more, 'row group')} of Parquet skipped: no row that the filter keeps")
    for metrics in kernels:
        lines += ["", dump_stage(metrics.stage), *(f"  {line}" for line in _facts(metrics, node, busy, bandwidth))]
    return "\n".join(lines)


def _facts(metrics: KernelMetrics, node: Node, busy: float, bandwidth: float) -> Iterator[str]:
    """The metrics of a kernel, one per line."""
    written = f", {metrics.rows_out:,} written" if isinstance(metrics.stage.sink, Collect) else ""
    yield f"rows    {metrics.rows:,} in {_count(metrics.calls, 'call')}{written}"
    share = f" ({metrics.seconds / busy:.0%} of all kernels)" if busy else ""
    rate = f", {metrics.rows / metrics.seconds / 1e6:,.0f} million rows/s a worker" if metrics.seconds else ""
    yield f"time    {_ms(metrics.seconds)}{share}{rate}; {_loaded(metrics)}"
    yield f"copies  {_copies(metrics.stage, node)}"
    read, wrote = metrics.bytes_read, metrics.bytes_written
    used = (read + wrote) / max(metrics.seconds, 1e-9) / bandwidth
    writes = f", {_bytes(wrote)} written" if wrote else ""
    yield f"memory  {_bytes(read)} read{writes}: {used:.0%} of one core's copy bandwidth"


def _copies(stage: Stage, node: Node) -> str:
    """The bytes of its input that a kernel copies."""
    match stage.sink:
        case Collect(items) if isinstance(stage.reader, FromTable):
            return f"{_count(len(items), 'column')} written, from the groups' records"
        case Collect(items):
            names = [item.name for item in items]
            passed_through = next((len(passed) for pipe in walk_nodes(node) if isinstance(pipe, Pipeline)
                              for passed, written in [split_items(pipe)] if [w.name for w in written] == names), 0)
            rest = f", {passed_through} passed through" if passed_through else ""
            return f"{_count(len(items), 'column')} written{rest}"
        case Partition(stride=stride):
            return f"{stride} bytes a row, into partitions"
        case ExpandLog():
            return "16 bytes a value"
        case _:
            return "none, rows go into the groups' records"


def _loaded(metrics: KernelMetrics) -> str:
    if metrics.load_seconds < metrics.compiled.seconds:
        return "in memory from an earlier run"
    how = {"compiled": "compiled", "disk": "read from the cache folder"}[metrics.compiled.origin]
    return f"{how} in {_ms(metrics.load_seconds)}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.{1 if seconds >= 0.001 else 3}f} ms"


def _bytes(size: float) -> str:
    return f"{size / 1e6:,.1f} MB" if size >= 1e5 else f"{size / 1e3:,.1f} kB" if size >= 1e3 else f"{size:.0f} bytes"


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"
