"""SQL: a text becomes a flow of the same ops. sqlglot is imported by the first query, and nowhere else in scalein."""

from __future__ import annotations

from typing import TYPE_CHECKING

from scalein.errors import BadArgument, here

if TYPE_CHECKING:
    from scalein.api.flow import Flow


def sql(text: str, **inputs: object) -> Flow:
    """The flow of a query in SQL: to be collected, explained, started, or taken to Spark, like any other.

    Tables are what is given by name: flows, Arrow, pandas, Polars, whatever `from_arrow` takes, and paths of files. A
    name that is not among them is a variable of the caller, and a quoted one with an ending is a path:
    `FROM 'events/*.parquet'`.

    The language is DuckDB's, with Flink's windows: `TABLE(TUMBLE(TABLE bids, DESCRIPTOR(ts), INTERVAL '10' SECOND))`,
    or shorter `tumble(bids, ts, INTERVAL '10' SECOND)`. Statements before the last one make views and tables:
    `CREATE VIEW ... AS`, `CREATE TABLE ... WITH ('connector' = ...)`.

    >>> import pyarrow as pa, scalein as si
    >>> sales = pa.table({"shop": ["a", "b", "a"], "price": [1.0, 2.0, 4.0]})
    >>> si.sql("SELECT shop, sum(price) AS total FROM sales GROUP BY shop ORDER BY total DESC").collect().to_pydict()
    {'shop': ['a', 'b'], 'total': [5.0, 2.0]}
    >>> big = si.from_arrow(sales).filter(si.col("price") > 1)
    >>> si.sql("SELECT count(*) AS n FROM t", t=big).collect().to_pydict()
    {'n': [2]}
    """
    at = here()
    if not isinstance(text, str):
        raise BadArgument("sql takes a text", at=at, found=repr(text), hint='si.sql("SELECT * FROM t", t=flow)')
    need_sqlglot()
    from scalein.sql.inputs import Inputs, caller
    from scalein.sql.script import flow_of

    return flow_of(text, Inputs(inputs, at, caller()), at)


def need_sqlglot() -> None:
    """Raises an error that says what to install, where sqlglot is not there."""
    try:
        import sqlglot  # noqa: F401
    except ImportError:
        raise BadArgument("SQL needs sqlglot, which is not installed", at=here(),
                          hint="pip install 'scalein[sql]'") from None
