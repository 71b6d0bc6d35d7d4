"""Streams over the network: Arrow IPC through a socket, and Arrow Flight. Both end when the sender ends them.

These sources do not replay. A thread receives and decodes ahead of the reader; an empty batch is yielded after a while
without data. The first connection is made for the schema, and then used by the first read. Columns that a flow does not
need are received, but neither decompressed nor validated.
"""

from __future__ import annotations

import contextlib
import copy
import re
import socket
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol, Self

import pyarrow as pa

from scalein.connectors.base import QUIET_S
from scalein.connectors.formats.validate import Validator
from scalein.connectors.sources.read_ahead import ReadTask, read_ahead
from scalein.errors import BadArgument, BadData, SourceLoc
from scalein.storage.checked_json import Json

_ADDRESS = re.compile(r"(?:tcp://)?(\[[0-9a-fA-F:.]+\]|[^/\\:\s]+):(\d{1,5})")
_CONNECT_S = 10
_DEPTH = 8  # batches received ahead; batches of streams are small
_CHUNK_BYTES = 1 << 16
_RECEIVE_BYTES = 4 << 20  # of the socket's buffer, so that the sender goes on while a batch is decoded


class _Stream(Protocol):
    """An open connection."""

    @property
    def schema(self) -> pa.Schema:
        """Of its batches."""

    def batches(self, columns: list[str]) -> Iterator[pa.RecordBatch]:
        """All batches to the end, with these columns."""

    def stop(self) -> None:
        """End it from another thread: a waiting `batches` raises or ends."""


class _Streamed(ABC):
    """A source over connections, one a partition; an offset is the number of rows read."""

    bounded = True
    replays = False

    def __init__(self, what: str, at: SourceLoc) -> None:
        self._what, self._at = what, at
        self._opened: dict[str, _Stream] = {}
        with self._naming():
            first = self.partitions()[0]
            self._opened[first] = self._connect(first)
            self.schema: pa.Schema = self._opened[first].schema

    @abstractmethod
    def partitions(self) -> Sequence[str]:
        """The names of its connections."""

    @abstractmethod
    def _connect(self, partition: str) -> _Stream:
        """A new connection."""

    def project(self, columns: Sequence[str]) -> Self:
        """The same connections, reading these columns only."""
        found = copy.copy(self)
        found.schema = pa.schema([self.schema.field(name) for name in columns])
        return found

    def read(self, partition: str, offset: Json) -> Iterator[tuple[pa.RecordBatch, Json]]:
        """The batches as they arrive."""
        if offset is not None:
            raise BadData(f"{self._what} cannot be read again from where it was left", at=self._at)
        with self._naming():
            stream = self._opened.pop(partition, None) or self._connect(partition)
        empty, rows = pa.RecordBatch.from_pylist([], schema=self.schema), 0
        tasks: list[ReadTask[pa.RecordBatch] | None] = [partial(stream.batches, self.schema.names)]
        received: Any = read_ahead(iter(tasks), 1, QUIET_S, _DEPTH)
        try:
            with self._naming():
                for batch in received:
                    if batch is None:
                        yield empty, rows
                    else:
                        rows += batch.num_rows
                        yield batch, rows
        finally:
            stream.stop()
            received.close()

    @contextmanager
    def _naming(self) -> Iterator[None]:
        try:
            yield
        except (pa.ArrowException, OSError, EOFError) as error:
            raise BadData(f"{self._what} cannot be read", at=self._at,
                          found=str(error).strip() or type(error).__name__) from error


def is_address(path: object) -> bool:
    """Whether a path means a socket: `host:port` or `tcp://host:port`.

    >>> is_address("localhost:9000"), is_address("tcp://[::1]:9000"), is_address("events/9000")
    (True, True, False)
    """
    return isinstance(path, str) and _ADDRESS.fullmatch(path) is not None


class SocketSource(_Streamed):
    """The Arrow IPC stream that the server at an address sends."""

    def __init__(self, address: str, at: SourceLoc) -> None:
        found = _ADDRESS.fullmatch(address)
        assert found is not None
        self._address = found[1].strip("[]"), int(found[2])
        if self._address[1] > 65535:
            raise BadArgument("a port is a number up to 65535", at=at, found=address)
        super().__init__(f"the stream at {address}", at)

    def partitions(self) -> Sequence[str]:
        return ("stream",)

    def _connect(self, partition: str) -> _Stream:
        return _IpcSocket(self._address)


class _IpcSocket:
    def __init__(self, address: tuple[str, int]) -> None:
        self._socket = socket.create_connection(address, timeout=_CONNECT_S)
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BYTES)
            self._received = _Received(self._socket)
            # The columns to decode are chosen when a stream is opened, and known only after its schema: that message is
            # read first, and then once more as the beginning of the stream.
            message = pa.ipc.read_message(pa.PythonFile(self._received, mode="r"))
            if message.type != "schema":
                raise pa.ArrowInvalid(f"a stream begins with its schema, not with a message of type {message.type}")
            self._received.put_back(message.serialize())
            self._socket.settimeout(None)
        except BaseException:
            self._socket.close()
            raise
        self.schema: pa.Schema = pa.ipc.read_schema(message)

    def batches(self, columns: list[str]) -> Iterator[pa.RecordBatch]:
        options = pa.ipc.IpcReadOptions(included_fields=[self.schema.get_field_index(name) for name in columns])
        with self._socket:
            reader = pa.ipc.open_stream(pa.PythonFile(self._received, mode="r"), options=options)
            validator = Validator()
            for batch in reader:
                yield validator.check(batch).select(columns)

    def stop(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)


class _Received:
    """A socket as the file that pyarrow reads from. A large piece is received right into Arrow's memory, in one call;
    small ones come out of a chunk. Pieces are aligned as Arrow's buffers are, which kernels rely on."""

    closed = False

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._chunk, self._used, self._end = memoryview(bytearray(_CHUNK_BYTES)), 0, 0

    def put_back(self, data: pa.Buffer) -> None:
        """Give these bytes once more, before those that follow."""
        waiting = b"".join((data, self._chunk[self._used : self._end]))
        self._used, self._end = 0, len(waiting)
        self._chunk = memoryview(bytearray(waiting.ljust(_CHUNK_BYTES)))

    def read(self, size: int) -> pa.Buffer:
        buffer = pa.allocate_buffer(size)
        view, filled = memoryview(buffer).cast("B"), 0
        while filled < size:
            if self._used < self._end:
                got = min(size - filled, self._end - self._used)
                view[filled : filled + got] = self._chunk[self._used : self._used + got]
                self._used += got
            elif size - filled < _CHUNK_BYTES:
                self._used, self._end = 0, self._socket.recv_into(self._chunk)
                got = 0
                if not self._end:
                    break
            else:
                got = self._socket.recv_into(view[filled:], size - filled, socket.MSG_WAITALL)
                if not got:
                    break
            filled += got
        return buffer if filled == size else buffer.slice(0, filled)


class FlightSource(_Streamed):
    """What a Flight server has for a ticket, or for a path: there each endpoint is a partition."""

    def __init__(self, location: str, ticket: bytes | None, path: Sequence[str] | None, at: SourceLoc) -> None:
        from pyarrow import flight

        self._flight = flight
        try:
            self._client = flight.connect(location)
        except pa.ArrowException as error:
            raise BadArgument("this is no location of a Flight server", at=at, found=f"{location!r}: {error}",
                              hint='for example "grpc://localhost:8815"') from error
        self._tickets: dict[str, tuple[Any, Any]] = {}  # client and ticket by partition
        self._asked = ticket, path
        super().__init__(f"the Flight stream at {location}", at)

    def partitions(self) -> Sequence[str]:
        ticket, path = self._asked
        if ticket is not None:
            self._tickets = {"0": (self._client, self._flight.Ticket(ticket))}
        elif not self._tickets:
            info = self._client.get_flight_info(self._flight.FlightDescriptor.for_path(*(path or ())))
            for number, endpoint in enumerate(info.endpoints):
                client = self._flight.connect(endpoint.locations[0]) if endpoint.locations else self._client
                self._tickets[str(number)] = client, endpoint.ticket
            if not self._tickets:
                raise BadData("the Flight server has no endpoint for this path", at=self._at, found=repr(path))
        return tuple(self._tickets)

    def _connect(self, partition: str) -> _Stream:
        client, ticket = self._tickets[partition]
        return _FlightStream(client.do_get(ticket))


class _FlightStream:
    def __init__(self, reader: Any) -> None:
        self._reader = reader
        self.schema: pa.Schema = reader.schema

    def batches(self, columns: list[str]) -> Iterator[pa.RecordBatch]:
        validator = Validator()
        for chunk in self._reader:
            if chunk.data is not None:
                yield validator.check(chunk.data.select(columns))

    def stop(self) -> None:
        with contextlib.suppress(pa.ArrowException):
            self._reader.cancel()
