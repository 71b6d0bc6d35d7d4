"""Wrong arguments, and values at the limits: errors name the line, what was found and what is expected."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from scalein.errors import BadArgument, BadData, BadName, ScaleinError, UnknownColumn, WrongType
from scalein.state import LogStore
from scalein.state.budget import Budget
from scalein.storage.local import LocalFileSystem

KEY, VALUE = {"k": pa.int64()}, {"n": pa.int64(), "t": pa.string()}
ROWS = pa.table({"k": [1], "n": [1]})
TWICE = pa.table([pa.array([1])] * 3, names=["k", "n", "n"])
TEXT = pa.table({"k": [1], "t": ["a"]})
CALLS: list[tuple[Callable[[LogStore], object], type[ScaleinError], str]] = [
    (lambda s: s.merge([1], n="sum"), BadData, "list"),
    (lambda s: s.merge(ROWS), BadArgument, 'n="sum"'),
    (lambda s: s.merge(ROWS, n="summ"), BadArgument, "did you mean 'sum'"),
    (lambda s: s.merge(ROWS, n=3), BadArgument, "no merge function 3"),  # type: ignore[arg-type]
    (lambda s: s.merge(ROWS, nn="sum"), UnknownColumn, "did you mean 'n'"),
    (lambda s: s.merge(ROWS, n="sum", t="max"), UnknownColumn, "no column 't'"),
    (lambda s: s.merge(TEXT, t="sum"), WrongType, "cannot sum column 't'"),
    (lambda s: s.merge(TEXT, t="count"), WrongType, "integer"),
    (lambda s: s.merge(pa.table({"n": [1]}), n="sum"), UnknownColumn, "no column 'k'"),
    (lambda s: s.merge(pa.table({"k": [1.5], "n": [1]}), n="sum"), WrongType, "int64"),
    (lambda s: s.merge(ROWS.append_column("z", [[1]]), n="sum"), UnknownColumn, "'z'"),
    (lambda s: s.merge(TWICE, n="sum"), BadName, "two columns 'n'"),
    (lambda s: s.upsert(ROWS), UnknownColumn, "no column 't'"),
    (lambda s: s.merge(pa.table({"k": [1], "n": ["1"]}), n="sum"), WrongType, "found  string\n  wanted int64"),
    (lambda s: s.merge(pa.table({"k": [1], "n": [True]}), n="sum"), WrongType, "bools are not cast"),
    (lambda s: s.upsert(pa.table({"k": [1], "n": [1], "t": [5]})), WrongType, "column 't'"),
    (lambda s: s.get([1]), BadData, "an Arrow array of keys"),
    (lambda s: s.get("a"), BadData, "found  str"),
    (lambda s: s.get(pa.array(["1"])), WrongType, "found  string\n  wanted int64"),
    (lambda s: s.get(pa.array(["1"]).dictionary_encode()), WrongType, "column 'k'"),
    (lambda s: LogStore("x"), BadArgument, "LogStore.open"),  # type: ignore[call-arg, arg-type]
    (lambda s: s.delete(None), BadData, "NoneType"),
    (lambda s: s.upsert(pa.table({"k": [1], "n": [1], "t": ["x" * 5_000_000]})), BadData, "5000000 bytes"),
]  # fmt: skip


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> LogStore:
    return LogStore.open(tmp_path_factory.mktemp("store") / "s", key=KEY, value=VALUE)


@pytest.mark.parametrize(("call", "kind", "says"), CALLS)
def test_errors_of_calls_name_the_problem_and_the_line(store: LogStore, call: Callable[[LogStore], object],
                                                       kind: type[ScaleinError], says: str) -> None:
    with pytest.raises(kind) as caught:
        call(store)
    assert says in str(caught.value)
    assert Path(__file__).name in str(caught.value)
    assert len(store) == 0


@pytest.mark.parametrize(("given", "says"), [
    ({"key": KEY, "keep": 0}, "keep"), ({"key": KEY, "keep": True}, "keep"), ({"key": KEY, "workers": 0}, "workers"),
    ({"key": KEY, "memory": "lots"}, "500MB"), ({"key": ["k"]}, "not a schema"), ({"key": {}}, "at least one key"),
    ({"key": {"k": pa.list_(pa.int64())}}, "cannot be stored"), ({"key": KEY, "value": KEY}, "two columns"),
    ({"key": KEY, "value": {f"v{k}": pa.int64() for k in range(40)}}, "at most 32"),
    ({"key": {"k": pa.decimal256(50, 1)}}, "38 digits"),
])  # fmt: skip
def test_invalid_stores_are_refused(tmp_path: Path, given: dict[str, object], says: str) -> None:
    with pytest.raises(ScaleinError) as caught:
        LogStore.open(tmp_path / "s", **given)  # type: ignore[arg-type]
    assert says in str(caught.value)
    LogStore.open(tmp_path / "s", key=KEY, value=VALUE).close()


def test_rows_of_compatible_types_are_cast(tmp_path: Path) -> None:
    with LogStore.open(tmp_path, key={"k": pa.string()}, value={"n": pa.int64()}) as store:
        store.upsert(pa.table({"k": pa.array(["a"], pa.large_string()), "n": pa.array([1], pa.int8())}))
        store.upsert(pa.table({"k": pa.array(["b"], pa.string_view()), "n": pa.array([2.0])}))
        store.upsert(pa.table({"k": pa.array(["c"]).dictionary_encode(), "n": pa.nulls(1)}))
        assert store.get(pa.array(["a", "b", "c"]))["n"].to_pylist() == [1, 2, None]
        with pytest.raises(WrongType, match="column 'k'"):
            store.get(pa.array([1]))


def test_repr_shows_path_and_columns(tmp_path: Path) -> None:
    with LogStore.open(tmp_path / "s", key=KEY, value=VALUE) as store:
        assert repr(store) == f"<LogStore {tmp_path}/s/: k: int64 -> n: int64, t: string>"
    assert repr(store).endswith(", closed>")


def test_a_closed_store_refuses_calls(tmp_path: Path) -> None:
    store = LogStore.open(tmp_path, key=KEY, value=VALUE)
    reader = store.scan()
    store.close()
    store.close()
    calls: list[Callable[[], object]] = [lambda: store.get(pa.array([1])), lambda: store.merge(ROWS, n="sum"),
                                         store.snapshot, store.stats, store.verify, lambda: len(store), store.scan]
    for call in calls:
        with pytest.raises(ScaleinError, match="closed") as caught:
            call()
        assert Path(__file__).name in str(caught.value)
    with pytest.raises((ScaleinError, pa.ArrowException), match="closed"):
        reader.read_all()


def test_leaving_the_with_block_by_an_exception_takes_no_snapshot(tmp_path: Path) -> None:
    def fails() -> None:
        with LogStore.open(tmp_path, key=KEY, value=VALUE) as store:
            store.merge(ROWS, n="sum")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    with LogStore.open(tmp_path) as again:
        assert len(again) == 0


def test_a_store_without_value_columns(tmp_path: Path) -> None:
    with LogStore.open(tmp_path, key={"a": pa.int64(), "b": pa.string()}, value={}) as store:
        store.upsert(pa.table({"a": [1, 1, 2], "b": ["x", "x", None]}))
        assert len(store) == 2
        assert store.get(pa.table({"a": [1], "b": ["x"]})).num_columns == 0
        store.delete(pa.table({"a": [1], "b": ["x"]}))
        assert store.scan().read_all().to_pylist() == [{"a": 2, "b": None}]


def test_nulls_in_columns_that_are_not_nullable_are_refused(tmp_path: Path) -> None:
    key = pa.schema([pa.field("k", pa.int64(), False)])
    value = pa.schema([pa.field("n", pa.int64(), False), pa.field("m", pa.int64())])
    with LogStore.open(tmp_path, key=key, value=value) as store:
        with pytest.raises(BadData, match="not nullable"):
            store.upsert(pa.table({"k": [1], "n": pa.array([None], pa.int64()), "m": [1]}))
        store.merge(pa.table({"k": [5], "m": [1]}), m="sum")
        assert store.scan().read_all().to_pylist() == [{"k": 5, "n": None, "m": 1}]


def test_the_maximum_number_of_columns(tmp_path: Path) -> None:
    key, value = {f"k{k}": pa.int64() for k in range(16)}, {f"v{k}": pa.int64() for k in range(32)}
    rows = pa.table({**{name: [1, None] for name in key}, **{name: [k, None] for k, name in enumerate(value)}},
                    schema=pa.schema({**key, **value}))  # fmt: skip
    with LogStore.open(tmp_path, key=key, value=value) as store:
        store.upsert(rows)
    with LogStore.open(tmp_path) as store:
        assert store.get(rows.select(list(key))).to_pylist() == rows.select(list(value)).to_pylist()


def test_evicted_long_texts_are_read_back(tmp_path: Path) -> None:
    size = 3 << 20
    with LogStore.open(tmp_path, key={"k": pa.string()}, value={"t": pa.string_view()}) as store:
        store.upsert(pa.table({"k": ["a", "b" * size], "t": pa.array(["x" * size, "y"], pa.string_view())}))
        for shard in range(16):
            store._tiers._evict(shard, 0.0)
        assert store.get(pa.array(["a", "b" * size]))["t"].to_pylist() == ["x" * size, "y"]
        assert len(store) == 2


def test_files_of_merged_runs_are_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    budget = Budget(600_000, 1 << 14, 4096)
    with LogStore.open_on(LocalFileSystem(tmp_path), key=KEY, value={"n": pa.int64()}, budget=budget) as store:
        monkeypatch.setattr(store._tiers.compactor, "schedule", lambda *_, **__: None)  # it would merge runs meanwhile
        before = len(os.listdir("/proc/self/fd"))
        for step in range(8):
            store.merge(pa.table({"k": np.arange(step * 100, step * 100 + 500), "n": np.ones(500, np.int64)}), n="sum")
        assert store.stats()["runs"] > 30  # type: ignore[operator]
        store.compact()
        assert store.stats()["runs"] <= 16  # type: ignore[operator]
        assert len(os.listdir("/proc/self/fd")) <= before + 16 + 2
