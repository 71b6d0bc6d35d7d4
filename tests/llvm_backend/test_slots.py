"""Slots of frames: those that are declared may be unused, others are refused where they are named."""

from __future__ import annotations

import pytest

from scalein.errors import InternalError
from scalein.layout import Frame
from scalein.llvm_backend.fn import Fn


@pytest.mark.parametrize("name", ["out.capacity", "$qty.data", "$a\nb.bits", "out12.valid", "join0.name.known",
                                  "bag1.used", "log0.heap.left", "window.slice3", "ring.open"])  # fmt: skip
def test_a_declared_slot_may_be_unused(name: str) -> None:
    frame = Frame(("row",)).new()
    frame[name] = 7
    assert name not in frame
    assert frame.get(name, 5) == 5


@pytest.mark.parametrize("name", ["out.capcity", "qty.data", "$qty.dta", "out.places", "outk.valid", "rings.open", ""])
def test_an_unknown_slot_is_refused(name: str) -> None:
    frame = Frame(("row",)).new()
    with pytest.raises(InternalError, match="no slot of a frame"):
        frame[name] = 7
    with pytest.raises(InternalError, match="no slot of a frame"):
        frame.get(name, 0)
    with pytest.raises(InternalError, match="no slot of a frame"):
        Fn("kernel").slot(name)
    with pytest.raises(InternalError, match="has no slot"):
        frame[name]


def test_a_slot_that_is_used_keeps_its_word() -> None:
    frame = Frame(("row", "out3.valid")).new()
    frame["out3.valid"] = -1
    assert (frame["row"], frame["out3.valid"]) == (0, -1)
