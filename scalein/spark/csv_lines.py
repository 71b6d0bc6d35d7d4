"""Lines of CSV files, in the rows that Spark would read.

pyarrow cuts lines into fields and converts these from text. Both readers mean the same if

    lines     end with \\n or \\r\\n, and have as many fields as the schema has columns; empty lines are no rows
    bytes     are UTF-8, without \\0 and backslashes, which are escapes to Spark
    quotes    enclose whole fields, in one line, with no quote inside
    numbers   have no spaces or hexadecimal digits, and are not called nan or inf
    dates     are 2024-01-31
    times     are 2024-01-31 23:59:59.123456, or with T, or fewer digits; all with Z or all without, in UTC
    booleans  are words

and every field of a column that is read converts to its type. A field without a character, quoted or not, is null.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from scalein.spark.text_splits import NotPlain, characters, check_characters, times_of_text

_SEPARATORS = (",", ";", "|")  # a line of tabs would be a row to pyarrow, and blank to Spark
_INTEGERS = (pa.int8(), pa.int16(), pa.int32(), pa.int64())
_OTHER_TYPES = (pa.string(), pa.bool_(), pa.float64(), pa.date32(), pa.timestamp("us"), pa.timestamp("us", "UTC"))
_NEWLINE, _RETURN, _QUOTE = b'\n\r"'
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class CsvLines:
    """What Spark takes the lines of CSV files to be."""

    columns: tuple[str, ...]  # all fields of a line, by position: names of the header are not compared
    separator: str
    has_header: bool
    zone: str  # of times without one, as Arrow writes it

    def can_read(self, schema: pa.Schema) -> bool:
        # A line of spaces could be a row of one column.
        return len(self.columns) > 1 and self.separator in _SEPARATORS and all(
            field.type in _INTEGERS or field.type in _OTHER_TYPES or pa.types.is_decimal128(field.type)
            for field in schema)

    def rows(self, block: bytes, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        import pyarrow.csv as pc

        check_characters(block)
        if b"\\" in block or block.startswith(_BYTE_ORDER_MARK):
            raise NotPlain
        _check_quotes(block, ord(self.separator))
        read = [name for name in self.columns if name in schema.names] or [self.columns[0]]
        names = [f"{k}" for k in range(len(self.columns))]
        included = [names[self.columns.index(name)] for name in read]
        table = pc.read_csv(
            pa.BufferReader(block),
            pc.ReadOptions(use_threads=False, block_size=len(block) + 1, column_names=names),
            pc.ParseOptions(delimiter=self.separator),
            pc.ConvertOptions(column_types=dict.fromkeys(included, pa.string()), include_columns=included,
                              null_values=[""], strings_can_be_null=True, quoted_strings_can_be_null=True))
        for batch in table.to_batches():
            columns = dict(zip(read, batch.columns, strict=True))
            arrays = [_converted(columns[field.name], field.type, self.zone) for field in schema]
            yield pa.RecordBatch.from_arrays(arrays, schema=schema) if arrays else batch.select([])


def _check_quotes(block: bytes, separator: int) -> None:
    """Raise NotPlain unless quotes enclose whole fields of one line, and are not in others."""
    if b'"' not in block:
        return
    codes = np.frombuffer(block, np.uint8)
    quotes = np.flatnonzero(codes == _QUOTE)
    if len(quotes) % 2:
        raise NotPlain
    opening, closing = quotes[::2], quotes[1::2]
    before, after = codes[opening - 1], codes[np.minimum(closing + 1, len(codes) - 1)]
    is_start = (before == separator) | (before == _NEWLINE) | (opening == 0)
    is_end = (after == separator) | (after == _NEWLINE) | (after == _RETURN) | (closing == len(codes) - 1)
    newlines = np.flatnonzero(codes == _NEWLINE)
    is_in_line = np.searchsorted(newlines, opening) == np.searchsorted(newlines, closing)
    if not (is_start & is_end & is_in_line).all():
        raise NotPlain


def _converted(text: pa.StringArray, wanted: pa.DataType, zone: str) -> pa.Array:
    """The values of fields, by pyarrow's conversion, where Spark's gives the same."""
    if pa.types.is_temporal(wanted):
        return times_of_text(text, wanted, zone)
    if wanted == pa.string() or text.null_count == len(text):
        return text.cast(wanted)
    codes = characters(text)
    if wanted == pa.bool_():
        is_same = codes.min() > ord("9")
    elif wanted == pa.float64():
        is_same = ((codes[codes > ord("9")] | 0x20) == ord("e")).all()
    else:
        is_same = codes.max() <= ord("9")
    if not is_same:
        raise NotPlain
    return text.cast(wanted)
