"""The file tier keeps the contract, as it comes and with every option the other way."""

import pytest

from kvtier.testing.conformance import (
    BackendConformance,
    DurableBackendConformance,
    InventoryConformance,
    MeasuredConformance,
    NamespacedConformance,
    tier_context,
)
from kvtier_backends.fs import FsBackend, FsOptions


class Suites(
    BackendConformance,
    DurableBackendConformance,
    NamespacedConformance,
    InventoryConformance,
    MeasuredConformance,
):
    """Every suite that fits, over one directory; a subclass says how it is used."""

    chunk_bytes = 8_192

    def options(self, root: str) -> FsOptions:
        return FsOptions(root=root)

    @pytest.fixture
    async def reopen(self, tmp_path):
        opened = []

        async def reopen():
            if opened:
                await opened[-1].aclose(10)
            opened.append(await FsBackend.open(self.options(str(tmp_path)), tier_context(self.chunk_bytes)))
            return opened[-1]

        yield reopen
        for tier in opened:
            await tier.aclose(10)

    @pytest.fixture
    async def backend(self, reopen):
        return await reopen()

    @pytest.fixture
    async def neighbour(self, backend, tmp_path):
        context = tier_context(self.chunk_bytes, model_name="other")
        tier = await FsBackend.open(self.options(str(tmp_path)), context)
        yield tier
        await tier.aclose(10)


class TestFs(Suites):
    """As it comes."""


class TestFsWithEveryOptionTheOtherWay(Suites):
    def options(self, root: str) -> FsOptions:
        return FsOptions(
            root=root,
            io="buffered",
            fsync=True,
            corrupt="quarantine",
            unverified="accept",
            load_lanes=1,
            store_lanes=1,
        )
