"""Eviction policies: the contract, the built-in ones, policies by name, and their orders of small numbers."""

from kvtier.policies.density import Density
from kvtier.policies.ghosts import ARC, S3FIFO
from kvtier.policies.leaving import Leaving
from kvtier.policies.numbered import KeyOrder, LinkedLRU, NumberOrder, number_order
from kvtier.policies.plain import FIFO, LFU, LRU
from kvtier.policies.policy import Hint, Hinted, Policy, known_policies, policy_class

__all__ = [
    "ARC",
    "FIFO",
    "LFU",
    "LRU",
    "S3FIFO",
    "Density",
    "Hint",
    "Hinted",
    "KeyOrder",
    "Leaving",
    "LinkedLRU",
    "NumberOrder",
    "Policy",
    "known_policies",
    "number_order",
    "policy_class",
]
