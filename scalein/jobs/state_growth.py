"""Whether the state of an operator grows without bound: as fast as rows come, and nothing in it is ever forgotten."""

from __future__ import annotations

from dataclasses import dataclass

from scalein.exec.operator import Growing, Operator
from scalein.ir import ops

FIRST_LOOK = 1 << 20  # keys or rows
SLOWER = 1.1  # keys from a finite domain come less often, once many of them are known
_REMEDIES: dict[type[ops.Op], str] = {
    ops.Aggregate: 'agg(..., ttl="7d") forgets groups that have been quiet so long',
    ops.Distinct: 'distinct(..., ttl="7d") forgets what has been quiet so long',
    ops.Process: 'process(..., ttl="7d") forgets keys that have been quiet so long',
    ops.BufferedJoin: 'keep="1h" says how long rows wait for others',
    ops.Over: 'frames with within="1h" need no other rows',
}


@dataclass
class StateGrowth:
    """Looks at the size of a state whenever it has doubled. It grows without bound if its second half took about as
    many rows as the first: then it says so, once.

    >>> growth = StateGrowth()
    >>> [growth.is_steady(rows=keys + 10, size=keys) for keys in (1, 1_100_000, 1_500_000, 2_200_000, 4_400_000)]
    [False, False, False, True, False]
    >>> growth = StateGrowth()
    >>> [growth.is_steady(rows=rows, size=size) for rows, size in ((1_000_000, 1_050_000), (3_000_000, 2_100_000))]
    [False, False]
    """

    rows: int = 0  # at the last look
    size: int = 0
    is_done: bool = False

    def is_steady(self, rows: int, size: int) -> bool:
        """Whether that is to be said now, after so many rows."""
        if self.is_done or size < max(FIRST_LOOK, 2 * self.size) or rows <= self.rows:
            return False
        before, now = self.size * (rows - self.rows), (size - self.size) * self.rows
        self.is_done = self.size > 0 and SLOWER * now >= before
        self.rows, self.size = rows, size
        return self.is_done


def growth_warning(op: ops.Op, operator: Operator, growth: StateGrowth, rows: int, elapsed_s: float) -> str | None:
    """What is said of an operator that grows without bound, after so many rows; once."""
    size = operator.never_forgotten if isinstance(operator, Growing) else None
    if size is None or not growth.is_steady(rows, size):
        return None
    what = "rows" if isinstance(op, ops.BufferedJoin) else "keys"
    name, detail = op.describe()
    return (f"the state of {name.lower()} {detail} grows without bound: {size:,} {what} after {rows:,} rows, "
            f"{1000 * size / rows:,.0f} more for each 1,000 rows, {size / max(elapsed_s, 1e-9):,.0f} a second; "
            f"{_REMEDIES[type(op)]}")
