"""Functions of text that pyarrow computes: strip, split_part, replace, and regular expressions."""

from __future__ import annotations

import re

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import scalein as si
from scalein import BadArgument, WrongType, col
from scalein.api.flow import Flow
from tests.engines import DUCKDB, Engine, check, each_engine, every_engine, examples
from tests.strategies import STRINGS, of_types, tables

SPACES = " \t\n\r\v\f\x1c\x85\u00a0\u2003\u3000"
PATTERNS = [r"a", r"^a", r"b$", r"(a)(b)?", r"(\w+)@(\w+)", r"(?i)VIEW|click", r"[^ab]+", r"(é|ß)", r"x{3,}",
            r"\bkey(\d+)\b", r"", r"(?s)a.b", r"a.b", r"(?m)^b", r"(日)(本)", r"\d\d\d"]  # fmt: skip


@every_engine
@examples(12)
@given(st.data())
def test_split_and_replace(engine: Engine, data: st.DataObject) -> None:
    table = data.draw(tables(of_types(data.draw(st.sampled_from(STRINGS)))))
    by = data.draw(st.sampled_from(["a", "e", "ey", " ", "é", "本", "zz"]))
    number, new = data.draw(st.sampled_from([1, 2, 3, -1, -2, 9])), data.draw(st.sampled_from(["", "b", by * 2, r"\1"]))
    made = {"part": col("a").str.split_part(by, number), "other": col("a").str.replace(by, new)}
    check(engine, table, lambda flow: flow.select(**made), ordered=True)


@every_engine
@examples(20)
@given(st.data())
def test_regular_expressions(engine: Engine, data: st.DataObject) -> None:
    table = data.draw(tables(of_types(data.draw(st.sampled_from(STRINGS)))))
    pattern = data.draw(st.sampled_from(PATTERNS))
    group = data.draw(st.integers(0, re.compile(pattern).groups))
    made = {"has": col("a").str.matches(pattern), "out": col("a").str.extract(pattern, group)}
    check(engine, table, lambda flow: flow.select(**made), ordered=True)


@every_engine
@examples(12)
@given(st.data())
def test_strip(engine: Engine, data: st.DataObject) -> None:
    """Against Python's own, whose whitespace is Unicode's too."""
    words = data.draw(st.lists(st.none() | st.text(st.sampled_from(SPACES + "aé日\u200b"), max_size=8), max_size=20))
    table = pa.table({"a": pa.array(words, pa.string()).cast(data.draw(st.sampled_from(STRINGS)))})
    given_chars = st.sampled_from(["a", "é日", " ", "-]^"])
    chars = data.draw(given_chars if engine is DUCKDB else st.sampled_from([None, ""]) | given_chars)
    a = col("a").str
    made = {"both": a.strip(chars), "left": a.lstrip(chars), "right": a.rstrip(chars)}
    found = check(engine, table, lambda flow: flow.select(**made), ordered=True)
    assert found is not None
    for name, strip in (("both", str.strip), ("left", str.lstrip), ("right", str.rstrip)):
        assert found[name].to_pylist() == [None if word is None else strip(word, chars) for word in words]


@every_engine
@examples(6)
@given(st.data())
def test_in_filters_and_groups(engine: Engine, data: st.DataObject) -> None:
    table = data.draw(tables(of_types(data.draw(st.sampled_from(STRINGS)), pa.int32())))

    def build(flow: Flow) -> Flow:
        kept = flow.filter(col("a").str.matches("[a-z]") & (col("b") > -5))
        return kept.group_by(k=col("a").str.split_part(" ", 1).str.len()).agg(n=si.count(), s=col("b").cast(int).sum())

    check(engine, table, build, ordered=False)


@each_engine
def test_meaning_in_examples(engine: Engine) -> None:
    table = pa.table({"s": ["  a/b/c ", None, "", "x12y 34", "b"]})
    s = col("s").str

    def build(flow: Flow) -> Flow:
        return flow.select(second=s.split_part("/", 2), last=s.split_part("/", -1), digits=s.extract(r"(\d+)"),
                           whole=s.extract(r"\d+.", 0), maybe=s.extract("(a)?b"),
                           same=s.replace("b", r"\0"))  # fmt: skip

    found = check(engine, table, build, ordered=True)
    assert found is not None
    assert found.to_pydict() == {
        "second": ["b", None, "", "", ""], "last": ["c ", None, "", "x12y 34", "b"],
        "digits": [None, None, None, "12", None], "whole": [None, None, None, "12y", None],
        "maybe": ["", None, None, None, ""], "same": [r"  a/\0/c ", None, "", "x12y 34", r"\0"],
    }  # fmt: skip


def test_explain_names_the_step() -> None:
    text = si.from_arrow(pa.table({"s": ["a"]})).filter(col("s").str.matches("^a")).explain("fused")
    assert "pyarrow computes #:host0 = s.str.matches('^a')" in text


@pytest.mark.parametrize(("method", "args", "says"), [
    ("matches", ("a(",), r"valid regular expression\n.*\n.*\n  why    missing \)"),
    ("extract", ("(?=a)",), "without look-around"),
    ("extract", ("(a)", 2), "has no group 2"),
    ("extract", ("a",), "has no group 1"),
    ("extract", ("(a)", -1), "number of a group"),
    ("matches", (1,), "takes a text"),
    ("split_part", ("", 1), "needs a text to split at"),
    ("split_part", ("a", 0), "number of a part"),
    ("replace", ("", "a"), "needs a text to look for"),
    ("replace", ("a", None), "takes a text"),
    ("strip", (1,), "takes a text"),
])  # fmt: skip
def test_what_is_wrong_is_said_at_once(method: str, args: tuple[object, ...], says: str) -> None:
    with pytest.raises(BadArgument, match=says):
        getattr(col("s").str, method)(*args)


def test_only_text_is_taken() -> None:
    with pytest.raises(WrongType, match=r"str.extract takes text, not i64"):
        si.from_arrow(pa.table({"s": [1]})).select(x=col("s").str.extract("(a)"))
