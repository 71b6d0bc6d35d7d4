"""The file formats as the tests of sources see them: how pyarrow writes and reads each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.csv
import pyarrow.json
import pyarrow.parquet as pq

import scalein as si
from scalein.api.flow import Flow
from scalein.connectors.base import BoundSource
from scalein.connectors.formats.json_writer import lines
from scalein.storage.checked_json import Json

SCHEMA = pa.schema({"n": pa.int64(), "x": pa.float64(), "s": pa.string(), "t": pa.timestamp("us"), "b": pa.bool_()})


@dataclass(frozen=True)
class Kind:
    """A format: `write(table, path, rows)` makes blocks of so many rows, where it has any."""

    name: str
    write: Callable[[pa.Table, Path, int], None]
    read: Callable[[Path], pa.Table]
    scan: Callable[..., Flow]

    def __repr__(self) -> str:
        return self.name


def _parquet(table: pa.Table, path: Path, rows: int) -> None:
    pq.write_table(table, path, row_group_size=rows)


def _ipc_file(table: pa.Table, path: Path, rows: int) -> None:
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=rows)


def _ipc_packed(table: pa.Table, path: Path, rows: int) -> None:
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema, options=options) as writer:
        writer.write_table(table, max_chunksize=rows)


def _ipc_stream(table: pa.Table, path: Path, rows: int) -> None:
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=rows)


def _csv(table: pa.Table, path: Path, rows: int) -> None:
    pa.csv.write_csv(table, path)


def _json(table: pa.Table, path: Path, rows: int) -> None:
    path.write_bytes(b"".join(map(lines, table.to_batches())))


def _read_csv(path: Path) -> pa.Table:
    convert = pa.csv.ConvertOptions(column_types=SCHEMA, strings_can_be_null=True, quoted_strings_can_be_null=False,
                                    null_values=[""])
    return pa.csv.read_csv(path, convert_options=convert,
                           parse_options=pa.csv.ParseOptions(newlines_in_values=True))


def _read_json(path: Path) -> pa.Table:
    if not path.stat().st_size:
        return SCHEMA.empty_table()
    return pa.json.read_json(path, parse_options=pa.json.ParseOptions(explicit_schema=SCHEMA))


KINDS = [
    Kind("parquet", _parquet, pq.read_table, si.read_parquet),
    Kind("ipc_file", _ipc_file, lambda path: pa.ipc.open_file(str(path)).read_all(), si.read_ipc),
    Kind("ipc_packed", _ipc_packed, lambda path: pa.ipc.open_file(str(path)).read_all(), si.read_ipc),
    Kind("ipc_stream", _ipc_stream, lambda path: pa.ipc.open_stream(str(path)).read_all(), si.read_ipc),
    Kind("csv", _csv, _read_csv, si.read_csv),
    Kind("json", _json, _read_json, si.read_json),
]


def rows(start: int, count: int) -> pa.Table:
    """Rows of SCHEMA by number, with nulls, empty texts, quotes and newlines."""
    texts = ["", None, "plain", 'a "quote", a comma', "two\nlines", "é"]
    numbers = range(start, start + count)
    return pa.table({
        "n": [None if n % 7 == 3 else n for n in numbers],
        "x": [None if n % 5 == 4 else n / 4 for n in numbers],
        "s": [texts[n % len(texts)] for n in numbers],
        "t": [None if n % 11 == 5 else n * 1_000_000 for n in numbers],
        "b": [None if n % 3 == 2 else n % 2 == 0 for n in numbers],
    }, SCHEMA)  # fmt: skip


def connected(flow: Flow) -> BoundSource:
    """The source that a flow begins with."""
    data = flow.op.data  # type: ignore[union-attr]
    assert isinstance(data, BoundSource)
    return data


def read_all(data: BoundSource, offset: Json = None) -> list[tuple[pa.RecordBatch, Json]]:
    [partition] = data.partitions()
    return list(data.read_from(partition, offset))


def together(batches: list[tuple[pa.RecordBatch, Json]], schema: pa.Schema = SCHEMA) -> pa.Table:
    return pa.Table.from_batches([batch.cast(schema) for batch, _ in batches], schema).combine_chunks()
