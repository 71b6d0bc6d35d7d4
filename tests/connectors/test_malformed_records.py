"""Lines of CSV and JSON files that cannot be decoded: an error that names them, null, or rows beside the others."""

from __future__ import annotations

import datetime
import gzip
import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import scalein as si
from scalein import col
from scalein.api.flow import Flow
from scalein.connectors.formats import lenient
from scalein.connectors.formats import text as formats_text
from tests.engines import examples
from tests.same import assert_same

SCHEMA = pa.schema([("a", pa.int64()), ("s", pa.string()), ("d", pa.date32())])
Row = tuple[int | None, str | None, str | None]

WRONG = {"csv": ["1,2", 'x,"no number",', '7,seven,2020-13-01', "1,2,3,4", '"1 ""x""",y,2020-02-03', "\udcff,x,"],
         "json": ['{"a": 1', '{"a": "x", "s": "no number"}', '{"a": 7, "s": "seven", "d": "2020-13-01"}', "oops", "[1]",
                  '{"a": 1, "s": {}}']}  # fmt: skip
# What is left of them, field by field.
NULLED: dict[str, list[Row]] = {
    "csv": [(None, None, None), (None, "no number", None), (7, "seven", None), (None, None, None),
            (None, "y", "2020-02-03"), (None, "x", None)],
    "json": [(None, None, None), (None, "no number", None), (7, "seven", None), (None, None, None), (None, None, None),
             (1, None, None)]}  # fmt: skip
rows = st.tuples(st.none() | st.integers(-9, 9), st.none() | st.sampled_from(["", "x", 'say "a, b"', "two\nlines"]),
                 st.none() | st.just("2020-02-03"))  # fmt: skip


def line(kind: str, row: Row) -> str:
    if kind == "json":
        return json.dumps(dict(zip(SCHEMA.names, row, strict=True)))
    a, s, d = row
    quoted = "" if s is None else '"' + s.replace('"', '""') + '"'
    return f"{'' if a is None else a},{quoted},{d or ''}"


def write(path: Path, kind: str, lines: list[str], end: str = "\n") -> Path:
    header = ["a,s,d"] if kind == "csv" else []
    data = end.join([*header, *lines, ""]).encode(errors="surrogateescape")
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def reading(kind: str) -> Callable[..., Flow]:
    return {"csv": si.read_csv, "json": si.read_json}[kind]


def table(values: list[Row]) -> pa.Table:
    names = SCHEMA.names
    return pa.table([pa.array(list(each), pa.string() if n == "d" else SCHEMA.field(n).type) for n, each in zip(
        names, list(zip(*values, strict=True)) or [()] * 3, strict=True)], names).cast(SCHEMA)  # fmt: skip


def ran(flow: Flow, **how: Any) -> pa.Table:
    out = si.to_memory()
    flow.start(sink=out, **how).wait()
    return out.table()


@pytest.mark.parametrize("kind", ["csv", "json"])
@examples(9)
@given(given=st.lists(rows | st.integers(0, 5), max_size=30), block=st.sampled_from([64, 200, 4 << 20]))
def test_wrong_lines_are_null_or_go_elsewhere(kind: str, given: list[Row | int], block: int,
                                              tmp_path_factory: pytest.TempPathFactory) -> None:
    path = write(tmp_path_factory.mktemp("bad") / f"1.{kind}", kind,
                 [WRONG[kind][each] if isinstance(each, int) else line(kind, each) for each in given])
    good = [each for each in given if not isinstance(each, int)]
    bad = [WRONG[kind][each] for each in given if isinstance(each, int)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lenient, "BLOCK_BYTES", block)
        flow = reading(kind)(path, schema=SCHEMA)
        nulled = [NULLED[kind][each] if isinstance(each, int) else each for each in given]
        assert_same(ran(flow, on_error="null"), table(nulled), ordered=True)
        failed = si.to_memory()
        assert_same(ran(flow, on_error=failed), table(good), ordered=True)
        found = failed.table()
        assert found.schema.names == [*SCHEMA.names, "error", "bad_file", "bad_line", "bad_text"]
        assert [each.encode(errors="surrogateescape").decode(errors="backslashreplace") for each in bad] == (
            found["bad_text"].to_pylist())
        text = path.read_bytes().split(b"\n")
        assert all(text[number - 1].decode(errors="backslashreplace") == shown for number, shown in zip(
            found["bad_line"].to_pylist(), found["bad_text"].to_pylist(), strict=True))
        if bad:
            with pytest.raises(si.BadData, match=f"line {found['bad_line'][0]} of .*1.{kind} cannot be read"):
                flow.collect()
        else:
            assert_same(flow.collect(), table(good), ordered=True)


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize(("kind", "name"), [("csv", "1.csv"), ("csv", "1.csv.gz"), ("json", "1.json.gz")])
def test_lines_are_named_whatever_ends_them(kind: str, name: str, end: str, tmp_path: Path) -> None:
    if kind == "json" and end == "\r":
        pytest.skip("no line of JSON ends so")
    good: Row = (1, "x", None)
    write(tmp_path / name, kind, [line(kind, good)] * 3 + ["", WRONG[kind][1], line(kind, good)], end)
    number = 6 if kind == "csv" else 5
    with pytest.raises(si.BadData, match=rf"(?s)line {number} of .*{name} cannot be read.*text .*no number.*schema="):
        reading(kind)(tmp_path / name, schema=SCHEMA).collect()
    assert ran(reading(kind)(tmp_path / name, schema=SCHEMA), on_error=si.to_memory()).num_rows == 4


def test_a_column_that_nobody_reads_cannot_be_wrong(tmp_path: Path) -> None:
    path = write(tmp_path / "1.csv", "csv", ["1,x,", "oops,y,", "3,z,"])
    flow = si.read_csv(path, schema=SCHEMA)
    assert flow.select("s").collect()["s"].to_pylist() == ["x", "y", "z"]
    assert ran(flow.select("a"), on_error="null")["a"].to_pylist() == [1, None, 3]


def test_a_column_without_nulls_has_none(tmp_path: Path) -> None:
    schema = pa.schema([pa.field("a", pa.int64(), False), ("s", pa.string()), pa.field("d", pa.date32(), False)])
    path = write(tmp_path / "1.csv", "csv", ["1,x,2020-01-01", ",y,2020-01-01", "3,z,no day"])
    flow = si.read_csv(path, schema=schema)
    with pytest.raises(si.BadData, match=r"line 3 of .*cannot be read"):
        flow.collect()
    with pytest.raises(si.BadData, match=r"line 3 of .*cannot be read"):
        ran(flow, on_error="null")
    failed = si.to_memory()
    assert ran(flow.select(n=col("a") + 1, d="d"), on_error=failed)["n"].to_pylist() == [2]
    letters = failed.table().to_pydict()
    reasons = letters.pop("error")
    assert letters == {"a": [None] * 2, "s": [None] * 2, "d": [None] * 2, "bad_file": [str(path)] * 2,
                       "bad_line": [3, 4], "bad_text": [",y,2020-01-01", "3,z,no day"]}  # fmt: skip
    assert "is empty" in reasons[0]
    assert "no day" in reasons[1]


@pytest.mark.parametrize(("lines", "bad"), [
    (["1,x,", '2,"open', *(f"{n},y," for n in range(3, 3000))], [3]),
    (["1,x,", '2,"open,', "3,y,", '4,"but, closed",', "5,z,"], [3]),
    (['1,"x ""', "2,y,", '3,z",,', "4,y,"], [2, 4]),
], ids=["at the end", "by another", "somewhere"])  # fmt: skip
def test_a_quote_that_is_not_closed_spoils_few_lines(lines: list[str], bad: list[int], tmp_path: Path) -> None:
    """The next quote may close it, and is then looked at without."""
    path, failed = write(tmp_path / "1.csv", "csv", lines), si.to_memory()
    found = ran(si.read_csv(path, schema=SCHEMA), on_error=failed)
    assert failed.table()["bad_line"].to_pylist() == bad
    assert found["a"].to_pylist() == [int(each.split(",")[0]) for k, each in enumerate(lines) if k + 2 not in bad]


@pytest.mark.parametrize("cut", ['3,"z\n4', '3,"', '3,"z""', '"3', "3"])
def test_a_file_that_was_cut_is_not_read_as_a_whole_one(cut: str, tmp_path: Path) -> None:
    """Within a record: its quote is open at the end, or it lacks fields."""
    path, failed = tmp_path / "1.csv", si.to_memory()
    path.write_text(f'a,b\n1,"x\ny"\n2,5" pipe\n{cut}')
    flow = si.read_csv(path, schema={"a": pa.int64(), "b": pa.string()})
    with pytest.raises(si.BadData, match=r"line 5 of .*cannot be read"):
        flow.collect()
    with pytest.raises(si.BadData, match=r"line 5 of .*cannot be read"):
        flow.select("a").collect()
    assert ran(flow, on_error=failed).to_pylist() == [{"a": 1, "b": "x\ny"}, {"a": 2, "b": '5" pipe'}]
    assert failed.table()["bad_line"].to_pylist() == [*range(5, 6 + cut.count("\n"))]
    assert failed.table()["bad_text"].to_pylist() == cut.split("\n")


@pytest.mark.parametrize("block", [24, 4 << 20])
@pytest.mark.parametrize("text", [
    'a,b\n1,"x\ny"\noops,"p\n7,evil\nq"\n3,"z"\n', 'a,b\n1,"x\ny"\n3,"z"\noops,"p\n7,evil\nq"',
    'a,b\noops,"p\n7,evil\nq"\n1,"x"\n3,"x\ny"',
], ids=["between", "at the end", "before a good one at the end"])  # fmt: skip
def test_a_wrong_record_of_several_lines_is_one(text: str, block: int, tmp_path: Path,
                                                monkeypatch: pytest.MonkeyPatch) -> None:
    """What stands between its quotes never becomes rows."""
    monkeypatch.setattr(lenient, "BLOCK_BYTES", block)
    path, failed = tmp_path / "1.csv", si.to_memory()
    path.write_text(text)
    flow = si.read_csv(path, schema={"a": pa.int64(), "b": pa.string()})
    found = ran(flow, on_error="null").to_pylist()
    assert {"a": None, "b": "p\n7,evil\nq"} in found
    assert sorted(row["a"] for row in found if row["a"] is not None) == [1, 3]
    assert len(found) == 3
    assert ran(flow, on_error=failed)["a"].to_pylist() == [1, 3]
    number = text[: text.index("oops")].count("\n") + 1
    assert failed.table().select(["bad_line", "bad_text"]).to_pylist() == [
        {"bad_line": number, "bad_text": 'oops,"p\n7,evil\nq"'}]
    with pytest.raises(si.BadData, match=f"line {number} of"):
        flow.collect()


def test_columns_of_the_same_names_keep_theirs(tmp_path: Path) -> None:
    (tmp_path / "1.csv").write_text("error,bad_text,a\nx,y,1\nx,y,z\n")
    failed = si.to_memory()
    flow = si.read_csv(tmp_path, schema={"error": pa.string(), "bad_text": pa.string(), "a": pa.int64()})
    assert ran(flow, on_error=failed).to_pydict() == {"error": ["x"], "bad_text": ["y"], "a": [1]}
    assert failed.table().schema.names == ["error", "bad_text", "a", "error_", "bad_file", "bad_line", "bad_text_"]
    assert failed.table()["bad_text_"].to_pylist() == ["x,y,z"]


@pytest.mark.parametrize("kind", ["csv", "json"])
def test_a_record_with_what_is_needed_is_not_malformed(kind: str, tmp_path: Path) -> None:
    """A dead letter has all columns, but no row fails for one that the flow does not read."""
    lines = ["1,x,no day", "oops,y,2020-01-01", "3,z,2020-01-02"] if kind == "csv" else [
        '{"a": 1, "s": "x", "d": "no day"}', '{"a": "oops", "s": "y"}', '{"a": 3, "s": "z", "d": "2020-01-02"}']
    path, failed = write(tmp_path / f"1.{kind}", kind, lines), si.to_memory()
    flow = reading(kind)(path, schema=SCHEMA).select(n=6 // (col("a") - 3))
    assert ran(flow, on_error=failed)["n"].to_pylist() == [-3]
    assert failed.table().select(["a", "s", "d"]).to_pylist() == [
        {"a": None, "s": None, "d": None}, {"a": 3, "s": "z", "d": datetime.date(2020, 1, 2)}]


@pytest.mark.parametrize("block", [16, 40, 4 << 20])
@pytest.mark.parametrize("lines", [
    ['{"a":1}', '{"a":"x"}', "null", '{"a":3}'], ["null", '{"a":1}'], ["", "  null", '{"a":1}', "null"], ["null"] * 9,
    ["null", '{"a":"x"}', "null"], ['{"a":1}', "null"] * 9, ["nullx", '{"a":1}', "null"], ['{"a":null}'] * 9,
], ids=" ".join)  # fmt: skip
def test_a_null_where_pyarrow_begins_is_a_row(lines: list[str], block: int, tmp_path: Path,
                                              monkeypatch: pytest.MonkeyPatch) -> None:
    """It kills pyarrow, with the whole process."""
    monkeypatch.setattr(lenient, "BLOCK_BYTES", block)
    monkeypatch.setattr(formats_text, "BLOCK_BYTES", block)
    path, failed = write(tmp_path / "1.json", "json", lines), si.to_memory()
    flow = si.read_json(path, schema=SCHEMA)
    given = [None if "x" in each or "null" in each else json.loads(each)["a"] for each in lines if each]
    good = [a for a, each in zip(given, filter(None, lines), strict=True) if "x" not in each]
    assert ran(flow, on_error="null")["a"].to_pylist() == given
    assert ran(flow, on_error=failed)["a"].to_pylist() == good
    assert failed.table()["bad_text"].to_pylist() == [each for each in lines if "x" in each]
    if good == given:
        assert flow.collect()["a"].to_pylist() == given


def test_types_are_found_behind_a_null(tmp_path: Path) -> None:
    path = write(tmp_path / "1.json", "json", ["null", '{"a":1}'])
    assert si.read_json(path).collect().to_pydict() == {"a": [None, 1]}


@pytest.mark.parametrize("how", ["null", "keep", "raise"])
def test_rows_around_wrong_lines_come_together(how: str, tmp_path: Path) -> None:
    """Also those before the one that is an error."""
    path = write(tmp_path / "1.csv", "csv", [f"{'x' if n % 5 == 3 else ''}{n},s," for n in range(100)])
    (part,) = formats_text.Csv(",", malformed=how).splits(str(path), SCHEMA, None, 0)
    found = []
    with pytest.raises(si.BadData, match="line 5 of") if how == "raise" else nullcontext():
        for batch in part.open():
            found.append(batch)
    assert [batch.num_rows for batch in found] == [3 if how == "raise" else 100]
