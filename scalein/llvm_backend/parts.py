"""Wide kernels in parts: a function for each column or accumulator, and one for all that differ in names only.

LLVM's time grows faster than a function: 400 columns in one took 15 s. A kernel with more than `MAX_IN_ONE_FUNCTION`
columns or accumulators filters, probes and finds records as ever; then it calls parts, each with a loop of its own over
the same selection. A filter over 2,000 columns of three types has three parts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sized

from scalein.ir.exprs import Call, Col, Expr, Lit, columns, walk
from scalein.ir.stages import Collect, DedupStep, FilterStep, Group, Merge, Probe, ProjectStep, Stage
from scalein.ir.tables import Acc
from scalein.llvm_backend.fn import literal_name
from scalein.llvm_backend.functions.registry import PLAIN
from scalein.llvm_backend.values import Env

MAX_IN_ONE_FUNCTION = 64  # columns or accumulators of a kernel

Shape = tuple[object, tuple[str, ...]]  # equal for what makes the same code but for names; the names


def is_many(what: Sized) -> bool:
    """Whether columns or accumulators are too many for one function."""
    return len(what) > MAX_IN_ONE_FUNCTION


def is_wide(stage: Stage) -> bool:
    match stage.sink:
        case Collect(items):
            return is_many(items)
        case Group(table) | Merge(table):
            return is_many(table.accs)
        case _:
            return False


def can_outline(acc: Acc) -> bool:
    """Whether a part can update or merge it: all but those with memory outside the record."""
    return not acc.has_side and not acc.has_heap


def shape_of(exprs: Iterable[Expr], env: Env) -> Shape | None:
    """What expressions are but for the columns they read; None if something in them is like nothing else."""
    names: dict[str, int] = {}
    found: list[object] = []
    for expr in exprs:
        nodes = list(walk(expr))
        is_plain = all(node.fn in PLAIN for node in nodes if isinstance(node, Call))
        places = {id(node): place for place, node in enumerate(nodes)}
        for node in nodes:
            match node:
                case Col(name):
                    binding = env[name]
                    if binding.shape is None:
                        return None
                    found.append((binding.shape, *(names.setdefault(each, len(names)) for each in binding.names)))
                case Lit(float() as value) if is_plain:
                    found.append((node.dtype, names.setdefault(literal_name(value), len(names))))
                case Lit():
                    found.append(repr(node))
                case Call() if node.fn != "udf":
                    found.append((node.fn, *(places[id(arg)] for arg in node.args), repr(node.params), node.dtype))
                case _:
                    return None
        found.append("")
    return tuple(found), tuple(names)


def acc_shape(number: int, acc: Acc, env: Env) -> Shape | None:
    """That of an accumulator's update by a row."""
    given = shape_of(acc.exprs, env)
    if given is None:
        return None
    what = acc.kind, repr(acc.params), acc.arg is None, acc.by is None, given[0]
    return what, (*given[1], f"acc{number}")


def columns_outside_parts(stage: Stage, materialized: frozenset[tuple[int, str]]) -> set[str]:
    """The columns of a wide stage's input that its steps, its keys and materialized columns read."""
    wanted: set[str] = set()
    if isinstance(stage.sink, Group):
        table = stage.sink.table
        exprs = [*stage.sink.keys, *(e for acc in table.accs if not can_outline(acc) for e in acc.exprs)]
        exprs += [] if table.window is None else table.window.exprs
        wanted = set().union(*map(columns, exprs))
    for at, step in reversed(list(enumerate(stage.steps))):
        match step:
            case FilterStep(predicate):
                wanted |= columns(predicate)
            case ProjectStep(items):
                wanted = set().union(*(columns(item.expr) for item in items
                                       if item.name in wanted or (at, item.name) in materialized))
            case Probe(keys=keys) | DedupStep(keys=keys):
                wanted = wanted.union(*map(columns, keys))
    return wanted
