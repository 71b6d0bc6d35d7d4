"""Ring: the last values of a key, as a field of a class for `process`."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from scalein.errors import BadArgument, here

T = TypeVar("T")
MAX_RING = 1 << 12  # values: a ring is copied with every row that appends to it


@dataclass(frozen=True)
class RingOf:
    """The type of a field: `si.Ring[float, 16]`."""

    element: type
    size: int

    def __repr__(self) -> str:
        return f"si.Ring[{self.element.__name__}, {self.size}]"


class Ring(Generic[T]):
    """The last values that were appended, as a field of a class: `recent: si.Ring[float, 16]`.

    It has `append`, `len`, items by number (the oldest is 0, the newest -1), iteration from the oldest, and
    `sum`, `min` and `max`. Values are of type float or int.

    >>> import pyarrow as pa, scalein as si
    >>> @si.process
    ... class Recent:
    ...     last: si.Ring[float, 2]
    ...
    ...     def on_row(self, row):
    ...         self.last.append(row.x)
    ...         yield {"mean": sum(self.last) / len(self.last)}
    >>> flow = si.from_arrow(pa.table({"k": [1, 1, 1], "x": [1.0, 3.0, 5.0]}))
    >>> flow.group_by("k").process(Recent).collect()["mean"].to_pylist()
    [1.0, 2.0, 4.0]
    """

    def __init__(self, size: int | None = None) -> None:
        self._values: deque[Any] = deque(maxlen=size)

    def __class_getitem__(cls, given: Any) -> Any:
        if not isinstance(given, tuple) or len(given) != 2:
            raise BadArgument("a ring has a type and a size", at=here(), found=repr(given), hint="si.Ring[float, 16]")
        element, size = given
        if element not in (float, int) or type(size) is not int or not 0 < size <= MAX_RING:
            raise BadArgument(f"a ring has floats or ints, 1 to {MAX_RING} of them", at=here(), found=repr(given),
                              hint="si.Ring[float, 16]")
        return RingOf(element, size)

    def append(self, value: T) -> None:
        """Add a value; the oldest goes if the ring is full."""
        self._values.append(value)

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, index: int) -> T:
        return self._values[index]  # type: ignore[no-any-return]

    def __iter__(self) -> Iterator[T]:
        return iter(list(self._values))

    def __repr__(self) -> str:
        return f"Ring({list(self._values)})"
