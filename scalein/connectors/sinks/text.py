"""Arrow tables as aligned text, for the terminal."""

from __future__ import annotations

from collections.abc import Collection

import pyarrow as pa


def format_table(table: pa.Table, group_digits: Collection[str] = ()) -> str:
    """Column names, a rule, and one line a row: numbers to the right, everything else to the left.

    Numbers of the columns in `group_digits` get thousands separators.

    >>> print(format_table(pa.table({"page": ["home", None], "views": [12000, 7]}), group_digits={"views"}))
    page   views
    ────  ──────
    home  12,000
    null       7
    """
    columns = []
    for field in table.schema:
        style = "," if field.name in group_digits else ""
        cells = ["null" if value is None else format(value, style) for value in table[field.name].to_pylist()]
        width = max(map(len, [field.name, *cells]))
        is_number = pa.types.is_integer(field.type) or pa.types.is_floating(field.type)
        align = f">{width}" if is_number else f"<{width}"
        columns.append([format(field.name, align), "─" * width, *(format(cell, align) for cell in cells)])
    return "\n".join("  ".join(line).rstrip() for line in zip(*columns, strict=True))
