"""A picture of a plan, as Mermaid text or as SVG: sources at the top, the result at the bottom.

Plain Python, no layout engine: plans are trees with a few shared inputs, so a row for each distance from
the result and a column for each source is enough. Notebooks show `Graph` by its `_repr_svg_`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from html import escape
from textwrap import wrap

from scalein.ir.ops import Op, inputs
from scalein.ir.printer import describe
from scalein.ir.rewrite import walk_ops

_WIDEST = 44  # characters in a line of a box
_MOST_LINES = 4
_CHAR, _LINE, _PAD, _GAP_X, _GAP_Y = 7.3, 16, 10, 24, 36  # pixels, for a monospaced font of 12

# Fill and border by what an op does to rows: brings them, picks them, changes them, keeps state.
_COLOURS = {
    "Source": ("#e3f2e6", "#3d8b50"),
    "Filter": ("#fdf3d7", "#b58a1b"),
    "Limit": ("#fdf3d7", "#b58a1b"),
    "Aggregate": ("#e2ecfa", "#3a6fb5"),
    "Join": ("#e2ecfa", "#3a6fb5"),
}
_OTHER = ("#f4f4f5", "#71717a")


class Graph:
    """A plan to look at: SVG in a notebook, Mermaid when printed."""

    def __init__(self, op: Op) -> None:
        self._op = op

    @cached_property
    def mermaid(self) -> str:
        return to_mermaid(self._op)

    @cached_property
    def svg(self) -> str:
        return to_svg(self._op)

    def _repr_svg_(self) -> str:
        return self.svg

    def __str__(self) -> str:
        return self.mermaid

    def __repr__(self) -> str:
        return f"<Graph of {sum(1 for _ in walk_ops(self._op))} ops; print() gives Mermaid, .svg a picture>"


def to_mermaid(root: Op) -> str:
    """The plan as a Mermaid flowchart."""
    ops = list(walk_ops(root))
    names = {id(op): f"op{number}" for number, op in enumerate(ops)}
    lines = ["flowchart TD"]
    for op in ops:
        text = "<br/>".join(_mermaid_text(line) for line in _lines(op))
        left, right = ("[(", ")]") if not inputs(op) else ("[", "]")
        lines.append(f'    {names[id(op)]}{left}"{text}"{right}')
    lines += [f"    {names[id(below)]} --> {names[id(op)]}" for op in ops for below in inputs(op)]
    return "\n".join(lines)


def _mermaid_text(text: str) -> str:
    """Text inside of quotes, where Mermaid reads entities (written with #) and some HTML."""
    return "".join(f"#{ord(char)};" if char in '"<>&#`' else char for char in text)


def _lines(op: Op) -> list[str]:
    """The text of a box: the op's name, then what it does, cut to a few lines."""
    name, detail = describe(op)
    lines = wrap(detail, _WIDEST, break_on_hyphens=False)
    if len(lines) > _MOST_LINES:
        lines = [*lines[: _MOST_LINES - 1], lines[_MOST_LINES - 1][: _WIDEST - 4] + " ..."]
    return [name, *lines]


@dataclass(slots=True)
class _Box:
    """An op on the canvas; x is its middle, y its top."""

    lines: list[str]
    width: float
    height: float
    x: float = 0.0
    y: float = 0.0


def to_svg(root: Op) -> str:
    """The plan as an SVG picture that stands alone."""
    ops = list(walk_ops(root))
    boxes = {id(op): _box(_lines(op)) for op in ops}
    width, height = _place(root, ops, boxes)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {width:.0f} {height:.0f}" font-family="ui-monospace, monospace" font-size="12">'
    ]
    parts += [_edge(boxes[id(below)], boxes[id(op)]) for op in ops for below in inputs(op)]
    parts += [_draw(boxes[id(op)]) for op in ops]
    return "\n".join([*parts, "</svg>"])


def _box(lines: list[str]) -> _Box:
    return _Box(lines, max(map(len, lines)) * _CHAR + 2 * _PAD, len(lines) * _LINE + _PAD)


def _place(root: Op, ops: list[Op], boxes: dict[int, _Box]) -> tuple[float, float]:
    """Give every box its place; the size of the canvas."""
    distance = {id(root): 0}
    for op in reversed(ops):  # users before their inputs: the longest way to the result decides the row
        for below in inputs(op):
            distance[id(below)] = max(distance.get(id(below), 0), distance[id(op)] + 1)
    right_edge = [0.0] * (max(distance.values()) + 1)
    for op in ops:  # inputs first: an op stands in the middle below them, a source right of what its row has
        box, row = boxes[id(op)], distance[id(op)]
        above = [boxes[id(below)].x for below in inputs(op)]
        start = max(right_edge) if not above else right_edge[row]
        left = start + (_GAP_X if start else _PAD)
        wanted = sum(above) / len(above) if above else 0.0
        box.x = max(wanted, left + box.width / 2)
        right_edge[row] = box.x + box.width / 2
    y = float(_PAD)
    for row in range(len(right_edge) - 1, -1, -1):
        in_row = [boxes[id(op)] for op in ops if distance[id(op)] == row]
        for box in in_row:
            box.y = y
        y += max(box.height for box in in_row) + _GAP_Y
    return max(right_edge) + _PAD, y - _GAP_Y + _PAD


def _edge(above: _Box, below: _Box) -> str:
    """A curve from the bottom of one box to the top of the next, with an arrow head."""
    x0, y0, x1, y1 = above.x, above.y + above.height, below.x, below.y
    bend = (y1 - y0) / 2
    return (
        f'<path d="M{x0:.1f},{y0:.1f} C{x0:.1f},{y0 + bend:.1f} {x1:.1f},{y1 - bend:.1f} {x1:.1f},{y1:.1f}" '
        f'fill="none" stroke="#71717a"/>'
        f'<path d="M{x1 - 4:.1f},{y1 - 6:.1f} L{x1:.1f},{y1:.1f} L{x1 + 4:.1f},{y1 - 6:.1f}" '
        f'fill="none" stroke="#71717a"/>'
    )


def _draw(box: _Box) -> str:
    fill, border = _COLOURS.get(box.lines[0], _OTHER)
    left = box.x - box.width / 2
    text = "".join(
        f'<text x="{left + _PAD:.1f}" y="{box.y + (number + 1) * _LINE:.1f}" xml:space="preserve" '
        f'font-weight="{"normal" if number else "bold"}" fill="#18181b">{escape(line)}</text>'
        for number, line in enumerate(box.lines)
    )
    return (
        f'<rect x="{left:.1f}" y="{box.y:.1f}" width="{box.width:.1f}" height="{box.height:.1f}" rx="6" '
        f'fill="{fill}" stroke="{border}"/>{text}'
    )
