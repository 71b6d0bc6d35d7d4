"""The tables that a query may name: given ones, views, variables of the caller, and files."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from types import FrameType

from scalein.api.binding import source
from scalein.api.flow import Flow
from scalein.connectors.in_memory import of_arrow
from scalein.errors import BadArgument, ScaleinError, SourceLoc, is_users_code, type_name
from scalein.ir.ops import Op

_READERS = {
    ".parquet": "read_parquet", ".pq": "read_parquet", ".csv": "read_csv", ".json": "read_json", ".jsonl": "read_json",
    ".ndjson": "read_json", ".arrow": "read_ipc", ".ipc": "read_ipc", ".feather": "read_ipc", ".arrows": "read_ipc",
}  # fmt: skip
_PACKED = (".gz", ".bz2", ".zst")


class Inputs:
    """Tables by name. What the caller has as variables counts last, and only if it is a flow or a table."""

    def __init__(self, given: Mapping[str, object], at: SourceLoc, frame: FrameType | None = None) -> None:
        self._at = at
        self._given = dict(given)
        self._frame = frame
        self._ops: dict[str, Op] = {}

    def names(self) -> list[str]:
        """What a query could have named."""
        found = list(self._given)
        for values in self._variables():
            found += [name for name, value in values.items() if not name.startswith("_") and is_table(value)]
        return list(dict.fromkeys(found))

    def add(self, name: str, flow: Flow) -> None:
        """A view or a table, under a name of its own."""
        self._given = {known: value for known, value in self._given.items() if known.lower() != name.lower()}
        self._given[name] = flow
        self._ops = {known: op for known, op in self._ops.items() if known.lower() != name.lower()}

    def drop(self, name: str) -> bool:
        """Whether there was such a view or table, which is gone now."""
        known = _like(name, self._given)
        if known is not None:
            del self._given[known]
            self._ops.pop(known, None)
        return known is not None

    def op(self, name: str) -> Op | None:
        """The op of a table; None if there is none."""
        known = _like(name, self._given)
        if known is not None:
            if known not in self._ops:
                self._ops[known] = as_op(self._given[known], known, self._at)
            return self._ops[known]
        for values in self._variables():
            if name in values and is_table(values[name]):
                if name not in self._ops:
                    self._ops[name] = as_op(values[name], name, self._at)
                return self._ops[name]
        return None

    def unusable(self, name: str) -> str | None:
        """What a variable of this name is, if it is no table."""
        value = next((values[name] for values in self._variables() if name in values), None)
        return None if value is None else type_name(value)

    def _variables(self) -> Iterable[Mapping[str, object]]:
        return () if self._frame is None else (self._frame.f_locals, self._frame.f_globals)


def _like(name: str, names: Iterable[str]) -> str | None:
    """The name itself, or the only one that differs in case alone."""
    among = list(names)
    if name in among:
        return name
    found = [each for each in among if each.lower() == name.lower()]
    return found[0] if len(found) == 1 else None


def is_table(value: object) -> bool:
    """Whether a variable may be meant as a table."""
    if isinstance(value, Flow):
        return True
    kind = type(value)
    return (not isinstance(value, type) and (hasattr(kind, "__arrow_c_stream__") or hasattr(kind, "__arrow_c_array__")
                                            ) and hasattr(value, "schema")) or type_name(value) in (
        "pandas.DataFrame", "polars.DataFrame", "polars.LazyFrame", "pyarrow.Table", "pyarrow.RecordBatch",
        "pyarrow.RecordBatchReader", "duckdb.DuckDBPyRelation")


def as_op(value: object, name: str, at: SourceLoc) -> Op:
    """The op of a flow, of data, or of the files at a path."""
    if isinstance(value, Flow):
        return value.op
    if isinstance(value, str | os.PathLike):
        return files(os.fspath(value), at)
    if type_name(value) == "polars.LazyFrame":
        value = value.collect()  # type: ignore[attr-defined]
    try:
        return source("arrow", of_arrow(value, at), at)
    except ScaleinError as error:
        error.add("input", name)
        raise


def files(path: str, at: SourceLoc) -> Op:
    """The op that reads files, whose format is in their name."""
    from scalein.api import sources

    stem = path
    while os.path.splitext(stem)[1].lower() in _PACKED:
        stem = os.path.splitext(stem)[0]
    extension = os.path.splitext(stem)[1].lower()
    if extension not in _READERS and os.path.isdir(path):
        extension = next((os.path.splitext(name)[1].lower() for _, _, names in os.walk(path) for name in sorted(names)
                          if os.path.splitext(name)[1].lower() in _READERS), ".parquet")
    reader = _READERS.get(extension)
    if reader is None:
        raise BadArgument(f"the format of {path!r} is not known by its name", at=at,
                          has=", ".join(_READERS), hint="give a flow: si.sql(..., t=si.read_parquet(path))")
    flow: Flow = getattr(sources, reader)(path)
    return flow.op


def caller() -> FrameType | None:
    """The innermost frame of a user's."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not is_users_code(frame.f_code):
        frame = frame.f_back
    return frame
