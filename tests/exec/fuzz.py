"""Random flows on random batches, each run in several ways that must agree. test_fuzz.py runs it as a process.

    python -m tests.exec.fuzz SEED EXAMPLES

Against the differential tests: more rows, other numbers of batches and workers, readers as well as tables, windows,
dictionaries and nulls that come and go. What is looked for is a crash, a hang, or a result that depends on the way.
"""

from __future__ import annotations

import faulthandler
import random
import sys
from collections.abc import Iterator

import pyarrow as pa
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

import scalein as si
from scalein import col
from scalein.errors import ComputeError
from tests.programs import programs
from tests.same import assert_same
from tests.strategies import ALL, of_types, schemas, tables

CPUS = ["native", "native", "x86-64-v3", "x86-64"]


def _reordered(array: pa.Array) -> pa.Array:
    """The same words by another dictionary."""
    if not pa.types.is_dictionary(array.type):
        return array
    words = array.dictionary.cast(pa.string()).to_pylist()
    texts = array.cast(pa.string())
    shuffled = list(dict.fromkeys(["none of them", *reversed(words)]))
    codes = {word: code for code, word in enumerate(shuffled)}
    indices = pa.array([None if text is None else codes[text] for text in texts.to_pylist()], array.type.index_type)
    return pa.DictionaryArray.from_arrays(indices, pa.array(shuffled, array.type.value_type))


def _pieces(table: pa.Table, rng: random.Random) -> Iterator[pa.RecordBatch]:
    """The table's rows in batches of random sizes."""
    whole = pa.Table.from_batches([b for b in table.to_batches() if b.num_rows], table.schema)
    start = 0
    while start < whole.num_rows:
        size = rng.choice([1, 3, 64, 255, 256, 257, 1000, 5000])
        for batch in whole.slice(start, size).to_batches():
            if rng.random() < 0.3:
                batch = pa.RecordBatch.from_arrays([_reordered(c) for c in batch.columns], schema=batch.schema)
            yield batch
            if rng.random() < 0.1:
                yield batch.slice(0, 0)
        start += size


def _outcome(flow: si.Flow, rng: random.Random) -> pa.Table | str:
    try:
        return flow.collect(workers=rng.choice([1, 1, 2, 3]), cpu=rng.choice(CPUS))
    except ComputeError:
        return "failed"


def _drawn(data: st.DataObject) -> None:
    schema = data.draw(schemas(ALL, least=2, most=4))
    table = data.draw(tables(schema, most=5000))
    other = data.draw(tables(of_types(schema.types[0]), most=64))
    other = other.append_column("extra", pa.array(range(other.num_rows), pa.int64()))
    table = table.append_column(
        "time", pa.array([n * 7919 % 1000 - 300 + n // 3 for n in range(table.num_rows)], pa.int64())
    )
    program = data.draw(programs(schema, other))
    size = data.draw(st.sampled_from([0, 7, 100, 5000]))
    rng = random.Random(data.draw(st.integers(0, 2**32)))
    every = max(1, size // rng.choice([1, 2, 3]))

    def build(flow: si.Flow) -> si.Flow:
        if size:
            return flow.group_by(schema.names[0], si.sliding("time", size, every=every)).agg(
                n=si.count(), t=col("time").max()
            )
        return program.build(flow)

    first = _outcome(build(si.from_arrow(table)), rng)
    batches = list(_pieces(table, rng))
    second = _outcome(build(si.from_batches(lambda: iter(batches), table.schema)), rng)
    if isinstance(first, str) or isinstance(second, str):
        assert isinstance(first, str), "fails by batches, but not whole"
        assert isinstance(second, str), "fails whole, but not by batches"
    else:
        assert_same(second, first, ordered=program.ordered and not size, tolerance=1e-6)


def main(number: str, examples: str) -> None:
    faulthandler.enable()
    faulthandler.dump_traceback_later(240 + 5 * int(examples), exit=True)
    fuzzed = given(st.data())(_drawn)
    fuzzed = settings(
        max_examples=int(examples), deadline=None, database=None, suppress_health_check=list(HealthCheck)
    )(fuzzed)
    seed(int(number))(fuzzed)()


if __name__ == "__main__":
    main(*sys.argv[1:])
