from contextlib import AsyncExitStack

import pytest

from kvtier.testing import conformance
from kvtier.testing.conformance import tier_context

CHUNK_BYTES = 16_384
CLOSE_S = 10.0


@pytest.fixture
async def open_with():
    async with AsyncExitStack() as tiers:

        async def open_with(tier, *, model_name="conformance", chunk_bytes=CHUNK_BYTES, **fields):
            opened = await tier.open(tier.options_type(**fields), tier_context(chunk_bytes, model_name=model_name))
            tiers.push_async_callback(opened.aclose, CLOSE_S)
            return opened

        yield open_with


class Reopened:
    """Needs the fixture `open_tier`: an async function that opens a tier, of `model_name="other"` if it is told so."""

    @pytest.fixture
    def reopen(self, open_tier):
        opened = []

        async def reopen():
            if opened:
                await opened[-1].aclose(10)
            opened.append(await open_tier())
            return opened[-1]

        return reopen

    @pytest.fixture
    async def backend(self, reopen):
        return await reopen()

    @pytest.fixture
    async def neighbour(self, backend, open_tier):
        return await open_tier(model_name="other")


class Promises(
    Reopened,
    conformance.BackendConformance,
    conformance.DurableBackendConformance,
    conformance.NamespacedConformance,
    conformance.InventoryConformance,
    conformance.MeasuredConformance,
    conformance.BoundedConformance,
    conformance.AdvisedConformance,
):
    """All suites of a tier in a named store."""
