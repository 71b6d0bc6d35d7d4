"""`scalein bench migration`: its checks, its tables and plots; jobs run, and streams without a JVM."""

from __future__ import annotations

import csv
import itertools
import json
from pathlib import Path
from xml.etree import ElementTree

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import scalein as si
from scalein.cli import bench_migration
from scalein.cli.bench_migration import (
    MIGRATIONS,
    BatchPoint,
    CurvePoint,
    JobRun,
    Load,
    StreamRun,
    check_changes,
    load_results,
    report,
)
from scalein.cli.main import main
from scalein.cli.migration_plots import draw
from scalein.errors import InternalError
from tests.spark.simulated import run, start_stream


def test_jobs_and_curves(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_migration, "PILOT_ROWS", 20_000)
    out = tmp_path / "out"
    assert main(["bench", "migration", "--parts", "job,curves", "--keys", "1000", "--rate", "20000", "--seconds", "0.1",
                 "--workers", "1,2", "--out", str(out)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if line] == [
        "job", "───────", "scale", "restart", "curve", "─────────", "stateless", "stateless", "stateful", "stateful"]
    assert {path.name for path in out.iterdir()} == {"results.json", "jobs.csv", "curves.csv", "jobs.png", "jobs.svg",
                                                     "curves.png", "curves.svg"}
    streams, jobs, points = load_results(out / "results.json")
    assert not streams
    assert [(each.way, len(each.rescaled_s), each.state_bytes_moved) for each in jobs] == [("scale", 2, 0),
                                                                                           ("restart", 2, 0)]
    assert all(rows >= 0 for each in jobs for _, rows, _ in each.outputs)
    assert [(point.flow, point.workers) for point in points] == [
        (flow, workers) for flow in ("stateless", "stateful") for workers in (1, 2)]
    with open(out / "jobs.csv", encoding="utf-8") as file:
        assert sum(int(row["rows"]) for row in csv.DictReader(file)) == sum(rows for each in jobs
                                                                            for _, rows, _ in each.outputs)
    assert json.loads((out / "results.json").read_text())["settings"]["keys"] == "1000"


def test_changes_of_a_stream_are_checked(tmp_path: Path) -> None:
    """Those of a rescaled stream are right; any that are missing or different are reported."""
    load = Load(1_000, 0.02, 2)
    tables = list(load.tables())
    assert len(tables) == load.files
    schema = tables[0].schema
    stream = start_stream(bench_migration.counter(si.flow(schema)), tmp_path / "checkpoint",
                          si.to_parquet(tmp_path / "out"), partitions=2, emit="changes", migration="hybrid")
    for number, table in enumerate(tables):
        stream.partitions = (2, 4, 3)[number % 3]
        run(stream, [[table]], first=number)
    stream.close()
    out = tmp_path / "out"
    check_changes(out, tables)
    with pytest.raises(InternalError, match="no file"):
        check_changes(out, tables[:-1])
    with pytest.raises(InternalError, match=f"batch {len(tables)} of the stream"):
        check_changes(out, [*tables, tables[-1]])
    with pytest.raises(InternalError, match="batch 5 of the stream"):
        check_changes(out, [*tables[:5], tables[5].slice(1), *tables[6:]])
    path = next(path for path in sorted(out.glob("*.parquet")) if int(path.name.split("-")[2]) == 7)
    changes = pq.read_table(path)
    for name, wrong in (("op", pa.array(["insert"] * changes.num_rows)), ("m3", changes["m3"].to_numpy() + 1)):
        pq.write_table(changes.set_column(changes.schema.get_field_index(name), name, pa.array(wrong)), path)
        with pytest.raises(InternalError, match="batch 7 of the stream"):
            check_changes(out, tables)


def made_up(where: str, migration: str) -> StreamRun:
    """Batches a second apart, of 100 ms, and 400 ms when eager moves the state."""
    points = []
    for number in range(9):
        partitions = (2, 4, 3)[number // 3]
        is_first = number in (3, 6)
        took_s = 0.4 if is_first and migration == "eager" else 0.1
        moved = (50_000_000 if migration == "eager" else 500_000) if is_first else 0
        points.append(BatchPoint(number, partitions, 1_000, float(number), number + took_s, took_s, moved, moved,
                                 moved + 1_000, 0, 100_000_000))
    return StreamRun(where, migration, points)


def test_streams_are_reported_and_drawn(tmp_path: Path) -> None:
    streams = [made_up(where, migration) for where in ("local", "cluster") for migration in MIGRATIONS]
    lines = report(streams, [], []).splitlines()
    heads = lines[0].split("  ")
    assert heads[0] == "Spark"
    eager, lazy = lines[2].split(), lines[3].split()
    assert eager == ["local", "eager", "100", "100", "4.0", "4.0", "100", "50.0", "100.0", "100.0", "300", "400"]
    assert lazy[:6] == ["local", "lazy", "100", "100", "1.0", "1.0"]
    points = [CurvePoint("stateful", k, 1e6 * k, 0.001, 0.002) for k in (1, 2)]
    found = draw(tmp_path, streams, [], points)
    assert {path.name for path in found} == {f"{name}.{kind}" for name, kind in itertools.product(
        ("streams-local", "streams-cluster", "curves"), ("png", "svg"))}
    for path in found:
        if path.suffix == ".svg":
            assert ElementTree.parse(path).getroot().tag.endswith("svg")
        else:
            assert path.read_bytes().startswith(b"\x89PNG")


def test_a_pause_is_that_of_its_rescale() -> None:
    """Not that of a busy machine half a second later."""
    ends = [0.0, 1.0, 1.25, 1.5, 3.0, 3.25, 3.5, 4.5, 4.75]
    run = JobRun("scale", 1.0, [(end, 1, 0.0) for end in ends], [1.125, 3.25, 4.75], 0)
    assert run.pauses_s() == [0.25, 0.25, 0.25]
    assert JobRun("restart", 1.0, run.outputs, [1.5, 3.5], 0).pauses_s() == [1.5, 1.0]


@pytest.mark.parametrize(("options", "says"), [
    (["--parts", "job,stream"], "no part 'stream'"), (["--keys", "10"], "--keys must be at least"),
    (["--touched", "0"], "--touched is a share"), (["--workers", "two"], "--workers takes numbers"),
])  # fmt: skip
def test_wrong_options_are_named(options: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "migration", *options]) == 1
    assert says in capsys.readouterr().err


def test_plots_need_matplotlib(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_migration, "find_spec", lambda name: None)
    assert main(["bench", "migration"]) == 1
    assert "pip install matplotlib, or --no-plots" in capsys.readouterr().err
