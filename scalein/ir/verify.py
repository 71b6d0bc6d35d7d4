"""What ops promise: names exist, types match, nothing is untyped. Whoever breaks it gets an InternalError.

Users never see one of these: `flow.py` and `resolve` refuse what they wrote with an error in their words.
The compiler verifies after every pass, so a broken plan names the pass that made it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from scalein.dtypes import BOOL, DType, Field, Kind
from scalein.errors import InternalError
from scalein.ir.exprs import Agg, Call, Col, Expr, Lit, walk
from scalein.ir.functions import AGGREGATES, COMPARISONS, FUNCTIONS
from scalein.ir.ops import Aggregate, Filter, Join, Limit, Op, Source, Union, Watermark
from scalein.ir.printer import dump, show_expr
from scalein.ir.rewrite import exprs_of, walk_ops

Fields = dict[str, Field]
Schemas = dict[int, Fields]  # by the id of the op; each is derived once, not again for every expression above

_HOW = ("inner", "left", "semi", "anti")


def verify_ops(root: Op) -> None:
    """Raise an InternalError, with the plan, if an op below or at `root` breaks a promise."""
    schemas: Schemas = {}
    for op in walk_ops(root):
        wrong = next(_wrong_in_op(op, schemas), None)
        if wrong is not None:
            raise InternalError(f"{type(op).__name__}: {wrong}", at=op.at, plan="\n" + _plan_of(root),
                                hint="this is a bug of scalein's; please send us this text")


def _plan_of(root: Op) -> str:
    """The plan, even if it is too broken to be printed in full."""
    try:
        return dump(root)
    except Exception as error:
        return f"{root!r}\n(cannot be printed: {error!r})"


def _wrong_in_op(op: Op, schemas: Schemas) -> Iterator[str]:
    """What is wrong with an op over sound inputs; enters its schema among those known."""
    for expr, below in exprs_of(op):
        for node in walk(expr):
            yield from _wrong_in_expr(node, schemas[id(below)])
    match op:
        case Source():
            known = set(op.arrow.names)
            yield from (f"no column {name!r} in its data" for name in op.columns if name not in known)
        case Filter():
            yield from _expect(lambda: "the predicate", op.predicate.dtype, BOOL)
        case Limit() if op.count < 0:
            yield f"count is {op.count}"
        case Watermark() if op.column not in schemas[id(op.input)]:
            yield f"no column {op.column!r} in its input"
        case Union():
            yield from _wrong_in_union(op, schemas)
        case Join():
            yield from _wrong_in_join(op, schemas)
        case Aggregate():
            yield from _wrong_in_aggregate(op)
    if isinstance(op, Filter | Limit | Watermark):
        schemas[id(op)] = schemas[id(op.input)]
        return
    fields = op.schema.fields
    schemas[id(op)] = {field.name: field for field in fields}
    yield from _wrong_names([field.name for field in fields])


def _wrong_names(names: list[str]) -> Iterator[str]:
    if not names:
        yield "it gives no column"
    if len(set(names)) == len(names):
        return
    yield from (f"two columns are called {name!r}" for name in set(names) if names.count(name) > 1)


def _wrong_in_expr(node: Expr, fields: Fields) -> Iterator[str]:
    """One node, not what is below it."""
    if node.dtype is None:
        yield f"{show_expr(node)} has no type"
        return
    match node:
        case Col(name):
            field = fields.get(name)
            if field is None:
                yield f"no column {name!r} in its input"
                return
            yield from _expect(lambda: f"column {name!r}", node.dtype, field.dtype)
            if field.nullable and not node.nullable:
                yield f"column {name!r} can be null and is read as if it could not"
        case Lit(value):
            if value is not None and not isinstance(value, _held_by(node.dtype)):
                yield f"literal {value!r} of type {node.dtype!r}"
        case Call(fn):
            if fn not in FUNCTIONS:
                yield f"no function {fn!r}"
            elif len(node.args) != FUNCTIONS[fn].arity:
                yield f"{fn} with {len(node.args)} arguments"
            else:
                yield from _wrong_in_call(node)


def _held_by(dtype: DType) -> type:
    """The Python type of the physical values of a literal."""
    if dtype.is_float:
        return float
    return {Kind.BOOL: bool, Kind.STR: str}.get(dtype.kind, int)


def _wrong_in_call(call: Call) -> Iterator[str]:
    """Promises about the types of arguments, where one function differs from the next in nothing else."""
    types = [arg.dtype for arg in call.args]
    if call.fn in COMPARISONS:
        yield from _expect(lambda: f"the right side of {show_expr(call)}", types[1], types[0])
        yield from _expect(lambda: show_expr(call), call.dtype, BOOL)
    elif call.fn in ("and", "or", "not"):
        for found in [*types, call.dtype]:
            yield from _expect(lambda: f"a part of {show_expr(call)}", found, BOOL)
    elif call.fn == "if_else":
        yield from _expect(lambda: f"the condition of {show_expr(call)}", types[0], BOOL)
        for found in types[1:]:
            yield from _expect(lambda: f"a branch of {show_expr(call)}", found, call.dtype)
    elif call.fn == "fill_null":
        for found in types:
            yield from _expect(lambda: f"a part of {show_expr(call)}", found, call.dtype)


def _wrong_in_union(op: Union, schemas: Schemas) -> Iterator[str]:
    first = schemas[id(op.inputs[0])]
    for other in (schemas[id(below)] for below in op.inputs[1:]):
        if list(other) != list(first):
            yield f"its inputs have columns {list(first)} and {list(other)}"
            return
        for name, field in other.items():
            yield from _expect(partial("column {!r} of an input".format, name), field.dtype, first[name].dtype)


def _wrong_in_join(op: Join, schemas: Schemas) -> Iterator[str]:
    if op.how not in _HOW:
        yield f"how is {op.how!r}"
    if op.keep and op.how in ("semi", "anti"):
        yield f"a {op.how} join keeps nothing of the right side"
    if len(op.left_keys) != len(op.right_keys) or not op.left_keys:
        yield f"{len(op.left_keys)} keys on the left and {len(op.right_keys)} on the right"
        return
    for left, right in zip(op.left_keys, op.right_keys, strict=True):
        yield from _expect(partial(_key_text, right), right.dtype, left.dtype)
    yield from (f"no column {column!r} on the right" for _, column in op.keep if column not in schemas[id(op.right)])


def _key_text(key: Expr) -> str:
    return f"key {show_expr(key)} of the right side"


def _wrong_in_aggregate(op: Aggregate) -> Iterator[str]:
    if op.window is not None and (op.window.size <= 0 or op.window.every <= 0):
        yield f"a window of {op.window.size} every {op.window.every}"
    yield from (wrong for named in op.aggs for wrong in _wrong_in_agg(named.agg))


def _wrong_in_agg(agg: Agg) -> Iterator[str]:
    if agg.dtype is None:
        yield f"aggregate {agg.fn} has no type"
    if agg.fn not in AGGREGATES:
        yield f"no aggregate {agg.fn!r}"
    elif len(agg.args) != AGGREGATES[agg.fn]:
        yield f"aggregate {agg.fn} with {len(agg.args)} arguments"


def _expect(what: Callable[[], str], found: DType | None, expected: DType | None) -> Iterator[str]:
    """Complain if types differ; the Arrow form of a string is no difference to an expression."""
    if found == expected is not None or (found and expected and found.is_string and expected.is_string):
        return
    yield f"{what()} is {found!r}, not {expected!r}"
