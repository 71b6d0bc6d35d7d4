"""Recovery: what a job resumes with: the state of each operator and the offsets of each source, from an epoch.

`Checkpoint.recovered` chooses the newest whole epoch; here its states and offsets find their operators and sources;
`source_inputs.py` positions the readers, and operators open their state at the version that the epoch names. Sources
are identified by name (`label`), so the inputs of a union may change places; those with the same name are identified
by their order. An offset has no meaning for another source, so a source with a new name is refused.

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
from scalein.exec.compatibility import HINT, check_same, described, signature
from scalein.exec.fragments import Fragment, SourceEdge, fragments
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


def _folders(epoch: dict[str, Json]) -> list[int]:
    """The number of the folder of each state."""
    count = len(as_list(epoch["states"]))
    found = [as_int(each) for each in as_list(epoch.get("folders", [*range(count)]))]
    if len(found) != count or len(set(found)) != count:
        raise ValueError(f"{count} states in the folders {found}")
    return found


def states_by_folder(epoch: dict[str, Json]) -> dict[int, Json]:
    """The states of an epoch by the numbers of their folders."""
    return dict(zip(_folders(epoch), as_list(epoch["states"]), strict=True))


class RestoredStates:
    """The state of each fragment in an epoch, and the number of its folder."""

    def __init__(self, fragments: list[Fragment]) -> None:
        stateful = [fragment for fragment in fragments if fragment.state is not None]
        self._folders = {id(fragment): number for number, fragment in enumerate(stateful)}
        self._states: dict[int, Json] = {}
        self.lost: set[int] = set()  # folders of outputs that are no more
        self.has_lost_outputs = False

    def folder_of(self, fragment: Fragment) -> int:
        """Without state, a fragment uses none."""
        return self._folders.get(id(fragment), len(self._folders))

    def state_of(self, fragment: Fragment) -> Json:
        return self._states.get(id(fragment))

    def restore(self, fragment: Fragment, folder: int, state: Json) -> None:
        self._folders[id(fragment)], self._states[id(fragment)] = folder, state


def restored_states(epoch: dict[str, Json] | None, outputs: dict[str, list[Fragment]], fragments: list[Fragment],
                    emit: str, at: SourceLoc) -> RestoredStates:
    """The states of an epoch. `outputs` has, by role, the fragments with state that an output depends on."""
    found = RestoredStates(fragments)
    if epoch is None:
        return found
    states, steps = as_list(epoch["states"]), as_list(epoch["steps"])
    folders, known = _folders(epoch), _outputs(epoch)
    owners: dict[int, int] = {}  # the number of a fragment's state, by fragment
    for role, own in outputs.items():
        numbers = [as_int(each) for each in as_list(known[role]["states"])]
        if any(not 0 <= number < min(len(steps), len(states)) for number in numbers):
            raise ValueError(f"the states {numbers} of {len(states)}")
        about = epoch if "outputs" not in epoch else {**epoch, "steps": [steps[number] for number in numbers]}
        check_same(about, [signature(fragment) for fragment in own], emit, at)
        if len(numbers) != len(own) or any(states[number] is None for number in numbers):
            raise ValueError(f"{len(states)} states of a flow that keeps others")
        for fragment, number in zip(own, numbers, strict=True):
            if owners.setdefault(id(fragment), number) != number or sum(
                    other == number for other in owners.values()) > 1:
                raise BadArgument("outputs of this job share other steps than when the checkpoint was written", at=at,
                                  step=str(steps[number]), hint=HINT)
            found.restore(fragment, folders[number], states[number])
    found.has_lost_outputs = len(known) > len(outputs)
    found.lost = {folder for number, folder in enumerate(folders) if number not in owners.values()}
    return found


def label(source: ops.Source) -> str:
    """The name by which a checkpoint knows a source: what it reads, as far as that is known."""
    if not isinstance(source.data, BoundSource):
        return source.name
    about = getattr(source.data.source, "listing", None) or getattr(source.data.source, "name", "")
    return f"{source.data.name} {about}".strip()


def restored_positions(epoch: dict[str, Json] | None, edges: list[SourceEdge], has_lost_outputs: bool,
                       at: SourceLoc) -> list[dict[str, Json]]:
    """What an epoch says of the partitions of each source."""
    if epoch is None:
        return [{} for _ in edges]
    known = [as_map(each) for each in as_list(epoch["sources"])]
    old, new = [as_text(each["name"]) for each in known], [label(edge.source) for edge in edges]
    order = _order(old, new, has_lost_outputs)
    if order is None:
        raise BadArgument("this flow has other sources than the one that wrote the checkpoint", at=at,
                          checkpoint=", ".join(old), flow=", ".join(new),
                          hint=_RENAMED if len(old) == len(new) else HINT)
    if order != sorted(order) and any(fragment.state is not None and not _is_shared(fragment, edges)
                                      for fragment in fragments(edges)):  # fmt: skip
        raise BadArgument("the sources have changed places, and some have state of their own", at=at,
                          checkpoint=", ".join(old), flow=", ".join(new), hint="put them in the order they had")
    return [as_map(known[number]["partitions"]) for number in order]


def restored_watermark(epoch: dict[str, Json] | None, edges: list[SourceEdge]) -> int | None:
    """The watermark of sources that meet, in an epoch: each of their partitions has it if there are several."""
    if epoch is None:
        return None
    names = {label(edge.source) for edge in edges}
    for source in map(as_map, as_list(epoch["sources"])):
        for partition in as_map(source["partitions"]).values() if source["name"] in names else ():
            if "watermark" in as_map(partition):
                found = as_map(partition)["watermark"]
                return None if found is None else as_int(found)
    return None if epoch["watermark"] is None else as_int(epoch["watermark"])


def _order(old: list[str], new: list[str], may_miss: bool = False) -> list[int] | None:
    """For each source of the flow the number that it had, None if it had none; some may be missing now.

    >>> _order(["a", "b"], ["b", "a"]), _order(["a", "b"], ["other", "b"]), _order(["a", "b", "a"], ["a", "a", "b"])
    ([1, 0], None, [0, 2, 1])
    >>> _order(["a", "b"], ["b"]), _order(["a", "b"], ["b"], may_miss=True)
    (None, [1])
    """
    if Counter(new) - Counter(old) or (Counter(old) != Counter(new) and not may_miss):
        return None
    numbers = {name: [k for k, each in enumerate(old) if each == name] for name in new}
    return [numbers[name].pop(0) for name in new]


def _is_shared(fragment: Fragment, edges: list[SourceEdge]) -> bool:
    return all(fragment in fragments([edge]) for edge in edges)
