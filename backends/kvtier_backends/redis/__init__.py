"""Chunks in Redis or Valkey, sealed: one server, several by name, behind Sentinel, or a cluster."""

from kvtier_backends.redis.backend import RedisBackend
from kvtier_backends.redis.options import RedisOptions

__all__ = ["RedisBackend", "RedisOptions"]
