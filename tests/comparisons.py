"""What differential tests really compared, counted; `tests/conftest.py` reports it at the end."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class Comparisons:
    """`oracle` counts engine = oracle, `duckdb` oracle = DuckDB; `untranslated` could not be asked of DuckDB."""

    count: Counter[str] = field(default_factory=Counter)

    @property
    def total(self) -> int:
        return self.count["oracle"] + self.count["duckdb"]


COMPARISONS = Comparisons()
