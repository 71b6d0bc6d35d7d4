"""File formats as sources read them: the schema of a file, and its rows as units that can be decoded side by side.

pyarrow does the decoding. A part is a run of rows of one file; parts before the row to begin with are not read where
the format knows its blocks (Parquet, Arrow IPC files), nor are row groups of Parquet that have no row a filter keeps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import Protocol

import pyarrow as pa

from scalein.connectors import skipping
from scalein.connectors.skipping import Condition, Skipped
from scalein.errors import BadData

MOST_ROWS = 1 << 18  # of a batch, whatever a file has
BATCH_ROWS = 1 << 16  # of a Parquet file
_BATCH_BYTES = 32 << 20  # rows of a batch are fewer where they are wide
_PART_ROWS = 1 << 18  # row groups smaller than this are decoded together


@dataclass(frozen=True, slots=True)
class Part:
    """Rows of a file from `row` on, whose decoding is independent of the others."""

    row: int
    open: Callable[[], Iterator[pa.RecordBatch]]


class Format(Protocol):
    """How one kind of file is read. `columns` is None for all; `schema` is what the first file has."""

    @property
    def name(self) -> str:
        """As in `read_<name>`."""

    def schema(self, path: str) -> pa.Schema | None:
        """The schema of a file; None if it has neither rows nor any sign of columns."""

    def parts(self, path: str, schema: pa.Schema, columns: list[str] | None, row: int) -> Iterator[Part]:
        """The parts that have rows from `row` on, in order; a file of another schema is refused."""


_ALIKE = "files read together have the columns and types of the first one, or of schema="
_COMPLETE = "a file is complete when it gets its name: write it under one that begins with _, and rename it"


@contextmanager
def reading(path: str, hint: str = _COMPLETE) -> Iterator[None]:
    """Errors of pyarrow and the system come out as `BadData` that names the file."""
    try:
        yield
    except FileNotFoundError as error:
        raise BadData(f"{path} is gone: it was there when the files were listed", found=error) from error
    except (pa.ArrowException, OSError, EOFError) as error:
        raise BadData(f"{path} cannot be read", found=str(error).strip() or type(error).__name__, hint=hint) from error


def check_names(path: str, found: list[str], wanted: list[str]) -> None:
    """A file has the columns of the first one, or of the schema given; their order is free."""
    missing = next((name for name in wanted if name not in found), None)
    if missing is not None:
        raise BadData(f"{path} has no column {missing!r}", has=", ".join(found), wanted=", ".join(wanted), hint=_ALIKE)
    extra = next((name for name in found if name not in wanted), None)
    if extra is not None:
        raise BadData(f"{path} has a column {extra!r} of its own", wanted=", ".join(wanted), hint=_ALIKE)


def check_schema(path: str, found: pa.Schema, wanted: pa.Schema) -> None:
    """`check_names`, and the types are the same."""
    check_names(path, found.names, wanted.names)
    for column in wanted:
        if found.field(column.name).type != column.type:
            raise BadData(f"column {column.name!r} of {path} is {found.field(column.name).type}, not {column.type}",
                          hint=_ALIKE)


@dataclass(frozen=True, slots=True)
class Parquet:
    """Row groups, and the columns of each, decoded side by side from the mapped file."""

    name: str = "parquet"
    tests: tuple[Condition, ...] = ()  # rows for which one does not hold need not be read
    skipped: Skipped = field(default_factory=Skipped, compare=False)

    def schema(self, path: str) -> pa.Schema:
        import pyarrow.parquet as pq

        with reading(path):
            return pq.read_schema(path, memory_map=True)

    def parts(self, path: str, schema: pa.Schema, columns: list[str] | None, row: int) -> Iterator[Part]:
        import pyarrow.parquet as pq

        with reading(path):
            file = pq.ParquetFile(path, memory_map=True)
            check_schema(path, file.schema_arrow, schema)
            metadata = file.metadata
            groups = [metadata.row_group(k) for k in range(metadata.num_row_groups)]
            is_wanted = skipping.wanted(metadata, schema, self.tests) if self.tests else [True] * len(groups)
        sizes = [group.num_rows for group in groups]
        row_bytes = sum(group.total_byte_size for group in groups) / max(1, sum(sizes))
        names = schema.names if columns is None else columns
        # A small row group is one batch; of a large one, more rows would fall out of the caches before they are used.
        most_rows = BATCH_ROWS if max(sizes, default=0) > 2 * BATCH_ROWS else 2 * BATCH_ROWS
        batch_rows = max(1024, min(most_rows, int(_BATCH_BYTES / max(1.0, row_bytes))))
        starts = list(accumulate(sizes, initial=0))
        spare = iter([file])  # a reader serves one thread: one part takes this one, the others open their own

        def read(run: list[int]) -> Iterator[pa.RecordBatch]:
            with reading(path), next(spare, None) or pq.ParquetFile(path, metadata=metadata, memory_map=True) as mine:
                for batch in mine.iter_batches(batch_rows, run, names):
                    yield batch if batch.schema.names == names else batch.select(names)

        is_any = False
        for run in _runs(sizes, is_wanted):
            if starts[run[-1] + 1] > row:
                is_any = True
                yield Part(starts[run[0]], partial(read, run))
        self.skipped.row_groups += sum(not is_read and starts[k + 1] > row for k, is_read in enumerate(is_wanted))
        if not is_any and not all(is_wanted):
            yield Part(starts[-1], lambda: iter(()))  # that is how far the file goes


def _runs(sizes: list[int], is_wanted: list[bool]) -> Iterator[list[int]]:
    """Neighbouring row groups, together about a part; empty ones, and those that nobody wants, are left out.

    >>> list(_runs([300_000, 0, 100_000, 100_000, 100_000, 5, 5], [True, True, True, True, True, False, True]))
    [[0], [2, 3, 4], [6]]
    """
    run: list[int] = []
    rows = 0
    for k, size in enumerate(sizes):
        if size and is_wanted[k]:
            run.append(k)
            rows += size
        if run and (rows >= _PART_ROWS or not is_wanted[k]):
            yield run
            run, rows = [], 0
    if run:
        yield run
