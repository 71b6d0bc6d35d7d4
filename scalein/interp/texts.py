"""The functions of text that pyarrow computes: what is stripped, split, replaced, and found by regular expressions.

Each takes an array of large strings, so that no result outgrows its offsets. Regular expressions are RE2's.
"""

from __future__ import annotations

from collections.abc import Callable

import pyarrow as pa
import pyarrow.compute as pc

from scalein.interp.lists import element
from scalein.ir.exprs import Call

_TRIMS: dict[str, tuple[Callable[..., pa.Array], Callable[..., pa.Array]]] = {
    "str_strip": (pc.utf8_trim_whitespace, pc.utf8_trim),
    "str_lstrip": (pc.utf8_ltrim_whitespace, pc.utf8_ltrim),
    "str_rstrip": (pc.utf8_rtrim_whitespace, pc.utf8_rtrim),
}


def text_function(call: Call) -> Callable[[pa.Array], pa.Array]:
    """The function of an array that a call means."""
    match call.fn, call.params:
        case "lower", _:
            return pc.utf8_lower  # type: ignore[no-any-return]
        case "upper", _:
            return pc.utf8_upper  # type: ignore[no-any-return]
        case "str_replace", (old, new):
            return lambda text: pc.replace_substring(text, old, new)
        case "str_matches", (pattern,):
            return lambda text: matches(text, str(pattern))
        case "str_extract", (str() as pattern, int() as group):
            return lambda text: extract(text, pattern, group)
        case "str_split_part", (str() as by, int() as number):
            return lambda text: _part(text, by, number)
        case fn, (chars,):
            whitespace, given = _TRIMS[fn]
            return whitespace if chars is None else lambda text: given(text, chars)
        case _:
            raise AssertionError(f"no function of text: {call.fn}")


def _part(text: pa.Array, by: str, number: int) -> pa.Array:
    """Part `number` from 1, or from the end if negative; empty where there is none."""
    parts = pc.split_pattern(text, by)
    found = element(parts, number - 1 if number > 0 else number)
    return pc.if_else(text.is_valid(), found.fill_null(""), None)


def matches(text: pa.Array, pattern: str) -> pa.Array:
    """Whether a regular expression matches somewhere in each text."""
    return pc.match_substring_regex(text, pattern)


def extract(text: pa.Array, pattern: str, group: int) -> pa.Array:
    """What a group of the first match holds (0 is all of it), null where nothing matches.

    pyarrow takes apart patterns whose groups all have names. So the whole text is replaced by the group: what stands
    before the first match is as short as can be, and what stands behind it is the rest.
    """
    whole = rf"(?s:\A.*?)({pattern})(?s:.*\z)"
    found = pc.replace_substring_regex(text, whole, rf"\{group + 1}")
    return pc.if_else(matches(text, pattern), found, None)
