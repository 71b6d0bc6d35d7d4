"""JSON of checkpoints: plain values whose kinds are checked as they are taken, since files can be damaged.

Each raises `ValueError`, which `Checkpoint.recovered` turns into `Damaged`, naming the epoch.
"""

from __future__ import annotations

Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]


def as_map(given: Json) -> dict[str, Json]:
    if not isinstance(given, dict):
        raise ValueError(f"an object was expected, not {given!r:.100}")
    return given


def as_list(given: Json) -> list[Json]:
    if not isinstance(given, list):
        raise ValueError(f"a list was expected, not {given!r:.100}")
    return given


def as_int(given: Json) -> int:
    if isinstance(given, bool) or not isinstance(given, int) or not -(1 << 63) <= given < 1 << 63:
        raise ValueError(f"a number was expected, not {given!r:.100}")
    return given


def as_text(given: Json) -> str:
    if not isinstance(given, str):
        raise ValueError(f"a text was expected, not {given!r:.100}")
    return given
