"""Recovery: the offsets of each source that a job resumes with, from an epoch.

`Checkpoint.recovered` chooses the newest whole epoch; its states find their operators in `exec/evolution.py`, and its
offsets their sources here; `source_inputs.py` positions the readers, and operators open their state at the version that
the epoch names. Sources are identified by name (`label`), so the inputs of a union may change places; those with the
same name are identified by their order. An offset has no meaning for another source, so a source with a new name is
refused.
"""

from __future__ import annotations

from scalein.connectors.base import BoundSource
from scalein.errors import BadArgument, SourceLoc
from scalein.exec.compatibility import HINT
from scalein.exec.fragments import Fragment, SourceEdge, fragments
from scalein.ir import ops
from scalein.storage.checked_json import Json, as_list, as_map, as_text

_RENAMED = ("give another checkpoint directory; or, if these are the same rows under another name, give them back the "
            "one they had: a link at the old path will do, or the source's `name`")


def label(source: ops.Source) -> str:
    """The name by which a checkpoint knows a source: what it reads, as far as that is known."""
    if not isinstance(source.data, BoundSource):
        return source.name
    about = getattr(source.data.source, "listing", None) or getattr(source.data.source, "name", "")
    return f"{source.data.name} {about}".strip()


def restored_positions(epoch: dict[str, Json] | None, edges: list[SourceEdge], at: SourceLoc) -> list[dict[str, Json]]:
    """What an epoch says of the partitions of each source."""
    if epoch is None:
        return [{} for _ in edges]
    known = [as_map(each) for each in as_list(epoch["sources"])]
    old, new = [as_text(each["name"]) for each in known], [label(edge.source) for edge in edges]
    order = _order(old, new)
    if order is None:
        raise BadArgument("this flow has other sources than the one that wrote the checkpoint", at=at,
                          checkpoint=", ".join(old), flow=", ".join(new),
                          hint=_RENAMED if len(old) == len(new) else HINT)
    if order != sorted(order) and any(fragment.state is not None and not _is_shared(fragment, edges)
                                      for fragment in fragments(edges)):  # fmt: skip
        raise BadArgument("the sources have changed places, and some have state of their own", at=at,
                          checkpoint=", ".join(old), flow=", ".join(new), hint="put them in the order they had")
    return [as_map(known[number]["partitions"]) for number in order]


def _order(old: list[str], new: list[str]) -> list[int] | None:
    """For each source of the flow the number that it had, None if it had none.

    >>> _order(["a", "b"], ["b", "a"]), _order(["a", "b"], ["other", "b"]), _order(["a", "b", "a"], ["a", "a", "b"])
    ([1, 0], None, [0, 2, 1])
    """
    if sorted(old) != sorted(new):
        return None
    numbers = {name: [k for k, each in enumerate(old) if each == name] for name in new}
    return [numbers[name].pop(0) for name in new]


def _is_shared(fragment: Fragment, edges: list[SourceEdge]) -> bool:
    return all(fragment in fragments([edge]) for edge in edges)
