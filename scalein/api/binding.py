"""Where a flow's data comes from: sources made of what the user has, and data given to an unbound flow later."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from scalein.connectors.base import BoundSource
from scalein.connectors.in_memory import Batches, conform, of_arrow, of_table_as_is, plain_schema
from scalein.dtypes import Schema, from_arrow_type
from scalein.errors import BadArgument, SourceLoc, WrongType, type_name
from scalein.ir.literals import as_dtype
from scalein.ir.ops import Op, Source
from scalein.ir.rewrite import rewrite, walk_ops

if TYPE_CHECKING:
    from scalein.exec.bounded import Query

UNNAMED = "input"  # of an input that the user gave no name


def source(name: str, data: Batches | BoundSource, at: SourceLoc) -> Source:
    """A source of all columns; a type that scalein does not compute with is refused, naming its column."""
    _check_types(data.schema, at)
    return Source(name, data.schema, tuple(data.schema.names), data, at=at)


def unbound(schema: object, at: SourceLoc, name: object = None) -> Source:
    """A source whose data comes later; a flow with several inputs knows each by its name."""
    if name is not None and (not isinstance(name, str) or not name.strip()):
        raise BadArgument("the name of an input is a text that is not empty", at=at, found=repr(name))
    arrow = as_schema(schema, "flow", at)
    return Source(name or UNNAMED, arrow, tuple(arrow.names), None, at=at)


_SCHEMAS = {
    "polars.Schema": "give the Arrow schema: df.head(0).to_arrow().schema",
    "polars.DataFrame": "from_arrow(df) begins with its rows; df.head(0).to_arrow().schema is its schema",
    **dict.fromkeys(("pandas.DataFrame", "pandas.Series"), "give the Arrow schema: pa.Schema.from_pandas(df)"),
    **dict.fromkeys(("pyarrow.Table", "pyarrow.RecordBatch", "pyarrow.RecordBatchReader", "scalein.Flow"),
                    "give its .schema; from_arrow(data) begins with the rows"),
}  # fmt: skip


def as_schema(given: object, step: str, at: SourceLoc) -> pa.Schema:
    """The schema meant by a pyarrow schema, a mapping of names to types, or a StructType of Spark's."""
    if type(given).__name__ == "StructType" and type(given).__module__.startswith("pyspark."):
        from scalein.spark.types import flow_schema

        given = flow_schema(given, at)
    if isinstance(given, Mapping) and type_name(given) not in _SCHEMAS:
        given = pa.schema([pa.field(str(name), as_dtype(dtype, at).arrow) for name, dtype in given.items()])
    if not isinstance(given, pa.Schema):
        known = _SCHEMAS.get(type_name(given))
        raise BadArgument(f"{step} takes a pyarrow or Spark schema, or a dict of names and types", at=at,
                          found=repr(given) if known is None else type_name(given),
                          hint=known or 'for example {"price": pa.float64()}')
    arrow = plain_schema(given, at)
    _check_types(arrow, at)
    return arrow


def _check_types(schema: pa.Schema, at: SourceLoc) -> None:
    try:
        Schema.from_arrow(schema)
    except WrongType as error:
        raise WrongType(error.what, at=at, found=error.facts.get("found"), hint=error.hint) from None


_HINT = "give it to the call: collect(data), count(data), describe(data), write_parquet(path, data)"


def bind(op: Op, data: object, at: SourceLoc, hint: str = _HINT) -> Op:
    """The plan with `data` (if any) in its unbound inputs; every source has data afterwards."""
    waiting = inputs_of(op, at)
    if not waiting:
        if data is not None:
            raise BadArgument("the flow has its data already", at=at, hint=_how_to_choose(data))
        return op
    if data is None:
        raise BadArgument("the flow has no data yet: it begins with si.flow(schema)", at=at, hint=hint)
    bound: dict[int, Source] = {}
    of_input = dict.fromkeys(waiting, data) if len(waiting) == 1 else by_name(waiting, data, "data", at)
    for name, given in of_input.items():
        for each in waiting[name]:
            bound[id(each)] = _bound(each, of_arrow(given, at, each.arrow), at)
    return rewrite(op, lambda below: bound.get(id(below)))


def inputs_of(op: Op, at: SourceLoc) -> dict[str, list[Source]]:
    """The unbound inputs of a flow by name, in its order, each with the sources that stand for it."""
    found: dict[str, list[Source]] = {}
    for each in walk_ops(op):
        if isinstance(each, Source) and each.data is None:
            found.setdefault(each.name, []).append(each)
    for name, sources in found.items():
        if name == UNNAMED and len(sources) > 1:
            raise BadArgument("the flow waits for more than one input", at=at,
                              found=f"{len(sources)} unbound inputs without names",
                              hint='name them, si.flow(schema, name="clicks"), or bind all but one with from_arrow')
        if any(each.arrow != sources[0].arrow for each in sources):
            raise BadArgument(f"two inputs of the flow have the name {name!r} and different columns", at=at,
                              hint="give each a name of its own")
    return found


def by_name(inputs: Collection[str], given: object, what: str, at: SourceLoc) -> dict[str, Any]:
    """What is given for each input of a flow."""
    names, shown = ", ".join(map(repr, inputs)), ", ".join(f"{name!r}: ..." for name in inputs)
    if not isinstance(given, Mapping):
        raise BadArgument("the flow waits for more than one input", at=at, found=type_name(given), has=names,
                          hint=f"give {what} for each by its name: {{{shown}}}")
    if given.keys() != set(inputs):
        raise BadArgument(f"the {what} given is not for the inputs that the flow has", at=at,
                          found=", ".join(map(repr, given)), has=names)
    return {name: given[name] for name in inputs}


def _how_to_choose(given: object) -> str:
    """A hint for what was given as data to a flow that has its own; names are meant as columns."""
    names = given if isinstance(given, list | tuple) else [given]
    if names and all(isinstance(name, str) for name in names):
        return f"for some columns, select them first: flow.select({', '.join(map(repr, names))})"
    return "begin it with si.flow(schema) to give the data later"


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


class Queries:
    """The queries of a flow: one over its own data, or one for each schema of data that is given to it.

    They live as long as the flow, so that a run over few rows costs no planning; they hold no data that was given.
    """

    __slots__ = ("_known", "_op", "_own")
    MAX_PLANS = 8

    def __init__(self, op: Op) -> None:
        self._op = op
        self._own: Query | None = None
        self._known: list[tuple[pa.Schema, Query]] = []  # by the schema that data is read in

    def of(self, data: object, at: SourceLoc) -> tuple[Query, Batches | None]:
        """The query for this data, and the data as it is read; None if the flow has its own."""
        if isinstance(data, pa.RecordBatch):
            data = pa.Table.from_batches([data])
        if isinstance(data, pa.Table):
            for schema, query in self._known:
                if data.schema.equals(schema, check_metadata=True):
                    return query, of_table_as_is(data, at)
        from scalein.exec.bounded import Query

        if data is None and self._own is not None:
            return self._own, None
        sources = [each for some in inputs_of(self._op, at).values() for each in some]
        if data is None or len(sources) != 1:
            own = Query(bind(self._op, data, at))
            if data is None:
                self._own = own
            return own, None
        (waiting,) = sources
        bound = _bound(waiting, of_arrow(data, at, waiting.arrow), at)
        assert isinstance(bound.data, Batches)
        found = next((query for schema, query in self._known if schema.equals(bound.arrow)), None)
        if found is None:
            read = replace(bound, data=None)
            found = Query(rewrite(self._op, lambda below: read if below is waiting else None))
            self._known = [(bound.arrow, found), *self._known[: self.MAX_PLANS - 1]]
        return found, bound.data
