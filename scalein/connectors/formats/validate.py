"""Validation of batches that come from outside of this process: kernels follow offsets and dictionary codes unchecked.

Everything is checked that Arrow prescribes: offsets, codes, counts of nulls, UTF-8, ranges of decimals and times. A
dictionary is checked once, not for each batch that uses it.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc


class Validator:
    """Checks the batches of one stream or file; raises `pa.ArrowInvalid`."""

    def __init__(self) -> None:
        self._valid: dict[int, pa.Array] = {}  # the last dictionary of each column

    def check(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """The batch, if nothing in it is wrong."""
        batch.validate()
        for position, column in enumerate(batch.columns):
            if pa.types.is_dictionary(column.type):
                self._check_dictionary(position, column)
            elif column.type in _TEXTS:
                _check_text(column)
            else:
                column.validate(full=True)
        return batch

    def _check_dictionary(self, position: int, column: pa.DictionaryArray) -> None:
        words, codes = column.dictionary, column.indices
        known = self._valid.get(position)
        if known is None or _places(known) != _places(words):
            _check_text(words) if words.type in _TEXTS else words.validate(full=True)
            self._valid[position] = words  # it stays alive, so its memory is not another's
        codes.validate(full=True)
        if codes.null_count < len(codes):
            least, greatest = (code.as_py() for code in pc.min_max(codes).values())
            if least < 0 or greatest >= len(words):
                raise pa.ArrowInvalid(f"a dictionary of {len(words)} values has codes from {least} to {greatest}")


def _check_text(column: pa.Array) -> None:
    """Arrow decodes text by text, which takes five times as long as to see that all bytes are ASCII."""
    binary, width = _TEXTS[column.type]
    column.view(binary).validate(full=True)  # the offsets
    _, offsets, data = column.buffers()
    if len(column) == 0 or data is None:
        return
    first, last = np.frombuffer(offsets, width)[[column.offset, column.offset + len(column)]].tolist()
    if first < last and np.frombuffer(data, np.uint8)[first:last].max() >= 128:
        column.validate(full=True)


_TEXTS = {pa.string(): (pa.binary(), np.int32), pa.large_string(): (pa.large_binary(), np.int64)}


def _places(array: pa.Array) -> tuple[int, int, list[int]]:
    return len(array), array.offset, [0 if buffer is None else buffer.address for buffer in array.buffers()]
