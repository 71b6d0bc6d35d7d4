"""Python functions that generated flows call: compiled ones, one that stays Python, and functions of batches."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

import scalein as si


@si.udf
def steps_down(x: int, y: int) -> int:
    rest = x
    for i in range(3):
        if rest > y:
            rest = rest - i - 1
    return rest


@si.udf
def share(x: float, y: float) -> float | None:
    if y == 0.0:
        return None
    return x / y


@si.udf
def longer(a: str, b: str) -> bool:
    return len(a) > len(b) or a == b


@si.udf
def word_of(x: int | None, text: str) -> str:
    if x is None:
        return "none"
    return text if x > 0 else "low"


@si.udf(compile=False)
def digits(x: int) -> int:
    return len(str(abs(x)))


@si.udaf
class Totals:
    """The sum of squares of what is small, and half for each row without a second value."""

    total: float = 0.0
    n: int = 0
    any_large: bool = False

    def update(self, x: float, y: int | None) -> None:
        if not -1e6 < x < 1e6:
            self.any_large = True
            return
        self.total += x * x
        self.n += 1 if y is None else 2

    def merge(self, other: Totals) -> None:
        self.total, self.n = self.total + other.total, self.n + other.n
        self.any_large = self.any_large or other.any_large

    def finish(self) -> float | None:
        return None if self.any_large else self.total / max(self.n, 1)


def same(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The batch as it is."""
    return batch


def valid_only(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The rows whose first column is not null; all of them where pyarrow cannot take rows out of a view."""
    if any(str(type_).endswith("view") for type_ in batch.schema.types):
        return batch
    return batch.filter(pc.is_valid(batch.column(0)))
