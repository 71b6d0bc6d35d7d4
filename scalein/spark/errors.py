"""Errors of Spark, translated: one sentence and a remedy where Spark has a stack trace of the JVM.

An error inside a Python worker reaches the driver as text: Python's traceback, wrapped in the JVM's. A ScaleinError is
found in it by its class name and raised again as what it was, with all its facts; where an executor cannot run flows
(another Python, a missing package), the error names the remedy. Errors that are not known here pass unchanged.

`translate_errors()` wraps each action that scalein itself runs: `start`, `doctor`, the reads of `run` and `apply`. A
DataFrame that `apply` or `run` returned is lazy: its action is the user's, and so are the error and its class, a
PythonException of pyspark; scalein's sentence stands at the end of its Python traceback, and `explain_error(error)`
extracts it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import unquote

import scalein.errors
from scalein.errors import NO_PERMISSION, BadData, ScaleinError, _rebuild


class SparkFailed(ScaleinError):
    """Spark, its Java, or the Python of an executor cannot run a flow."""


@contextmanager
def translate_errors() -> Iterator[None]:
    """Raise known errors of Spark as a ScaleinError, whose `__context__` is Spark's own error."""
    try:
        yield
    except ScaleinError:
        raise
    except Exception as error:
        ours = explain_error(error)
        if ours is None:
            raise
        raise ours from None


def explain_error(error: BaseException) -> ScaleinError | None:
    """The ScaleinError for an error of Spark's; None if it is not known."""
    if isinstance(error, ScaleinError):
        return error
    text = str(error)
    return _raised_in_worker(text) or _unreadable_file(text) or _out_of_memory(text) or _unusable_executor(text)


def explain_jvm_error(error: BaseException) -> ScaleinError | None:
    """The ScaleinError for any exception of the JVM, in its own words; None for other errors."""
    found = jvm_exception(error)
    return None if found is None else explain_error(error) or SparkFailed("Spark failed", found=found)


def jvm_exception(error: BaseException) -> str | None:
    """The innermost cause of an exception of the JVM, as one line; None for other errors."""
    thrown = getattr(error, "java_exception", None)
    if thrown is None:
        return None
    while (cause := thrown.getCause()) is not None:
        thrown = cause
    return str(thrown.toString()).strip().partition("\n")[0]


# --- files that Spark cannot read

_FILE = re.compile(r"\[FAILED_READ_FILE\.(\w+)\] Encountered error while reading file (\S+?)[.:]*\s")
_CAUSE = re.compile(r"^Caused by: (.*)$", re.MULTILINE)
_MISMATCH = re.compile(r"reading Parquet column \[(.*?)\]\. Expected Spark type (.*?), actual Parquet type (.*?)\. ")


def _unreadable_file(text: str) -> BadData | None:
    found = _FILE.search(text)
    if found is None:
        return None
    path = unquote(re.sub(r"^file:(?://)?(?=/)", "", found[2]))
    causes = _CAUSE.findall(text[found.end():])
    if found[1] == "FILE_NOT_EXIST":
        return BadData(f"the file {path} is gone", hint="bring it back, or set spark.sql.files.ignoreMissingFiles")
    if mismatch := _MISMATCH.search(text, found.start()):
        return BadData(f"column {mismatch[1]!r} of {path} is {mismatch[3]}, not {mismatch[2]}",
                       hint="the DataFrame's schema has the types of all its files: cast the column afterwards, or "
                            "write the file again")
    if "is not a Parquet file" in text[found.end():]:
        return BadData(f"{path} is not a Parquet file", found=causes[-1] if causes else None,
                       hint="move it out of the folder, or read it with its own format")
    if "Permission denied" in text[found.end():]:
        return BadData(f"Spark cannot read the file {path}", found=causes[-1] if causes else None, hint=NO_PERMISSION)
    return BadData(f"Spark cannot read the file {path}", found=causes[-1] if causes else None,
                   hint="remove the file, or replace it by a good copy; spark.sql.files.ignoreCorruptFiles=true skips "
                        "such files")


# --- ScaleinErrors raised in a Python worker

_SCALEIN_ERROR = re.compile(r"^(?:\w+Exception: )?scalein(?:\.\w+)*\.(\w+): (.*)$", re.MULTILINE)
_FACT = re.compile(r"  (\w+) +(\S.*)")
_STACK_TRACE = ("\tat ", "Driver stacktrace", "JVM stacktrace", "Caused by:", "The above exception", "During handling")


def _raised_in_worker(text: str) -> ScaleinError | None:
    """The last ScaleinError in the text: a chain of Python errors ends with the one that left the worker."""
    matches = list(_SCALEIN_ERROR.finditer(text))
    if not matches:
        return None
    found = matches[-1]
    cls: type[ScaleinError] = getattr(scalein.errors, found[1], SparkFailed)
    lines, facts, name = [found[2]], dict[str, str](), ""
    for line in text[found.end() + 1 :].splitlines():
        if not line.strip() or line.startswith(_STACK_TRACE):
            break
        lines.append(line)
        fact = _FACT.fullmatch(line)
        if fact is not None:
            name = fact[1]
            facts[name] = fact[2]
        elif name:
            facts[name] += "\n" + line
    return _rebuild(cls, "\n".join(lines), found[2], facts.get("hint"), facts)


# --- memory

_LIMIT = "spark.executor.pyspark.memory"
_NO_MEMORY = re.compile(r"^(?:[\w.]+\.)?(?:MemoryError|ArrowMemoryError)\b|LLVM ERROR: out of memory|"
                        r"(?i:cannot allocate memory)|can't start new thread|Python worker exited unexpectedly|"
                        r"failed to map segment from shared object|Could not find/load shared object", re.MULTILINE)


def _out_of_memory(text: str) -> SparkFailed | None:
    """Of a Python worker whose address space has a limit: it may end without a message, or fail to load a library."""
    limit = _python_memory_limit()
    if limit is None or not _NO_MEMORY.search(text):
        return None
    return SparkFailed(f"a Python worker of Spark has no memory left: {_LIMIT} is {limit}", on=_executor(text),
                       hint=f"raise {_LIMIT}, or leave it unset: it limits addresses, of which compiled code and "
                            "threads reserve more than they use")


def _python_memory_limit() -> str | None:
    """The limit of this process's session, if it has one."""
    from pyspark import SparkContext

    context = SparkContext._active_spark_context
    return None if context is None else context.getConf().get(_LIMIT)


# --- executors that cannot run flows

_EXECUTOR = re.compile(r"\(TID \d+\) \((\S+) executor (\S+)\)")
_THIS_PYTHON = ("set PYSPARK_PYTHON, before the session starts, to an interpreter that every executor has, of the "
                "driver's version")
_UNUSABLE: tuple[tuple[str, str, str], ...] = (  # pattern, sentence, remedy; \1 is the pattern's first group
    (r"different version: (\S+) than that in driver: (\d+\.\d+)",
     r"the executors run Python \1, the driver \2, and Spark needs one version", _THIS_PYTHON),
    (r'Cannot run program "([^"]+)"', r"an executor has no Python at \1", _THIS_PYTHON),
    (r"No module named '(scalein)[.\w]*'", r"the Python of an executor has no package \1",
     "install scalein there, or call scalein.spark.ship(spark) once: it sends this one to every executor"),
    (r"cannot import name '\w+' from '(scalein)[.\w]*'", r"an executor has another \1 than the driver",
     "install the same there, or call scalein.spark.ship(spark) once: it sends this one to every executor"),
    (r"No module named '(llvmlite|pyarrow|numpy|pandas)[.\w]*'", r"the Python of an executor has no package \1",
     r'install it there: pip install "scalein[spark]"'),
    (r"(?i)\b(pandas|pyarrow) >= (\S+) must be installed; however, it was not found",
     r"the Python of an executor or of the driver has no package \1",
     r'install it there: pip install "scalein[spark]"'),
    (r"(?i)\b(pandas|pyarrow) >= (\S+) must be installed; however, your version is (\S+)\.",
     r"Spark needs \1 \2 or newer, and there is \3", r'install it: pip install --upgrade "scalein[spark]"'),
    (r"Python worker (?:exited unexpectedly|failed to connect back)()",
     "a Python worker of Spark ended without a message: killed for its memory, or it crashed",
     "give executors more memory (spark.executor.memoryOverhead); SCALEIN_SAFE=1 there finds a wrong kernel"),
    (r"(?:stopped SparkContext|SparkContext (?:was|has been) (?:shut down|stopped)|Answer from Java side is empty)()",
     "the Spark session has ended", "start another one: scalein.spark.session()"),
)  # fmt: skip


def _unusable_executor(text: str) -> SparkFailed | None:
    for pattern, sentence, remedy in _UNUSABLE:
        found = re.search(pattern, text)
        if found is not None:
            return SparkFailed(found.expand(sentence), on=_executor(text), hint=found.expand(remedy))
    return None


def _executor(text: str) -> str | None:
    """The executor that an error names, unless it is the driver."""
    place = _EXECUTOR.search(text)
    return f"{place[1]}, executor {place[2]}" if place is not None and place[2] != "driver" else None
