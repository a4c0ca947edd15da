"""Chunks in a bucket: S3 and compatible stores, Google Cloud Storage, Azure. An object is one sealed row."""

from kvtier_backends.object.backend import ObjectBackend
from kvtier_backends.object.options import ObjectOptions

__all__ = ["ObjectBackend", "ObjectOptions"]
