"""Compatibility of a flow with a checkpoint: what its state depends on, as text; and the warning of a flow that differs
otherwise, in a filter, a joined table or a sink.

Which state is whose, and whether it fits, is decided in `evolution.py`; whether sources are the same in `recovery.py`.
The check of a Spark stream is in `spark/streaming/coordinator.py`.
"""

from __future__ import annotations

import hashlib
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress

import pyarrow as pa

from scalein.connectors.base import BoundSource
from scalein.connectors.in_memory import Batches
from scalein.dtypes import Schema
from scalein.errors import BadArgument, ScaleinError, SourceLoc, warn
from scalein.exec.fragments import Fragment, placeholder
from scalein.ir import ops
from scalein.ir.passes.null_on_error import as_written
from scalein.ir.printer import dump
from scalein.ir.rewrite import walk_ops
from scalein.storage.checked_json import Json, as_list, as_map

MAX_TEXT = 1 << 14  # characters of a flow in a checkpoint
MAX_CHECKED_BYTES = 1 << 24  # of a joined table in memory whose content is checked, which takes some milliseconds
HINT = "give another checkpoint directory, or go on with the flow as it was"


def signature(fragment: Fragment) -> str:
    """What the state of a fragment depends on: the ops around it may change, its contents may not."""
    state = fragment.state
    assert state is not None
    used = state.state_reads()
    before = state.streams[0].schema
    fields = Schema(tuple(field for field in before if field.name in used))
    about = dump(as_written(state.with_inputs((placeholder(before), *state.inputs[1:]))))
    return f"{about.splitlines()[0]}  over {fields!r}"


def described(root: ops.Op) -> list[Json]:
    """A flow in lines of text, with the sizes of the tables that it joins; every checkpoint has it, so a long one is
    summed up.
    """
    lines: list[Json] = [line.strip() for line in dump(as_written(root)).splitlines()]
    for op in walk_ops(root):
        for static in op.inputs[len(op.streams) :]:
            tables = (source.data for source in walk_ops(static) if isinstance(source, ops.Source))
            lines += [f"a joined table of {data.table.num_rows:,} rows, {data.table.nbytes:,} bytes"
                      for data in tables if isinstance(data, Batches) and data.table is not None]
    text = "\n".join(map(str, lines))
    if len(text) > MAX_TEXT:
        return [f"a flow of {len(lines):,} lines with digest {hashlib.sha256(text.encode()).hexdigest()[:16]}"]
    return lines


def joined_tables(roots: Sequence[ops.Op]) -> list[Json]:
    """What tells the static tables that flows join from others: the checksums of small ones, and the times of files."""
    found = {id(source.data): source.data for root in roots for op in walk_ops(root)
             for static in op.inputs[len(op.streams) :] for source in walk_ops(static)
             if isinstance(source, ops.Source)}
    lines: list[Json] = []
    for data in found.values():
        if isinstance(data, Batches) and data.table is not None and data.table.nbytes <= MAX_CHECKED_BYTES:
            lines.append(f"a joined table with checksum {_checksum(data.table):08x}")
        elif isinstance(data, BoundSource):
            with suppress(OSError, ScaleinError):  # what reads it will report that
                lines += [text] if (text := data.content()) is not None else []
    return lines


def _checksum(table: pa.Table) -> int:
    found = 0
    for batch in table.combine_chunks().to_batches():
        found = zlib.crc32(batch.serialize(), found)
    return found


def warn_of_changes(epoch: dict[str, Json], now: list[Json], tables: Callable[[], list[Json]], sinks: dict[str, Json],
                    at: SourceLoc) -> None:
    """Warn of what differs from the flow that wrote an epoch, and leaves its state valid."""
    places = epoch.get("places")  # the first manifests of format 1 do not say it
    told = _changed(epoch.get("flow"), now) + ([] if "tables" not in epoch else _changed(epoch["tables"], tables()))
    for role, place in as_map(places).items() if places is not None else ():
        if role in sinks and sinks[role] != place:
            told.append(f"the sink {place} is now {sinks[role]}")
    if told:
        warn(f"the flow has changed since its checkpoint was written, and goes on with its state: "
             f"{'; '.join(told)}", at)


def _changed(before: Json, now: list[Json]) -> list[str]:
    old, new = ([str(line) for line in as_list(lines)] for lines in (now if before is None else before, now))
    if old == new:
        return []
    changes = [(", ".join(some - others) or "nothing")
               for some, others in ((Counter(old), Counter(new)), (Counter(new), Counter(old)))]
    return [f"{changes[0]} is now {changes[1]}"]


def check_emit(epoch: dict[str, Json], emit: str, at: SourceLoc) -> None:
    """Refuse a flow whose groups are stored differently than in an epoch; `emit` is final or changes."""
    was = epoch.get("emit", emit)  # the first manifests of format 1 do not say it
    if was != emit:
        raise BadArgument("this checkpoint was written with another emit=, for which groups are stored differently",
                          at=at, checkpoint=f"emit={was!r}", flow=f"emit={emit!r}", hint=HINT)
