"""The oracle: slow, obvious meaning of every expression, aggregate and op over pyarrow.

`run(op)` is what a flow means; `evaluate(expr, batch)` is what an expression means. The compiled
engine is right when it agrees with them. Rows are plain Python values here: ints for times, and
functions of one row (`scalars.py`), so that nothing hides behind a library whose meaning differs.

    values.py      Arrow <-> plain values; when two values are equal, which comes first
    scalars.py     each function on the values of one row
    hosts.py       the functions whose meaning is pyarrow's: parsing, formatting, time zones, and what follows
    texts.py         case, whitespace, parts and regular expressions
    lists.py         lists of every layout; taking.py: rows by number, of every type
    exprs.py       expressions over columns; which rows an expression may fail in
    aggregates.py  each aggregate on the values of one group
    relations.py   each op on whole inputs
"""

from scalein.interp.exprs import evaluate
from scalein.interp.relations import run

__all__ = ["evaluate", "run"]
