"""Chunks as files, verified on the way back: a tier on any local or mounted file system."""

from kvtier_backends.fs.backend import FsBackend
from kvtier_backends.fs.counters import FsCounters
from kvtier_backends.fs.disk.footer import Fault
from kvtier_backends.fs.options import FsOptions

__all__ = ["Fault", "FsBackend", "FsCounters", "FsOptions"]
