"""Cards: how jobs and stores appear in a notebook, redrawn in place while they work.

A card is HTML with inline styles, legible on light and dark backgrounds. IPython is used where it runs already, and
never imported. Outside of a notebook the object's text is shown, and where a notebook has no kernel of IPython's, a
card that stays as it was drawn.
"""

from __future__ import annotations

import sys
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any
from weakref import WeakMethod

REDRAW_S = 0.25  # a card is redrawn at most this often, but for its last state
_COLORS = {"running": "#2e9e5b", "open": "#2e9e5b", "finished": "#3b7dd8", "failed": "#d64545", "damaged": "#d64545"}
_GRAY = "#888888"
_BOX = "display:inline-block;min-width:26em;border:1px solid #8886;border-radius:6px;padding:8px 14px;font-size:13px"
_GRID = "display:grid;grid-template-columns:max-content auto;column-gap:1.5em;margin-top:4px"
_NOTE = "margin-top:6px;max-width:44em;white-space:pre-wrap"
_MUTED = "opacity:0.65"
_WIDTH, _HEIGHT = 160, 28  # of the line of rates, in pixels


@dataclass(frozen=True, slots=True)
class Card:
    """A state and some facts about an object."""

    title: str
    status: str
    place: str  # the directory it lives in, or ""
    facts: Sequence[tuple[str, str]]
    note: str = ""
    rates: Sequence[float] = ()  # drawn as a line

    @property
    def html(self) -> str:
        color = _COLORS.get(self.status, _GRAY)
        head = (f'<b>{escape(self.title)}</b> <span style="color:{color}">&#9679; {escape(self.status)}</span> '
                f'<span style="{_MUTED}">{escape(self.place)}</span>')
        cells = "".join(f'<span style="{_MUTED}">{escape(name)}</span><span>{escape(value)}</span>'
                        for name, value in self.facts)
        note = f'<div style="{_NOTE}">{escape(self.note)}</div>' if self.note else ""
        return (f'<div style="{_BOX}"><div>{head}</div><div style="display:flex;gap:2em;align-items:flex-end">'
                f'<div style="{_GRID}">{cells}</div>{_line(self.rates, color)}</div>{note}</div>')


def _line(rates: Sequence[float], color: str) -> str:
    """The rates as a line from left to right, from 0 to the greatest."""
    if len(rates) < 2:
        return ""
    top = max(rates) or 1.0
    points = " ".join(f"{_WIDTH * number / (len(rates) - 1):.0f},{1 + (_HEIGHT - 2) * (1 - rate / top):.1f}"
                      for number, rate in enumerate(rates))
    return (f'<svg width="{_WIDTH}" height="{_HEIGHT}"><polyline points="{points}" fill="none" stroke="{color}" '
            'stroke-width="1.5"/></svg>')


class Display:
    """The card of one object in all outputs of a notebook that show it, redrawn together.

    It is redrawn by calls of `update`, and at the end of every cell, until `close`, or until the object is gone.
    """

    def __init__(self, draw: Callable[[], tuple[str, str]]) -> None:
        """`draw` is a method of the object: the card as HTML, and the object as plain text."""
        self._draw = WeakMethod(draw)
        self._id = uuid.uuid4().hex
        self._shell: Any = None  # IPython's, once the card has been shown
        self._drawn_s = 0.0
        self._lock = threading.RLock()  # what is published last was drawn last

    def show(self) -> None:
        """Show the card in the output of the current cell.

        Raises NotImplementedError where there is no notebook: IPython then asks for `_repr_html_` and `repr`.
        """
        shell = notebook_shell()
        if shell is None:
            raise NotImplementedError
        if self._shell is None:
            self._shell = shell
            shell.events.register("post_run_cell", self._redraw)
        self._publish(shell, update=False)

    def update(self) -> None:
        """Redraw the card, unless that was done just now."""
        if self._shell is not None and time.monotonic() - self._drawn_s > REDRAW_S:
            self._redraw()

    def close(self) -> None:
        """Draw the last state."""
        with self._lock:
            shell, self._shell = self._shell, None
            if shell is not None:
                self._publish(shell, update=True)
                shell.events.unregister("post_run_cell", self._redraw)

    def _redraw(self, *result: object) -> None:  # IPython passes the result of the cell
        with self._lock:
            if self._shell is None:
                return
            if self._draw() is None:
                self.close()
            else:
                self._publish(self._shell, update=True)

    def _publish(self, shell: Any, update: bool) -> None:
        with self._lock:
            draw = self._draw()
            if draw is not None:
                self._drawn_s = time.monotonic()
                html, text = draw()
                shell.display_pub.publish({"text/html": html, "text/plain": text}, transient={"display_id": self._id},
                                          update=update)


def notebook_shell() -> Any:
    """The shell of IPython in a notebook's kernel; None in a terminal, or where IPython does not run."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return shell if getattr(shell, "kernel", None) is not None else None


# --- amounts, as a person writes them


def format_bytes(size: float) -> str:
    """
    >>> format_bytes(1_500), format_bytes(12), format_bytes(3.2e9)
    ('1.5 kB', '12 bytes', '3.2 GB')
    """
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if size >= unit:
            return f"{size / unit:,.1f} {name}"
    return f"{size:.0f} bytes"


def format_seconds(seconds: float) -> str:
    """
    >>> format_seconds(0.0042), format_seconds(95), format_seconds(4e5)
    ('4.2 ms', '1.6 min', '4.6 days')
    """
    for unit, name in ((365 * 86_400, "years"), (86_400, "days"), (3_600, "h"), (60, "min")):
        if abs(seconds) >= 1.5 * unit:
            return f"{seconds / unit:,.1f} {name}"
    return f"{seconds:,.1f} s" if abs(seconds) >= 1 else f"{seconds * 1e3:,.1f} ms"
