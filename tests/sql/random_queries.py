"""Random queries over the tables of `test_queries`, in what DuckDB and we both read: a grammar, by descent."""

from __future__ import annotations

from random import Random


class Grammar:
    """Expressions over the columns that FROM has; t and u may have other names, those of columns among them."""

    def __init__(self, random: Random, with_u: bool, t: str = "t", u: str = "u") -> None:
        self.random = random
        self.t, self.u = t, u
        self.own = (f"{t}.a", f"{t}.b")
        self.integers = (*self.own, f"{u}.v", f"{u}.a", f"{u}.a") if with_u else self.own
        self.texts = (f"{t}.s", f"{u}.w") if with_u else (f"{t}.s",)

    def integer(self, depth: int = 2) -> str:
        """A small integer, or null."""
        if depth == 0 or self.random.random() < 0.4:
            return self.random.choice((*self.integers, str(self.random.randint(0, 9))))
        one, other = self.integer(depth - 1), self.integer(depth - 1)
        return self.random.choice((
            f"({one} + {other})", f"({one} - {other})", f"({one} * {self.random.randint(0, 3)})", f"(- {one})",
            f"({one} % {self.random.randint(2, 5)})", f"({one} // {self.random.randint(2, 5)})", f"abs({one})",
            f"coalesce({one}, {other})", f"CASE WHEN {self.condition(depth - 1)} THEN {one} ELSE {other} END",
            f"nullif({one}, {other})", f"length({self.text()})", f"greatest({one}, {other})"))

    def text(self) -> str:
        column = self.random.choice(self.texts)
        return self.random.choice((column, f"upper({column})", f"({column} || 'z')", f"coalesce({column}, 'n')",
                                   f"substring({column}, {self.random.randint(1, 2)}, 2)"))

    def condition(self, depth: int = 2) -> str:
        t = self.t
        if depth == 0 or self.random.random() < 0.5:
            return self.random.choice((
                f"{self.integer(0)} {self.random.choice(('<', '<=', '>', '>=', '=', '<>'))} {self.integer(1)}",
                f"{self.integer(0)} IS NULL", f"{self.random.choice(self.texts)} LIKE '{self.pattern()}'",
                f"{self.integer(0)} IN (1, 2, {self.random.choice(('3', 'NULL'))})", f"{t}.k", f"{t}.f > 1",
                f"{self.integer(0)} NOT IN (1, {self.random.choice(('5', 'NULL'))})",
                f"{self.integer(0)} BETWEEN {self.random.randint(-8, 2)} AND {self.random.randint(2, 9)}",
                f"{self.integer(0)} IS DISTINCT FROM {self.integer(0)}", f"{t}.ts >= '2020-01-01'", f"{t}.d <= {t}.ts"))
        one, other = self.condition(depth - 1), self.condition(depth - 1)
        return self.random.choice((f"({one} AND {other})", f"({one} OR {other})", f"(NOT {one})"))

    def pattern(self) -> str:
        return self.random.choice(("x%", "%z", "%y%", "_", "x_z", "%", "", "x"))

    def subquery(self) -> str:
        """A condition with a subquery."""
        column, inner = self.random.choice(self.own), self.random.choice(("u", "eu"))
        i = self.random.choice(("i", "b", "k") if self.t not in ("b", "k") and self.u not in ("b", "k") else ("i",))
        where = self.random.choice(("", f" WHERE {i}.v > 15", f" WHERE {i}.a IS NOT NULL", f" WHERE {i}.w = 'p'"))
        link = f"{where + ' AND' if where else ' WHERE'} {i}.a = {column}"
        more = self.random.choice(("", f" AND {i}.v > {self.t}.b * 6", f" AND {i}.v <> {self.t}.a"))
        negated = self.random.choice(("", "NOT "))
        limit = self.random.choice(("", "", " LIMIT 0", " LIMIT 1", " LIMIT 1 OFFSET 1"))
        one = self.random.choice((f" ORDER BY {i}.v, {i}.w LIMIT 1", f" ORDER BY {i}.v DESC NULLS LAST LIMIT 1",
                                  f" ORDER BY {i}.v LIMIT 1 OFFSET 1", " LIMIT 0"))
        return self.random.choice((
            f"{negated}EXISTS (SELECT 1 FROM {inner} {i}{link}{more}{'' if more else limit})",
            f"{column} {negated}IN (SELECT {i}.a FROM {inner} {i}{where})",
            f"{column} > (SELECT min({i}.a) FROM {inner} {i}{where})",
            f"{column} < (SELECT sum({i}.v) FROM {inner} {i}{link})",
            f"{column} < (SELECT {i}.v FROM {inner} {i}{link}{one})",
            f"{column} {negated}IN (SELECT {i}.a FROM {inner} {i}{where} ORDER BY {i}.a, {i}.v LIMIT 2)",
            f"({column} {negated}IN (SELECT {i}.a FROM {inner} {i}{where}) OR {self.condition(1)})"))

    def aggregate(self) -> str:
        arg = self.integer(1)
        where = f" FILTER (WHERE {self.condition(1)})" if self.random.random() < 0.3 else ""
        name = self.random.choice(("sum", "min", "max", "avg", "count"))
        return self.random.choice((f"{name}({arg}){where}", f"count(*){where}", f"count(DISTINCT {arg})",
                                   f"max({self.random.choice(self.texts)})", f"(sum({arg}) - min({arg}) + 1)"))


def random_query(random: Random) -> str:
    """A query; it has a result that does not depend on an order that DuckDB leaves open."""
    # Names of tables that are those of columns of the other one.
    t, u = random.choice((("t", "u"), ("t", "u"), ("v", "b"), ("w", "k"), ("t", "s")))
    own, other = f"t AS {t}", f"u AS {u}"
    source, with_u = random.choice((
        (own, False), (f"e AS {t}", False), (f"{own} JOIN {other} ON {t}.a = {u}.a", True),
        (f"{own} LEFT JOIN {other} ON {t}.a = {u}.a", True), (f"{own} RIGHT JOIN {other} ON {t}.a = {u}.a", True),
        (f"{own} FULL JOIN {other} ON {t}.a = {u}.a", True), (f"{own}, {other}", True),
        (f"{own} LEFT JOIN {other} ON {t}.a = {u}.a AND {u}.v > {t}.b * 5", True),
        (f"{own} RIGHT JOIN {other} ON {t}.a = {u}.a AND {u}.v > {t}.b * 5", True),
        (f"{own} LEFT JOIN eu AS {u} ON {t}.b = {u}.a", True),
        (f"{own} LEFT JOIN (SELECT * FROM u ORDER BY v DESC, w LIMIT 2) {u} ON {t}.a = {u}.a", True),
        (f"(SELECT * FROM t ORDER BY a, b LIMIT 3) {t} JOIN {other} ON {t}.a >= {u}.a", True),
        (f"{own} JOIN {other} ON {t}.a = {u}.a AND {t}.b < {u}.v", True),
        (f"{own} LEFT JOIN {other} ON {t}.b > {u}.a", True)))
    grammar = Grammar(random, with_u, t, u)
    conditions = [grammar.condition() for _ in range(random.randint(0, 2))]
    if random.random() < 0.4:
        conditions.append(grammar.subquery())
    where = f" WHERE {' AND '.join(conditions)}" if conditions else ""
    if random.random() < 0.5:
        keys = [grammar.integer(1) for _ in range(random.randint(0, 2))]
        keys = [key for key in keys if not key.strip("(- )").isdigit()]  # which are positions
        values = [f"{grammar.aggregate()} AS v{k}" for k in range(random.randint(1, 3))]
        listed = ", ".join([*(f"{key} AS k{k}" for k, key in enumerate(keys)), *values])
        group = f" GROUP BY {', '.join(random.choice((str(k + 1), key)) for k, key in enumerate(keys))}" if keys else ""
        having = " HAVING count(*) > 1" if random.random() < 0.3 else ""
        return f"SELECT {listed} FROM {source}{where}{group}{having}"
    columns = [random.choice((grammar.integer, grammar.condition, grammar.text))() for _ in range(random.randint(1, 3))]
    listed = ", ".join(f"{column} AS c{k}" for k, column in enumerate(columns))
    distinct = "DISTINCT " if random.random() < 0.2 else ""
    first = f"SELECT {distinct}{listed} FROM {source}{where}"
    if random.random() < 0.15:
        return f"{first} UNION{random.choice(('', ' ALL'))} {first}"
    return f"{first} ORDER BY ALL" if random.random() < 0.2 else first
