"""Lines of JSON files, in the rows that Spark would read.

pyarrow parses them. Both readers mean the same if each line is one object, without spaces around it, and

    lines     are UTF-8, end with \\n, and have up to 1,000 bytes: longer numbers and deeper nesting are errors to Spark
    numbers   are finite; those of float columns are not -0, which is 0.0 to Spark, and -0.0 to pyarrow
    columns   have values of their own kind, or null: Spark reads `"v": 1` as text, and `"v": "1"` not as a number
    dates     are text, and as in CSV files; so are times

Fields that are not read may have any value, and those that are missing are null.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from scalein.spark.text_splits import NotPlain, check_characters, times_of_text

MAX_LINE_BYTES = 1000
_TYPES = (pa.int32(), pa.int64(), pa.string(), pa.bool_(), pa.float64(), pa.date32(), pa.timestamp("us"),
          pa.timestamp("us", "UTC"))  # fmt: skip
_NAMED_NUMBER = re.compile(rb"[:,\[\s]-?(?:Inf|NaN)")


@dataclass(frozen=True)
class JsonLines:
    """What Spark takes the lines of JSON files to be."""

    zone: str  # of times without one, as Arrow writes it
    has_header: bool = False

    def can_read(self, schema: pa.Schema) -> bool:
        return all(field.type in _TYPES for field in schema)

    def rows(self, block: bytes, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        import pyarrow.json as pj

        check_characters(block)
        count = _checked_lines(block)
        types = pa.schema([field.with_type(pa.string()) if pa.types.is_temporal(field.type) else field
                           for field in schema])
        table = pj.read_json(pa.BufferReader(block), pj.ReadOptions(use_threads=False, block_size=len(block) + 1),
                             pj.ParseOptions(explicit_schema=types, unexpected_field_behavior="ignore"))
        if table.num_rows != count:  # several objects in a line
            raise NotPlain
        for batch in table.to_batches():
            arrays = [_converted(batch.column(batch.schema.get_field_index(field.name)), field.type, self.zone)
                      for field in schema]
            yield pa.RecordBatch.from_arrays(arrays, schema=schema) if arrays else batch.select([])


def _checked_lines(block: bytes) -> int:
    """The number of lines. Raises NotPlain unless each begins and ends as an object does.

    An object cannot extend over two such lines: no value may follow another without a comma.
    """
    codes = np.frombuffer(block, np.uint8)
    ends = np.flatnonzero(codes == ord("\n"))
    if not block.endswith(b"\n"):
        ends = np.append(ends, len(codes))
    starts = np.concatenate([[0], ends[:-1] + 1])
    lengths = ends - starts
    if lengths.min() < 2 or lengths.max() > MAX_LINE_BYTES or not (
            (codes[starts] == ord("{")) & (codes[ends - 1] == ord("}"))).all():
        raise NotPlain
    if (b"Inf" in block or b"NaN" in block) and _NAMED_NUMBER.search(block):
        raise NotPlain
    return len(ends)


def _converted(column: pa.Array, wanted: pa.DataType, zone: str) -> pa.Array:
    if pa.types.is_temporal(wanted):
        return times_of_text(column, wanted, zone)
    if wanted == pa.float64():
        values = column.fill_null(1).to_numpy()
        if not np.isfinite(values).all() or ((values == 0) & np.signbit(values)).any():
            raise NotPlain
    return column
