"""Files as sources: the same rows as pyarrow reads, in order; errors that name the file."""

from __future__ import annotations

import gzip
import json
import threading
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import scalein as si
from scalein.connectors.formats import parquet
from scalein.connectors.sources import files
from scalein.connectors.sources.files import FileSource
from tests import oracle
from tests.connectors.kinds import KINDS, SCHEMA, Kind, connected, read_all, rows, together

kinds = pytest.mark.parametrize("kind", KINDS, ids=repr)


@kinds
def test_rows_are_those_that_pyarrow_reads(kind: Kind, tmp_path: Path) -> None:
    paths = [tmp_path / f"{k}.data" for k in range(4)]
    for path, (start, count, block) in zip(paths, [(0, 10, 4), (10, 0, 4), (10, 1, 1), (11, 300, 100)], strict=True):
        kind.write(rows(start, count), path, block)
    wanted = pa.concat_tables(kind.read(path) for path in paths)
    assert wanted.num_rows == 311
    flow = kind.scan(tmp_path, schema=SCHEMA)
    assert flow.collect().equals(wanted.cast(SCHEMA))
    assert oracle.collect(flow).equals(wanted.cast(SCHEMA))
    assert pa.Table.from_batches(flow.batches(), SCHEMA).equals(wanted.cast(SCHEMA))
    assert kind.scan(str(tmp_path / "[13].data"), schema=SCHEMA).collect().num_rows == 300 + 0
    assert kind.scan(paths[0], schema=SCHEMA).collect().equals(rows(0, 10))


@kinds
def test_the_schema_is_that_of_the_first_file(kind: Kind, tmp_path: Path) -> None:
    kind.write(pa.table({"a": [1, 2], "b": ["x", None]}), tmp_path / "1", 10)
    flow = kind.scan(tmp_path)
    assert flow.schema == pa.schema({"a": pa.int64(), "b": pa.string()})
    assert flow.collect().to_pydict() == {"a": [1, 2], "b": ["x", None]}


@kinds
def test_only_needed_columns_are_read(kind: Kind, tmp_path: Path) -> None:
    kind.write(rows(0, 50), tmp_path / "1", 20)
    data = connected(kind.scan(tmp_path, schema=SCHEMA))
    narrow = data.project(["t", "n"])
    assert narrow.schema.names == ["t", "n"]
    assert isinstance(narrow.source, FileSource)
    assert narrow.source.schema.names == ["t", "n"]
    for batch, _ in narrow.source.read("files", None):
        assert batch.schema.names == ["t", "n"]
    assert together(read_all(narrow), narrow.schema).equals(rows(0, 50).select(["t", "n"]))


def test_a_plan_prunes_what_the_reader_decodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pq.write_table(rows(0, 50), tmp_path / "1.parquet")
    asked: list[list[str] | None] = []
    parts = parquet.Parquet.splits
    monkeypatch.setattr(parquet.Parquet, "splits", lambda self, path, schema, columns, row:
                        asked.append(columns) or parts(self, path, schema, columns, row))
    flow = si.read_parquet(tmp_path).filter(si.col("n") > 5).select("x")
    assert flow.collect().num_rows == sum(1 for n in range(6, 50) if n % 7 != 3)
    assert asked == [["n", "x"]]
    asked.clear()
    assert si.read_parquet(tmp_path).group_by().agg(n=si.count()).collect().to_pydict() == {"n": [50]}
    assert asked == [["b"]]


@kinds
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(sizes=st.lists(st.integers(0, 12), min_size=1, max_size=4), block=st.integers(1, 5), batch=st.integers(1, 4))
def test_an_offset_gives_exactly_the_rest(kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                          sizes: list[int], block: int, batch: int) -> None:
    monkeypatch.setattr(files, "MAX_ROWS", batch)
    monkeypatch.setattr(parquet, "_SPLIT_ROWS", 2 * block)
    for old in tmp_path.iterdir():
        old.unlink()
    total = 0
    for number, size in enumerate(sizes):
        kind.write(rows(total, size), tmp_path / f"{number}", block)
        total += size
    data = connected(kind.scan(tmp_path, schema=SCHEMA))
    whole = read_all(data)
    assert together(whole).equals(rows(0, total))
    done = 0
    for piece, offset in whole:
        done += piece.num_rows
        kept = json.loads(json.dumps(offset))
        assert together(read_all(data, kept)).equals(rows(done, total - done))
        assert together(read_all(data.project(["s"]), kept), pa.schema([SCHEMA.field("s")])).equals(
            rows(done, total - done).select(["s"]))


def test_row_groups_before_an_offset_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet, "_SPLIT_ROWS", 10)
    pq.write_table(rows(0, 100), tmp_path / "1.parquet", row_group_size=10)
    opened: list[int] = []
    part = parquet.FileSplit
    monkeypatch.setattr(parquet, "FileSplit", lambda row, open: opened.append(row) or part(row, open))
    data = connected(si.read_parquet(tmp_path))
    assert together(read_all(data, {"file": "1.parquet", "row": 75, "done": False})).equals(rows(75, 25))
    assert opened == [70, 80, 90]


def test_a_file_read_to_its_end_may_go_and_one_begun_may_not(tmp_path: Path) -> None:
    for number in range(2):
        pq.write_table(rows(10 * number, 10), tmp_path / f"{number}.parquet")
    data = connected(si.read_parquet(tmp_path))
    [(_, first), _] = read_all(data)
    (tmp_path / "0.parquet").unlink()
    assert together(read_all(data, first)).equals(rows(10, 10))
    with pytest.raises(si.BadData, match=r"0\.parquet is gone, but only 5 rows"):
        read_all(data, {"file": "0.parquet", "row": 5, "done": False})
    with pytest.raises(si.BadData, match=r"1\.parquet has fewer rows than the 11"):
        read_all(data, {"file": "1.parquet", "row": 11, "done": False})


def test_dictionaries_slices_and_empty_row_groups(tmp_path: Path) -> None:
    table = pa.table({"k": pa.array(["a", "b", None, "a"] * 5).dictionary_encode(), "v": range(20)}).slice(3, 14)
    with pq.ParquetWriter(tmp_path / "1.parquet", table.schema) as writer:
        writer.write_table(table.slice(0, 0))
        writer.write_table(table, row_group_size=5)
        writer.write_table(table.slice(0, 0))
    plain = pa.table({"k": table["k"].cast(pa.string()), "v": table["v"]})
    assert si.read_parquet(tmp_path).collect().equals(plain)
    counts = si.read_parquet(tmp_path).group_by("k").agg(n=si.count()).collect().to_pylist()
    assert sorted((row["k"] or "", row["n"]) for row in counts) == [("", 3), ("a", 8), ("b", 3)]


def test_nested_columns(tmp_path: Path) -> None:
    table = pa.table({"l": [[1, 2], None, []], "p": [{"x": 1, "y": "a"}, None, {"x": 3, "y": None}], "v": [1, 2, 3]})
    pq.write_table(table, tmp_path / "1.parquet")
    assert si.read_parquet(tmp_path).select("p", "l").collect().equals(table.select(["p", "l"]))


def test_hidden_files_are_not_there_and_folders_are(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "_c").mkdir()
    for number, name in enumerate(["b/1.parquet", "a.parquet", "_SUCCESS", ".x.parquet", "_c/2.parquet"]):
        pq.write_table(pa.table({"v": [number]}), tmp_path / name)
    assert si.read_parquet(tmp_path).collect()["v"].to_pylist() == [1, 0]
    assert si.read_parquet(tmp_path / "**" / "*.parquet").collect()["v"].to_pylist() == [1, 0]
    assert si.read_parquet(tmp_path / "_SUCCESS").collect()["v"].to_pylist() == [2]
    (tmp_path / "k=1").mkdir()
    pq.write_table(pa.table({"v": [5]}), tmp_path / "k=1" / "1.parquet")
    with pytest.raises(si.BadData, match="partitioned table"):
        si.read_parquet(tmp_path)
    assert si.read_parquet(tmp_path / "**" / "*.parquet").collect().to_pydict() == {"v": [1, 0, 5]}


def test_names_with_wildcards_are_names_if_they_exist(tmp_path: Path) -> None:
    pq.write_table(pa.table({"v": [1]}), tmp_path / "a[1].parquet")
    pq.write_table(pa.table({"v": [2]}), tmp_path / "a1.parquet")
    assert si.read_parquet(tmp_path / "a[1].parquet").collect()["v"].to_pylist() == [1]


@kinds
def test_a_file_of_another_schema_is_named(kind: Kind, tmp_path: Path) -> None:
    kind.write(pa.table({"a": [1], "b": [2]}), tmp_path / "1", 10)
    kind.write(pa.table({"a": [1]}), tmp_path / "2", 10)
    flow = kind.scan(tmp_path)
    if kind.name == "json":
        assert flow.collect()["b"].to_pylist() == [2, None]
        kind.write(pa.table({"a": ["text"]}), tmp_path / "2", 10)
        with pytest.raises(si.BadData, match="2 cannot be read"):
            flow.collect()
        return
    with pytest.raises(si.BadData, match="2 has no column 'b'"):
        flow.collect()
    kind.write(pa.table({"a": [1], "b": [2], "c": [3]}), tmp_path / "2", 10)
    assert flow.collect().to_pydict() == {"a": [1, 1], "b": [2, 2]}, "an additional column is ignored"
    kind.write(pa.table({"a": [1], "b": ["text"]}), tmp_path / "2", 10)
    with pytest.raises(si.BadData, match=r"column 'b' of .*2 is string|2 cannot be read"):
        flow.collect()
    kind.write(pa.table({"b": [5], "a": [6]}), tmp_path / "2", 10)
    assert flow.collect().to_pydict() == {"a": [1, 6], "b": [2, 5]}


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.name not in ("csv", "json")], ids=repr)
def test_a_truncated_file_is_named(kind: Kind, tmp_path: Path) -> None:
    table = pa.table({"v": range(1000)})
    for name in ("1", "2"):
        kind.write(table, tmp_path / name, 100)
    whole = (tmp_path / "2").read_bytes()
    for size in (0, 3, len(whole) // 2):
        (tmp_path / "2").write_bytes(whole[:size])
        got: list[pa.RecordBatch] = []
        with pytest.raises(si.BadData, match="2 cannot be read"):
            got.extend(kind.scan(tmp_path).batches())
        assert sum(batch.num_rows for batch in got) >= 1000  # what comes before it is delivered


def test_csv_that_cannot_be_converted_is_named(tmp_path: Path) -> None:
    (tmp_path / "1.csv").write_text("a,b\n1,x\n2,y\n")
    (tmp_path / "2.csv").write_text("a,b\n1,x\noops,y\n")
    with pytest.raises(si.BadData, match=r"(?s)2\.csv cannot be read.*oops.*schema="):
        si.read_csv(tmp_path).collect()
    (tmp_path / "2.csv").write_text("a,b\n1\n")
    with pytest.raises(si.BadData, match=r"(?s)2\.csv cannot be read.*Expected 2 columns"):
        si.read_csv(tmp_path).collect()


def test_csv_in_detail(tmp_path: Path) -> None:
    path = tmp_path / "1.csv"
    path.write_bytes(b'\xef\xbb\xbfname;when;score\n"a;\nb";2024-01-02 03:04:05;nan\n;;\n\n'
                     b'"";2024-01-02 03:04:05;1e3\n')
    table = si.read_csv(path, delimiter=";").collect()
    assert table.column_names == ["name", "when", "score"]
    assert table["name"].to_pylist() == ["a;\nb", None, ""]
    assert table.schema.field("when").type == pa.timestamp("s")
    assert str(table["score"].to_pylist()) == "[nan, None, 1000.0]"
    (tmp_path / "2.csv.gz").write_bytes(gzip.compress(b"x\n1\n"))
    assert si.read_csv(tmp_path / "2.csv.gz").collect().to_pydict() == {"x": [1]}
    with pytest.raises(si.BadArgument, match="one character"):
        si.read_csv(path, delimiter="::")


def test_text_without_types(tmp_path: Path) -> None:
    (tmp_path / "1.csv").write_text("")
    with pytest.raises(si.BadData, match="have no rows"):
        si.read_csv(tmp_path)
    (tmp_path / "2.csv").write_text("a,b\n")
    with pytest.raises(si.BadData, match="have no rows"):
        si.read_csv(tmp_path)
    assert si.read_csv(tmp_path, schema={"a": pa.int64(), "b": str}).collect().num_rows == 0
    (tmp_path / "3.csv").write_text("a,b\n1,\n")
    with pytest.raises(si.BadData, match=r"'b' of .* has no value in its first rows"):
        si.read_csv(tmp_path)
    (tmp_path / "3.csv").write_text("a,b\n1,2\n")
    assert si.read_csv(tmp_path).collect().to_pydict() == {"a": [1], "b": [2]}


def test_json_in_detail(tmp_path: Path) -> None:
    (tmp_path / "1.json").write_text("")
    (tmp_path / "2.json").write_text('{"a": 1, "p": {"x": [1, 2]}}\n\n{"a": null, "p": null}\n')
    assert si.read_json(tmp_path).collect().to_pylist() == [{"a": 1, "p": {"x": [1, 2]}}, {"a": None, "p": None}]
    (tmp_path / "3.json").write_text('{"a": 1\n')
    with pytest.raises(si.BadData, match=r"3\.json cannot be read"):
        si.read_json(tmp_path).collect()


def test_wrong_paths(tmp_path: Path) -> None:
    with pytest.raises(si.BadData, match="no file matches"):
        si.read_parquet(tmp_path)
    with pytest.raises(si.BadData, match="no file matches"):
        si.read_parquet(tmp_path / "*.parquet")
    with pytest.raises(si.BadData, match="there is no directory"):
        si.read_parquet(tmp_path / "nowhere" / "x.parquet")
    with pytest.raises(si.BadArgument, match="takes a path"):
        si.read_parquet(5)
    (tmp_path / "x").write_text("no parquet")
    with pytest.raises(si.BadData, match="x cannot be read"):
        si.read_parquet(tmp_path / "x")


def test_large_batches_are_cut_and_wide_rows_make_small_ones(tmp_path: Path) -> None:
    table = pa.table({"v": range(600_000)})
    with pa.OSFile(str(tmp_path / "1.arrow"), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    sizes = [batch.num_rows for batch, _ in read_all(connected(si.read_ipc(tmp_path)))]
    assert max(sizes) <= 1 << 18
    assert sum(sizes) == 600_000
    pq.write_table(pa.table({"v": ["x" * 20_000 + str(k) for k in range(2200)]}), tmp_path / "1.parquet")
    sizes = [batch.num_rows for batch, _ in read_all(connected(si.read_parquet(tmp_path / "1.parquet")))]
    assert max(sizes) < 2000


def test_a_closed_reader_leaves_no_thread(tmp_path: Path) -> None:
    for number in range(20):
        pq.write_table(pa.table({"v": range(1000)}), tmp_path / f"{number:02}.parquet")
    before = set(threading.enumerate())
    assert si.read_parquet(tmp_path).limit(5).collect().num_rows == 5
    batches = connected(si.read_parquet(tmp_path)).read_from("files", None)
    next(batches)
    batches.close()
    assert set(threading.enumerate()) <= before
