"""What is known of a source without reading it all: its number of rows, and a sample of each column that is asked for.

Tables in memory and Parquet files have statistics; what else there is may have any number of rows. A sample is taken
once for each table, in short runs of neighbouring rows from all over it, so that it shows how values repeat both nearby
and far away.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from weakref import WeakKeyDictionary

import numpy as np
import pyarrow as pa

from scalein.connectors.base import BoundSource
from scalein.connectors.formats.parquet import Parquet
from scalein.connectors.in_memory import Batches
from scalein.connectors.sources.files import FileSource

_RUNS = 64  # of a sample
_RUN_ROWS = 64
_GROUPS = 4  # row groups of Parquet files that are sampled
_GROUP_ROWS = 1024  # of each
_MAX_FILES = 32  # whose footers are read; others are taken to be like them
_MAX_CACHED = 256


@dataclass
class Statistics:
    """Of one source. A column of the sample is an array for each run of neighbouring rows."""

    rows: int
    runs_of: Callable[[str], Sequence[pa.Array]]
    _runs: dict[str, Sequence[pa.Array]] = field(default_factory=dict)

    def runs(self, column: str) -> Sequence[pa.Array]:
        """The sample of a column; runs of different columns are of the same rows."""
        if column not in self._runs:
            self._runs[column] = self.runs_of(column)
        return self._runs[column]


_of_tables: WeakKeyDictionary[Batches, Statistics] = WeakKeyDictionary()
_of_files: OrderedDict[tuple[object, ...], Statistics] = OrderedDict()


def statistics_of(data: object) -> Statistics | None:
    """The statistics of a source's data, if it has any."""
    if isinstance(data, Batches) and data.table is not None:
        if data not in _of_tables:
            _of_tables[data] = _of_table(data.table)
        return _of_tables[data]
    if isinstance(data, BoundSource) and isinstance(data.source, FileSource) and data.source.bounded:
        source = data.source
        if isinstance(source.format, Parquet) and not source.partition_columns.schema.names:
            return _of_parquet(source)
    return None


def _of_table(table: pa.Table) -> Statistics:
    """Runs at equal distances, each within one chunk."""
    rows = table.num_rows
    step = max(_RUN_ROWS, -(-rows // _RUNS))
    starts = range(0, rows, step)
    return Statistics(rows, lambda name: _cut(table.column(name), starts))


def _cut(column: pa.ChunkedArray, starts: Sequence[int]) -> list[pa.Array]:
    ends = np.cumsum([len(chunk) for chunk in column.chunks])
    found = []
    for start in starts:
        number = int(np.searchsorted(ends, start, side="right"))
        chunk = column.chunk(number)
        found.append(chunk.slice(start - (int(ends[number]) - len(chunk)), _RUN_ROWS))
    return found


def _of_parquet(source: FileSource) -> Statistics | None:
    try:
        names = source.listing.names()
        paths = sorted(map(source.listing.path, names))
        stats = [os.stat(path) for path in paths]
    except OSError:
        return None
    key = (tuple(paths), tuple((each.st_mtime_ns, each.st_size) for each in stats))
    found = _of_files.pop(key, None) or _of_footers(paths, [each.st_size for each in stats])
    if found is not None:
        _of_files[key] = found
        while len(_of_files) > _MAX_CACHED:
            _of_files.popitem(last=False)
    return found


def _of_footers(paths: list[str], sizes: list[int]) -> Statistics | None:
    import pyarrow.parquet as pq

    if not paths:
        return None
    step = -(-len(paths) // _MAX_FILES)
    try:
        footers = [(path, pq.read_metadata(path, memory_map=True)) for path in paths[::step]]
    except (OSError, pa.ArrowException):
        return None  # the run will say what is wrong with the file
    read_bytes = max(1, sum(sizes[::step]))
    rows = sum(footer.num_rows for _, footer in footers) * sum(sizes) // read_bytes
    groups = [(path, number) for path, footer in footers for number in range(footer.num_row_groups)
              if footer.row_group(number).num_rows]
    chosen = groups[:: max(1, -(-len(groups) // _GROUPS))]
    return Statistics(rows, partial(_first_rows, chosen))


def _first_rows(groups: list[tuple[str, int]], column: str) -> list[pa.Array]:
    """The first rows of some row groups; nothing if a file cannot be read."""
    import pyarrow.parquet as pq

    found = []
    for path, number in groups:
        try:
            with pq.ParquetFile(path, memory_map=True) as file:
                batch = next(file.iter_batches(_GROUP_ROWS, [number], [column], use_threads=False))
        except (OSError, pa.ArrowException, StopIteration):
            return []
        found.append(batch.column(0))
    return found


def distinct_values(runs: Sequence[pa.Array], rows: float) -> float:
    """About how many distinct values a column of `rows` rows has, by a sample.

    Equal values that are neighbours count as one first; from how often what is left repeats, the number of all is
    concluded (Haas and others, 1995: "first-order jackknife" by the values seen once).
    """
    sampled = sum(map(len, runs))
    if not sampled:
        return max(1.0, rows)
    merged = pa.chunked_array([run.unique() for run in runs])
    count = len(merged)
    clusters = max(1.0, rows * count / sampled)  # groups of equal neighbours in the whole column
    times = np.asarray(merged.value_counts().field("counts")) if merged.num_chunks else np.ones(1)
    seen, once = len(times), int(np.count_nonzero(times == 1))
    share = min(1.0, count / clusters)  # of the clusters that the sample has
    found = seen / max(share, 1 - (1 - share) * once / count)
    return float(min(max(found, seen), clusters))
