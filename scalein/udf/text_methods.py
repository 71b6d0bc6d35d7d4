"""Methods of text (and the few of numbers) that a udf may call, and the formats of f-strings."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from scalein.dtypes import BOOL, F64, I64, STR, DType
from scalein.ir.exprs import Lit
from scalein.ir.udf import CLASSES, TEXTS, Apply, Choose, Let, Part, tuple_of
from scalein.udf.conversions import NAMES, convert
from scalein.udf.known import Known

if TYPE_CHECKING:
    from scalein.udf.exprs import Exprs

Args = Sequence[Part]
Handler = Callable[["Exprs", ast.Call, Part, Args], Part | None]

_TRIPLE = tuple_of([(STR, False)] * 3)
_WHOLE = Lit(I64.int_range()[1], I64)
_ALL = Lit(-1, I64)  # splits, or replacements


def call(exprs: Exprs, node: ast.Call, base: Part, method: str, known: Known) -> Part | None:
    """A method of a value; None if it is not compiled, or not with these arguments."""
    if base.dtype == STR:
        if method == "join":
            return _join(exprs, node, base, known)
        if method in ("startswith", "endswith") and node.args and isinstance(node.args[0], ast.Tuple):
            return _any_affix(exprs, node, base, method, known)
        names = _KEYWORDS.get(method, ())
        if method not in _METHODS or any(keyword.arg not in names for keyword in node.keywords):
            return None
        given: list[ast.expr | None] = [*node.args]
        for keyword in node.keywords:
            place = names.index(str(keyword.arg))
            if place < len(given):
                return None
            given += [None] * (place - len(given)) + [keyword.value]
        # `split(maxsplit=1)` leaves the separator out
        args = [Lit(None) if arg is None else exprs.read(arg, known) for arg in given]
        return _METHODS[method](exprs, node, base, args)
    if method in _NUMBER_METHODS and not node.args and not node.keywords:
        dtype, result = _NUMBER_METHODS[method]
        return Apply(method, (base,), result) if base.dtype == dtype else None
    return None


_NUMBER_METHODS = {"is_integer": (F64, BOOL), "bit_length": (I64, I64), "bit_count": (I64, I64)}
_KEYWORDS = {"split": ("sep", "maxsplit"), "rsplit": ("sep", "maxsplit")}


def _are(args: Args, *dtypes: DType, least: int | None = None) -> bool:
    """Whether the arguments, at least so many, have these types and cannot be None."""
    enough = len(args) == len(dtypes) if least is None else least <= len(args) <= len(dtypes)
    return enough and all(arg.dtype == dtype and not arg.nullable for arg, dtype in zip(args, dtypes, strict=False))


def _simple(fn: str, dtype: DType, *takes: DType, least: int | None = None) -> Handler:
    """A method that is one operator over the text and its arguments."""

    def handler(exprs: Exprs, node: ast.Call, text: Part, args: Args) -> Part | None:
        return Apply(fn, (text, *args), dtype, line=node.lineno) if _are(args, *takes, least=least) else None

    return handler


def _strip(fn: str) -> Handler:
    def handler(exprs: Exprs, node: ast.Call, text: Part, args: Args) -> Part | None:
        if not _are(args, STR, least=0):
            return None
        if args and not isinstance(args[0], Lit):
            raise exprs.source.refuse(node, f"the characters of {fn} are a constant text")
        return Apply(fn, (text, *args), STR, line=node.lineno)

    return handler


def _replace(exprs: Exprs, node: ast.Call, text: Part, args: Args) -> Part | None:
    if not _are(args, STR, STR, I64, least=2):
        return None
    if isinstance(args[0], Lit) and not args[0].value:
        raise exprs.source.refuse(node, "replace looks for a text that is not empty")
    return Apply("replace", (text, args[0], args[1], args[2] if len(args) == 3 else _ALL), STR, line=node.lineno)


def _split(fn: str) -> Handler:
    def handler(exprs: Exprs, node: ast.Call, text: Part, args: Args) -> Part | None:
        separator, most = [*args, *(Lit(None), _ALL)[len(args) :]] if len(args) <= 2 else (_ALL, _ALL)
        is_blank = isinstance(separator, Lit) and separator.value is None
        if not (is_blank or _are([separator], STR)) or not _are([most], I64):
            return None
        if isinstance(separator, Lit) and separator.value == "":
            raise exprs.source.refuse(node, "an empty text separates nothing", 'the characters: `for c in s`')
        if fn == "rsplit" and most != _ALL:
            word = str(separator.value) if isinstance(separator, Lit) and not is_blank else ""
            if not word or any(word.startswith(word[-size:]) for size in range(1, len(word))):
                raise exprs.source.refuse(node, "rsplit with a limit takes a constant separator, such as '/'")
        elif fn == "rsplit" and not is_blank and not (isinstance(separator, Lit) and len(str(separator.value)) == 1):
            raise exprs.source.refuse(node, "rsplit without a limit is split", "write split")
        if is_blank:
            return Apply("words", (text, most), TEXTS)
        return Apply("split" if most == _ALL else fn, (text, separator, most), TEXTS, line=node.lineno)

    return handler


def _join(exprs: Exprs, node: ast.Call, separator: Part, known: Known) -> Part | None:
    """`sep.join((a, b))`, or of what split gives."""
    from scalein.udf.exprs import join_texts

    if len(node.args) != 1 or node.keywords:
        return None
    (arg,) = node.args
    if not isinstance(arg, ast.Tuple | ast.List):
        part = exprs.value(arg, known)
        return Apply("join", (separator, part), STR, line=node.lineno) if part.dtype == TEXTS else None
    parts = [exprs.value(each, known) for each in arg.elts]
    if any(part.dtype != STR for part in parts):
        return None
    if isinstance(separator, Lit) or len(parts) < 3:
        return join_texts([each for part in parts for each in (separator, part)][1:], node.lineno)
    local = exprs.new_local(STR)
    joined = join_texts([each for part in parts for each in (local, part)][1:], node.lineno)
    return Let(local.name, separator, joined, STR)


def _affix(fn: str) -> Handler:
    def handler(exprs: Exprs, node: ast.Call, text: Part, args: Args) -> Part | None:
        return Apply(f"{fn.removesuffix('with')}_with", (text, *args), BOOL) if _are(args, STR) else None

    return handler


def _any_affix(exprs: Exprs, node: ast.Call, text: Part, fn: str, known: Known) -> Part | None:
    """`s.startswith(("a", "b"))`."""
    from scalein.udf.exprs import join_conditions

    if len(node.args) != 1 or not isinstance(node.args[0], ast.Tuple):
        return None
    affixes = [exprs.value(each, known) for each in node.args[0].elts]
    if not _are(affixes, *[STR] * len(affixes)) or not affixes:
        return None
    local = exprs.new_local(STR)
    found = join_conditions("or", [Apply(f"{fn.removesuffix('with')}_with", (local, each), BOOL) for each in affixes],
                            BOOL)  # fmt: skip
    return Let(local.name, text, found, BOOL)


def _justify(align: str) -> Handler:
    def handler(exprs: Exprs, node: ast.Call, text: Part, args: Args) -> Part | None:
        if not _are(args, I64, STR, least=1):
            return None
        fill = args[1] if len(args) == 2 else Lit(" ", STR)
        if not (isinstance(fill, Lit) and len(str(fill.value)) == 1):
            raise exprs.source.refuse(node, "a text is filled with one constant character")
        return Apply("pad", (text, args[0], fill, Lit(align, STR)), STR, line=node.lineno)

    return handler


def _capitalize(exprs: Exprs, node: ast.Call, text: Part, args: Args) -> Part | None:
    """The first character in title case, and the rest of the text in lower case."""
    from scalein.udf.exprs import join_texts

    if args:
        return None
    line = node.lineno
    whole, first = exprs.new_local(STR), exprs.new_local(STR)
    lower_first = Apply("len", (Apply("lower", (first,), STR, line=line),), I64)
    rest = Apply("slice", (Apply("lower", (whole,), STR, line=line), lower_first, _WHOLE), STR)
    both = join_texts([Apply("titled", (first,), STR, line=line), rest], line)
    start = Apply("slice", (whole, Lit(0, I64), Lit(1, I64)), STR)
    return Let(whole.name, text, Let(first.name, start, both, STR), STR)


_METHODS: dict[str, Handler] = {
    "startswith": _affix("startswith"), "endswith": _affix("endswith"),
    "removeprefix": _simple("removeprefix", STR, STR), "removesuffix": _simple("removesuffix", STR, STR),
    "upper": _simple("upper", STR), "lower": _simple("lower", STR), "casefold": _simple("casefold", STR),
    "capitalize": _capitalize,
    "strip": _strip("strip"), "lstrip": _strip("lstrip"), "rstrip": _strip("rstrip"), "replace": _replace,
    "find": _simple("find", I64, STR, I64, I64, least=1), "rfind": _simple("rfind", I64, STR, I64, I64, least=1),
    "index": _simple("index", I64, STR, I64, I64, least=1), "rindex": _simple("rindex", I64, STR, I64, I64, least=1),
    "count": _simple("count", I64, STR, I64, I64, least=1),
    "split": _split("split"), "rsplit": _split("rsplit"),
    "partition": _simple("partition", _TRIPLE, STR), "rpartition": _simple("rpartition", _TRIPLE, STR),
    "zfill": _simple("zfill", STR, I64), "ljust": _justify("<"), "rjust": _justify(">"), "center": _justify("c"),
    **{name: _simple(name, BOOL) for name in CLASSES},
}  # fmt: skip


# --- formats

_SPEC = re.compile(r"(?:(?P<fill>.)?(?P<align>[<>^]))?(?P<sign>[+ -]?)(?P<zero>0?)(?P<width>\d{1,3})?"
                   r"(?P<comma>,?)(?:\.(?P<digits>\d{1,2}))?(?P<type>[a-zA-Z%]?)")  # fmt: skip


def formatted(exprs: Exprs, node: ast.FormattedValue, part: Part, spec: str) -> Part:
    """A value in a format such as `.2f`, `>8`, `05d` or `,`."""
    found = _SPEC.fullmatch(spec)
    text = None if found is None else _body(part, found, node.lineno)
    if found is None or text is None:
        hint = "formats such as {x:.2f}, {x:,.2f}, {x:e}, {x:.0%}, {n:05d}, {n:,} and {s:>10} are"
        raise exprs.source.refuse(node, f"the format {spec!r} of {NAMES[part.dtype]} is not supported", hint)
    if found["width"] is None:
        return text
    width = Lit(int(found["width"]), I64)
    is_number = part.dtype != STR
    if found["zero"] and not found["align"]:
        return Apply("zfill", (text, width), STR, line=node.lineno)
    align = found["align"] or (">" if is_number else "<")
    fill = found["fill"] or ("0" if found["zero"] else " ")
    return Apply("pad", (text, width, Lit(fill, STR), Lit(align, STR)), STR, line=node.lineno)


def _body(part: Part, spec: re.Match[str], line: int) -> Part | None:
    """The text without its padding."""
    from scalein.udf.exprs import join_texts

    kind, digits = spec["type"], spec["digits"]
    if part.dtype == STR:
        if kind not in ("", "s") or spec["sign"] or spec["comma"] or (spec["zero"] and spec["width"] is not None):
            return None
        cut = None if digits is None else Lit(int(digits), I64)
        return part if cut is None else Apply("slice", (part, Lit(0, I64), cut), STR)
    if part.dtype == BOOL:
        part = convert(part, I64)
    if spec["comma"] and spec["zero"]:
        return None
    if part.dtype == I64 and kind in ("", "d"):
        if digits is not None:
            return None
        text: Part = Apply("text", (part,), STR, line=line)
    elif kind in ("f", "F", "e", "g", "%"):
        number = convert(part, F64)
        if kind == "%":
            number = Apply("mul", (number, Lit(100.0, F64)), F64)
        if spec["comma"] and kind in ("e", "g"):
            return None
        letter = "f" if kind in "fF%" else kind
        places = Lit(6 if digits is None else int(digits), I64)
        text = Apply("fixed", (number, places, Lit(letter, STR)), STR, line=line)
        if kind == "F":
            text = Apply("upper", (text,), STR, line=line)
    else:
        return None
    if spec["comma"]:
        text = Apply("grouped", (text,), STR, line=line)
    if spec["sign"] in ("+", " "):
        sign = Lit(spec["sign"], STR)
        minus = Apply("starts_with", (text, Lit("-", STR)), BOOL)
        text = join_texts([Choose(minus, Lit("", STR), sign, STR), text], line)
    return join_texts([text, Lit("%", STR)], line) if kind == "%" else text
