"""Serialization: flows are sent as plans, and deserialized once a process."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark import cloudpickle

import scalein as si
from scalein import col
from scalein.errors import BadArgument
from scalein.spark.batch.tasks import MapRows, Task
from scalein.spark.serialize import BroadcastPlan, deserialize, serialize
from tests.same import assert_same

DATA = pa.table({"k": [1, 2, 3, None], "v": [1.0, 2.0, 3.0, 4.0]})
NAMES = pa.table({"k": [1, 2], "name": ["one", "two"], "unused": ["x" * 100_000] * 2})


def test_a_function_of_partitions_is_pickled_as_its_plan() -> None:
    q = si.flow(DATA.schema).filter(col("v") > 1).join(NAMES, on="k").select("name", w=col("v") * 2)
    q.collect(DATA)  # compiled here, but:
    data = pickle.dumps(q.map_in_arrow)
    assert len(data) < 20_000  # neither code nor unread columns
    again = pickle.loads(data).flow
    assert again.schema == q.schema
    assert_same(again.collect(DATA), q.collect(DATA))


def test_a_digest_is_deserialized_once() -> None:
    q = si.flow(DATA.schema).filter(col("v") > 1)
    data = pickle.dumps(q.map_partitions)
    assert pickle.loads(data).flow.op is pickle.loads(data).flow.op
    serialized = serialize({"a": [1]})
    assert deserialize(*serialized) is deserialize(*serialized)
    assert deserialize(*serialize({"a": [2]})) == {"a": [2]}


def test_a_broadcast_plan_is_deserialized_once() -> None:
    value = {"a": [3]}

    class Context:
        """A SparkContext whose broadcast variables have the value that another process unpickles."""

        def broadcast(self, given: object) -> object:
            return SimpleNamespace(value=pickle.loads(pickle.dumps(given)), destroy=lambda: destroyed.append(True))

    destroyed: list[bool] = []
    serialized = serialize(value)
    broadcast = BroadcastPlan.broadcast(Context(), serialized)  # type: ignore[arg-type]
    assert broadcast.value() == value
    assert broadcast.value() is BroadcastPlan(*serialized).value() is deserialize(*serialized)
    assert len(broadcast.digest) < 100
    broadcast.destroy()
    BroadcastPlan(*serialized).destroy()
    assert destroyed == [True]


def test_user_functions_are_serialized_by_value() -> None:
    offset = 10

    def shifted(batch: pa.RecordBatch) -> pa.RecordBatch:
        return pa.record_batch({"v": pa.compute.add(batch.column("v"), offset)})

    @si.udf
    def halved(value: float) -> float:
        return value / 2

    q = si.flow(DATA.schema).map_batches(shifted, {"v": pa.float64()}).select(h=halved(col("v")))
    again = pickle.loads(cloudpickle.dumps(q))
    assert again.collect(DATA)["h"].to_pylist() == [5.5, 6.0, 6.5, 7.0]


def test_static_tables_of_files_are_read_before_serialization(tmp_path: Path) -> None:
    pq.write_table(NAMES, tmp_path / "names.parquet")
    q = si.flow(DATA.schema).join(si.read_parquet(tmp_path).filter(col("k") > 1), on="k").select("name", "v")
    data = pickle.dumps(q.map_in_arrow)
    (tmp_path / "names.parquet").unlink()
    assert pickle.loads(data).flow.collect(DATA).to_pylist() == [{"name": "two", "v": 2.0}]


def test_a_flow_is_pickled_and_copied_without_reading_its_tables(tmp_path: Path) -> None:
    pq.write_table(NAMES, tmp_path / "names.parquet")
    q = si.flow(DATA.schema).join(si.read_parquet(tmp_path), on="k").select("name", "v")
    unbound = si.flow(DATA.schema).join(si.flow(NAMES.schema), on="k")
    content = (tmp_path / "names.parquet").read_bytes()
    (tmp_path / "names.parquet").unlink()
    flows = [pickle.loads(pickle.dumps(q)), pickle.loads(cloudpickle.dumps(q)), copy.copy(q), copy.deepcopy(q)]
    assert pickle.loads(pickle.dumps(unbound)).schema == unbound.schema
    (tmp_path / "names.parquet").write_bytes(content)
    for each in flows:
        assert_same(each.collect(DATA), q.collect(DATA))
    assert q.collect(DATA).num_rows == 2


def test_a_static_side_without_data_is_refused() -> None:
    q = si.flow(DATA.schema).join(si.flow(NAMES.schema), on="k")
    with pytest.raises(BadArgument, match="static side has no data"):
        pickle.dumps(q.map_in_arrow)


def test_a_task_is_the_same_in_another_process(tmp_path: Path) -> None:
    from scalein.exec.fragments import cut, fragments
    from scalein.spark.map_reduce import MapReduce

    q = si.flow(DATA.schema).group_by("k").agg(s=col("v").sum())
    task = Task(MapRows(MapReduce(fragments(cut(q.op))[0])))
    (tmp_path / "task").write_bytes(cloudpickle.dumps(task))
    code = ("import pickle, sys, pyarrow as pa; task = pickle.load(open(sys.argv[1], 'rb'));"
            "print(sum(b.num_rows for b in task([pa.record_batch({'k': [1, 1, 2], 'v': [1., 2., 3.]})])))")
    found = subprocess.run([sys.executable, "-c", code, str(tmp_path / "task")], capture_output=True, text=True,
                           cwd=Path(__file__).parents[2], check=True)
    assert found.stdout.strip() == "2"
