"""Random tables: values of every shape, nulls, offsets, chunks."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from scalein.dtypes import DType, Kind
from tests.campaign.kinds import column_type, dtype_of, plain_of, pool, specials_of
from tests.campaign.spec import ColumnSpec, TableSpec

NAMES = "abcdefgh"
_SHAPES = ["few", "few", "special", "mixed", "skewed", "unique", "one"]


def row_count(rng: random.Random) -> int:
    """Mostly few rows; now and then around the sizes of vectors and blocks, and beyond."""
    chance = rng.random()
    if chance < 0.06:
        return rng.choice([0, 0, 1])
    if chance < 0.80:
        return rng.randrange(2, 40)
    if chance < 0.97:
        return rng.choice([63, 64, 65, 100, 127, 128, 129, 200])
    return rng.choice([255, 256, 257, 300, 512, 1023, 1024, 1025, 1500, 2500])


def values(rng: random.Random, dtype: DType, count: int, extreme: bool, nulls: bool) -> tuple[Any, ...]:
    """Values of one shape, some of them null."""
    shape = rng.choice(_SHAPES)
    if shape == "special":
        found = rng.choices(specials_of(dtype, extreme), k=count)
    elif shape == "mixed":
        found = rng.choices(pool(dtype, extreme), k=count)
    elif shape == "unique":
        found = [plain_of(dtype, number) for number in rng.sample(range(-count, count + 1), count)]
    elif shape == "one":
        found = [rng.choice(pool(dtype, extreme))] * count
    else:
        few = [plain_of(dtype, rng.randrange(-12, 12)) for _ in range(rng.randrange(1, 8))]
        found = rng.choices(few, k=count)
        if shape == "skewed":
            common = rng.choice(few)
            found = [common if rng.random() < 0.7 else value for value in found]
    share = rng.choice([0.0, 0.0, 0.0, 0.1, 0.1, 0.3, 0.3, 0.9, 1.0]) if nulls else 0.0
    return tuple(None if share and rng.random() < share else value for value in found)


def column(rng: random.Random, name: str, type_: pa.DataType, count: int, extreme: bool) -> ColumnSpec:
    """A column; now and then a slice, or declared to hold no nulls."""
    nullable = rng.random() < 0.9
    before, after = rng.choice([(0, 0), (0, 0), (0, 0), (1, 0), (3, 2), (9, 1), (0, 7)])
    made = values(rng, dtype_of(type_), count + before + after, extreme, nullable)
    return ColumnSpec(name, type_, nullable, made, before, after)


def cuts(rng: random.Random, count: int) -> tuple[int, ...]:
    """Where the chunks of a table end; some chunks are empty."""
    if rng.random() < 0.6:
        return ()
    return tuple(sorted(rng.randrange(0, count + 1) for _ in range(rng.randrange(1, 5))))


def table(rng: random.Random, name: str, extreme: bool, types: Sequence[pa.DataType] | None = None,
          count: int | None = None) -> TableSpec:  # fmt: skip
    """A table of columns a, b, c, ..."""
    count = row_count(rng) if count is None else count
    if types is None:
        types = [column_type(rng) for _ in range(rng.choice([1, 2, 2, 3, 3, 4, 5]))]
    columns = [column(rng, letter, type_, count, extreme) for letter, type_ in zip(NAMES, types, strict=False)]
    return TableSpec(name, tuple(columns), cuts(rng, count))


def matching(rng: random.Random, like: Sequence[Any], dtype: DType, count: int, extreme: bool) -> tuple[Any, ...]:
    """Values for the key of a joined table: many of those that the left side has."""
    own = pool(dtype, extreme)
    return tuple(rng.choice(like) if like and rng.random() < 0.6 else rng.choice(own) for _ in range(count))


def is_tame(dtype: DType, data: Sequence[Any]) -> bool:
    """Whether sums of these numbers hardly round, whatever their order."""
    if dtype.kind in (Kind.BOOL, Kind.STR) or not dtype.is_number:
        return False
    return all(value is None or value != value or abs(value) < 1e6 or abs(value) == float("inf") for value in data)
