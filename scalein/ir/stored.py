"""A table of the state store as kernels see it: keys, values, and the record that holds them.

Unlike the tables of a flow its layout never follows the data: files outlive the run. A value has its column's own type,
and what a row does to it (`sum`, `max`, `replace`, ...) belongs to the call, not to the table.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from scalein.dtypes import Field, Schema
from scalein.layout import KEY_NULLS, VALUE_NULLS, RecordLayout, Slot, size_of


@dataclass(frozen=True)
class StoredTable:
    """Key and value columns of a store."""

    keys: tuple[Field, ...]
    values: tuple[Field, ...]

    @cached_property
    def layout(self) -> RecordLayout:
        nulls = ((1 << len(self.values)) - 1) << VALUE_NULLS
        head = Slot("head", 8, nulls.to_bytes(8, "little"))
        keys = [Slot(f"key{k}", size_of(key.dtype)) for k, key in enumerate(self.keys)]
        values = [Slot(f"value{k}", size_of(value.dtype)) for k, value in enumerate(self.values)]
        return RecordLayout((head, *keys, *values))

    @property
    def schema(self) -> Schema:
        return Schema((*self.keys, *self.values))

    @property
    def text_cells(self) -> tuple[int, ...]:
        """Offsets of the fields that may lead to bytes outside of the record."""
        fields = [(f"{kind}{k}", field) for kind, columns in (("key", self.keys), ("value", self.values))
                  for k, field in enumerate(columns)]
        return tuple(self.layout.offset(name) for name, field in fields if field.dtype.is_bytes)

    def null_bit(self, value: int) -> int:
        return 1 << (VALUE_NULLS + value)

    def key_null_bit(self, key: int) -> int:
        return 1 << (KEY_NULLS + key)
