"""How many rows an op gives, estimated from the statistics of its sources.

Filters and projections over a source are computed for its sample; what cannot be, and what is above joins and
aggregations, is guessed by the kind of condition. A source without statistics makes everything above it unknown.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from decimal import Decimal
from math import prod

import pyarrow as pa

from scalein.dtypes import DType, Kind
from scalein.ir.exprs import Call, Col, Expr, Lit, type_of
from scalein.ir.functions.registry import is_host
from scalein.ir.ops import (
    Aggregate,
    Distinct,
    Filter,
    Join,
    Limit,
    Op,
    OuterJoin,
    Project,
    Reordered,
    Sort,
    Source,
    Union,
)
from scalein.ir.rewrite import operands, substitute
from scalein.sql.statistics import Statistics, distinct_values, statistics_of

# The share of rows for which a condition holds that no sample says anything about.
_GUESSED = {"eq": 0.1, "ne": 0.9, "is_null": 0.1, "is_not_null": 0.9, "is_in": 0.2}
_OTHERWISE = 1 / 3


_NOT_COMPUTED = (pa.ArrowException, ArithmeticError, TypeError, ValueError)  # for a row of the sample


class Unknown(Exception):
    """There are no statistics, or what is asked for cannot be computed for a sample."""


class Cardinalities:
    """The estimates of one query; nothing is estimated twice."""

    def __init__(self) -> None:
        self._rows: dict[int, tuple[Op, float]] = {}
        self._samples: dict[int, tuple[Op, _Sample | None]] = {}

    def rows(self, op: Op) -> float:
        """About how many rows an op gives; raises `Unknown`."""
        if id(op) not in self._rows:
            self._rows[id(op)] = op, self._estimated(op)
        return self._rows[id(op)][1]

    def _estimated(self, op: Op) -> float:
        match op:
            case Source(data=data):
                found = statistics_of(data)
                if found is None:
                    raise Unknown
                return float(found.rows)
            case Filter(below, predicate):
                sample = self._sample(op)
                return self.rows(below) * guess(predicate) if sample is None else sample.rows
            case Project(below) | Sort(below, count=None) | Reordered(below):
                return self.rows(below)
            case Limit(below, count) | Sort(below, count=int(count)):
                return min(self.rows(below), count)
            case Aggregate(below, keys, None):
                return min(self.rows(below), prod(self.distinct(below, key.expr) for key in keys))
            case Distinct(below, names):
                return min(self.rows(below), prod(self.distinct(below, _column(below, name)) for name in names))
            case Union(inputs):
                return sum(map(self.rows, inputs))
            case Join() | OuterJoin():
                return self._joined(op)
        raise Unknown

    def _joined(self, op: Join) -> float:
        left, right = self.rows(op.left), self.rows(op.right)
        if op.how == "cross":
            return left * right
        counts = [(self.distinct(op.left, a), self.distinct(op.right, b))
                  for a, b in zip(op.left_keys, op.right_keys, strict=True)]
        mine, theirs = (min(rows, prod(pair[side] for pair in counts)) for side, rows in ((0, left), (1, right)))
        if op.how in ("semi", "anti"):
            share = min(1.0, theirs / max(mine, 1.0))
            return left * (share if op.how == "semi" else max(0.0, 1 - share))
        inner = left * right / max(mine if len(counts) == 1 else min(mine, theirs), theirs if len(counts) == 1 else 1.0,
                                   1.0)
        return max(inner, left if op.how in ("left", "outer") else 0.0, right if op.how in ("right", "outer") else 0.0)

    def distinct(self, op: Op, expr: Expr) -> float:
        """About how many distinct values an expression has in the rows of an op; raises `Unknown`."""
        return max(1.0, min(self._distinct(op, expr), self.rows(op)))

    def _distinct(self, op: Op, expr: Expr) -> float:
        match op:
            case _ if isinstance(expr, Lit):
                return 1.0
            case Source(data=data):
                found = statistics_of(data)
                if found is None:
                    raise Unknown
                try:
                    return distinct_values(_Sample.of(found).runs(expr), found.rows)
                except (Unknown, *_NOT_COMPUTED):
                    return float(found.rows)
            case Filter(below):
                whole, rows = max(1.0, self.rows(below)), self.rows(op)
                values = self.distinct(below, expr)
                return values * (1 - float(max(0.0, 1 - rows / whole) ** (whole / values)))
            case Project(below, items):
                return self.distinct(below, substitute(expr, {item.name: item.expr for item in items}))
            case Sort(below) | Limit(below) | Reordered(below):
                return self.distinct(below, expr)
            case Aggregate(below, keys):
                by_name = {key.name: key.expr for key in keys}
                if isinstance(expr, Col) and expr.name in by_name:
                    return self.distinct(below, by_name[expr.name])
            case Distinct(below):
                return self.distinct(below, expr)
            case Join(left, right, keep=keep) if isinstance(expr, Col):
                if left.schema.get(expr.name) is not None:
                    return self.distinct(left, expr)
                return self.distinct(right, _column(right, dict(keep)[expr.name]))
        return self.rows(op)

    def _sample(self, op: Op) -> _Sample | None:
        """Some of an op's rows, if it is made of filters and projections over a source."""
        if id(op) not in self._samples:
            self._samples[id(op)] = op, self._sampled(op)
        return self._samples[id(op)][1]

    def _sampled(self, op: Op) -> _Sample | None:
        match op:
            case Source(data=data):
                found = statistics_of(data)
                return None if found is None or not found.rows else _Sample.of(found)
            case Project(below, items):
                inner = self._sample(below)
                return None if inner is None else inner.projected({item.name: item.expr for item in items})
            case Filter(below, predicate):
                inner = self._sample(below)
                return None if inner is None else inner.filtered(predicate)
        return None


class _Sample:
    """Rows of a sample: which ones pass the filters so far, and what the columns are, in terms of the source's.

    `share` is that of the conditions that could not be computed.
    """

    def __init__(self, statistics: Statistics, columns: dict[str, Expr] | None = None,
                 passed: pa.Array | None = None, share: float = 1.0) -> None:
        self._statistics, self._columns, self._passed, self._share = statistics, columns, passed, share

    @staticmethod
    def of(statistics: Statistics) -> _Sample:
        return _Sample(statistics)

    @property
    def rows(self) -> float:
        """About how many rows of the whole source pass. None of the sample need not be none of all: count a half."""
        found = self._statistics.rows * self._share
        if self._passed is None:
            return found
        sampled = len(self._passed)
        count: int = self._passed.true_count
        if sampled >= self._statistics.rows:
            return float(count) * self._share
        return found * max(count, 0.5) / max(1, sampled)

    def projected(self, items: dict[str, Expr]) -> _Sample:
        columns = {name: expr if self._columns is None else substitute(expr, self._columns)
                   for name, expr in items.items()}
        return _Sample(self._statistics, columns, self._passed, self._share)

    def filtered(self, predicate: Expr) -> _Sample:
        """The rows for which a predicate holds, conjunct by conjunct."""
        import pyarrow.compute as pc

        passed, share = self._passed, self._share
        for each in operands(predicate, "and"):
            expr = each if self._columns is None else substitute(each, self._columns)
            try:
                found = pc.fill_null(_array(evaluate(expr, self._column)), False)
                passed = found if passed is None else pc.and_(passed, found)
            except (Unknown, *_NOT_COMPUTED):
                share *= guess(each)
        return _Sample(self._statistics, self._columns, passed, share)

    def runs(self, expr: Expr) -> Sequence[pa.Array]:
        """The values of an expression over the source, by runs."""
        if isinstance(expr, Col):
            return self._statistics.runs(expr.name)
        values = _array(evaluate(expr, self._column))
        if len(values) == 0:
            raise Unknown
        return [values]

    def _column(self, name: str) -> pa.Array:
        runs = self._statistics.runs(name)
        if not runs:
            raise Unknown
        found = pa.concat_arrays(runs)
        return found.dictionary_decode() if pa.types.is_dictionary(found.type) else found


def guess(predicate: Expr) -> float:
    """The share of rows for which a condition holds, by its kind alone."""
    match predicate:
        case Call("and", args):
            return prod(map(guess, args))
        case Call("or", args):
            return min(1.0, sum(map(guess, args)))
        case Call("not", (inner,)):
            return 1 - guess(inner)
        case Call(fn):
            return _GUESSED.get(fn, _OTHERWISE)
    return _OTHERWISE


def _column(op: Op, name: str) -> Col:
    field = op.schema[name]
    return Col(name, field.dtype, field.nullable)


# --- expressions over samples

_COMPARED = {"eq": "equal", "ne": "not_equal", "lt": "less", "le": "less_equal", "gt": "greater",
             "ge": "greater_equal"}
_COMPUTED = {"add": "add", "sub": "subtract", "mul": "multiply", "and": "and_kleene", "or": "or_kleene",
             "not": "invert", "is_null": "is_null", "is_not_null": "is_valid", "if_else": "if_else",
             "fill_null": "fill_null", "coalesce": "coalesce", "dt_year": "year", "dt_month": "month", "dt_day": "day"}
_OF_TEXT = {"starts_with": "starts_with", "ends_with": "ends_with", "contains": "match_substring"}


def evaluate(expr: Expr, column: Callable[[str], pa.Array]) -> pa.Array | pa.Scalar:
    """An expression over arrays, by pyarrow: near enough to what a kernel computes to count rows. Raises `Unknown`."""
    import pyarrow.compute as pc

    match expr:
        case Col(name):
            return column(name)
        case Lit(value):
            return _scalar(value, type_of(expr))
        case Call("is_in", (arg,), (tuple() as values, _)):
            found = evaluate(arg, column)
            dtype = type_of(arg)
            return pc.is_in(found, value_set=pa.array([_scalar(v, dtype).as_py() for v in values], found.type))
        case Call("str_slice", (arg,), (int(start), length)) if length is None or isinstance(length, int):
            return pc.utf8_slice_codeunits(evaluate(arg, column), start, None if length is None else start + length)
        case Call(fn, args) if fn in _OF_TEXT:
            return getattr(pc, _OF_TEXT[fn])(evaluate(args[0], column), expr.params[0])
        case Call(fn, args) if fn in _COMPARED or fn in _COMPUTED:
            name = _COMPARED.get(fn) or _COMPUTED[fn]
            return getattr(pc, name)(*(evaluate(arg, column) for arg in args))
        case Call("cast", (arg,)) if not is_host(expr):
            return evaluate(arg, column).cast(type_of(expr).arrow)
        case Call(fn, args) if is_host(expr) and len(args) == 1 and fn != "udf":
            from scalein.arrow_functions import apply

            return apply(expr, [_array(evaluate(args[0], column))])
    raise Unknown


def _scalar(value: object, dtype: DType) -> pa.Scalar:
    """A literal as pyarrow holds it; decimals are integers in units of their last digit."""
    if dtype.is_decimal and isinstance(value, int):
        return pa.scalar(Decimal(value).scaleb(-dtype.scale), dtype.arrow)
    if dtype.kind is Kind.DATE and isinstance(value, int):
        return pa.scalar(value, pa.int32()).cast(pa.date32())
    return pa.scalar(value, dtype.arrow)


def _array(found: pa.Array | pa.Scalar) -> pa.Array:
    """An array; a constant has no rows to count, and is not known."""
    if not isinstance(found, pa.Array):
        raise Unknown
    return found
