"""udf: generated Python functions, by the engine and the oracle, against CPython. See `tests/udf_programs.py`."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.engines import COMPILED, examples
from tests.udf_programs import differences, program


@examples(24)
@given(seed=st.integers(0, 10**8))
def test_compiled_functions_mean_what_python_means(seed: int) -> None:
    engine = COMPILED[seed % len(COMPILED)]
    made = program(seed)
    assert list(differences(made, 30, workers=engine.workers, cpu=engine.cpu)) == [], made.text
