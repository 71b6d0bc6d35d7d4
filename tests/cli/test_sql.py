"""`scalein sql` and `scalein run`: queries over files, scripts that make tables and write to them, and the shell."""

from __future__ import annotations

import builtins
import io
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from scalein.cli.main import main
from scalein.cli.shell import Shell, is_whole
from scalein.cli.sql import new_session

pytest.importorskip("sqlglot", reason="SQL needs sqlglot: pip install 'scalein[sql]'")

SALES = pa.table({"shop": ["a", "b", "a"], "price": [1.0, 2.0, 4.0]})
Captured = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SCALEIN_HISTORY", str(tmp_path / "history"))
    pq.write_table(SALES, "sales.parquet")
    return tmp_path


def script(text: str, name: str = "report.sql") -> str:
    Path(name).write_text(text, encoding="utf-8")
    return name


def test_a_query_over_a_file_is_printed(capsys: Captured) -> None:
    query = "select shop, sum(price) as total from sales group by shop order by total desc"
    assert main(["sql", query, "--from", "sales=sales.parquet", "--rows", "1"]) == 0
    assert capsys.readouterr().out == "shop  total\n────  ─────\na       5.0\n(2 rows, of which 1 are shown)\n"


@pytest.mark.parametrize("name", ["out.parquet", "out.csv"])
def test_a_result_is_written_in_the_format_of_its_name(name: str) -> None:
    assert main(["sql", "select * from 'sales.parquet' where price > 1", "--to", name]) == 0
    found = pq.read_table(name) if name.endswith("parquet") else pyarrow.csv.read_csv(name)
    assert found.to_pydict() == {"shop": ["b", "a"], "price": [2, 4]}


def test_statements_come_from_the_standard_input(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("create view dear as select * from 'sales.parquet' where price > 2;\n"
                                                 "select shop from dear; show tables"))
    assert main(["sql"]) == 0
    shown = capsys.readouterr()
    assert shown.out == "shop\n────\na\n(1 row)\ndear\n"
    assert shown.err == "view dear\n"


@pytest.mark.parametrize(("arguments", "says"), [
    (["select prize from 'sales.parquet'"], "did you mean 'price'"),
    (["select 1", "--from", "sales.parquet"], "--from takes NAME=PATH"),
    (["select 1", "--to", "out.xlsx"], "whose ending says its format"),
    (["insert into t select 1"], "INSERT writes to a table that CREATE TABLE made"),
    (["select " + "(" * 3000 + "1" + ")" * 3000], "nested too deeply"),
    (["drop table t"], "there is no table 't'"), (["describe t"], "there is no table 't'"),
    (["create table t (x bigint)"], "WITH ('connector' = ...)"), (["explain drop view v"], "EXPLAIN takes a query"),
    (["create table t (x nonsense) with ('connector' = 'print')"], "there is no type"),
    (["create table t (x bigint) with ('connector' = 'kafak'); insert into t select 1"],
     "there is no connector 'kafak'"),
    (["create table t (x bigint, y bigint) with ('connector' = 'print'); insert into t select 1"],
     "the query has 1 columns and the table 't' 2"),
    (["create table t (x bigint) with ('connector' = 'nexmark', 'events.num' = 'many')"], "is a whole number"),
])  # fmt: skip
def test_mistakes_are_explained(arguments: list[str], says: str, capsys: Captured) -> None:
    assert main(["sql", *arguments]) == 1
    error = capsys.readouterr().err
    assert says in error
    assert "Traceback" not in error


def test_a_script_makes_tables_and_writes_to_them(capsys: Captured) -> None:
    path = script("""
        -- as it is published for Flink, but for its columns
        CREATE TABLE datagen (
            event_type INT, bid ROW<auction BIGINT, price BIGINT, `dateTime` TIMESTAMP(3)>,
            twice AS event_type * 2,
            WATERMARK FOR `dateTime` AS `dateTime` - INTERVAL '4' SECOND
        ) WITH ('connector' = 'nexmark', 'events.num' = '1000');
        CREATE VIEW bid AS SELECT bid.auction, bid.price, `dateTime`, twice FROM datagen WHERE event_type = 2;
        CREATE TABLE cheap (item BIGINT, cents DECIMAL(12, 0)) PARTITIONED BY (item)
            WITH ('connector' = 'filesystem', 'path' = 'cheap', 'format' = 'parquet');
        CREATE TABLE nowhere (n BIGINT) WITH ('connector' = 'blackhole');
        INSERT INTO cheap SELECT auction, price FROM bid WHERE price < 1000 AND twice = 4;
        INSERT INTO nowhere SELECT price FROM bid;
        SELECT count(*) AS n, max(cents) AS most FROM cheap;
        EXPLAIN SELECT auction FROM bid WHERE price > 7;
        SELECT nothing FROM cheap""")
    assert main(["run", path]) == 1
    shown = capsys.readouterr()
    count, most = shown.out.splitlines()[2].split()
    assert int(count) > 50
    assert int(most) < 1000
    assert "Filter price > 7" in shown.out
    assert "rows into cheap, nowhere in" in shown.err
    assert "report.sql:16" in shown.err


def test_flows_and_outputs_of_a_python_file_are_run(capsys: Captured) -> None:
    path = script("""
import scalein as si
sales = si.read_parquet("sales.parquet")
dear = sales.filter(si.col("price") > 2)
out = dear.to(si.to_csv("dear"))
""", "flows.py")
    assert main(["run", f"{path}:dear"]) == 0
    assert "(1 row)" in capsys.readouterr().out
    assert main(["run", path, "--checkpoint", "ckpt"]) == 0
    assert [file.read_text(encoding="utf-8") for file in Path("dear").glob("*.csv")] == ['"shop","price"\n"a",4\n']
    assert main(["run", f"{path}:deer"]) == 1
    assert "did you mean 'dear'" in capsys.readouterr().err
    assert main(["run", "nowhere.sql"]) == 1
    assert "no file 'nowhere.sql'" in capsys.readouterr().err


def test_the_shell_reads_statements_and_survives_mistakes(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: Iterator[str] = iter([
        "select shop", "from sales limit 1;", "", "selec 1;", ".schema sales", ".rows x", ".hlep",
        ".open more=sales.parquet", ".tables", ".timer off", "select count(*) as n from more;"])
    prompts: list[str] = []

    def typed(prompt: str) -> str:
        prompts.append(prompt)
        try:
            return next(lines)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr(builtins, "input", typed)
    assert Shell(new_session(["sales=sales.parquet"]), 40, 1).run() == 0
    shown = capsys.readouterr()
    assert prompts[:3] == ["scalein> ", "    ...> ", "scalein> "]
    assert "a\n(1 row)\n" in shown.out
    assert "price  f64?" in shown.out
    assert "sales\nmore\n" in shown.out
    assert shown.out.count(" s\n") == 1  # no time after the timer is off
    for said in ("did you mean 'SELECT'", ".rows takes a number", "did you mean '.help'"):
        assert said in shown.err


def test_the_shell_completes_names() -> None:
    shell = Shell(new_session(["sales=sales.parquet"]), 40, 1)
    assert shell.completions("sal") == ["sales"]
    assert shell.completions("sales.p") == ["sales.price"]
    assert shell.completions("sel") == ["select"]
    assert shell.completions("SEL") == ["SELECT"]
    assert shell.completions(".t") == [".tables", ".timer"]
    assert [shell.complete("pri", number) for number in range(2)] == ["price", None]


@pytest.mark.parametrize(("text", "whole"), [
    ("select 1;", True), ("select 1", False), ("select ';", False), ("select ';';", True), ("select 1; -- ;", True),
    ("select 1 -- ;", False), ('select ";" from t;', True), ("select 'it''s;'", False),
])  # fmt: skip
def test_a_statement_ends_with_a_semicolon(text: str, whole: bool) -> None:
    assert is_whole(text) is whole
