"""Eviction policies: the contract, built-in policies, policies by name, and orders of small numbers."""

from kvtier.policies.ahead import EvictionQueue
from kvtier.policies.density import Density
from kvtier.policies.ghosts import ARC, S3FIFO
from kvtier.policies.hinted import HintedOrder, Retained, Sessions
from kvtier.policies.numbered import LinkedLRU, NumberOrder, number_order
from kvtier.policies.plain import FIFO, LRU
from kvtier.policies.policy import Policy, known_policies, policy_class, require_policy
from kvtier.settings.hints import Hint

__all__ = [
    "ARC",
    "FIFO",
    "LRU",
    "S3FIFO",
    "Density",
    "EvictionQueue",
    "Hint",
    "HintedOrder",
    "LinkedLRU",
    "NumberOrder",
    "Policy",
    "Retained",
    "Sessions",
    "known_policies",
    "number_order",
    "policy_class",
    "require_policy",
]
