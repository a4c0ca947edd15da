"""Tiers that share a keeper keep the contract: the memory's and the segments'."""

from functools import partial

import pytest

from kvtier.testing import conformance
from kvtier_backends.fs import FsBackend, MemoryBackend
from kvtier_backends.fs.host.meeting import Place
from tests.testing.suites import Reopened, open_with

__all__ = ["open_with"]


@pytest.fixture
def kept_pool(keep, pool):
    keep(Place.of_pool(pool))
    return pool


@pytest.fixture
def kept_root(keep, root):
    keep(Place(str(root)))
    return root


class Suites(
    Reopened,
    conformance.BackendConformance,
    conformance.NamespacedConformance,
    conformance.InventoryConformance,
    conformance.MeasuredConformance,
    conformance.DescribedConformance,
):
    chunk_bytes = 8_192


class TestSharedMemory(Suites):
    @pytest.fixture
    def open_tier(self, kept_pool, open_with):
        return partial(open_with, MemoryBackend, shared=True, pool=kept_pool, capacity_bytes="64MiB", chunk_bytes=8_192)


class TestSharedSegments(Suites, conformance.DurableBackendConformance):
    @pytest.fixture
    def open_tier(self, kept_root, open_with):
        return partial(open_with, FsBackend, root=str(kept_root), shared=True, layout="segments", chunk_bytes=8_192)


class Small:
    chunk_bytes = 65_536
    room_bytes = 24 * (65_536 + 8_192)


class TestSharedMemoryWithinACapacity(Small, conformance.BoundedConformance):
    @pytest.fixture
    async def small(self, kept_pool, open_with):
        options = {"shared": True, "pool": kept_pool, "capacity_bytes": self.room_bytes}
        return await open_with(MemoryBackend, chunk_bytes=self.chunk_bytes, **options)


class TestSharedSegmentsWithinACapacity(Small, conformance.BoundedConformance):
    @pytest.fixture
    async def small(self, kept_root, open_with):
        options = {"root": str(kept_root), "shared": True, "layout": "segments", "capacity_bytes": self.room_bytes}
        return await open_with(FsBackend, chunk_bytes=self.chunk_bytes, **options)


class TestSharedMemoryByAdvice(TestSharedMemoryWithinACapacity, conformance.AdvisedConformance):
    pass
