"""Eviction policies: the contract, the built-in ones, and policies by name."""

from kvtier.policies.ghosts import ARC, S3FIFO
from kvtier.policies.linked import RowLRU
from kvtier.policies.plain import FIFO, LFU, LRU
from kvtier.policies.policy import Policy, known_policies, policy_class

__all__ = ["ARC", "FIFO", "LFU", "LRU", "S3FIFO", "Policy", "RowLRU", "known_policies", "policy_class"]
