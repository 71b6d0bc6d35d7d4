"""Keyed state: a store of records by key that outgrows memory, takes snapshots while it runs, and reopens at once.

`LogStore` is the store; `open(path)` describes a store's directory. Start reading at `store.py`; `tiers.py` has the
read and write paths, `snapshot.py` and FORMAT.md the snapshots and files.
"""

from scalein.state.inspect import StoreInfo, open
from scalein.state.snapshot import Snapshot
from scalein.state.store import LogStore

__all__ = ["LogStore", "Snapshot", "StoreInfo", "open"]
