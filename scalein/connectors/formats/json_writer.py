"""JSON lines, which pyarrow reads but does not write: columns become columns of JSON text, joined row by row.

Timestamps, days and decimals are text as Arrow shows them; durations and times of day count their unit, which is how
pyarrow reads them; a number that is not finite is null, since JSON has none.
"""

from __future__ import annotations

import json

import pyarrow as pa


class JsonWriter:
    """Writes one object a line into an open file."""

    def __init__(self, file: pa.NativeFile, schema: pa.Schema) -> None:
        self._file = file
        for field in schema:
            _check(field.type, field.name)

    def write(self, table: pa.Table) -> None:
        for batch in table.to_batches(max_chunksize=1 << 17):
            self._file.write(lines(batch))

    def close(self) -> None:
        """Nothing is buffered; the caller closes the file."""


def lines(batch: pa.RecordBatch) -> bytes:
    r"""The rows as JSON, each ended by a newline.

    >>> lines(pa.record_batch({"k": ["a\"", None], "v": [1.5, float("nan")], "l": [[1], None]}))
    b'{"k":"a\\"","v":1.5,"l":[1]}\n{"k":null,"v":null,"l":null}\n'
    """
    import pyarrow.compute as pc

    if not batch.num_rows:
        return b""
    pieces: list[object] = []
    for number, field in enumerate(batch.schema):
        pieces += [("," if number else "{") + json.dumps(field.name) + ":", _texts(batch.column(number))]
    whole = pc.binary_join_element_wise(*(pa.scalar(p, pa.large_string()) if isinstance(p, str) else p for p in pieces),
                                        pa.scalar("}\n", pa.large_string()), pa.scalar("", pa.large_string()))
    _, offsets, data = whole.buffers()
    end = memoryview(offsets).cast("q")[batch.num_rows]
    return bytes(memoryview(data)[:end])


def _texts(column: pa.Array) -> pa.Array:
    """A column as JSON text, without nulls."""
    import pyarrow.compute as pc

    kind = column.type
    if _is_count(kind):
        return _texts(column.cast(pa.int32() if kind.bit_width == 32 else pa.int64()))
    if pa.types.is_boolean(kind) or pa.types.is_integer(kind):
        texts = column.cast(pa.large_string())
    elif pa.types.is_floating(kind):
        texts = pc.if_else(pc.is_finite(column), column.cast(pa.large_string()), None)
    elif pa.types.is_nested(kind):
        texts = pa.array([json.dumps(_plain(value), ensure_ascii=False) for value in column], pa.large_string())
    else:
        texts = _quoted(column.cast(pa.large_string()))
    return pc.fill_null(texts, "null")


def _quoted(texts: pa.Array) -> pa.Array:
    import pyarrow.compute as pc

    if pc.any(pc.match_substring_regex(texts, r'["\\\x00-\x1f]')).as_py():
        return pa.array([None if text is None else json.dumps(text, ensure_ascii=False) for text in texts.to_pylist()],
                        pa.large_string())
    quote = pa.scalar('"', pa.large_string())
    return pc.binary_join_element_wise(quote, texts, quote, pa.scalar("", pa.large_string()))


def _plain(value: pa.Scalar) -> object:
    """A value that Python's json writes in the same form as `_texts`."""
    if not value.is_valid:
        return None
    if isinstance(value, pa.StructScalar):
        return {name: _plain(value[name]) for name in value}
    if isinstance(value, pa.ListScalar | pa.LargeListScalar | pa.FixedSizeListScalar):
        return [_plain(each) for each in value.values]
    if _is_count(value.type):
        return value.value
    if pa.types.is_boolean(value.type) or pa.types.is_integer(value.type):
        return value.as_py()
    if pa.types.is_floating(value.type):
        number = value.as_py()
        return number if number - number == 0 else None
    return value.cast(pa.string()).as_py()


def _is_count(kind: pa.DataType) -> bool:
    return pa.types.is_duration(kind) or pa.types.is_time(kind)  # type: ignore[no-any-return]


def _check(kind: pa.DataType, name: str) -> None:
    """Bytes have no JSON."""
    for position in range(kind.num_fields):
        _check(kind.field(position).type, name)
    if pa.types.is_map(kind) or kind in (pa.binary(), pa.large_binary(), pa.binary_view()) \
            or pa.types.is_fixed_size_binary(kind):
        raise pa.ArrowNotImplementedError(f"column {name!r} is {kind}, for which there is no JSON")
