"""Numbers in udfs beyond operators: the integer functions of `math`, floats taken apart, and numbers read from text."""

from __future__ import annotations

from collections.abc import Sequence

from llvmlite import ir

from scalein.llvm_backend.code import Code
from scalein.llvm_backend.fn import F64, I1, I8, I32, I64, PTR, Fn, const
from scalein.llvm_backend.functions.arithmetic import Fail
from scalein.llvm_backend.functions.udf_text import stripped
from scalein.llvm_backend.values import Str, Value

INTS = ("gcd", "lcm", "comb", "perm", "factorial", "isqrt", "bit_length", "bit_count")
_NULL = ir.Constant(PTR, None)


def checked(f: Fn, pair: ir.Value, fail: Fail) -> ir.Value:
    """The result of an operation with overflow."""
    fail("integer overflow", f.b.extract_value(pair, 1))
    return f.b.extract_value(pair, 0)


# --- ints


def lower_int(f: Fn, fn: str, args: Sequence[ir.Value], fail: Fail) -> ir.Value:
    b = f.b
    match fn:
        case "gcd":
            found = _gcd(f, _unsigned(f, args[0]), _unsigned(f, args[1]))
            fail("integer overflow", b.icmp_signed("<", found, const(0)))
            return found
        case "lcm":
            one, other = (_unsigned(f, arg) for arg in args)
            gcd = _gcd(f, one, other)
            safe = b.select(b.icmp_unsigned("==", gcd, const(0)), const(1), gcd)
            pair = b.umul_with_overflow(b.udiv(one, safe), other)
            found = b.extract_value(pair, 0)
            fail("integer overflow", b.or_(b.extract_value(pair, 1), b.icmp_signed("<", found, const(0))))
            return found
        case "comb":
            return _comb(f, args[0], args[1], fail)
        case "perm" | "factorial":
            return _falling(f, args[0], args[1] if len(args) == 2 else args[0], fail)
        case "isqrt":
            return _isqrt(f, args[0], fail)
        case "bit_length":
            zeros = f.call("llvm.ctlz.i64", I64, [_unsigned(f, args[0]), const(0, I1)])
            return b.sub(const(64), zeros)
        case _:
            return f.call("llvm.ctpop.i64", I64, [_unsigned(f, args[0])])


def _unsigned(f: Fn, value: ir.Value) -> ir.Value:
    """The magnitude, as an unsigned number: that of -2^63 has no int."""
    return f.b.select(f.b.icmp_signed("<", value, const(0)), f.b.sub(const(0), value), value)


def _gcd(f: Fn, one: ir.Value, other: ir.Value) -> ir.Value:
    b = f.b
    a, rest = f.var(I64, one), f.var(I64, other)
    with f.forever() as loop:
        loop.stop_if(b.icmp_unsigned("==", rest.get(), const(0)))
        following = b.urem(a.get(), rest.get())
        a.set(rest.get())
        rest.set(following)
    return a.get()


def _not_negative(f: Fn, value: ir.Value, fail: Fail) -> None:
    fail("math domain or range error", f.b.icmp_signed("<", value, const(0)))


def _comb(f: Fn, n: ir.Value, k: ir.Value, fail: Fail) -> ir.Value:
    """Each round gives a smaller binomial coefficient, so what overflows on the way overflows in the end."""
    b = f.b
    _not_negative(f, n, fail)
    _not_negative(f, k, fail)
    is_none = b.icmp_signed(">", k, n)
    least = b.select(is_none, const(0), f.min(k, b.sub(n, k)))
    result, number = f.var(I64, const(1)), f.var(I64, const(0))
    with f.forever() as loop:
        loop.stop_if(b.icmp_signed(">=", number.get(), least))
        number.set(b.add(number.get(), const(1)))
        gcd = _gcd(f, result.get(), number.get())
        factor = b.sdiv(b.add(b.sub(n, least), number.get()), b.sdiv(number.get(), gcd))
        result.set(checked(f, b.smul_with_overflow(b.sdiv(result.get(), gcd), factor), fail))
    return b.select(is_none, const(0), result.get())


def _falling(f: Fn, n: ir.Value, k: ir.Value, fail: Fail) -> ir.Value:
    """n * (n - 1) * ..., of k factors."""
    b = f.b
    _not_negative(f, n, fail)
    _not_negative(f, k, fail)
    is_none = b.icmp_signed(">", k, n)
    result, left = f.var(I64, const(1)), f.var(I64, b.select(is_none, const(0), k))
    with f.forever() as loop:
        loop.stop_if(b.icmp_signed("<=", left.get(), const(0)))
        factor = b.add(b.sub(n, k), left.get())
        result.set(checked(f, b.smul_with_overflow(result.get(), factor), fail))
        left.set(b.sub(left.get(), const(1)))
    return b.select(is_none, const(0), result.get())


def _isqrt(f: Fn, n: ir.Value, fail: Fail) -> ir.Value:
    """The float's root is off by one at most."""
    b = f.b
    _not_negative(f, n, fail)
    root = b.fptosi(f.call("llvm.sqrt.f64", F64, [b.sitofp(n, F64)]), I64)
    root = f.min(root, const(3_037_000_499))
    root = b.select(b.icmp_unsigned(">", b.mul(root, root), n), b.sub(root, const(1)), root)
    above = b.add(root, const(1))
    return b.select(b.icmp_unsigned("<=", b.mul(above, above), n), above, root)


# --- floats


def is_close(f: Fn, args: Sequence[ir.Value], fail: Fail) -> ir.Value:
    b = f.b
    one, other, relative, absolute = args
    zero, infinity = const(0.0, F64), const(float("inf"), F64)
    fail("math domain or range error", b.or_(b.fcmp_ordered("<", relative, zero), b.fcmp_ordered("<", absolute, zero)))

    def size(value: ir.Value) -> ir.Value:
        return f.call("llvm.fabs.f64", F64, [value])

    difference = size(b.fsub(other, one))
    near = f.any_of(*(b.fcmp_ordered("<=", difference, size(b.fmul(relative, side))) for side in (other, one)),
                    b.fcmp_ordered("<=", difference, absolute))
    finite = f.all_of(*(b.fcmp_unordered("!=", size(side), infinity) for side in (one, other)))
    return b.or_(b.fcmp_ordered("==", one, other), b.and_(near, finite))


def parts_of_float(f: Fn, fn: str, value: ir.Value) -> tuple[Value, Value]:
    """modf, or frexp: a fraction, and what it has to be added to or scaled by."""
    b, infinity = f.b, const(float("inf"), F64)
    magnitude = f.call("llvm.fabs.f64", F64, [value])
    is_finite = b.fcmp_ordered("<", magnitude, infinity)
    if fn == "modf":
        whole = f.call("llvm.trunc.f64", F64, [value])
        is_infinite = b.fcmp_ordered("==", magnitude, infinity)
        fraction = b.select(is_infinite, const(0.0, F64), b.fsub(value, whole))
        return Value(f.call("llvm.copysign.f64", F64, [fraction, value])), Value(whole)
    place = f.scratch(I32, 1)
    fraction = f.call("frexp", F64, [value, place])
    exponent = b.select(is_finite, b.sext(b.load(place, typ=I32), I64), const(0))
    return Value(b.select(is_finite, fraction, value)), Value(exponent)


def ulp(f: Fn, value: ir.Value) -> ir.Value:
    b, infinity = f.b, const(float("inf"), F64)
    magnitude = f.call("llvm.fabs.f64", F64, [value])
    above = f.call("nextafter", F64, [magnitude, infinity])
    below = f.call("nextafter", F64, [magnitude, const(0.0, F64)])
    found = b.select(b.fcmp_ordered("==", above, infinity), b.fsub(magnitude, below), b.fsub(above, magnitude))
    return b.select(b.fcmp_ordered("==", magnitude, infinity), magnitude, found)


def scaled(f: Fn, value: ir.Value, exponent: ir.Value) -> ir.Value:
    near = f.max(f.min(exponent, const(10_000)), const(-10_000))
    return f.call("ldexp", F64, [value, f.b.trunc(near, I32)])


_ROUNDED_BYTES = 400  # a sign, 309 digits, a point and 30 digits


def rounded(code: Code, value: ir.Value, digits: int) -> ir.Value:
    """round(value, digits), by way of its digits as CPython does."""
    f, b = code.f, code.f.b
    magnitude = f.call("llvm.fabs.f64", F64, [value])
    found = f.var(F64, value)
    with f.when(b.fcmp_ordered("<", magnitude, const(1e22, F64))):  # greater ones are whole
        helper = code.helper("rounded", _rounded)
        found.set(b.call(helper, [value, code.text(f"%.{digits}f\0".encode())]))
    return found.get()


def _rounded(code: Code) -> ir.Function:
    f = code.f
    with f.function("rounded", F64, [F64, PTR]) as fn:
        place = f.scratch(I8, _ROUNDED_BYTES)
        typ = ir.FunctionType(I32, [PTR, I64, PTR], var_arg=True)
        write = f.module.globals.get("snprintf") or ir.Function(f.module, typ, "snprintf")
        f.b.call(write, [place, const(_ROUNDED_BYTES), fn.args[1], fn.args[0]])
        f.b.ret(f.call("strtod", F64, [place, _NULL]))
    return fn


# --- numbers in text


def int_of(code: Code, text: Str, fail: Fail) -> ir.Value:
    """int(text): ASCII digits, with a sign and with single underscores between them."""
    f, b = code.f, code.f.b
    text = stripped(code, text, "strip", None)
    is_negative, at = _sign(f, text)
    total, is_number, was_digit = f.var(I64, const(0)), f.var(I1, const(1, I1)), f.var(I1, const(0, I1))
    overflow = f.var(I1, const(0, I1))
    with f.forever() as loop:
        loop.stop_if(b.icmp_signed(">=", at.get(), text.size))
        byte = f.load_input(f.byte_at(text.ptr, at.get()), I8)
        digit = b.sub(byte, const(ord("0"), I8))
        is_digit = b.icmp_unsigned("<=", digit, const(9, I8))
        is_mark = b.and_(b.icmp_unsigned("==", byte, const(ord("_"), I8)), was_digit.get())
        is_number.set(b.and_(is_number.get(), b.or_(is_digit, is_mark)))
        loop.stop_if(b.not_(is_number.get()))
        with f.when(is_digit):
            tens = b.smul_with_overflow(total.get(), const(10))
            sums = b.ssub_with_overflow(b.extract_value(tens, 0), b.zext(digit, I64))
            lost = b.or_(b.extract_value(tens, 1), b.extract_value(sums, 1))
            overflow.set(b.or_(overflow.get(), lost))
            total.set(b.extract_value(sums, 0))
        was_digit.set(is_digit)
        at.set(b.add(at.get(), const(1)))
    fail("a text that is no int", b.not_(b.and_(is_number.get(), was_digit.get())))
    lowest = b.icmp_signed("==", total.get(), const(-(2**63)))
    fail("integer overflow", b.or_(overflow.get(), b.and_(lowest, b.not_(is_negative))))
    return b.select(is_negative, total.get(), b.sub(const(0), total.get()))


def _sign(f: Fn, text: Str) -> tuple[ir.Value, ir.Value]:
    """Whether a text begins with a minus, and where it goes on after its sign."""
    b = f.b
    first = f.var(I8, const(0, I8))
    with f.when(b.icmp_signed(">", text.size, const(0))):
        first.set(f.load_input(text.ptr, I8))
    is_negative = b.icmp_unsigned("==", first.get(), const(ord("-"), I8))
    is_signed = b.or_(is_negative, b.icmp_unsigned("==", first.get(), const(ord("+"), I8)))
    return is_negative, f.var(I64, b.zext(is_signed, I64))


# States of a float's text, by what was read last; each with the state after a digit, a point, an e, a sign and a mark.
(_BEGIN, _WHOLE, _WHOLE_MARK, _POINT, _POINT_AFTER, _FRACTION, _FRACTION_MARK, _E, _E_SIGN, _EXP, _EXP_MARK,
 _BAD) = range(12)  # fmt: skip
_NEXT = {
    _BEGIN: (_WHOLE, _POINT, _BAD, _BAD, _BAD), _WHOLE: (_WHOLE, _POINT_AFTER, _E, _BAD, _WHOLE_MARK),
    _WHOLE_MARK: (_WHOLE, _BAD, _BAD, _BAD, _BAD), _POINT: (_FRACTION, _BAD, _BAD, _BAD, _BAD),
    _POINT_AFTER: (_FRACTION, _BAD, _E, _BAD, _BAD), _FRACTION: (_FRACTION, _BAD, _E, _BAD, _FRACTION_MARK),
    _FRACTION_MARK: (_FRACTION, _BAD, _BAD, _BAD, _BAD), _E: (_EXP, _BAD, _BAD, _E_SIGN, _BAD),
    _E_SIGN: (_EXP, _BAD, _BAD, _BAD, _BAD), _EXP: (_EXP, _BAD, _BAD, _BAD, _EXP_MARK),
    _EXP_MARK: (_EXP, _BAD, _BAD, _BAD, _BAD), _BAD: (_BAD,) * 5,
}  # fmt: skip
_CLASSES = {**dict.fromkeys(b"0123456789", 0), ord("."): 1, ord("e"): 2, ord("E"): 2, ord("+"): 3, ord("-"): 3,
            ord("_"): 4}  # fmt: skip
_WORDS = {b"inf": float("inf"), b"infinity": float("inf"), b"nan": float("nan")}
_FLOAT = ir.LiteralStructType([F64, I64])
_EXACT_POWER = 22  # 10 ** 22 is a float
_EXACT_INT = 2**53


def float_of(code: Code, text: Str, fail: Fail) -> ir.Value:
    """float(text), to the last bit."""
    text = stripped(code, text, "strip", None)
    found = code.f.b.call(code.helper("float_of", _float_of), [text.ptr, text.size])
    fail("a text that is no float", code.f.b.icmp_unsigned("==", code.f.b.extract_value(found, 1), const(0)))
    return code.f.b.extract_value(found, 0)


def _float_of(code: Code) -> ir.Function:
    f = code.f
    classes = bytes(_CLASSES.get(byte, 5) for byte in range(256))
    states = b"".join(bytes([*_NEXT[state], _BAD, _BAD, _BAD]) for state in range(12))
    with f.function("float_of", _FLOAT, [PTR, I64]) as fn:
        b = f.b
        text = Str(*fn.args)
        tables = [f.constant_array(f"float.{name}", ir.ArrayType(I8, len(data)), bytearray(data))
                  for name, data in (("classes", classes), ("states", states))]
        powers = f.constant_array("float.powers", ir.ArrayType(F64, _EXACT_POWER + 1),
                                  [10.0**k for k in range(_EXACT_POWER + 1)])

        def give(value: ir.Value, is_number: int) -> None:
            result = b.insert_value(ir.Constant(_FLOAT, ir.Undefined), value, 0)
            f.give(b.insert_value(result, const(is_number), 1))

        is_negative, at = _sign(f, text)

        def signed(value: ir.Value) -> ir.Value:
            return b.select(is_negative, b.fneg(value), value)

        rest = Str(f.byte_at(text.ptr, at.get()), b.sub(text.size, at.get()))
        for word, number in _WORDS.items():
            with f.when(_is_word(f, rest, word)):
                give(signed(const(number, F64)), 1)
        state, mantissa, scale = f.var(I64, const(_BEGIN)), f.var(I64, const(0)), f.var(I64, const(0))
        exponent, is_down, is_exact = f.var(I64, const(0)), f.var(I1, const(0, I1)), f.var(I1, const(1, I1))
        with f.forever() as loop:
            loop.stop_if(b.icmp_signed(">=", at.get(), text.size))
            byte = f.load_input(f.byte_at(text.ptr, at.get()), I8)
            kind = b.zext(f.load(tables[0], b.zext(byte, I64), I8), I64)
            state.set(b.zext(f.load(tables[1], b.add(b.mul(state.get(), const(8)), kind), I8), I64))
            digit = b.zext(b.sub(byte, const(ord("0"), I8)), I64)
            is_digit = b.icmp_unsigned("==", kind, const(0))
            in_power = b.icmp_unsigned("==", state.get(), const(_EXP))
            with f.when(b.and_(is_digit, in_power)):
                exponent.set(f.min(b.add(b.mul(exponent.get(), const(10)), digit), const(99_999)))
            with f.when(b.and_(is_digit, b.not_(in_power))):
                fits = b.icmp_unsigned("<", mantissa.get(), const(10**17))
                is_exact.set(b.and_(is_exact.get(), fits))
                more = b.add(b.mul(mantissa.get(), const(10)), digit)
                mantissa.set(b.select(fits, more, mantissa.get()))
                is_fraction = b.icmp_unsigned("==", state.get(), const(_FRACTION))
                scale.set(b.sub(scale.get(), b.zext(is_fraction, I64)))
            is_minus = b.icmp_unsigned("==", byte, const(ord("-"), I8))
            is_down.set(b.or_(is_down.get(), b.and_(is_minus, b.icmp_unsigned("==", state.get(), const(_E_SIGN)))))
            at.set(b.add(at.get(), const(1)))
        ends = f.any_of(*(b.icmp_unsigned("==", state.get(), const(end))
                          for end in (_WHOLE, _POINT_AFTER, _FRACTION, _EXP)))  # fmt: skip
        with f.when(b.not_(ends)):
            give(const(0.0, F64), 0)
        power = b.add(scale.get(), b.select(is_down.get(), b.sub(const(0), exponent.get()), exponent.get()))
        is_exact.set(f.all_of(is_exact.get(), b.icmp_unsigned("<=", mantissa.get(), const(_EXACT_INT)),
                              b.icmp_signed("<=", power, const(_EXACT_POWER)),
                              b.icmp_signed(">=", power, const(-_EXACT_POWER))))
        with f.when(is_exact.get()):  # one rounding, that of the last operation
            whole = b.uitofp(mantissa.get(), F64)
            up = f.load(powers, f.max(power, const(0)), F64)
            down = f.load(powers, f.max(b.sub(const(0), power), const(0)), F64)
            give(signed(b.select(b.icmp_signed("<", power, const(0)), b.fdiv(whole, down), b.fmul(whole, up))), 1)
        place = f.call("malloc", PTR, [b.add(text.size, const(1))])
        with f.when(b.icmp_unsigned("==", place, _NULL)):
            give(const(0.0, F64), 0)
        to = f.var(I64, const(0))
        with f.loop(text.size) as k:  # C knows no underscores
            byte = f.load_input(f.byte_at(text.ptr, k), I8)
            b.store(byte, f.byte_at(place, to.get()))
            to.set(b.add(to.get(), b.zext(b.icmp_unsigned("!=", byte, const(ord("_"), I8)), I64)))
        b.store(const(0, I8), f.byte_at(place, to.get()))
        found = f.call("strtod", F64, [place, _NULL])
        f.call("free", ir.VoidType(), [place])
        result = b.insert_value(ir.Constant(_FLOAT, ir.Undefined), found, 0)
        b.ret(b.insert_value(result, const(1), 1))
    return fn


def _is_word(f: Fn, text: Str, word: bytes) -> ir.Value:
    """Whether the text is a word, in either case."""
    b = f.b
    found = f.var(I1, b.icmp_unsigned("==", text.size, const(len(word))))
    with f.when(found.get()):
        for place, wanted in enumerate(word):
            lower = b.or_(f.load_input(f.byte_at(text.ptr, place), I8), const(0x20, I8))
            found.set(b.and_(found.get(), b.icmp_unsigned("==", lower, const(wanted, I8))))
    return found.get()
