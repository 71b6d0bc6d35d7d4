"""What a compiled stage does for a row, read from its steps and its sink: bytes, operations, probes, state touched.

These are counts of the code, not times: a calibration of a machine says what each costs there. A row is taken to pass
all filters; how many rows reach a stage is observed (`scalein/model/profile.py`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from scalein.ir.exprs import Agg, Call, Expr, type_of, walk
from scalein.ir.stages import (
    Collect,
    DedupStep,
    FromBatches,
    FromPointers,
    FromRows,
    FromTable,
    Group,
    GroupMode,
    Merge,
    MergeBag,
    Partition,
    Probe,
    Process,
    Stage,
    step_exprs,
)
from scalein.layout import size_of


@dataclass(frozen=True, slots=True)
class StageCost:
    """Of one row of a stage."""

    name: str
    bytes: float  # read and written in order: columns, records of partitions
    operations: int  # calls of functions in its expressions, and updates of accumulators
    probes: int  # of hash tables, each at a random place
    state_bytes: int  # of the records that it reads or changes

    def __str__(self) -> str:
        return (f"{self.name}: {self.bytes:.4g} bytes, {self.operations} operations, {self.probes} probes, "
                f"{self.state_bytes} bytes of state a row")


def estimate(stage: Stage) -> StageCost:
    """The cost of a row, by what the stage is made of.

    >>> from scalein.dtypes import I64, F64
    >>> from scalein.ir.exprs import Call, Col, Lit, Named
    >>> from scalein.ir.stages import Collect, FilterStep, FromBatches, Read, Stage
    >>> from scalein.dtypes import BOOL
    >>> x = Col("x", I64, False)
    >>> positive = FilterStep(Call("gt", (x, Lit(0, I64)), dtype=BOOL, nullable=False))
    >>> stage = Stage("pipe", FromBatches((Read("x", I64, nulls=False),)), (positive,), Collect((Named("x", x),)))
    >>> print(estimate(stage))
    pipe: 16 bytes, 1 operations, 0 probes, 0 bytes of state a row
    """
    operations = _calls(step_exprs(stage.steps))
    probes = sum(isinstance(step, DedupStep) or (isinstance(step, Probe) and not step.direct and not step.by_code)
                 for step in stage.steps)
    moved, state = _read_bytes(stage), 0
    state += sum(step.table.layout.size for step in stage.steps if isinstance(step, DedupStep))
    match stage.sink:
        case Collect(items):
            operations += _calls(item.expr for item in items)
            moved += sum(_width(item.expr) for item in items)
        case Group(table, keys, mode):
            operations += _calls(keys) + len(table.accs)
            probes += mode is GroupMode.HASH
            state += table.layout.size
        case Merge(table, mode):
            operations += len(table.accs)
            probes += mode is GroupMode.HASH
            state += table.layout.size
        case MergeBag(table, bag):
            operations += 1
            probes += 1
            state += table.bags[bag][1].layout.size
        case Partition(keys=keys, items=items) as sink:
            operations += _calls((*keys, *(item.expr for item in items)))
            moved += sink.stride
        case Process(table=table, args=args):
            operations += _calls(args) + 1
            probes += 1
            state += table.layout.size
        case _:
            operations += 1
    return StageCost(stage.name, moved, operations, int(probes), state)


def _calls(exprs: Iterable[Expr]) -> int:
    return sum(isinstance(part, Call) for expr in exprs for part in walk(expr))


def _width(expr: Expr | Agg) -> float:
    """Bytes of a value in a column; of text its offset only."""
    found = type_of(expr)
    return 4 if found.is_bytes else size_of(found)


def _read_bytes(stage: Stage) -> float:
    match stage.reader:
        case FromBatches() as reader:
            return reader.row_bytes
        case FromRows(stride=stride):
            return stride
        case FromTable(table) | FromPointers(table):
            return table.layout.size
        case _:
            return 0.0
