"""Python's operators and builtins on registers. What Python raises goes to `fail`, which leaves the function."""

from __future__ import annotations

from llvmlite import ir

from scalein.dtypes import F64 as FLOAT
from scalein.dtypes import I64 as INT
from scalein.dtypes import STR, DType, Kind
from scalein.errors import InternalError
from scalein.ir.exprs import Lit
from scalein.ir.udf import CLASSES, TEXTS, Apply, Part, items_of
from scalein.llvm_backend.code import Code
from scalein.llvm_backend.fn import F64, I1, I64, Fn, const
from scalein.llvm_backend.functions import arithmetic, strings, udf_numbers, udf_search, udf_split, udf_text
from scalein.llvm_backend.functions.arithmetic import Fail
from scalein.llvm_backend.text_arena import TextPlaces
from scalein.llvm_backend.values import Str, Value

_SIGN = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_MIRRORED = {"eq": "eq", "ne": "ne", "lt": "gt", "le": "ge", "gt": "lt", "ge": "le"}
_WHOLE = {"trunc": "trunc", "floor": "floor", "ceil": "ceil", "round": "rint"}
_LONG_POWER = 64  # a greater constant exponent is a loop too
_NEVER_FAIL = ("copysign", "hypot", "nextafter")  # in CPython too: hypot overflows to an infinity
_NAMES_IN_C = {"gamma": "tgamma"}
_INTRINSICS = ("sqrt", "exp", "exp2", "log", "log2", "log10", "sin", "cos", "pow", "copysign")


def lower_apply(code: Code, part: Apply, args: list[Value], texts: TextPlaces | None, fail: Fail) -> Value:
    """The value of an operator or builtin; only conversions keep None."""
    f, fn = code.f, part.fn
    given = [arg.dtype for arg in part.args]
    match fn:
        case "to_int":
            return Value(f.b.zext(args[0].number, I64), args[0].valid)
        case "to_float":
            convert = f.b.uitofp if args[0].number.type == I1 else f.b.sitofp
            return Value(convert(args[0].number, F64), args[0].valid)
        case "is_none":
            return Value(const(0, I1) if args[0].valid is None else f.b.not_(args[0].valid))
        case "truth":
            assert given[0] is not None
            return Value(truth(code, args[0], given[0]))
        case "eq" | "ne" | "lt" | "le" | "gt" | "ge":
            return Value(_compare(code, part, args))
        case "min" | "max":
            return _least(code, part, args)
        case "len":
            if given[0] == TEXTS:
                return Value(udf_split.count(code, udf_split.pieces_of(args[0])))
            return Value(strings.length(code, args[0].string))
        case "tuple":
            return Value(tuple(args))
        case "to_tuple":
            assert given[0] is not None
            return widened(f, args[0], given[0], part.dtype)
        case "item" if isinstance(args[0].data, tuple):
            item: Value = args[0].data[_constant_int(part.args[1])]
            return item
        case "item":
            return Value(udf_split.item(code, udf_split.pieces_of(args[0]), args[1].number, fail))
        case "among":
            return Value(udf_split.contains(code, udf_split.pieces_of(args[0]), args[1].string))
        case "words":
            return Value(udf_split.words(args[0].string, args[1].number))
        case "split":
            return Value(udf_split.split(code, args[0].string, args[1].string, args[2].number, fail))
        case "rsplit":
            return Value(udf_split.split_from_right(code, args[0].string, args[1].string, args[2].number))
        case "unpacked":
            wanted, count = args[1].number, udf_split.count(code, udf_split.pieces_of(args[0]))
            fail("too few values to unpack", f.b.icmp_signed("<", count, wanted))
            fail("too many values to unpack", f.b.icmp_signed(">", count, wanted))
            return args[0]
        case "partition" | "rpartition":
            found = udf_search.partition(code, fn, args[0].string, args[1].string, fail)
            return Value(tuple(map(Value, found)))
        case "frexp" | "modf":
            return Value(udf_numbers.parts_of_float(f, fn, args[0].number))
        case "isclose":
            return Value(udf_numbers.is_close(f, [arg.number for arg in args], fail))
        case "is_integer":
            whole = f.call("llvm.floor.f64", F64, [args[0].number])
            same = f.b.fcmp_ordered("==", whole, args[0].number)
            return Value(f.b.and_(same, _is_finite(f, args[0].number)))
        case "find" | "rfind" | "index" | "rindex" | "count":
            return Value(udf_search.position(code, fn, args[0].string, [arg.data for arg in args[1:]], fail))
        case "ord":
            return Value(udf_text.point_of(code, args[0].string, fail))
        case "int_of":
            return Value(udf_numbers.int_of(code, args[0].string, fail))
        case "float_of":
            return Value(udf_numbers.float_of(code, args[0].string, fail))
        case "rounded":
            return Value(udf_numbers.rounded(code, args[0].number, _constant_int(part.args[1])))
        case _ if fn in CLASSES:
            return Value(udf_search.all_of_class(code, fn, args[0].string))
        case "contains" | "starts_with" | "ends_with":
            pattern = part.args[1]
            if isinstance(pattern, Lit):
                return Value(strings.match(code, fn, args[0].string, str(pattern.value).encode()))
            return Value(udf_text.matches(code, fn, args[0].string, args[1].string))
    if part.dtype == STR:
        return Value(_text(code, part, args, udf_text.Builder(code, texts, fail)))
    numbers = [arg.number for arg in args]
    if part.dtype == FLOAT:
        return Value(_float(f, fn, numbers, fail))
    if part.dtype == INT or part.dtype.kind in (Kind.TS, Kind.DUR):
        return Value(_int(f, part, numbers, fail))
    return Value(_bool(f, fn, numbers))


def _constant_int(part: Part) -> int:
    assert isinstance(part, Lit)
    return int(str(part.value))


def widened(f: Fn, value: Value, old: DType, new: DType) -> Value:
    """A tuple in a type whose items are wider."""
    items: list[Value] = []
    given = value.data
    assert isinstance(given, tuple)
    for item, (before, _), (after, _) in zip(given, items_of(old), items_of(new), strict=True):
        if before == after:
            items.append(item)
        elif isinstance(item.data, tuple):
            items.append(widened(f, item, before, after))
        elif after == FLOAT:
            convert = f.b.uitofp if item.number.type == I1 else f.b.sitofp
            items.append(Value(convert(item.number, F64), item.valid))
        else:
            items.append(Value(f.b.zext(item.number, I64), item.valid))
    return Value(tuple(items), value.valid)


def _text(code: Code, part: Apply, args: list[Value], build: udf_text.Builder) -> Str:
    constants = [arg.value if isinstance(arg, Lit) else None for arg in part.args]
    match part.fn:
        case "char":
            return udf_text.char_at(code, args[0].string, args[1].number, build.fail)
        case "slice":
            return udf_text.slice_of(code, args[0].string, args[1].number, args[2].number)
        case "strip" | "lstrip" | "rstrip":
            return udf_text.stripped(code, args[0].string, part.fn, None if len(args) == 1 else str(constants[1]))
        case "concat":
            return build.concat([arg.string for arg in args])
        case "text":
            return build.text(args[0].number, part.args[0].dtype)
        case "fixed":
            return build.fixed(args[0].number, _constant_int(part.args[1]), str(constants[2]))
        case "replace":
            return build.replace(args[0].string, args[1].string, args[2].string, args[3].number)
        case "upper" | "lower" | "casefold" | "titled":
            return build.cased(args[0].string, part.fn)
        case "removeprefix" | "removesuffix":
            return udf_search.without(code, part.fn, args[0].string, args[1].string)
        case "pad":
            return build.pad(args[0].string, args[1].number, args[2].string, str(constants[3]))
        case "zfill":
            return build.zfill(args[0].string, args[1].number)
        case "repeat":
            return build.repeat(args[0].string, args[1].number)
        case "grouped":
            return build.grouped(args[0].string)
        case "reversed":
            return build.reversed(args[0].string)
        case "chr":
            return build.chr(args[0].number)
        case "join":
            pieces = udf_split.pieces_of(args[1])
            return build.join(args[0].string, lambda use: udf_split.each(code, pieces, lambda _, piece: use(piece)))
        case _:
            raise InternalError(f"no lowering for {part.fn} in a udf")


def truth(code: Code, value: Value, dtype: DType) -> ir.Value:
    """Whether Python takes the value for true: NaN is, None is not."""
    f, data = code.f, value.data
    if isinstance(data, udf_split.Pieces):
        holds = f.b.not_(udf_split.is_empty(code, data))
    elif isinstance(data, tuple):
        holds = const(1, I1)  # none is empty
    elif isinstance(value.data, Str):
        holds = f.b.icmp_unsigned("!=", value.data.size, const(0))
    elif dtype == FLOAT:
        holds = f.b.fcmp_unordered("!=", value.data, const(0.0, F64))
    else:
        holds = value.data if dtype.kind is Kind.BOOL else f.b.icmp_unsigned("!=", value.data, const(0))
    if dtype.kind is Kind.TS:  # every time is true
        holds = const(1, I1)
    both = f.all_of(holds, value.valid)
    assert both is not None
    return both


# --- comparison


def _compare(code: Code, part: Apply, args: list[Value]) -> ir.Value:
    f, fn = code.f, part.fn
    if part.args[0].dtype == STR:
        literals = [arg.value if isinstance(arg, Lit) else None for arg in part.args]
        return strings.compare(code, fn, args[0].string, args[1].string, literals)
    return _compare_numbers(f, fn, args[0].number, args[1].number)


def _compare_numbers(f: Fn, fn: str, a: ir.Value, b: ir.Value) -> ir.Value:
    if a.type == b.type == F64:
        return f.b.fcmp_unordered("!=", a, b) if fn == "ne" else f.b.fcmp_ordered(_SIGN[fn], a, b)
    if a.type == b.type:  # false < true
        return (f.b.icmp_unsigned if a.type == I1 else f.b.icmp_signed)(_SIGN[fn], a, b)
    if a.type == F64:
        return _compare_numbers(f, _MIRRORED[fn], b, a)
    return _compare_mixed(f, fn, a, b)


def _compare_mixed(f: Fn, fn: str, a: ir.Value, b: ir.Value) -> ir.Value:
    """An int with a float, exactly: rounding to a float keeps the order, so only a tie needs a second look."""
    rounded = f.b.sitofp(a, F64)
    tie = f.b.fcmp_ordered("==", rounded, b)
    huge = f.b.fcmp_ordered(">=", b, const(2.0**63, F64))  # a tie there: the int was rounded up to 2^63
    inside = f.b.and_(tie, f.b.not_(huge))
    whole = f.b.fptosi(f.b.select(inside, b, const(0.0, F64)), I64)
    exact = f.b.select(huge, const(int(fn in ("ne", "lt", "le")), I1), f.b.icmp_signed(_SIGN[fn], a, whole))
    coarse = f.b.fcmp_unordered("!=", rounded, b) if fn == "ne" else f.b.fcmp_ordered(_SIGN[fn], rounded, b)
    return f.b.select(tie, exact, coarse)


def _least(code: Code, part: Apply, args: list[Value]) -> Value:
    """min and max keep the first unless the second is really beyond it."""
    f, (a, b) = code.f, args
    fn = "lt" if part.fn == "min" else "gt"
    if part.dtype == STR:
        one, other = a.string, b.string
        beyond = strings.compare(code, fn, other, one, [None, None])
        return Value(Str(f.b.select(beyond, other.ptr, one.ptr), f.b.select(beyond, other.size, one.size)))
    return Value(f.b.select(_compare_numbers(f, fn, b.number, a.number), b.number, a.number))


def _bool(f: Fn, fn: str, args: list[ir.Value]) -> ir.Value:
    match fn:
        case "not":
            return f.b.not_(args[0])
        case "bit_and":
            return f.b.and_(*args)
        case "bit_or":
            return f.b.or_(*args)
        case "bit_xor":
            return f.b.xor(*args)
        case "isnan":
            return f.b.fcmp_unordered("uno", args[0], args[0])
        case "isinf":
            return _is_infinite(f, args[0])
        case "isfinite":
            return _is_finite(f, args[0])
        case _:
            raise InternalError(f"no lowering for {fn} in a udf")


def _magnitude(f: Fn, value: ir.Value) -> ir.Value:
    return f.call("llvm.fabs.f64", F64, [value])


def _is_infinite(f: Fn, value: ir.Value) -> ir.Value:
    return f.b.fcmp_ordered("==", _magnitude(f, value), const(float("inf"), F64))


def _is_finite(f: Fn, value: ir.Value) -> ir.Value:
    return f.b.fcmp_ordered("<", _magnitude(f, value), const(float("inf"), F64))


# --- ints


def _int(f: Fn, part: Apply, args: list[ir.Value], fail: Fail) -> ir.Value:
    b, fn = f.b, part.fn
    match fn:
        case "add":
            return udf_numbers.checked(f, b.sadd_with_overflow(*args), fail)
        case "sub":
            return udf_numbers.checked(f, b.ssub_with_overflow(*args), fail)
        case "mul":
            return udf_numbers.checked(f, b.smul_with_overflow(*args), fail)
        case "add_small" | "sub_small":  # which cannot overflow
            return (b.add if fn == "add_small" else b.sub)(*args)
        case "neg":
            return udf_numbers.checked(f, b.ssub_with_overflow(const(0), args[0]), fail)
        case "abs":
            fail("integer overflow", b.icmp_signed("==", args[0], const(INT.int_range()[0])))
            return b.select(b.icmp_signed("<", args[0], const(0)), b.sub(const(0), args[0]), args[0])
        case "floordiv":
            return arithmetic.floor_division(f, args[0], args[1], INT, fail)
        case "mod":
            return arithmetic.modulo(f, args[0], args[1], INT, fail)
        case "pow":
            exponent = part.args[1]
            if isinstance(exponent, Lit) and isinstance(exponent.value, int) and exponent.value <= _LONG_POWER:
                return _fixed_power(f, args[0], exponent.value, fail)
            return _power(f, args[0], args[1], fail)
        case "trunc" | "floor" | "ceil" | "round":
            return _to_int(f, f.call(f"llvm.{_WHOLE[fn]}.f64", F64, args), fail)
        case "bit_and" | "bit_or" | "bit_xor":
            return _bool(f, fn, args)
        case "invert":
            return b.not_(args[0])
        case "shl" | "shr":
            return _shift(f, fn, args[0], args[1], fail)
        case _ if fn in udf_numbers.INTS:
            return udf_numbers.lower_int(f, fn, args, fail)
        case _:
            raise InternalError(f"no lowering for {fn} in a udf")


def _times(f: Fn, a: ir.Value, b: ir.Value, fail: Fail) -> ir.Value:
    return udf_numbers.checked(f, f.b.smul_with_overflow(a, b), fail)


def _fixed_power(f: Fn, base: ir.Value, exponent: int, fail: Fail) -> ir.Value:
    """By squaring. If a square overflows, a higher bit of the exponent needs it, so the power overflows too."""
    result: ir.Value = const(1)
    while exponent:
        if exponent & 1:
            result = _times(f, result, base, fail)
        exponent >>= 1
        if exponent:
            base = _times(f, base, base, fail)
    return result


def _power(f: Fn, base: ir.Value, exponent: ir.Value, fail: Fail) -> ir.Value:
    b = f.b
    fail("a negative exponent of an int", b.icmp_signed("<", exponent, const(0)))
    result, square, left = f.var(I64, const(1)), f.var(I64, base), f.var(I64, exponent)
    with f.forever() as loop:
        loop.stop_if(b.icmp_unsigned("==", left.get(), const(0)))
        odd = b.icmp_unsigned("!=", b.and_(left.get(), const(1)), const(0))
        with f.when(odd):
            result.set(_times(f, result.get(), square.get(), fail))
        left.set(b.lshr(left.get(), const(1)))
        with f.when(b.icmp_unsigned("!=", left.get(), const(0))):
            square.set(_times(f, square.get(), square.get(), fail))
    return result.get()


def _to_int(f: Fn, whole: ir.Value, fail: Fail) -> ir.Value:
    inside = f.b.and_(f.b.fcmp_ordered(">=", whole, const(-(2.0**63), F64)),
                      f.b.fcmp_ordered("<", whole, const(2.0**63, F64)))
    fail("impossible cast", f.b.not_(inside))
    return f.b.fptosi(f.b.select(inside, whole, const(0.0, F64)), I64)


def _shift(f: Fn, fn: str, value: ir.Value, by: ir.Value, fail: Fail) -> ir.Value:
    b = f.b
    fail("a negative shift", b.icmp_signed("<", by, const(0)))
    far = b.icmp_unsigned(">", by, const(63))
    near = b.select(far, const(63), by)
    if fn == "shr":
        return b.ashr(value, near)
    moved = b.shl(value, near)
    lost = b.or_(b.icmp_signed("!=", b.ashr(moved, near), value), b.and_(far, b.icmp_signed("!=", value, const(0))))
    fail("integer overflow", lost)
    return moved


# --- floats


def _float(f: Fn, fn: str, args: list[ir.Value], fail: Fail) -> ir.Value:
    b = f.b
    match fn:
        case "add":
            return b.fadd(*args)
        case "sub":
            return b.fsub(*args)
        case "mul":
            return b.fmul(*args)
        case "neg":
            return b.fneg(*args)
        case "fabs":
            return _magnitude(f, args[0])
        case "ulp":
            return udf_numbers.ulp(f, args[0])
        case "div" | "floordiv" | "mod":
            fail("division by zero", b.fcmp_ordered("==", args[1], const(0.0, F64)))
            if fn == "div":
                return b.fdiv(*args)
            return _floor_divide(f, args[0], args[1])[int(fn == "mod")]
    name = f"llvm.{fn}.f64" if fn in _INTRINSICS else _NAMES_IN_C.get(fn, fn)
    result = udf_numbers.scaled(f, *args) if fn == "ldexp" else f.call(name, F64, args)
    if fn not in _NEVER_FAIL:
        is_new = [f.b.fcmp_ordered("ord", arg, arg) for arg in args if arg.type == F64]
        bad_nan = f.all_of(f.b.fcmp_unordered("uno", result, result), *is_new)
        bad_infinity = f.all_of(_is_infinite(f, result), *(_is_finite(f, arg) for arg in args if arg.type == F64))
        bad = f.any_of(bad_nan, bad_infinity)
        assert bad is not None
        fail("math domain or range error", bad)
    return result


def _floor_divide(f: Fn, a: ir.Value, by: ir.Value) -> tuple[ir.Value, ir.Value]:
    """CPython's divmod of floats, step by step: the remainder is exact and has the divisor's sign."""
    b, zero, one = f.b, const(0.0, F64), const(1.0, F64)

    def signed_zero(like: ir.Value) -> ir.Value:
        return f.call("llvm.copysign.f64", F64, [zero, like])

    rest = b.frem(a, by)
    quotient = b.fdiv(b.fsub(a, rest), by)
    some = b.fcmp_unordered("!=", rest, zero)
    off = b.and_(some, b.xor(b.fcmp_ordered("<", by, zero), b.fcmp_ordered("<", rest, zero)))
    rest = b.select(some, b.select(off, b.fadd(rest, by), rest), signed_zero(by))
    quotient = b.select(off, b.fsub(quotient, one), quotient)
    whole = f.call("llvm.floor.f64", F64, [quotient])
    whole = b.select(b.fcmp_ordered(">", b.fsub(quotient, whole), const(0.5, F64)), b.fadd(whole, one), whole)
    return b.select(b.fcmp_unordered("!=", quotient, zero), whole, signed_zero(b.fdiv(a, by))), rest
