"""Eviction policies: the contract, built-in policies, policies by name, and orders of small numbers."""

from kvtier.policies.density import Density as Density
from kvtier.policies.hinted import EvictionQueue as EvictionQueue
from kvtier.policies.hinted import HintedOrder as HintedOrder
from kvtier.policies.hinted import Retained as Retained
from kvtier.policies.hinted import Sessions as Sessions
from kvtier.policies.numbered import LinkedLRU as LinkedLRU
from kvtier.policies.numbered import NumberOrder as NumberOrder
from kvtier.policies.numbered import number_order as number_order
from kvtier.policies.plain import ARC as ARC
from kvtier.policies.plain import FIFO as FIFO
from kvtier.policies.plain import LRU as LRU
from kvtier.policies.plain import S3FIFO as S3FIFO
from kvtier.policies.policy import Policy as Policy
from kvtier.policies.policy import known_policies as known_policies
from kvtier.policies.policy import policy_class as policy_class
from kvtier.policies.policy import require_policy as require_policy
from kvtier.settings.hints import Hint as Hint
