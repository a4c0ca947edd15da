"""The contract, on a server: `VALKEY_URL=redis://127.0.0.1 python -m pytest` here."""

import os
import uuid

import pytest_asyncio
from valkey_backend import ValkeyBackend, ValkeyOptions

from kvtier.testing.conformance import (
    BackendConformance,
    DurableBackendConformance,
    NamespacedConformance,
    tier_context,
)


class TestValkey(BackendConformance, DurableBackendConformance, NamespacedConformance):
    @pytest_asyncio.fixture
    async def opened(self):
        tiers, test = [], uuid.uuid4().hex  # No test meets the chunks of another.

        async def opened(model_name="conformance"):
            context = tier_context(self.chunk_bytes, model_name=f"{test}/{model_name}")
            options = ValkeyOptions(url=os.environ["VALKEY_URL"])
            tiers.append(await ValkeyBackend.open(options, context))
            return tiers[-1]

        yield opened
        for tier in tiers:
            await tier.aclose(deadline_s=10)

    @pytest_asyncio.fixture
    async def backend(self, opened):
        return await opened()

    @pytest_asyncio.fixture
    async def reopen(self, backend, opened):
        tiers = [backend]

        async def reopen():
            await tiers[-1].aclose(deadline_s=10)
            tiers.append(await opened())
            return tiers[-1]

        return reopen

    @pytest_asyncio.fixture
    async def neighbour(self, backend, opened):
        return await opened("other")
