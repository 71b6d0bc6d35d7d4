"""Followed directories: files as they appear, each once, in the order of their times; and rows made by a function."""

from __future__ import annotations

import itertools
import json
import os
import time
import warnings
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import scalein as si
from scalein.connectors.base import BoundSource
from scalein.connectors.sources import files
from scalein.storage.checked_json import Json
from tests.connectors.kinds import KINDS, SCHEMA, Kind, connected, rows

Read = Iterator[tuple[pa.RecordBatch, Json]]


def put(folder: Path, name: str, values: list[int], time_s: float = 0) -> None:
    """A file under a hidden name, then renamed; `time_s` is its modification time after a fixed one."""
    hidden = folder / f"_{name}"
    pq.write_table(pa.table({"v": pa.array(values, pa.int64())}), hidden)
    os.utime(hidden, ns=(0, int((1_700_000_000 + time_s) * 1e9)))
    hidden.rename(folder / name)


def follow(folder: Path) -> BoundSource:
    return connected(si.read_parquet(folder, follow=True, schema={"v": pa.int64()}))


def take(batches: Read, count: int) -> tuple[list[int], Json]:
    """So many rows, and the offset behind them."""
    values: list[int] = []
    for batch, offset in itertools.islice(batches, count + 100):  # 10 s of silence
        values += batch.column("v").to_pylist()
        if len(values) >= count:
            return values, json.loads(json.dumps(offset))
    raise AssertionError(f"no more than {values}")


def nothing(batches: Read, times: int = 2) -> None:
    """Nothing comes, and that is said in time."""
    took_s = []
    for _ in range(times):
        start_s = time.monotonic()
        assert next(batches)[0].num_rows == 0
        took_s.append(time.monotonic() - start_s)
    assert times == 1 or min(took_s) < 1  # 0.1 on a machine that has nothing else to do


def test_files_are_read_as_they_appear(tmp_path: Path) -> None:
    put(tmp_path, "b", [1, 2], 1)
    put(tmp_path, "a", [3], 2)
    with closing(follow(tmp_path).read_from("files", None)) as batches:
        assert take(batches, 3)[0] == [1, 2, 3]
        nothing(batches)
        put(tmp_path, "0", [4], 3)
        assert take(batches, 1)[0] == [4]
        put(tmp_path, "late", [5], 0)  # written before the others, named after them
        values, offset = take(batches, 1)
        assert values == [5]
        (tmp_path / "_hidden").write_text("half a file")
        nothing(batches)
    put(tmp_path, "z", [6], 3)
    with closing(follow(tmp_path).read_from("files", offset)) as batches:
        assert take(batches, 1)[0] == [6]
        nothing(batches)


def test_every_offset_gives_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MAX_ROWS", 2)
    for number, name in enumerate("cadb"):
        put(tmp_path, name, list(range(5 * number, 5 * number + 5)), number // 2)
    data = follow(tmp_path)
    want = [*range(5, 10), *range(0, 5), *range(15, 20), *range(10, 15)]  # of equal times, by name
    with closing(data.read_from("files", None)) as batches:
        seen = 0
        for batch, offset in batches:
            seen += batch.num_rows
            with closing(data.read_from("files", json.loads(json.dumps(offset)))) as rest:
                if seen == 20:
                    nothing(rest, 1)
                    break
                assert take(rest, 20 - seen)[0] == want[seen:]


def test_a_begun_file_is_completed_before_older_ones_that_appeared(tmp_path: Path,
                                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MAX_ROWS", 2)
    put(tmp_path, "b", [1, 2, 3, 4], 10)
    with closing(follow(tmp_path).read_from("files", None)) as batches:
        values, offset = take(batches, 2)
        assert values == [1, 2]
    put(tmp_path, "a", [5], 5)
    with closing(follow(tmp_path).read_from("files", offset)) as batches:
        assert take(batches, 3)[0] == [3, 4, 5]


def test_offsets_stay_small_and_files_older_than_that_are_refused_with_a_warning(tmp_path: Path) -> None:
    for hour in range(6):
        put(tmp_path, f"{hour}", [hour], 3600 * hour)
    with closing(follow(tmp_path).read_from("files", None)) as batches:
        values, offset = take(batches, 6)
        assert values == [0, 1, 2, 3, 4, 5]
        assert isinstance(offset, dict)
        assert offset["since"] == (1_700_000_000 + 3600 * 3) * 10**9
        assert offset["read"] == {"4": (1_700_000_000 + 3600 * 4) * 10**9}
    with closing(follow(tmp_path).read_from("files", offset)) as batches, warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        nothing(batches)
        put(tmp_path, "old", [7], 1)
        put(tmp_path, "new", [8], 3600 * 4.5)
        assert take(batches, 1)[0] == [8]
        nothing(batches)
    assert [str(each.message).split(" is not read")[0] for each in seen] == [str(tmp_path / "old")]


def test_a_file_from_the_future_does_not_make_others_old(tmp_path: Path) -> None:
    now = time.time() - 1_700_000_000
    put(tmp_path, "a", [1], now)
    put(tmp_path, "b", [2], now + 86_400)
    with closing(follow(tmp_path).read_from("files", None)) as batches:
        assert take(batches, 2)[0] == [1, 2]
        put(tmp_path, "c", [3], now)
        values, offset = take(batches, 1)
        assert values == [3]
    put(tmp_path, "d", [4], now)
    with closing(follow(tmp_path).read_from("files", offset)) as batches:
        assert take(batches, 1)[0] == [4]
        nothing(batches)


def test_old_files_that_appear_while_nobody_looks_are_warned_of(tmp_path: Path) -> None:
    """Their names are not known any more, so they may have been read: only the times of their entries are new."""
    for hour in range(4):
        put(tmp_path, f"{hour}", [hour], 3600 * hour)
    with closing(follow(tmp_path).read_from("files", None)) as batches:
        _, offset = take(batches, 4)
    time.sleep(0.02)  # longer than a tick of the clock that stamps files
    for again, expected in ((False, []), (True, [f"{tmp_path}/old is not read (and 1 more)"])):
        if again:
            put(tmp_path, "old", [7], 1)
            put(tmp_path, "old too", [8], 2)
        with (closing(follow(tmp_path).read_from("files", offset)) as batches,
              warnings.catch_warnings(record=True) as seen):  # fmt: skip
            warnings.simplefilter("always")
            nothing(batches)
        assert [str(each.message).partition(":")[0] for each in seen] == expected


def test_a_file_that_takes_long_is_not_silence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A partition that has nothing for long holds nobody's time back; one that is decoding must."""
    real = files._numbered

    def slow(*args: Any) -> Any:
        time.sleep(0.4)
        yield from real(*args)

    monkeypatch.setattr(files, "_numbered", slow)
    put(tmp_path, "a", [1])
    with closing(follow(tmp_path).read_from("files", None)) as batches:
        assert next(batches)[0].num_rows == 1
        nothing(batches)


def test_a_read_file_may_go_away(tmp_path: Path) -> None:
    put(tmp_path, "a", [1])
    with closing(follow(tmp_path).read_from("files", None)) as batches:
        _, offset = take(batches, 1)
        (tmp_path / "a").unlink()
        nothing(batches)
    put(tmp_path, "b", [2], 1)
    with closing(follow(tmp_path).read_from("files", offset)) as batches:
        assert take(batches, 1)[0] == [2]


@pytest.mark.parametrize("kind", KINDS, ids=repr)
def test_every_format_can_be_followed(kind: Kind, tmp_path: Path) -> None:
    data = connected(kind.scan(tmp_path, follow=True, schema=SCHEMA))
    assert not data.bounded
    with closing(data.read_from("files", None)) as batches:
        nothing(batches, 1)
        kind.write(rows(0, 20), tmp_path / "_1", 5)
        (tmp_path / "_1").rename(tmp_path / "1")
        got = pa.Table.from_batches([], SCHEMA)
        while got.num_rows < 20:
            got = pa.concat_tables([got, pa.Table.from_batches([next(batches)[0]])])
        assert got.combine_chunks().equals(rows(0, 20))


def test_a_damaged_file_ends_it_with_its_name(tmp_path: Path) -> None:
    put(tmp_path, "a", [1])
    with closing(follow(tmp_path).read_from("files", None)) as batches:
        assert take(batches, 1)[0] == [1]
        (tmp_path / "b").write_text("half a file")
        with pytest.raises(si.BadData, match="b cannot be read"):
            take(batches, 1)


def test_what_never_ends_cannot_be_collected(tmp_path: Path) -> None:
    put(tmp_path, "a", [1])
    with pytest.raises(si.BadArgument, match="never ends"):
        si.read_parquet(tmp_path, follow=True).collect()
    (tmp_path / "a").unlink()
    with pytest.raises(si.BadData, match=r"(?s)no file matches.*schema="):
        si.read_parquet(tmp_path, follow=True)


# --- generate ---


def numbers(start: int, count: int) -> pa.RecordBatch:
    return pa.record_batch({"v": pa.array(range(start, start + count), pa.int64())})


def test_generated_rows_replay_from_every_offset() -> None:
    data = connected(si.generate(numbers, {"v": pa.int64()}, rows=25, batch_rows=10))
    assert data.bounded
    assert data.replays
    whole = list(data.read_from("rows", None))
    assert [batch.num_rows for batch, _ in whole] == [10, 10, 5]
    for _, offset in whole:
        rest = [value for batch, _ in data.read_from("rows", offset) for value in batch["v"].to_pylist()]
        assert isinstance(offset, int)
        assert rest == list(range(offset, 25))
    assert [batch.num_rows for batch, _ in data.read_from("rows", 13)] == [7, 5]


def test_generated_rows_come_at_their_rate() -> None:
    data = connected(si.generate(numbers, {"v": pa.int64()}, rows_per_second=10_000))
    assert not data.bounded
    start_s = time.monotonic()
    with closing(data.read_from("rows", None)) as batches:
        assert take(batches, 3000)[0] == list(range(3000))
    assert time.monotonic() - start_s >= 0.3
    slow = connected(si.generate(numbers, {"v": pa.int64()}, rows_per_second=0.5))
    with closing(slow.read_from("rows", None)) as batches:
        nothing(batches)


def test_a_wrong_generator_is_refused() -> None:
    with pytest.raises(si.BadData, match="asked for 5 rows from 0 on"):
        si.generate(lambda start, count: numbers(start, count - 1), {"v": pa.int64()}, rows=5).collect()
    with pytest.raises(si.BadData, match="another schema"):
        si.generate(numbers, {"w": pa.int64()}, rows=5).collect()
    with pytest.raises(si.BadData, match="raised ZeroDivisionError"):
        si.generate(lambda start, count: 1 // 0, {"v": pa.int64()}, rows=5).collect()
    for wrong in ({"rows": 0}, {"rows_per_second": -1}, {"batch_rows": "x"}):
        with pytest.raises(si.BadArgument, match="above 0"):
            si.generate(numbers, {"v": pa.int64()}, **wrong)  # type: ignore[arg-type]
