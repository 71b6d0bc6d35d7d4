"""Rows split by the values of some columns, as directories `column=value` as Hive, Spark and pyarrow name them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from urllib.parse import quote

import numpy as np
import pyarrow as pa

from scalein.connectors.partition_columns import NULL


def split(batch: pa.RecordBatch, by: Sequence[str], kept: pa.Schema) -> Iterator[tuple[str, pa.RecordBatch]]:
    """The kept columns of the rows of each directory, in their order; directories in the order of their first rows.

    >>> batch = pa.record_batch({"k": ["a", None, "a"], "v": [1, 2, 3]})
    >>> [(path, rows["v"].to_pylist()) for path, rows in split(batch, ["k"], pa.schema([batch.schema.field("v")]))]
    [('k=a', [1, 3]), ('k=__HIVE_DEFAULT_PARTITION__', [2])]
    """
    rest = pa.RecordBatch.from_arrays([batch.column(name) for name in kept.names], schema=kept)
    if not by:
        yield "", rest
        return
    codes = np.zeros(batch.num_rows, np.int64)
    for name in by:
        words = batch.column(name).dictionary_encode(null_encoding="encode")
        # Numbered anew after each column, so that the product never overflows.
        codes = np.unique(codes * len(words.dictionary) + np.asarray(words.indices), return_inverse=True)[1]
    firsts, sizes = np.unique(codes, return_index=True, return_counts=True)[1:]
    rows = rest if len(sizes) == 1 else rest.take(pa.array(np.argsort(codes, kind="stable")))
    starts = np.cumsum(sizes) - sizes
    for group in np.argsort(firsts):
        first = int(firsts[group])
        path = os.path.join(*(_segment(name, batch.column(name)[first]) for name in by))
        yield path, rows.slice(int(starts[group]), int(sizes[group]))


def _segment(name: str, value: pa.Scalar) -> str:
    text = quote(value.cast(pa.string()).as_py(), safe=" ") if value.is_valid else NULL
    return f"{quote(name, safe=' ')}={text}"


def can_split(arrow: pa.DataType) -> bool:
    """Whether values of a type can be the name of a directory."""
    return not (pa.types.is_nested(arrow) or pa.types.is_dictionary(arrow) or arrow in _NO_TEXT)


_NO_TEXT = (pa.binary(), pa.large_binary(), pa.binary_view(), pa.null())
