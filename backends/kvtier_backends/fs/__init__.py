"""A tier on any local or mounted file system, whose chunks are verified on the way back."""

from kvtier_backends.fs.backend import FsBackend
from kvtier_backends.fs.disk.footer import ChunkFault
from kvtier_backends.fs.layout import FsCounters
from kvtier_backends.fs.options import FsOptions

__all__ = ["ChunkFault", "FsBackend", "FsCounters", "FsOptions"]
