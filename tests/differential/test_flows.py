"""Whole flows of random operators: filters, new columns, joins, unions, limits, groups."""

from __future__ import annotations

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from tests.engines import Engine, check, every_engine, examples
from tests.programs import programs
from tests.strategies import of_types, schemas, tables


@every_engine
@examples(24)
@given(st.data())
def test_random_flows(engine: Engine, data: st.DataObject) -> None:
    schema = data.draw(schemas(least=2, most=4))
    table = data.draw(tables(schema, most=64))
    other = data.draw(tables(of_types(schema.types[0]), most=17))
    other = other.append_column("extra", pa.array(range(other.num_rows), pa.int64()))
    program = data.draw(programs(schema, other))
    check(engine, table, program.build, ordered=program.ordered, tolerance=1e-6, errors_may_vanish=True)
