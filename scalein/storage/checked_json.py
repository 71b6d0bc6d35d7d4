"""JSON of checkpoints: plain values whose types are checked on access, because files can be damaged.

Each function raises `ValueError`, which the reader of a checkpoint turns into `Damaged` with the name of the file.
"""

from __future__ import annotations

Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]


def as_map(given: Json) -> dict[str, Json]:
    if not isinstance(given, dict):
        raise ValueError(f"expected an object, found {given!r:.100}")
    return given


def as_list(given: Json) -> list[Json]:
    if not isinstance(given, list):
        raise ValueError(f"expected a list, found {given!r:.100}")
    return given


def as_int(given: Json) -> int:
    if isinstance(given, bool) or not isinstance(given, int) or not -(1 << 63) <= given < 1 << 63:
        raise ValueError(f"expected an integer of 64 bits, found {given!r:.100}")
    return given


def as_text(given: Json) -> str:
    if not isinstance(given, str):
        raise ValueError(f"expected a string, found {given!r:.100}")
    return given
