"""Amounts of memory as users write them: "64MB", "1.5 GiB", or a number of bytes. MB and MiB both count in 1024s."""

from __future__ import annotations

import re

from scalein.errors import NOWHERE, BadArgument, SourceLoc

_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_FORM = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?\s*", re.IGNORECASE)


def parse_size(given: str | int, what: str = "memory", at: SourceLoc = NOWHERE) -> int:
    """Bytes.

    >>> parse_size("64MB")
    67108864
    >>> parse_size("1.5 GiB")
    1610612736
    """
    if isinstance(given, int) and not isinstance(given, bool) and given > 0:
        return given
    found = _FORM.fullmatch(given) if isinstance(given, str) else None
    size = int(float(found[1]) * _UNITS[found[2].lower()]) if found else 0
    if size <= 0:
        raise BadArgument(f"{what}= takes an amount such as '500MB' or '1.5GB', or a number of bytes", at=at,
                          found=repr(given))
    return size
