"""Transfers: copies between an LLM engine's KV caches and the primary's rows."""

from kvtier.kvcache.transfer.jobs import Direction, TransferResult
from kvtier.kvcache.transfer.pages import NO_BLOCKS, GroupBlocks, SlotLayout, slot_layout
from kvtier.kvcache.transfer.worker import TransferWorker

__all__ = ["NO_BLOCKS", "Direction", "GroupBlocks", "SlotLayout", "TransferResult", "TransferWorker", "slot_layout"]
