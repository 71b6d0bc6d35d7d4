"""Lines that cannot be decoded, in jobs that are stopped, crash and go on: each once in its sink, or null."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

import scalein as si
from scalein import col
from scalein.api.flow import Flow
from scalein.connectors.formats import lenient
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
    assert found.schema.names == ["k", "x", "t", "bad_file", "bad_line", "bad_text"]
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


def test_lines_of_another_source_than_the_first_end_the_job(files: Path, tmp_path: Path) -> None:
    def flow(first: Flow) -> Flow:
        return first.union(si.read_csv(files, schema=SCHEMA).select("k"))

    bad, wrong = si.to_memory(), sum(map(is_wrong, range(FILES * LINES)))
    alike = flow(si.read_csv(files, schema=SCHEMA).select("k"))
    alike.start(sink=si.to_memory(), on_error=bad).wait()
    lacking = sum(is_wrong(n) and n % 2 for n in range(FILES * LINES))  # `x` is not read
    assert bad.table().num_rows == 2 * lacking < wrong * 2
    other = flow(si.from_arrow(pa.table({"k": [1]})))
    with pytest.raises(si.BadData, match=r"line 7 of .*takes rows of another source"):
        other.start(sink=si.to_memory(), on_error=si.to_memory()).wait()


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
