"""Whatever the batches, workers, rounds, partitions, crashes and rescales: each way gives the rows of `collect`, or is
refused for the reason in the README. The rows keep the promise of the watermark, so none is late.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.conformance.matrix import in_readme, of_readme, reasons, written
from tests.conformance.shapes import SHAPES, Shape
from tests.engines import examples


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name.replace("`", ""))
@examples(1)
@given(seed=st.integers(0, 1 << 32), count=st.integers(0, 60))
def test_a_shape_gives_the_rows_of_collect_or_a_reason(shape: Shape, seed: int, count: int) -> None:
    assert reasons(shape, seed, count) == of_readme()[shape.name], "python -m tests.conformance writes the README anew"


def test_the_matrix_is_of_these_shapes() -> None:
    assert list(of_readme()) == [shape.name for shape in SHAPES]
    assert written(of_readme()) == in_readme()
