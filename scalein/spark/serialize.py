"""Serialization: how plans reach the Python processes of executors.

A plan is sent, never machine code: executors compile for their own CPU, and share a code cache on their disk. A value
is serialized to bytes with a digest. A process deserializes a digest once and caches the value, so that programs are
compiled once a process and static tables are hashed once, whatever the number of tasks. cloudpickle serializes the
user's functions (`map_batches`, UDFs) as Spark serializes its own; modules of installed packages go by name.

Tasks of many actions hold a value as a `BroadcastPlan`: Spark sends a broadcast variable to a machine once. Inside the
tasks it would be sent with each action, and above 1 MB leave a file on the driver's disk each time.

The cache is per process and guarded by a lock: worker processes run one task at a time, but the driver has threads.
"""

from __future__ import annotations

import hashlib
import pickle
import threading
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from scalein.connectors.in_memory import Batches, of_table
from scalein.errors import BadArgument, SourceLoc
from scalein.ir import ops
from scalein.ir.passes import OP_PASSES
from scalein.ir.rewrite import transform_streams, walk_ops
from scalein.options import Options

if TYPE_CHECKING:
    from pyspark import SparkContext

    from scalein.api.flow import PartitionFunction

MAX_CACHED = 32  # plans of a process; each holds its static tables

_cache: OrderedDict[str, object] = OrderedDict()
_lock = threading.Lock()

Serialized = tuple[str, bytes]


def serialize(value: object) -> Serialized:
    """The digest of a value's bytes, and the bytes."""
    from pyspark import cloudpickle

    data: bytes = cloudpickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)  # type: ignore[no-untyped-call]
    return hashlib.blake2b(data, digest_size=16).hexdigest(), data


def deserialize(digest: str, data: bytes) -> object:
    """The value: the same object for each call with one digest, as long as it is among the most recently used."""
    found = _cached(digest)
    if found is not None:
        return found
    value = pickle.loads(data)
    with _lock:
        value = _cache.setdefault(digest, value)
        while len(_cache) > MAX_CACHED:
            _cache.popitem(last=False)
    return value


def _cached(digest: str) -> object | None:
    with _lock:
        if digest in _cache:
            _cache.move_to_end(digest)
        return _cache.get(digest)


@dataclass(frozen=True)
class BroadcastPlan:
    """A serialized value as tasks hold it: its bytes, or a broadcast variable until `destroy`."""

    digest: str
    payload: Any  # bytes, or a Broadcast of the value

    @staticmethod
    def broadcast(context: SparkContext, serialized: Serialized) -> BroadcastPlan:
        return BroadcastPlan(serialized[0], context.broadcast(_BroadcastValue(serialized)))

    def value(self) -> object:
        found = _cached(self.digest)
        if found is None:
            found = deserialize(self.digest, self.payload) if isinstance(self.payload, bytes) else self.payload.value
        return found

    def destroy(self) -> None:
        if not isinstance(self.payload, bytes):
            with suppress(Exception):  # the session may have ended, and the broadcast with it
                self.payload.destroy()


class _BroadcastValue:
    """Pickled as serialized bytes and unpickled as the value, so that no process holds both."""

    def __init__(self, serialized: Serialized) -> None:
        self._serialized = serialized

    def __reduce__(self) -> tuple[object, ...]:
        return deserialize, self._serialized


def serialize_plan(op: ops.Op) -> Serialized:
    """A plan, serialized; the static sides of its joins are read first."""
    return serialize(read_static_tables(optimise(op), op.at))


def rebuild_function(name: str, digest: str, data: bytes) -> PartitionFunction:
    """`map_in_arrow` or `map_partitions` of the flow of a serialized plan."""
    from scalein.api.flow import Flow, PartitionFunction

    op = deserialize(digest, data)
    assert isinstance(op, ops.Op)
    return PartitionFunction(Flow(op), name)


def optimise(op: ops.Op) -> ops.Op:
    """The plan after the compiler's passes over ops: its sources have only the columns that are needed."""
    for step in OP_PASSES:
        op = step(op)
    return op


def read_static_tables(op: ops.Op, at: SourceLoc) -> ops.Op:
    """The plan with the static side of every join replaced by a table of the needed columns, read now."""
    tables: dict[int, ops.Op] = {}

    def static(right: ops.Op) -> ops.Op:
        if id(right) not in tables:
            tables[id(right)] = _read_static(right, at)
        return tables[id(right)]

    return transform_streams(op, lambda each: each, static)


def _read_static(op: ops.Op, at: SourceLoc) -> ops.Op:
    from scalein.exec.bounded import collect

    if any(isinstance(each, ops.Source) and each.data is None for each in walk_ops(op)):
        raise BadArgument("a join's static side has no data: it begins with si.flow(schema)", at=at,
                          hint="bind it: from_arrow(df.toArrow()), or read it from files")
    if isinstance(op, ops.Source) and isinstance(op.data, Batches) and op.data.table is not None:
        table = op.data.table.select(list(op.columns))
    else:
        table = collect(op, Options.make(at=at))
    data = of_table(table, at)
    return ops.Source("static", data.schema, tuple(data.schema.names), data, at=op.at)
