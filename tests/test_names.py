"""Names of columns: whatever a user calls one, it is that column and nothing of ours."""

from __future__ import annotations

import pyarrow as pa
import pytest

import scalein as si
from scalein import col
from tests import oracle
from tests.same import assert_same

# Names of frame slots, of steps and of generated columns, as they were before somebody tried them.
ODD = ["out0", "out", "join0", "table", "row", "key0", "k#id", "#", "#CHROM", "#kept0", "#host0", "#materialized0",
       "#by0", "#row", "#number", "#id.x", "#ids.x", "#code.0.x", "?row", "$x", "direct.least0", "a b", "'"]


@pytest.mark.parametrize("name", ODD)
@pytest.mark.parametrize("text", [False, True], ids=["numbers", "dictionary"])
def test_any_name_does(name: str, text: bool) -> None:
    values = pa.array(["a", "b", "a", None]).dictionary_encode() if text else pa.array([1, 2, 1, None])
    table = pa.table({name: values, "x": [1.5, None, 2.5, 4.0]})
    flow = si.from_arrow(table)
    side = table.slice(0, 1).rename_columns([name, "y"])
    flows = [
        flow.filter(col("x") > 1).select(name, twice=col("x") * 2),
        flow.filter(col(name) == values[0].as_py()),
        flow.join(side, on=name),
        flow.group_by(name).agg(n=si.count(), last=col("x").last()),
        flow.join(side, on=name, how="left").group_by(name, "y").agg(n=si.count()).filter(col("n") > 0),
    ]
    for each in flows:
        assert_same(each.collect(), oracle.collect(each), ordered=False)


@pytest.mark.parametrize("name", ["#:host0", "#:", "#acc0", "#acc1_by", "#slice", "#one", "#seen", "#hash", "#value3"])
def test_names_of_ours_are_refused(name: str) -> None:
    with pytest.raises(si.BadName, match="reserved for scalein"):
        si.from_arrow(pa.table({name: [1]})).filter(col(name) > 0).collect()
    with pytest.raises(si.BadName, match="reserved for scalein"):
        si.from_arrow(pa.table({"x": [1]})).select(col("x").alias(name)).collect()
    with pytest.raises(si.BadName, match="reserved for scalein"):
        si.from_arrow(pa.table({"x": [1]})).join(pa.table({name: [1]}), left_on="x", right_on=name)


@pytest.mark.parametrize("name", ["#number", "#given0", "#time0", "#host0", "#by0"])
def test_any_name_does_in_a_job(name: str) -> None:
    """An internal column of the same name would take the user's place."""
    table = pa.table({name: ["b", "a", "b"], "t": pa.array([1, 2, 3], pa.timestamp("ms")), "x": ["4", "5", "6"]})
    source = si.from_arrow(table).with_watermark("t", "1ms")
    values = source.with_columns(y=col("x").cast("int64"))
    flows: list[tuple[si.Flow, str, str]] = [
        (values.group_by(name).agg(total=col("y").sum()), "final", name),
        (values.group_by(name).agg(total=col("y").sum()), "changes", name),
        (values.group_by(name, si.tumbling("t", "1s")).agg(first=col("y").first()), "final", name),
        (values.distinct(name), "final", name),
        (values.sort(col("y") % 2, name), "final", name),
    ]
    for flow, emit, key in flows:
        sink = si.to_memory()
        flow.start(sink=sink, emit=emit).wait()
        found = sink.table()
        wanted = flow.collect().select(found.drop_columns([c for c in found.column_names if c == "op"]).column_names)
        assert sorted(set(found[key].to_pylist())) == sorted(set(wanted[key].to_pylist()))
        if emit == "final":
            assert_same(found, wanted, ordered=False)
