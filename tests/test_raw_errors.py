"""Files and folders that cannot be used: always an error of scalein's that names the file and the user's line."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import scalein as si
from scalein import col
from scalein.api.flow import Flow
from scalein.errors import NO_PERMISSION, Damaged, StoreFailed
from scalein.state import LogStore

LATIN = "name,age\nJürgen,5\nann,6\n".encode("latin-1")
WRONG_TEXT = pa.array([b"ok", b"\xff\xfe wrong", None]).cast(pa.binary()).view(pa.string())


def check(found: pytest.ExceptionInfo[si.ScaleinError], name: str = "") -> None:
    assert found.value.facts["at"].startswith("test_raw_errors.py:")
    assert name in str(found.value)


# --- reading


@pytest.mark.parametrize(("name", "content"), [
    ("read_csv", "Größe,x\n1,2\n".encode("latin-1")),
    ("read_csv", LATIN),
    ("read_csv", "name,age\nann,6\n".encode("utf-16")),
    ("read_csv", b"name\n" + b"a\n" * 200_000 + b"\xff\n"),
    ("read_json", b'{"name": "J\xfcrgen"}\n'),
    ("read_json", b'{"name": "a", "n\xfcme": "a"}\n'),
    ("read_json", '{"name": "ann"}\n'.encode("utf-16")),
    ("read_json", b'{"name": "a"}\n' * 100_000 + b'{"name": "\xff"}\n'),
    ("read_json", b"\x00\x01\x02"),
    ("read_parquet", b"no parquet"), ("read_parquet", b""), ("read_ipc", b"no arrow"), ("read_ipc", b""),
], ids=lambda value: str(value[:30]))  # fmt: skip
@pytest.mark.parametrize("schema", [None, {"name": pa.string()}], ids=["inferred", "given"])
def test_files_of_another_encoding_or_format(name: str, content: bytes, schema: object, tmp_path: Path) -> None:
    read = getattr(si, name)
    (tmp_path / "users.data").write_bytes(content)
    if name == "read_csv" and content is LATIN and schema is not None:
        schema = {"name": pa.string(), "age": pa.int64()}
    if name == "read_csv" and content.startswith(b"name") and schema is None:  # what is no text is inferred as binary
        rows = read(tmp_path / "users.data").collect()
        assert rows.schema.types[0] == pa.binary()
        return
    if b"n\xfcme" in content and schema is not None:  # a field that the schema does not name is left out
        assert read(tmp_path / "users.data", schema=schema).collect().num_rows == 1
        return
    with pytest.raises(si.BadData) as caught:
        read(tmp_path / "users.data", schema=schema).collect()
    check(caught, "users.data")


def test_a_line_of_json_that_is_not_utf_8_is_named_and_may_be_set_aside(tmp_path: Path) -> None:
    path = tmp_path / "users.json"
    path.write_bytes(b'{"name": "ann"}\n{"name": "J\xfcrgen"}\n{"name": "bob"}\n')
    flow = si.read_json(path, schema={"name": pa.string()})
    with pytest.raises(si.BadData, match=r"line 2 of .*users\.json cannot be read") as caught:
        flow.collect()
    check(caught)
    rows, bad = si.to_memory(), si.to_memory()
    flow.start(sink=rows, on_error=bad).wait()
    assert rows.table().to_pydict() == {"name": ["ann", "bob"]}
    assert bad.table()["bad_line"].to_pylist() == [2]


def test_a_damaged_archive(tmp_path: Path) -> None:
    packed = gzip.compress(b"x\n" + b"1\n" * 100_000)
    for number, content in enumerate((packed[: len(packed) // 2], packed[:20] + b"\xff" * 20 + packed[40:], b"plain")):
        path = tmp_path / f"{number}.csv.gz"
        path.write_bytes(content)
        with pytest.raises(si.BadData) as caught:
            si.read_csv(path).collect()
        check(caught, f"{number}.csv.gz")


def test_paths_that_lead_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "broken").symlink_to(tmp_path / "nothing")
    (tmp_path / "folder" / "inner.csv").mkdir(parents=True)
    (tmp_path / "file").write_text("x\n1\n")
    for path in ("loop", "broken", "nothing.csv", "a" * 300, "file/inside.csv", "folder", "folder/*.csv",
                 "no/such/*.csv", "[", "a\0b", "loop/x.csv"):
        for read in (si.read_csv, si.read_json, si.read_parquet, si.read_ipc):
            with pytest.raises(si.BadData) as caught:
                read(tmp_path / path).collect()
            check(caught)
    (tmp_path / "many").mkdir()
    (tmp_path / "many" / "loop").symlink_to(tmp_path / "many" / "loop")
    with pytest.raises(si.BadData, match="loop") as caught:
        si.read_csv(tmp_path / "many").collect()
    check(caught)
    assert si.read_csv(os.fsencode(tmp_path / "file")).collect().num_rows == 1
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(si.BadData, match="current directory is gone") as caught:
        si.read_csv("x.csv")
    check(caught)


def test_a_file_that_goes_away_or_may_not_be_read(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": [1]}), tmp_path / "a.parquet")
    flow = si.read_parquet(tmp_path)
    (tmp_path / "a.parquet").unlink()
    (tmp_path / "a.parquet").mkdir()
    assert flow.collect().num_rows == 0
    (tmp_path / "a.parquet").rmdir()
    (tmp_path / "a.parquet").symlink_to(tmp_path / "a.parquet")
    with pytest.raises(si.BadData) as caught:
        flow.collect()
    check(caught, "a.parquet")


def files(folder: Path, *contents: object) -> Path:
    """A folder of Parquet files, or of CSV files where the content is text."""
    for number, content in enumerate(contents):
        if isinstance(content, str):
            (folder / f"{number}.csv").write_text(content)
        else:
            pq.write_table(content, folder / f"{number}.parquet")
    return folder


@pytest.mark.parametrize("run", [
    lambda folder: si.read_parquet(folder).collect(),
    lambda folder: si.read_parquet(folder).start(sink=si.to_memory()).wait(),
    lambda folder: si.read_parquet(folder, follow=True).start(sink=si.to_memory()).wait(),
], ids=["collect", "job", "followed"])  # fmt: skip
def test_a_file_with_another_type_is_named_with_its_column_and_both_types(run: Callable[[Path], object],
                                                                          tmp_path: Path) -> None:
    files(tmp_path, pa.table({"x": [1], "y": ["a"]}), pa.table({"x": ["a"], "y": ["a"]}))
    with pytest.raises(si.BadData, match=r"^column 'x' of \S*1\.parquet is string, not int64") as caught:
        run(tmp_path)
    check(caught)
    assert "corrupt" not in str(caught.value)


def test_a_line_with_another_type_is_named_with_its_column_and_its_type(tmp_path: Path) -> None:
    files(tmp_path, "y,x\na,1\n", "y,x\na,1\nb,two\n")
    for flow in (si.read_csv(tmp_path), si.read_csv(tmp_path, schema={"y": str, "x": int})):
        with pytest.raises(si.BadData, match=r"^line 3 of \S*1\.csv cannot be read") as caught:
            flow.collect()
        check(caught)
        assert caught.value.facts["column"] == "x, which is int64 here"
        assert caught.value.facts["found"] == "CSV conversion error to int64: invalid value 'two'"
    (tmp_path / "1.csv").write_text("y,x\na,1,2\n")
    with pytest.raises(si.BadData) as caught:
        si.read_csv(tmp_path).collect()
    assert "column" not in caught.value.facts, "the whole line is wrong"
    assert caught.value.hint == "each line has as many fields as the first one has names"


@pytest.mark.parametrize(("content", "read", "hint"), [
    (b"x,y\n1,2\n", "parquet", "read_csv"), (b"x,y\n1,2\n", "ipc", "read_csv"), (b"PAR1", "csv", None),
    (b'{"x": 1}\n', "parquet", "read_json"), (pa.table({"x": ["\u00e9" * 9]}), "csv", "read_parquet"),
    (pa.table({"x": [1]}), "json", "read_parquet"), (pa.table({"x": [1]}), "ipc", "read_parquet"),
    (b"PAR1 damaged PAR1", "parquet", "complete"), (b"\x00\x01\x02", "parquet", "complete"),
])  # fmt: skip
def test_a_file_of_another_kind_gets_the_function_that_reads_it(content: object, read: str, hint: str | None,
                                                                tmp_path: Path) -> None:
    path = tmp_path / "file"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        pq.write_table(content, path)
    with pytest.raises(si.BadData) as caught:
        getattr(si, f"read_{read}")(path).collect()
    assert hint is None or hint in str(caught.value.hint)
    check(caught, "file")


def test_a_file_that_may_not_be_read_or_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests may run as root, who may do all."""
    files(tmp_path, pa.table({"x": [1]}))

    def refused(*args: object, **named: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(pq, "read_schema", refused)
    with pytest.raises(si.BadData, match=r"0\.parquet cannot be read") as caught:
        si.read_parquet(tmp_path)
    assert caught.value.hint == NO_PERMISSION
    check(caught)
    monkeypatch.setattr(pa, "OSFile", refused)
    with pytest.raises(si.WriteFailed, match=r"1\.parquet cannot be written") as written:
        si.from_arrow({"x": [1]}).write_parquet(tmp_path / "1.parquet")
    assert written.value.hint == NO_PERMISSION
    check(written)


def test_files_without_rows_have_no_types(tmp_path: Path) -> None:
    files(tmp_path, "x,y\n")
    with pytest.raises(si.BadData, match="have no rows, so the types of their columns are unknown") as caught:
        si.read_csv(tmp_path)
    check(caught)
    assert si.read_csv(tmp_path, schema={"x": int, "y": str}).collect().num_rows == 0


def test_paths_that_utf_8_cannot_hold(tmp_path: Path) -> None:
    path, flow = f"{tmp_path}/\ud800", si.from_arrow({"x": [1]})
    for case in (lambda: flow.write_parquet(path), lambda: flow.write_csv(f"{tmp_path}/\udcff.csv"),
                 lambda: flow.start(sink=si.to_parquet(path)).wait(),
                 lambda: flow.start(sink=si.to_memory(), checkpoint=path).wait(), lambda: si.read_csv(path)):
        with pytest.raises(si.ScaleinError) as caught:
            case()
        check(caught)
        assert str(caught.value).encode(), "an error can be printed"


# --- text in memory


OVER_TEXT: dict[str, Callable[[Flow], Flow]] = {
    "upper": lambda flow: flow.select(y=col("s").str.upper()),
    "cast": lambda flow: flow.select(y=col("s").cast("int64")),
    "matches": lambda flow: flow.filter(col("s").str.matches("w.*g")),
    "group_by": lambda flow: flow.group_by("s").agg(n=si.count()),
    "join": lambda flow: flow.join(pa.table({"s": ["ok"], "v": [1]}), on="s", how="left"),
    "sort": lambda flow: flow.sort("s"),
    "is_in": lambda flow: flow.filter(col("s").is_in(["ok"])),
    "slice": lambda flow: flow.select(y=col("s").str.slice(0, 4)),
    "len": lambda flow: flow.select(y=col("s").str.len()),
    "collect": lambda flow: flow.group_by().agg(v=col("s").collect(), m=col("s").max()),
}


def test_a_function_of_text_that_is_not_utf_8() -> None:
    with pytest.raises(si.ComputeError, match=r"^bytes that are not valid UTF-8 in `s\.str\.upper\(\)`") as caught:
        OVER_TEXT["upper"](si.from_arrow(pa.table({"s": WRONG_TEXT}))).collect()
    check(caught)
    assert "binary" in str(caught.value.hint)


@pytest.mark.parametrize("name", OVER_TEXT)
@pytest.mark.parametrize("encoded", [False, True])
def test_texts_in_memory_that_are_not_utf_8(name: str, encoded: bool) -> None:
    """Rows, which may have the same bytes, or an error of scalein's."""
    text = WRONG_TEXT.dictionary_encode() if encoded else WRONG_TEXT
    found = None
    try:
        OVER_TEXT[name](si.from_arrow(pa.table({"s": text}))).collect()
    except si.ScaleinError as error:
        found = error
    assert found is None or found.facts["at"].startswith("test_raw_errors.py:")


@pytest.mark.parametrize("build", [lambda: col("s") == "\ud800", lambda: col("\ud800"), lambda: si.lit("\udc80"),
                                   lambda: col("s").str.replace("\ud800", "x"), lambda: col("s").is_in(["\ud800"])])
def test_texts_of_a_program_that_no_encoding_has(build: Callable[[], si.Column]) -> None:
    with pytest.raises(si.ScaleinError) as caught:
        si.from_arrow(pa.table({"s": ["a"]})).select(y=build()).collect()
    check(caught)


# --- writing

FULL = """
import os, resource, signal, sys
import pyarrow as pa, scalein as si
from scalein import col
from scalein.state import LogStore
import numpy as np
big = pa.table({"x": np.random.default_rng(7).integers(0, 1 << 60, 1_000_000), "s": ["text"] * 1_000_000})
flow = si.from_arrow(big)
si.from_arrow(big.slice(0, 10)).group_by("s").agg(n=si.count()).collect()
os.mkdir("c")
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    PROGRAM
except si.ScaleinError as error:
    print(type(error).__name__, "|", error)
else:
    print("no error")
"""


@pytest.mark.parametrize(("program", "kind", "name"), [
    ('flow.start(sink=si.to_parquet("out")).wait()', "WriteFailed", "out/"),
    ('flow.start(sink=si.to_csv("out")).wait()', "WriteFailed", "out/"),
    ('flow.start(sink=si.to_json("out")).wait()', "WriteFailed", "out/"),
    ('flow.start(sink=si.to_ipc("out")).wait()', "WriteFailed", "out/"),
    ('flow.group_by("x").agg(n=si.count()).start(sink=si.to_memory(), checkpoint="c").wait()', "StoreFailed", "c/"),
    ('flow.sort("x").start(sink=si.to_memory(), checkpoint="c", memory="1MB").wait()', "StoreFailed", "rows-"),
    ('store = LogStore.open("c/s", key={"x": pa.int64()}, value={"s": pa.string()}); store.upsert(big); store.close()',
     "StoreFailed", "c/s"),
], ids=str)  # fmt: skip
def test_a_full_disk(program: str, kind: str, name: str, tmp_path: Path) -> None:
    """A limit of the size of files stands for it: writes fail in the middle."""
    (tmp_path / "program.py").write_text(FULL.replace("PROGRAM", program))
    ended = subprocess.run([sys.executable, "program.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert ended.stdout.startswith(kind), ended.stdout
    assert "at     program.py:13" in ended.stdout
    assert name in ended.stdout


def test_folders_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    flow = si.from_arrow(pa.table({"x": [1]}))
    for place in (tmp_path / "file", tmp_path / "file" / "inside", tmp_path / ("a" * 300)):
        with pytest.raises((si.WriteFailed, si.BadArgument)) as caught:
            flow.start(sink=si.to_parquet(place)).wait()
        check(caught, str(place))
        with pytest.raises((StoreFailed, si.BadArgument)) as caught:
            flow.start(sink=si.to_memory(), checkpoint=place).wait()
        check(caught, str(place))
        with pytest.raises(si.ScaleinError) as caught:
            LogStore.open(place, key={"x": pa.int64()}, value={"y": pa.int64()})
        check(caught, str(place))


def test_a_checkpoint_that_cannot_be_read(tmp_path: Path) -> None:
    flow, folder = si.from_arrow(pa.table({"x": [1]})), tmp_path / "c"
    flow.start(sink=si.to_memory(), checkpoint=folder).wait()
    newest = max(folder.glob("epoch-*.json"))
    content = newest.read_bytes()
    for path in folder.glob("epoch-*.json"):
        path.unlink()
    newest.mkdir()
    with pytest.raises(StoreFailed, match="manifest cannot be read") as caught:
        flow.start(sink=si.to_memory(), checkpoint=folder)
    check(caught, newest.name)
    newest.rmdir()
    newest.write_bytes(content.replace(b'"epoch"', b'"\xff\xfech"'))
    with pytest.raises(Damaged) as damaged:
        flow.start(sink=si.to_memory(), checkpoint=folder)
    check(damaged, newest.name)
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(StoreFailed) as caught:
        flow.start(sink=si.to_memory(), checkpoint=tmp_path / "loop")
    check(caught, "loop")


def test_an_unusable_temporary_folder(tmp_path: Path) -> None:
    program = textwrap.dedent("""
        import tempfile, scalein as si, pyarrow as pa
        from scalein.errors import StoreFailed
        tempfile.tempdir = "/proc/nothing"
        import numpy as np
        flow = si.from_arrow(pa.table({"x": np.random.default_rng(7).integers(0, 1 << 60, 1_000_000)}))
        groups = flow.group_by("x").agg(n=si.count())
        for run in (lambda: flow.start(sink=si.to_memory()), lambda: groups.collect(memory="1MB")):
            try:
                run()
            except StoreFailed as error:
                print("program.py" in str(error))
        """)
    (tmp_path / "program.py").write_text(program)
    ended = subprocess.run([sys.executable, "program.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ended.stdout == "True\nTrue\n", ended.stderr[-2000:]


def test_an_unreadable_cache_of_kernels_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    program = ("import scalein as si, pyarrow as pa\n"
               "print(si.from_arrow(pa.table({'x': [1]})).select(y=si.col('x') + 1).collect().to_pydict())")
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False,
                           env={**os.environ, "SCALEIN_CACHE_DIR": str(tmp_path / "cache")})
    assert ended.stdout == "{'y': [2]}\n", ended.stderr[-2000:]


def test_metrics_that_cannot_be_logged(tmp_path: Path) -> None:
    job = si.from_arrow(pa.table({"x": [1]})).start(sink=si.to_memory())
    job.wait()
    with pytest.raises(StoreFailed) as caught:
        job.log_metrics(tmp_path)
    check(caught, str(tmp_path))
    assert json.dumps(str(caught.value))
