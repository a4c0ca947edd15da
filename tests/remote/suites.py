"""The suites of the contract that fit every remote tier."""

from collections.abc import Callable
from typing import Any

import pytest

from kvtier.testing.conformance import (
    BackendConformance,
    DescribedConformance,
    DurableBackendConformance,
    NamespacedConformance,
)


class RemoteSuites(BackendConformance, DurableBackendConformance, NamespacedConformance, DescribedConformance):
    """A tier on a server of its own. A subclass gives `open_tier`, which is given the chunks' length and `fields`."""

    chunk_bytes = 8_192

    @pytest.fixture
    def open_tier(self) -> Callable[..., Any]:
        raise NotImplementedError

    @pytest.fixture
    def fields(self) -> dict[str, Any]:
        return {}

    @pytest.fixture
    async def reopen(self, open_tier, fields):
        tiers = []

        async def reopen():
            if tiers:
                await tiers[-1].aclose(10)
            tiers.append(await open_tier(chunk_bytes=self.chunk_bytes, **fields))
            return tiers[-1]

        return reopen

    @pytest.fixture
    async def backend(self, reopen):
        return await reopen()

    @pytest.fixture
    async def neighbour(self, backend, open_tier, fields):
        return await open_tier(model_name="other", chunk_bytes=self.chunk_bytes, **fields)
