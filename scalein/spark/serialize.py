"""Shipping: how plans reach the Python processes of executors.

What crosses is a plan, never machine code: executors compile for the CPU they have, and share a cache on their disk.
A value is packed into bytes with a digest. A process unpacks a digest once and keeps what comes out, so that programs
are compiled once a process and static tables are hashed once, whatever the number of tasks. cloudpickle packs the
user's functions (`map_batches`, UDFs) as Spark packs its own; packages of the user's go by name.

Tasks of many actions carry a value as `Carried`: Spark sends a broadcast variable to a machine once. In the tasks
themselves it would travel with each action, and above 1 MB leave a file on the driver's disk each time.
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

    from scalein.api.flow import Flow

MOST_KEPT = 32  # plans of a process; each holds its static tables

_kept: OrderedDict[str, object] = OrderedDict()
_lock = threading.Lock()

Packed = tuple[str, bytes]


def pack(value: object) -> Packed:
    """A value as bytes, and their digest."""
    from pyspark import cloudpickle

    data: bytes = cloudpickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)  # type: ignore[no-untyped-call]
    return hashlib.blake2b(data, digest_size=16).hexdigest(), data


def unpack(digest: str, data: bytes) -> object:
    """The value: the same object for each call with one digest, as long as it is among the last ones used."""
    found = _known(digest)
    if found is not None:
        return found
    value = pickle.loads(data)
    with _lock:
        value = _kept.setdefault(digest, value)
        while len(_kept) > MOST_KEPT:
            _kept.popitem(last=False)
    return value


def _known(digest: str) -> object | None:
    with _lock:
        if digest in _kept:
            _kept.move_to_end(digest)
        return _kept.get(digest)


@dataclass(frozen=True)
class Carried:
    """A packed value as tasks carry it: itself, or in a broadcast variable until `close`."""

    digest: str
    held: Any  # bytes, or a Broadcast whose value is the value

    @staticmethod
    def by(context: SparkContext, packed: Packed) -> Carried:
        return Carried(packed[0], context.broadcast(_Unpacked(packed)))

    def value(self) -> object:
        found = _known(self.digest)
        if found is None:
            found = unpack(self.digest, self.held) if isinstance(self.held, bytes) else self.held.value
        return found

    def close(self) -> None:
        if not isinstance(self.held, bytes):
            with suppress(Exception):  # the session may have ended, and taken it along
                self.held.destroy()


class _Unpacked:
    """Pickled as bytes, and unpickled as what they are: so no process holds both."""

    def __init__(self, packed: Packed) -> None:
        self._packed = packed

    def __reduce__(self) -> tuple[object, ...]:
        return unpack, self._packed


def ship(op: ops.Op) -> Packed:
    """A plan, packed; what it joins with is read first."""
    return pack(settled(optimised(op), op.at))


def rebuilt(kind: type[Flow], digest: str, data: bytes) -> Flow:
    """The flow of a plan that was shipped."""
    op = unpack(digest, data)
    return kind(op)  # type: ignore[arg-type]


def optimised(op: ops.Op) -> ops.Op:
    """The plan after the compiler's passes over ops: what is not needed is gone from its sources."""
    for step in OP_PASSES:
        op = step(op)
    return op


def settled(op: ops.Op, at: SourceLoc) -> ops.Op:
    """The plan with the static side of every join as a table of the columns that are needed, read here and now."""
    done: dict[int, ops.Op] = {}

    def static(right: ops.Op) -> ops.Op:
        if id(right) not in done:
            done[id(right)] = _read(right, at)
        return done[id(right)]

    return transform_streams(op, lambda below: below, static)


def _read(op: ops.Op, at: SourceLoc) -> ops.Op:
    from scalein.exec.bounded import collect

    if any(isinstance(below, ops.Source) and below.data is None for below in walk_ops(op)):
        raise BadArgument("a join's static side has no data: it begins with si.flow(schema)", at=at,
                          hint="bind it: from_arrow(df.toArrow()), or read it from files")
    if isinstance(op, ops.Source) and isinstance(op.data, Batches) and op.data.table is not None:
        table = op.data.table.select(list(op.columns))
    else:
        table = collect(op, Options.make(at=at))
    data = of_table(table, at)
    return ops.Source("static", data.schema, tuple(data.schema.names), data, at=op.at)
