"""Compiles expressions of Python's syntax tree to typed parts, or refuses them with the reason."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import NoReturn

from scalein.dtypes import BOOL, F64, I64, STR, DType
from scalein.ir.exprs import Lit
from scalein.ir.udf import (
    NOTHING,
    TEXTS,
    Apply,
    Choose,
    Either,
    Invoke,
    Let,
    Local,
    Part,
    PythonUdf,
    Udf,
    Variable,
    is_tuple,
    items_of,
    tuple_of,
)
from scalein.udf import calls, text_methods
from scalein.udf.conversions import NAMES, NUMBERS, common, convert, is_settled, plain_constant, truth
from scalein.udf.known import Known
from scalein.udf.python_source import Source

_ARITHMETIC: dict[type[ast.operator], str] = {
    ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.FloorDiv: "floordiv", ast.Mod: "mod",
}  # fmt: skip
_BITS: dict[type[ast.operator], str] = {
    ast.BitAnd: "bit_and", ast.BitOr: "bit_or", ast.BitXor: "bit_xor", ast.LShift: "shl", ast.RShift: "shr",
}  # fmt: skip
_COMPARE: dict[type[ast.cmpop], str] = {
    ast.Eq: "eq", ast.NotEq: "ne", ast.Lt: "lt", ast.LtE: "le", ast.Gt: "gt", ast.GtE: "ge",
}  # fmt: skip
_REFUSED: dict[type[ast.expr], str] = {
    ast.List: "a list", ast.Set: "a set", ast.Dict: "a dict", ast.ListComp: "a comprehension",
    ast.SetComp: "a comprehension", ast.DictComp: "a comprehension", ast.GeneratorExp: "a generator",
    ast.Lambda: "a lambda", ast.Await: "await", ast.NamedExpr: "an assignment inside an expression",
    ast.Yield: "yield", ast.YieldFrom: "yield", ast.Starred: "a starred argument",
}  # fmt: skip
_MAX_COMPARED = 32  # values that `x in (...)` is compared with one after the other


class Exprs:
    """Types and translates expressions of one function; `types` are those of its locals so far."""

    def __init__(self, source: Source, names: set[str]) -> None:
        self.source = source
        self.names = names  # of all locals, parameters included
        self.types: dict[str, Variable] = {}
        self.hidden: dict[str, Variable] = {}

    # --- expressions by kind of value

    def read(self, node: ast.expr, known: Known) -> Part:
        """The expression, which may be None."""
        match node:
            case ast.Constant(value):
                return self._constant(node, value)
            case ast.UnaryOp(ast.USub(), ast.Constant(int() | float() as value)) if type(value) is not bool:
                return self._constant(node, -value)
            case ast.Name(name) if name in self.names:
                return self._local(node, name, known)
            case ast.Name() | ast.Attribute():
                return self._captured(node)
            case ast.UnaryOp(op, inner):
                return self._unary(node, op, inner, known)
            case ast.BinOp(left, op, right):
                return self.binary(node, op, self.value(left, known), self.value(right, known))
            case ast.Compare():
                return self._compare(node, known)
            case ast.BoolOp():
                return self._bool_op(node, known)
            case ast.IfExp():
                return self._choose(node, known)
            case ast.Call():
                return self._call(node, known)
            case ast.JoinedStr(values):
                return join_texts([self._formatted(each, known) for each in values], node.lineno)
            case ast.Tuple(items) if items and not any(isinstance(item, ast.Starred) for item in items):
                return self._tuple(node, [self.read(item, known) for item in items])
            case ast.Subscript(base, index):
                return self._subscript(node, self.value(base, known), index, known)
            case _:
                raise self.source.refuse(node, f"{_REFUSED.get(type(node), 'this')} is not supported")

    def value(self, node: ast.expr, known: Known) -> Part:
        """The expression, which cannot be None."""
        part = self.read(node, known)
        if part.nullable:
            raise self.source.refuse(node, f"{ast.unparse(node)} may be None here",
                                     "test it first, for example: `if x is None: return 0.0`")
        return part

    def number(self, node: ast.expr, known: Known) -> Part:
        """The expression as an int or a float; a bool counts as 0 or 1."""
        return self.as_number(node, self.value(node, known))

    def as_number(self, node: ast.AST, part: Part) -> Part:
        if part.dtype not in NUMBERS:
            raise self.source.refuse(node, f"a number is needed, not {NAMES[part.dtype]}")
        return convert(part, I64) if part.dtype == BOOL else part

    def integer(self, node: ast.expr, known: Known) -> Part:
        part = self.number(node, known)
        if part.dtype != I64:
            raise self.source.refuse(node, f"an int is needed, not {NAMES[part.dtype]}")
        return part

    def floating(self, node: ast.expr, known: Known) -> Part:
        return convert(self.number(node, known), F64)

    def condition(self, node: ast.expr, known: Known) -> Part:
        """Whether the expression is true in Python."""
        match node:
            case ast.UnaryOp(ast.Not(), inner):
                return _not(self.condition(inner, known))
            case ast.BoolOp(op, parts):
                fn, found = _connective(op), []
                for part in parts:
                    found.append(self.condition(part, known))
                    known = known.given(part, fn == "and")
                return join_conditions(fn, found, BOOL)
            case _:
                return truth(self.read(node, known))

    def new_local(self, dtype: DType, nullable: bool = False) -> Local:
        """A new local whose name no user code can have."""
        name = f"#{len(self.hidden)}"
        self.hidden[name] = Variable(name, dtype, nullable)
        return Local(name, dtype, nullable)

    def unify(self, node: ast.AST, parts: Sequence[Part]) -> list[Part]:
        """The parts in one type; null takes that type."""
        dtype = common(part.dtype for part in parts)
        if dtype is None and any(part.dtype is not None for part in parts):
            kinds = " and ".join(dict.fromkeys(NAMES[part.dtype] for part in parts if part.dtype is not None))
            raise self.source.refuse(node, f"{kinds} have no common type")
        return list(parts) if dtype is None else [convert(part, dtype) for part in parts]

    # --- names and constants

    def _constant(self, node: ast.AST, value: object) -> Lit:
        found = plain_constant(value)
        if found is None:
            kind = "an int of more than 64 bits" if type(value) is int else f"a constant of type {type(value).__name__}"
            raise self.source.refuse(node, f"{kind} is not supported")
        return found

    def _local(self, node: ast.expr, name: str, known: Known) -> Part:
        if name not in known.is_set:
            raise self.source.refuse(node, f"{name!r} may not be set here", "set it before the branch or the loop")
        variable = self.types[name]
        return Local(name, variable.dtype, variable.nullable and name not in known.not_none)

    def _tuple(self, node: ast.AST, items: list[Part]) -> Part:
        types = [(item.dtype or NOTHING, item.nullable) for item in items]
        return Apply("tuple", tuple(items), tuple_of(types))

    def settled(self, node: ast.AST, part: Part) -> Part:
        """The part, whose type is known altogether."""
        if not is_settled(part.dtype):
            raise self.source.refuse(node, "the type of an item is not known", "`x: float | None = None` says it")
        return part

    def _captured(self, node: ast.expr) -> Part:
        value = self.source.outside(node)
        found = plain_constant(value)
        if type(value) is int:
            return self._constant(node, value)
        if type(value) is tuple and value:
            return self._tuple(node, [self._constant(node, item) for item in value])
        if found is None or value is None:
            raise self.source.refuse(node, f"{ast.unparse(node)} is not a constant, but of type {type(value).__name__}",
                                     "a udf may use int, float, bool and str constants, math and other udfs")
        return found

    # --- operators

    def _unary(self, node: ast.expr, op: ast.unaryop, inner: ast.expr, known: Known) -> Part:
        if isinstance(op, ast.Not):
            return self.condition(node, known)
        if isinstance(op, ast.Invert):
            return Apply("invert", (self.integer(inner, known),), I64)
        part = self.number(inner, known)
        return part if isinstance(op, ast.UAdd) else Apply("neg", (part,), _type(part), line=node.lineno)

    def binary(self, node: ast.expr, op: ast.operator, left: Part, right: Part) -> Part:
        """An operator over two values, where `node` stands."""
        line = node.lineno
        if type(op) in _BITS and left.dtype == right.dtype == BOOL and not isinstance(op, ast.LShift | ast.RShift):
            return Apply(_BITS[type(op)], (left, right), BOOL)
        if left.dtype == right.dtype == STR and isinstance(op, ast.Add):
            return join_texts([left, right], line)
        if isinstance(op, ast.Mult) and {left.dtype, right.dtype} == {STR, I64}:
            text, count = (left, right) if left.dtype == STR else (right, left)
            return Apply("repeat", (text, count), STR, line=line)
        if STR in (left.dtype, right.dtype):
            reason = "text can be compared and joined with text, but not computed with"
            hint = ['write f"{s}{n}", or str(n)'] if isinstance(op, ast.Add) else []
            raise self.source.refuse(node, reason, *hint)
        both = [self.as_number(node, left), self.as_number(node, right)]
        if type(op) in _BITS:
            if F64 in (both[0].dtype, both[1].dtype):
                raise self.source.refuse(node, "bit operations need ints, not floats")
            return Apply(_BITS[type(op)], tuple(both), I64, line=line)
        if isinstance(op, ast.Div):
            return Apply("div", tuple(convert(each, F64) for each in both), F64, line=line)
        if isinstance(op, ast.Pow):
            return self._power(both, line)
        if type(op) not in _ARITHMETIC:
            raise self.source.refuse(node, "this operator is not supported")
        both = self.unify(node, both)
        return Apply(_ARITHMETIC[type(op)], tuple(both), _type(both[0]), line=line)

    def _power(self, both: list[Part], line: int) -> Part:
        """int ** int is an int, unless the exponent is a negative constant; a negative one in a row is an error."""
        base, exponent = both
        to_negative = isinstance(exponent, Lit) and isinstance(exponent.value, int) and exponent.value < 0
        dtype = I64 if base.dtype == exponent.dtype == I64 and not to_negative else F64
        return Apply("pow", tuple(convert(each, dtype) for each in both), dtype, line=line)

    def _compare(self, node: ast.Compare, known: Known) -> Part:
        """`a < b < c`: each middle operand is computed once."""
        if len(node.ops) == 1:
            return self._compare_pair(node, node.left, node.ops[0], node.comparators[0], known)
        operands = [node.left, *node.comparators]
        if any(isinstance(op, ast.Is | ast.IsNot | ast.In | ast.NotIn) for op in node.ops):
            raise self.source.refuse(node, "is and in cannot be chained")
        parts = [self.value(operand, known) for operand in operands]
        bindings: list[tuple[Local, Part]] = []
        for number in range(1, len(parts) - 1):
            if not isinstance(parts[number], Lit | Local):
                local = self.new_local(_type(parts[number]))
                bindings.append((local, parts[number]))
                parts[number] = local
        tests = [self._test(node, op, a, b) for op, a, b in zip(node.ops, parts, parts[1:], strict=False)]
        result = join_conditions("and", tests, BOOL)
        for local, part in reversed(bindings):
            result = Let(local.name, part, result, BOOL)
        return result

    def _compare_pair(self, node: ast.Compare, left: ast.expr, op: ast.cmpop, right: ast.expr, known: Known) -> Part:
        match op:
            case ast.Is() | ast.IsNot():
                if not (isinstance(right, ast.Constant) and right.value is None):
                    raise self.source.refuse(node, "is compares with None only", "write == to compare values")
                part = self.read(left, known)
                is_none = Apply("is_none", (part,), BOOL) if part.nullable else Lit(False, BOOL)
                if isinstance(part, Lit):
                    is_none = Lit(part.value is None, BOOL)
                return is_none if isinstance(op, ast.Is) else _not(is_none)
            case ast.In() | ast.NotIn():
                found = self._contains(node, left, right, known)
                return found if isinstance(op, ast.In) else _not(found)
            case _:
                for side in (left, right):
                    if isinstance(side, ast.Constant) and side.value is None:
                        raise self.source.refuse(node, "None is compared with is", "write `x is None`")
                both = [self.read(side, known) for side in (left, right)]
                if isinstance(op, ast.Eq | ast.NotEq) and any(part.nullable for part in both):
                    same = self._same_or_none(node, *both)
                    return same if isinstance(op, ast.Eq) else _not(same)
                return self._test(node, op, self.value(left, known), self.value(right, known))

    def _same_or_none(self, node: ast.expr, left: Part, right: Part) -> Part:
        """`==` of values that may be None, which equals itself."""
        locals_ = [self.new_local(_type(part), part.nullable) for part in (left, right)]
        is_none = [Apply("is_none", (local,), BOOL) if local.nullable else Lit(False, BOOL) for local in locals_]
        values = [Local(local.name, local.dtype) for local in locals_]
        found: Part = self._test(node, ast.Eq(), *values)
        found = join_conditions("and", [_not(is_none[1]), found], BOOL)
        found = found if is_none[0] == Lit(False, BOOL) else Choose(is_none[0], is_none[1], found, BOOL)
        for local, part in zip(reversed(locals_), (right, left), strict=True):
            found = Let(local.name, part, found, BOOL)
        return found

    def _test(self, node: ast.expr, op: ast.cmpop, left: Part, right: Part) -> Part:
        is_nested = any(_type(part).is_nested for part in (left, right))
        if is_nested or (left.dtype != right.dtype and not {left.dtype, right.dtype}.issubset(NUMBERS)):
            if left.dtype == right.dtype:
                raise self.source.refuse(node, f"values of type {NAMES[left.dtype]} are not compared as a whole",
                                         "compare their items")
            raise self.source.refuse(node, f"{NAMES[left.dtype]} and {NAMES[right.dtype]} cannot be compared")
        if left.dtype != right.dtype:  # a bool is a number beside one; int and float are compared exactly
            left, right = (convert(part, I64) if part.dtype == BOOL else part for part in (left, right))
            left, right = _exact(left, right.dtype), _exact(right, left.dtype)
        return Apply(_COMPARE[type(op)], (left, right), BOOL)

    def _contains(self, node: ast.Compare, left: ast.expr, right: ast.expr, known: Known) -> Part:
        """`"text" in s`, or `x in (1, 2, 3)`."""
        part = self.value(left, known)
        among = self._among(node, right, known)
        if among is not None:
            if len(among) > _MAX_COMPARED:
                raise self.source.refuse(node, f"more than {_MAX_COMPARED} values are not looked through")
            local = self.new_local(_type(part))
            tests = [self._test(node, ast.Eq(), local, each) for each in among]
            return Let(local.name, part, join_conditions("or", tests, BOOL) if tests else Lit(False, BOOL), BOOL)
        text = self.value(right, known)
        if text.dtype == TEXTS and part.dtype == STR:
            return Apply("among", (text, part), BOOL)
        if text.dtype != STR or part.dtype != STR:
            raise self.source.refuse(node, "in looks for a text in a text, or for a value in a tuple")
        return Apply("contains", (text, part), BOOL)

    def _among(self, node: ast.Compare, right: ast.expr, known: Known) -> list[Part] | None:
        """The values that `in` looks through: written here, or a constant collection."""
        if isinstance(right, ast.Tuple | ast.List | ast.Set):
            return [self.value(each, known) for each in right.elts]
        if isinstance(right, ast.Name | ast.Attribute) and not self.is_value(right):
            given = self.source.outside(right)
            if isinstance(given, tuple | list | set | frozenset):
                constants = sorted(given) if isinstance(given, set | frozenset) else given
                return [self._constant(node, each) for each in constants]
        return None

    # --- choices

    def _bool_op(self, node: ast.BoolOp, known: Known) -> Part:
        """`a or b` as a value: the deciding operand."""
        fn, parts = _connective(node.op), []
        for operand in node.values:
            parts.append(self.read(operand, known))
            known = known.given(operand, fn == "and")
        parts = self.unify(node, parts)
        if parts[0].dtype is None:
            return Lit(None)
        return join_conditions(fn, parts, _type(parts[0]))

    def _choose(self, node: ast.IfExp, known: Known) -> Part:
        condition = self.condition(node.test, known)
        if isinstance(condition, Lit):
            return self.read(node.body if condition.value else node.orelse, known)
        then = self.read(node.body, known.given(node.test, True))
        otherwise = self.read(node.orelse, known.given(node.test, False))
        then, otherwise = self.unify(node, [then, otherwise])
        if then.dtype is None:
            return Lit(None)
        return Choose(condition, then, otherwise, then.dtype, then.nullable or otherwise.nullable)

    # --- calls

    def _call(self, node: ast.Call, known: Known) -> Part:
        match node.func:
            case ast.Name(name) if name in self.names:
                raise self.source.refuse(node, f"{name!r} is a local, not a function")
            case ast.Attribute(base, method) if self.is_value(base):
                found = text_methods.call(self, node, self.value(base, known), method, known)
                if found is None:
                    self._refuse_call(node, f"there is no compiled method {method!r}, or not with these arguments")
                return found
        called = self.source.outside(node.func)
        udf = getattr(called, "ir", None)
        if isinstance(udf, Udf):
            return self._invoke(node, called, udf, known)
        if isinstance(udf, PythonUdf):
            self._refuse_call(node, f"the udf {udf.name!r} is not compiled (compile=False)")
        if node.keywords and not calls.takes_keywords(called):
            self._refuse_call(node, f"{ast.unparse(node.func)} takes no keywords here")
        found = calls.call(self, node, called, known)
        if found is None:
            hint = calls.hint(called)
            raise self.source.refuse(node, f"{ast.unparse(node.func)} is not compiled, or not with these arguments",
                                     *([hint] if hint else []))
        return found

    def _refuse_call(self, node: ast.Call, reason: str) -> NoReturn:
        raise self.source.refuse(node, reason)

    def is_value(self, node: ast.expr) -> bool:
        """Whether an attribute's base is a value, not a module."""
        while isinstance(node, ast.Attribute):
            node = node.value
        return not isinstance(node, ast.Name) or node.id in self.names or isinstance(self.source.outside(node), str)

    # --- text

    def _subscript(self, node: ast.expr, part: Part, index: ast.expr, known: Known) -> Part:
        """`pair[0]`, `pieces[-1]`, `s[0]`, `s[-1]`, `s[1:]`, `s[a:b]`, `s[::-1]`: Python's, by code points."""
        if is_tuple(part.dtype):
            place = self.read(index, known) if not isinstance(index, ast.Slice) else None
            items = items_of(_type(part))
            if not (isinstance(place, Lit) and type(place.value) is int and -len(items) <= place.value < len(items)):
                raise self.source.refuse(node, f"the index of a tuple of {len(items)} is a constant within it")
            number = place.value % len(items)
            self.settled(node, part)
            return Apply("item", (part, Lit(number, I64)), *items[number])
        if part.dtype == TEXTS and not isinstance(index, ast.Slice):
            return Apply("item", (part, self.integer(index, known)), STR, line=node.lineno)
        if part.dtype != STR:
            if part.dtype == TEXTS:
                raise self.source.refuse(node, "a slice of what split gives is not supported",
                                         "split fewer times: `first, rest = s.split(sep, 1)`")
            raise self.source.refuse(node, f"only a text, what split gives and a tuple have parts, "
                                           f"not {NAMES[part.dtype]}")
        if not isinstance(index, ast.Slice):
            return Apply("char", (part, self.integer(index, known)), STR, line=node.lineno)
        if index.step is not None:
            if ast.unparse(index) == "::-1":
                return Apply("reversed", (part,), STR, line=node.lineno)
            raise self.source.refuse(node, "a slice with a step is not supported", "only s[::-1], the text reversed")
        bounds = [Lit(default, I64) if bound is None else self.integer(bound, known)
                  for bound, default in ((index.lower, 0), (index.upper, I64.int_range()[1]))]
        return Apply("slice", (part, *bounds), STR)

    def _formatted(self, node: ast.expr, known: Known) -> Part:
        """A piece of an f-string."""
        if not isinstance(node, ast.FormattedValue):
            return self.read(node, known)
        part = self.value(node.value, known)
        if node.conversion not in (-1, ord("s")):
            raise self.source.refuse(node, f"!{chr(node.conversion)} in an f-string is not supported")
        if node.format_spec is None:
            return self.as_text(node, part)
        return text_methods.formatted(self, node, part, ast.unparse(node.format_spec)[2:-1])

    def as_text(self, node: ast.expr, part: Part) -> Part:
        """What `str` gives."""
        if part.dtype == STR:
            return part
        if isinstance(part, Lit):
            return self._constant(node, str(part.value))
        if part.dtype == F64:
            raise self.source.refuse(node, "the text of a float is not compiled without a format",
                                     'write f"{x:.2f}"')
        return Apply("text", (part,), STR, line=node.lineno)

    def _invoke(self, node: ast.Call, called: object, udf: Udf, known: Known) -> Part:
        try:
            given = calls.bind_arguments(called, node.args, node.keywords)
        except TypeError as error:
            self._refuse_call(node, f"{udf.name}: {error}")
        args = []
        for param, arg in zip(udf.params, given, strict=True):
            place = arg if isinstance(arg, ast.expr) else node
            read = self.read if param.nullable else self.value
            part = read(arg, known) if isinstance(arg, ast.expr) else self._constant(node, arg)
            if part.dtype is not None and common([part.dtype, param.dtype]) != param.dtype:
                raise self.source.refuse(place, f"{udf.name} takes {NAMES[param.dtype]} as {param.name!r}, "
                                                f"not {NAMES[part.dtype]}")
            args.append(convert(part, param.dtype))
        return Invoke(udf, tuple(args), udf.dtype, udf.nullable)


def join_texts(parts: Sequence[Part], line: int) -> Part:
    """The texts one after another, in one piece: `a + b + c` is copied once."""
    flat: list[Part] = []
    for part in parts:
        for each in part.args if isinstance(part, Apply) and part.fn == "concat" else (part,):
            if isinstance(each, Lit) and flat and isinstance(before := flat[-1], Lit):
                flat[-1] = Lit(f"{before.value}{each.value}", STR)
            elif not (isinstance(each, Lit) and not each.value):
                flat.append(each)
    if not flat:
        return Lit("", STR)
    return flat[0] if len(flat) == 1 else Apply("concat", tuple(flat), STR, line=line)


def _type(part: Part) -> DType:
    assert part.dtype is not None
    return part.dtype


def _exact(part: Part, other: DType | None) -> Part:
    """A constant int beside a float as a float, if that is the same number: `x > 0` compares floats."""
    is_small = isinstance(part, Lit) and isinstance(part.value, int) and abs(part.value) <= 1 << 53
    return convert(part, F64) if is_small and other == F64 else part


def _not(part: Part) -> Part:
    return Lit(not part.value, BOOL) if isinstance(part, Lit) else Apply("not", (part,), BOOL)


def _connective(op: ast.boolop) -> str:
    return "and" if isinstance(op, ast.And) else "or"


def join_conditions(fn: str, parts: Sequence[Part], dtype: DType) -> Part:
    """The parts joined from the last: `a and (b and c)`; a constant that decides ends the chain."""
    result = parts[-1]
    for part in reversed(parts[:-1]):
        if isinstance(part, Lit):
            result = result if bool(part.value) == (fn == "and") else part
        else:
            # `or` gives its left side only if that is true, so not if it is None.
            nullable = result.nullable or (fn == "and" and part.nullable)
            result = Either(fn, part, result, dtype, nullable)
    return result
