"""State machines of the user's (`group_by(k).process(Cls)`): what a key remembers, and what a row does to it.

Besides the fields of the class, a record has hidden ones: the time of the timer (`TIMER`, `NEVER` if none is set), the
time of the last row or timer if keys are forgotten (`LAST`), and whether the record is state at all (`STATUS`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from scalein.dtypes import BOOL, I64, DType, Field
from scalein.ir.accumulators import Assign, ExprAcc, Slot
from scalein.ir.exprs import Lit, Named, type_of
from scalein.ir.tables import Acc, AccKind, Key, Table

if TYPE_CHECKING:
    from scalein.ir.udf import Method, Variable

TIMER, LAST, STATUS = "#timer", "#last", "#status"
NEVER = (1 << 63) - 1  # the timer of a key that has none
NO_TIME = -(1 << 63)
HELD, CHANGED = 1, 2  # bits of the status: the key has state; a store does not know of it, or of its end


@dataclass(frozen=True)
class PythonBody:
    """A class that stays Python (`compile=False`)."""

    cls: type

    def __repr__(self) -> str:  # part of digests
        return f"{self.cls.__module__}.{self.cls.__qualname__}"


@dataclass(frozen=True, slots=True)
class ProcessBody:
    """A compiled class. `on_row` takes the fields, the timer if there is one, and then columns of the row; `on_timer`
    takes the fields, the timer, and the time for which it was set.
    """

    name: str
    slots: tuple[Slot, ...]
    columns: tuple[str, ...]  # that it reads
    types: tuple[DType, ...]  # as which it sees them
    outputs: tuple[Field, ...]  # of the rows that it yields, after the keys
    on_row: Method | None  # None: it is not compiled
    on_timer: Method | None = None
    clock: DType | None = None  # the type of event times
    has_timer: bool = False
    ttl: int = 0  # 0: no key is forgotten
    python: PythonBody | None = None

    @property
    def is_timed(self) -> bool:
        """Whether time alone can change something."""
        return self.has_timer or bool(self.ttl)

    @property
    def stored(self) -> tuple[Slot, ...]:
        """The state of a key."""
        assert not self.is_timed or self.clock is not None
        timer = (Slot(TIMER, I64, NEVER),) if self.has_timer else ()
        return (*self.slots, *timer, *((Slot(LAST, I64, NO_TIME),) if self.ttl else ()))

    @property
    def row_params(self) -> tuple[Variable, ...]:
        """The columns of a row, as `on_row` takes them."""
        assert self.on_row is not None
        return self.on_row.params[len(self.on_row.params) - len(self.columns) :]

    def yields_time(self, output: str, time: str) -> bool:
        """Whether a column of the rows that come out is the time of the row, or of the timer, each time."""
        from scalein.ir.udf import Assign as SetLocal  # flows without udfs do not need it
        from scalein.ir.udf import Local, Yield, walk

        if self.on_row is None:
            return True
        number = [field.name for field in self.outputs].index(output)
        times = {f"row.{time}", *(() if self.on_timer is None else (self.on_timer.params[-1].name,))}
        statements = [part for method in (self.on_row, self.on_timer) if method is not None
                      for part, _ in walk(method.body)]
        if any(isinstance(each, SetLocal) and each.name in times for each in statements):
            return False
        values = [each.values[number] for each in statements if isinstance(each, Yield)]
        return all(isinstance(value, Local) and value.name in times for value in values)

    def table(self, keys: tuple[Named, ...]) -> Table:
        """The fields of each key, in a record."""
        nothing = Assign(())
        slots = (*self.stored, Slot(STATUS, I64, 0))
        state = ExprAcc(self.name, slots, (), nothing, nothing, Lit(None, BOOL))
        return Table(tuple(Key(k.name, type_of(k.expr), k.expr.nullable) for k in keys),
                     (Acc(AccKind.EXPR, params=(state,)),), ())


def part_of(table: Table, name: str) -> str:
    """The field of a record that holds a slot."""
    return next(f"acc0.{part}" for part, slot in table.accs[0].expr.parts if slot.name == name)
