"""CSV and JSON files that tasks read in place of Spark: the same rows as Spark's own reader, or none at all."""

from __future__ import annotations

import json
import os
import time
from collections import defaultdict
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import scalein as si
import scalein.spark as sis
from scalein import col
from scalein.errors import NOWHERE
from scalein.spark import text_splits
from scalein.spark.csv_lines import CsvLines
from scalein.spark.file_scan import text_of_batch
from scalein.spark.json_lines import JsonLines
from scalein.spark.row_groups import ScannedFile
from scalein.spark.streaming import query
from scalein.spark.streaming.coordinator import Coordinator
from scalein.spark.text_splits import Lines, NotPlain, TextSplits, plan_text
from scalein.spark.types import arrow_schema
from tests.same import assert_same
from tests.spark.test_files import setting

FILES = 200  # of a random test
DDL = ("i int, l bigint, y tinyint, d double, b boolean, day date, t timestamp, n timestamp_ntz, p decimal(9, 2), "
       "s string")  # fmt: skip
PLAIN: dict[str, list[str]] = {
    "i": ["7", "-7", "007", "-0", "2147483647"], "l": ["0", "9223372036854775807", "-9223372036854775808"],
    "y": ["-128", "127"],
    "d": ["1.5", "-0.0", "1e3", "1E-3", ".5", "5.", "+7", "1e400", "4.9e-324", "9007199254740993", "0.1e+2", "-.5e7",
          "2.2250738585072012e-308", "1.7976931348623157e308", "123456789012345678901234567890", "0.30000000000000004"],
    "b": ["true", "False", "TRUE"], "day": ["2024-02-29", "0001-01-01", "9999-12-31"],
    "t": ["2024-01-02 03:04:05", "1500-01-01T00:00:00.1", "1969-12-31 23:59:59.999999"],
    "n": ["2024-01-02 03:04:05", "0001-01-01T00:00:00", "2024-01-02T03:04:05.123456"],
    "p": ["1.5", "-1234567.89", "0", "1.50", "+1.5", ".5", "5."],
    "s": ["a", " a", "a ", "é", "#a", "it's", "\t", "x" * 300],
}  # fmt: skip
HOSTILE = [
    "+7", " 7", "7 ", "\t7", "0x10", "1e3", "1.0", "2147483648", "9223372036854775808", "-9223372036854775809", "1_0",
    "null", "NULL", "NaN", "nan", "-", "٣", "7L", "7f", "7d", "Inf", "-Infinity", "inf", "+Inf", "0x1p3", "1,000",
    "--7", "1.2.3", "1e", "t", "0", "1", "yes", " true", "2024-1-2", "2024-01-02T00:00:00", "10000-01-01", "2024-02-30",
    "20240102", "2024-01-02Z", "2024-01-02 03:04:05Z", "2024-01-02T03:04:05.123Z", "2024-01-02T03:04:05+01:00",
    "2024-01-02 03:04", "2024-01-02 03", "2024-01-02 3:04:05", "2024-01-02 24:00:00", "2024-01-02 03:04:60",
    "2024-01-02 03:04:05.1234567", "2024-01-02 03:04:05.", "2024-01-02 030405", "0000-01-01", "0000-01-01 00:00:00",
    "2024-01-02t03:04:05", "2024-01-02 03:04:05 UTC", "1.555", "12345678.9", "1e-1", "\\", "a\\b", "a\\,b", "a'b",
    'a"b', '"', '""', '""""', '"a"', '" a"', '"a "', '"  "', '"a""b"', '"a\\"b"', '"a,b"', '"a"b', '"a" ', ' "a"',
    '"a\nb"', '"7"', '"2024-01-02"', '"\\"', "\x00", "\ufeffa", "\x1f", "\u2028", "\x0b", "\x85", "a\rb", "a\nb", "a,b",
    " ", "", "#", "x" * 5000, '"' + "x" * 5000 + '"', "𝄞",
]  # fmt: skip


def a_line(random: Random, hostility: float) -> str:
    fields = []
    for values in PLAIN.values():
        text = random.choice(HOSTILE if random.random() < hostility else ["", *values * 2])
        quoted = random.random() < 0.1 and '"' not in text
        fields.append(f'"{text}"' if quoted else text)
    if random.random() < hostility / 4:
        return random.choice(["", " ", "a", ",".join(fields[1:]), ",".join([*fields, "more"]), "\t", "\x00", "," * 9])
    return ",".join(fields)


def a_file(random: Random, has_header: bool) -> bytes:
    hostility = random.choice([0, 0, 0.02, 0.1])
    lines = [a_line(random, hostility) for _ in range(random.randint(0, 8))]
    if has_header or random.random() < hostility:
        odd = random.choice(["", "  ", "a,b", "i", '"i', '"a\nb",c', "\ufeffi,l", "\\", "a\tb"])
        lines.insert(0, odd if random.random() < hostility else ",".join(PLAIN))
    end = random.choice(["\n", "\n", "\r\n", "\r" if hostility else "\n"])
    data = end.join([*lines, *([""] if random.random() < 0.8 else [])]).encode()
    return data + b"\xff" if random.random() < hostility else data


# --- JSON

JSON_DDL = "i int, l bigint, d double, b boolean, day date, t timestamp, n timestamp_ntz, s string"
JSON_PLAIN: dict[str, list[str]] = {
    "i": ["7", "-7", "-0", "2147483647"], "l": ["0", "9223372036854775807", "-9223372036854775808"],
    "d": ["1.5", "1e3", "1E-3", "-7", "0", "0.0", "4.9e-324", "9007199254740993", "123456789012345678901234567890"],
    "b": ["true", "false"], "day": [f'"{text}"' for text in PLAIN["day"]], "t": [f'"{text}"' for text in PLAIN["t"]],
    "n": [f'"{text}"' for text in PLAIN["n"]],
    "s": ['"a"', '""', '" a"', '"é"', '"\\u00e9"', '"\\n"', '"\\/"', '"\\""', '"\\\\"', '"\\ud83d\\ude00"', '"Info"',
          '"}"', '"{"', '"a}{b"', '"\\u0000"', '"\u2028"', '"' + "x" * 300 + '"'],
}  # fmt: skip
JSON_HOSTILE = [
    "7.0", "1e2", '"7"', "2147483648", "9223372036854775808", "-9223372036854775809", "true", "null", "{}", "[]", "NaN",
    "Infinity", "-Infinity", "Inf", "-Inf", "INF", '"NaN"', '"Infinity"', "-0", "-0.0", "-0e5", "007", "+7", "1e400",
    "-1e400", "1e-400", '""', "1.50", '{"a": 1}', "[1, 2]", "'a'", '"\\x"', '"a\tb"', '"\x01"', '"\\ud83d"',
    '"\\uD83D\\u0041"', '"true"', "True", "tru", "1.", "-.5", ".5", "1e", "-", "0x10", '"\\u00"', '"a', 'a"', '"a" ',
    "1 2", '[{"i": 5}', '{"a": [}', "1}{", '1}\n{"i": 2', '1,\n"l": 2', "1}}", '1, "i": 2', '1, "s": "again"',
    '1, "more": 01', '1, "more": NaN', '1, "more": Inf', '1, "more": 1e999', '1, "more": [1, 2',
    '1, "more": {"i": 3, "a": [1, {"s": 2}]}', '1, "\\u0073": "k"', '1, s: "x"', "/* c */ 1", "1 // x", '1, "I": 3',
    "1" * 200, "1" * 1200, "0." + "1" * 700, '"' + "x" * 1500 + '"', "\x00", '"\x00"', "1,", ",1",
    "{" * 300 + "}" * 300,
    *(f'"{text}"' for text in HOSTILE if not set(text) & {*'"\\\n'}),
]  # fmt: skip


def a_number(random: Random) -> str:
    digits = random.randrange(1, 30)
    return random.choice([f"{random.uniform(-1e3, 1e3):.{digits}f}", f"{random.random():.{digits}e}",
                          str(random.randrange(-10**digits, 10**40)), repr(random.random() * 10 ** (digits - 15)),
                          f"{random.randrange(1, 10**17)}e{random.randrange(-345, 290)}"])  # fmt: skip


def an_object(random: Random, hostility: float) -> str:
    fields = []
    for name, values in JSON_PLAIN.items():
        text = random.choice(JSON_HOSTILE if random.random() < hostility else [*values * 2, "null"])
        text = a_number(random) if name == "d" and random.random() < 0.5 else text
        fields += [f'"{name}"{random.choice([":", ": "])}{text}'] if random.random() < 0.9 else []
    fields += [random.choice(['"more": 1', '"more": {"a": [1, null]}', '"more": "a"'])] if random.random() < 0.3 else []
    random.shuffle(fields)
    line = "{" + random.choice([",", ", "]).join(fields) + "}"
    odd = ["", " ", "null", "1", "[]", f"[{line}]", f"[{line},{line}]", f"{line} ", f" {line}", line + line, line[:-1],
           line[1:], f"{line},", line.replace('"', "'"), "{}", "{ }", "bad", f"{line}}}", f"{{{line}}}",
           f"\ufeff{line}", f"{line}\t", f'{{"":{line}}}']  # fmt: skip
    return random.choice(odd) if random.random() < hostility / 2 else line


def a_json_file(random: Random) -> bytes:
    hostility = random.choice([0, 0, 0.02, 0.1])
    end = random.choice(["\n", "\n", "\n", "\r\n" if hostility else "\n", "\r" if hostility else "\n"])
    text = end.join(an_object(random, hostility) for _ in range(random.randint(0, 7)))
    data = (text + random.choice(["", "\n", "\n"])).encode()
    return data[:-5] + b"\xff" + data[-5:] if random.random() < hostility else data


# --- the same rows


def rows_by_tasks(path: Path, schema: pa.Schema, lines: Lines) -> list[tuple[Any, ...]] | None:
    splits = plan_text([ScannedFile(str(path), {})], schema, lines)
    assert splits is not None
    try:
        return sorted(row for part in splits.split(3) for batch in part.read() for row in rows_of(pa.table(batch)))
    except NotPlain:
        return None


def rows_of(table: pa.Table) -> list[tuple[Any, ...]]:
    """Rows that compare by their bits."""
    columns = [column.cast(pa.int64()) if pa.types.is_timestamp(column.type) else
               column.cast(pa.int32()) if pa.types.is_date(column.type) else column for column in table.columns]
    return [tuple(map(repr, row)) for row in zip(*(column.to_pylist() for column in columns), strict=True)]


def rows_by_spark(df: Any) -> dict[str, list[tuple[Any, ...]]]:
    table = df.selectExpr("*", "input_file_name() file").toArrow()
    found = defaultdict(list)
    for file, row in zip(table["file"].to_pylist(), rows_of(table.drop_columns(["file"])), strict=True):
        found[Path(file).name].append(row)
    return found


def check_files(df: Any, lines: Lines, folder: Path, seed: int) -> int:
    """Check that tasks read the rows of a DataFrame, or refuse; returns the number of files of which they read rows."""
    schema, wanted, read = arrow_schema(df.schema, NOWHERE), rows_by_spark(df), 0
    for path in folder.iterdir():
        found = rows_by_tasks(path, schema, lines)
        if found is not None:
            read += bool(found)
            assert found == sorted(wanted[path.name]), (seed, path.read_bytes())
    return read


@pytest.mark.parametrize("format", ["csv", "json"])
def test_rows_are_those_of_spark(spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, format: str) -> None:
    """Random files with hostile fields and lines, cut anywhere: what tasks read is what Spark reads."""
    seed = int.from_bytes(os.urandom(4))
    random = Random(seed)
    monkeypatch.setattr(text_splits, "SPLIT_BYTES", 300)
    monkeypatch.setattr(text_splits, "BLOCK_BYTES", 100)
    has_header = format == "csv" and random.random() < 0.7
    for number in range(FILES):
        (tmp_path / f"{number}.{format}").write_bytes(
            a_file(random, has_header) if format == "csv" else a_json_file(random))
    if format == "csv":
        df = spark.read.schema(DDL).csv(str(tmp_path), header=has_header)
        lines: Lines = CsvLines(tuple(PLAIN), ",", has_header, "UTC")
    else:
        df, lines = spark.read.schema(JSON_DDL).json(str(tmp_path)), JsonLines("UTC")
    assert check_files(df, lines, tmp_path, seed) > FILES / 5
    assert check_files(df.select("s", "i", "d"), lines, tmp_path, seed) > FILES / 5


# --- which files

OPTIONS: list[tuple[dict[str, Any], bool]] = [
    ({}, True), ({"header": True}, True), ({"header": "true", "sep": ";"}, True), ({"delimiter": "|"}, True),
    ({"mode": "FAILFAST"}, True), ({"mode": "dropmalformed", "header": "FALSE"}, True), ({"sep": "\t"}, False),
    ({"sep": "||"}, False), ({"quote": "'"}, False), ({"escape": '"'}, False), ({"comment": "#"}, False),
    ({"nullValue": "NA"}, False), ({"emptyValue": "-"}, False), ({"ignoreLeadingWhiteSpace": True}, False),
    ({"multiLine": True}, False), ({"encoding": "latin1"}, False), ({"dateFormat": "dd/MM/yyyy"}, False),
    ({"timestampFormat": "yyyy"}, False), ({"timeZone": "Asia/Tokyo"}, False), ({"lineSep": ";"}, False),
    ({"enforceSchema": False}, False), ({"locale": "de"}, False), ({"nanValue": "x"}, False),
]  # fmt: skip


def plan_of(df: Any, names: list[str] | None = None) -> TextSplits | None:
    """The splits of a DataFrame that is a scan."""
    plan = df._jdf.queryExecution().executedPlan()
    while plan.getClass().getSimpleName() != "FileSourceScanExec":
        plan = plan.children().apply(0)
    found = text_of_batch(plan, df.sparkSession)
    schema = arrow_schema(df.schema, NOWHERE, names)
    return None if found is None else plan_text(found[0], schema, found[1])


def test_options_and_types_that_tasks_read(spark: Any, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.csv").write_text("1,2\n")
    for options, is_read in OPTIONS:
        df = spark.read.schema("k int, s string").options(**options).csv(str(tmp_path / "in"))
        assert (plan_of(df) is not None) == is_read, options
    for ddl in ("k int", "k int, f float", "k int, _corrupt_record string", "k int, b binary"):
        assert plan_of(spark.read.schema(ddl).csv(str(tmp_path / "in"))) is None, ddl
    assert plan_of(spark.read.schema("k int, s string").parquet(str(tmp_path / "in"))) is None
    plain = spark.read.schema("k int, s string").csv(str(tmp_path / "in"))
    for name, value in (("spark.sql.csv.parser.columnPruning.enabled", "false"),
                        ("spark.sql.legacy.timeParserPolicy", "LEGACY")):
        with setting(spark, name, value):
            assert plan_of(plain) is None, name
    for options, is_read in (({}, True), ({"mode": "FAILFAST"}, True), ({"multiLine": True}, False),
                             ({"primitivesAsString": True}, False), ({"allowComments": True}, False)):
        df = spark.read.schema("k int, s string").options(**options).json(str(tmp_path / "in"))
        assert (plan_of(df) is not None) == is_read, options
    for ddl in ("k int, f float", "k int, _corrupt_record string", "k array<int>", "k decimal(9, 2)"):
        assert plan_of(spark.read.schema(ddl).json(str(tmp_path / "in"))) is None, ddl
    (tmp_path / "in" / "b.csv.gz").write_bytes(b"")
    assert plan_of(spark.read.schema("k int, s string").csv(str(tmp_path / "in"))) is None
    (tmp_path / "days" / "day=1").mkdir(parents=True)
    (tmp_path / "days" / "day=1" / "a.csv").write_text("1,2\n")
    assert plan_of(spark.read.schema("k int, s string, day int").csv(str(tmp_path / "days"))) is None


def test_times_in_another_zone(spark: Any, tmp_path: Path) -> None:
    """Only times with a zone mean the same in all."""
    with setting(spark, "spark.sql.session.timeZone", "America/New_York"):
        for name, text, is_read in (("z", "2024-03-10T02:30:00Z", True), ("naive", "2024-03-10 02:30:00", False)):
            (tmp_path / f"{name}.csv").write_text(f"{text},1\n")
            df = spark.read.schema("t timestamp, k int").csv(str(tmp_path / f"{name}.csv"))
            found = plan_of(df)
            assert found is not None
            if is_read:
                assert [row for batch in found.read() for row in rows_of(pa.table(batch))] == rows_of(df.toArrow())
            else:
                with pytest.raises(NotPlain):
                    list(found.read())


# --- streams


@pytest.mark.parametrize(("how", "format"), [("read all", "csv"), ("shuffle", "csv"), ("rowwise", "json")])
def test_streams_fall_back_to_spark(spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str,
                                    format: str) -> None:
    """Tasks read the first batch; they refuse the second, after rows that they could read, and Spark reads it."""
    monkeypatch.setattr(text_splits, "SPLIT_BYTES", 4_000)
    if how == "shuffle":
        monkeypatch.setattr(query, "READ_ALL_TEXT_BYTES", 0)
    done: list[tuple[object, object]] = []
    run_batch = Coordinator.run_batch

    def recorded(self: Coordinator, *given: Any) -> None:
        run_batch(self, *given)
        assert self.progress is not None
        done.append((self.progress["rows_in"], self.progress["read_by"]))

    monkeypatch.setattr(Coordinator, "run_batch", recorded)
    (tmp_path / "in").mkdir()
    for number in range(3):
        rows = [(k % 7, k / 4, f"word {k % 3}") for k in range(1_000 * number, 1_000 * (number + 1))]
        if format == "csv":
            lines = ["k,v,s", *(f'{k},{v},"{s}"' for k, v, s in rows)]
            lines += ['+7,1,"a""b"'] if number == 1 else []
        else:
            lines = [json.dumps({"k": k, "v": v, "s": s}) for k, v, s in rows]
            lines += ['{"k": 7, "v": 1.0, "s": 1}'] if number == 1 else []
        path = tmp_path / "in" / f"{number}.{format}"
        path.write_text("\n".join([*lines, ""]))
        os.utime(path, (1_700_000_000 + number,) * 2)
    schema = "k bigint, v double, s string"
    options = {"header": True} if format == "csv" else {}
    stream = (spark.readStream.schema(schema).options(maxFilesPerTrigger=1, **options).format(format)
              .load(str(tmp_path / "in")))  # fmt: skip
    q = si.flow(stream.schema).filter(col("v") >= 1)
    q = q if how == "rowwise" else q.group_by("k", "s").agg(n=si.count(), v=col("v").sum())
    job = sis.start(q, stream, sink=si.to_parquet(tmp_path / "out"), trigger="0 seconds", partitions=2,
                    checkpoint=tmp_path / "checkpoint", emit="final" if how == "rowwise" else "changes")
    while len(done) < 3:
        time.sleep(0.01)
        assert job.is_active, job.exception
    job.stop()
    assert done == [(1_000, "tasks"), (1_001, "spark"), (1_000, "spark")]
    whole = spark.read.schema(schema).options(**options).format(format).load(str(tmp_path / "in")).toArrow()
    found = pq.read_table(tmp_path / "out") if how == "rowwise" else sis.read_state(tmp_path / "checkpoint")
    assert_same(found, q.collect(whole))
