"""Tiers of slots and files: on any local or mounted file system, or in memory. Chunks are verified on the way back."""

from kvtier_backends.fs.backend import FsBackend, MemoryBackend
from kvtier_backends.fs.disk.footer import ChunkFault
from kvtier_backends.fs.layout import FsCounters
from kvtier_backends.fs.options import FsOptions, MemoryOptions

__all__ = ["ChunkFault", "FsBackend", "FsCounters", "FsOptions", "MemoryBackend", "MemoryOptions"]
