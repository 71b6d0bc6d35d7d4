"""The order of a table's rows by key and time, whatever the spans of both, against numpy's."""

from __future__ import annotations

import numpy as np
import pytest

from scalein.exec.join_build import _order
from scalein.options import Options


@pytest.mark.parametrize("in_order", [True, False], ids=["in order of time", "in any order"])
@pytest.mark.parametrize(("keys", "times"), [(1, 1), (3, 10), (1 << 20, 1 << 44), (1 << 44, 3), (1 << 62, 1 << 62)],
                         ids=str)
def test_rows_are_in_the_order_of_key_and_time(keys: int, times: int, in_order: bool) -> None:
    rng = np.random.default_rng(keys % 97 + times)
    for count in (1, 2, 1000):
        number = rng.integers(-keys // 2, keys // 2 + 1, count)
        time = rng.integers(-times, times + 1, count)
        time = np.sort(time) if in_order else time
        if keys <= 3:
            number = number.astype(np.int32)
        found = _order(number, time, Options.make())
        if found is None:
            assert max(keys, times) > 1 << 50, "one column with the number of a row needs more than a word"
        else:
            assert found.tolist() == np.lexsort((time, number)).tolist()
