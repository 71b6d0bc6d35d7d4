"""Recovery: what a job resumes with, from an epoch: the outputs and the offsets of each source.

`Checkpoint.recovered` chooses the newest whole epoch; its states find their operators in `exec/evolution.py`, and its
offsets their sources here; `source_inputs.py` positions the readers, and operators open their state at the version that
the epoch names. Sources are identified by name (`label`), so the inputs of a union may change places; those with the
same name are identified by their order. An offset has no meaning for another source, so a source with a new name is
refused.

Outputs are identified by where they write to and by their flow, so they may change places as well; one may be left out,
and its state is dropped, but a new one is refused: it would begin in the middle. An epoch knows an output by its role,
and which of its states belong to it. The number of a state's folder is its own for good.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from scalein.connectors.base import BoundSource
from scalein.errors import BadArgument, SourceLoc, warn
from scalein.exec.compatibility import HINT, described
from scalein.exec.fragments import Fragment, SourceEdge, fragments, upstream
from scalein.ir import ops
from scalein.storage.checked_json import Json, as_int, as_list, as_map, as_text

_RENAMED = ("give another checkpoint directory; or, if these are the same rows under another name, give them back the "
            "one they had: a link at the old path will do, or the source's `name`")


@dataclass(frozen=True)
class OutputIdentity:
    """What an output is recognised by."""

    kind: str  # of its sink
    place: str  # that it writes to; its kind, if it has none
    op: ops.Op
    at: SourceLoc

    @cached_property
    def flow(self) -> list[Json]:
        """Its flow as text."""
        return described(self.op)


def output_roles(epoch: dict[str, Json] | None, outputs: Sequence[OutputIdentity]) -> list[str]:
    """The roles of a job's outputs: those that they had in the epoch. The first run of a job names them.

    >>> import pyarrow as pa, scalein as si
    >>> op = si.flow({"x": pa.int64()}).op
    >>> rows = OutputIdentity("MemorySink", "MemorySink", op, op.at)
    >>> output_roles(None, [rows]), output_roles(None, [rows, rows])
    (['out'], ['outa5a22985', 'outa5a22985_2'])
    """
    if epoch is None:
        # Without an epoch to say it, a run with the outputs in another order must find what the last one has staged.
        named = [f"out{zlib.crc32(own.place.encode()):08x}" for own in outputs]
        return ["out"] if len(named) == 1 else [
            name if not named[:number].count(name) else f"{name}_{named[:number].count(name) + 1}"
            for number, name in enumerate(named)]
    known = _outputs(epoch)
    if len(known) == len(outputs) == 1:
        return list(known)  # the sink and the flow may have changed
    kinds, places = (as_map(epoch.get(name, {})) for name in ("sinks", "places"))
    found: dict[int, str] = {}

    def match(is_same: Callable[[str, OutputIdentity], bool]) -> None:
        for number, own in enumerate(outputs):
            role = next((role for role in known if role not in found.values() and is_same(role, own)), None)
            if number not in found and role is not None:
                found[number] = role

    match(lambda role, own: places.get(role) == own.place and known[role].get("flow") == own.flow)
    match(lambda role, own: places.get(role) == own.place != own.kind)
    match(lambda role, own: kinds.get(role) == own.kind and known[role].get("flow") == own.flow)
    for number, own in enumerate(outputs):
        if number not in found:
            raise BadArgument("this output was not among those of the job that wrote the checkpoint", at=own.at,
                              found=own.place, has=", ".join(str(places.get(role, role)) for role in known),
                              hint="start it as a job of its own, with another checkpoint directory; an output is "
                                   "recognised by the path of its sink, or else by its flow")
    return [found[number] for number in range(len(outputs))]


def without_lost_outputs(epoch: dict[str, Json], roles: Sequence[str], at: SourceLoc) -> dict[str, Json]:
    """An epoch as the job of these outputs would have written it, as far as its text goes; a warning names others."""
    known, places = _outputs(epoch), as_map(epoch.get("places", {}))
    lost = [role for role in known if role not in roles]
    if not lost:
        return epoch
    warn(f"the job goes on without the output {', '.join(str(places.get(role, role)) for role in lost)}: its state is "
         "dropped, and it cannot come back", at)
    return {**epoch, "flow": [line for role in sorted(roles) for line in as_list(known[role]["flow"])]}


def _outputs(epoch: dict[str, Json]) -> dict[str, dict[str, Json]]:
    """What an epoch says of each output, by role; before there could be several, it said nothing."""
    if "outputs" not in epoch:
        return {"out": {"states": [*range(len(as_list(epoch["states"])))], "flow": epoch.get("flow")}}
    return {role: as_map(about) for role, about in as_map(epoch["outputs"]).items()}


def state_numbers(epoch: dict[str, Json], roles: Sequence[str]) -> tuple[list[list[int]], bool]:
    """Which of an epoch's states each output has, and whether the epoch has outputs that are no more."""
    known = _outputs(epoch)
    return [[as_int(each) for each in as_list(known[role]["states"])] for role in roles], len(known) > len(roles)


def label(source: ops.Source) -> str:
    """The name by which a checkpoint knows a source: what it reads, as far as that is known."""
    if not isinstance(source.data, BoundSource):
        return source.name
    about = getattr(source.data.source, "listing", None) or getattr(source.data.source, "name", "")
    return f"{source.data.name} {about}".strip()


def restored_positions(epoch: dict[str, Json] | None, edges: list[SourceEdge], ends: list[Fragment],
                       has_lost_outputs: bool, at: SourceLoc) -> list[dict[str, Json]]:
    """What an epoch says of the partitions of each source; `ends` are the last fragments of the outputs."""
    if epoch is None:
        return [{} for _ in edges]
    known = [as_map(each) for each in as_list(epoch["sources"])]
    old, new = [as_text(each["name"]) for each in known], [label(edge.source) for edge in edges]
    order = _order([(name, each.get("event_time")) for name, each in zip(old, known, strict=True)],
                   [(name, event_time_of(edge)) for name, edge in zip(new, edges, strict=True)], has_lost_outputs)
    if order is None:
        raise BadArgument("this flow has other sources than the one that wrote the checkpoint", at=at,
                          checkpoint=", ".join(old), flow=", ".join(new),
                          hint=_RENAMED if len(old) == len(new) else HINT)
    if any(_has_moved(edges, order, end) for end in ends):
        raise BadArgument("the sources have changed places, and some have state of their own", at=at,
                          checkpoint=", ".join(old), flow=", ".join(new), hint="put them in the order they had")
    return [as_map(known[number]["partitions"]) for number in order]


def event_time_of(edge: SourceEdge) -> str:
    """What distinguishes two inputs from one source: their watermarks."""
    return "" if edge.watermark is None else f"{edge.watermark.column} {edge.watermark.delay}"


def restored_watermark(epoch: dict[str, Json] | None, sources: list[dict[str, Json]]) -> int | None:
    """The watermark of sources that meet, of whose partitions an epoch says this: each has it if there are several.

    >>> epoch = {"watermark": 7}
    >>> restored_watermark(epoch, [{"all": {}}])
    7
    >>> restored_watermark(epoch, [{"gone": {"watermark": 8}, "all": {"watermark": 9}}])
    9
    """
    if epoch is None:
        return None
    found = [partition["watermark"] for each in sources for partition in map(as_map, each.values())
             if "watermark" in partition] or [epoch["watermark"]]  # fmt: skip
    return max((as_int(each) for each in found if each is not None), default=None)


def _order(old: list[tuple[str, Json]], new: list[tuple[str, str]], may_miss: bool = False) -> list[int] | None:
    """For each input of the flow, by the name of its source and its event time, the number that it had; None if it had
    none. Some may be missing now. Inputs from one source are identified by event time, then by order.

    >>> a, b, early, late = ("a", ""), ("b", ""), ("a", "t 40"), ("a", "t 90")
    >>> _order([a, b], [b, a]), _order([a, b], [("other", ""), b]), _order([a, b, a], [a, a, b])
    ([1, 0], None, [0, 2, 1])
    >>> _order([early, late], [late, early]), _order([early, late], [late, a]), _order([("a", None)] * 2, [late, early])
    ([1, 0], [1, 0], [0, 1])
    >>> _order([a, b], [b]), _order([a, b], [b], may_miss=True)
    (None, [1])
    """
    names = [Counter(name for name, _ in each) for each in (old, new)]
    if names[1] - names[0] or (names[0] != names[1] and not may_miss):
        return None
    found: dict[int, int] = {}

    def match(is_same: Callable[[tuple[str, Json], tuple[str, str]], bool]) -> None:
        for number, own in enumerate(new):
            before = next((k for k, each in enumerate(old) if k not in found.values() and is_same(each, own)), None)
            if number not in found and before is not None:
                found[number] = before

    match(lambda each, own: each == own)
    match(lambda each, own: each[0] == own[0])
    return [found[number] for number in range(len(new))]


def _has_moved(edges: list[SourceEdge], order: list[int], end: Fragment) -> bool:
    """Whether sources of an output have changed places, and states that some of them have alone would be confused."""
    path = upstream(end, edges)
    own = [(edge, number) for edge, number in zip(edges, order, strict=True) if any(f in path for f in edge.firsts)]
    numbers = [number for _, number in own]
    return numbers != sorted(numbers) and any(
        fragment.state is not None and not all(fragment in fragments([edge]) for edge, _ in own) for fragment in path)
