"""Constants computed and boolean identities applied, as far as nulls and errors allow.

Relies on resolved expressions. Keeps the type of every expression and the schema of every op; may
remove an error (of an argument that is not needed any more), never adds one.
"""

from __future__ import annotations

from dataclasses import replace

from scalein.dtypes import BOOL
from scalein.ir.exprs import Call, Expr, Lit, type_of
from scalein.ir.functions.registry import REGISTRY, Nulls, can_fail, evaluate, fallible
from scalein.ir.ops import Filter, Op
from scalein.ir.rewrite import Known, map_exprs, rewrite, rewrite_expr

_NOT = {"is_null": "is_not_null", "is_not_null": "is_null"}


def fold(root: Op) -> Op:
    """Filter(x, (a % (2 + 3) == 0) & True) -> Filter(x, divisible(a, 5)), so that kernels compute less."""
    known: Known[Expr] = {}

    def fold_all(expr: Expr) -> Expr:
        return fold_expr(expr, known)

    def keeping_nullable(expr: Expr) -> Expr:
        return with_nullable(fold_expr(expr, known), expr.nullable) or expr

    def rule(op: Op) -> Op | None:
        folded = map_exprs(op, keeping_nullable if op.keeps_nullable else fold_all)
        match folded:
            case Filter(below, Lit(True)):
                return below
            case _:
                return None if folded is op else folded

    return rewrite(root, rule)


def fold_expr(expr: Expr, known: Known[Expr] | None = None) -> Expr:
    """The expression with its constant parts computed; its type stays, null may become impossible.

    Parts that are `known` from calls before are not looked at again.
    """
    return rewrite_expr(expr, _fold_call, known) if isinstance(expr, Call) else expr


def with_nullable(expr: Expr, nullable: bool) -> Expr | None:
    """The expression with the nullability that an output column had before; None for a literal that cannot have it."""
    if expr.nullable == nullable:
        return expr
    return None if isinstance(expr, Lit) else replace(expr, nullable=nullable)


def _fold_call(expr: Expr) -> Expr | None:
    if not isinstance(expr, Call):
        return None
    folded = _fold_bool(expr) or _fold_null(expr) or _fold_choice(expr) or _fold_divisible(expr) or evaluate(expr)
    return folded if folded is not None and type_of(folded) == type_of(expr) else None


def _fold_bool(call: Call) -> Expr | None:
    """Kleene logic: false decides an `and` and true an `or`, even beside null; the other constant changes nothing."""
    match call:
        case Call("and", (Lit(True), x)) | Call("and", (x, Lit(True))):
            return x
        case Call("or", (Lit(False), x)) | Call("or", (x, Lit(False))):
            return x
        case Call("and", (Lit(False), _)) | Call("and", (_, Lit(False))):
            return Lit(False, BOOL)
        case Call("or", (Lit(True), _)) | Call("or", (_, Lit(True))):
            return Lit(True, BOOL)
        case Call("and" | "or", (x, y)) if x == y:
            return x
        case Call("not", (Call("not", (x,)),)):
            return x
        case Call("not", (Call(fn) as test,)) if fn in _NOT:
            return replace(test, fn=_NOT[fn])
        case _:
            return None


def _fold_null(call: Call) -> Expr | None:
    match call:
        case Call("is_null" | "is_not_null" as fn, (Lit(value),)):
            return Lit((value is None) == (fn == "is_null"), BOOL)
        case Call("is_null" | "is_not_null" as fn, (x,)) if not x.nullable:
            return Lit(fn == "is_not_null", BOOL)
        case Call("fill_null", (x, Lit(None))):
            return x
        case Call("fill_null", (Lit(None), y)):
            return y
        case Call("fill_null", (x, _)) if not x.nullable:
            return x
        case _:
            is_strict = REGISTRY[call.fn].nulls is Nulls.STRICT
            is_null = is_strict and any(isinstance(arg, Lit) and arg.value is None for arg in call.args)
            return Lit(None, call.dtype) if is_null and not any(map(can_fail, call.args)) else None


def _fold_choice(call: Call) -> Expr | None:
    match call:
        case Call("if_else", (Lit(True), a, _)):
            return a
        case Call("if_else", (Lit(), _, b)):  # false, or null, which takes the other branch too
            return b
        case Call("if_else", (_, a, b)) if a == b:
            return a
        case Call("cast", (x,)) if x.dtype == call.dtype:
            return x
        case Call("try", (x,)) if not (isinstance(x, Call) and fallible(x)):
            return x
        case _:
            return None


def _fold_divisible(call: Call) -> Expr | None:
    """`x % c == 0` for integers: a multiplication and a comparison in the kernel instead of a division."""
    match call:
        case (
            Call("eq" | "ne", (Call("mod", (x, Lit(int() as divisor))), Lit(0)))
            | Call("eq" | "ne", (Lit(0), Call("mod", (x, Lit(int() as divisor)))))
        ) if divisor != 0 and type_of(x).is_int:
            test = Call("divisible", (x,), (divisor,), BOOL, x.nullable, at=call.at)
            return test if call.fn == "eq" else Call("not", (test,), (), BOOL, x.nullable, at=call.at)
        case _:
            return None
