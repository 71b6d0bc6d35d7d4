"""From text to sqlglot's trees, and from a node of them back to its place in the text.

Trees are cached by text, and nobody changes one. What cannot be read is a `BadSql` that underlines the place.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import TypeVar

from sqlglot import exp
from sqlglot.errors import ErrorLevel, SqlglotError
from sqlglot.tokenizer_core import Token, TokenType

from scalein.errors import BadSql, ScaleinError, SourceLoc, guess
from scalein.sql import rewrites, unsupported
from scalein.sql.dialect import DIALECT, closing, rewritten, word

Error = TypeVar("Error", bound=ScaleinError)
Span = tuple[int, int]  # the first character, and the one after the last

_KEYWORDS = ("SELECT", "FROM", "WHERE", "GROUP", "ORDER", "HAVING", "LIMIT", "JOIN", "INNER", "LEFT", "RIGHT", "FULL",
             "CROSS", "UNION", "DISTINCT", "BETWEEN", "INTERVAL", "CASE", "WHEN", "THEN", "ELSE", "EXISTS", "QUALIFY",
             "CREATE", "INSERT", "EXPLAIN", "WITH", "PARTITION", "OFFSET", "USING")
_INDENT = " " * 9  # where the text of a fact begins


@dataclass(frozen=True, slots=True)
class Text:
    """The text that a user wrote, and where; it makes the errors about its parts."""

    text: str
    at: SourceLoc

    def error(self, kind: type[Error], what: str, where: exp.Expr | Span | None, hint: str | None = None,
              **facts: object) -> Error:
        """An error about a part of the text, which is shown underlined."""
        span = where if isinstance(where, tuple) else None if where is None else span_of(where)
        return kind(what, at=self.at, hint=hint, sql=None if span is None else self.shown(span), **facts)

    def shown(self, span: Span) -> str:
        """The line of a part of the text, with the part underlined."""
        start = min(span[0], len(self.text))
        before = self.text[:start]
        line, begin = before.count("\n") + 1, before.rfind("\n") + 1
        whole = self.text[begin:].split("\n", 1)[0].replace("\t", " ").rstrip("\r")
        column = start - begin + 1
        width = max(1, min(span[1], begin + len(whole)) - start)
        cut = max(0, column - 1 - 60)  # of long lines the part around
        shown = whole[cut : max(cut + 100, column - 1 + min(width, 60))]
        marks = "^" * max(1, min(width, len(shown) - (column - 1 - cut)))
        return (f"line {line}, column {column}\n{_INDENT}{'...' if cut else ''}{shown}\n"
                f"{_INDENT}{'   ' if cut else ''}{' ' * (column - 1 - cut)}{marks}")

    def of(self, node: exp.Expr) -> str:
        """What the user wrote for a node, on one line."""
        span = span_of(node)
        return "" if span is None else " ".join(_balanced(self.text, span).split())


    def items(self, node: exp.Expr) -> list[str] | None:
        """What the user wrote for each item of a SELECT, on one line; None where that cannot be made out."""
        anchor = next((found for each in node.expressions if each.find(exp.Query) is None
                       and (found := span_of(each)) is not None), None)
        if anchor is None:
            return None
        tokens = [token for statement in statements(self) for token in statement.tokens]
        at = next((k for k, token in enumerate(tokens) if token.start >= anchor[0]), 0)
        depth = 0
        while at and (depth or tokens[at].token_type is not TokenType.SELECT):
            at -= 1
            kind = tokens[at].token_type
            depth = depth + 1 if kind is TokenType.R_PAREN else max(0, depth - (kind is TokenType.L_PAREN))
        listed = _listed(tokens, at + 1)
        if tokens[at].token_type is not TokenType.SELECT or len(listed) != len(node.expressions):
            return None
        return [" ".join(self.text[first.start : last.end + 1].split()) for first, last in listed]


_ENDS = (TokenType.FROM, TokenType.WHERE, TokenType.GROUP_BY, TokenType.HAVING, TokenType.QUALIFY, TokenType.ORDER_BY,
         TokenType.LIMIT, TokenType.OFFSET, TokenType.UNION, TokenType.EXCEPT, TokenType.INTERSECT, TokenType.WINDOW,
         TokenType.FETCH, TokenType.SELECT)


def _listed(tokens: list[Token], at: int) -> list[tuple[Token, Token]]:
    """The first and the last token of each item after SELECT."""
    if at < len(tokens) and tokens[at].token_type in (TokenType.DISTINCT, TokenType.ALL):
        at += 1
        if word(tokens[at]) == "ON":
            at = closing(tokens, at + 1) + 1
    found: list[tuple[Token, Token]] = []
    depth, first, last = 0, None, None
    for k, token in enumerate(tokens[at:], at):
        kind = token.token_type
        is_end = kind in _ENDS and not (
            (kind is TokenType.FROM and tokens[k - 1].token_type is TokenType.DISTINCT)
            or (kind is TokenType.EXCEPT and tokens[k - 1].token_type is TokenType.STAR))
        if depth == 0 and (is_end or kind in (TokenType.COMMA, TokenType.R_PAREN)):
            if first is not None and last is not None:
                found.append((first, last))
            first = last = None
            if kind is not TokenType.COMMA:
                return found
            continue
        depth += (kind in (TokenType.L_PAREN, TokenType.L_BRACKET, TokenType.L_BRACE)) - (
            kind in (TokenType.R_PAREN, TokenType.R_BRACKET, TokenType.R_BRACE))
        first, last = first or token, token
    if first is not None and last is not None:
        found.append((first, last))
    return found


def span_of(node: exp.Expr) -> Span | None:
    """The part of the text that a node was read from."""
    least, most = None, None
    for each in node.walk():
        meta = each._meta
        if meta and "start" in meta:
            least = meta["start"] if least is None else min(least, meta["start"])
            most = meta["end"] + 1 if most is None else max(most, meta["end"] + 1)
    return None if least is None or most is None else (least, most)


def _balanced(text: str, span: Span) -> str:
    """The part of a text, with the parentheses that close those in it."""
    start, end = span
    depth = text.count("(", start, end) - text.count(")", start, end)
    if depth == 0 and re.match(r"\s*\(\s*\*?\s*\)", text[end:]):
        end += text[end:].index(")") + 1
    while depth > 0 and ")" in text[end:]:
        end += text[end:].index(")") + 1
        depth -= 1
    return text[start:end]


@dataclass(frozen=True, slots=True)
class Statement:
    """The tokens of one statement, as the parser takes them."""

    tokens: tuple[Token, ...]

    def starts(self, *words: str) -> bool:
        """Whether these are its first words."""
        return tuple(map(word, self.tokens[: len(words)])) == words

    @property
    def span(self) -> Span:
        return self.tokens[0].start, self.tokens[-1].end + 1


@lru_cache(maxsize=256)
def _statements(text: str) -> tuple[Statement, ...]:
    found: list[Statement] = []
    tokens: list[Token] = []
    for token in (*DIALECT.tokenize(text), None):
        if token is None or token.token_type is TokenType.SEMICOLON:
            if tokens:
                found.append(Statement(tuple(rewritten(tokens))))
            tokens = []
        else:
            tokens.append(token)
    return tuple(found)


def statements(source: Text) -> tuple[Statement, ...]:
    """The statements of a text."""
    try:
        return _statements(source.text)
    except SqlglotError as error:
        raise source.error(BadSql, "the SQL cannot be read", (0, len(source.text)), found=_first_line(error),
                           hint="a quote or a comment has no end, most likely") from None


_trees: dict[tuple[str, int], exp.Expr] = {}
_MAX_TREES = 512


def tree(source: Text, statement: Statement, first: int = 0) -> exp.Expr:
    """The tree of a statement, without its first tokens."""
    key = (source.text, statement.tokens[first].start) if len(statement.tokens) > first else None
    if key is not None and key in _trees:
        return _trees[key]
    found = parsed(source, list(statement.tokens[first:]))
    unsupported.check(source, found)
    found = rewrites.rewritten(found)
    if key is not None:
        while len(_trees) >= _MAX_TREES:
            _trees.pop(next(iter(_trees)), None)
        _trees[key] = found
    return found


def parsed(source: Text, tokens: list[Token]) -> exp.Expr:
    """The tree of some tokens."""
    if not tokens:
        raise source.error(BadSql, "there is no statement", (0, len(source.text)), hint="SELECT * FROM table")
    for first, second in pairwise(tokens):
        if first.token_type is second.token_type is TokenType.COMMA:
            raise source.error(BadSql, "the SQL cannot be read: something is missing between two commas",
                               (second.start, second.end + 1))
    try:
        (found,) = DIALECT.parser(error_level=ErrorLevel.IMMEDIATE).parse(tokens, source.text)
    except SqlglotError as error:
        raise _unreadable(source, tokens, error) from None
    if found is None:
        raise source.error(BadSql, "there is no statement", (0, len(source.text)))
    assert isinstance(found, exp.Expr)
    return found


@contextmanager
def not_too_deep(source: Text) -> Iterator[None]:
    """Where a query is nested deeper than Python can follow, an error that says so."""
    try:
        yield
    except RecursionError:
        raise source.error(BadSql, "the query is nested too deeply", (0, min(len(source.text), 60)),
                           hint="compute parts of it in WITH") from None


def _unreadable(source: Text, tokens: list[Token], error: SqlglotError) -> BadSql:
    """What the parser says, in words: where it stopped, what it met, and a word that is nearly a keyword."""
    about = next(iter(getattr(error, "errors", None) or [{}]))
    line, column, highlight = about.get("line"), about.get("col"), str(about.get("highlight") or "")
    stopped = next((k for k, token in enumerate(tokens) if (token.line, token.col) == (line, column)), len(tokens) - 1)
    token = tokens[stopped]
    span = (token.start, token.end + 1)
    said = str(about.get("description") or "")
    if match := re.match(r"Expecting (\S+)", said):
        what = f"the SQL cannot be read: {match[1]!r} is missing before {highlight or token.text!r}".replace('"', "'")
    elif "table name" in said:
        what = "the SQL cannot be read: a table is missing"
    elif match := re.match(r"Required keyword: '(\w+)' missing", said):
        what = f"the SQL cannot be read: something is missing at {token.text!r}"
    elif len(tokens) - 1 == stopped and stopped:
        what = f"the SQL cannot be read: it ends at {token.text!r}"
    else:
        what = f"the SQL cannot be read at {token.text!r}"
    return source.error(BadSql, what, span, hint=_keyword_near(tokens, stopped))


def _keyword_near(tokens: list[Token], stopped: int) -> str | None:
    for token in (*tokens[max(0, stopped - 3) : stopped + 1][::-1], tokens[0]):
        text = token.text.upper()
        if token.token_type is TokenType.VAR and text not in _KEYWORDS and len(text) > 2:
            close = guess(text, _KEYWORDS)
            if close is not None:
                return close
    return None


def _first_line(error: Exception) -> str:
    return re.sub(r"\x1b\[\d+m", "", str(error)).split("\n")[0]


def conjuncts(node: exp.Expr | None) -> Iterator[exp.Expr]:
    """The conditions that are joined by AND."""
    waiting = [] if node is None else [node]
    while waiting:
        each = waiting.pop()
        while isinstance(each, exp.Paren):
            each = each.this
        if isinstance(each, exp.And):
            waiting += [each.expression, each.this]
        else:
            yield each


def in_branches(node: exp.Expr) -> list[exp.Expr]:
    """The conditions that are joined by OR."""
    found, waiting = [], [node]
    while waiting:
        each = unwrapped(waiting.pop())
        if isinstance(each, exp.Or):
            waiting += [each.args["expression"], each.this]
        else:
            found.append(each)
    return found


def in_every_branch(node: exp.Expr) -> list[exp.Expr]:
    """The conditions that each branch of an OR has: they hold wherever it does, and may join tables."""
    first, *others = [list(conjuncts(each)) for each in in_branches(node)]
    return [each for each in first if all(each in other for other in others)] if others else []


def joined_by(kind: type[exp.And | exp.Or], nodes: Iterable[exp.Expr]) -> exp.Expr:
    """Copies of some conditions, joined by AND or OR."""
    first, *others = [exp.Paren(this=each.copy()) for each in nodes]
    found: exp.Expr = first
    for each in others:
        found = kind(this=found, expression=each)
    return found


def is_comparison(node: exp.Expr) -> bool:
    """Whether a condition compares one column with constants."""
    node = unwrapped(node)
    if not isinstance(node, exp.EQ | exp.LT | exp.LTE | exp.GT | exp.GTE | exp.Between | exp.In):
        return False
    sides = [unwrapped(each) for each in node.iter_expressions()]
    plain = [each for each in sides if not isinstance(each, exp.Column)]
    return len(plain) == len(sides) - 1 and not any(each.find(exp.Column, exp.Query, exp.Subquery) for each in plain)


def unwrapped(node: exp.Expr) -> exp.Expr:
    """The node without parentheses around it."""
    while isinstance(node, exp.Paren):
        node = node.this
    return node
