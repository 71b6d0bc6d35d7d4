"""Random flows. A new operator is a function that gives a step, and a line in STEPS."""

from __future__ import annotations

import random

from tests.campaign import group_steps, input_steps, row_steps, time_steps
from tests.campaign.maker import Maker, MakeStep
from tests.campaign.rules import WITHOUT
from tests.campaign.spec import FlowSpec

# Steps by how often. What the engine has not (yet), or what is left out for now, is never tried.
_ALL: dict[str, tuple[int, MakeStep]] = {
    "filter": (10, row_steps.filter),
    "with_columns": (8, row_steps.with_columns),
    "select": (5, row_steps.select),
    "group_by": (10, group_steps.group_by),
    "join": (5, input_steps.join),
    "union": (2, input_steps.union),
    "limit": (3, row_steps.limit),
    "cast": (2, row_steps.cast),
    "drop": (1, row_steps.drop),
    "rename": (1, row_steps.rename),
    "map_batches": (1, row_steps.map_batches),
    "with_watermark": (1, row_steps.with_watermark),
    "distinct": (3, row_steps.distinct),
    "sort": (3, row_steps.sort),
    "top_k": (2, row_steps.top_k),
    "explode": (5, row_steps.explode),
    "over": (3, time_steps.over),
    "top_of_groups": (2, time_steps.top_of_groups),
    "distinct_in_time": (2, time_steps.distinct_in_time),
    "group_with_ttl": (2, time_steps.group_with_ttl),
    "stream_join": (3, time_steps.stream_join),
}
STEPS = {name: made for name, made in _ALL.items() if name not in WITHOUT}


def maker_of(seed: int) -> Maker:
    """The flow of a seed, with all that is known of how it was made."""
    rng = random.Random(seed)
    maker = Maker(rng)
    weights, kinds = zip(*STEPS.values(), strict=True)
    maker.make(rng.choices(kinds, weights, k=rng.choice([1, 1, 1, 2, 2, 2, 3, 3, 4, 5])))
    if not maker.steps:  # none had a place
        maker.make([row_steps.with_columns, row_steps.filter])
    return maker


def flow_of(seed: int) -> FlowSpec:
    """The flow of a seed."""
    return maker_of(seed).spec()
