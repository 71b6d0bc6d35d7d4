"""Streams without Spark: the same tasks and the same driver, with lists of batches where Spark has partitions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

import scalein as si
from scalein.api.flow import Flow
from scalein.errors import NOWHERE
from scalein.ir.passes.null_on_error import tried
from scalein.options import Options
from scalein.spark.serialize import Carried, pack, settled
from scalein.spark.streaming.commits import Commits, Plan
from scalein.spark.streaming.inputs import Files, row_groups
from scalein.spark.streaming.sinks import outlet
from scalein.spark.streaming.tasks import Batch, Heard, MapTask, ReduceTask, RowTask, WholeTask, heard
from scalein.spark.streaming.work import Work
from scalein.storage.object_store import Location, parse_location

OPTIONS = Options.make(workers=1)
Act = Callable[[Batch], Heard]


def begun(flow: Flow, checkpoint: Path | Location, sink: object, *, partitions: int = 3, emit: str = "final",
          late: object = "drop", on_error: object = "raise",
          migration: str = "lazy") -> Commits:
    """A stream as `start` makes it."""
    location = checkpoint if isinstance(checkpoint, Location) else parse_location(checkpoint, NOWHERE)
    word = late if isinstance(late, str) else "sink"
    wrong = on_error if isinstance(on_error, str) else "sink"
    op = settled(flow.op, NOWHERE)
    work = Work(tried(op) if wrong == "null" else op, emit, word, wrong, NOWHERE)
    outlets = {"out": outlet(sink, work.schema, "out", location, NOWHERE)}
    if word == "sink":
        outlets["late"] = outlet(late, work.late_schema, "late", location, NOWHERE)
    source = work.segment.input.arrow
    reads = pa.schema([source.field(name) for name in work.reads])
    if wrong == "sink":
        outlets["failed"] = outlet(on_error, reads, "failed", location, NOWHERE)
    return Commits(Plan(work, reads, outlets, location, partitions, {}, migration, NOWHERE), Carried(*pack(work)))


def acting(parts: Iterable[pa.Table], attempts: int = 1, folder: Path | None = None) -> Act:
    """The tasks of a batch, whose rows come in some partitions; of several attempts of each, the last one counts.

    With a folder, tasks with state read the rows themselves from files there.
    """
    tables = list(parts)

    def act(batch: Batch) -> Heard:
        if folder is not None and batch.unpacked().mode != "rowwise":
            task_of_files = WholeTask(batch, _filed(tables, folder, batch.entering))
            return heard([row for target in range(batch.partitions) for row in [
                list(task_of_files([target])) for _ in range(attempts)][-1]])
        task = RowTask(batch) if batch.unpacked().mode == "rowwise" else MapTask(batch)
        given: defaultdict[int, list[pa.RecordBatch]] = defaultdict(list)
        said: list[tuple[int, int, bytes]] = []
        for number, table in enumerate(tables):
            for attempt in range(attempts):
                cells = list(task.run(table.select(batch.entering.names).to_batches(), OPTIONS, number))
                if attempt == attempts - 1:
                    for cell in cells:
                        given[cell.column("target")[0].as_py()].append(cell)
        if isinstance(task, RowTask):
            return heard(_rows(cell for cells in given.values() for cell in cells))
        for cells in given.values():
            for attempt in range(attempts):
                found = list(ReduceTask(batch).run(iter(cells), OPTIONS))
                if attempt == attempts - 1:
                    said += _rows(found)
        return heard(said)

    return act


def _rows(cells: Iterable[pa.RecordBatch]) -> list[tuple[int, int, bytes]]:
    return [(row["target"], row["kind"], row["blob"]) for cell in cells for row in cell.to_pylist()]


def _filed(tables: Sequence[pa.Table], folder: Path, schema: pa.Schema) -> Files:
    folder.mkdir(exist_ok=True)
    paths = [str(folder / f"{number}.parquet") for number in range(len(tables))]
    for table, path in zip(tables, paths, strict=True):
        pq.write_table(table, path, row_group_size=7)
    found = row_groups(paths, schema)
    assert found is not None
    return found


def run(commits: Commits, batches: Sequence[Sequence[pa.Table]], first: int = 0, attempts: int = 1,
        folder: Path | None = None) -> None:
    """Some batches, each in some partitions."""
    for number, parts in enumerate(batches, first):
        commits.do(number, "query", acting(parts, attempts, folder), None)


def rows_of(flow: Flow, batches: Sequence[Sequence[pa.Table]], checkpoint: Path, **how: object) -> pa.Table:
    """What a stream over some batches gives."""
    sink = si.to_memory()
    commits = begun(flow, checkpoint, sink, **how)  # type: ignore[arg-type]
    try:
        run(commits, batches)
    finally:
        commits.close()
    return sink.table()


def folded(changes: pa.Table, keys: Sequence[str]) -> list[dict[str, object]]:
    """What is there when all changes have been applied in order, by key; an op that cannot be is an error."""
    held: dict[object, dict[str, object]] = {}
    for row in changes.to_pylist():
        op = row.pop("op")
        key = tuple("nan" if isinstance(row[name], float) and row[name] != row[name] else row[name] for name in keys)
        assert (key in held) == (op != "insert"), (op, row)
        if op == "delete":
            held.pop(key)
        else:
            held[key] = row
    return list(held.values())
