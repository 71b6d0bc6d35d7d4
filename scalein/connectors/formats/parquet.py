"""Parquet files: row groups, and the columns of each, decoded in parallel from the mapped file.

If all columns are numbers in pages that the compiled kernels support, these decode them (`parquet_decode.py`), else
pyarrow does, whose threads decode the numbers while another decodes the text that takes most of the time. Where one
thread decodes all columns, the kernels decode the numbers, and pyarrow the others. Text whose wanted type is a
dictionary stays one, which takes a tenth of the time. Row groups whose statistics rule out every row of a filter are
not read. A column is read in the type of the first file, or of the schema given, if its own type converts losslessly
(`conversion.py`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import accumulate
from typing import Any

import pyarrow as pa

from scalein.connectors.formats import statistics
from scalein.connectors.formats.base import MAX_ROWS, FileSplit, check_schema, reading
from scalein.connectors.formats.conversion import converted, converts
from scalein.connectors.formats.parquet_decode import Column, Unsupported, are_compiled, columns_of, decodable
from scalein.connectors.formats.statistics import Condition, SkipCounter
from scalein.options import granted_cores

BATCH_ROWS = 1 << 16
_BATCH_BYTES = 32 << 20  # rows of a batch are fewer where they are wide
_SPLIT_ROWS = 1 << 18  # neighbouring row groups make a split of about this size
_OWN_BATCHES = 4  # batches that the kernels decode have this many times the rows
# Bytes of a value, its part of the dictionary included, up to which text has few different values.
MAX_CODE_BYTES = 1.5
HEADER_BYTES = 256  # of pages, in a row group of few rows
CODED = pa.dictionary(pa.int32(), pa.string())
TEXTS = (pa.string(), pa.string_view())
_WORTH_ROWS = 1 << 17  # row groups of at least this size repay opening the file a second time for the kernels


@dataclass(frozen=True, slots=True)
class Parquet:
    """The format of files that end in .parquet."""

    name: str = "parquet"
    tests: tuple[Condition, ...] = ()  # rows for which one does not hold need not be read
    skipped: SkipCounter = field(default_factory=SkipCounter, compare=False)
    batch_bytes: int | None = None  # about as many at most; by default, `_BATCH_BYTES`

    def schema(self, path: str) -> pa.Schema:
        import pyarrow.parquet as pq

        with reading(path, "parquet"):
            return pq.read_schema(path, memory_map=True)

    def splits(self, path: str, schema: pa.Schema, columns: list[str] | None, row: int) -> Iterator[FileSplit]:
        import pyarrow.parquet as pq

        with reading(path, "parquet"):
            file = pq.ParquetFile(path, memory_map=True)
            check_schema(path, file.schema_arrow, schema, converts)
            metadata = file.metadata
            coded = [each.name for each in schema if each.type == CODED
                     and file.schema_arrow.field(each.name).type in TEXTS and (columns is None or each.name in columns)]
            if coded:
                file = pq.ParquetFile(path, metadata=metadata, memory_map=True, read_dictionary=coded)
            groups = [metadata.row_group(k) for k in range(metadata.num_row_groups)]
            is_wanted = statistics.wanted(metadata, schema, self.tests) if self.tests else [True] * len(groups)
        sizes = [group.num_rows for group in groups]
        row_bytes = sum(group.total_byte_size for group in groups) / max(1, sum(sizes))
        wanted = schema if columns is None else pa.schema([schema.field(name) for name in columns])
        # A small row group is one batch; larger batches would leave the caches before they are used. The kernels
        # decode so fast that the cost of Python for each batch weighs more there.
        most_rows = BATCH_ROWS if max(sizes, default=0) > 2 * BATCH_ROWS else 2 * BATCH_ROWS
        batch_bytes = _BATCH_BYTES if self.batch_bytes is None else self.batch_bytes
        batch_rows = max(1, min(most_rows, int(batch_bytes / max(1.0, row_bytes))))
        starts = list(accumulate(sizes, initial=0))
        spare = iter([file])  # a reader serves one thread: one split uses this one, the others open their own

        def read(run: list[int]) -> Iterator[pa.RecordBatch]:
            with (reading(path, "parquet"),
                  next(spare, None) or pq.ParquetFile(path, metadata=metadata, memory_map=True,
                                                      read_dictionary=coded) as mine):
                yield from converted_batches(path, mine, run, wanted, batch_rows)

        is_any = False
        for run in _runs(sizes, is_wanted):
            if starts[run[-1] + 1] > row:
                is_any = True
                yield FileSplit(starts[run[0]], partial(read, run))
        self.skipped.row_groups += sum(not is_read and starts[k + 1] > row for k, is_read in enumerate(is_wanted))
        if not is_any and not all(is_wanted):
            yield FileSplit(starts[-1], lambda: iter(()))  # so that the offset reaches the end of the file


def coded_columns(path: str) -> frozenset[str]:
    """The columns of text of a file that have few different values in each of its row groups."""
    status = os.stat(path)
    return _coded_columns(path, status.st_mtime_ns, status.st_size)


@lru_cache(maxsize=256)
def _coded_columns(path: str, mtime_ns: int, size: int) -> frozenset[str]:
    import pyarrow.parquet as pq

    metadata = pq.read_metadata(path, memory_map=True)
    texts = {each.name for each in metadata.schema.to_arrow_schema() if each.type in TEXTS}
    places = {metadata.schema.column(k).path: k for k in range(metadata.num_columns)}
    found = texts & places.keys()
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        most_bytes = MAX_CODE_BYTES * group.num_rows + HEADER_BYTES
        found = {name for name in found if group.column(places[name]).total_uncompressed_size <= most_bytes}
    return frozenset(found)


def _runs(sizes: list[int], is_wanted: list[bool]) -> Iterator[list[int]]:
    """Neighbouring row groups, together about a split; empty ones and skipped ones are left out.

    >>> list(_runs([300_000, 0, 100_000, 100_000, 100_000, 5, 5], [True, True, True, True, True, False, True]))
    [[0], [2, 3, 4], [6]]
    """
    run: list[int] = []
    rows = 0
    for k, size in enumerate(sizes):
        if size and is_wanted[k]:
            run.append(k)
            rows += size
        if run and (rows >= _SPLIT_ROWS or not is_wanted[k]):
            yield run
            run, rows = [], 0
    if run:
        yield run


def converted_batches(path: str, file: Any, groups: list[int], schema: pa.Schema, batch_rows: int,
                      use_threads: bool = True) -> Iterator[pa.RecordBatch]:
    """`batches_of` in the types of a schema, which the file's own types convert to."""
    for batch in batches_of(path, file, groups, schema.names, batch_rows, use_threads):
        if batch.schema.types == schema.types:
            yield batch
        else:
            columns = [converted(column, field, path) for column, field in zip(batch.columns, schema, strict=True)]
            yield pa.RecordBatch.from_arrays(columns, schema=schema)


def batches_of(path: str, file: Any, groups: list[int], names: list[str], batch_rows: int,
               use_threads: bool = True) -> Iterator[pa.RecordBatch]:
    """Columns of some row groups, in batches of about `batch_rows` rows; `use_threads` decodes columns in parallel."""
    rows = sum(file.metadata.row_group(k).num_rows for k in groups)
    fields = [file.schema_arrow.field(name) for name in names]
    given = 0
    own_fields = decodable(file.schema, fields) if rows >= _WORTH_ROWS * len(groups) else []
    if own_fields and (len(own_fields) == len(fields) or not use_threads) and are_compiled(own_fields, rows):
        # Pyarrow's reader raises for damaged files, whereas asking their metadata ends the process.
        for group in groups:
            next(file.iter_batches(1, [group], names, use_threads=False), None)
        with pa.memory_map(path) as mapped:
            ours = columns_of(mapped.read_buffer(), file.metadata, groups, own_fields)
        others = [name for name in names if name not in ours]
        portions: Iterator[Any]  # batches of the other columns, or numbers of rows
        if others:
            portions = file.iter_batches(batch_rows, groups, others, use_threads=False)
        else:
            row_bytes = sum(field.type.bit_width for field in fields) // 8
            together = min(_OWN_BATCHES * batch_rows, MAX_ROWS, max(1024, _BATCH_BYTES // row_bytes))
            portions = (min(together, rows - first) for first in range(0, rows, together))
        threads = min(len(ours), granted_cores() // file.metadata.num_row_groups) if use_threads else 1
        with suppress(Unsupported), ThreadPoolExecutor(threads) if threads > 1 else nullcontext() as pool:
            # From an unsupported page on, pyarrow reads the rest, or reports the damage.
            for portion in portions if ours and not (others and use_threads) else ():
                count = portion.num_rows if others else portion
                taken = (pool.map if pool else map)(partial(Column.take, count=count), ours.values())
                columns = dict(zip(ours, taken, strict=True))
                yield pa.RecordBatch.from_arrays([columns[name] if name in columns else portion.column(name)
                                                  for name in names], schema=pa.schema(fields))
                given += count
    if given < rows:
        for batch in file.iter_batches(batch_rows, groups, names, use_threads=use_threads):
            passed = min(given, batch.num_rows)
            given -= passed
            if passed < batch.num_rows:
                batch = batch.slice(passed)
                yield batch if batch.schema.names == names else batch.select(names)
