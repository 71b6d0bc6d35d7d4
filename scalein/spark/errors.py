"""What Spark says, in our words: one sentence and a remedy where Spark has a stack trace of the JVM.

An error inside of a Python worker reaches the driver as text: Python's traceback, wrapped in the JVM's. Our own errors
are found in it by their names and given back as what they were, with all their facts; of an executor that is not fit
(another Python, a package that is not there) the remedy is said. Whatever is not known here passes unchanged.

`in_our_words()` goes around each action that scalein runs itself: `start`, `doctor`, what `run` and `apply` look at. A
DataFrame that `apply` or `run` gave is lazy: its action is the user's, and so are the error and its class, a
PythonException of pyspark; our sentence stands at the end of its Python traceback, and `explained(error)` gives it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import scalein.errors
from scalein.errors import ScaleinError, _rebuild


class SparkFailed(ScaleinError):
    """Spark, its Java, or the Python of an executor is not fit to run a flow."""


@contextmanager
def in_our_words() -> Iterator[None]:
    """Raise as a ScaleinError what Spark raises inside, if we know what it means; Spark's own is its `__context__`."""
    try:
        yield
    except ScaleinError:
        raise
    except Exception as error:
        ours = explained(error)
        if ours is None:
            raise
        raise ours from None


def explained(error: BaseException) -> ScaleinError | None:
    """The ScaleinError that tells what an error of Spark's means; None if there is nothing to add to it."""
    if isinstance(error, ScaleinError):
        return error
    text = str(error)
    return _raised_in_a_worker(text) or _unfit(text)


# --- errors of ours, raised in a Python worker

_OURS = re.compile(r"^(?:\w+Exception: )?scalein(?:\.\w+)*\.(\w+): (.*)$", re.MULTILINE)
_FACT = re.compile(r"  (\w+) +(\S.*)")
_BEHIND = ("\tat ", "Driver stacktrace", "JVM stacktrace", "Caused by:", "The above exception", "During handling")


def _raised_in_a_worker(text: str) -> ScaleinError | None:
    """The last error of ours in the text: a chain of Python errors ends with the one that left the worker."""
    every = list(_OURS.finditer(text))
    if not every:
        return None
    found = every[-1]
    kind: type[ScaleinError] = getattr(scalein.errors, found[1], SparkFailed)
    lines, facts, name = [found[2]], dict[str, str](), ""
    for line in text[found.end() + 1 :].splitlines():
        if not line.strip() or line.startswith(_BEHIND):
            break
        lines.append(line)
        fact = _FACT.fullmatch(line)
        if fact is not None:
            name = fact[1]
            facts[name] = fact[2]
        elif name:
            facts[name] += "\n" + line
    return _rebuild(kind, "\n".join(lines), found[2], facts.get("hint"), facts)


# --- executors that are not fit

_PLACE = re.compile(r"\(TID \d+\) \((\S+) executor (\S+)\)")
_THIS_PYTHON = ("set PYSPARK_PYTHON, before the session starts, to an interpreter that every executor has, of the "
                "driver's version")
_UNFIT: tuple[tuple[str, str, str], ...] = (  # pattern, sentence, remedy; \1 is the pattern's first group
    (r"different version: (\S+) than that in driver: (\d+\.\d+)",
     r"the executors run Python \1, the driver \2, and Spark wants one version", _THIS_PYTHON),
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
     r"Spark wants \1 \2 or newer, and there is \3", r'install it: pip install --upgrade "scalein[spark]"'),
    (r"Python worker (?:exited unexpectedly|failed to connect back)()",
     "a Python worker of Spark ended without a word: killed for its memory, or it crashed",
     "give executors more memory (spark.executor.memoryOverhead); SCALEIN_SAFE=1 there finds a wrong kernel"),
    (r"(?:stopped SparkContext|SparkContext (?:was|has been) (?:shut down|stopped)|Answer from Java side is empty)()",
     "the Spark session has ended", "start another one: scalein.spark.session()"),
)  # fmt: skip


def _unfit(text: str) -> SparkFailed | None:
    for pattern, sentence, remedy in _UNFIT:
        found = re.search(pattern, text)
        if found is not None:
            place = _PLACE.search(text)
            on = f"{place[1]}, executor {place[2]}" if place is not None and place[2] != "driver" else None
            return SparkFailed(found.expand(sentence), on=on, hint=found.expand(remedy))
    return None
