"""Transfers: copies between an LLM engine's KV caches and the primary's rows.

`worker` pairs blocks with rows, page by page (`pages`), and queues the transfer (`jobs`). A thread takes it and copies:
by index in host memory (`strided`), in batches to and from a CUDA device (`cuda`). Its result is polled.
"""

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
