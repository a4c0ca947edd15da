"""Chunks in a Mooncake Store, sealed: the memory of many hosts as one pool."""

from kvtier_backends.mooncake.backend import MooncakeBackend
from kvtier_backends.mooncake.client import MooncakeOptions

__all__ = ["MooncakeBackend", "MooncakeOptions"]
