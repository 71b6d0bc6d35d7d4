"""The shell of `scalein sql`: statements that end with a semicolon, a history, and completion by the tab key.

Words that begin with a dot are commands of the shell; `.help` lists them.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from scalein import __version__
from scalein.api.flow import Flow
from scalein.cli.sql import Output, run_steps
from scalein.errors import NOWHERE, BadArgument, ScaleinError, guess

if TYPE_CHECKING:
    from scalein.sql.session import Session

PROMPT, MORE = "scalein> ", "    ...> "
HISTORY_LINES = 10_000
KEYWORDS = (
    "SELECT", "FROM", "WHERE", "GROUP BY", "HAVING", "ORDER BY", "LIMIT", "JOIN", "LEFT JOIN", "UNION ALL", "WITH",
    "AS",
    "ON", "USING", "AND", "OR", "NOT", "NULL", "IS", "IN", "BETWEEN", "LIKE", "CASE", "WHEN", "THEN", "ELSE", "END",
    "CAST",
    "DISTINCT", "INTERVAL", "DESC", "OVER", "PARTITION BY", "QUALIFY", "EXISTS", "CREATE VIEW", "CREATE TABLE",
    "INSERT INTO", "DROP VIEW", "EXPLAIN", "EXPLAIN ANALYZE", "DESCRIBE", "SHOW TABLES", "TUMBLE", "HOP", "SESSION",
    "CUMULATE", "DESCRIPTOR", "COUNT", "SUM", "AVG", "MIN", "MAX")  # fmt: skip


class Shell:
    """Reads statements and shows what they give, until the end of the input."""

    def __init__(self, session: Session, rows: int, workers: int) -> None:
        self._session, self._rows, self._workers = session, rows, workers
        self._timer = True
        self._commands: dict[str, tuple[str, Callable[[str], None]]] = {
            ".tables": ("list tables and views", lambda _: print("\n".join(session.names()) or "there are none")),
            ".schema": ("NAME: the columns of a table", self._schema),
            ".open": ("NAME=PATH: a file as a table", self._open),
            ".read": ("FILE: run the statements of a file", self._read),
            ".rows": ("N: how many rows are shown", self._set_rows),
            ".timer": ("on or off: show how long statements take", self._set_timer),
            ".help": ("list these commands", lambda _: self._help()),
            ".quit": ("leave; so do .exit and Ctrl-D", lambda _: None),
        }

    def run(self) -> int:
        """The loop; gives the exit code."""
        history = _history()
        self._use_readline(history)
        print(f"scalein {__version__}. Statements end with a semicolon; .help lists commands.")
        try:
            while (text := self._statement()) is not None:
                self.execute(text)
        finally:
            _save(history)
        return 0

    def execute(self, text: str) -> None:
        """Runs a statement or a command; an error is shown, and Ctrl-C ends what runs."""
        start_s = time.perf_counter()
        try:
            if text.startswith("."):
                self._command(text)
                return
            run_steps(self._session.steps(text), Output(None, self._rows, self._workers))
            if self._timer:
                print(f"{time.perf_counter() - start_s:.3f} s")
        except ScaleinError as error:
            print(error, file=sys.stderr)
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)

    def _statement(self) -> str | None:
        """The next statement or command; None at the end."""
        lines: list[str] = []
        while True:
            try:
                lines.append(input(MORE if lines else PROMPT))
            except EOFError:
                print()
                return None
            except KeyboardInterrupt:  # drops what was typed
                print()
                lines.clear()
                continue
            text = "\n".join(lines).strip()
            if text.rstrip(";").strip().lower() in ("quit", "exit", ".quit", ".exit"):
                return None
            if not text:
                lines.clear()
            elif text.startswith(".") or is_whole(text):
                return text

    def _command(self, text: str) -> None:
        name, _, rest = text.partition(" ")
        if name not in self._commands:
            raise BadArgument(f"the shell has no command {name}", has=" ".join(self._commands),
                              hint=guess(name, self._commands))
        self._commands[name][1](rest.strip().rstrip(";").strip())

    def _schema(self, name: str) -> None:
        if not name:
            raise BadArgument(".schema takes the name of a table", has=", ".join(self._session.names()))
        run_steps(self._session.steps(f'DESCRIBE "{name}"'), Output(None, self._rows, self._workers))

    def _open(self, text: str) -> None:
        name, equals, path = text.partition("=")
        if not equals or not name.strip().isidentifier():
            raise BadArgument(".open takes NAME=PATH", found=text, hint=".open events=events/*.parquet")
        from scalein.sql.inputs import as_op

        self._session.inputs.add(name.strip(), Flow(as_op(path.strip(), name.strip(), NOWHERE)))

    def _read(self, path: str) -> None:
        run_steps(self._session.steps(read_script(path), path), Output(None, self._rows, self._workers))

    def _set_rows(self, text: str) -> None:
        if not text.isdigit() or not int(text):
            raise BadArgument(".rows takes a number above 0", found=text or "nothing")
        self._rows = int(text)

    def _set_timer(self, text: str) -> None:
        if text not in ("on", "off"):
            raise BadArgument(".timer is on or off", found=text or "nothing")
        self._timer = text == "on"

    def _help(self) -> None:
        for name, (about, _) in self._commands.items():
            print(f"{name:<8}  {about}")

    # --- the line editor

    def _use_readline(self, history: Path) -> None:
        try:
            import readline
        except ImportError:  # Windows
            return
        if history.is_file():
            with suppress(OSError):
                readline.read_history_file(history)
        readline.set_history_length(HISTORY_LINES)
        readline.set_completer(self.complete)
        readline.set_completer_delims(" \t\n()=<>+-*/,;'\"")
        readline.parse_and_bind("tab: complete")

    def complete(self, begun: str, number: int) -> str | None:
        """The `number`th way to go on with a word: commands, tables, columns, keywords."""
        found = self.completions(begun)
        return found[number] if number < len(found) else None

    def completions(self, begun: str) -> list[str]:
        """All ways to go on with a word, in its case."""
        if begun.startswith("."):
            return [name for name in self._commands if name.startswith(begun)]
        table, dot, prefix = begun.rpartition(".")
        if dot:
            return [f"{table}.{name}" for name in self._session.columns(table) if name.startswith(prefix)]
        tables = self._session.names()
        names = [*tables, *(name for table in tables for name in self._session.columns(table))]
        lower = begun.lower()
        words = [word.lower() if begun.islower() else word for word in KEYWORDS if word.lower().startswith(lower)]
        return list(dict.fromkeys([*(name for name in names if name.lower().startswith(lower)), *words]))


def is_whole(text: str) -> bool:
    """Whether a statement ends here: with a semicolon, which is in no text, name or comment."""
    rest = re.sub(r"'(?:[^']|'')*'|\"[^\"]*\"|`[^`]*`|--[^\n]*|/\*.*?\*/", "", text, flags=re.DOTALL)
    return rest.rstrip().endswith(";") and not re.search(r"['\"`]|/\*", rest)


def read_script(path: str) -> str:
    """The text of a file of SQL."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadArgument(f"the file {path!r} cannot be read", found=error) from error


def _history() -> Path:
    return Path(os.environ.get("SCALEIN_HISTORY") or Path.home() / ".scalein_history")


def _save(history: Path) -> None:
    try:
        import readline

        readline.write_history_file(history)
    except (ImportError, OSError):  # a home that cannot be written to has no history
        pass
