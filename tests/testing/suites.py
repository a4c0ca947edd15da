import pytest

from kvtier.testing import conformance


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
