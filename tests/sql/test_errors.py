"""What is wrong with a query is said with its place, and with what would be right."""

from __future__ import annotations

import pyarrow as pa
import pytest

import scalein as si

T = pa.table({"ad_id": [1], "price": [1.5], "name": ["x"], "ts": pa.array([0], pa.timestamp("ms"))})


@pytest.mark.parametrize(("query", "kind", "says", "place"), [
    ("select prize from t", si.UnknownColumn, "did you mean 'price'?", "line 1, column 8"),
    ("select 1,\n  t.prize from t", si.UnknownColumn, "no column 'prize' in 't'", "line 2, column 3"),
    ("select price from tt", si.BadName, "did you mean 't'?", "line 1, column 19"),
    ("selec price from t", si.BadSql, "did you mean 'SELECT'?", "line 1, column 13"),
    ("select price from t where", si.BadSql, "cannot be read", "line 1"),
    ("select sum(name) from t", si.WrongType, "sum takes numbers", "line 1, column 8"),
    ("select ad_id, price from t group by ad_id", si.BadSql, "'price' is neither in GROUP BY", "line 1, column 15"),
    ("select lowr(name) from t", si.BadSql, "did you mean 'LOWER'?", "line 1, column 8"),
    ("select name + 1 from t", si.WrongType, "does not take", "line 1, column 8"),
    ("select * from t where name", si.WrongType, "WHERE takes a condition, not str", "line 1, column 23"),
    ("select * from t where sum(price) > 1", si.BadSql, "conditions on aggregates go into HAVING", "line 1, column 23"),
    ("select price from t a join t b on a.ad_id = b.ad_id", si.BadName, "write a.price", "line 1, column 8"),
    ("select * from t join t on true", si.BadSql, "give one an alias", "line 1, column 22"),
    ("select * from hop(t, ts, interval '10' second, interval '2' second)", si.BadSql, "the slide comes first",
     "line 1"),
    ("select * from tumble(t, name, interval '2' second)", si.WrongType, "a timestamp or an integer",
     "line 1, column 25"),
    ("select * from t where ts > 'yesterday'", si.WrongType, "is no timestamp[ms]", "line 1, column 23"),
    ("select cast(price as money) from t", si.BadSql, "there is no type MONEY", "line 1"),
    ("select price from t group by rollup(price)", si.BadSql, "UNION ALL", "line 1"),
    ("select now() from t", si.BadSql, "NOW is not known when a flow is planned", "line 1, column 8"),
    ("select proctime(), price from t", si.BadSql, "PROCTIME is not known when a flow is planned", "line 1, column 8"),
    ("select strftime(ts, '%Q') from t", si.BadSql, "%Q is not among", "line 1, column 8"),
    ("select strptime(name, '%Q') from t", si.BadSql, "%Q is not among", "line 1, column 8"),
    ("select string_agg(name, ',') from t", si.BadSql, "there is no function STRING_AGG", "line 1, column 19"),
    ("select " + "(" * 3000 + "1" + ")" * 3000, si.BadSql, "nested too deeply", "line 1, column 1"),
    ("create table x (a bigint) with ('connector' = 'kafak'); select 1", si.BadSql, "there is no connector 'kafak'",
     "line 1, column 14"),
    ("create view v (x, y) as select price from t; select * from v", si.BadSql, "1 columns, and 2 are named", "line 1"),
    ("create function price_of as 'a.B'; select 1", si.BadSql, "cannot be made in SQL", "line 1, column 1"),
    ("insert into t select 1", si.BadSql, "INSERT writes to a table that CREATE TABLE made", "line 1, column 13"),
    ("select 1; select price from t", si.BadSql, "only the last statement is a query", "line 1, column 1"),
    ("select bool_and(price) from t", si.WrongType, "BOOL_AND takes a condition", "line 1"),
    ("select (select price, name from t) from t", si.BadSql, "one column, not 2", "line 1"),
    ("select 1 from t union select 1, 2 from t", si.BadSql, "different numbers of columns", "line 1"),
    ("select price from t limit 50%", si.BadSql, "PERCENT or WITH TIES is not supported in LIMIT", "line 1"),
    ("select * from t positional join t u", si.BadSql, "POSITIONAL JOIN is not supported", "line 1, column 33"),
    ("select * from t join t u", si.BadSql, "JOIN needs ON or USING", "line 1, column 22"),
    ("select price,, name from t", si.BadSql, "something is missing between two commas", "line 1, column 14"),
    ("select sum(price) over (order by ts rows between 1 preceding and current row exclude current row) from t",
     si.BadSql, "EXCLUDE is not supported in a frame of OVER", "line 1"),
    ("select price from t tablesample 10%", si.BadSql, "TABLESAMPLE is not supported in FROM", "line 1"),
    ("select price from t for update", si.BadSql, "FOR UPDATE is not supported in SELECT", "line 1"),
    ("select price from t order by price with fill", si.BadSql, "WITH FILL is not supported in ORDER BY", "line 1"),
    ("select price from t where price between symmetric 3 and 1", si.BadSql, "SYMMETRIC is not supported in BETWEEN",
     "line 1"),
    ("select (select max(u.price) from t u where u.ad_id = t.ad_id limit 0) from t", si.BadSql,
     "leave no row of an aggregate", "line 1"),
    ("select price from t where exists (select 1 from t u where u.price < t.price limit 2 offset 1)", si.BadSql,
     "more than equalities", "line 1"),
    ("select price from t order by 3", si.BadSql, "SELECT has 1 columns", "line 1, column 30"),
])
def test_errors_underline_the_place(query: str, kind: type[si.ScaleinError], says: str, place: str) -> None:
    with pytest.raises(kind) as error:
        si.sql(query, t=T)
    text = str(error.value)
    assert says in text
    assert place in text
    assert "^" in text
    assert "test_errors.py" in text


def test_a_column_of_the_table_whose_name_is_asked_for() -> None:
    """A name before a dot that is a column without fields is no struct, but a table that is not there."""
    with pytest.raises(si.UnknownColumn, match="no table 'price'"):
        si.sql("select price.x from t", t=T)


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "sqlglot", None)
    with pytest.raises(si.BadArgument, match=r"pip install 'scalein\[sql\]'"):
        si.sql("select 1")


def test_variables_that_are_no_tables_are_named() -> None:
    number = 3
    assert number
    with pytest.raises(si.BadName, match="the variable 'number' is a int"):
        si.sql("select * from number")
