"""Lines that cannot be decoded, in jobs that are stopped, crash and go on: each once in its sink, or null."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

import scalein as si
from scalein import col
from scalein.api.flow import Flow
from scalein.connectors.formats import lenient, parquet
from scalein.jobs import driver, source_readers
from scalein.jobs.job import Job
from scalein.testing import Crashed, crash_at, until
from tests.jobs.streams import rows_in

SCHEMA = {"k": pa.int64(), "x": pa.int64(), "t": pa.int64()}
FILES, LINES = 4, 300


def is_wrong(number: int) -> bool:
    return number % 37 == 5


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Each line with the number of the row; some lack a field, in some it is no number."""
    monkeypatch.setattr(lenient, "BLOCK_BYTES", 1000)
    folder = tmp_path / "in"
    folder.mkdir()
    for file in range(FILES):
        numbers = range(file * LINES, (file + 1) * LINES)
        lines = [f"{n % 3},{n},{n}" if not is_wrong(n) else (f"bad {n}" if n % 2 else f"1,x{n},{n}") for n in numbers]
        (folder / f"{file}.csv").write_text("\n".join(["k,x,t", *lines, ""]))
    return folder


def started(files: Path, folder: Path, on_error: object, **how: Any) -> Job:
    flow = si.read_csv(files, schema=SCHEMA).with_watermark("t", 10).group_by("k", si.tumbling("t", 50)).agg(
        n=si.count(), s=(60 // (col("x") - 100)).sum())  # fmt: skip
    return flow.start(sink=si.to_ipc(folder / "out"), on_error=on_error, checkpoint=folder / "checkpoint", every="1ms",
                      **how)


def read(folder: Path) -> pa.Table:
    return pa.concat_tables(pa.ipc.open_file(part).read_all() for part in sorted(folder.glob("part-*")))


def test_each_line_comes_once_however_the_job_ends(files: Path, tmp_path: Path,
                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    """Among them one row that fails where it is computed: it has its values, and no line."""
    monkeypatch.setattr(source_readers, "PIECE_ROWS", 30)  # so that there are at least forty batches
    monkeypatch.setattr(driver, "MAX_ROUND_ROWS", 30)
    for point, times in (("commit", 1), ("batch", 7), ("batch", 9)):
        with crash_at(point, times), pytest.raises(Crashed):
            started(files, tmp_path, si.to_ipc(tmp_path / "bad")).wait()
    job = started(files, tmp_path, si.to_ipc(tmp_path / "bad"))
    until(lambda: rows_in(job) > 2 * LINES, job)
    job.stop()
    job = started(files, tmp_path, si.to_ipc(tmp_path / "bad"))
    job.wait()
    wrong = [n for n in range(FILES * LINES) if is_wrong(n)]
    found = read(tmp_path / "bad")
    assert found.schema.names == ["k", "x", "t", "error", "bad_file", "bad_line", "bad_text"]
    rows = found.sort_by([("bad_file", "ascending"), ("bad_line", "ascending")]).to_pylist()
    assert [row["bad_text"] for row in rows] == [f"bad {n}" if n % 2 else f"1,x{n},{n}" for n in wrong] + [None]
    assert [row["bad_line"] for row in rows] == [n % LINES + 2 for n in wrong] + [None]
    assert (rows[-1]["x"], rows[0]["x"]) == (100, None)
    assert sum(read(tmp_path / "out")["n"].to_pylist()) == FILES * LINES - len(wrong) - 1
    assert job.metrics()["failed_rows"] == len(wrong) + 1
    assert job.metrics()["rows_in"] == FILES * LINES


def test_a_job_that_a_line_has_ended_goes_on_with_null(files: Path, tmp_path: Path) -> None:
    with pytest.raises(si.BadData, match=r"line 7 of .*0\.csv cannot be read"):
        started(files, tmp_path, "raise").wait()
    job = started(files, tmp_path, "null")
    job.wait()
    parsed = [n for n in range(FILES * LINES) if not is_wrong(n) or n % 2 == 0]  # the others have no time
    assert sum(read(tmp_path / "out")["n"].to_pylist()) == len(parsed)
    assert job.metrics()["timeless_rows"] == FILES * LINES - len(parsed)


def test_lines_and_rows_of_several_sources_have_one_schema(files: Path, tmp_path: Path) -> None:
    """The columns of all: one that another source has with another type has a name of its own."""
    def letters(first: Flow, *others: Flow) -> list[dict[str, Any]]:
        out, bad = si.to_memory(), si.to_memory()
        for other in others:
            first = first.union(other)
        first.start(sink=out, on_error=bad).wait()
        return sorted(bad.table().to_pylist(), key=lambda row: (row["bad_text"] or "", row["error"], row["bad_file"]))

    lacking = [n for n in range(FILES * LINES) if is_wrong(n) and n % 2]  # `x` is not read
    lines = si.read_csv(files, schema=SCHEMA).select("k")
    found = letters(lines, si.read_csv(files, schema=SCHEMA).select("k"))
    assert [row["bad_text"] for row in found] == sorted([f"bad {n}" for n in lacking] * 2)
    (tmp_path / "texts.csv").write_text("k,k_,z\n7,a,1\nb,c,0\nbad\n")
    texts = si.read_csv(tmp_path / "texts.csv", schema={"k": pa.string(), "k_": pa.string(), "z": pa.int64()})
    rows = si.from_arrow(pa.table({"k": [1, 0], "n": [2.5, 3.5]}))
    one = rows.select(k=col("k") // col("k"))
    found = letters(one, lines, texts.select(k=col("k").str.len() // col("z") + col("k_").str.len()))
    assert list(found[0]) == ["k", "n", "x", "t", "k_", "k__", "z", "error", "bad_file", "bad_line", "bad_text"]
    failed = [{name: value for name, value in row.items() if name in ("k", "k_", "k__", "z", "bad_line")}
              for row in found if row["bad_text"] is None]
    assert sorted(failed, key=lambda row: row["k"] is None) == [
        {"k": 0, "k_": None, "k__": None, "z": None, "bad_line": 2},
        {"k": None, "k_": "b", "k__": "c", "z": 0, "bad_line": None}]
    assert [row["bad_text"] for row in found if row["bad_text"]] == sorted([f"bad {n}" for n in lacking] + ["bad"])


@pytest.mark.parametrize("names", [["bad_file", "bad_line", "bad_text"], ["bad_line", "bad_text"], ["bad_text"]])
@pytest.mark.parametrize("source", ["arrow", "batches", "parquet", "csv"])
@pytest.mark.parametrize("on_error", ["null", "sink"])
def test_columns_of_such_names_that_nobody_reads_are_no_marks(names: list[str], source: str, on_error: str,
                                                              tmp_path: Path) -> None:
    table = pa.table({"k": [1, 2, 1], "x": [100, 2, 3], **{name: ["a", None, "c"] for name in names}})
    pq.write_table(table, tmp_path / "1.parquet")
    pa.csv.write_csv(table, tmp_path / "1.csv")
    flow = {"arrow": lambda: si.from_arrow(table), "parquet": lambda: si.read_parquet(tmp_path / "1.parquet"),
            "batches": lambda: si.from_batches(table.to_batches(), schema=table.schema),
            "csv": lambda: si.read_csv(tmp_path / "1.csv")}[source]()  # fmt: skip
    out, bad = si.to_memory(), si.to_memory()
    flow.group_by("k").agg(n=si.count(), s=(60 // (col("x") - 100)).sum()).start(
        sink=out, on_error=bad if on_error == "sink" else on_error).wait()
    failing = int(on_error == "sink")
    assert dict(zip(*(out.table()[name].to_pylist() for name in ("k", "n")), strict=True)) == {1: 2 - failing, 2: 1}
    if failing:
        assert bad.table()["x"].to_pylist() == [100]


# --- whole files


def write_groups(path: Path, first: int, *, groups: int = 3, rows: int = 100) -> None:
    table = pa.table({"x": range(first, first + groups * rows), "s": ["abc"] * (groups * rows)})
    pq.write_table(table, path, row_group_size=rows, compression="none", use_dictionary=False)


def damage_second_group(path: Path) -> None:
    """Its data page begins with other bytes."""
    start = pq.ParquetFile(path).metadata.row_group(1).column(1).data_page_offset
    with path.open("r+b") as file:
        file.seek(start)
        file.write(b"\xff" * 12)


def test_files_that_cannot_be_read_are_set_aside_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole files, and the part of one that is damaged; a job that crashes and goes on reports them once."""
    monkeypatch.setattr(parquet, "_SPLIT_ROWS", 100)
    monkeypatch.setattr(driver, "MAX_ROUND_ROWS", 60)
    folder = tmp_path / "in"
    folder.mkdir()
    write_groups(folder / "0.parquet", 0)
    (folder / "1.parquet").write_bytes(b"PAR1 this is no parquet")
    write_groups(folder / "2.parquet", 1000)
    damage_second_group(folder / "2.parquet")
    pq.write_table(pa.table({"x": ["text"], "s": ["abc"]}), folder / "3.parquet")
    pq.write_table(pa.table({"more": [1.5], "s": ["abc"], "x": [7]}), folder / "4.parquet")

    def start() -> Job:
        return si.read_parquet(folder).select("x", n=si.col("s").str.len()).start(
            sink=si.to_ipc(tmp_path / "out"), on_error=si.to_ipc(tmp_path / "bad"), checkpoint=tmp_path / "c",
            every="1ms")

    for times in (2, 3):
        with crash_at("batch", times), pytest.raises(Crashed):
            start().wait()
    start().wait()
    assert sorted(read(tmp_path / "out")["x"].to_pylist()) == sorted(
        [*range(300), *range(1000, 1100), *range(1200, 1300), 7])
    letters = read(tmp_path / "bad").sort_by("bad_file").to_pylist()
    assert [Path(letter["bad_file"]).name for letter in letters] == ["1.parquet", "2.parquet", "3.parquet"]
    assert all(letter["error"] and letter["x"] is None for letter in letters)
    assert "'x'" in letters[2]["error"]


def test_a_disk_that_fails_is_not_the_files_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_groups(tmp_path / "0.parquet", 0)

    def broken(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    flow, bad = si.read_parquet(tmp_path), si.to_memory()
    monkeypatch.setattr(pq, "ParquetFile", broken)
    with pytest.raises(si.BadData, match="Input/output error"):
        flow.start(sink=si.to_memory(), on_error=bad).wait()
    assert bad.table().num_rows == 0


def test_a_dead_letter_says_where_its_row_was(tmp_path: Path) -> None:
    for number in range(2):
        write_groups(tmp_path / f"{number}.parquet", 300 * number)
    out, bad = si.to_memory(), si.to_memory()
    si.read_parquet(tmp_path).select(y=1 // (col("x") - 417)).start(sink=out, on_error=bad).wait()
    (letter,) = bad.table().to_pylist()
    assert (letter["x"], letter["s"], letter["bad_line"]) == (417, "abc", 118)
    assert letter["bad_file"].endswith("1.parquet")
    assert "division by zero" in letter["error"]
    assert out.table().num_rows == 599
