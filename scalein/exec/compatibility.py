"""Compatibility of a flow with a checkpoint: a flow whose state differs from that of the checkpoint is refused.

States are identified by their order and by what they hold; whether sources are the same is decided in `recovery.py`.
The check of a Spark stream is in `spark/streaming/coordinator.py`.
"""

from __future__ import annotations

from scalein.dtypes import Schema
from scalein.errors import BadArgument, SourceLoc
from scalein.exec.fragments import Fragment, placeholder
from scalein.ir.passes.null_on_error import as_written
from scalein.ir.printer import dump
from scalein.storage.checked_json import Json, as_list

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


def check_same(epoch: dict[str, Json], now: list[Json], emit: str, at: SourceLoc) -> None:
    """Refuse a flow whose state differs from an epoch's, with the difference; `emit` is final or changes."""
    before = as_list(epoch["steps"])
    if before == now:
        was = epoch.get("emit", emit)  # the first manifests of format 1 do not say it
        if was != emit:
            raise BadArgument("this checkpoint was written with another emit=, for which groups are stored differently",
                              at=at, checkpoint=f"emit={was!r}", flow=f"emit={emit!r}", hint=HINT)
        return
    old, new = ([str(each) for each in some] for some in (before, now))
    pairs = [(a, b) for a, b in zip(old, new, strict=False) if a != b]
    was, is_ = pairs[0] if pairs else ("\n".join(old[len(new):]), "\n".join(new[len(old):]))
    raise BadArgument("this flow keeps other state than the one that wrote the checkpoint", at=at,
                      checkpoint=was or "nothing more", flow=is_ or "nothing more", hint=HINT)
