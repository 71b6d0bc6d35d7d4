"""testing.check_steps: flows of two streams step by step; what differs is reported with its step."""

from __future__ import annotations

import pyarrow as pa
import pytest

import scalein as si
from scalein.api.flow import Flow
from scalein.errors import BadArgument
from scalein.testing import check_steps


def joined(left: Flow, right: Flow, **how: object) -> Flow:
    left, right = left.with_watermark("t", 2), right.with_watermark("t", 2)
    return left.join(right, on="k", **how).select("k", "x", "y")  # type: ignore[arg-type]


def test_an_outer_join_gives_pairs_at_once_and_the_rest_by_the_watermark() -> None:
    check_steps(lambda left, right: joined(left, right, between=(-1, 4), how="outer"), """
        left   t   k  x
        right  t   k  y
        ------------------
        left   10  1  a
        left   11  2  b
        right  9   1  p
        =      1   a  p
        ------------------
        # a second match of a row that is retained; the other has none, and may not have any later than t = 15
        right  14  1  q
        =      1   a  q
        right  15  3  r
        left   30  1  c
        ------------------
        # the watermark is that of the slower side: 18 - 2
        right  18  9  s
        =      2   b  -
        ------------------
        left   3   1  d
        late   1
        ------------------
        end    left
        ------------------
        end
        =      1   c  -
        =      3   -  r
        =      9   -  s
    """)


def test_a_join_in_windows_waits_for_both_sides_until_one_is_idle() -> None:
    check_steps(lambda left, right: joined(left, right, within=si.tumbling("t", 10), how="left"), """
        left   t   k  x
        right  t   k  y
        ------------------
        left   1   1  a
        left   3   2  b
        right  9   1  p
        =      1   a  p
        left   40  1  c
        ------------------
        wait   6s
        =      2   b  -
        ------------------
        right  41  1  q
        =      1   c  q
    """)


def test_types_and_options() -> None:
    def build(rows: Flow) -> Flow:
        return rows.with_watermark("at", "1s").group_by("k").agg(n=si.count(), s=si.col("x").sum())

    found = check_steps(build, """
        rows  at                   k     x
        ---------------------------------------
        rows  2024-05-01T12:00:00  true  0.5
        =     true  1  0.5  insert
        --
        rows  2024-05-01T12:00:01  true  -
        =     true  2  0.5  update
    """, {"at": pa.timestamp("ms")}, emit="changes")  # fmt: skip
    assert found.num_rows == 2


@pytest.mark.parametrize(("step", "what"), [
    ("= 1 a q", "(?s)step 1: .*missing.*q"), ("", "step 1: rows: 1 != 0"),
    ("= 1 a p\n = 1 a p", "step 1: rows: 1 != 2"),
    ("= 1 a p\n late 2", "step 1: 0 rows are late, not 2"),
])  # fmt: skip
def test_what_differs_is_reported(step: str, what: str) -> None:
    with pytest.raises(AssertionError, match=what):
        check_steps(lambda left, right: joined(left, right, between=(0, 1)), f"""
            left t k x
            right t k y
            --
            left 1 1 a
            right 1 1 p
            {step}
        """)


@pytest.mark.parametrize(("text", "what"), [
    ("a t\n--\nb 1", "a step has no 'b'"), ("a t\n--\na 1 2", "this row of a has 2 values, and not 1"),
    ("a t\n--\nwait", "wait takes a duration"), ("a t\n--\nlate x", "late takes the number of rows"),
    ("a t\n--\nend c", "there is no input of this name: c"), ("end t\n--", "begins with the inputs"),
    ("a t\n--\na 1\n= x", "a value is no int64"),
    ("a t\n--\na 1\n= 1 2", "an expected row has 2 values"),
])  # fmt: skip
def test_what_is_no_step_is_refused(text: str, what: str) -> None:
    with pytest.raises(BadArgument, match=what):
        check_steps(lambda a: a, text)
