"""Copies between an engine's KV caches and the primary's rows."""

from kvtier.transfer.blocks import NO_BLOCKS, GroupBlocks
from kvtier.transfer.jobs import Kind, TransferResult
from kvtier.transfer.slots import SlotLayout, slot_layout
from kvtier.transfer.worker import TransferWorker

__all__ = ["NO_BLOCKS", "GroupBlocks", "Kind", "SlotLayout", "TransferResult", "TransferWorker", "slot_layout"]
