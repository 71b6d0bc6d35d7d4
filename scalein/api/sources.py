"""Where flows begin: data in memory, files, streams, a generator, and sources of your own.

Formats and sources are imported when one is used: importing scalein does not read them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import pyarrow as pa

from scalein.api.binding import as_schema, source, unbound
from scalein.api.flow import Flow
from scalein.api.hints import with_argument_hints
from scalein.connectors.base import BoundSource, of_source
from scalein.connectors.in_memory import of_arrow, of_batches
from scalein.errors import BadArgument, SourceLoc, here

if TYPE_CHECKING:
    from scalein.connectors.formats.base import Format


def from_arrow(data: object) -> Flow:
    """A flow over data in memory or in a reader: pyarrow, pandas, polars, DuckDB, or any Arrow stream. No copy.

    A dict of lists, or a list of dicts with the same names, is data too.

    >>> import pyarrow as pa, scalein as si
    >>> si.from_arrow(pa.table({"x": [1, 2, 3]})).limit(2).collect().to_pydict()
    {'x': [1, 2]}
    >>> si.from_arrow([{"x": 1, "y": "a"}, {"x": 2, "y": None}]).collect().to_pydict()
    {'x': [1, 2], 'y': ['a', None]}
    """
    at = here()
    if isinstance(data, Flow):
        raise BadArgument("from_arrow takes data, not a flow", at=at, hint="use the flow itself, or its collect()")
    return Flow(source("arrow", of_arrow(data, at), at))


def from_batches(batches: object, schema: object = None) -> Flow:
    """A flow over record batches: a list, an iterator (read once), or a function that gives a new iterator.

    >>> import pyarrow as pa, scalein as si
    >>> batch = pa.record_batch({"x": [1, 2]})
    >>> si.from_batches((batch for _ in range(2)), batch.schema).collect().num_rows
    4
    """
    at = here()
    arrow = None if schema is None else as_schema(schema, "from_batches", at)
    return Flow(source("batches", of_batches(batches, arrow, at), at))


def flow(schema: object, *, name: str | None = None) -> Flow:
    """A flow whose data is given later, to `collect(data)`: a pyarrow or Spark schema, or a dict of names and types.

    A flow with several inputs, such as a join of two streams, knows each by its `name`, and gets a dict of data:

    >>> import pyarrow as pa, scalein as si
    >>> si.flow({"price": pa.float64(), "user": str}).columns
    ['price', 'user']
    >>> clicks = si.flow({"ad": int, "t": int}, name="clicks").with_watermark("t", 5)
    >>> views = si.flow({"ad": int, "t": int}, name="views").with_watermark("t", 5)
    >>> q = clicks.join(views, on="ad", between=(-10, 0)).select("ad", "t", seen="t_right")
    >>> q.collect({"clicks": {"ad": [1, 2], "t": [12, 30]}, "views": {"ad": [1, 2], "t": [8, 11]}}).to_pydict()
    {'ad': [1], 't': [12], 'seen': [8]}
    """
    return Flow(unbound(schema, here(), name))


@with_argument_hints
def read_parquet(path: object, *, follow: bool = False, schema: object = None) -> Flow:
    """The rows of Parquet files: a path, a glob, or a directory, in the order of their names.

    Only columns that the flow needs are read. `follow=True` goes on with files as they appear, in the order of their
    modification times, for jobs. Names that begin with `_` or `.` are skipped: write a file under such a name and
    rename it when it is complete. All files have the columns of the first one, or of `schema`.
    Files are mapped into memory: one that is cut or overwritten in place while it is read can end the process, so
    replace files by renaming.

    A directory may be partitioned as by Hive and Spark (`kind=view/day=2024-01-01/`): the partition columns come after
    those of the files, as integers or dates if all values are, else as text, or in the types of `schema`. Files that a
    filter on them rules out are not opened.

    >>> import pyarrow as pa, pyarrow.parquet, scalein as si, tempfile
    >>> folder = tempfile.mkdtemp()
    >>> pa.parquet.write_table(pa.table({"x": [1, 2]}), f"{folder}/1.parquet")
    >>> pa.parquet.write_table(pa.table({"x": [3]}), f"{folder}/2.parquet")
    >>> si.read_parquet(folder).filter(si.col("x") > 1).collect().to_pydict()
    {'x': [2, 3]}
    """
    from scalein.connectors.formats.parquet import Parquet

    return _files(Parquet(), path, follow, schema, here())


@with_argument_hints
def read_csv(path: object, *, delimiter: str = ",", follow: bool = False, schema: object = None) -> Flow:
    r"""The rows of CSV files, each with a line of names on top; paths and `follow` as in `read_parquet`.

    An empty field is null, an empty text is `""`. Types are found out from the first rows of the first file, unless
    `schema` gives them. Files ending in .gz, .bz2 or .zst are unpacked. A line that cannot be decoded is an error that
    names it; in a job, `start(on_error=...)` says otherwise.

    Nothing marks the end of a CSV file: one that was cut off at the end of a line cannot be told from a shorter one.
    Writers that may fail halfway write under a name that begins with `_` or `.`, which is ignored, and rename the file
    when it is whole. Cut-off Parquet files and Arrow files are errors.

    >>> import scalein as si, tempfile
    >>> with open(f"{tempfile.mkdtemp()}/people.csv", "w") as file:
    ...     written = file.write("name,age\nann,31\nbob,\n")
    >>> si.read_csv(file.name).collect().to_pydict()
    {'name': ['ann', 'bob'], 'age': [31, None]}
    """
    from scalein.connectors.formats.text import Csv

    at = here()
    if not isinstance(delimiter, str) or len(delimiter) != 1:
        raise BadArgument("the delimiter is one character", at=at, found=repr(delimiter))
    return _files(Csv(delimiter), path, follow, schema, at)


@with_argument_hints
def read_json(path: object, *, follow: bool = False, schema: object = None) -> Flow:
    r"""The rows of files with one JSON object a line; paths and `follow` as in `read_parquet`.

    Columns and types are found out from the first rows of the first file, unless `schema` gives them. A field that is
    missing in a row is null; fields of other names are left out. Files ending in .gz, .bz2 or .zst are unpacked. Lines
    that cannot be decoded, and files that were cut off, are as in `read_csv`.

    >>> import scalein as si, tempfile
    >>> with open(f"{tempfile.mkdtemp()}/people.json", "w") as file:
    ...     written = file.write('{"name": "ann", "age": 31}\n{"name": "bob"}\n')
    >>> si.read_json(file.name).collect().to_pydict()
    {'name': ['ann', 'bob'], 'age': [31, None]}
    """
    from scalein.connectors.formats.text import JsonLines

    return _files(JsonLines(), path, follow, schema, here())


@with_argument_hints
def read_ipc(path: object, *, follow: bool = False, schema: object = None) -> Flow:
    """The rows of Arrow IPC files of either format; paths and `follow` as in `read_parquet`. Their content is checked.

    `host:port` is a socket: scalein connects, and reads the Arrow stream that it is sent, to its end. A job with a
    checkpoint refuses that, since what went through a socket cannot be read again.

    >>> import pyarrow as pa, scalein as si, tempfile
    >>> table, path = pa.table({"x": [1, 2]}), f"{tempfile.mkdtemp()}/x.arrow"
    >>> with pa.OSFile(path, "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
    ...     writer.write_table(table)
    >>> si.read_ipc(path).collect().to_pydict()
    {'x': [1, 2]}
    """
    from scalein.connectors.formats.ipc import Ipc
    from scalein.connectors.sources.streams import SocketSource, is_address

    at = here()
    if not (isinstance(path, str) and is_address(path)):
        return _files(Ipc(), path, follow, schema, at)
    if follow or schema is not None:
        raise BadArgument("a stream through a socket has a schema and an end of its own", at=at,
                          found="follow=" if follow else "schema=")
    return _flow(BoundSource("socket", SocketSource(path, at), at), at)


def read_flight(location: str, ticket: bytes | str | None = None, *, path: str | Sequence[str] | None = None) -> Flow:
    """The rows that an Arrow Flight server has for a ticket, or for a path, where each endpoint is a partition.

    A job with a checkpoint refuses it: a server need not give the same rows twice.

    >>> import pyarrow as pa, pyarrow.flight, scalein as si
    >>> class Server(pa.flight.FlightServerBase):
    ...     def do_get(self, context, ticket):
    ...         return pa.flight.RecordBatchStream(pa.table({"x": [1, 2]}))
    >>> with Server("grpc://127.0.0.1:0") as server:
    ...     si.read_flight(f"grpc://127.0.0.1:{server.port}", "all").collect().to_pydict()
    {'x': [1, 2]}
    """
    from scalein.connectors.sources.streams import FlightSource

    at = here()
    if not isinstance(location, str) or (ticket is None) == (path is None):
        raise BadArgument("read_flight takes the location of a server, and either a ticket or a path", at=at,
                          hint='for example read_flight("grpc://localhost:8815", path="trades")')
    ticket = ticket.encode() if isinstance(ticket, str) else ticket
    steps = [path] if isinstance(path, str) else path
    return _flow(BoundSource("flight", FlightSource(location, ticket, steps, at), at), at)


def generate(fn: Callable[[int, int], pa.RecordBatch], schema: object, *, rows_per_second: float | None = None,
             rows: int | None = None, batch_rows: int | None = None) -> Flow:
    """Rows made by a function: `fn(start, count)` gives the batch of the rows with these numbers.

    The function gives the same rows for the same numbers every time, so a job goes on after a crash as if nothing had
    been. Without `rows` it never ends. At `rows_per_second`, batches of `batch_rows` (a hundredth of a second's rows,
    if not given) come when they are due.

    >>> import numpy as np, pyarrow as pa, scalein as si
    >>> def bids(start, count):
    ...     number = np.arange(start, start + count)
    ...     return pa.record_batch({"auction": number % 10, "price": number * 0.5})
    >>> flow = si.generate(bids, {"auction": pa.int64(), "price": pa.float64()}, rows=1_000_000)
    >>> flow.group_by().agg(n=si.count(), top=si.col("price").max()).collect().to_pylist()
    [{'n': 1000000, 'top': 499999.5}]
    """
    from scalein.connectors.sources.generate import BATCH_ROWS, Generated, Pace

    at = here()
    if not callable(fn):
        raise BadArgument("generate takes a function of a first row number and a number of rows", at=at, found=repr(fn))
    if batch_rows is None:
        batch_rows = BATCH_ROWS if rows_per_second is None else max(1, min(BATCH_ROWS, int(rows_per_second / 100)))
    for name, given in (("rows_per_second", rows_per_second), ("rows", rows), ("batch_rows", batch_rows)):
        if given is not None and (isinstance(given, bool) or not isinstance(given, int | float) or given <= 0):
            raise BadArgument(f"{name} is a number above 0", at=at, found=repr(given))
    made = Generated(fn, as_schema(schema, "generate", at), Pace(rows_per_second, rows, batch_rows))
    return _flow(BoundSource("generate", made, at), at)


def from_source(source: object) -> Flow:
    """The rows of a source of your own: an object with `schema`, `partitions()` and `read(partition, offset)`.

    `read` gives batches, each with the offset after it, as JSON; a job keeps offsets in its checkpoint, and reads on
    from there. See `scalein.Source`.

    >>> import pyarrow as pa, scalein as si
    >>> class Squares:
    ...     schema = pa.schema({"n": pa.int64()})
    ...     def partitions(self):
    ...         return ["all"]
    ...     def read(self, partition, offset):
    ...         for n in range(offset or 0, 3):
    ...             yield pa.record_batch({"n": [n * n]}), n + 1
    >>> si.from_source(Squares()).collect().to_pydict()
    {'n': [0, 1, 4]}
    """
    at = here()
    return _flow(of_source(source, at), at)


def _files(format: Format, path: object, follow: bool, schema: object, at: SourceLoc) -> Flow:
    from scalein.connectors.sources.files import FileSource

    arrow = None if schema is None else as_schema(schema, f"read_{format.name}", at)
    return _flow(BoundSource(format.name, FileSource.open(format, path, arrow, follow, at), at), at)


def _flow(data: BoundSource, at: SourceLoc) -> Flow:
    return Flow(source(data.name, data, at))
