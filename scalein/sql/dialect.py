"""The spelling of SQL that is read: DuckDB's, with Flink's windows and watermarks, as tokens for sqlglot's parser.

sqlglot's parser may be compiled (`sqlglot[c]`), and then has no subclasses. So what it does not know is rewritten
before it sees the tokens, which keep their places in the text:

    TABLE(TUMBLE(TABLE bid, DESCRIPTOR(ts), INTERVAL '10' SECOND))  ->  TUMBLE(bid, ts, INTERVAL '10' SECOND)
    SESSION(bid PARTITION BY bidder, ts, INTERVAL '5' SECOND)       ->  SESSION(bid, bidder, ts, INTERVAL '5' SECOND)
    table FOR SYSTEM_TIME AS OF x.proctime AS t                     ->  table AS t
"""

from __future__ import annotations

from sqlglot.dialects.duckdb import DuckDB
from sqlglot.tokenizer_core import Token, TokenType

WINDOW_FUNCTIONS = ("TUMBLE", "HOP", "SESSION", "CUMULATE")


class ScaleinSql(DuckDB):
    """DuckDB's dialect, where backticks quote names as well."""

    class Tokenizer(DuckDB.Tokenizer):
        IDENTIFIERS = ['"', "`"]  # noqa: RUF012  # sqlglot reads a plain list


DIALECT = ScaleinSql()


def rewritten(tokens: list[Token]) -> list[Token]:
    """The tokens of a statement in the spelling that the parser knows."""
    return _window_functions(_without_system_time(tokens))


def word(token: Token) -> str:
    """What a token says, without regard to case; empty for a quoted name or a text."""
    return "" if token.token_type in (TokenType.IDENTIFIER, TokenType.STRING) else token.text.upper()


def closing(tokens: list[Token], start: int) -> int:
    """The position of the parenthesis that closes the one at `start`; of the last token, if none does."""
    depth = 0
    for at in range(start, len(tokens)):
        if tokens[at].token_type is TokenType.L_PAREN:
            depth += 1
        elif tokens[at].token_type is TokenType.R_PAREN:
            depth -= 1
            if depth == 0:
                return at
    return len(tokens) - 1


def _without_system_time(tokens: list[Token]) -> list[Token]:
    """A lookup join at processing time is a join with a table that is read first, as joins with tables are."""
    found: list[Token] = []
    at = 0
    while at < len(tokens):
        if [word(each) for each in tokens[at : at + 4]] == ["FOR", "SYSTEM_TIME", "AS", "OF"]:
            at += 5
            while at + 1 < len(tokens) and tokens[at].token_type is TokenType.DOT:
                at += 2
            if at < len(tokens) and tokens[at].token_type is TokenType.L_PAREN:
                at = closing(tokens, at) + 1
            continue
        found.append(tokens[at])
        at += 1
    return found


def _window_functions(tokens: list[Token]) -> list[Token]:
    """Flink's windows over tables as plain calls; the keys of sessions as further arguments."""
    found: list[Token] = []
    at = 0
    while at < len(tokens):
        is_call = at + 1 < len(tokens) and tokens[at + 1].token_type is TokenType.L_PAREN
        is_wrapped = is_call and word(tokens[at]) == "TABLE" and at + 3 < len(tokens) and (
            word(tokens[at + 2]) in WINDOW_FUNCTIONS and tokens[at + 3].token_type is TokenType.L_PAREN)
        if is_wrapped:
            end = closing(tokens, at + 1)
            found += _window_functions(tokens[at + 2 : end])
            at = end + 1
        elif is_call and word(tokens[at]) in WINDOW_FUNCTIONS:
            end = closing(tokens, at + 1)
            found += [_as(TokenType.VAR, tokens[at]), tokens[at + 1], *_arguments(tokens[at + 2 : end]), tokens[end]]
            at = end + 1
        else:  # a keyword that is called is Spark's window(ts, '10 minutes')
            is_window = is_call and tokens[at].token_type is TokenType.WINDOW
            found.append(_as(TokenType.VAR, tokens[at]) if is_window else tokens[at])
            at += 1
    return found


def _arguments(tokens: list[Token]) -> list[Token]:
    found: list[Token] = []
    at = 0
    while at < len(tokens):
        token, following = tokens[at], word(tokens[at + 1]) if at + 1 < len(tokens) else ""
        if word(token) == "TABLE":
            at += 1
        elif word(token) == "DESCRIPTOR" and following == "(":
            end = closing(tokens, at + 1)
            found += tokens[at + 2 : end]
            at = end + 1
        elif word(token) == "PARTITION_BY" or token.token_type is TokenType.PARTITION_BY:
            found.append(_as(TokenType.COMMA, token, ","))
            at += 1
        elif token.token_type is TokenType.L_PAREN:  # a subquery may have windows of its own
            end = closing(tokens, at)
            found += [token, *_window_functions(tokens[at + 1 : end]), tokens[end]]
            at = end + 1
        else:
            found.append(token)
            at += 1
    return found


def _as(kind: TokenType, token: Token, text: str = "") -> Token:
    """Another token at the same place."""
    return Token(kind, text or token.text, token.line, token.col, token.start, token.end)
