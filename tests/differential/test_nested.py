"""Lists, structs and maps: passed through everything, unpacked by .list and .struct, refused elsewhere."""

from __future__ import annotations

from collections.abc import Callable

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given
from hypothesis import strategies as st

import scalein as si
from scalein import BadArgument, ScaleinError, WrongType, col, lit, when
from scalein.api.flow import Flow
from scalein.arrow_rows import taken
from tests import nested, oracle
from tests.engines import Engine, check, engines_and, every_compiler, every_engine, examples
from tests.nested import LISTS, NESTED, STRUCTS, UNTRANSLATED
from tests.same import assert_same
from tests.strategies import of_types, tables

any_nested = st.sampled_from(NESTED)

def _more_than_five(batch: pa.RecordBatch) -> pa.RecordBatch:
    rows = pc.indices_nonzero(pc.fill_null(pc.greater(batch["k"], 5), False))
    return pa.RecordBatch.from_arrays([taken(column, rows) for column in batch.columns], schema=batch.schema)


CARRIED: dict[str, Callable[[Flow], Flow]] = {
    "as it is": lambda flow: flow,
    "select": lambda flow: flow.select("n1", y=col("k") + 1, m=col("n0")),
    "filter": lambda flow: flow.filter(col("k") > 3),
    "filter of all": lambda flow: flow.filter((col("k") > -1) | col("k").is_null()),
    "filter and nothing else": lambda flow: flow.filter(col("k") > 3).select("n0"),
    "two filters and names": lambda flow: (
        flow.filter(col("k") > 1).rename({"n0": "m"}).with_columns(y=col("k") * 2).filter(col("y") < 15).drop("k")),
    "limit": lambda flow: flow.filter(col("k") != 2).limit(3),
    "union": lambda flow: flow.union(flow.filter(col("k") < 4), flow.limit(2)),
    "sort": lambda flow: flow.sort("k", descending=True).limit(7),
    "distinct": lambda flow: flow.distinct("k"),
    "map_batches": lambda flow: flow.filter(col("k") > 3).map_batches(_more_than_five, flow.schema),
    "pyarrow's predicate": lambda flow: flow.filter(col("x").str.matches("1") | col("n0").is_null()),
    "a watermark": lambda flow: flow.with_watermark("k", 5).filter(col("k") > 3),
}  # fmt: skip


@every_compiler
@pytest.mark.parametrize("name", CARRIED)
@examples(3)
@given(st.data())
def test_carried_along(engine: Engine, name: str, data: st.DataObject) -> None:
    table = data.draw(nested.tables(data.draw(any_nested), data.draw(any_nested)))
    check(engine, table, CARRIED[name], ordered=True)


@every_compiler
@pytest.mark.parametrize("how", ["inner", "left", "semi", "anti"])
@pytest.mark.parametrize("key", ["k", "x"])
@examples(2)
@given(st.data())
def test_joins(engine: Engine, how: str, key: str, data: st.DataObject) -> None:
    """Both sides have nested columns; keys are unique or not, found by place or by hash, and null at times."""
    table = data.draw(nested.tables(data.draw(any_nested)))
    right = data.draw(nested.tables(data.draw(any_nested), data.draw(any_nested))).slice(0, 40).rename_columns(
        ["k", "x", "m0", "m1"])
    right = right.set_column(1, "x", pa.array([f"text {i % 5}" for i in range(right.num_rows)], pa.string()))
    if data.draw(st.booleans()):
        right = right.set_column(0, "k", pa.array([i * 10**6 for i in range(right.num_rows)], pa.int64()))

    def build(flow: Flow) -> Flow:
        joined = flow.join(right, on=key, how=how)
        return joined.filter(col("n0").is_not_null() | (col("k") > 2)) if how == "semi" else joined

    check(engine, table, build, ordered=True)


@every_compiler
@examples(4)
@given(st.data())
def test_joins_in_a_row(engine: Engine, data: st.DataObject) -> None:
    table = data.draw(nested.tables(data.draw(any_nested)))
    one = data.draw(nested.tables(data.draw(any_nested))).slice(0, 9).select(["k", "n0"]).rename_columns(["k", "one"])
    two = data.draw(nested.tables(data.draw(any_nested))).slice(0, 9).select(["k", "n0"]).rename_columns(["k", "two"])

    def build(flow: Flow) -> Flow:
        joined = flow.join(one, on="k", how="left").filter(col("k") < 9).join(two, on="k")
        return joined.select("two", "one", "n0", n=col("one").is_null())

    check(engine, table, build, ordered=True)


@every_engine
@examples(6)
@given(st.data())
def test_groups_beside_nested_columns(engine: Engine, data: st.DataObject) -> None:
    table = data.draw(nested.tables(data.draw(st.sampled_from(LISTS)), data.draw(any_nested)))

    def build(flow: Flow) -> Flow:
        return flow.group_by("x").agg(n=si.count(), s=col("k").sum(), lists=col("n0").count(),
                                      most=col("n0").list.len().max())  # fmt: skip

    check(engine, table, build, ordered=False)
    check(engine, table.select(["n0"]), lambda flow: flow.group_by().agg(n=si.count()), ordered=False)


@engines_and("arrow", LISTS, untranslated=UNTRANSLATED)
@examples(2)
@given(st.data())
def test_lists(engine: Engine, arrow: pa.DataType, data: st.DataObject) -> None:
    table, number = data.draw(nested.tables(arrow)), data.draw(st.integers(-4, 4))
    tags = col("n0").list

    def build(flow: Flow) -> Flow:
        return flow.select("x", n=tags.len(), e=tags.get(number), none=col("n0").is_null())

    found = check(engine, table, build, ordered=True)
    assert found is not None
    for row, wanted in zip(found.to_pylist(), table["n0"].to_pylist(), strict=True):
        there = wanted is not None and -len(wanted) <= number < len(wanted)
        assert repr(row["e"]) == repr(wanted[number] if there else None)
    check(engine, table, lambda flow: flow.filter(tags.len() > 1).select("n0", m=tags.len() * 2), ordered=True)


@every_engine
@pytest.mark.parametrize("arrow", STRUCTS, ids=str)
@examples(2)
@given(st.data())
def test_structs(engine: Engine, arrow: pa.DataType, data: st.DataObject) -> None:
    table = data.draw(nested.tables(arrow))
    found = check(engine, table, lambda flow: flow.select(u=col("n0").struct.field("u")), ordered=True)
    assert found is not None
    wanted = [None if value is None else value["u"] for value in table["n0"].to_pylist()]
    assert repr(found["u"].to_pylist()) == repr(wanted)


@every_engine
@examples(4)
@given(nested.tables(pa.list_(pa.struct({"u": pa.list_(pa.int64()), "v": pa.string()}))))
def test_deeper(engine: Engine, table: pa.Table) -> None:
    first = col("n0").list.get(0)

    def build(flow: Flow) -> Flow:
        kept = flow.filter(first.struct.field("u").list.len() > 0)
        return kept.select(a=first.struct.field("u").list.get(-1) + 1, b=first.struct.field("v").str.len(), c=first)

    check(engine, table, build, ordered=True)


def test_untouched_columns_are_not_copied() -> None:
    table = pa.table({"k": list(range(100)), "n": [[i, i] for i in range(100)]})
    place = table["n"].chunk(0).values.buffers()[1].address
    for flow in (si.from_arrow(table).with_columns(k=col("k") + 1), si.from_arrow(table).filter(col("k") >= 0),
                 si.from_arrow(table).filter(col("k") > 50)):  # fmt: skip
        assert flow.collect(workers=1)["n"].chunk(0).values.buffers()[1].address == place


def test_many_rows_in_several_chunks() -> None:
    """More rows than one chunk of output holds, and matches that repeat rows across chunks."""
    count = 300_000
    numbers = pa.array(range(count), pa.int64())
    table = pa.table({"k": numbers, "n": pa.ListArray.from_arrays(pa.array(range(count + 1), pa.int32()), numbers)})
    for workers in (1, 3):
        kept = si.from_arrow(table).filter(col("k") % 3 != 1).collect(workers=workers)
        assert kept["n"].combine_chunks().flatten().equals(kept["k"].combine_chunks())
        few = pa.table({"m": [5, 5, 7], "tags": [["five"], ["V"], ["seven"]]})
        keyed = si.from_arrow(table).with_columns(m=col("k") % 11)
        found = keyed.join(few, on="m").collect(workers=workers)
        assert found.num_rows == 3 * 27_273
        assert found["n"].combine_chunks().flatten().equals(found["k"].combine_chunks())
        tags = found["tags"].combine_chunks().flatten().to_pylist()
        assert tags == ["five", "V", "seven"] * 27_273


def test_run_ends_are_read_as_their_values() -> None:
    runs = pa.RunEndEncodedArray.from_arrays(pa.array([2, 3, 6], pa.int32()), pa.array([5, None, 7]))
    table = pa.table({"r": runs, "x": range(6)}).slice(1)
    flow = si.from_arrow(table).filter(col("r").fill_null(0) != 5).group_by("r").agg(n=col("x").sum())
    assert sorted(map(str, flow.collect().to_pylist())) == ["{'r': 7, 'n': 12}", "{'r': None, 'n': 2}"]
    assert_same(flow.collect(), oracle.collect(flow), ordered=False)


def test_what_pyarrow_cannot_take_is_carried() -> None:
    runs = pa.RunEndEncodedArray.from_arrays(pa.array([2, 5], pa.int32()), pa.array([5, 7]))
    struct = pa.StructArray.from_arrays([runs], fields=[pa.field("r", runs.type)])
    texts = pa.array([[("a", 1)], None, [], [("b", 2), ("c", None)], [("d", 4)]], pa.map_(pa.string_view(), pa.int64()))
    table = pa.table({"k": [1, 2, 3, 4, 5], "s": struct, "m": texts})
    few = pa.table({"k": [5, 3, 9], "t": [1, 2, 3]})
    found = si.from_arrow(table).filter(col("k") != 2).collect()
    assert [value.as_py() for value in found["s"]] == [{"r": 5}, {"r": 7}, {"r": 7}, {"r": 7}]
    assert found["m"].to_pylist() == [[("a", 1)], [], [("b", 2), ("c", None)], [("d", 4)]]
    joined = si.from_arrow(few).join(table.select(["k", "m"]), on="k", how="left").collect()
    assert joined["m"].to_pylist() == [[("d", 4)], [], None]


def test_unions_are_carried() -> None:
    union = pa.UnionArray.from_dense(pa.array([0, 1, 0], pa.int8()), pa.array([0, 0, 1], pa.int32()),
                                     [pa.array([1, 2]), pa.array(["a"])])
    flow = si.from_arrow(pa.table({"k": [1, 2, 3], "u": union})).filter(col("k") != 2)
    found = flow.collect()
    found.validate(full=True)
    assert [value.as_py() for value in found["u"]] == [1, 2]


def test_sources_of_every_kind() -> None:
    table = pa.table({"k": [1, 2, 3], "n": [[1], None, []]})
    kept = table.slice(1)
    assert si.flow(table.schema).filter(col("k") > 1).collect(table).equals(kept)
    assert si.from_batches(iter(table.to_batches()), table.schema).filter(col("k") > 1).collect().equals(kept)
    assert si.from_arrow(table.to_reader(1)).filter(col("k") > 1).collect().equals(kept)
    assert pa.Table.from_batches(si.from_arrow(table).filter(col("k") > 1).batches()).equals(kept)
    assert si.from_arrow(table.slice(0, 0)).filter(col("k") > 1).collect().equals(table.slice(0, 0))


def test_null_columns_can_get_a_type() -> None:
    flow = si.from_arrow(pa.table({"n": pa.nulls(2), "k": [1, 2]}))
    assert flow.filter(col("k") > 1).select("n", x=col("n").cast(int), y=col("n").is_null()).collect().to_pylist() == [
        {"n": None, "x": None, "y": True}]
    with pytest.raises(WrongType, match=r"column of type null has nulls only"):
        flow.select(x=col("n") + 1)


def test_explain_says_what_is_taken() -> None:
    table = pa.table({"k": [1], "n": [[1]]})
    flow = si.from_arrow(table).filter(col("k") > 0).join(table, on="k").select("n", m=col("n_right"))
    text = flow.explain("fused")
    assert "take    n, m = join0.n, by row number" in text
    assert "#:row" in flow.explain("llvm")
    assert flow.graph().svg
    assert "list<item: int64>" in flow.explain()
    flow.explain(analyze=True)


@engines_and("arrow", STRUCTS, untranslated=[])
@examples(4)
@given(st.data())
def test_unnest_gives_the_fields_in_place(engine: Engine, arrow: pa.DataType, data: st.DataObject) -> None:
    table = data.draw(nested.tables(arrow))
    found = check(engine, table, lambda flow: flow.unnest("n0"), ordered=True)
    assert found is not None
    names = [field.name for field in arrow]
    assert found.schema.names == [each for name in table.schema.names for each in (names if name == "n0" else [name])]
    structs = table["n0"].to_pylist()
    for name in names:
        assert repr(found[name].to_pylist()) == repr([None if each is None else each[name] for each in structs])
    check(engine, table, lambda flow: flow.filter(col("k") > 2).unnest(["n0"]).select(names[0], "k"), ordered=True)


def test_unnest_of_several_structs_and_of_structs_inside() -> None:
    rows = [{"a": {"x": 1, "in": {"y": 2}}, "b": {"z": 3}}, {"a": None, "b": None}, {"a": {"x": None, "in": None},
            "b": {"z": 4}}]  # fmt: skip
    flow = si.from_arrow(rows).unnest("b", "a").unnest("in")
    assert flow.collect().to_pydict() == {"x": [1, None, None], "y": [2, None, None], "z": [3, None, 4]}


FLOW = si.from_arrow(pa.table({"k": [1], "n": [[1]], "s": [{"a": 1}]}))


@pytest.mark.parametrize(("build", "says"), [
    (lambda: FLOW.filter(col("n") == col("n")), r"cannot compare list<item: int64>"),
    (lambda: FLOW.select(x=col("n") + 1), r"\+ does not take list<item: int64> and i64"),
    (lambda: FLOW.select(x=col("n").fill_null(1)), "fill_null does not take"),
    (lambda: FLOW.select(x=when(col("k") > 1).then(col("n"))), "a choice cannot give"),
    (lambda: FLOW.select(x=col("n").is_in([1])), "is_in does not take"),
    (lambda: FLOW.select(x=col("n").cast(str)), r"cannot cast list<item: int64> to str"),
    (lambda: FLOW.select(x=col("n").str.len()), "str.len takes text"),
    (lambda: FLOW.group_by("n").agg(si.count()), "group_by takes no nested keys, but 'n' is list"),
    (lambda: FLOW.join(FLOW, on="s"), "join takes no nested keys: struct"),
])  # fmt: skip
def test_no_operand(build: Callable[[], object], says: str) -> None:
    with pytest.raises(WrongType, match=f"{says}(.*\n)*.*hint   a (list|struct) can be passed through, or unpacked"):
        build()


@pytest.mark.parametrize(("build", "says"), [
    (lambda: FLOW.group_by("k").agg(m=col("n").max()), "max does not take a nested column"),
    (lambda: FLOW.sort("n"), "has no order"),
    (lambda: FLOW.distinct(), "rows cannot be told apart by 'n'"),
    (lambda: FLOW.filter("n"), "filter takes a condition"),
    (lambda: FLOW.select(x=col("k").cast(pa.list_(pa.int64()))), "no cast makes a nested value"),
    (lambda: FLOW.union(FLOW.with_columns(n=col("k"))), "column 'n' is i64 in input 2 of union"),
    (lambda: FLOW.select(x=col("k").list.len()), "list.len takes a list, not i64"),
    (lambda: FLOW.select(x=col("s").list.get(0)), r"list.get takes a list, not struct(.*\n)*.*struct.field"),
    (lambda: FLOW.select(x=col("s").struct.field("aa")), r"no field 'aa': a\n(.*\n)*.*did you mean 'a'"),
    (lambda: FLOW.select(x=col("n").struct.field("a")), "struct.field takes a struct, not list"),
])  # fmt: skip
def test_wrong_types(build: Callable[[], object], says: str) -> None:
    with pytest.raises(WrongType, match=says):
        build()


@pytest.mark.parametrize("build", [
    lambda: col("n").list.get("a"), lambda: col("n").list.get(True), lambda: col("s").struct.field(1),
    lambda: lit(None, pa.list_(pa.int64())),
])  # fmt: skip
def test_bad_arguments(build: Callable[[], object]) -> None:
    with pytest.raises(BadArgument):
        build()


def test_fields_of_types_that_nobody_computes_with() -> None:
    flow = si.from_arrow(pa.table({"s": pa.array([{"h": None}], pa.struct({"h": pa.float16()}))}))
    assert flow.collect().num_rows == 1
    with pytest.raises(ScaleinError, match="halffloat"):
        flow.select(h=col("s").struct.field("h"))


@every_engine
@examples(10)
@given(st.data())
def test_structs_are_made(engine: Engine, data: st.DataObject) -> None:
    plain = st.sampled_from([pa.int64(), pa.float64(), pa.string(), pa.bool_(), pa.dictionary(pa.int8(), pa.string())])
    table = data.draw(tables(of_types(data.draw(plain), data.draw(plain), pa.int32())))

    def build(flow: Flow) -> Flow:
        made = flow.filter(col("c") != 3).select("c", s=si.struct("a", col("b"), twice=col("c").cast(int) * 2, one=1))
        return made.with_columns(a=col("s").struct.field("a"), n=col("s").is_null(), t=si.struct(inner="s", c="c"))

    check(engine, table, build, ordered=True)


def test_structs_in_examples() -> None:
    flow = si.from_arrow(pa.table({"x": [1, None], "s": pa.array(["a", None]).dictionary_encode()}))
    found = flow.select(t=si.struct("x", text="s", more=lit("c"))).collect()
    assert found["t"].to_pylist() == [{"x": 1, "text": "a", "more": "c"}, {"x": None, "text": None, "more": "c"}]
    assert found.schema.field("t").type == pa.struct({"x": pa.int64(), "text": pa.string(), "more": pa.string()})
    assert not found.schema.field("t").nullable
    assert repr(si.struct(one=col("x"), two=col("x") * 2)) == "Column(struct(one=x, two=x * 2))"
    direct = flow.select(y=si.struct(a=col("x") * 2, b="s").struct.field("a"))
    assert "struct" not in direct.explain()
    assert direct.collect()["y"].to_pylist() == [2, None]


def test_structs_that_cannot_be() -> None:
    flow = si.from_arrow(pa.table({"x": [1]}))
    with pytest.raises(BadArgument, match="at least one field"):
        si.struct()
    with pytest.raises(si.BadName, match="two fields of struct are called 'x'"):
        si.struct("x", x=1)
    with pytest.raises(si.BadName, match="has no name"):
        si.struct(lit(1))
    with pytest.raises(WrongType, match="null alone has no type"):
        flow.select(s=si.struct(x=None))
    with pytest.raises(si.UnknownColumn, match="no column 'y'"):
        flow.select(s=si.struct("y"))
