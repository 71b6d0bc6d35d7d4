"""Distinct: the first row of each key."""

from __future__ import annotations

from collections.abc import Iterable

import pyarrow as pa

from scalein.arrow_rows import filtered, from_numpy
from scalein.exec.fragments import Fragment
from scalein.exec.local_state import backend_of
from scalein.exec.operator import (
    Batches,
    Context,
    FragmentRunner,
    Morsel,
    SnapshotFuture,
    Stateless,
    downstream_of,
    executes,
    reads,
    run_by_watermark,
)
from scalein.ir import ops
from scalein.storage.checked_json import Json


@executes(ops.Distinct)
class Distinct(Stateless):
    """Rows whose keys were not seen before; the keys so far are state."""

    def __init__(self, fragment: Fragment, context: Context, state: Json, emit: str = "final") -> None:
        super().__init__(downstream_of(fragment), context)
        assert isinstance(fragment.state, ops.Distinct)
        self._keys = list(fragment.state.keys)
        self._fresh = FragmentRunner(fragment.state, context)
        self._may_repeat = context.failed is not None  # without rows that fail, the parts of a batch run one by one
        self.reads = reads(self._fresh.program.node)
        self.never_forgotten = 0
        schema = fragment.state.schema.arrow
        self._seen = backend_of(context).key_set(pa.schema([schema.field(name) for name in self._keys]))
        self.restore(state)

    def restore(self, state: Json) -> None:
        self._seen.restore(state)

    def rows(self, morsels: Iterable[Morsel]) -> list[Morsel]:
        return run_by_watermark(morsels, self._new)

    def _new(self, batches: Batches) -> Batches:
        fresh = [batch for batch in self._fresh.run(batches) if batch.num_rows]
        if len(fresh) > 1 and not self._may_repeat:
            fresh = [pa.concat_batches(fresh)]
        new = [filtered(rows, from_numpy(self._seen.insert(rows.select(self._keys)))) for rows in fresh]
        self.never_forgotten += sum(rows.num_rows for rows in new)
        return self._runner.run(new)

    @property
    def state_bytes(self) -> int:
        return self._seen.memory_bytes

    def snapshot(self) -> SnapshotFuture:
        return self._seen.snapshot()

    def retain(self, kept: list[Json]) -> None:
        self._seen.retain(kept)

    def close(self) -> None:
        self._seen.close()
