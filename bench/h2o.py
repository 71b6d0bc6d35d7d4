"""H2O's db-benchmark: data for group-by and joins, without nulls and with 100 groups, and its questions in SQL."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt
import pyarrow as pa

SEED, GROUPS = 20_261_118, 100

Ints = npt.NDArray[np.int64]


def _ids(numbers: Ints, digits: int) -> pa.Array:
    """Texts such as id007, as plain strings."""
    distinct, codes = np.unique(numbers, return_inverse=True)
    names = pa.array([f"id{number:0{digits}}" for number in distinct.tolist()])
    return pa.DictionaryArray.from_arrays(codes.astype(np.int32), names).cast(pa.string())


@lru_cache(maxsize=1)
def groups(rows: int) -> pa.Table:
    """Nine columns: texts and numbers of 100 and of rows / 100 values, and three values."""
    rng = np.random.default_rng(SEED)
    many = max(1, rows // GROUPS)

    def drawn(most: int) -> Ints:
        return rng.integers(1, most + 1, rows)

    return pa.table({
        "id1": _ids(drawn(GROUPS), 3), "id2": _ids(drawn(GROUPS), 3), "id3": _ids(drawn(many), 10),
        "id4": drawn(GROUPS).astype(np.int32), "id5": drawn(GROUPS).astype(np.int32),
        "id6": drawn(many).astype(np.int32), "v1": drawn(5).astype(np.int32), "v2": drawn(15).astype(np.int32),
        "v3": np.round(rng.random(rows) * 100, 6),
    })  # fmt: skip


@lru_cache(maxsize=1)
def joins(rows: int) -> dict[str, pa.Table]:
    """`x` and three tables of rows / 1,000,000, rows / 1,000 and as many rows; nine of ten keys are on both sides."""
    rng = np.random.default_rng(SEED + 1)
    sizes = [max(10, rows // 1_000_000), max(10, rows // 1_000), max(10, rows)]
    mine, theirs = [], []
    for size in sizes:
        keys = rng.permutation(size + size // 10) + 1
        mine.append(keys[:size])
        theirs.append(np.concatenate([keys[: size - size // 10], keys[size:]]))

    def columns(count: int, sides: list[Ints], own: int | None) -> dict[str, object]:
        """Key columns of `count` rows; the one of the table's own size has each key once."""
        found: dict[str, object] = {}
        numbers = [rng.permutation(keys) if k == own else keys[rng.integers(0, len(keys), count)]
                   for k, keys in enumerate(sides)]
        found.update({f"id{k + 1}": each.astype(np.int32) for k, each in enumerate(numbers)})
        found.update({f"id{k + 4}": _ids(each, 1) for k, each in enumerate(numbers)})
        return found

    tables = {"x": pa.table({**columns(rows, mine, 2 if len(mine[2]) == rows else None),
                             "v1": np.round(rng.random(rows) * 100, 6)})}
    for number, name in enumerate(("small", "medium", "big")):
        size = len(theirs[number])
        tables[name] = pa.table({**columns(size, theirs[: number + 1], number),
                                 "v2": np.round(rng.random(size) * 100, 6)})
    return tables


GROUP_BY = {
    "q1": "SELECT id1, sum(v1) AS v1 FROM x GROUP BY id1",
    "q2": "SELECT id1, id2, sum(v1) AS v1 FROM x GROUP BY id1, id2",
    "q3": "SELECT id3, sum(v1) AS v1, avg(v3) AS v3 FROM x GROUP BY id3",
    "q4": "SELECT id4, avg(v1) AS v1, avg(v2) AS v2, avg(v3) AS v3 FROM x GROUP BY id4",
    "q5": "SELECT id6, sum(v1) AS v1, sum(v2) AS v2, sum(v3) AS v3 FROM x GROUP BY id6",
    "q6": "SELECT id4, id5, median(v3) AS median_v3, stddev(v3) AS sd_v3 FROM x GROUP BY id4, id5",
    "q7": "SELECT id3, max(v1) - min(v2) AS range_v1_v2 FROM x GROUP BY id3",
    "q8": "SELECT id6, v3 AS largest2_v3 FROM (SELECT id6, v3, row_number() OVER (PARTITION BY id6 ORDER BY v3 DESC)"
          " AS order_v3 FROM x WHERE v3 IS NOT NULL) AS sub WHERE order_v3 <= 2",
    "q9": "SELECT id2, id4, power(corr(v1, v2), 2) AS r2 FROM x GROUP BY id2, id4",
    "q10": "SELECT id1, id2, id3, id4, id5, id6, sum(v3) AS v3, count(*) AS n FROM x"
           " GROUP BY id1, id2, id3, id4, id5, id6",
}

JOINS = {
    "j1": "SELECT x.*, small.id4 AS small_id4, v2 FROM x JOIN small ON x.id1 = small.id1",
    "j2": "SELECT x.*, medium.id1 AS medium_id1, medium.id4 AS medium_id4, medium.id5 AS medium_id5, v2"
          " FROM x JOIN medium ON x.id2 = medium.id2",
    "j3": "SELECT x.*, medium.id1 AS medium_id1, medium.id4 AS medium_id4, medium.id5 AS medium_id5, v2"
          " FROM x LEFT JOIN medium ON x.id2 = medium.id2",
    "j4": "SELECT x.*, medium.id1 AS medium_id1, medium.id2 AS medium_id2, medium.id4 AS medium_id4, v2"
          " FROM x JOIN medium ON x.id5 = medium.id5",
    "j5": "SELECT x.*, big.id1 AS big_id1, big.id2 AS big_id2, big.id4 AS big_id4, big.id5 AS big_id5,"
          " big.id6 AS big_id6, v2 FROM x JOIN big ON x.id3 = big.id3",
}
