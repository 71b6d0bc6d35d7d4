"""Testing flows: streams written as small tables and controlled by the test, a virtual clock, failpoints at which a job
crashes or pauses, and comparison of tables.

>>> import scalein as si
>>> from scalein import testing
>>> clicks = testing.stream('''
...     t    user
...     0    ann
...     7    bob
...     ---------
...     31   ann
...     ---------
...     2    -
... ''')
>>> seen, late = si.to_memory(), si.to_memory()
>>> flow = si.from_source(clicks).with_watermark("t", 5).group_by(si.tumbling("t", 10)).agg(n=si.count())
>>> flow.start(sink=seen, late=late).wait()
True
>>> testing.assert_same(seen.table(), testing.table('''
...     window_start  window_end  n
...     0             10          2
...     30            40          1
... '''))
>>> late.table().to_pylist()
[{'t': 2, 'user': None}]

Flows of several streams are played step by step, with what must come out beside what comes in: `check_steps`.
"""

from __future__ import annotations

from scalein.storage.failpoints import POINTS, Crashed
from scalein.testing.control import Clock, Pause, crash_at, pause_at
from scalein.testing.same import assert_same
from scalein.testing.steps import check_steps
from scalein.testing.streams import Stream, batches, stream, table, until

__all__ = ["POINTS", "Clock", "Crashed", "Pause", "Stream", "assert_same", "batches", "check_steps", "crash_at",
           "pause_at", "stream", "table", "until"]  # fmt: skip
