"""Where a flow's data comes from: sources made of what the user has, and data given to an unbound flow later."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pyarrow as pa

from scalein.connectors.base import BoundSource
from scalein.connectors.in_memory import Batches, bare, conform, of_arrow
from scalein.dtypes import Schema, from_arrow_type
from scalein.errors import BadArgument, SourceLoc, WrongType
from scalein.ir.literals import as_dtype
from scalein.ir.ops import Op, Source
from scalein.ir.rewrite import rewrite, walk_ops


def source(name: str, data: Batches | BoundSource, at: SourceLoc) -> Source:
    """A source of all columns; a type that scalein does not compute with is refused, naming its column."""
    _check_types(data.schema, at)
    return Source(name, data.schema, tuple(data.schema.names), data, at=at)


def unbound(schema: object, at: SourceLoc) -> Source:
    """A source whose data comes later."""
    arrow = as_schema(schema, "flow", at)
    return Source("input", arrow, tuple(arrow.names), None, at=at)


def as_schema(given: object, step: str, at: SourceLoc) -> pa.Schema:
    """The schema meant by a pyarrow schema, a mapping of names to types, or a StructType of Spark's."""
    if type(given).__name__ == "StructType" and type(given).__module__.startswith("pyspark."):
        from scalein.spark.types import arrow_schema

        given = arrow_schema(given, at)
    if isinstance(given, Mapping):
        given = pa.schema([pa.field(str(name), as_dtype(dtype, at).arrow) for name, dtype in given.items()])
    if not isinstance(given, pa.Schema):
        raise BadArgument(f"{step} takes a pyarrow or Spark schema, or a dict of names and types", at=at,
                          found=repr(given), hint='for example {"price": pa.float64()}')
    arrow = bare(given, at)
    _check_types(arrow, at)
    return arrow


def _check_types(schema: pa.Schema, at: SourceLoc) -> None:
    try:
        Schema.from_arrow(schema)
    except WrongType as error:
        raise WrongType(error.what, at=at, found=error.facts.get("found"), hint=error.hint) from None


def bind(op: Op, data: object, at: SourceLoc, hint: str = "give it here: collect(data)") -> Op:
    """The plan with `data` (if any) in its unbound source; every source has data afterwards."""
    waiting = [below for below in walk_ops(op) if isinstance(below, Source) and below.data is None]
    if data is None:
        if waiting:
            raise BadArgument("the flow has no data yet: it begins with si.flow(schema)", at=at, hint=hint)
        return op
    if not waiting:
        raise BadArgument("the flow has its data already", at=at,
                          hint="begin it with si.flow(schema) to give the data later")
    if len(waiting) > 1:
        raise BadArgument("the flow waits for more than one input", at=at, found=f"{len(waiting)} unbound inputs",
                          hint="bind all but one with from_arrow")
    bound = _bound(waiting[0], of_arrow(data, at), at)
    return rewrite(op, lambda below: bound if below is waiting[0] else None)


def _bound(source: Source, data: Batches, at: SourceLoc) -> Source:
    """The source with data. Text that is stored otherwise (a dictionary) but comes out the same stays as it is."""
    fields = []
    for field in source.arrow:
        position = data.schema.get_field_index(field.name)
        stored = data.schema.field(position).type if position >= 0 else field.type
        same = from_arrow_type(field.type) == _type_or_none(stored)
        fields.append(pa.field(field.name, stored if same else field.type, field.nullable))
    schema = pa.schema(fields)
    return replace(source, arrow=schema, data=conform(data, schema, at))


def _type_or_none(arrow: pa.DataType) -> object:
    try:
        return from_arrow_type(arrow)
    except WrongType:
        return None
