"""Streams without Spark: the same tasks and the same coordinator, with lists of batches in place of partitions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import scalein as si
from scalein.api.flow import Flow
from scalein.errors import NOWHERE
from scalein.exec.dead_letters import dead_letter_schema
from scalein.ir.passes.null_on_error import null_on_error
from scalein.options import Options
from scalein.spark.origin import ORIGIN, with_origin
from scalein.spark.row_groups import RowGroups, ScannedFile, plan_row_groups
from scalein.spark.serialize import BroadcastPlan, read_static_tables, serialize
from scalein.spark.streaming.coordinator import Coordinator, StreamSpec
from scalein.spark.streaming.inputs import StreamInput, row_groups_of
from scalein.spark.streaming.join_plan import plan_of
from scalein.spark.streaming.several_inputs import INPUT
from scalein.spark.streaming.sinks import make_committer
from scalein.spark.streaming.tasks import (
    BatchResult,
    MapTask,
    MicroBatch,
    ReadAllTask,
    ReduceTask,
    RowwiseTask,
    collect_results,
)
from scalein.storage.object_store import Location, parse_location

OPTIONS = Options.make(workers=1)
RunTasks = Callable[[MicroBatch], BatchResult]


def start_stream(flow: Flow, checkpoint: Path | Location, sink: object, *, partitions: int = 3, emit: str = "final",
                 late: object = "drop", on_error: object = "raise",
                 migration: str = "lazy", files_every_s: float | None = None) -> Coordinator:
    """The coordinator of a stream as `start` makes it."""
    location = checkpoint if isinstance(checkpoint, Location) else parse_location(checkpoint, NOWHERE)
    late_policy = late if isinstance(late, str) else "sink"
    error_policy = on_error if isinstance(on_error, str) else "sink"
    op = read_static_tables(flow.op, NOWHERE)
    plan = plan_of(null_on_error(op) if error_policy == "null" else op, emit, late_policy, error_policy, NOWHERE)
    committers = {"out": make_committer(sink, plan.schema, "out", location, NOWHERE, files_every_s)}
    if late_policy == "sink":
        committers["late"] = make_committer(late, plan.late_schema, "late", location, NOWHERE, files_every_s)
    source = plan.source.arrow
    reads = pa.schema([source.field(name) for name in plan.reads])
    if error_policy == "sink":
        committers["failed"] = make_committer(on_error, dead_letter_schema(reads), "failed", location, NOWHERE,
                                              files_every_s)
        reads = with_origin(reads)
    input = StreamInput(reads, reads, plan.scan_conditions, plan.skipped_time, True)
    spec = StreamSpec(plan, input, committers, location, partitions, {}, migration, NOWHERE,
                      files_every_s=files_every_s)
    return Coordinator(spec, BroadcastPlan(*serialize(plan)))


def united(flow: Flow, tables: dict[str, pa.Table]) -> pa.Table:
    """Rows of the inputs of a flow as the one stream that they become."""
    plan = plan_of(flow.op, "changes", "drop", "raise", NOWHERE)
    assert [*tables] == [*plan.reads_by_input]
    found = [table.rename_columns([f"i{k}c{number}" for number in range(table.num_columns)])
             .append_column(INPUT, pa.array(np.full(table.num_rows, k), pa.int32()))
             for k, table in enumerate(tables.values())]
    return pa.concat_tables(found, promote_options="default")


def tasks_over(parts: Iterable[pa.Table], attempts: int = 1, folder: Path | None = None) -> RunTasks:
    """A function that runs the tasks of a batch, a table a partition; of several attempts of each, the last one counts.

    With a folder, tasks read the rows themselves from files there.
    """
    tables = list(parts)

    def run_tasks(batch: MicroBatch) -> BatchResult:
        if folder is not None:
            row_groups = _write_files(tables, folder, batch)
            if batch.plan().mode == "rowwise":
                blocks = (block for number, part in enumerate(row_groups.split(2))
                          for block in RowwiseTask(batch).run(part.read(), OPTIONS, number))
                return replace(collect_results(_rows(blocks), "tasks"), skipped=row_groups.skipped)
            task_of_files = ReadAllTask(replace(batch, skipped_times=row_groups.skipped.times), row_groups)
            result = collect_results([row for target in range(batch.partitions) for row in [
                list(task_of_files([target])) for _ in range(attempts)][-1]])
            return replace(result, skipped=row_groups.skipped)
        task = RowwiseTask(batch) if batch.plan().mode == "rowwise" else MapTask(batch)
        blocks_of_target: defaultdict[int, list[pa.RecordBatch]] = defaultdict(list)
        output: list[tuple[int, int, bytes]] = []
        for number, table in enumerate(tables):
            if ORIGIN in batch.input_schema.names:
                table = table.append_column(ORIGIN, pa.array([""] * table.num_rows))
            for attempt in range(attempts):
                blocks = list(task.run(table.select(batch.input_schema.names).to_batches(), OPTIONS, number))
                if attempt == attempts - 1:
                    for block in blocks:
                        blocks_of_target[block.column("target")[0].as_py()].append(block)
        if isinstance(task, RowwiseTask):
            return collect_results(_rows(block for blocks in blocks_of_target.values() for block in blocks))
        for blocks in blocks_of_target.values():
            for attempt in range(attempts):
                reduced = list(ReduceTask(batch).run(iter(blocks), OPTIONS))
                if attempt == attempts - 1:
                    output += _rows(reduced)
        return collect_results(output)

    return run_tasks


def drain(coordinator: Coordinator) -> None:
    """Close all windows of a stream."""

    def run_tasks(batch: MicroBatch) -> BatchResult:
        nothing = plan_row_groups((), batch.input_schema)
        assert nothing is not None
        return collect_results(ReadAllTask(batch, nothing)(range(batch.partitions)))

    coordinator.drain(run_tasks, None)


def _rows(blocks: Iterable[pa.RecordBatch]) -> list[tuple[int, int, bytes]]:
    return [(row["target"], row["kind"], row["block"]) for block in blocks for row in block.to_pylist()]


def _write_files(tables: Sequence[pa.Table], folder: Path, batch: MicroBatch) -> RowGroups:
    """The row groups that a batch needs, of files with all rows."""
    folder.mkdir(exist_ok=True)
    paths = [str(folder / f"{number}.parquet") for number in range(len(tables))]
    for table, path in zip(tables, paths, strict=True):
        pq.write_table(table, path, row_group_size=7)
    plan, schema = batch.plan(), batch.input_schema
    input = StreamInput(schema, schema, plan.scan_conditions, plan.skipped_time, True)
    row_groups = row_groups_of([ScannedFile(path, {}) for path in paths], input, batch.clock)
    assert row_groups is not None
    return row_groups


def run(coordinator: Coordinator, batches: Sequence[Sequence[pa.Table]], first: int = 0, attempts: int = 1,
        folder: Path | None = None) -> None:
    """Run some batches, each in some partitions."""
    for number, parts in enumerate(batches, first):
        coordinator.run_batch(number, "query", tasks_over(parts, attempts, folder), None)


def rows_of(flow: Flow, batches: Sequence[Sequence[pa.Table]], checkpoint: Path, **how: object) -> pa.Table:
    """The results of a stream over some batches."""
    sink = si.to_memory()
    coordinator = start_stream(flow, checkpoint, sink, **how)  # type: ignore[arg-type]
    try:
        run(coordinator, batches)
    finally:
        coordinator.close()
    return sink.table()


def fold_changes(changes: pa.Table, keys: Sequence[str]) -> list[dict[str, object]]:
    """The rows after all changes are applied in order, by key; an impossible op is an error."""
    rows_by_key: dict[object, dict[str, object]] = {}
    for row in changes.to_pylist():
        op = row.pop("op")
        key = tuple("nan" if isinstance(row[name], float) and row[name] != row[name] else row[name] for name in keys)
        assert (key in rows_by_key) == (op != "insert"), (op, row)
        if op == "delete":
            rows_by_key.pop(key)
        else:
            rows_by_key[key] = row
    return list(rows_by_key.values())
