"""Eviction: pure, synchronous, one small class each. `kvtier.policies.named` finds them by name."""

from kvtier.policies.base import Policy

__all__ = ["Policy"]
