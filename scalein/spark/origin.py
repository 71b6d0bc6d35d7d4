"""The origin of a stream's rows, for dead letters: a last column of the tasks' input, with the file of each row."""

from __future__ import annotations

import re
from urllib.parse import unquote

import pyarrow as pa

from scalein.ir.internal_names import internal

ORIGIN = internal("bad_file")
_FIELD = pa.field(ORIGIN, pa.string())


def with_origin(schema: pa.Schema) -> pa.Schema:
    return schema.append(_FIELD)


def without_origin(schema: pa.Schema) -> pa.Schema:
    """The columns of the stream itself."""
    return pa.schema([field for field in schema if field.name != ORIGIN])


def file_of_origin(name: str | None) -> str | None:
    """The path of a file, from one or from Spark's name of it, which is empty if rows are not from files.

    >>> file_of_origin("file:///data/a%20b.csv"), file_of_origin("/data/a%20b.csv"), file_of_origin("")
    ('/data/a b.csv', '/data/a%20b.csv', None)
    """
    if not name:
        return None
    local = re.match(r"file:(?://)?(?=/)", name)
    return name if local is None else unquote(name[local.end() :])
