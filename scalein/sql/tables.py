"""CREATE TABLE: columns, a watermark, and the connector that rows come from or go to, in Flink's spelling.

The parser of sqlglot knows neither watermarks nor computed columns, so the statement is read from its tokens; types and
expressions are read by the parser again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from glob import glob
from typing import TYPE_CHECKING

import pyarrow as pa
from sqlglot import exp
from sqlglot.errors import SqlglotError
from sqlglot.tokenizer_core import Token, TokenType

from scalein.api import sinks, sources
from scalein.api.flow import Flow
from scalein.durations import span
from scalein.errors import NOWHERE, BadSql, ScaleinError, guess
from scalein.sql.dialect import DIALECT, closing, word
from scalein.sql.exprs import type_named
from scalein.sql.parse import Span, Statement, Text

if TYPE_CHECKING:
    from scalein.connectors.base import Sink

Options = dict[str, str]
Maker = Callable[["Table"], Flow]

_FORMATS = {"parquet": "parquet", "csv": "csv", "json": "json", "arrow": "ipc", "ipc": "ipc", "feather": "ipc"}
_OPENING = (TokenType.L_PAREN, TokenType.LT)
_CLOSING = (TokenType.R_PAREN, TokenType.GT)
SINKS = ("filesystem", "print", "blackhole")


@dataclass
class Table:
    """A table that a script declares; it is a source where a query reads it, and a sink where INSERT writes to it."""

    name: str
    columns: dict[str, pa.DataType] = field(default_factory=dict)
    computed: dict[str, str] = field(default_factory=dict)  # columns that are expressions over the others
    watermark: tuple[str, str] | None = None  # the time column, and the delay
    partitions: tuple[str, ...] = ()
    options: Options = field(default_factory=dict)
    source: Text = field(default_factory=lambda: Text("", NOWHERE))
    place: Span = (0, 0)

    @property
    def schema(self) -> pa.Schema | None:
        return pa.schema(list(self.columns.items())) if self.columns else None

    def error(self, what: str, hint: str | None = None, **facts: object) -> BadSql:
        return self.source.error(BadSql, what, self.place, hint=hint, **facts)

    def option(self, name: str) -> str:
        """An option that must be there."""
        if name not in self.options:
            raise self.error(f"the table {self.name!r} has no option {name!r}", has=", ".join(self.options))
        return self.options[name]

    @property
    def path(self) -> str:
        """Where the files are."""
        return self.option("path").removeprefix("file://")

    @property
    def connector(self) -> str:
        return self.option("connector").lower()

    @property
    def is_there(self) -> bool:
        """Whether there is something to read: of files, their folder or one that matches."""
        return self.connector != "filesystem" or bool(glob(self.path))

    def flow(self, makers: Mapping[str, Maker]) -> Flow:
        """The rows of the table, before computed columns and the watermark."""
        made = {"filesystem": _files, **makers}
        if self.connector not in made:
            raise self.error(f"no rows come from the connector {self.connector!r}", has=", ".join(made),
                             hint=guess(self.connector, made))
        try:
            return made[self.connector](self)
        except BadSql:
            raise
        except ScaleinError as error:
            if "sql" not in error.facts:
                error.add("sql", self.source.shown(self.place))
            raise

    def sink(self) -> Sink:
        """Where INSERT INTO writes."""
        if self.connector == "print":
            return sinks.to_console()
        if self.connector == "blackhole":
            return sinks.to_callback(_discard)
        if self.connector != "filesystem":
            raise self.error(f"INSERT cannot write to the connector {self.connector!r}", has=", ".join(SINKS),
                             hint=guess(self.connector, SINKS))
        made: Sink = getattr(sinks, f"to_{_format(self)}")(self.path,
                                                           partition_by=list(self.partitions) or None)
        return made


def declared(source: Text, statement: Statement) -> Table:
    """The table that CREATE TABLE ... WITH (...) declares."""
    reader = _Reader(source, list(statement.tokens))
    reader.skip("CREATE")
    if reader.sees("TEMPORARY"):
        reader.skip("TEMPORARY")
    reader.skip("TABLE")
    for each in ("IF", "NOT", "EXISTS"):
        if reader.sees(each):
            reader.skip(each)
    start = reader.at
    table = Table(reader.name(), source=source, place=reader.place(start))
    if reader.sees("("):
        for part in reader.parts():
            _column(source, part, table)
    if reader.sees("PARTITIONED BY") or reader.sees("PARTITIONED"):  # one token or two
        reader.at += 1 if reader.sees("PARTITIONED BY") else 2
        table.partitions = tuple(part[0].text for part in reader.parts())
    if not reader.sees("WITH"):
        raise source.error(BadSql, "CREATE TABLE says where the rows are: WITH ('connector' = ...)", statement.span,
                           hint="WITH ('connector' = 'filesystem', 'path' = 'events/', 'format' = 'parquet')")
    reader.skip("WITH")
    for part in reader.parts():
        key, value = part[0], part[-1]
        if len(part) != 3 or part[1].token_type is not TokenType.EQ:
            raise source.error(BadSql, "an option is 'name' = 'value'", (key.start, value.end + 1))
        table.options[key.text.lower()] = value.text
    table.option("connector")
    return table


def _column(source: Text, tokens: list[Token], table: Table) -> None:
    """One entry in the list of columns."""
    first, place = word(tokens[0]), (tokens[0].start, tokens[-1].end + 1)
    if first == "WATERMARK" and len(tokens) > 2 and word(tokens[1]) == "FOR":
        table.watermark = tokens[2].text, _delay(source, tokens[3:], place)
    elif first in ("PRIMARY", "CONSTRAINT", "UNIQUE"):  # nobody enforces it, as in Flink
        return
    elif len(tokens) < 2:
        raise source.error(BadSql, f"the column {tokens[0].text!r} has no type", place)
    elif word(tokens[1]) == "AS":
        table.computed[tokens[0].text] = source.text[tokens[2].start : tokens[-1].end + 1]
    else:
        end = next((at for at in range(2, len(tokens)) if word(tokens[at]) in ("NOT", "NULL", "COMMENT", "PRIMARY",
                                                                             "METADATA")), len(tokens))
        table.columns[tokens[0].text] = _type(source, tokens[1:end])


def _delay(source: Text, tokens: list[Token], place: Span) -> str:
    """The delay of `AS ts - INTERVAL '4' SECOND`, as text; without the interval there is none."""
    at = next((at for at, token in enumerate(tokens) if word(token) == "INTERVAL"), None)
    if at is None and len(tokens) == 2:
        return "0s"
    if at is None or len(tokens) != at + 3:
        raise source.error(BadSql, "a watermark is a column less an interval", place,
                           hint="WATERMARK FOR ts AS ts - INTERVAL '4' SECOND")
    text = f"{tokens[at + 1].text} {tokens[at + 2].text.lower()}"
    try:
        span(text, "delay of a watermark", source.at, zero=True)
    except ScaleinError:
        raise source.error(BadSql, f"{text!r} is no interval", (tokens[at].start, tokens[-1].end + 1)) from None
    return text


def _type(source: Text, tokens: list[Token]) -> pa.DataType:
    """The Arrow type that some tokens name; ROW<a BIGINT, ...> is a struct."""
    place = (tokens[0].start, tokens[-1].end + 1)
    if word(tokens[0]) in ("ROW", "STRUCT") and len(tokens) > 2:
        return pa.struct([(part[0].text, _type(source, part[1:])) for part in _parts(tokens[2:-1])])
    if word(tokens[0]) == "ARRAY" and len(tokens) > 2:
        return pa.list_(_type(source, tokens[2:-1]))
    text = source.text[place[0] : place[1]]
    text = "VARCHAR" if text.upper() == "STRING" else text
    try:
        (cast,) = DIALECT.parse(f"CAST(NULL AS {text})")
    except SqlglotError:
        raise source.error(BadSql, f"there is no type {text}", place) from None
    node = cast.args.get("to") if isinstance(cast, exp.Cast) else None
    if node is None:
        raise source.error(BadSql, f"there is no type {text}", place)
    try:
        arrow: pa.DataType = type_named(source, node).arrow
    except BadSql as error:
        raise source.error(BadSql, error.what, place) from None
    return arrow


@dataclass
class _Reader:
    """The tokens of a statement, one after the other."""

    source: Text
    tokens: list[Token]
    at: int = 0

    def sees(self, text: str) -> bool:
        return self.at < len(self.tokens) and (word(self.tokens[self.at]) == text or self.tokens[self.at].text == text)

    def skip(self, text: str) -> None:
        if not self.sees(text):
            last = self.tokens[min(self.at, len(self.tokens) - 1)]
            raise self.source.error(BadSql, f"the SQL cannot be read: {text} is missing", (last.start, last.end + 1))
        self.at += 1

    def name(self) -> str:
        self.at += 1
        return self.tokens[self.at - 1].text if self.at <= len(self.tokens) else ""

    def place(self, start: int) -> Span:
        token = self.tokens[min(start, len(self.tokens) - 1)]
        return token.start, token.end + 1

    def parts(self) -> Iterator[list[Token]]:
        """What stands in the parentheses that open here, cut at commas."""
        self.skip("(")
        end = closing(self.tokens, self.at - 1)
        inside, self.at = self.tokens[self.at : end], end + 1
        return _parts(inside)


def _parts(tokens: list[Token]) -> Iterator[list[Token]]:
    """Tokens cut at the commas that are in no parentheses."""
    depth, part = 0, list[Token]()
    for token in tokens:
        depth += (token.token_type in _OPENING) - (token.token_type in _CLOSING)
        if token.token_type is TokenType.COMMA and not depth:
            yield part
            part = []
        else:
            part.append(token)
    if part:
        yield part


def _format(table: Table) -> str:
    given = table.options.get("format", table.path.rsplit(".", 1)[-1]).lower()
    if given not in _FORMATS:
        raise table.error(f"there is no format {given!r}", has=", ".join(_FORMATS), hint=guess(given, _FORMATS))
    return _FORMATS[given]


def _files(table: Table) -> Flow:
    path, kind = table.path, _format(table)
    flow: Flow = getattr(sources, f"read_{kind}")(path, schema=table.schema)
    return flow


def _discard(batch: pa.RecordBatch) -> None:
    """Where the rows of a blackhole go."""
