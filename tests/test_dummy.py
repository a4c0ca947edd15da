
import msgspec
import pytest

from kvtier.testing.conformance import (
    BackendConformance,
    BoundedConformance,
    DurableBackendConformance,
    InventoryConformance,
    MeasuredConformance,
    NamespacedConformance,
    tier_context,
)
from kvtier_backends.dummy import DummyBackend, DummyOptions, forget_store

DEVICE = DummyOptions(latency_s=0.001, bandwidth_bytes_per_s=200_000_000, concurrency=4)


class Suites(
    BackendConformance,
    DurableBackendConformance,
    NamespacedConformance,
    InventoryConformance,
    MeasuredConformance,
    BoundedConformance,
):
    """Every suite there is, over one named store; a subclass says how fast the device is."""

    chunk_bytes = 8_192
    options: DummyOptions

    @pytest.fixture
    async def reopen(self):
        forget_store("suite")
        opened = []

        async def reopen():
            if opened:
                await opened[-1].aclose(10)
            opened.append(DummyBackend(self.named(), tier_context(self.chunk_bytes)))
            return opened[-1]

        yield reopen
        for tier in opened:
            await tier.aclose(10)

    @pytest.fixture
    async def backend(self, reopen):
        return await reopen()

    @pytest.fixture
    async def neighbour(self, backend):
        tier = DummyBackend(self.named(), tier_context(self.chunk_bytes, model_name="other"))
        yield tier
        await tier.aclose(10)

    @pytest.fixture
    async def small(self):
        capacity_bytes = self.room_chunks * self.chunk_bytes
        context = tier_context(self.chunk_bytes)
        return DummyBackend(self.named(store=None, capacity_bytes=capacity_bytes), context)

    def named(self, **changes):
        return msgspec.structs.replace(self.options, **{"store": "suite", **changes})


class TestAnInstantDummy(Suites):
    options = DummyOptions()


@pytest.mark.virtual_time
class TestADeviceInVirtualTime(Suites):
    options = DEVICE


class TestADeviceInRealTime(BackendConformance):
    chunk_bytes = 8_192

    @pytest.fixture
    async def backend(self):
        tier = DummyBackend(DEVICE, tier_context(self.chunk_bytes))
        yield tier
        await tier.aclose(10)
