"""Random Python functions for `@si.udf`, and what CPython gives for them.

Each is made from a seed, twice: as the user would write it, and with its ints checked to be of 64 bits (`_i`), its
powers to be real (`_f`) and its widening of ints spelled out, which is what scalein promises beyond plain Python.

    python -m tests.udf_programs 1000 5000      # seeds 1000 to 5999; prints the seeds that differ, and their programs
"""

from __future__ import annotations

import linecache
import math
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

import scalein as si
from scalein import col
from scalein.errors import ComputeError
from scalein.udf import UdfFunction
from tests import oracle

Text = tuple[str, str]  # as written, and checked
ARROW = {"int": pa.int64(), "float": pa.float64(), "bool": pa.bool_(), "str": pa.string()}
INTS = [0, 1, -1, 2, 3, 7, -7, 10, 63, 64, 100, -100, 2**31, 2**53 + 1, -(2**53) - 1, 2**62, 2**63 - 1, -(2**63)]
FLOATS = [0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 1.5, 2.5, -2.5, 0.1, 3.75, 100.0, 1e10, 1e-10, 5e-324,
          1.7976931348623157e308, float(2**53), 9.223372036854775807e18, -9.223372036854775808e18, math.inf,
          -math.inf, math.nan]  # fmt: skip
WORDS = ["", "a", "b", "ab", "abc", "view", "Ünïcödé", "日本語", "👩🏽‍🚀", "it's", "thirteen byte", "x" * 40,
         " \t ab\u2003", "ΑΣ ΒΣΓ", "straße ŉ", "aXaxa", "12", " -7\n", "3.5e2", "1,2,,x", "1_0.5", "a b  c", "x/y/z"]
POOL: dict[str, list[Any]] = {"int": INTS, "float": FLOATS, "bool": [True, False], "str": WORDS}
_COMPARE = ["==", "!=", "<", "<=", ">", ">="]
SEPARATORS = ["','", "'/'", "'a'", "' '", "'本'", "'ab'", ""]
_CLASSES = ["isalpha", "isalnum", "isdigit", "isdecimal", "isnumeric", "isspace", "isprintable", "isascii", "isupper",
            "islower"]  # fmt: skip
_FORMATS = {"int": ["05d", ">7", "<4", "^9", "+", ",", "x>12,", ".1%", "e"], "str": [">8", "<3", "^9", ".2", "*^7.1"],
            "float": [".0f", ".3f", "8.2f", "+.1f", "012.3f", ",.2f", ".2e", ".4g", ".1%", "^14.1f"],
            "bool": ["d", ">3"]}  # fmt: skip
_FLOAT_1 = ["gamma", "lgamma", "ulp", "sqrt",
           "exp", "log", "sin", "cos", "tan", "atan", "fabs", "log2", "log10", "tanh", "expm1", "asin", "cbrt"]


def i64(value: int) -> int:
    if not -(2**63) <= value < 2**63:
        raise OverflowError
    return value


def real(value: Any) -> Any:
    if isinstance(value, complex):
        raise ValueError
    return value


def items_of(kind: str) -> list[str]:
    """The types of a tuple's items; none of what is no tuple."""
    return kind.removeprefix("tuple[").removesuffix("]").split(", ") if kind.startswith("tuple") else []


@dataclass
class Writer:
    """Writes one function; `names` are its locals by type, `callees` the udfs it may call."""

    random: random.Random
    callees: list[Function] = field(default_factory=list)
    names: dict[str, list[str]] = field(default_factory=dict)
    optional: dict[str, str] = field(default_factory=dict)
    lines: list[Text] = field(default_factory=list)
    fixed: set[str] = field(default_factory=set)  # loop counters
    may_end: bool = False  # with None
    count: int = 0

    def pick(self, items: list[Any]) -> Any:
        return self.random.choice(items)

    # --- expressions

    def expr(self, kind: str, depth: int) -> Text:
        if depth <= 0 or self.random.random() < 0.2:
            return self.leaf(kind)
        if self.random.random() < 0.12:
            test, a, b = self.expr("bool", depth - 1), self.expr(kind, depth - 1), self.expr(kind, depth - 1)
            return self.join("({1} if {0} else {2})", test, a, b)
        if self.random.random() < 0.06:
            return self.join(f"({{}} {self.pick(['and', 'or'])} {{}})", self.expr(kind, depth - 1),
                             self.expr(kind, depth - 1))
        callees = [callee for callee in self.callees if callee.result == kind]
        if callees and self.random.random() < 0.3:
            return self.call(self.pick(callees), depth)
        if kind.startswith("tuple"):
            return self.join("({}, {})", *(self.expr(each, depth - 1) for each in items_of(kind)))
        pairs = [callee for callee in self.callees if kind in items_of(callee.result)]
        if pairs and self.random.random() < 0.2:
            callee = self.pick(pairs)
            return self.join(f"{{}}[{items_of(callee.result).index(kind)}]", self.call(callee, depth))
        write: dict[str, Callable[[int], Text]] = {
            "int": self.int_expr, "float": self.float_expr, "bool": self.bool_expr, "str": self.str_expr,
        }  # fmt: skip
        return write[kind](depth - 1)

    def join(self, pattern: str, *parts: Text) -> Text:
        return pattern.format(*(part[0] for part in parts)), pattern.format(*(part[1] for part in parts))

    def int_checked(self, pattern: str, *parts: Text) -> Text:
        plain, checked = self.join(pattern, *parts)
        return plain, f"_i({checked})"

    def leaf(self, kind: str) -> Text:
        if kind.startswith("tuple"):
            return self.join("({}, {})", *map(self.leaf, items_of(kind)))
        names = self.names.get(kind, [])
        if names and self.random.random() < 0.75:
            return (self.pick(names),) * 2
        optional = [name for name, of in self.optional.items() if of == kind]
        if optional and self.random.random() < 0.5:
            name, other = self.pick(optional), self.leaf(kind)
            pattern = self.pick([f"({name} if {name} is not None else {{}})", f"({name} or {{}})"])
            return self.join(pattern, other)
        value = self.pick(POOL[kind])
        if kind == "float" and not math.isfinite(value):
            return (f"float('{value}')",) * 2
        return (f"({value!r})" if kind in ("int", "float") else repr(value),) * 2

    def call(self, callee: Function, depth: int) -> Text:
        args = [self.expr(kind, depth - 2) for _, kind, _ in callee.params]
        pattern = ", ".join("{}" for _ in args)
        plain, checked = self.join(pattern, *args)
        return f"{callee.name}({plain})", f"_{callee.name}({checked})"

    def int_expr(self, depth: int) -> Text:
        match self.random.randrange(18):
            case 13:
                method = self.pick(["find", "rfind", "count", "index", "rindex"])
                bounds = self.pick(["", "", ", {}", ", {}, {}"])
                parts = [self.leaf("int") for _ in range(bounds.count("{}"))]
                return self.join(f"{{}}.{method}({{}}{bounds})", self.expr("str", depth), self.leaf("str"), *parts)
            case 14:
                return self.join("len({})", self.pieces(depth))
            case 15:
                return self.int_checked("int({})", self.expr("str", depth))
            case 16:
                small = "({}) % 40"
                patterns = ["math.gcd({}, {})", "math.lcm({}, {})", f"math.comb({small}, {small})", "math.comb({}, 2)",
                            f"math.perm({small}, {small})", f"math.factorial({small})", "math.isqrt({})",
                            "({}).bit_length()", "({}).bit_count()", "divmod({}, {})[0]",
                            "divmod({}, {})[1]"]  # fmt: skip
                pattern = self.pick(patterns)
                return self.int_checked(pattern, *(self.expr("int", depth) for _ in range(pattern.count("{}"))))
            case 17:
                return self.join(self.pick(["ord({}[0])", "ord({}[-1])"]),
                                 self.expr("str", depth)) if self.random.random() < 0.5 else self.join(
                    "math.frexp({})[1]", self.expr("float", depth))
            case 0 | 1 | 2 | 3:
                return self.int_checked(f"({{}} {self.pick(['+', '-', '*'])} {{}})", self.expr("int", depth),
                                        self.expr("int", depth))
            case 4 | 5:
                return self.int_checked(f"({{}} {self.pick(['//', '%'])} {{}})", self.expr("int", depth),
                                        self.expr("int", depth))
            case 6:
                return self.int_checked("(-{})", self.expr("int", depth))
            case 7:
                return self.int_checked(f"{self.pick(['int', 'math.floor', 'math.ceil', 'round', 'math.trunc'])}({{}})",
                                        self.expr("float", depth))
            case 8:
                return self.int_checked(f"({{}} ** {self.random.randrange(5)})", self.expr("int", depth))
            case 9:
                return self.join(f"{self.pick(['min', 'max'])}({{}}, {{}})", self.expr("int", depth),
                                 self.expr("int", depth))
            case 10:
                return self.int_checked("abs({})", self.expr("int", depth))
            case 11:
                return self.join(f"({{}} {self.pick(['&', '|', '^'])} {{}})", self.expr("int", depth),
                                 self.expr("int", depth))
            case _:
                if self.random.random() < 0.5:
                    shift = self.pick(["<<", ">>"])
                    return self.int_checked(f"({{}} {shift} ({{}} % 70))", self.expr("int", depth), self.leaf("int"))
                return self.join("len({})", self.expr("str", depth))

    def float_expr(self, depth: int) -> Text:
        match self.random.randrange(12):
            case 10:
                return self.join("float({})", self.expr("str", depth))
            case 11:
                pattern = self.pick(["round({}, 2)", "round({}, 0)", "math.modf({})[0]", "math.modf({})[1]",
                                     "math.frexp({})[0]", "math.remainder({}, {})", "math.nextafter({}, {})",
                                     "math.hypot({}, {}, {})", "divmod({}, {})[1]"])  # fmt: skip
                return self.join(pattern, *(self.expr("float", depth) for _ in range(pattern.count("{}"))))
            case 0 | 1 | 2 | 3:
                other = self.pick(["float", "float", "int"])
                return self.join(f"({{}} {self.pick(['+', '-', '*', '/', '//', '%'])} {{}})", self.expr("float", depth),
                                 self.expr(other, depth))
            case 4:
                (a, checked_a), (b, checked_b) = self.expr("int", depth), self.expr("int", depth)
                return f"({a} / {b})", f"_d({checked_a}, {checked_b})"
            case 5:
                plain, checked = self.join("({} ** {})", self.expr("float", depth), self.leaf("float"))
                return plain, f"_f{checked}"
            case 6:
                return self.join(f"math.{self.pick(_FLOAT_1)}({{}})", self.expr("float", depth))
            case 7:
                return self.join(f"{self.pick(['min', 'max', 'math.atan2', 'math.hypot', 'math.fmod'])}({{}}, {{}})",
                                 self.expr("float", depth), self.expr("float", depth))
            case 8:
                return self.join("float({})", self.expr(self.pick(["int", "bool"]), depth))
            case _:
                return self.join(f"{self.pick(['-', 'abs', '+'])}({{}})", self.expr("float", depth))

    def bool_expr(self, depth: int) -> Text:
        match self.random.randrange(11):
            case 8:
                return self.join(f"{{}}.{self.pick(_CLASSES)}()", self.expr("str", depth))
            case 9:
                return self.join("({} in {})", self.leaf("str"), self.pieces(depth))
            case 10:
                optional = list(self.optional)
                if optional and self.random.random() < 0.6:
                    name = self.pick(optional)
                    return self.join(f"({name} {self.pick(['==', '!='])} {{}})", self.leaf(self.optional[name]))
                pattern = self.pick(["({}).is_integer()", "math.isclose({}, {}, rel_tol=0.1)"])
                return self.join(pattern, *(self.expr("float", depth) for _ in range(pattern.count("{}"))))
            case 0 | 1 | 2:
                kinds = self.pick(["int int", "float float", "int float", "str str", "bool bool"]).split()
                return self.join(f"({{}} {self.pick(_COMPARE)} {{}})", *(self.expr(kind, depth) for kind in kinds))
            case 3:
                kind = self.pick(["int", "float", "str"])
                return self.join(f"({{}} {self.pick(_COMPARE)} {{}} {self.pick(_COMPARE)} {{}})",
                                 *(self.expr(kind, depth) for _ in range(3)))
            case 4:
                return self.join("(not {})", self.expr(self.pick(["bool", "int", "float", "str"]), depth))
            case 5:
                return self.join(f"({{}} {self.pick(['and', 'or'])} {{}})", self.expr("bool", depth),
                                 self.expr("bool", depth))
            case 6:
                word = self.pick(WORDS)
                pattern = self.pick([f"({word!r} in {{}})", f"{{}}.startswith({word!r})", "({1} in {0})",
                                     "{}.startswith({})", "{}.endswith({})"])
                return self.join(pattern, self.expr("str", depth), self.leaf("str"))
            case _:
                if self.optional:
                    return (f"({self.pick(list(self.optional))} is {self.pick(['None', 'not None'])})",) * 2
                return self.join(f"math.{self.pick(['isnan', 'isinf', 'isfinite'])}({{}})", self.expr("float", depth))

    def pieces(self, depth: int) -> Text:
        """What split gives."""
        separator = self.pick(SEPARATORS)
        limit = self.pick(["", "", ", maxsplit=1", ", maxsplit=2", ", maxsplit=0"])
        arguments = f"{separator}{limit}".removeprefix(", ")
        method = "rsplit" if separator and limit else "split"
        return self.join(f"{{}}.{method}({arguments})", self.expr("str", depth))

    def str_expr(self, depth: int) -> Text:
        """Text stays short, whatever loops make of it."""
        text = self.expr("str", depth)
        match self.random.randrange(19):
            case 12 | 13:
                return self.join(self.pick(["{}[0]", "{}[1]", "{}[-1]", "{}[-2]"]), self.pieces(depth))
            case 14:
                return self.join("{}.join({})[:50]", self.leaf("str"), self.pieces(depth))
            case 15:
                method = self.pick(["partition", "rpartition"])
                return self.join(f"{{}}.{method}({{}})[{self.random.randrange(-3, 3)}]", text, self.leaf("str"))
            case 16:
                method = self.pick(["zfill({} % 30)", "ljust({} % 20)", "rjust({} % 20, 'é')", "center({} % 20, '-')",
                                    "replace('a', 'bcd', {})", "capitalize()", "casefold()", "removeprefix('a')",
                                    "removesuffix('b')"])  # fmt: skip
                return self.join(f"{{}}.{method}[:50]", *[text, self.leaf("int")][: 1 + method.count("{}")])
            case 17:
                return self.join(self.pick(["({} * ({} % 4))[:50]", "{0}[::-1]", "chr(({1} % 1000))"]), text,
                                 self.leaf("int"))  # fmt: skip
            case 18:
                kind = self.pick(list(_FORMATS))
                found = self.names.get(kind, [])
                return (f"f'{{{self.pick(found)}:{self.pick(_FORMATS[kind])}}}'[:50]",) * 2 if found else text
            case 0:
                return self.join(f"{self.pick(['min', 'max'])}({{}}, {{}})", text, self.expr("str", depth))
            case 1 | 2 | 3:
                return self.join("({} + {})[:50]", text, self.expr("str", depth))
            case 4:
                return self.join("{}[{}:{}]", text, self.expr("int", depth), self.expr("int", depth))
            case 5:
                pattern = self.pick(["{}[1:]", "{}[:-1]", "{}[-3:2]", "{}[2:5]", "{}[{}:]"])
                return self.join(pattern, *[text, self.leaf("int")][: pattern.count("{}")])
            case 6:
                return self.join(self.pick(["{}[0]", "{}[-1]", "{}[{}]"]), text, self.leaf("int"))
            case 7 | 8:
                method = self.pick(["upper()", "lower()", "strip()", "lstrip('ab ')", "rstrip('cé本')"])
                return self.join(f"{{}}.{method}[:50]", text)
            case 9:
                old = self.pick(["a", "b", "ab", "本", "xx", "é"])
                return self.join(f"{{}}.replace({old!r}, {{}})[:50]", text, self.leaf("str"))
            case 10:
                return self.join("str({})", self.expr(self.pick(["int", "bool", "str"]), depth))
            case _:
                names = [name for kind in ("int", "bool", "str") for name in self.names.get(kind, [])]
                floats = [f"{name}:.{self.random.randrange(4)}f" for name in self.names.get("float", [])]
                pieces = self.random.choices([*names, *floats], k=2) if names or floats else []
                return ("f'" + "-".join(f"{{{piece}}}" for piece in pieces) + "!'[:50]",) * 2

    # --- statements

    def put(self, level: int, text: str, checked: str | None = None) -> None:
        indent = "    " * level
        self.lines.append((indent + text, indent + (text if checked is None else checked)))

    def assign(self, level: int, name: str, kind: str, depth: int = 3) -> None:
        if kind == "float" and self.random.random() < 0.2:  # an int in a float's place
            plain, checked = self.expr("int", depth - 1)
            self.put(level, f"{name} = {plain}", f"{name} = float({checked})")
            return
        plain, checked = self.expr(kind, depth)
        self.put(level, f"{name} = {plain}", f"{name} = {checked}")

    def new_local(self, level: int, kind: str) -> None:
        name = f"v{self.count}"
        self.count += 1
        if kind == "float" and self.random.random() < 0.3:
            self.put(level, f"{name}: float = 0", f"{name}: float = 0.0")
        else:
            plain, checked = self.expr(kind, 2)
            self.put(level, f"{name} = {plain}", f"{name} = {checked}")
        self.names.setdefault(kind, []).append(name)

    def statements(self, level: int, depth: int, in_loop: bool, result: str) -> None:
        for _ in range(self.random.randrange(1, 4)):
            choice = self.random.randrange(14)
            kind = self.pick(list(self.names))
            free = [name for name in self.names[kind] if name not in self.fixed]
            if choice < 5 or depth <= 0:
                if not free:
                    self.put(level, "pass")
                elif kind in ("int", "float") and self.random.random() < 0.4:
                    self.augment(level, self.pick(free), kind)
                else:
                    self.assign(level, self.pick(free), kind)
            elif choice < 8:
                self.branch(level, depth, in_loop, result)
            elif choice < 10:
                self.loop(level, depth, result)
            elif choice == 12:
                self.unpack(level)
            elif choice == 10 and in_loop:
                test = self.expr("bool", 2)
                self.put(level, f"if {test[0]}:", f"if {test[1]}:")
                self.put(level + 1, self.pick(["break", "continue"]))
            else:
                test, value = self.expr("bool", 2), self.expr(result, 2)
                if self.may_end and self.random.random() < 0.5:
                    value = ("None", "None")
                self.put(level, f"if {test[0]}:", f"if {test[1]}:")
                self.put(level + 1, f"return {value[0]}", f"return {value[1]}")

    def unpack(self, level: int) -> None:
        """Two names from a tuple, of a name, of a call or of pieces."""
        kinds = [self.pick(["int", "float", "bool", "str"]) for _ in range(2)]
        names = [f"v{self.count}", f"v{self.count + 1}"]
        pairs = [callee for callee in self.callees if callee.result.startswith("tuple")]
        if pairs and self.random.random() < 0.6:
            callee = self.pick(pairs)
            kinds, value = list(items_of(callee.result)), self.call(callee, 2)
        elif self.random.random() < 0.3:
            kinds, value = ["str", "str"], self.pieces(1)
        else:
            value = self.expr(f"tuple[{kinds[0]}, {kinds[1]}]", 2)
        self.count += 2
        if self.random.random() < 0.3:
            whole = f"t{self.count}"
            self.put(level, f"{whole} = {value[0]}", f"{whole} = {value[1]}")
            value = (whole, whole)
        self.put(level, f"{', '.join(names)} = {value[0]}", f"{', '.join(names)} = {value[1]}")
        for name, kind in zip(names, kinds, strict=True):
            self.names.setdefault(kind, []).append(name)

    def augment(self, level: int, name: str, kind: str) -> None:
        sign = self.pick(["+", "-", "*"])
        plain, checked = self.expr(kind, 2)
        whole = f"{name} {sign} ({checked})"
        self.put(level, f"{name} {sign}= {plain}", f"{name} = _i({whole})" if kind == "int" else f"{name} = {whole}")

    def scoped(self, level: int, depth: int, in_loop: bool, result: str) -> None:
        before = {kind: list(names) for kind, names in self.names.items()}
        if self.random.random() < 0.3:
            self.new_local(level, self.pick(["int", "float", "bool", "str"]))
        self.statements(level, depth - 1, in_loop, result)
        self.names = before

    def branch(self, level: int, depth: int, in_loop: bool, result: str) -> None:
        test = self.expr(self.pick(["bool", "bool", "int", "str"]), 2)
        self.put(level, f"if {test[0]}:", f"if {test[1]}:")
        self.scoped(level + 1, depth, in_loop, result)
        if self.random.random() < 0.3:
            test = self.expr("bool", 2)
            self.put(level, f"elif {test[0]}:", f"elif {test[1]}:")
            self.scoped(level + 1, depth, in_loop, result)
        if self.random.random() < 0.6:
            self.put(level, "else:")
            self.scoped(level + 1, depth, in_loop, result)

    def loop(self, level: int, depth: int, result: str) -> None:
        name = f"i{self.count}"
        self.count += 1
        self.fixed.add(name)
        kind = "int"
        if self.random.random() < 0.3:
            kind, over = "str", self.pieces(1) if self.random.random() < 0.6 else self.expr("str", 1)
            if self.random.random() < 0.3:
                self.fixed.add(f"n{name}")
                self.put(level, *self.join(f"for n{name}, {name} in enumerate({{}}, {self.pick([0, 1, -7])}):", over))
            else:
                self.put(level, *self.join(f"for {name} in {{}}:", over))
        elif self.random.random() < 0.5:
            stop = self.expr("int", 1)
            step = self.pick(["", "", ", 2", ", -1", ", -3"])
            pattern = f"for {name} in range({self.random.randrange(-2, 3)}, min(max({{}}, -4), 6){step}):"
            self.put(level, *self.join(pattern, stop))
        else:
            self.put(level, f"{name} = {self.random.randrange(1, 6)}")
            plain, checked = self.expr("bool", 2)
            self.put(level, f"while {name} > 0 and {plain}:", f"while {name} > 0 and {checked}:")
            self.put(level + 1, f"{name} -= 1")
        before = {kind: list(names) for kind, names in self.names.items()}
        self.names.setdefault(kind, []).append(name)
        self.scoped(level + 1, depth, True, result)
        self.names = before
        if self.random.random() < 0.2:
            self.put(level, "else:")
            self.scoped(level + 1, depth, False, result)


@dataclass(frozen=True)
class Function:
    """A generated function: its text, the udf, and the checked one for CPython."""

    name: str
    params: list[tuple[str, str, bool]]  # name, type, whether it may be None
    result: str
    may_end: bool
    lines: list[Text]

    def text(self, which: int) -> str:
        head = ", ".join(f"{name}: {kind}{' | None' if optional else ''}" for name, kind, optional in self.params)
        name = ("" if which == 0 else "_") + self.name
        result = self.result + (" | None" if self.may_end else "")
        return "\n".join([f"def {name}({head}) -> {result}:", *(line[which] for line in self.lines)]) + "\n"


def write(seed: int, name: str, callees: list[Function]) -> Function:
    """The function of a seed."""
    rng = random.Random(seed)
    writer = Writer(rng, callees)
    params = []
    for number in range(rng.randrange(1, 4)):
        kind, optional = rng.choice(["int", "float", "float", "bool", "str"]), rng.random() < 0.25 and not callees
        optional = optional and name == "main"
        params.append((f"p{number}", kind, optional))
        if optional:
            writer.optional[f"p{number}"] = kind
        else:
            writer.names.setdefault(kind, []).append(f"p{number}")
    result = rng.choice(["int", "float", "bool", "str"])
    if name == "helper" and rng.random() < 0.5:
        result = f"tuple[{rng.choice(['int', 'float', 'str'])}, {rng.choice(['bool', 'float', 'str'])}]"
    writer.may_end = name == "main" and rng.random() < 0.3
    for _ in range(rng.randrange(1, 4)):
        writer.new_local(1, rng.choice(["int", "float", "bool", "str"]))
    writer.statements(1, 2, False, result)
    if not writer.may_end or rng.random() < 0.5:
        value = writer.expr(result, 3)
        writer.put(1, f"return {value[0]}", f"return {value[1]}")
    return Function(name, params, result, writer.may_end, writer.lines)


def _divided(a: int, b: int) -> float:
    return float(a) / float(b)


@dataclass(frozen=True)
class Program:
    """A udf and CPython's answer for it."""

    seed: int
    text: str
    udf: UdfFunction
    python: Callable[..., Any]
    params: list[tuple[str, str, bool]]

    def rows(self, count: int) -> list[tuple[Any, ...]]:
        rng = random.Random(self.seed + 1)
        rows = []
        for _ in range(count):
            rows.append(tuple(_value(rng, kind, optional) for _, kind, optional in self.params))
        return rows


def _value(rng: random.Random, kind: str, optional: bool) -> Any:
    if optional and rng.random() < 0.3:
        return None
    if rng.random() < 0.5 or kind in ("bool", "str"):
        return rng.choice(POOL[kind])
    return rng.randrange(-20, 20) if kind == "int" else rng.uniform(-10, 10)


def program(seed: int) -> Program:
    """The program of a seed: `main`, and sometimes a udf that it calls."""
    rng = random.Random(seed)
    helpers = [write(seed + 10**9, "helper", [])] if rng.random() < 0.3 else []
    space: dict[str, Any] = {"math": math, "si": si, "_i": i64, "_f": real, "_d": _divided}
    text = ""
    for function in (*helpers, write(seed, "main", helpers)):
        for which in (0, 1):
            part = ("@si.udf\n" if which == 0 else "") + function.text(which)
            file = f"<udf {seed} {function.name} {which}>"
            linecache.cache[file] = (len(part), None, part.splitlines(keepends=True), file)
            exec(compile(part, file, "exec"), space)
            text += part if which == 0 else ""
            if which == 1:
                del linecache.cache[file]
    return Program(seed, text, space["main"], space["_main"], function.params)


def differences(made: Program, row_count: int, **options: Any) -> Iterator[str]:
    """What the engine and the oracle give otherwise than CPython."""
    good: list[tuple[Any, ...]] = []
    want: list[Any] = []
    bad: list[tuple[Any, ...]] = []
    for row in made.rows(row_count):
        try:
            want.append(made.python(*row))
            good.append(row)
        except (ZeroDivisionError, ValueError, OverflowError, IndexError):
            bad.append(row)
    for engine in ("llvm", "oracle"):
        try:
            got = _collect(made, good, engine, options)
        except ComputeError as error:
            yield f"{engine} fails: {error}"
            continue
        for row, mine, theirs in zip(good, got, want, strict=True):
            if not _same(mine, theirs):
                yield f"{engine} gives {mine!r} instead of {theirs!r} for {row}"
        for row in bad[:2]:
            with suppress(ComputeError):
                yield f"{engine} gives {_collect(made, [row], engine, options)} for {row}, which fails"


def _collect(made: Program, rows: list[tuple[Any, ...]], engine: str, options: dict[str, Any]) -> list[Any]:
    arrays = {name: pa.array([row[number] for row in rows], ARROW[kind])
              for number, (name, kind, _) in enumerate(made.params)}  # fmt: skip
    flow = si.from_arrow(pa.table(arrays)).select(out=made.udf(*(col(name) for name in arrays)))
    found = flow.collect(**options) if engine == "llvm" else oracle.collect(flow)
    return found["out"].to_pylist()  # type: ignore[no-any-return]


def _same(mine: Any, theirs: Any) -> bool:
    if isinstance(mine, float) and isinstance(theirs, int | float):
        return (math.isnan(mine) and math.isnan(theirs)) or math.isclose(mine, theirs, rel_tol=1e-12)
    return type(mine) is type(theirs) and bool(mine == theirs)


def main() -> None:
    first, count = map(int, sys.argv[1:3])
    wrong = 0
    for seed in range(first, first + count):
        made = program(seed)
        found = list(differences(made, 40, workers=1))
        if found:
            wrong += 1
            print(f"seed {seed}:", *found[:3], made.text, sep="\n", flush=True)
    print(f"{count} programs, {wrong} differ")


if __name__ == "__main__":
    main()
