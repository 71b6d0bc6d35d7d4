"""What is remembered: a store of records by key that outgrows memory, snapshots itself and reopens at once."""

from scalein.state.snapshot import Snapshot
from scalein.state.store import LogStore

__all__ = ["LogStore", "Snapshot"]
