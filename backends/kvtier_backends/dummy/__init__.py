"""A tier in memory that keeps real bytes and takes the time that a device would: a model of any device."""

from kvtier_backends.dummy.backend import DummyBackend, DummyOptions
from kvtier_backends.dummy.store import forget_store

__all__ = ["DummyBackend", "DummyOptions", "forget_store"]
