"""A picture of a plan, as Mermaid text or as SVG: sources at the top, the result at the bottom.

Plain Python, no layout engine: plans are trees with a few shared inputs, so a row for each distance from
the result, and inputs side by side above their user, is enough. Notebooks show `Graph` by its `_repr_svg_`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from html import escape
from textwrap import wrap

from scalein.ir.ops import Op
from scalein.ir.printer import with_aggregates
from scalein.ir.rewrite import walk_ops

_WIDEST = 44  # characters in a line of a box
_MAX_LINES = 4
_HARD_SPACE, _EQUALS = "\u00a0", re.compile(" ([=!<>]=?) ")
_CHAR, _LINE, _PAD, _GAP_X, _GAP_Y = 7.3, 16, 10, 24, 36  # pixels, for a monospaced font of 12
_LANE, _SPREAD = 12, 28  # room for an arrow that passes other boxes; between the arrows that end at one box

# Fill and border by what an op does to rows: brings them, picks them, changes them, keeps state.
_COLOURS = {
    "Source": ("#e3f2e6", "#3d8b50"),
    "Filter": ("#fdf3d7", "#b58a1b"),
    "Limit": ("#fdf3d7", "#b58a1b"),
    "Distinct": ("#e2ecfa", "#3a6fb5"),
    "Sort": ("#e2ecfa", "#3a6fb5"),
    "Aggregate": ("#e2ecfa", "#3a6fb5"),
    "Join": ("#e2ecfa", "#3a6fb5"),
    "OuterJoin": ("#e2ecfa", "#3a6fb5"),
    "Over": ("#e2ecfa", "#3a6fb5"),
    "Process": ("#e2ecfa", "#3a6fb5"),
    "StreamJoin": ("#e2ecfa", "#3a6fb5"),
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
        left, right = ("[(", ")]") if not op.inputs else ("[", "]")
        lines.append(f'    {names[id(op)]}{left}"{text}"{right}')
    lines += [f"    {names[id(below)]} --> {names[id(op)]}" for op in ops for below in op.inputs]
    return "\n".join(lines)


def _mermaid_text(text: str) -> str:
    """Text inside of quotes, where Mermaid reads entities (written with #) and some HTML."""
    return "".join(f"#{ord(char)};" if char in '"<>&#`' else char for char in text)


def _lines(op: Op) -> list[str]:
    """The text of a box: the op's name, then what it does, cut to a few lines."""
    name, detail = op.describe()
    detail = with_aggregates(detail, op)
    # No line ends beside an equals sign, and `wrap` breaks at no other space than this one.
    lines = [line.replace(_HARD_SPACE, " ")
             for line in wrap(_EQUALS.sub(rf"{_HARD_SPACE}\1{_HARD_SPACE}", detail), _WIDEST, break_on_hyphens=False)]
    if len(lines) > _MAX_LINES:
        lines = [*lines[: _MAX_LINES - 1], lines[_MAX_LINES - 1][: _WIDEST - 4] + " ..."]
    return [name, *lines]


@dataclass(slots=True)
class _Box:
    """An op on the canvas; x is its middle, y its top, row its distance from the result."""

    lines: list[str]
    width: float
    height: float
    row: int = 0
    x: float = 0.0
    y: float = 0.0


@dataclass(frozen=True, slots=True)
class _Layout:
    """Where everything is: boxes by op, tops and bottoms of rows, and where far arrows pass the rows between."""

    boxes: dict[int, _Box]
    tops: list[float]
    bottoms: list[float]
    lanes: dict[tuple[int, int], float]  # user, number of its input -> x
    width: float

    @property
    def height(self) -> float:
        return self.bottoms[0] + _PAD


def to_svg(root: Op) -> str:
    """The plan as an SVG picture that stands alone."""
    ops = list(walk_ops(root))
    layout = _place(ops, {id(op): _box(_lines(op)) for op in ops})
    width, height = f"{layout.width:.0f}", f"{layout.height:.0f}"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="ui-monospace, monospace" font-size="12">'
    ]
    parts += [_edge(layout, op, number) for op in ops for number in range(len(op.inputs))]
    parts += [_draw(layout.boxes[id(op)]) for op in ops]
    return "\n".join([*parts, "</svg>"])


def _box(lines: list[str]) -> _Box:
    return _Box(lines, max(map(len, lines)) * _CHAR + 2 * _PAD, len(lines) * _LINE + _PAD)


def _place(ops: list[Op], boxes: dict[int, _Box]) -> _Layout:
    """Give every box its place: an op in the middle below its inputs, which stand side by side.

    An input that several ops share stands above the one farthest from the result; to each of the others
    leads an arrow down a lane of its own, which takes the place of the input there.
    """
    owned: dict[tuple[int, int], bool] = {}
    for op in reversed(ops):  # users before their inputs: the longest way to the result decides the row
        for below in op.inputs:
            boxes[id(below)].row = max(boxes[id(below)].row, boxes[id(op)].row + 1)
    taken: set[int] = set()
    for op in ops:
        for number, below in enumerate(op.inputs):
            is_next = boxes[id(below)].row == boxes[id(op)].row + 1
            owned[id(op), number] = is_next and id(below) not in taken
            taken |= {id(below)} if owned[id(op), number] else set()
    spans: dict[int, float] = {}  # the width of an op with everything that stands above it

    def width_above(op: Op, number: int, below: Op) -> float:
        return spans[id(below)] if owned[id(op), number] else _LANE

    for op in ops:
        above = [width_above(op, number, below) for number, below in enumerate(op.inputs)]
        spans[id(op)] = max(boxes[id(op)].width, sum(above) + _GAP_X * (len(above) - 1))
    lefts = {id(ops[-1]): float(_PAD)}
    lanes: dict[tuple[int, int], float] = {}
    for op in reversed(ops):
        boxes[id(op)].x = lefts[id(op)] + spans[id(op)] / 2
        above = [width_above(op, number, below) for number, below in enumerate(op.inputs)]
        left = boxes[id(op)].x - (sum(above) + _GAP_X * (len(above) - 1)) / 2
        for number, (below, width) in enumerate(zip(op.inputs, above, strict=True)):
            if owned[id(op), number]:
                lefts[id(below)] = left
            else:
                lanes[id(op), number] = left + width / 2
            left += width + _GAP_X
    tops, bottoms = _place_rows(list(boxes.values()))
    return _Layout(boxes, tops, bottoms, lanes, spans[id(ops[-1])] + 2 * _PAD)


def _place_rows(boxes: list[_Box]) -> tuple[list[float], list[float]]:
    """Give every box its y; tops and bottoms of the rows, the result's first."""
    heights = [max(box.height for box in boxes if box.row == row) for row in range(1 + max(box.row for box in boxes))]
    tops = [_PAD + sum(heights[row + 1 :]) + _GAP_Y * (len(heights) - 1 - row) for row in range(len(heights))]
    for box in boxes:
        box.y = tops[box.row]
    return tops, [top + height for top, height in zip(tops, heights, strict=True)]


def _edge(layout: _Layout, op: Op, number: int) -> str:
    """An arrow from an input to its user; a curve where it changes sides, which is only between rows."""
    above, below = layout.boxes[id(op.inputs[number])], layout.boxes[id(op)]
    x1 = below.x + (number - (len(op.inputs) - 1) / 2) * _SPREAD
    lane = layout.lanes.get((id(op), number))
    path = f"M{above.x:.1f},{above.y + above.height:.1f} V{layout.bottoms[above.row]:.1f}"
    if lane is not None and above.row > below.row + 1:
        path += _curve(above.x, layout.bottoms[above.row], lane, layout.tops[above.row - 1])
        path += f" V{layout.bottoms[below.row + 1]:.1f}" + _curve(lane, layout.bottoms[below.row + 1], x1, below.y)
    else:
        path += _curve(above.x, layout.bottoms[above.row], x1, below.y)
    head = f"M{x1 - 4:.1f},{below.y - 6:.1f} L{x1:.1f},{below.y:.1f} L{x1 + 4:.1f},{below.y - 6:.1f}"
    return f'<path d="{path} {head}" fill="none" stroke="#71717a"/>'


def _curve(x0: float, y0: float, x1: float, y1: float) -> str:
    middle = (y0 + y1) / 2
    return f" C{x0:.1f},{middle:.1f} {x1:.1f},{middle:.1f} {x1:.1f},{y1:.1f}"


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
