"""What is remembered: a store of records by key that outgrows memory, snapshots itself and reopens at once.

`LogStore` is the store; `open(path)` shows what a store's directory holds.
"""

from scalein.state.inspect import StoreInfo, open
from scalein.state.snapshot import Snapshot
from scalein.state.store import LogStore

__all__ = ["LogStore", "Snapshot", "StoreInfo", "open"]
