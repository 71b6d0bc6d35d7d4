"""Dead letters: rows that failed, as rows of the sink that `on_error=` names, in jobs and in Spark streams.

A dead letter has all columns of its source's row, and `error`, `bad_file`, `bad_line` and `bad_text`: the reason, the
file (or the source and its partition, or Spark's batch), the number of the line or row where it is known, and the text
of a line that could not be decoded. A record or file that could not be decoded has no values.
"""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from scalein.connectors.formats.lenient import MALFORMED
from scalein.errors import ScaleinError
from scalein.ir.internal_names import PREFIX


def dead_letter_schema(columns: pa.Schema) -> pa.Schema:
    """The source's columns, then those of `MALFORMED` under names that are free.

    A `_` is added to a name that the source has.

    >>> dead_letter_schema(pa.schema({"x": pa.int64(), "error": pa.string()})).names
    ['x', 'error', 'error_', 'bad_file', 'bad_line', 'bad_text']
    """
    fields, names = [field.with_nullable(True) for field in columns], {*columns.names}
    for mark in MALFORMED:
        name = mark.name.removeprefix(PREFIX)
        while name in names:
            name += "_"
        names.add(name)
        fields.append(mark.with_name(name))
    return pa.schema(fields)


def dead_letter(columns: Sequence[pa.Array], schema: pa.Schema, error: ScaleinError, file: str | None,
                line: int | None = None) -> pa.RecordBatch:
    """The dead letter of a row in which an expression failed; `columns` are those of the source, with one value each.

    >>> from scalein.errors import ComputeError
    >>> schema = dead_letter_schema(pa.schema({"x": pa.int64()}))
    >>> dead_letter([pa.array([7])], schema, ComputeError("integer overflow"), "a.csv", 3).to_pylist()
    [{'x': 7, 'error': 'integer overflow', 'bad_file': 'a.csv', 'bad_line': 3, 'bad_text': None}]
    """
    marks = [pa.array([value], field.type)
             for value, field in zip((error.what, file, line, None), MALFORMED, strict=True)]
    return pa.RecordBatch.from_arrays([*columns, *marks], schema=schema)
