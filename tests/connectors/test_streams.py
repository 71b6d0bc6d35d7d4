"""Streams over real sockets on the loopback, and sources of a user's own."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager

import numpy as np
import pyarrow as pa
import pyarrow.flight
import pytest

import scalein as si
from scalein import col
from scalein.storage.checked_json import Json
from tests import oracle
from tests.connectors.kinds import SCHEMA, connected, rows


@contextmanager
def served(send: Callable[[socket.socket], None], connections: int = 1) -> Iterator[str]:
    """The address of a listener that does `send` on each connection and then closes it."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        def serve() -> None:
            for _ in range(connections):
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                with connection:
                    try:
                        send(connection)
                    except (BrokenPipeError, ConnectionResetError):
                        continue  # whoever read has had enough

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)  # ends a waiting accept
        thread.join()


def stream(tables: Sequence[pa.Table], options: pa.ipc.IpcWriteOptions | None = None) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, tables[0].schema, options=options) as writer:
        for table in tables:
            writer.write_table(table)
    return sink.getvalue().to_pybytes()


def first_rows(batches: Iterator[tuple[pa.RecordBatch, Json]]) -> tuple[pa.RecordBatch, Json]:
    """The first batch with rows; on a busy machine silence is reported before it."""
    return next(found for found in batches if found[0].num_rows)


@pytest.mark.parametrize("compression", [None, "lz4"])
def test_a_socket_gives_what_was_sent(compression: str | None) -> None:
    tables = [rows(0, 10), rows(10, 0), rows(10, 100_000)]
    sent = stream(tables, pa.ipc.IpcWriteOptions(compression=compression))
    with served(lambda connection: connection.sendall(sent), 2) as address:
        flow = si.read_ipc(address)
        assert flow.schema == SCHEMA
        assert flow.collect().equals(pa.concat_tables(tables))
        assert flow.collect().num_rows == 100_010  # connected again


def test_only_the_needed_columns_of_a_socket_are_decoded() -> None:
    """Text that is no UTF-8 is found where it is read, and nowhere else; the columns come in any order."""
    broken = pa.StringArray.from_buffers(1, pa.py_buffer(np.array([0, 1], np.int32)), pa.py_buffer(b"\xff"))
    wide = {f"column {k}": [k] for k in range(5000)}  # the schema is longer than a chunk that is received at once
    table = pa.table({"broken": broken, "a": [1], "d": pa.array(["x"]).dictionary_encode(), **wide})
    sent = stream([table, table], pa.ipc.IpcWriteOptions(compression="lz4"))
    with served(lambda connection: connection.sendall(sent), 3) as address:
        flow = si.read_ipc(address)
        assert flow.select("d", "a").collect().to_pydict() == {"d": ["x", "x"], "a": [1, 1]}
        found = flow.group_by("d").agg(n=si.count(), total=col("column 4999").sum()).collect()
        assert found.to_pydict() == {"d": ["x"], "n": [2], "total": [9998]}
        with pytest.raises(si.BadData, match="cannot be read"):
            flow.select("a", "broken").collect()


def test_dictionaries_that_change_midway() -> None:
    tables = [pa.table({"k": pa.array(words).dictionary_encode()}) for words in (["a", "b"], ["c", None], ["b"])]
    with served(lambda connection: connection.sendall(stream(tables))) as address:
        assert si.read_ipc(f"tcp://{address}").collect()["k"].to_pylist() == ["a", "b", "c", None, "b"]


def test_a_silent_socket_says_so_and_can_be_closed() -> None:
    sent, go_on, before = stream([rows(0, 10)]), threading.Event(), set(threading.enumerate())

    def send(connection: socket.socket) -> None:
        connection.sendall(sent[:-8])  # all but the mark of the end
        go_on.wait(10)

    with served(send) as address:
        data = connected(si.read_ipc(address))
        assert not data.replays
        with closing(data.read_from("stream", None)) as batches:
            assert first_rows(batches) == (rows(0, 10).to_batches()[0], 10)
            batch, offset = next(batches)
            assert (batch.num_rows, offset) == (0, 10)
        go_on.set()
    assert set(threading.enumerate()) <= before


def test_a_socket_that_breaks_is_named() -> None:
    sent = stream([rows(0, 1000), rows(1000, 1000)])
    with (served(lambda connection: connection.sendall(sent[: len(sent) // 2])) as address,
          pytest.raises(si.BadData, match=f"the stream at {address} cannot be read")):
        si.read_ipc(address).collect()
    with pytest.raises(si.BadData, match=f"the stream at {address} cannot be read"):
        si.read_ipc(address)  # nobody is there any more
    with (served(lambda connection: connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")) as address,
          pytest.raises(si.BadData, match="cannot be read")):
        si.read_ipc(address)
    batch = sent[len(pa.ipc.read_message(sent).serialize()) :]
    with (served(lambda connection: connection.sendall(batch)) as address,
          pytest.raises(si.BadData, match=r"(?s)cannot be read.*begins with its schema")):
        si.read_ipc(address)
    with pytest.raises(si.BadArgument, match="port"):
        si.read_ipc("127.0.0.1:99999")
    with pytest.raises(si.BadArgument, match="an end of its own"):
        si.read_ipc("127.0.0.1:9999", follow=True)


def test_a_socket_does_not_replay() -> None:
    with (served(lambda connection: connection.sendall(stream([rows(0, 10)]))) as address,
          pytest.raises(si.BadData, match="cannot be read again")):
        list(connected(si.read_ipc(address)).read_from("stream", 10))


class Server(pa.flight.FlightServerBase):  # type: ignore[misc]
    """Two endpoints of each path; a ticket is `first:count`. With `:held`, rows after five wait for `go_on`."""

    go_on = threading.Event()

    def get_flight_info(self, context: object, descriptor: pa.flight.FlightDescriptor) -> pa.flight.FlightInfo:
        if descriptor.path[0] != b"rows":
            raise pa.flight.FlightServerError(f"no flight {descriptor.path[0]!r}")
        ends = [pa.flight.FlightEndpoint(ticket, []) for ticket in (b"0:10", b"10:20")]
        return pa.flight.FlightInfo(SCHEMA, descriptor, ends, -1, -1)

    def do_get(self, context: object, ticket: pa.flight.Ticket) -> pa.flight.FlightDataStream:
        first, count, *held = ticket.ticket.decode().split(":")

        def batches() -> Iterator[pa.RecordBatch]:
            for start in range(int(first), int(first) + int(count), 5):
                yield rows(start, 5).to_batches()[0]
                assert not held or self.go_on.wait(60)
            if int(count) == 15:
                raise pa.flight.FlightServerError("out of rows")

        return pa.flight.GeneratorStream(SCHEMA, batches())


def test_flight() -> None:
    with Server("grpc://127.0.0.1:0") as server:
        location = f"grpc://127.0.0.1:{server.port}"
        assert si.read_flight(location, path="rows").collect().equals(rows(0, 30))
        assert connected(si.read_flight(location, path=["rows"])).partitions() == ["0", "1"]
        flow = si.read_flight(location, "100:10")
        assert flow.collect().equals(rows(100, 10))
        assert flow.select("s").collect().equals(rows(100, 10).select(["s"]))
        with pytest.raises(si.BadData, match=r"(?s)Flight stream at grpc://127.* cannot be read.*no flight"):
            si.read_flight(location, path="other")
        with pytest.raises(si.BadData, match=r"(?s)cannot be read.*out of rows"):
            si.read_flight(location, b"0:15").collect()
        with closing(connected(si.read_flight(location, b"0:100:held")).read_from("0", None)) as batches:
            assert first_rows(batches)[0].num_rows == 5
            assert next(batches)[0].num_rows == 0
        server.go_on.set()
    with pytest.raises(si.BadArgument, match="no location"):
        si.read_flight("nonsense://x", "t")
    with pytest.raises(si.BadArgument, match="either a ticket or a path"):
        si.read_flight("grpc://127.0.0.1:1")


class Partitioned:
    """A source as a user writes it."""

    schema = pa.schema({"k": pa.string(), "v": pa.int64()})

    def partitions(self) -> Sequence[str]:
        return ["a", "b"]

    def read(self, partition: str, offset: Json) -> Iterator[tuple[pa.RecordBatch, Json]]:
        for v in range(offset or 0, 3):  # type: ignore[arg-type]
            yield pa.record_batch({"k": [partition], "v": [v]}), v + 1


def test_own_sources() -> None:
    assert isinstance(Partitioned(), si.Source)
    flow = si.from_source(Partitioned())
    assert flow.collect()["k"].to_pylist() == ["a"] * 3 + ["b"] * 3
    assert oracle.collect(flow.select("v"))["v"].to_pylist() == [0, 1, 2] * 2
    assert [offset for _, offset in connected(flow).read_from("b", 1)] == [2, 3]


def test_batches_come_in_the_types_that_scalein_reads() -> None:
    class Coded(Partitioned):
        schema = pa.schema({"k": pa.dictionary(pa.int8(), pa.int64()), "v": pa.int64()})

        def read(self, partition: str, offset: Json) -> Iterator[tuple[pa.RecordBatch, Json]]:
            arrays = [pa.array([7, None, 7]).dictionary_encode().cast(self.schema.field("k").type), pa.array([1, 2, 3])]
            yield pa.RecordBatch.from_arrays(arrays, schema=self.schema.with_metadata({"a": "b"})), 3

    data = connected(si.from_source(Coded()))
    assert data.schema == pa.schema({"k": pa.int64(), "v": pa.int64()})
    [(batch, _)] = data.project(["k"]).read_from("a", None)
    assert batch.to_pydict() == {"k": [7, None, 7]}

    class Never(Partitioned):
        schema = pa.schema([pa.field("k", pa.string(), nullable=False), pa.field("v", pa.int64())])

        def read(self, partition: str, offset: Json) -> Iterator[tuple[pa.RecordBatch, Json]]:
            yield pa.record_batch({"k": pa.array([None], pa.string()), "v": [1]}), 1

    with pytest.raises(si.BadData, match="nulls in 'k'"):
        si.from_source(Never()).collect()


def test_wrong_sources() -> None:
    with pytest.raises(si.BadArgument, match="no source"):
        si.from_source(5)

    class Raises(Partitioned):
        def read(self, partition: str, offset: Json) -> Iterator[tuple[pa.RecordBatch, Json]]:
            yield from super().read(partition, 2)
            raise KeyError("gone")

    with pytest.raises(si.BadData, match="raised KeyError while batch 1 of partition 'a'"):
        si.from_source(Raises()).collect()

    class Lies(Partitioned):
        schema = pa.schema({"k": pa.int32(), "v": pa.int64()})

    with pytest.raises(si.BadData, match="another schema"):
        si.from_source(Lies()).collect()
