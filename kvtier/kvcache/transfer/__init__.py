"""Transfers between KV caches and the primary's rows: paired (`pages`), queued (`jobs`), copied (`strided`, `cuda`)."""

from kvtier.kvcache.transfer.jobs import TransferResult
from kvtier.kvcache.transfer.pages import NO_BLOCKS, Direction, GroupBlocks, SlotLayout, slot_layout
from kvtier.kvcache.transfer.worker import CopiersOf, TransferWorker

__all__ = [
    "NO_BLOCKS",
    "CopiersOf",
    "Direction",
    "GroupBlocks",
    "SlotLayout",
    "TransferResult",
    "TransferWorker",
    "slot_layout",
]
