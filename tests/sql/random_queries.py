"""Random queries over the tables of `test_queries`, in what DuckDB and we both read: a grammar, by descent."""

from __future__ import annotations

from random import Random

INTEGERS, TEXTS, FLOATS, BOOLS = ("t.a", "t.b"), ("t.s",), ("t.f",), ("t.k",)


class Grammar:
    """Expressions over the columns that FROM has."""

    def __init__(self, random: Random, with_u: bool) -> None:
        self.random = random
        self.integers = (*INTEGERS, "u.v", "u.a") if with_u else INTEGERS
        self.texts = (*TEXTS, "u.w") if with_u else TEXTS

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
        if depth == 0 or self.random.random() < 0.5:
            return self.random.choice((
                f"{self.integer(0)} {self.random.choice(('<', '<=', '>', '>=', '=', '<>'))} {self.integer(1)}",
                f"{self.integer(0)} IS NULL", f"{self.random.choice(self.texts)} LIKE '{self.pattern()}'",
                f"{self.integer(0)} IN (1, 2, {self.random.choice(('3', 'NULL'))})", "t.k", "t.f > 1",
                f"{self.integer(0)} NOT IN (1, {self.random.choice(('5', 'NULL'))})",
                f"{self.integer(0)} BETWEEN {self.random.randint(-8, 2)} AND {self.random.randint(2, 9)}",
                f"{self.integer(0)} IS DISTINCT FROM {self.integer(0)}", "t.ts >= '2020-01-01'", "t.d <= t.ts"))
        one, other = self.condition(depth - 1), self.condition(depth - 1)
        return self.random.choice((f"({one} AND {other})", f"({one} OR {other})", f"(NOT {one})"))

    def pattern(self) -> str:
        return self.random.choice(("x%", "%z", "%y%", "_", "x_z", "%", "", "x"))

    def subquery(self) -> str:
        """A condition with a subquery."""
        column, inner = self.random.choice(INTEGERS), self.random.choice(("u", "eu"))
        where = self.random.choice(("", " WHERE i.v > 15", " WHERE i.a IS NOT NULL", " WHERE i.w = 'p'"))
        link = f"{where + ' AND' if where else ' WHERE'} i.a = {column}"
        more = self.random.choice(("", " AND i.v > t.b * 6", " AND i.v <> t.a"))
        negated = self.random.choice(("", "NOT "))
        return self.random.choice((
            f"{negated}EXISTS (SELECT 1 FROM {inner} i{link}{more})",
            f"{column} {negated}IN (SELECT i.a FROM {inner} i{where})",
            f"{column} > (SELECT min(i.a) FROM {inner} i{where})",
            f"{column} < (SELECT sum(i.v) FROM {inner} i{link})",
            f"({column} {negated}IN (SELECT i.a FROM {inner} i{where}) OR {self.condition(1)})"))

    def aggregate(self) -> str:
        arg = self.integer(1)
        where = f" FILTER (WHERE {self.condition(1)})" if self.random.random() < 0.3 else ""
        name = self.random.choice(("sum", "min", "max", "avg", "count"))
        return self.random.choice((f"{name}({arg}){where}", f"count(*){where}", f"count(DISTINCT {arg})",
                                   f"max({self.random.choice(self.texts)})", f"(sum({arg}) - min({arg}) + 1)"))


def random_query(random: Random) -> str:
    """A query; it has a result that does not depend on an order that DuckDB leaves open."""
    source, with_u = random.choice((
        ("t", False), ("e AS t", False), ("t JOIN u ON t.a = u.a", True), ("t LEFT JOIN u ON t.a = u.a", True),
        ("t RIGHT JOIN u ON t.a = u.a", True), ("t FULL JOIN u ON t.a = u.a", True), ("t, u", True),
        ("t LEFT JOIN u ON t.a = u.a AND u.v > t.b * 5", True), ("t LEFT JOIN eu AS u ON t.b = u.a", True),
        ("t JOIN u ON t.a = u.a AND t.b < u.v", True), ("t LEFT JOIN u ON t.b > u.a", True)))
    grammar = Grammar(random, with_u)
    conditions = [grammar.condition() for _ in range(random.randint(0, 2))]
    if random.random() < 0.4:
        conditions.append(grammar.subquery())
    where = f" WHERE {' AND '.join(conditions)}" if conditions else ""
    if random.random() < 0.5:
        keys = [grammar.integer(1) for _ in range(random.randint(0, 2))]
        keys = [key for key in keys if not key.lstrip("-").isdigit()]
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
