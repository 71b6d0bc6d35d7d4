"""Compatibility of a flow with a checkpoint: which state belongs to which operator, and the offsets of each source.

States are identified by their order and by what they hold. Sources are identified by name (`label`), so the inputs of a
union may change places; those with the same name are identified by their order. An offset has no meaning for another
source, so a source with a new name is refused.
"""

from __future__ import annotations

from dataclasses import replace

from scalein.connectors.base import BoundSource
from scalein.dtypes import Schema
from scalein.errors import BadArgument, SourceLoc
from scalein.ir import ops
from scalein.ir.passes.null_on_error import as_written
from scalein.ir.printer import dump
from scalein.jobs.fragments import Feed, Fragment, fragments, placeholder
from scalein.storage.checked_json import Json, as_list, as_map, as_text

_HINT = "give another checkpoint directory, or go on with the flow as it was"
_RENAMED = ("give another checkpoint directory; or, if these are the same rows under another name, give them back the "
            "one they had: a link at the old path will do, or the source's `name`")


# --- states


def signature(fragment: Fragment) -> str:
    """What the state of a fragment depends on: the ops around it may change, its contents may not."""
    state = fragment.state
    assert state is not None
    used = state.state_reads()
    fields = Schema(tuple(field for field in state.input.schema if field.name in used))
    about = dump(as_written(replace(state, input=placeholder(state.input.schema))))
    return f"{about.splitlines()[0]}  over {fields!r}"


def check_same(epoch: dict[str, Json], now: list[Json], emit: str, at: SourceLoc) -> None:
    """Refuse a flow whose state differs from an epoch's, with the difference; `emit` is final or changes."""
    before = as_list(epoch["steps"])
    if before == now:
        was = epoch.get("emit", emit)  # the first manifests of format 1 do not say it
        if was != emit:
            raise BadArgument("this checkpoint was written with another emit=, for which groups are stored differently",
                              at=at, checkpoint=f"emit={was!r}", flow=f"emit={emit!r}", hint=_HINT)
        return
    old, new = ([str(each) for each in some] for some in (before, now))
    pairs = [(a, b) for a, b in zip(old, new, strict=False) if a != b]
    was, is_ = pairs[0] if pairs else ("\n".join(old[len(new):]), "\n".join(new[len(old):]))
    raise BadArgument("this flow keeps other state than the one that wrote the checkpoint", at=at,
                      checkpoint=was or "nothing more", flow=is_ or "nothing more", hint=_HINT)


def state_number(path: list[Fragment], number: int) -> int:
    """The number of a fragment's state."""
    return sum(fragment.state is not None for fragment in path[:number])


def states(epoch: dict[str, Json] | None, path: list[Fragment]) -> list[Json]:
    """The state of each fragment in an epoch."""
    if epoch is None:
        return [None] * len(path)
    found = as_list(epoch["states"])
    if len(found) != state_number(path, len(path)) or None in found:
        raise ValueError(f"{len(found)} states of a flow that keeps others")
    rest = iter(found)
    return [None if fragment.state is None else next(rest) for fragment in path]


# --- sources


def label(source: ops.Source) -> str:
    """The name by which a checkpoint knows a source: what it reads, as far as that is known."""
    if not isinstance(source.data, BoundSource):
        return source.name
    about = getattr(source.data.source, "listing", None) or getattr(source.data.source, "name", "")
    return f"{source.data.name} {about}".strip()


def places(epoch: dict[str, Json] | None, feeds: list[Feed], at: SourceLoc) -> list[dict[str, Json]]:
    """What an epoch says of the partitions of each source."""
    if epoch is None:
        return [{} for _ in feeds]
    known = [as_map(each) for each in as_list(epoch["sources"])]
    old, new = [as_text(each["name"]) for each in known], [label(feed.source) for feed in feeds]
    order = _order(old, new)
    if order is None:
        raise BadArgument("this flow has other sources than the one that wrote the checkpoint", at=at,
                          checkpoint=", ".join(old), flow=", ".join(new),
                          hint=_RENAMED if len(old) == len(new) else _HINT)
    if order != sorted(order) and any(fragment.state is not None and not _is_shared(fragment, feeds)
                                      for fragment in fragments(feeds)):  # fmt: skip
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


def _is_shared(fragment: Fragment, feeds: list[Feed]) -> bool:
    return all(fragment in fragments([feed]) for feed in feeds)
