"""The mooncake tier keeps the contract on a real pool, as it comes and with every option the other way."""

from typing import Any

import pytest

from kvtier.testing.conformance import (
    BackendConformance,
    CountedConformance,
    DescribedConformance,
    DurableBackendConformance,
    Lender,
    NamespacedConformance,
    key_of,
)
from tests.remote.servers import PATIENCE_S

KEYS = "KVTIER_TEST_MOONCAKE_KEYS"


class Suites(BackendConformance, DurableBackendConformance, NamespacedConformance, DescribedConformance):
    """Every suite that fits; a subclass says how the pool is used."""

    chunk_bytes = 8_192

    @pytest.fixture
    def fields(self) -> dict[str, Any]:
        return {}

    @pytest.fixture
    async def reopen(self, opened, fields):
        tiers = []

        async def reopen():
            if tiers:
                await tiers[-1].aclose(10)
            tiers.append(await opened(chunk_bytes=self.chunk_bytes, timeout_s=PATIENCE_S, **fields))
            return tiers[-1]

        return reopen

    @pytest.fixture
    async def backend(self, reopen):
        return await reopen()

    @pytest.fixture
    async def neighbour(self, backend, opened, fields):
        return await opened(model_name="other", chunk_bytes=self.chunk_bytes, timeout_s=PATIENCE_S, **fields)


class TestMooncake(Suites):
    """As it comes."""


class TestMooncakeWithEveryOptionTheOtherWay(Suites):
    """Encrypted, a chunk at a time, for another tenant."""

    @pytest.fixture
    def fields(self, monkeypatch) -> dict[str, Any]:
        monkeypatch.setenv(KEYS, "ab" * 32)
        return {
            "seal": "aes-256-gcm",
            "seal_key_env": KEYS,
            "lanes": 3,
            "staging_bytes": 2 * (self.chunk_bytes + 128),
            "tenant": "other",
        }


class TestMooncakeCounts(CountedConformance):
    """Corrupt chunks."""

    chunk_bytes = 8_192

    @pytest.fixture
    async def backend(self, opened):
        return await opened(chunk_bytes=self.chunk_bytes, timeout_s=PATIENCE_S)

    @pytest.fixture
    def provoke(self, backend, foreign):
        lender, key = Lender(self.chunk_bytes), key_of(1_000)

        async def provoke():
            await foreign(backend, key, bytes(self.chunk_bytes + 128))
            assert await lender.recall(backend, [key]) == ["ChunkCorrupt"]

        return provoke
