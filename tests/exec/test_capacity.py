"""Where text outgrows an Arrow array, or data the memory that a process may use: it works, or the error is ours."""

from __future__ import annotations

import errno
import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pytest

import scalein as si
from scalein import arrow_functions, col
from scalein.api.flow import Flow
from scalein.arrow_rows import taken
from scalein.errors import ScaleinError, StoreFailed
from scalein.exec import arrow_offset_limits, host, pipeline, sort
from tests import oracle
from tests.same import assert_same

WORDS = [None, "", "a", "word", "a longer word than the others", "é" * 20]
KINDS = [pa.string(), pa.large_string(), pa.binary(), pa.string_view(), pa.list_(pa.string()),
         pa.large_list(pa.string()), pa.list_view(pa.string()), pa.list_(pa.string(), 2),
         pa.map_(pa.string(), pa.int8()),
         pa.struct([("s", pa.string()), ("i", pa.int64())]), pa.dictionary(pa.int8(), pa.string()), pa.int64()]


def _column(kind: pa.DataType, words: list[str | None]) -> pa.Array:
    """The words in a column of this type, whatever it nests."""
    text = pa.array(words, pa.string())
    if pa.types.is_integer(kind):
        return pa.array([None if w is None else len(w) for w in words], kind)
    if pa.types.is_struct(kind):
        return pa.array([None if w is None else {"s": w, "i": len(w)} for w in words], kind)
    if pa.types.is_map(kind):
        return pa.array([None if w is None else [(w, 1)] * (len(w) % 3) for w in words], kind)
    if pa.types.is_fixed_size_list(kind):
        return pa.array([None if w is None else [w, None] for w in words], kind)
    if "list" in str(kind):
        return pa.array([None if w is None else [w] * (len(w) % 3) for w in words], kind)
    return text.dictionary_encode().cast(kind) if pa.types.is_dictionary(kind) else text.cast(kind)


def _table(kind: pa.DataType) -> pa.Table:
    rng = np.random.default_rng(0)
    words = [WORDS[k] for k in rng.integers(0, len(WORDS), 200)]
    column = _column(kind, words)
    # Slices of one array: their buffers are shared.
    parts = [pa.record_batch({"k": pa.array(rng.integers(0, 9, 50)), "s": pa.array(words[n : n + 50]),
                              "x": column[n : n + 50], "l": pa.array([[1, 2], None, [], [3]] * 12 + [[4] * 30, [5]])})
             for n in range(0, 200, 50)]
    return pa.Table.from_batches([*parts, parts[1], parts[1]])


FLOWS: dict[str, Callable[[Flow], Flow]] = {
    "sort": lambda flow: flow.sort("k"),
    "sort by text": lambda flow: flow.sort("s", "k", descending=True),
    "top_k": lambda flow: flow.top_k(70, "k"),
    "bottom_k": lambda flow: flow.bottom_k(290, ["s", "k"]),
    "explode": lambda flow: flow.explode("l"),
    "handed on": lambda flow: flow.filter(col("k") > 0).select("x"),
}


@pytest.mark.parametrize("name", FLOWS)
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("most", [1, 40, 1000])
def test_rows_are_cut_where_they_weigh_too_much(kind: pa.DataType, name: str, most: int,
                                                monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrow_offset_limits, "MAX_WEIGHT", most)
    monkeypatch.setattr(sort, "PIECE_ROWS", 64)
    monkeypatch.setattr(host, "PIECE_ROWS", 50)
    flow = FLOWS[name](si.from_arrow(_table(kind)))
    found = flow.collect(workers=1)
    found.validate(full=True)
    assert_same(found, oracle.collect(flow), ordered=True)
    if name in ("sort", "explode") and pa.types.is_string(kind):
        sizes = [sum(len(str(v).encode()) for name in ("s", "x") for v in batch[name].to_pylist() if v)
                 for batch in flow.batches(workers=1) if batch.num_rows > 1]
        assert max(sizes, default=0) <= most


@pytest.mark.parametrize("kind", KINDS[:4], ids=str)
def test_no_part_of_sorted_text_hangs_on_to_all_of_it(kind: pa.DataType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Offsets into all of it would not fit 32 bits."""
    monkeypatch.setattr(arrow_offset_limits, "MAX_WEIGHT", 1000)
    text = _column(kind, [f"a text with number {n}" for n in range(1000)])
    flow = si.from_arrow(pa.table({"k": range(1000), "s": text})).sort("k")
    parts = list(flow.batches(workers=1))
    assert max(part["s"].get_total_buffer_size() for part in parts) < 4000
    assert pa.Table.from_batches(parts)["s"].to_pylist() == text.to_pylist()


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_the_weight_of_rows(kind: pa.DataType) -> None:
    words = [w for w in WORDS if w is not None]
    column = _column(kind, [None, *words, "x"])[1:-1]
    sizes = [len(word.encode()) for word in words]
    found = arrow_offset_limits.weights(column)
    if pa.types.is_integer(kind):
        assert found is None
        return
    lists = [len(w) % 3 for w in words]
    expected = sizes
    if pa.types.is_fixed_size_list(kind):
        expected = [2 + size for size in sizes]
    elif "list" in str(kind) or pa.types.is_map(kind):
        expected = [n * (1 + size) for n, size in zip(lists, sizes, strict=True)]
    assert found is not None
    assert found.tolist() == expected


def _limited(monkeypatch: pytest.MonkeyPatch, most: int) -> list[int]:
    """Make text functions fail whose result has over `most` bytes; gives how many bytes each call had."""
    given, apply = [], arrow_functions.apply

    def limited(call: object, args: list[pa.Array]) -> pa.Array:
        found = apply(call, args)  # type: ignore[arg-type]
        given.append(int(arrow_offset_limits.weights(found).sum()))  # type: ignore[union-attr]
        if given[-1] > most:
            raise pa.ArrowInvalid("Failed casting from large_string to string: input array too large")
        return found

    monkeypatch.setattr(arrow_functions, "apply", limited)
    return given


def test_text_that_grows_out_of_an_array_comes_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    table = pa.table({"s": [str(n) for n in range(1000)], "n": range(1000)})
    flow = si.from_arrow(table).select("n", s=col("s").str.replace("1", "2" * 100)).filter(col("n") < 900)
    expected = oracle.collect(flow)
    given = _limited(monkeypatch, 3000)
    assert_same(flow.collect(workers=1), expected, ordered=True)
    assert max(given) > 3000


def test_one_text_that_no_array_can_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    flow = si.from_arrow(pa.table({"s": ["short", "1"]})).select(s=col("s").str.replace("1", "2" * 100))
    _limited(monkeypatch, 50)
    with pytest.raises(ScaleinError, match=r"at most 2 GiB") as caught:
        flow.collect(workers=1)
    assert "str.replace" in caught.value.what
    assert caught.value.hint is not None
    assert "pa.large_string()" in caught.value.hint
    assert isinstance(caught.value.__cause__, pa.ArrowInvalid)


def test_another_error_of_pyarrow_is_no_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def broken(call: object, args: list[pa.Array]) -> pa.Array:
        calls.append(len(args[0]))
        raise pa.ArrowInvalid("something else")

    monkeypatch.setattr(arrow_functions, "apply", broken)
    flow = si.from_arrow(pa.table({"n": range(1000)})).select(s=(col("n") + 1).cast(pa.string()))
    with pytest.raises(ScaleinError, match=r"pyarrow cannot do what `\(n \+ 1\)\.cast\(str\)` needs"):
        flow.collect(workers=1)
    assert calls == [1000]


def test_joined_lists_that_are_too_much_for_an_array(monkeypatch: pytest.MonkeyPatch) -> None:
    def limited(array: pa.Array, rows: pa.Array) -> pa.Array:
        if len(rows) > 100:
            raise pa.ArrowInvalid("offset overflow while concatenating arrays")
        return taken(array, rows)

    other = pa.table({"k": range(10), "p": [[f"text {n}"] * n for n in range(10)]})
    flow = si.from_arrow(pa.table({"k": [n % 11 for n in range(1000)]})).join(other, on="k")
    expected = oracle.collect(flow)
    monkeypatch.setattr(pipeline, "taken", limited)
    assert_same(flow.collect(workers=1), expected, ordered=True)


@pytest.mark.parametrize(("error", "says"), [
    (pa.ArrowInvalid("offset overflow while concatenating arrays"), "at most 2 GiB"),
    (pa.ArrowCapacityError("array cannot contain more than 2147483646 bytes"), "at most 2 GiB"),
    (pa.ArrowInvalid("something else"), "pyarrow cannot do what sort needs"),
    (pa.ArrowMemoryError("malloc of size 5 failed"), "more memory than this process may use"),
    (MemoryError(), "more memory than this process may use"),
    (OSError(errno.ENOMEM, "Cannot allocate memory"), "more memory than this process may use"),
], ids=repr)  # fmt: skip
def test_errors_of_pyarrow_and_the_system_are_ours(error: Exception, says: str,
                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise error

    monkeypatch.setattr(sort, "argsort", broken)
    with pytest.raises(ScaleinError, match=says) as caught:
        si.from_arrow(pa.table({"x": [2, 1]})).sort("x").collect(workers=1)
    assert "sort" in caught.value.what
    assert caught.value.__cause__ is error


def test_other_errors_of_the_system_are_not_taken_for_a_lack_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise FileNotFoundError(errno.ENOENT, "no such file")

    monkeypatch.setattr(sort, "argsort", broken)
    with pytest.raises(StoreFailed) as found:
        si.from_arrow(pa.table({"x": [2, 1]})).sort("x").collect(workers=1)
    assert isinstance(found.value.__cause__, FileNotFoundError)
    assert "memory" not in str(found.value)


LIMITED = """
import os, resource, sys
import numpy as np, pyarrow as pa, scalein as si
from scalein import col
from tests import oracle
kind, megabytes, workers, rows = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
rng = np.random.default_rng(0)
table = pa.table({"k": rng.integers(0, 1000, rows), "v": rng.random(rows),
                  "s": pa.array([f"some text with number {n}" for n in range(rows)])})
flow = si.from_arrow(table).group_by("k").agg(
    n=col("s").n_unique(), median=col("v").median(), all=col("s").collect(), best=col("v").top_k(2, by="v"),
    most=col("s").max())
flow.limit(1).collect(workers=1)  # compiled, and libraries loaded
used = int(open("/proc/self/statm").read().split()[{"AS": 0, "DATA": 5}[kind]]) * 4096
resource.setrlimit(getattr(resource, f"RLIMIT_{kind}"), (used + (megabytes << 20),) * 2)
try:
    print("groups", flow.collect(workers=workers).num_rows)
except si.ScaleinError as error:
    print("error", error.what)
"""


@pytest.mark.parametrize(("kind", "megabytes", "workers", "rows", "says"), [
    ("AS", 4000, 2, 100_000, "groups 1000"),
    ("AS", 1500, 1, 100_000, "groups 1000"),
    ("DATA", 3000, 2, 100_000, "groups 1000"),
    ("AS", 120, 1, 400_000, "memory than this process may use"),
    ("AS", 5, 4, 1_000, "this process may"),  # not even a thread's stack
])  # fmt: skip
def test_aggregates_of_any_size_share_a_limited_address_space(kind: str, megabytes: int, workers: int, rows: int,
                                                              says: str) -> None:
    arguments = [kind, str(megabytes), str(workers), str(rows)]
    done = subprocess.run([sys.executable, "-c", LIMITED, *arguments], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert says in done.stdout
