"""Names of columns that plans, kernels and operators add to the user's: they begin with `#:`, which no user's name may.

The few in stored state have the names that version 1 of its formats gave them; these are reserved one by one, so that
files with names such as `#CHROM`, `#id` or `#row` can be read.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from scalein.errors import BadName, SourceLoc

PREFIX = "#:"

# In stored state and what Spark shuffles: partial groups, slices of time, hashes of keys, keys seen, computed values.
_STORED = re.compile(r"#(acc\d+(_[a-z0-9]+)?|slice|hash|one|seen|value\d+)")


def internal(name: object) -> str:
    """The name of an internal column; several of a kind are numbered, or have the name of their user's column.

    >>> internal("row"), internal("host0"), internal("id.user")
    ('#:row', '#:host0', '#:id.user')
    """
    return f"{PREFIX}{name}"


def is_internal(name: str) -> bool:
    """Whether a column of a plan is one that scalein added.

    >>> is_internal("#:row"), is_internal("#row")
    (True, False)
    """
    return name.startswith(PREFIX)


def refuse_internal(names: Iterable[str], at: SourceLoc) -> None:
    """Users' columns have other names than internal ones, or else one would take the place of the other."""
    for name in names:
        if name[:1] == "#" and (is_internal(name) or _STORED.fullmatch(name)):
            raise BadName(f"a column is called {name!r}, which is reserved for scalein", at=at,
                          hint=f"rename it, for example to {name.removeprefix(PREFIX).lstrip('#') or 'number'!r}")
