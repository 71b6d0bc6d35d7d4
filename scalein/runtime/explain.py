"""explain(): what a flow becomes, level by level, and what each kernel did when it ran.

logical   the ops after all passes
fused     nodes and their steps: what becomes one kernel
llvm/asm  the kernels themselves, compiled for a sample of the data (its first rows; for an input
          that has none to look at, one made-up row)
"""

from __future__ import annotations

from dataclasses import replace

import pyarrow as pa

from scalein.compiler import compile_flow
from scalein.connectors.memory import Batches
from scalein.errors import NOWHERE, ComputeError
from scalein.ir import ops
from scalein.ir.passes import OP_PASSES
from scalein.ir.printer import dump
from scalein.ir.rewrite import rewrite
from scalein.ir.stage_printer import dump_program, dump_stage
from scalein.ir.stages import Node
from scalein.options import Options

SAMPLE_ROWS = 1_000


def explain(op: ops.Op, options: Options, level: str, verbose: bool, analyze: bool) -> str:
    """The plan as text."""
    if analyze:
        return _analysed(op, options)
    if verbose:
        return _every_pass(op, level)
    if level == "logical":
        for step in OP_PASSES:
            op = step(op)
        return dump(op)
    if level == "fused":
        return dump_program(compile_flow(op))
    return _kernels(op, options, level)


def _every_pass(op: ops.Op, level: str) -> str:
    """The plan after every pass of the level; one that changed nothing says so."""
    parts: list[str] = []
    last = ""

    def trace(name: str, plan: ops.Op | Node) -> None:
        nonlocal last
        is_fused = name in ("split", "fuse")
        text = dump_program(plan) if is_fused else dump(plan)  # type: ignore[arg-type]
        if level == "logical" and is_fused:
            return
        parts.append(f"-- {name}\n{'unchanged' if text == last else text}")
        last = text

    compile_flow(op, trace)
    return "\n\n".join(parts)


def _kernels(op: ops.Op, options: Options, level: str) -> str:
    """LLVM or machine code of every kernel that a run over a sample uses."""
    from scalein.llvm_backend.jit import assembly
    from scalein.llvm_backend.stage import lower_stage
    from scalein.llvm_backend.target import target_for
    from scalein.runtime.profile import listening
    from scalein.runtime.run import batches

    sampled = _sampled(op)
    with listening() as profile:
        try:
            for _ in batches(sampled, replace(options, workers=1)):
                pass
        except ComputeError:
            pass  # a sample may hold a row that fails; the kernels met so far are what was asked for
    target = target_for(options.cpu)
    parts = []
    for usage in profile.usages.values():
        lowered = lower_stage(usage.stage, target, options.safe)
        text = lowered.text if level == "llvm" else assembly(lowered.text, target)
        parts.append("\n".join(f"; {line}" for line in dump_stage(usage.stage).splitlines()) + f"\n{text}")
    return "\n".join(parts) or "; nothing to compile: every column is handed on as it is"


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
    arrays = []
    for field in schema:
        if pa.types.is_dictionary(field.type):
            arrays.append(pa.DictionaryArray.from_arrays(pa.array([0], field.type.index_type), pa.array([""], field.type.value_type)))
        elif pa.types.is_string(field.type) or pa.types.is_large_string(field.type) or pa.types.is_string_view(field.type):
            arrays.append(pa.array([""], field.type))
        elif pa.types.is_boolean(field.type):
            arrays.append(pa.array([False]))
        else:
            width = field.type.bit_width
            arrays.append(pa.Array.from_buffers(field.type, 1, [None, pa.py_buffer(bytes(width // 8))]))
    return pa.Table.from_arrays(arrays, schema=schema).replace_schema_metadata({"made": "up"})


def _analysed(op: ops.Op, options: Options) -> str:
    """The fused plan, then each kernel with its rows, time and share of the memory bandwidth."""
    import time

    from scalein.runtime.profile import copy_bandwidth, listening
    from scalein.runtime.run import batches

    bandwidth = copy_bandwidth()
    with listening() as profile:
        started = time.perf_counter()
        rows = sum(batch.num_rows for batch in batches(op, options))
        took = time.perf_counter() - started
    lines = [dump_program(compile_flow(op)), "", f"{rows:,} rows in {took * 1e3:,.1f} ms, {options.workers} workers"]
    for usage in profile.usages.values():
        moved = usage.rows * usage.bytes_per_row
        share = moved / max(usage.seconds, 1e-9) / bandwidth
        lines += ["", dump_stage(usage.stage),
                  f"  rows   {usage.rows:,} in {usage.calls} calls" + (f", {usage.rows_out:,} written" if usage.rows_out else ""),
                  f"  time   {usage.seconds * 1e3:,.2f} ms ({usage.seconds / max(took, 1e-9):.0%}); {_made(usage.compiled)}",
                  f"  bytes  {moved / 1e6:,.1f} MB read, {share:.0%} of one core's copy bandwidth"]
    if not profile.usages:
        lines.append("no kernel: every column is handed on as it is")
    return "\n".join(lines)


def _made(compiled: object) -> str:
    from scalein.llvm_backend.cache import Compiled

    assert isinstance(compiled, Compiled)
    how = {"compiled": "compiled", "disk": "loaded from the cache folder"}[compiled.origin]
    return f"{how} once in {compiled.seconds * 1e3:.1f} ms"
