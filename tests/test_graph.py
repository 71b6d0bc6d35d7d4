"""Pictures of plans: well-formed, escaped, one box an op."""

from __future__ import annotations

from xml.etree import ElementTree

import scalein as si
from scalein import col
from scalein.api.flow import Flow
from scalein.api.graph import Graph, to_mermaid, to_svg
from scalein.ir.rewrite import walk_ops
from tests.conftest import Golden
from tests.ir.plans import events, users

SVG = "{http://www.w3.org/2000/svg}"


def report() -> Flow:
    shared = events().filter((col("qty") < 9) & (col("user") == 'a"<&'))
    return shared.union(shared.limit(5)).join(users(), on="user").group_by("city").agg(n=si.count())


def test_mermaid(golden: Golden) -> None:
    assert to_mermaid(report().op) == golden


def test_svg_is_well_formed_and_has_a_box_for_each_op() -> None:
    root = ElementTree.fromstring(to_svg(report().op))
    boxes = root.findall(f"{SVG}rect")
    assert len(boxes) == sum(1 for _ in walk_ops(report().op))
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    for box in boxes:
        assert 0 <= float(box.attrib["x"]) <= width - float(box.attrib["width"])
        assert 0 <= float(box.attrib["y"]) <= height - float(box.attrib["height"])


def test_boxes_do_not_overlap() -> None:
    root = ElementTree.fromstring(to_svg(report().op))
    areas = [[float(box.attrib[name]) for name in ("x", "y", "width", "height")] for box in root.findall(f"{SVG}rect")]
    for number, (x, y, w, h) in enumerate(areas):
        for x2, y2, w2, h2 in areas[number + 1 :]:
            assert x + w <= x2 or x2 + w2 <= x or y + h <= y2 or y2 + h2 <= y


def test_long_text_is_cut() -> None:
    flow = events().filter(col("qty").is_in(list(range(1000))))
    assert len(to_mermaid(flow.op)) < 1000


def test_graph_shows_itself() -> None:
    graph = Graph(report().op)
    assert graph._repr_svg_() == graph.svg
    assert str(graph) == graph.mermaid
    assert "7 ops" in repr(graph)
