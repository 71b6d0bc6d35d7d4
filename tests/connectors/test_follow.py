"""Followed directories: files as they appear, each once, in the order of their times; and rows made by a function."""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import scalein as si
from scalein.connectors.base import BoundSource
from scalein.connectors.sources import files, seen_files
from scalein.connectors.sources.listing import Listing
from scalein.connectors.sources.seen_files import SeenFiles
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
    """Nothing comes, and that is said."""
    for _ in range(times):
        assert next(batches)[0].num_rows == 0


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


def test_a_file_with_an_old_modification_time_is_read(tmp_path: Path) -> None:
    """As `cp -p`, `rsync` and `mv` leave it: while the job runs, and while it is stopped."""
    for hour in range(6):
        put(tmp_path, f"{hour}", [hour], 3600 * hour)
    with closing(follow(tmp_path).read_from("files", None)) as batches:
        assert take(batches, 6)[0] == [0, 1, 2, 3, 4, 5]
        put(tmp_path, "old", [6], 1)
        values, offset = take(batches, 1)
        assert values == [6]
    put(tmp_path, "older", [7], 0)
    os.chmod(tmp_path / "2", 0o600)  # nothing of what was read
    with closing(follow(tmp_path).read_from("files", offset)) as batches:
        assert take(batches, 1)[0] == [7]
        nothing(batches)


def test_an_offset_of_the_first_version_goes_on(tmp_path: Path) -> None:
    """It has a time up to which all files were read, and the names of later ones."""
    for hour in range(4):
        put(tmp_path, f"{hour}", [hour, hour], 3600 * hour)
    times = [(1_700_000_000 + 3600 * hour) * 10**9 for hour in range(4)]
    known = {"since": times[1], "read": {"2": times[2]}, "looked": times[3], "mtime_ns": times[3]}
    for offset, rest in (({"file": "3", "row": 1, "done": False}, [3]), ({"file": "3", "row": 2, "done": True}, [])):
        with closing(follow(tmp_path).read_from("files", {**known, **offset})) as batches:
            if rest:
                assert take(batches, 1)[0] == rest
            nothing(batches)
    put(tmp_path, "old", [9], 0)
    with closing(follow(tmp_path).read_from("files", {**known, "file": "3", "row": 2, "done": True})) as batches:
        nothing(batches)  # of "old" nobody knows: it may have been read
        put(tmp_path, "older", [8], 0)
        assert take(batches, 1)[0] == [8]


def test_offsets_stay_small(tmp_path: Path) -> None:
    seen = SeenFiles()
    names = [f"events-2026-11-18-{number:08}.parquet" for number in range(2_000)]
    for name in names:
        assert name not in seen
        seen.add(name)
    stored = json.loads(json.dumps(seen.to_json()))
    assert len(json.dumps(stored)) < 12 * len(names)
    again = SeenFiles(stored)
    assert all(name in again for name in names)
    assert "another" not in again
    assert again.to_json() == stored


def test_names_of_files_that_are_gone_are_forgotten_if_they_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seen_files, "MAX_GONE", 10)
    seen = SeenFiles()
    seen.add(*map(str, range(20)))
    seen.forget([str(number) for number in range(10, 25)])  # five are gone, and five are new
    assert "3" in seen
    seen.forget(["18", "19", "20"])
    assert [name for name in ("3", "18", "19", "20") if name in seen] == ["18", "19"]
    assert SeenFiles(seen.to_json()).to_json() == seen.to_json()


def test_an_idle_directory_is_listed_rarely_and_a_new_file_found_soon(tmp_path: Path,
                                                                      monkeypatch: pytest.MonkeyPatch) -> None:
    real, stated, listed = Listing.timed, [], []
    names = Listing.names

    def counted(listing: Listing, some: Any) -> list[Any]:
        some = list(some)
        stated.extend(some)
        return real(listing, some)

    def counted_names(listing: Listing) -> list[str]:
        listed.append(time.monotonic())
        return names(listing)

    monkeypatch.setattr(Listing, "timed", counted)
    monkeypatch.setattr(Listing, "names", counted_names)
    for number in range(20):
        put(tmp_path, f"{number:02}", [number], number)
    with closing(follow(tmp_path).read_from("files", None)) as batches:
        take(batches, 20)
        stated.clear()
        end = time.monotonic() + 2
        while time.monotonic() < end:
            next(batches)
        assert len([at for at in listed if end - 1 < at < end]) <= 4  # 20 before
        assert stated == []
        put(tmp_path, "new", [7], 0)
        assert take(batches, 1)[0] == [7]
        assert stated == ["new"]


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
