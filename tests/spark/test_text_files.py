"""CSV files that tasks read in place of Spark: the same rows as Spark's own reader, or none at all."""

from __future__ import annotations

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
from scalein.spark import csv_splits
from scalein.spark.csv_splits import CsvDialect, NotPlain, plan_csv
from scalein.spark.file_scan import csv_of_batch
from scalein.spark.row_groups import ScannedFile
from scalein.spark.streaming import query
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


def rows_by_tasks(path: Path, schema: pa.Schema, dialect: CsvDialect) -> list[tuple[Any, ...]] | None:
    splits = plan_csv([ScannedFile(str(path), {})], schema, dialect)
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


@pytest.mark.parametrize("names", [["s", "i", "d"], None], ids=["some columns", "all columns"])
def test_rows_are_those_of_spark(spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                 names: list[str] | None) -> None:
    """Random files with hostile fields and lines, cut anywhere: what tasks read is what Spark reads."""
    seed = int.from_bytes(os.urandom(4))
    random = Random(seed)
    monkeypatch.setattr(csv_splits, "SPLIT_BYTES", 300)
    monkeypatch.setattr(csv_splits, "BLOCK_BYTES", 100)
    has_header = random.random() < 0.7
    for number in range(FILES):
        (tmp_path / f"{number}.csv").write_bytes(a_file(random, has_header))
    df = spark.read.schema(DDL).csv(str(tmp_path), header=has_header)
    df = df if names is None else df.select(*names)
    schema, dialect = arrow_schema(df.schema, NOWHERE), CsvDialect(tuple(PLAIN), ",", has_header, "UTC")
    wanted, read = rows_by_spark(df), 0
    for path in tmp_path.iterdir():
        found = rows_by_tasks(path, schema, dialect)
        if found is not None:
            read += bool(found)
            assert found == sorted(wanted[path.name]), (seed, path.read_bytes())
    assert read > FILES / 5


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


def plan_of(df: Any, names: list[str] | None = None) -> csv_splits.CsvSplits | None:
    """The splits of a DataFrame that is a scan."""
    plan = df._jdf.queryExecution().executedPlan()
    while plan.getClass().getSimpleName() != "FileSourceScanExec":
        plan = plan.children().apply(0)
    found = csv_of_batch(plan, df.sparkSession)
    schema = arrow_schema(df.schema, NOWHERE, names)
    return None if found is None else plan_csv(found[0], schema, found[1])


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


@pytest.mark.parametrize("how", ["read all", "shuffle", "rowwise"])
def test_streams_fall_back_to_spark(spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """Tasks read the first batch; they refuse the second, after rows that they could read, and Spark reads it."""
    monkeypatch.setattr(csv_splits, "SPLIT_BYTES", 4_000)
    if how == "shuffle":
        monkeypatch.setattr(query, "READ_ALL_BYTES", 0)
    (tmp_path / "in").mkdir()
    for number in range(3):
        lines = [f"{k % 7},{k / 4},\"word {k % 3}\"" for k in range(1_000 * number, 1_000 * (number + 1))]
        text = "\n".join(["k,v,s", *lines, *(["+7,1,\"a\"\"b\""] if number == 1 else []), ""])
        (tmp_path / "in" / f"{number}.csv").write_text(text)
        os.utime(tmp_path / "in" / f"{number}.csv", (1_700_000_000 + number,) * 2)
    schema = "k bigint, v double, s string"
    stream = spark.readStream.schema(schema).options(header=True, maxFilesPerTrigger=1).csv(str(tmp_path / "in"))
    q = si.flow(stream.schema).filter(col("v") >= 1)
    q = q if how == "rowwise" else q.group_by("k", "s").agg(n=si.count(), v=col("v").sum())
    job = sis.start(q, stream, sink=si.to_parquet(tmp_path / "out"), trigger="0 seconds", partitions=3,
                    checkpoint=tmp_path / "checkpoint", emit="final" if how == "rowwise" else "changes")
    readers: dict[object, object] = {}
    while len(readers) < 3:
        time.sleep(0.01)
        assert job.is_active, job.exception
        if (progress := job.last_progress) is not None:
            readers[progress["batch_id"]] = progress["read_by"]
            assert progress["rows_in"] == 1_000 + (progress["batch_id"] == 1)
    job.stop()
    assert list(readers.values()) == ["tasks", "spark", "spark"]
    whole = spark.read.schema(schema).csv(str(tmp_path / "in"), header=True).toArrow()
    found = pq.read_table(tmp_path / "out") if how == "rowwise" else sis.read_state(tmp_path / "checkpoint")
    assert_same(found, q.collect(whole))
