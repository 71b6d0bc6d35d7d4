"""Every error a user can see: one sentence in the user's words, then aligned facts, then a hint.

    UnknownColumn: no column 'pric' in the input of filter
      at     report.py:12
      has    price: f64?, qty: i64?
      hint   did you mean 'price'?

Errors are raised where the user called, before anything compiles. A bug in scalein is an
`InternalError`; please report its text.
"""

from __future__ import annotations

import os
import re
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from types import CodeType, FrameType
from typing import Self, TypeVar

_PACKAGE = os.path.dirname(os.path.abspath(__file__)) + os.sep
_LIBRARY = os.path.dirname(os.path.abspath(os.__file__)) + os.sep  # Python's own
_INSTALLED = re.compile(r"[/\\](site|dist)-packages[/\\](?P<package>\w+)")
_CALLERS = frozenset({"IPython", "_pytest", "cloudpickle", "dask", "distributed", "hypothesis", "ipykernel", "joblib",
                      "pandas", "pluggy", "polars", "pyspark", "ray", "tornado", "tqdm"})


@dataclass(frozen=True, slots=True)
class SourceLoc:
    """Where the user wrote a step: the innermost line outside this package."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{_shown_file(self.file)}:{self.line}" if self.line else "unknown place"


def _shown_file(path: str) -> str:
    """The name of a file; of a notebook's cell, its number, by which the user knows it."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    name = None if shell is None else shell.compile.format_code_name(path)
    return os.path.basename(path) if name is None else " ".join(name)


NOWHERE = SourceLoc("", 0)
NO_PERMISSION = "the user that runs this has no permission for it"


def here(other: SourceLoc = NOWHERE) -> SourceLoc:
    """The user's line: the innermost one outside scalein, the standard library and packages that call for others.

    A thread that scalein or a pool started may have none: then it is `other`. What it raises gets the line of the
    call, the source or the job that it works for (`ScaleinError.locate`).
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if is_users_code(frame.f_code):
            return SourceLoc(frame.f_code.co_filename, frame.f_lineno)
        frame = frame.f_back
    return other


def is_users_code(code: CodeType) -> bool:
    """Whether a user wrote it. Methods that dataclasses generate are in `<string>`, as is the program of `python -c`.
    """
    return _is_users(code.co_filename) and not code.co_qualname.startswith("__create_fn__.")


@cache
def _is_users(file: str) -> bool:
    """Whether a user wrote what is in this file; an installed application is a user's as well."""
    if file.startswith((_PACKAGE, "<frozen ")):
        return False
    installed = _INSTALLED.search(file)
    return installed["package"] not in _CALLERS if installed else not file.startswith(_LIBRARY)


def warn(text: str, at: SourceLoc = NOWHERE) -> None:
    """A `RuntimeWarning` at the user's line: that of the call, or `at` in a thread that has none.

    Python shows it once for a line; each goes to `logging` too, to the logger of the module that calls.
    """
    import logging  # few programs are warned

    logger = logging.getLogger("scalein")
    if not logger.handlers:
        logger.addHandler(logging.NullHandler())  # else what nobody handles is printed
    logging.getLogger(sys._getframe(1).f_globals["__name__"]).warning("%s", text)
    at = here(at)
    warnings.warn_explicit(text, RuntimeWarning, at.file or "scalein", at.line)


class ShortTraceback:
    """Errors of the user's that leave this have a traceback that ends at the user's line, with no frame of scalein.

    It stands in the function that the user calls: Python adds no frame to an error that it raises again.
    """

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, ScaleinError) and not isinstance(error, InternalError):
            error.__traceback__ = error.__cause__ = None
            error.__suppress_context__ = True


Kind = TypeVar("Kind", bound="ScaleinError")


class ScaleinError(Exception):
    """The base of every error that scalein raises on purpose.

    `what` is one sentence; `facts` are shown below it, aligned, empty ones left out.
    """

    def __init__(self, what: str, *, at: SourceLoc | None = None, hint: str | None = None, **facts: object) -> None:
        self.what = what
        self.hint = hint
        self.facts: dict[str, str] = {}
        if at is not None and at.line:
            self.facts["at"] = str(at)
        self.facts.update({name: str(fact) for name, fact in facts.items() if fact not in (None, "")})
        if hint:
            self.facts["hint"] = hint
        super().__init__(_text(what, self.facts))

    def locate(self, at: SourceLoc) -> None:
        """Give it a line, if it has none."""
        if at.line and "at" not in self.facts:
            self.facts = {"at": str(at), **self.facts}
            self.args = (_text(self.what, self.facts),)

    def add(self, name: str, fact: object) -> None:
        """Add a fact, before the hint; or the hint."""
        self.hint = str(fact) if name == "hint" else self.hint
        hint = {"hint": self.hint} if self.hint else {}
        self.facts = {**{each: text for each, text in self.facts.items() if each != "hint"}, name: str(fact), **hint}
        self.args = (_text(self.what, self.facts),)

    def saying(self, what: str) -> Self:
        """The same error with another sentence."""
        return _rebuild(type(self), what + str(self).removeprefix(self.what), what, self.hint, self.facts)

    def __reduce__(self) -> tuple[object, ...]:
        # Errors cross process borders (Spark); rebuild from the finished text.
        return (_rebuild, (type(self), self.args[0], self.what, self.hint, self.facts))


@contextmanager
def locating(at: SourceLoc) -> Iterator[None]:
    """Errors raised inside have a line: this one, if none is known better."""
    try:
        yield
    except ScaleinError as error:
        error.locate(at)
        raise


def reported(error: BaseException, at: SourceLoc) -> BaseException:
    """What a user sees of an exception that ended a run: an error of scalein's with a line, or the exception itself."""
    match error:
        case ScaleinError():
            error.locate(at)
        case UnicodeEncodeError():
            return BadArgument("a path or a text has characters that UTF-8 cannot hold", at=at, found=error)
        case UnicodeError():
            return BadData("a text column has bytes that are not valid UTF-8", at=at, found=error,
                           hint="read the column as binary, or repair it where it is made")
        case OSError():
            return StoreFailed("a file or folder cannot be used", at=at, file=error.filename, found=error)
    return error


def _text(what: str, facts: dict[str, str]) -> str:
    text = "\n".join([what, *(f"  {name:<6} {fact}" for name, fact in facts.items())])
    # Paths may have surrogates, in place of bytes that are not UTF-8: an error must be printable.
    return text if text.isascii() else text.encode(errors="backslashreplace").decode()


def _rebuild(kind: type[Kind], text: str, what: str, hint: str | None, facts: dict[str, str]) -> Kind:
    error = kind.__new__(kind, text)
    error.args, error.what, error.hint, error.facts = (text,), what, hint, facts
    return error


def guess(name: str, among: Iterable[str]) -> str | None:
    """A hint for a mistyped name, or None when nothing is close."""
    from difflib import get_close_matches

    close = get_close_matches(name, list(among), n=1)
    return f"did you mean {close[0]!r}?" if close else None


def type_name(value: object) -> str:
    """The type of a user's object and where it is from: "int", "pandas.DataFrame", "pyspark.Column"."""
    kind = type(value)
    package = kind.__module__.partition(".")[0]
    return kind.__name__ if package in ("builtins", "__main__") else f"{package}.{kind.__name__}"


class UnknownColumn(ScaleinError):
    """An expression names a column that its input doesn't have."""


class WrongType(ScaleinError):
    """An expression, step or table has a type that cannot be used there."""


class BadName(ScaleinError):
    """Output names clash, are missing, or are ambiguous."""


class BadArgument(ScaleinError):
    """An argument of a call is not one that it takes."""


class BadSql(ScaleinError):
    """SQL that cannot be read, or that asks for what is not supported; the place is underlined."""


class BadDuration(ScaleinError):
    """A duration that cannot be read, is negative, or does not fit the time column."""


class BadData(ScaleinError):
    """Input that is no Arrow, changes its schema midway, or raises while it is read."""


class WriteFailed(ScaleinError):
    """Output that could not be written or made visible: no room, no right, or a user's function that raised."""


class CannotCompile(ScaleinError):
    """A part of a Python function that `@si.udf` has no machine code for."""


class ComputeError(ScaleinError):
    """A live row for which an expression has no value: overflow, division by zero, impossible cast."""

    _REMEDIES = (  # patterns, which are compiled when an error is raised
        (r"impossible cast(?=.*\.cast\()", "try_cast gives null instead"),
        ("text that is no such time", "try_strptime gives null instead"),
        ("integer overflow in the sum",
         "cast to a wider type first, such as pa.decimal128(38, 0) or pa.float64()"),
        (r"(integer|decimal) overflow in `.*\.cast\([^()]*\)`",
         "cast it first: try_cast gives null instead"),
        ("integer overflow in `",
         "cast to a wider type first, or use try_add, try_sub or try_mul, which give null instead"),
        ("division by zero in `", "try_floordiv and try_mod give null instead"),
        ("bytes that are not valid UTF-8", "read the column as binary, or repair it where it is made"),
    )

    def __init__(self, what: str, *, at: SourceLoc | None = None, hint: str | None = None, **facts: object) -> None:
        if hint is None:
            hint = next((remedy for failure, remedy in self._REMEDIES if re.match(failure, what)), None)
        super().__init__(what, at=at, hint=hint, **facts)


class StoreFailed(ScaleinError):
    """A store's directory or one of its files could not be opened, read, written or locked."""


class Fenced(StoreFailed):
    """A later run has taken over a checkpoint or an output folder: this one may not publish any more."""


class Damaged(ScaleinError):
    """A file of a store does not hold what was written to it."""


class LateData(ScaleinError):
    """A row came after all of its windows were closed, and the job was started with late="error"."""


class NewerFormat(ScaleinError):
    """A file of a store is whole, but of a format that only a newer scalein reads."""


class InternalError(ScaleinError):
    """A bug of scalein's, found by its own checks."""
