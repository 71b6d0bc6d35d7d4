"""Sources: how fast rows come in, against pyarrow reading the same columns of the same bytes on as many cores."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.flight
import pyarrow.parquet as pq
import pytest

import scalein as si
from bench import data
from bench.race import Race
from scalein.api.flow import Flow
from scalein.connectors.base import BoundSource

two_cores = pytest.mark.parametrize("workers", [2])
BATCH_ROWS = 1 << 16


def count(batches: Iterable[pa.RecordBatch]) -> int:
    return sum(batch.num_rows for batch in batches)


def reading(flow: Flow, *columns: str) -> Callable[[], int]:
    """Everything that a flow's source does, and nothing of the flow."""
    source = flow.op.data  # type: ignore[attr-defined]
    assert isinstance(source, BoundSource)
    narrow = source.project(columns) if columns else source
    return lambda: count(narrow.read())


@two_cores
@pytest.mark.parametrize("files", [1, 20])
def bench_parquet(race: Race, rows: int, files: int, tmp_path: Path) -> None:
    """Three of four columns, two of them text; bound: decoding on all cores."""
    rows //= 4
    columns = ["event_time", "ad_id", "event_type"]
    table = data.with_strings(data.ad_events(rows), as_dictionary=False)
    for number in range(files):
        first = number * rows // files
        pq.write_table(table.slice(first, (number + 1) * rows // files - first), tmp_path / f"{number:02}.parquet")
    paths = sorted(tmp_path.iterdir())
    ours = reading(si.read_parquet(tmp_path), *columns)

    def one_by_one() -> int:
        return sum(count(pq.ParquetFile(path, memory_map=True).iter_batches(columns=columns)) for path in paths)

    def scanner() -> int:
        return count(ds.dataset(paths).scanner(columns=columns).to_batches())

    assert ours() == one_by_one() == scanner() == rows
    race(ours, iter_batches=one_by_one, scanner=scanner, goals={"iter_batches": 0.9, "scanner": 0.9},
         row_count=rows, size_bytes=table.select(columns).nbytes, bound="decoding", rounds=15)


@two_cores
def bench_ipc(race: Race, rows: int, tmp_path: Path) -> None:
    """An Arrow IPC file with two text columns, read and validated; bound: copying from the page cache."""
    table = data.with_strings(data.ad_events(rows // 4), as_dictionary=False)
    path = tmp_path / "events.arrow"
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=BATCH_ROWS)

    def pyarrow_alone() -> int:
        with pa.OSFile(str(path)) as file, pa.ipc.open_file(file) as reader:
            return sum(_valid(reader.get_batch(k)).num_rows for k in range(reader.num_record_batches))

    ours = reading(si.read_ipc(path))
    assert ours() == pyarrow_alone() == table.num_rows
    race(ours, pyarrow=pyarrow_alone, goals={"pyarrow": 0.9}, row_count=table.num_rows, size_bytes=table.nbytes,
         bound="copying", rounds=15)


def _valid(batch: pa.RecordBatch) -> pa.RecordBatch:
    batch.validate(full=True)
    return batch


@contextmanager
def served(sent: bytes) -> Iterator[tuple[str, int]]:
    """A listener that sends the same bytes to whoever connects."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        def serve() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return  # shut down
                with connection, suppress(OSError):
                    connection.sendall(sent)

        thread = threading.Thread(target=serve)
        thread.start()
        yield server.getsockname()
        server.shutdown(socket.SHUT_RDWR)
        thread.join()


@two_cores
def bench_socket(race: Race, rows: int) -> None:
    """An Arrow IPC stream over the loopback; bound: copying through the kernel."""
    table = data.ad_events(rows // 2)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=BATCH_ROWS)
    with served(sink.getvalue().to_pybytes()) as (host, port):
        def pyarrow_alone() -> int:
            with socket.create_connection((host, port)) as connection, connection.makefile("rb") as file:
                return count(pa.ipc.open_stream(file))

        ours = reading(si.read_ipc(f"{host}:{port}"))
        assert ours() == pyarrow_alone() == table.num_rows
        race(ours, pyarrow=pyarrow_alone, goals={"pyarrow": 0.7}, row_count=table.num_rows, size_bytes=table.nbytes,
             bound="copying through the loopback")


class Server(pa.flight.FlightServerBase):  # type: ignore[misc]
    """Sends one table, from native code."""

    def __init__(self, table: pa.Table) -> None:
        super().__init__("grpc://127.0.0.1:0")
        self._batches = table.to_batches(max_chunksize=BATCH_ROWS)

    def do_get(self, context: object, ticket: object) -> pa.flight.RecordBatchStream:
        return pa.flight.RecordBatchStream(pa.Table.from_batches(self._batches))


@two_cores
def bench_flight(race: Race, rows: int) -> None:
    """Flight over the loopback; bound: gRPC."""
    table = data.ad_events(rows // 2)
    with Server(table) as server:
        location = f"grpc://127.0.0.1:{server.port}"
        client = pa.flight.connect(location)

        def pyarrow_alone() -> int:
            return count(chunk.data for chunk in client.do_get(pa.flight.Ticket(b"all")))

        ours = reading(si.read_flight(location, b"all"))
        assert ours() == pyarrow_alone() == table.num_rows
        race(ours, pyarrow=pyarrow_alone, goals={"pyarrow": 0.7}, row_count=table.num_rows, size_bytes=table.nbytes,
             bound="gRPC")
