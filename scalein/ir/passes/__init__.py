"""Passes over ops, in the order in which the compiler runs them.

Each takes valid ops to valid ops with the same result and the same schema at the root; it may remove an
error that a row would have raised, never add one.
"""

from __future__ import annotations

from collections.abc import Callable

from scalein.ir.ops import Op
from scalein.ir.passes.fold import fold
from scalein.ir.passes.merge_filters import merge_filters
from scalein.ir.passes.prune import prune
from scalein.ir.passes.push_down import push_down
from scalein.ir.passes.top_rows import top_rows

OP_PASSES: tuple[Callable[[Op], Op], ...] = (fold, push_down, merge_filters, top_rows, prune)
