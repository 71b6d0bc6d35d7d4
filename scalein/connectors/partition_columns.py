"""Partition columns: values in the names of directories (`day=2024-01-01/`), as Hive, Spark and pyarrow name them.

Names and values are URL-escaped; `__HIVE_DEFAULT_PARTITION__` is null. A column of integers only is int32, or int64 if
one needs it; one of dates only (`2024-01-01`) is date32; all others are text.
"""

from __future__ import annotations

import datetime
import os
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from urllib.parse import unquote

import pyarrow as pa

from scalein.errors import BadData

NULL = "__HIVE_DEFAULT_PARTITION__"
Values = Mapping[str, pa.Scalar]
_DICTIONARY = pa.dictionary(pa.int32(), pa.string())
_INTEGER, _DATE = re.compile("-?[0-9]+"), re.compile("[0-9]{4}-[0-9]{2}-[0-9]{2}")


@dataclass(frozen=True)
class PartitionColumns:
    """The partition columns of the files below a directory, outermost first; empty if there are none."""

    schema: pa.Schema

    @staticmethod
    def infer(names: Iterable[str], given: pa.Schema | None) -> PartitionColumns:
        """The columns of some files by their names below the directory; `given` has the types of some, or of none."""
        folders = sorted({os.path.dirname(name) for name in names})
        texts: dict[str, list[str]] = {name: [] for name in _texts(folders[0])} if folders else {}
        for folder in folders:
            found = _texts(folder)
            _check_same(folder, found, texts)
            for name, text in found.items():
                if text is not None:
                    texts[name].append(text)
        return PartitionColumns(pa.schema([given.field(name) if given is not None and name in given.names
                                           else pa.field(name, _type(some)) for name, some in texts.items()]))

    def values(self, name: str) -> Values:
        """The values for all rows of a file."""
        folder = os.path.dirname(name)
        texts = _texts(folder)
        _check_same(folder, texts, self.schema.names)
        values = {}
        for column in self.schema:
            text = texts[column.name]
            try:
                value = pa.scalar(None, column.type) if text is None else pa.scalar(text).cast(column.type)
            except (pa.ArrowException, UnicodeError) as error:
                raise BadData(f"the partition column {column.name!r} is {column.type}, not {text!r}",
                              found=folder, hint="give schema= with another type for the column") from error
            values[column.name] = value
        return values


def with_constants(batch: pa.RecordBatch | None, schema: pa.Schema, values: Values, rows: int) -> pa.RecordBatch:
    """The columns of a schema: values of partition columns, those of a batch, and nulls."""
    stored = [] if batch is None else batch.schema.names
    columns = [batch.column(field.name) if batch is not None and field.name in stored and field.name not in values
               else _repeated(values.get(field.name, pa.scalar(None, field.type)), field.type, rows)
               for field in schema]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _repeated(value: pa.Scalar, wanted: pa.DataType, rows: int) -> pa.Array:
    if wanted != _DICTIONARY:
        return pa.repeat(value, rows)
    known = pa.array([value.as_py()] if value.is_valid else [""])
    return pa.DictionaryArray.from_arrays(pa.repeat(pa.scalar(0 if value.is_valid else None, pa.int32()), rows), known)


def _texts(folder: str) -> dict[str, str | None]:
    """The columns in the path of a directory, with their values.

    >>> _texts("year=2024/other/city=S%C3%A8te/k=__HIVE_DEFAULT_PARTITION__")
    {'year': '2024', 'city': 'Sète', 'k': None}
    """
    found: dict[str, str | None] = {}
    for part in folder.split(os.sep) if "=" in folder else ():
        escaped, is_column, text = part.partition("=")
        if is_column:
            name = unquote(escaped)
            if not name or name in found:
                raise BadData(f"a directory of a partitioned table has {'its' if name else 'no'} column name"
                              f"{' twice' if name else ''}", found=folder)
            found[name] = None if text == NULL else unquote(text)
    return found


def _check_same(folder: str, found: Iterable[str], wanted: Iterable[str]) -> None:
    if list(found) != list(wanted):
        raise BadData("the files of a partitioned table are all in directories of the same columns",
                      found=f"{', '.join(found) or 'none'} in {folder or 'the directory itself'}",
                      wanted=", ".join(wanted) or "none")


def _type(texts: list[str]) -> pa.DataType:
    """The type of a column by its values that are not null.

    >>> [str(_type(texts)) for texts in (["1", "-02"], ["1", "3000000000"], ["2024-02-29"], ["2023-02-29"], ["1", ""])]
    ['int32', 'int64', 'date32[day]', 'string', 'string']
    """
    if texts and all(map(_INTEGER.fullmatch, texts)):
        greatest = max(max(number, -1 - number) for number in map(int, texts))
        if greatest < 1 << 63:
            return pa.int32() if greatest < 1 << 31 else pa.int64()
    if texts and all(map(_DATE.fullmatch, texts)):
        with suppress(ValueError):
            for text in texts:
                datetime.date.fromisoformat(text)
            return pa.date32()
    return pa.string()
