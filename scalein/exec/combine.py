"""Partial groups that belong together by a number, put together by compiled code.

For groups that are known by their places, next to those that are in a store or a file: so what comes out stands in the
order of the numbers, whatever the keys are.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

import numpy as np
import pyarrow as pa

from scalein.arrow_functions import taken
from scalein.dtypes import I64, Field, Schema
from scalein.exec.bounded import Program
from scalein.ir import ops
from scalein.ir.exprs import Col
from scalein.ir.partials import TwoPhase
from scalein.ir.physical import Scan, WindowAggregate
from scalein.ir.tables import Key, Slicing
from scalein.options import Options

_NUMBER = "#number"


class Numbered:
    """The `combine` of an aggregation, by numbers instead of keys."""

    def __init__(self, two: TwoPhase) -> None:
        self._two = two

    def combined(self, rows: pa.RecordBatch, numbers: np.ndarray, options: Options) -> pa.RecordBatch:
        """The values of all rows of a number, in the order of the numbers, which begin at 0 and leave none out."""
        names = self._two.values.names
        given = rows.select(names).add_column(0, pa.field(_NUMBER, pa.int64(), False), pa.array(numbers, pa.int64()))
        found = pa.concat_batches(list(self._program.run([given], options)))
        order = pa.array(np.argsort(np.asarray(found.column(_NUMBER)), kind="stable"))
        return pa.RecordBatch.from_arrays([taken(found.column(name), order) for name in names], names=names)

    @cached_property
    def _program(self) -> Program:
        values = self._two.values
        source = ops.Source("partials", Schema((Field(_NUMBER, I64, False), *values)).arrow, (_NUMBER, *values.names))
        table = replace(self._two.combine.table, keys=(Key(_NUMBER, I64, False),), window=None, slicing=Slicing.NONE,
                        slice_size=0)
        return Program(WindowAggregate(Scan(source), (), table, (Col(_NUMBER, I64, False),)))
